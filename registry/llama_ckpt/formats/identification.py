"""What is this file? One entry point for every format, and for what people mistake for one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llama_ckpt.errors import CorruptFile, LlamaCkptError, Unsupported
from llama_ckpt.formats import container, engine_files, legacy
from llama_ckpt.formats.checkpoint import open_checkpoint
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import KvState, Positions

_ENGINE_FORMATS = {
    engine_files.GGSQ: "llama.cpp's state of one sequence (llama-server slot, llama_state_seq_save_file)",
    engine_files.GGSN: "llama.cpp's state of a whole context (llama-cli prompt cache, llama_state_save_file)",
}
_STATE = "a sequence's state without a file's head (llama_state_seq_get_data)"
_NO_CUT = "it cannot be cut at a token"
# What is no checkpoint but lies in the same folders. A pickle is named and not touched.
_STRANGERS = {
    b"GGUF": "a GGUF model file",
    b"algg": "a ggla file (LoRA adapter of llama.cpp until 2024)",
    b"lmgg": "a ggml model file of before GGUF",
    b"SQLite format 3\0": "an SQLite database",
    b"\x80\x02": "a Python pickle; it is never unpickled",
    b"\x80\x03": "a Python pickle; it is never unpickled",
    b"\x80\x04": "a Python pickle (perhaps of LlamaDiskCache); it is never unpickled",
    b"\x80\x05": "a Python pickle (perhaps of LlamaDiskCache); it is never unpickled",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip-compressed data",
    b"\x28\xb5\x2f\xfd": "zstd-compressed data",
    b"qsgg"[::-1]: "a ggsq file of a big-endian machine",
    b"nsgg"[::-1]: "a ggsn file of a big-endian machine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """Everything that can be told of a file without an engine. Fields that a format has not, or damage hides, are None.

    `format` is "LLAM", "ggsq", "ggsn", "state" or "unknown". `whole` says that every byte was read and found where it has
    to be. `why_not` tells why the file cannot be restored, and is None exactly where `restorable` holds; `notes` are true
    of the file and do not stand against it.
    """

    format: str
    what: str
    n_bytes: int
    version: int | None = None
    byte_order: str | None = None
    padding: int = 0
    n_tokens: int | None = None
    n_media: int = 0
    packed: bool | None = None
    architecture: str | None = None
    n_cells: int | None = None
    n_layer: int | None = None
    n_layer_v: int | None = None
    dialect: str | None = None
    memory: str | None = None
    type_k: str | None = None
    type_v: str | None = None
    v_transposed: bool | None = None
    whole: bool = False
    sliceable: bool = False
    restorable: bool = False
    why_not: str | None = None
    notes: tuple[str, ...] = ()


def identify(view: memoryview, name: str) -> Identified:
    """What a file is: format, version, byte order, padding, counts, dialect, and whether it can be restored.

    Never raises for what is in the file: damage is told in `why_not`. `name` is how messages call the file.
    """
    try:
        return (
            _legacy(view, name)
            or _checkpoint(view, name)
            or _engine_file(view, name)
            or _bare_state(view)
            or _stranger(view)
        )
    except CorruptFile as error:  # only legacy.read lets one out
        what = "LLAM, damaged"
        return Identified(format="LLAM", what=what, n_bytes=len(view), why_not=_told(error))


def _told(error: LlamaCkptError) -> str:
    if isinstance(error, CorruptFile):
        return f"{error.values['check']}: {error.values['reason']}"
    return str(error)


def _with_state(found: Identified, state: KvState) -> Identified:
    why_not = kv_state.not_sliceable(state)
    notes = list(found.notes)
    if state.recurrent:
        n_with = len(state.recurrent.rows) // 2
        notes.append(f"recurrent memory in {n_with} of {state.recurrent.n_layer} layers")
    if why_not:
        notes.append(f"{_NO_CUT}: {why_not}")
    return replace(
        found,
        n_cells=state.n_cells,
        n_layer=state.n_layer,
        n_layer_v=sum(len(cache.streams[0].v) for cache in state.caches if cache.streams),
        dialect=state.dialect,
        memory=state.memory,
        type_k=state.type_k,
        type_v=state.type_v,
        v_transposed=state.v_transposed,
        whole=True,
        sliceable=why_not is None,
        notes=tuple(notes),
    )


def _legacy(view: memoryview, name: str) -> Identified | None:
    found = legacy.read(view, name)
    if found is None:
        return None
    notes = () if found.magic_order == found.version_order else ("magic and version are in different byte orders",)
    return Identified(
        format="LLAM",
        what="a LLAM checkpoint of version 1",
        n_bytes=len(view),
        version=legacy.VERSION,
        byte_order=found.version_order,
        padding=found.padding,
        why_not=legacy.WHY_NEVER,
        notes=notes,
    )


def _checkpoint(view: memoryview, name: str) -> Identified | None:
    padding = container.padding_of(view)
    if padding is None:
        return None
    found = Identified(
        format="LLAM", what="a llama-ckpt checkpoint", n_bytes=len(view), byte_order="little", padding=padding
    )
    if len(view) - padding >= container.HEADER_SIZE:
        header = container.unpack_header(view, padding)
        found = replace(found, version=header.version)
        if header.version == container.VERSION:
            found = replace(found, n_tokens=header.n_file_tokens, n_layer=header.n_layer)
    try:
        file = open_checkpoint(view, name)
    except CorruptFile as error:
        return replace(found, why_not=_told(error))
    return replace(_with_state(found, file.state), restorable=True)


def _engine_file(view: memoryview, name: str) -> Identified | None:
    magic = engine_files.find_magic(view)
    if magic is None:
        return None
    kind, padding = magic
    version = bytes(view[padding + 4 : padding + 8])
    found = Identified(
        format=kind,
        what=_ENGINE_FORMATS[kind],
        n_bytes=len(view),
        version=int.from_bytes(version, "little") if len(version) == 4 else None,
        byte_order="little",
        padding=padding,
    )
    try:
        file = engine_files.read(view, name)
    except CorruptFile as error:
        return replace(found, why_not=_told(error))
    where: list[Positions] = []
    why_not = _why_never(file)
    if why_not is None:
        try:
            where = engine_files.positions(file)
            why_not = _why_positions_do_not_fit(file, where)
        except Unsupported as error:
            why_not = str(error.values["reason"])
    found = replace(
        found,
        n_tokens=len(file.token_ids),
        n_media=file.n_media,
        packed=file.packed,
        architecture=file.architecture,
        notes=_notes(file, where if why_not is None else []),
    )
    found = replace(_with_state(found, file.state), restorable=why_not is None, why_not=why_not)
    return _of_sequence_0(found, file, where) if file.whole_context and found.restorable else found


def _notes(file: engine_files.EngineFile, where: list[Positions]) -> tuple[str, ...]:
    notes = []
    if not file.known:
        notes.append(
            f"{file.format} version {file.version} is not known here; its body is of a known layout to the last byte"
        )
    if where and engine_files.n_held(file, where) < len(file.token_ids):
        notes.append("its last token has no cell yet: llama-cli saves before it evaluates that one")
    return tuple(notes)


def _of_sequence_0(found: Identified, file: engine_files.EngineFile, of_caches: list[Positions]) -> Identified:
    """What can be said of a whole context's sequence 0, where that is not the same as of the context."""
    others = file.state.caches[0].n_cells - len(of_caches[0])
    notes = [f"{others} cells more belong to other sequences"] if others else []
    if any(len(positions) != len(of_caches[0]) for positions in of_caches):
        return replace(found, notes=(*found.notes, *notes))
    notes = [note for note in found.notes if not note.startswith(_NO_CUT)] + notes
    return replace(found, sliceable=True, n_cells=len(of_caches[0]), notes=tuple(notes))


