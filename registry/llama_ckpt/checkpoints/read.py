"""Reads a checkpoint for an engine: maps its files, verifies them, and takes the cells out in the engine's layout.

The checks of a file come in this order: is it complete, is it that of its row, is it of this input, does it fit this engine.
Only then are cells taken out of it. The engine gets nothing before all of that holds. No other module reads payloads for one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from llama_ckpt import formats
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import leases, usage
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import (
    BadInput,
    Conflict,
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    Incompatible,
    LlamaCkptError,
)
from llama_ckpt.fingerprint import TokenIds, common_prefix, differences, fingerprint
from llama_ckpt.formats import legacy
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import is_quantised
from llama_ckpt.metrics import Event
from llama_ckpt.values import Checkpoint, Fingerprint

log = logging.getLogger("llama_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """The cells that are wanted of a checkpoint: those of its first `n_tokens` tokens, which must start with `begins_with`.

    With `check_values`, NaN and infinite numbers are looked for. With `transpose_v`, the checkpoint may differ from the engine in
    flash attention, and in nothing else.
    """

    begins_with: TokenIds
    n_tokens: int
    check_values: bool = False
    transpose_v: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A state in a layout that an engine takes, and the token ids of its cells. The state may be a view into the mapped file."""

    state: memoryview
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class _ChainFile:
    """An open file of a chain of deltas. Its cells from the row's `start_token` to `end` - 1 are wanted."""

    row: Checkpoint
    file: formats.CheckpointFile
    end: int

    @property
    def token_ids(self) -> TokenIds:
        return self.file.contents.token_ids[: self.end - self.row.start_token]


class ChainReader:
    """One reading of a checkpoint, and of the checkpoints that it is a delta of.

    `current` is the row whose file is being read. After an error it is the row to blame, which may be a parent's. `events` has
    what was met in the files so far, also before an error.
    """

    def __init__(self, context: RegistryContext, row: Checkpoint) -> None:
        self._context, self._row = context, row
        self.current = row
        self.events: set[Event] = set()

    @contextmanager
    def cells(self, engine: HeldState, request: CellRequest) -> Iterator[Cells]:
        """The requested cells, joined if the checkpoint is a delta. They are valid inside the `with` only.

        Raises:
            FileMissing, UnsafePath, StoreUnavailable: a file is missing, has a path that is not the store's, or cannot be read.
            CorruptFile: a file is damaged, is not that of its row, or contains NaN or infinity.
            Incompatible, Unsupported: the files are valid, but do not fit this engine or these tokens.
            DatabaseUnavailable: the parents of a delta cannot be looked up.
        """
        with ExitStack() as files:
            cells = self._translated(engine, self._open(request.n_tokens, files), request)
            self.current = self._row  # from here on an error is about the joined cells
            yield cells

    @contextmanager
    def stored_cells(self) -> Iterator[tuple[Cells, formats.CheckpointFile]]:
        """All cells as they are stored, and the last of the files, inside the `with` only. Those of a delta are joined, in the
        layout of that file.

        Raises:
            FileMissing, UnsafePath, StoreUnavailable, CorruptFile, DatabaseUnavailable: as `cells`.
            Incompatible, Unsupported: the files of a delta have layouts that cannot be joined.
        """
        with ExitStack() as files:
            members = self._open(self._row.n_tokens, files)
            last = members[-1].file
            ranges = [
                kv_edit.CellRange(_in_dialect(m.file, last.state.layout), m.row.start_token, m.end) for m in members
            ]
            yield Cells(state=_joined(ranges, members), token_ids=_token_ids(members)), last

    def _open(self, n_tokens: int, files: ExitStack) -> list[_ChainFile]:
        """The files that contain the first `n_tokens` cells, opened and verified."""
        members = []
        for row, end in _ends(self._context.chain(self._row), n_tokens):
            self.current = row
            try:
                view = files.enter_context(self._context.store.map(row.file_path))
            except FileMissing:
                self._context.require_store()
                raise
            members.append(_ChainFile(row, self._verified(row, view), end))
        return members

    def _verified(self, row: Checkpoint, view: memoryview) -> formats.CheckpointFile:
        """The file, after its own checks and those against its row."""
        if old := legacy.read(view, row.file_path):
            self.events.add(Event.LEGACY_REFUSED)
            if "big" in (old.magic_order, old.version_order):
                self.events.add(Event.BYTE_ORDER_MET)
            raise CorruptFile(path=row.file_path, check="Header", reason=legacy.WHY_NEVER)
        file = formats.open_checkpoint(view, row.file_path)
        if file.contents.padding:
            log.info(
                "detected padding: %d byte(s) of zeros before the magic of %s", file.contents.padding, row.file_path
            )
            self.events.add(Event.PADDING_DETECTED)
        formats.require_agreement(file, row, row.file_path)
        return file

    def _translated(self, engine: HeldState, members: Sequence[_ChainFile], request: CellRequest) -> Cells:
        """The cells of all files in the engine's layout, joined."""
        token_ids = _token_ids(members)
        _require_tokens(token_ids, request)
        ranges = []
        for member in members:
            self.current = member.row
            ranges.append(self._range(engine, member, request))
        state, first = _joined(ranges, members), members[0]
        if first.file.fingerprint.digest != engine.fingerprint.digest:
            state = kv_edit.transpose_v(state, transposed=not first.file.state.v_transposed)
        return Cells(state=state, token_ids=token_ids)

    def _range(self, engine: HeldState, member: _ChainFile, request: CellRequest) -> kv_edit.CellRange:
        """The cells of one file in the engine's layout, if the file fits the engine."""
        row, file = member.row, member.file
        _require_fit(file, engine, row, transpose_v=request.transpose_v)
        if request.check_values and (bad := kv_values.first_not_finite(file.contents.payload, file.state)):
            raise CorruptFile(path=row.file_path, check="Values", reason=f"{bad} is no finite number")
        if file.contents.metadata.get("engine") != engine.engine_name:
            self.events.add(Event.OTHER_VERSION_MET)
        state = file.contents.payload
        if file.state.layout != engine.layout or file.state.rotation_words not in (None, engine.rotation):
            state = _translate(state, file, engine)
            self.events.add(Event.STATE_TRANSLATED)
        return kv_edit.CellRange(state, row.start_token, member.end)


