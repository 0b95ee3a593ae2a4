"""From a row to the state that its engine takes: mapped, verified, cut, translated. The only place that reads a checkpoint for
an engine.

What is asked of a file comes in this order: is it whole, is it the row's, is it this input's, is it this engine's. Only then
cells are taken out of it. The engine sees nothing before all of that holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from llama_ckpt import formats
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import leases
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import BadInput, CorruptFile, DatabaseUnavailable, FileMissing, Incompatible
from llama_ckpt.fingerprint import TokenIds, differences, fingerprint
from llama_ckpt.formats import legacy
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import is_quantised
from llama_ckpt.metrics import Event
from llama_ckpt.values import Checkpoint, Fingerprint

log = logging.getLogger("llama_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a checkpoint: the cells of its first `n_tokens` tokens, which must begin with `begins_with`.

    With `check_values` NaN and infinite numbers in it are looked for; with `transpose_v` it may be one that differs from the
    engine in nothing but flash attention.
    """

    begins_with: TokenIds
    n_tokens: int
    check_values: bool = False
    transpose_v: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A state as the engine takes it, and the token ids whose cells it holds. The state may be a view into the file."""

    state: memoryview
    token_ids: TokenIds


@dataclass(slots=True)
class Reading:
    """What happens while a checkpoint is read: the row whose file is looked at, which is to blame if that is no good, and what
    was met on the way.
    """

    row: Checkpoint
    events: set[Event] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of a chain of deltas, opened, and the position up to which its cells are taken."""

    row: Checkpoint
    file: formats.CheckpointFile
    end: int


@contextmanager
def cells_of(
    context: RegistryContext, engine: HeldState, row: Checkpoint, asked: Asked, reading: Reading
) -> Iterator[Cells]:
    """The cells that are asked of a checkpoint, inside the `with` only; of a delta joined with those that it stands on.

    Raises:
        FileMissing, UnsafePath, StoreUnavailable: a file is not there, is no file of ours, or cannot be read now.
        CorruptFile: one is damaged, not its row's, or has a value that is no number.
        Incompatible, Unsupported: all are sound, but do not fit this engine or these tokens.
        DatabaseUnavailable: what a delta stands on cannot be looked up.
    """
    with ExitStack() as files:
        members = _members(context, row, asked.n_tokens, files, reading)
        cells = _prepared(engine, members, asked, reading)
        reading.row = row
        yield cells


@contextmanager
def stored_cells(context: RegistryContext, row: Checkpoint) -> Iterator[tuple[Cells, formats.CheckpointFile]]:
    """All cells of a checkpoint as they are stored, inside the `with` only, and the last of its files. Of a delta joined, in the
    dialect of that file. The row is leased meanwhile: nobody makes room by it.

    Raises:
        BadInput: the row is STALE.
        FileMissing, UnsafePath, StoreUnavailable, CorruptFile, DatabaseUnavailable: as `cells_of`.
        Incompatible, Unsupported: the files of a delta are of dialects that cannot be made one.
    """
    with _leased(context, row), ExitStack() as files:
        members = _members(context, row, row.n_tokens, files, Reading(row))
        last = members[-1].file
        stretches = [
            kv_edit.CellRange(_in_dialect(m.file, last.state.layout), m.row.start_token, m.end) for m in members
        ]
        ids = np.concatenate([m.file.contents.token_ids[: m.end - m.row.start_token] for m in members])
        yield Cells(state=_gathered(stretches, members), token_ids=ids), last


@contextmanager
def _leased(context: RegistryContext, row: Checkpoint) -> Iterator[None]:
    with context.database.write() as db:
        until = leases.lease(db, row)
    if until is None:
        reason = f"it is STALE; bring it back with: llama-ckpt unprune {row.id}"
        raise BadInput(what="checkpoint", value=row.id, reason=reason)
    context.hook("leased")
    try:
        yield
    finally:
        try:
            with context.database.write() as db:
                leases.release(db, row, until)
        except DatabaseUnavailable as error:  # it ends by itself
            log.warning("the lease of checkpoint %s ends in %.0f s: %s", row.id, leases.LEASE_S, error)


def _in_dialect(file: formats.CheckpointFile, layout: Dialect) -> memoryview:
    state = file.contents.payload
    return state if file.state.layout == layout else kv_edit.to_dialect(state, layout)


def _members(
    context: RegistryContext, row: Checkpoint, n_tokens: int, files: ExitStack, reading: Reading
) -> list[_Member]:
    """The files that have the first `n_tokens` cells, opened and verified."""
    members = []
    for member, end in _stretches(context.chain(row), n_tokens):
        reading.row = member
        members.append(_Member(member, _opened(context, member, files, reading), end))
    return members


def _stretches(chain: Sequence[Checkpoint], n_tokens: int) -> Iterator[tuple[Checkpoint, int]]:
    """The rows of a chain whose cells are among the first `n_tokens`, each with the position where the next one takes over."""
    ends = [*(row.start_token for row in chain[1:]), chain[-1].n_tokens]
    for row, end in zip(chain, ends, strict=True):
        if row.start_token < min(end, n_tokens):
            yield row, min(end, n_tokens)


