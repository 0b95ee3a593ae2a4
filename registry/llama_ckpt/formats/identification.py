"""What a file is: one entry point for every format, and for files that are mistaken for checkpoints. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llama_ckpt.errors import CorruptFile, LlamaCkptError, Unsupported, without_frames
from llama_ckpt.formats import container, engine_files, legacy
from llama_ckpt.formats.checkpoint import CheckpointFile, open_checkpoint
from llama_ckpt.formats.engine_files import EngineFile
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import KvState, Positions
from llama_ckpt.formats.magic import FileFormat

_ENGINE_FORMATS = {
    FileFormat.GGSQ: "llama.cpp's state of one sequence (llama-server slot, llama_state_seq_save_file)",
    FileFormat.GGSN: "llama.cpp's state of a whole context (llama-cli prompt cache, llama_state_save_file)",
}
_STATE = "a sequence's state without a file's head (llama_state_seq_get_data)"
_NOT_SLICEABLE = "it cannot be truncated at a token"
# Files that are no checkpoints and are often stored beside them. A pickle is named and never opened.
_OTHER_MAGICS = {
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
    """Everything that a file says without an engine. A field is None if the format does not have it or damage hides it.

    `whole` says that every byte was read and is where it has to be. `why_not` is the reason why the file cannot be restored;
    it is None exactly if `restorable` is set. `notes` are remarks that do not prevent a restore.
    """

    format: FileFormat
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """A file that was read once: what it is, and its verified content.

    `content` is a `CheckpointFile` for LLAM, an `EngineFile` for ggsq and ggsn, and a `KvState` for a bare state. It is None
    for a damaged file, for LLAM version 1 and for unknown formats. `damage` is the error of the check that failed.
    `content` is made of views into the caller's buffer: release it before the buffer is closed.
    """

    identified: Identified
    content: CheckpointFile | EngineFile | KvState | None = None
    damage: CorruptFile | None = None


def identify(view: memoryview, name: str) -> Identified:
    """What a file is: format, version, byte order, padding, counts, dialect, and whether it can be restored.

    Reads every byte of a format that has a checksum. Never raises for the content of the file: `why_not` reports damage.
    `name` is the file's name in messages.
    """
    return open_file(view, name).identified


def open_file(view: memoryview, name: str) -> OpenedFile:
    """As `identify`, with the verified content, so that a caller who needs both reads the file once."""
    try:
        legacy_file = legacy.read(view, name)
    except CorruptFile as error:
        identified = Identified(
            format=FileFormat.LLAM, what="LLAM, damaged", n_bytes=len(view), why_not=_explain(error)
        )
        return OpenedFile(identified=identified, damage=_without_frames(error))
    if legacy_file is not None:
        return OpenedFile(identified=_identify_legacy(view, legacy_file))
    return (
        _open_checkpoint(view, name)
        or _open_engine_file(view, name)
        or _open_bare_state(view)
        or OpenedFile(identified=_identify_other(view))
    )


def _without_frames(error: CorruptFile) -> CorruptFile:
    without_frames(error)  # its traceback would keep the caller's buffer alive
    return error


def _explain(error: LlamaCkptError) -> str:
    """The message of an error without the file's name."""
    return f"{error.check}: {error.reason}" if isinstance(error, CorruptFile) else str(error)