# -- leases --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Use:
    """A leased checkpoint in use. What is set here is recorded when the lease ends: whether it was a hit, and the events."""

    until_us: int
    is_hit: bool = False
    events: set[Event] = field(default_factory=set)


@contextmanager
def leased(context: RegistryContext, row: Checkpoint, if_stale: LlamaCkptError) -> Iterator[Use]:
    """A lease on a row while the block reads its files: until then no save or gc takes them away. However the block ends, the
    lease is given back, and the `Use` is recorded with it. If that fails, the log says so: only a statistic is lost, and the
    lease ends by itself. `if_stale` is the error to raise if the row is not ACTIVE any more.

    Raises:
        DatabaseUnavailable: the row cannot be leased.
    """
    with context.database.write() as db:
        until_us = leases.lease(db, row)
    if until_us is None:
        raise if_stale
    context.hook("leased")
    use = Use(until_us)
    try:
        yield use
    finally:
        for event in use.events:
            context.metrics.count(event.value)
        try:
            _record(context, row, use)
        except DatabaseUnavailable as error:
            log.warning("what became of checkpoint %s was not recorded: %s", row.id, error)


def _record(context: RegistryContext, row: Checkpoint, use: Use) -> None:
    """Gives the lease back, counts the hit and the events: one transaction."""
    n_left = len(use.events)
    while True:
        try:
            with context.database.write() as db:
                leases.release(db, row, use.until_us, hit=use.is_hit)
                usage.count(db, [event.value for event in use.events])
            return
        except Conflict as error:  # another process counted the first event of a kind today, at this moment
            if n_left == 0:
                raise DatabaseUnavailable(url=context.database.shown_url, reason=str(error)) from error
            n_left -= 1


