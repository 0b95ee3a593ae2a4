"""Take a state apart into cells and rows without copying a row, and assemble a state from them. Pure.

The rows are views into the caller's bytes until `assemble` writes the new state: an operation of `kv_edit` allocates one buffer
of the size of its result and no more. That size is bounded by the size of the given states.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import Unsupported
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import KvState, Rows, Stream
from llama_ckpt.formats.kv.types import ALL_TYPES, is_quantised

Selection = slice | NDArray[np.intp]
_EVERY = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer's K or V. Each part is an array of shape `[n_cells, n_values]` and the cells selected from it; parts follow one
    another. A value is a number of a float type, an element of transposed V, or a byte of a quantised row.
    """

    ggml_type: int
    parts: tuple[tuple[NDArray[Any], Selection], ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell's row."""
        values = self.parts[0][0]
        return int(values.shape[1] * values.dtype.itemsize)

    @property
    def element_bytes(self) -> int:
        """Bytes of a value."""
        return int(self.parts[0][0].dtype.itemsize)

    def select(self, cells: Selection) -> Block:
        """The block with only these cells. It must have one part, with all cells."""
        (values, _every), *more = self.parts
        if more:
            raise AssertionError("cells are selected before parts are joined")
        return replace(self, parts=((values, cells),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One cache with one stream of cells. `cells` has shape `[n_cells, words]`: position and extension words, without ids."""

    n_stream: int
    index: int
    cells: NDArray[np.int32]
    v_transposed: bool
    rotation_words: tuple[int, int] | None
    k: tuple[Block, ...]
    v: tuple[Block, ...]

    @property
    def positions(self) -> NDArray[np.int32]:
        """Positions of the cells; shape `[n_cells]`."""
        return self.cells[:, 0]

    def select(self, cells: Selection) -> Piece:
        """The piece with only these cells."""
        return replace(
            self,
            cells=self.cells[cells],
            k=tuple(block.select(cells) for block in self.k),
            v=tuple(block.select(cells) for block in self.v),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All caches of a sequence's state. `seq_id` precedes the body, `cell_id` is in each cell."""

    seq_id: int
    cell_id: int
    extension: int
    caches: tuple[Piece, ...]


def take_apart(data: memoryview) -> tuple[KvState, Pieces]:
    """A sequence's parsed state and its parts, if it can be truncated and joined.

    Raises:
        Unsupported: the layout is not known, or the memory does not have one cell per token.
    """
    state = kv_state.parse(data)
    if why := kv_state.not_sliceable(state):
        raise Unsupported(what="taking this state apart", reason=why)
    caches = tuple(_piece(data, state, cache.n_stream, cache.streams[0]) for cache in state.caches)
    (seq_id,) = struct.unpack_from("<i", data, 4)
    first = state.caches[0].streams[0]
    id_at = first.cells_at + 8 + state.cell_extension
    cell_id = struct.unpack_from("<i", data, id_at)[0] if first.ids_per_cell else 0
    return state, Pieces(seq_id=seq_id, cell_id=cell_id, extension=state.cell_extension, caches=caches)


def selection_of(mask: NDArray[np.bool_]) -> Selection:
    """The cells where `mask` is set, which are at least one. Adjacent cells give a slice, which copies nothing."""
    where = np.flatnonzero(mask)
    if len(where) == int(where[-1]) - int(where[0]) + 1:
        return slice(int(where[0]), int(where[-1]) + 1)
    return where


def _piece(data: memoryview, state: KvState, n_stream: int, stream: Stream) -> Piece:
    n_cells = len(stream.positions)
    words = 2 + state.cell_extension // 4 + stream.ids_per_cell
    table = np.frombuffer(data, dtype="<i4", count=n_cells * words, offset=stream.cells_at).reshape(n_cells, words)
    columns = [0, *range(2, 2 + state.cell_extension // 4)]
    return Piece(
        n_stream=n_stream,
        index=stream.index,
        cells=table[:, columns],
        v_transposed=stream.v_transposed,
        rotation_words=stream.rotation_words,
        k=tuple(block_of(data, rows, n_cells) for rows in stream.k),
        v=tuple(block_of(data, rows, n_cells) for rows in stream.v),
    )


def value_type(ggml_type: int, element_bytes: int) -> np.dtype[Any]:
    """Numpy's type of a value in a `Block`. `element_bytes` is 0 if the state does not contain it."""
    size = element_bytes or (1 if is_quantised(ggml_type) else ALL_TYPES[ggml_type].block_bytes)
    return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(size, f"V{size}"))


def block_of(data: memoryview, rows: Rows, n_cells: int) -> Block:
    """One layer's K or V as a view into `data`, by cell even if it is stored transposed."""
    kind = value_type(rows.ggml_type, rows.element_bytes)
    n_values = rows.row_bytes // kind.itemsize
    flat = np.frombuffer(data, dtype=kind, count=n_cells * n_values, offset=rows.offset)
    values = flat.reshape(n_values, n_cells).T if rows.element_bytes else flat.reshape(n_cells, n_values)
    return Block(ggml_type=rows.ggml_type, parts=((values, _EVERY),))


def assemble(pieces: Pieces) -> memoryview:
    """The state made of these parts: the eight bytes before the body, and the body. Read-only."""
    out = np.empty(8 + sum(_size(cache, pieces) for cache in pieces.caches), dtype=np.uint8)
    struct.pack_into("<Ii", out.data, 0, kv_state.IO_MAGIC, pieces.seq_id)
    at = 8
    for cache in pieces.caches:
        at = _write_cache(out, at, cache, pieces)
    if at != len(out):
        raise AssertionError(f"wrote {at} of {len(out)} bytes")
    return out.data.toreadonly()


def _words_of_cell(cache: Piece, pieces: Pieces) -> int:
    return 2 + pieces.extension // 4 + (1 if cache.n_stream else 0)


def _size(cache: Piece, pieces: Pieces) -> int:
    n_cells = len(cache.cells)
    head = 4 + 4 * cache.n_stream if cache.n_stream else 4
    head += 8 if cache.rotation_words is None else 16
    rows = sum(12 + n_cells * block.row_bytes for block in (*cache.k, *cache.v))
    return head + 4 * n_cells * _words_of_cell(cache, pieces) + rows


def _write_cache(out: NDArray[np.uint8], at: int, cache: Piece, pieces: Pieces) -> int:
    n_cells = len(cache.cells)
    counts = [cache.n_stream, *([0] * cache.index), n_cells] if cache.n_stream else [n_cells]
    at = _put(out, at, np.array(counts, dtype="<u4"))
    words = np.empty((n_cells, _words_of_cell(cache, pieces)), dtype="<i4")
    words[:, 0] = cache.cells[:, 0]
    words[:, 1] = 1 if cache.n_stream else 0
    words[:, 2 : 2 + pieces.extension // 4] = cache.cells[:, 1:]
    if cache.n_stream:
        words[:, -1] = pieces.cell_id
    at = _put(out, at, words)
    at = _put(out, at, np.array([cache.v_transposed, len(cache.k), *(cache.rotation_words or ())], dtype="<u4"))
    for block in cache.k:
        at = _write_block(out, at, block, n_cells, transposed=False)
    for block in cache.v:
        at = _write_block(out, at, block, n_cells, transposed=cache.v_transposed)
    return _put(out, at, np.zeros(max(cache.n_stream - cache.index - 1, 0), dtype="<u4"))


def _write_block(out: NDArray[np.uint8], at: int, block: Block, n_cells: int, *, transposed: bool) -> int:
    kind = block.parts[0][0].dtype
    n_values = block.row_bytes // kind.itemsize
    head = (
        struct.pack("<iII", block.ggml_type, kind.itemsize, n_values)
        if transposed
        else struct.pack("<iQ", block.ggml_type, block.row_bytes)
    )
    at = _put(out, at, np.frombuffer(head, dtype=np.uint8))
    end = at + n_cells * block.row_bytes
    flat = out[at:end].view(kind)
    target = flat.reshape(n_values, n_cells).T if transposed else flat.reshape(n_cells, n_values)
    start = 0
    for values, selection in block.parts:
        cells = values[selection]
        if cells.flags.c_contiguous and not transposed:  # as bytes: the rows need not be aligned
            first = at + start * block.row_bytes
            out[first : first + cells.nbytes] = cells.reshape(-1).view(np.uint8)
        else:
            target[start : start + len(cells)] = cells
        start += len(cells)
    return end


def _put(out: NDArray[np.uint8], at: int, values: NDArray[Any]) -> int:
    """Writes an array's bytes at offset `at` and gives the offset behind them."""
    end = at + values.nbytes
    out[at:end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return end