def _with_state(identified: Identified, state: KvState) -> Identified:
    """Adds the fields that the parsed state gives."""
    why_not = kv_state.not_sliceable(state)
    notes = list(identified.notes)
    if state.recurrent:
        n_layers_with_rows = len(state.recurrent.rows) // 2
        notes.append(f"recurrent memory in {n_layers_with_rows} of {state.recurrent.n_layer} layers")
    if why_not:
        notes.append(f"{_NOT_SLICEABLE}: {why_not}")
    return replace(
        identified,
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


def _identify_legacy(view: memoryview, file: legacy.LegacyFile) -> Identified:
    notes = () if file.magic_order == file.version_order else ("magic and version are in different byte orders",)
    return Identified(
        format=FileFormat.LLAM,
        what="a LLAM checkpoint of version 1",
        n_bytes=len(view),
        version=legacy.VERSION,
        byte_order=file.version_order,
        padding=file.padding,
        why_not=legacy.WHY_NEVER,
        notes=notes,
    )


def _open_checkpoint(view: memoryview, name: str) -> OpenedFile | None:
    padding = container.padding_of(view)
    if padding is None:
        return None
    identified = Identified(
        format=FileFormat.LLAM, what="a llama-ckpt checkpoint", n_bytes=len(view), byte_order="little", padding=padding
    )
    if len(view) - padding >= container.HEADER_SIZE:
        header = container.unpack_header(view, padding)
        identified = replace(identified, version=header.version)
        if header.version == container.VERSION:
            identified = replace(identified, n_tokens=header.n_file_tokens, n_layer=header.n_layer)
    try:
        file = open_checkpoint(view, name)
    except CorruptFile as error:
        return OpenedFile(identified=replace(identified, why_not=_explain(error)), damage=_without_frames(error))
    return OpenedFile(identified=replace(_with_state(identified, file.state), restorable=True), content=file)


def _open_engine_file(view: memoryview, name: str) -> OpenedFile | None:
    magic = engine_files.find_magic(view)
    if magic is None:
        return None
    kind, padding = magic
    version = bytes(view[padding + 4 : padding + 8])
    identified = Identified(
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
        return OpenedFile(identified=replace(identified, why_not=_explain(error)), damage=_without_frames(error))
    return OpenedFile(identified=_identify_engine_file(identified, file), content=file)


def _identify_engine_file(identified: Identified, file: EngineFile) -> Identified:
    positions: list[Positions] = []
    why_not = _why_never(file)
    if why_not is None:
        try:
            positions = engine_files.positions(file)
            why_not = _why_positions_do_not_fit(file, positions)
        except Unsupported as error:
            why_not = error.reason
    identified = replace(
        identified,
        n_tokens=len(file.token_ids),
        n_media=file.n_media,
        packed=file.packed,
        architecture=file.architecture,
        notes=_notes(file, positions if why_not is None else []),
    )
    identified = replace(_with_state(identified, file.state), restorable=why_not is None, why_not=why_not)
    if file.whole_context and identified.restorable:
        return _with_sequence_0(identified, file, positions)
    return identified


def _notes(file: EngineFile, positions: list[Positions]) -> tuple[str, ...]:
    notes = []
    if not file.known:
        notes.append(
            f"{file.format} version {file.version} is not known here; its body is of a known layout to the last byte"
        )
    if positions and engine_files.n_held(file, positions) < len(file.token_ids):
        notes.append("its last token has no cell yet: llama-cli saves before it evaluates that one")
    return tuple(notes)


def _with_sequence_0(identified: Identified, file: EngineFile, positions: list[Positions]) -> Identified:
    """Corrects the fields in which sequence 0 of a whole context differs from the context. `positions` has one entry a cache."""
    n_other_cells = file.state.caches[0].n_cells - len(positions[0])
    notes = [f"{n_other_cells} cells more belong to other sequences"] if n_other_cells else []
    if any(len(of_cache) != len(positions[0]) for of_cache in positions):
        return replace(identified, notes=(*identified.notes, *notes))
    notes = [note for note in identified.notes if not note.startswith(_NOT_SLICEABLE)] + notes
    return replace(identified, sliceable=True, n_cells=len(positions[0]), notes=tuple(notes))


def _why_never(file: EngineFile) -> str | None:
    """Why an engine file cannot be restored although its bytes are valid, wherever its cells are."""
    if file.n_media:
        return f"it has {file.n_media} media: {engine_files.MEDIA_REASON}"
    if len(file.token_ids) == 0:
        return "it holds no token"
    if file.whole_context and file.state.recurrent is not None:
        return f"it is a whole context with {file.state.memory} memory: one sequence cannot be taken out of it"
    if (lowest := int(file.token_ids.min())) < 0:
        return f"token {int(np.argmin(file.token_ids))} is {lowest}: no token id, and no media is named"
    return None


def _why_positions_do_not_fit(file: EngineFile, positions: list[Positions]) -> str | None:
    """Which cells do not match the tokens. The tokens of a whole context are those of its sequence 0."""
    n_tokens, n_held = len(file.token_ids), engine_files.n_held(file, positions)
    last_positions = [int(of_cache.max(initial=-1)) for of_cache in positions]
    if n_held not in (n_tokens, n_tokens - 1) or n_held == 0:
        return f"it has {n_held} cells for {n_tokens} tokens"
    if any(last != n_held - 1 for last in last_positions):
        return f"its memory ends at positions {last_positions}, its tokens are {n_tokens}"
    if file.state.caches and not np.array_equal(np.sort(positions[0]), np.arange(n_held, dtype=np.int32)):
        return f"its positions are not 0 to {n_held - 1}, once each"
    return None


def _open_bare_state(view: memoryview) -> OpenedFile | None:
    if bytes(view[:4]) != kv_state.prefix()[:4]:
        return None
    identified = Identified(format=FileFormat.STATE, what=_STATE, n_bytes=len(view), byte_order="little")
    try:
        state = kv_state.parse(view)
    except Unsupported as error:
        return OpenedFile(identified=replace(identified, why_not=str(error)))
    reason = "it does not say which tokens it is of"
    return OpenedFile(identified=replace(_with_state(identified, state), why_not=reason), content=state)


def _identify_other(view: memoryview) -> Identified:
    identified = Identified(format=FileFormat.UNKNOWN, what="no checkpoint format known here", n_bytes=len(view))
    if len(view) == 0:
        return replace(identified, what="an empty file", why_not="the file is empty")
    start = bytes(view[:16])
    for magic, what in _OTHER_MAGICS.items():
        if start.startswith(magic):
            return replace(identified, what=what, why_not=f"it is {what}, no checkpoint")
    if not any(start):
        what = "a file that begins with zeros, more than the 8 that may stand before a magic"
        return replace(identified, what=what, why_not=f"the file begins with {start.hex(' ')}")
    return replace(identified, why_not=f"the file begins with {start.hex(' ')}, which no format known here does")