@contextmanager
def stored_cells(context: RegistryContext, row: Checkpoint) -> Iterator[tuple[Cells, formats.CheckpointFile]]:
    """As `ChainReader.stored_cells`, with a lease on the row.

    Raises:
        BadInput: the row is STALE.
        FileMissing, UnsafePath, StoreUnavailable, CorruptFile, DatabaseUnavailable, Incompatible, Unsupported: as there.
    """
    reason = f"it is STALE; bring it back with: llama-ckpt unprune {row.id}"
    if_stale = BadInput(what="checkpoint", value=row.id, reason=reason)
    with leased(context, row, if_stale), ChainReader(context, row).stored_cells() as stored:
        yield stored


# -- one file, or a chain of them ----------------------------------------------------------------------------------------------


def other_mode(of_engine: Fingerprint) -> Fingerprint:
    """The fingerprint that the engine would have with flash attention switched: on if it is off, off if it is on."""
    return fingerprint({**of_engine.fields, "v_transposed": not of_engine.fields.get("v_transposed")})


def _ends(chain: Sequence[Checkpoint], n_tokens: int) -> Iterator[tuple[Checkpoint, int]]:
    """The rows of a chain that have cells among the first `n_tokens`, each with the position where the next one takes over."""
    ends = [*(row.start_token for row in chain[1:]), chain[-1].n_tokens]
    for row, end in zip(chain, ends, strict=True):
        if row.start_token < min(end, n_tokens):
            yield row, min(end, n_tokens)


def _token_ids(members: Sequence[_ChainFile]) -> TokenIds:
    return np.concatenate([member.token_ids for member in members])


def _in_dialect(file: formats.CheckpointFile, layout: Dialect) -> memoryview:
    state = file.contents.payload
    return state if file.state.layout == layout else kv_edit.to_dialect(state, layout)


def _joined(ranges: Sequence[kv_edit.CellRange], members: Sequence[_ChainFile]) -> memoryview:
    """One state of all ranges. If it is all of one file, nothing is copied."""
    if len(ranges) == 1 and members[0].end == members[0].row.n_tokens:
        return ranges[0].state
    return kv_edit.gather(ranges)


def _require_tokens(token_ids: TokenIds, request: CellRequest) -> None:
    wanted = request.begins_with
    if len(wanted) > len(token_ids):
        reason = f"the checkpoint has {len(token_ids)} tokens, not the {len(wanted)} that it was to begin with"
        raise Incompatible(reason=reason)
    if (n_common := common_prefix(token_ids, wanted)) < len(wanted):
        raise Incompatible(reason=f"the checkpoint has other tokens from token {n_common} on")


def _require_fit(file: formats.CheckpointFile, engine: HeldState, row: Checkpoint, *, transpose_v: bool) -> None:
    """Requires that a file has the engine's identity and shape."""
    wanted = engine.fingerprint
    if file.fingerprint.digest not in (wanted.digest, other_mode(wanted).digest if transpose_v else b""):
        gap = differences(file.fingerprint.fields, wanted.fields)
        raise Incompatible(reason="; ".join(map(str, gap)))
    if mismatch := formats.dimension_mismatch(file.dimensions, engine.dimensions):
        raise CorruptFile(path=row.file_path, check="Dimensions", reason=mismatch)


def _translate(state: memoryview, file: formats.CheckpointFile, engine: HeldState) -> memoryview:
    """The state in the engine's layout. Whether quantised rows are rotated is part of the fingerprint, so state and engine agree
    on it. How they are rotated is taken from the engine if the state does not say.
    """
    if engine.layout is None:
        raise Incompatible(reason=f"the layout of this engine's states ({engine.memory_kind} memory) is not known")
    quantised = any(is_quantised(rows.ggml_type) for rows in (*file.state.k, *file.state.v))
    rotation = engine.rotation if quantised else None  # float types are never rotated
    return kv_edit.to_dialect(state, engine.layout, rotation=rotation, now=rotation)
