"""From a row to the state that its engine takes: mapped, verified, cut, translated. The only place that reads a checkpoint for
an engine.

What is asked of a file comes in this order: is it whole, is it the row's, is it this input's, is it this engine's. Only then
cells are taken out of it. The engine sees nothing before all of that holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llama_ckpt import formats
from llama_ckpt.engine import Engine
from llama_ckpt.errors import CorruptFile, FileMissing, Incompatible
from llama_ckpt.fingerprint import TokenIds, differences, fingerprint
from llama_ckpt.formats import kv_edit, kv_values, legacy
from llama_ckpt.formats.ggml_types import is_quantised
from llama_ckpt.metrics import Event
from llama_ckpt.parts import Parts
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


@contextmanager
def cells_of(parts: Parts, engine: Engine, row: Checkpoint, asked: Asked, events: set[Event]) -> Iterator[Cells]:
    """The cells that are asked of a checkpoint, inside the `with` only. What was met on the way is added to `events`.

    Raises:
        FileMissing, UnsafePath, StoreUnavailable: the file is not there, is no file of ours, or cannot be read now.
        CorruptFile: it is damaged, not the row's, or has a value that is no number.
        Incompatible, Unsupported: it is sound, but does not fit this engine or these tokens.
    """
    try:
        with parts.store.map(row.file_path) as view:
            yield _prepared(engine, row, asked, view, events)
    except FileMissing:
        parts.require_store()
        raise


def other_mode(of_engine: Fingerprint) -> Fingerprint:
    """The fingerprint that the engine would have with flash attention on where it is off, and the other way round."""
    return fingerprint({**of_engine.fields, "v_transposed": not of_engine.fields.get("v_transposed")})


def _prepared(engine: Engine, row: Checkpoint, asked: Asked, view: memoryview, events: set[Event]) -> Cells:
    file = _verified(row, view, events)
    _require_tokens(file, asked)
    _require_fit(file, engine, row, transpose_v=asked.transpose_v)
    if asked.check_values and (bad := kv_values.first_not_finite(file.contents.payload, file.state)):
        raise CorruptFile(path=row.file_path, check="Values", reason=f"{bad} is no finite number")
    if file.contents.metadata.get("engine") != engine.engine_name:
        events.add(Event.OTHER_VERSION_MET)
    state = file.contents.payload
    if asked.n_tokens < row.n_tokens:
        state = kv_edit.cut(state, asked.n_tokens)
    if file.state.layout != engine.layout or file.state.rotation_words not in (None, engine.rotation):
        state = _translated(state, file, engine)
        events.add(Event.STATE_TRANSLATED)
    if file.fingerprint.digest != engine.fingerprint.digest:
        state = kv_edit.transpose_v(state, transposed=not file.state.v_transposed)
    return Cells(state=state, token_ids=file.contents.token_ids[: asked.n_tokens])


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


def _require_tokens(file: formats.CheckpointFile, asked: Asked) -> None:
    n, ids = len(asked.begins_with), file.contents.token_ids
    if n > len(ids):
        raise Incompatible(reason=f"the checkpoint has {len(ids)} tokens, not the {n} that it was to begin with")
    differ = (ids[:n] != asked.begins_with).nonzero()[0]
    if differ.size:
        raise Incompatible(reason=f"the checkpoint has other tokens from token {int(differ[0])} on")


def _require_fit(file: formats.CheckpointFile, engine: Engine, row: Checkpoint, *, transpose_v: bool) -> None:
    """Holds a file to the engine's identity and shape."""
    wanted = engine.fingerprint
    if file.fingerprint.digest not in (wanted.digest, other_mode(wanted).digest if transpose_v else b""):
        gap = differences(file.fingerprint.fields, wanted.fields)
        raise Incompatible(reason="; ".join(map(str, gap)))
    if mismatch := formats.dimension_mismatch(file.dimensions, engine.dimensions):
        raise CorruptFile(path=row.file_path, check="Dimensions", reason=mismatch)


def _translated(state: memoryview, file: formats.CheckpointFile, engine: Engine) -> memoryview:
    """The state in the dialect that the engine speaks. Whether quantised rows are rotated the fingerprint says, and state and
    engine have the same: of a state that does not tell how, it is as the engine does it.
    """
    if engine.layout is None:
        raise Incompatible(reason=f"the layout of this engine's states ({engine.memory_kind} memory) is not known")
    quantised = any(is_quantised(rows.ggml_type) for rows in (*file.state.k, *file.state.v))
    rotation = engine.rotation if quantised else None  # of float types an engine rotates none
    return kv_edit.to_dialect(state, engine.layout, rotation=rotation, now=rotation)
