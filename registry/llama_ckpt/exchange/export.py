"""Export: write a checkpoint as a file that llama-server or llama-cli loads, or as a plain copy for another registry."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import quote

from llama_ckpt import formats
from llama_ckpt.checkpoints.flatten import whole_file
from llama_ckpt.checkpoints.read import Cells, stored_cells
from llama_ckpt.context import RegistryContext
from llama_ckpt.errors import BadInput
from llama_ckpt.formats import FileFormat, container, engine_files
from llama_ckpt.formats.kv.layout import KvState, Rows
from llama_ckpt.formats.kv.types import ALL_TYPES, is_quantised
from llama_ckpt.store.disk import write_file
from llama_ckpt.values import Checkpoint

_MIN_ROTATION = 64  # values
Pieces = tuple[bytes | memoryview, ...]


class ExportFormat(StrEnum):
    """The format that a checkpoint is written in."""

    GGSQ = "ggsq"
    GGSN = "ggsn"
    LLAM = "llam"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a checkpoint is written.

    `version` is that of the format (None: the newest known). `packed` writes a packed token list (ggsq only). `n_stream` is
    llama-server's number of slots if each has a cache of its own. `architecture` is the model's, for a ggsn file of a
    checkpoint that does not contain it. `replace` allows the replacement of an existing file.

    Raises:
        BadInput: the format does not have an option.
    """

    format: ExportFormat
    version: int | None = None
    packed: bool = False
    n_stream: int | None = None
    architecture: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        kind = self.format
        if self.packed and kind is not ExportFormat.GGSQ:
            raise BadInput(what="packed", value=kind.value, reason="only a ggsq file has a packed token list")
        if kind is ExportFormat.LLAM and self.n_stream is not None:
            raise BadInput(what="streams", value=self.n_stream, reason="a LLAM file is copied as it is")
        if kind is ExportFormat.LLAM and self.version not in (None, container.VERSION):
            raise BadInput(what="LLAM version", value=self.version, reason=f"known is {container.VERSION}")
        if self.n_stream is not None and self.n_stream < 1:
            raise BadInput(what="streams", value=self.n_stream, reason="give a number from 1 on")

    @property
    def written_version(self) -> int:
        """The version that is written."""
        if self.version is not None:
            return self.version
        return (
            container.VERSION
            if self.format is ExportFormat.LLAM
            else max(engine_files.VERSIONS[FileFormat(self.format.value)])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A written file. `how_to_load` is one line for the user."""

    path: Path
    checkpoint: Checkpoint
    format: str
    version: int
    n_tokens: int
    size_bytes: int
    how_to_load: str


def export(context: RegistryContext, row: Checkpoint, target: Path, options: ExportOptions) -> Export:
    """Writes a checkpoint as a file outside the store, after every byte of it was checked. The row is leased for that time.

    If it is interrupted, there is at most a temporary beside the target; the target is complete or does not exist.

    Raises:
        BadInput: the row is STALE, the target exists already, its folder does not exist, or the version or architecture is not
            known.
        CorruptFile, FileMissing, UnsafePath: the checkpoint's file is damaged or gone.
        Incompatible, Unsupported: the version's dialect cannot express the state.
        StoreFull, StoreUnavailable: the checkpoint cannot be read or the file cannot be written.
        DatabaseUnavailable: the row cannot be leased.
    """
    with stored_cells(context, row) as (cells, file):
        pieces = _encoded(row, cells, file, options)
        size = write_file(target, pieces, replace=options.replace)
        how = _how_to_load(target, file.state, options)
    return Export(
        path=target,
        checkpoint=row,
        format=options.format.value,
        version=options.written_version,
        n_tokens=row.n_tokens,
        size_bytes=size,
        how_to_load=how,
    )


def _encoded(row: Checkpoint, cells: Cells, file: formats.CheckpointFile, options: ExportOptions) -> Pieces:
    version = options.written_version
    if options.format is ExportFormat.LLAM:
        return whole_file(row, cells, file)[0], cells.state
    rotation = rotation_of(file)
    if options.format is ExportFormat.GGSQ:
        return engine_files.encode_ggsq(
            version,
            cells.token_ids,
            cells.state,
            n_stream=options.n_stream,
            packed=options.packed,
            rotation=rotation,
        )
    architecture = options.architecture or file.contents.metadata.get("architecture")
    if not isinstance(architecture, str):
        reason = "a ggsn file names it, and the checkpoint does not say it: give the model's GGUF with --model"
        raise BadInput(what="architecture", value="not known", reason=reason)
    return engine_files.encode_ggsn(
        version, cells.token_ids, cells.state, architecture, n_stream=options.n_stream, rotation=rotation
    )


def rotation_of(file: formats.CheckpointFile) -> tuple[int, int] | None:
    """The sizes of the rotations of K and V of a checkpoint, 0 for none; None if the size of a head is not known.

    If the state does not contain them, they follow from the fingerprint by llama.cpp's rule (`llama_kv_cache`,
    src/llama-kv-cache.cpp of b11434): quantised types whose head size is a multiple of 64 are rotated, V by 64, K by the
    largest power of two times 64 that divides its head size.
    """
    state, n_head = file.state, file.contents.header.n_kv_head
    if state.rotation_words is not None:
        return state.rotation_words
    if "kv_rotation" not in file.fingerprint.fields:
        return (0, 0)
    if n_head == 0 or not state.v:
        return None
    head_k, head_v = (_head_size(rows[0], n_head) for rows in (state.k, state.v))
    k = _MIN_ROTATION if head_k % _MIN_ROTATION == 0 and is_quantised(state.k[0].ggml_type) else 0
    while k and head_k % (2 * k) == 0:
        k *= 2
    return k, _MIN_ROTATION if head_v % _MIN_ROTATION == 0 and is_quantised(state.v[0].ggml_type) else 0


def _head_size(rows: Rows, n_head: int) -> int:
    """The size of one head in values."""
    kind = ALL_TYPES[rows.ggml_type]
    return rows.row_bytes // kind.block_bytes * kind.block_values // n_head


def _how_to_load(target: Path, state: KvState, options: ExportOptions) -> str:
    """One line for the user; file names are quoted for a shell."""
    flags = f"-fa {'off' if state.v_transposed else 'on'} -ctk {state.type_k} -ctv {state.type_v}"
    if options.format is ExportFormat.GGSQ:
        name, folder = json.dumps({"filename": target.name}), quote(str(target.absolute().parent))
        return f"llama-server {flags} --slot-save-path {folder}/, then POST /slots/0?action=restore {name}"
    file = quote(str(target))
    if options.format is ExportFormat.GGSN:
        program = "llama-completion (llama-cli in older builds)"
        return f"{program} {flags} --prompt-cache {file}, with a prompt that begins alike"
    return f"llama-ckpt adopt {file}"