def _opened(context: RegistryContext, row: Checkpoint, files: ExitStack, reading: Reading) -> formats.CheckpointFile:
    try:
        view = files.enter_context(context.store.map(row.file_path))
    except FileMissing:
        context.require_store()
        raise
    return _verified(row, view, reading.events)


def other_mode(of_engine: Fingerprint) -> Fingerprint:
    """The fingerprint that the engine would have with flash attention on where it is off, and the other way round."""
    return fingerprint({**of_engine.fields, "v_transposed": not of_engine.fields.get("v_transposed")})


def _prepared(engine: HeldState, members: Sequence[_Member], asked: Asked, reading: Reading) -> Cells:
    token_ids = np.concatenate([m.file.contents.token_ids[: m.end - m.row.start_token] for m in members])
    _require_tokens(token_ids, asked)
    stretches = []
    for member in members:
        reading.row = member.row
        stretches.append(_stretch(engine, member, asked, reading.events))
    state, first = _gathered(stretches, members), members[0]
    if first.file.fingerprint.digest != engine.fingerprint.digest:
        state = kv_edit.transpose_v(state, transposed=not first.file.state.v_transposed)
    return Cells(state=state, token_ids=token_ids)


def _gathered(stretches: Sequence[kv_edit.CellRange], members: Sequence[_Member]) -> memoryview:
    """One state of all stretches: without a copy where it is one file's and all of it."""
    if len(stretches) == 1 and members[0].end == members[0].row.n_tokens:
        return stretches[0].state
    return kv_edit.gather(stretches)


def _stretch(engine: HeldState, member: _Member, asked: Asked, events: set[Event]) -> kv_edit.CellRange:
    """A file's cells in the engine's dialect, after they were found to fit it."""
    row, file = member.row, member.file
    _require_fit(file, engine, row, transpose_v=asked.transpose_v)
    if asked.check_values and (bad := kv_values.first_not_finite(file.contents.payload, file.state)):
        raise CorruptFile(path=row.file_path, check="Values", reason=f"{bad} is no finite number")
    if file.contents.metadata.get("engine") != engine.engine_name:
        events.add(Event.OTHER_VERSION_MET)
    state = file.contents.payload
    if file.state.layout != engine.layout or file.state.rotation_words not in (None, engine.rotation):
        state = _translated(state, file, engine)
        events.add(Event.STATE_TRANSLATED)
    return kv_edit.CellRange(state, row.start_token, member.end)


def _verified(row: Checkpoint, view: memoryview, events: set[Event]) -> formats.CheckpointFile:
    """The file, held to itself and to its row."""
    if old := legacy.read(view, row.file_path):
        events.add(Event.LEGACY_REFUSED)
        if "big" in (old.magic_order, old.version_order):
            events.add(Event.BYTE_ORDER_MET)
        raise CorruptFile(path=row.file_path, check="Header", reason=legacy.WHY_NEVER)
    file = formats.open_checkpoint(view, row.file_path)
    if file.contents.padding:
        log.info("detected padding: %d byte(s) of zeros before the magic of %s", file.contents.padding, row.file_path)
        events.add(Event.PADDING_DETECTED)
    formats.require_agreement(file, row, row.file_path)
    return file


def _require_tokens(ids: TokenIds, asked: Asked) -> None:
    n = len(asked.begins_with)
    if n > len(ids):
        raise Incompatible(reason=f"the checkpoint has {len(ids)} tokens, not the {n} that it was to begin with")
    differ = (ids[:n] != asked.begins_with).nonzero()[0]
    if differ.size:
        raise Incompatible(reason=f"the checkpoint has other tokens from token {int(differ[0])} on")


def _require_fit(file: formats.CheckpointFile, engine: HeldState, row: Checkpoint, *, transpose_v: bool) -> None:
    """Holds a file to the engine's identity and shape."""
    wanted = engine.fingerprint
    if file.fingerprint.digest not in (wanted.digest, other_mode(wanted).digest if transpose_v else b""):
        gap = differences(file.fingerprint.fields, wanted.fields)
        raise Incompatible(reason="; ".join(map(str, gap)))
    if mismatch := formats.dimension_mismatch(file.dimensions, engine.dimensions):
        raise CorruptFile(path=row.file_path, check="Dimensions", reason=mismatch)


def _translated(state: memoryview, file: formats.CheckpointFile, engine: HeldState) -> memoryview:
    """The state in the dialect that the engine speaks. Whether quantised rows are rotated the fingerprint says, and state and
    engine have the same: of a state that does not tell how, it is as the engine does it.
    """
    if engine.layout is None:
        raise Incompatible(reason=f"the layout of this engine's states ({engine.memory_kind} memory) is not known")
    quantised = any(is_quantised(rows.ggml_type) for rows in (*file.state.k, *file.state.v))
    rotation = engine.rotation if quantised else None  # of float types an engine rotates none
    return kv_edit.to_dialect(state, engine.layout, rotation=rotation, now=rotation)