def _why_never(file: engine_files.EngineFile) -> str | None:
    """Why an engine file whose bytes are in order cannot be restored all the same, wherever its cells are."""
    if file.n_media:
        return f"it has {file.n_media} media: {engine_files.MEDIA_REASON}"
    if len(file.token_ids) == 0:
        return "it holds no token"
    if file.whole_context and file.state.recurrent is not None:
        return f"it is a whole context with {file.state.memory} memory: one sequence cannot be taken out of it"
    if (lowest := int(file.token_ids.min())) < 0:
        return f"token {int(np.argmin(file.token_ids))} is {lowest}: no token id, and no media is named"
    return None


def _why_positions_do_not_fit(file: engine_files.EngineFile, where: list[Positions]) -> str | None:
    """Whether there is a cell for each token: of a whole context in sequence 0, which is the one that the tokens are of."""
    n_tokens, n_held = len(file.token_ids), engine_files.n_held(file, where)
    last_positions = [int(positions.max(initial=-1)) for positions in where]
    if n_held not in (n_tokens, n_tokens - 1) or n_held == 0:
        return f"it has {n_held} cells for {n_tokens} tokens"
    if any(last != n_held - 1 for last in last_positions):
        return f"its memory ends at positions {last_positions}, its tokens are {n_tokens}"
    if file.state.caches and not np.array_equal(np.sort(where[0]), np.arange(n_held, dtype=np.int32)):
        return f"its positions are not 0 to {n_held - 1}, once each"
    return None


def _bare_state(view: memoryview) -> Identified | None:
    if bytes(view[:4]) != kv_state.prefix()[:4]:
        return None
    found = Identified(format="state", what=_STATE, n_bytes=len(view), byte_order="little")
    try:
        state = kv_state.parse(view)
    except Unsupported as error:
        return replace(found, why_not=str(error))
    reason = "it does not say which tokens it is of"
    return replace(_with_state(found, state), why_not=reason)


def _stranger(view: memoryview) -> Identified:
    found = Identified(format="unknown", what="no checkpoint format known here", n_bytes=len(view))
    if len(view) == 0:
        return replace(found, what="an empty file", why_not="the file is empty")
    start = bytes(view[:16])
    for magic, what in _STRANGERS.items():
        if start.startswith(magic):
            return replace(found, what=what, why_not=f"it is {what}, no checkpoint")
    if not any(start):
        what = "a file that begins with zeros, more than the 8 that may stand before a magic"
        return replace(found, what=what, why_not=f"the file begins with {start.hex(' ')}")
    return replace(found, why_not=f"the file begins with {start.hex(' ')}, which no format known here does")
