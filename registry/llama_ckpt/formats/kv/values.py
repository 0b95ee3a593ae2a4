"""Whether all values of a state are finite: NaN or Inf in one cell reaches every later prompt through attention. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import KvState, Rows
from llama_ckpt.formats.kv.types import ALL_TYPES, FLOAT_EXPONENTS, SCALE_WORDS, type_name

_F16_EXPONENT = 0x7C00
_CHUNK_VALUES = 1 << 20  # checked at a time: a few MiB of scratch memory for a state of any size


class BadValue(NamedTuple):
    """The first value that is not finite. `layer` counts over all caches, `cell` from 0 in its cache and stream."""

    layer: int
    part: str
    cell: int

    def __str__(self) -> str:
        return f"{self.part} of layer {self.layer}, cell {self.cell}"


def not_finite(state: memoryview) -> BadValue | None:
    """The first layer, part ("K", "V", or "R/S" of recurrent memory) and cell with a NaN or infinite value; else None.

    Checks every value of f32, f16 and bf16 rows, and the f16 scales of quantised rows. Values of other types pass.

    Raises:
        Unsupported: the bytes are not a sequence's state in a known layout.
    """
    return first_not_finite(state, kv_state.parse(state))


def first_not_finite(data: memoryview, state: KvState) -> BadValue | None:
    """As `not_finite`, for bytes that were parsed already: a state, a body, or the body of a whole context."""
    for layer, part, rows, n_cells in _all_rows(state):
        cell = _first_bad_cell(data, rows, n_cells)
        if cell is not None:
            return BadValue(layer, part, cell)
    return None


def unchecked_types(state: KvState) -> list[str]:
    """Ggml's names of the types in a state whose values `not_finite` does not check."""
    numbers = {rows.ggml_type for _, _, rows, _ in _all_rows(state)}
    return sorted(type_name(number) for number in numbers - FLOAT_EXPONENTS.keys() - SCALE_WORDS.keys())


def describe(state: KvState, bad: BadValue) -> str:
    """A bad value as text, with the token's position if its cache has exactly one stream with cells."""
    first_layer = 0
    for cache in state.caches:
        n_layer = len(cache.streams[0].k) if cache.streams else 0
        if bad.part in ("K", "V") and 0 <= bad.layer - first_layer < n_layer and len(cache.streams) == 1:
            return f"{bad}, position {cache.streams[0].positions[bad.cell]}"
        first_layer += n_layer
    return str(bad)


def _all_rows(state: KvState) -> Iterator[tuple[int, str, Rows, int]]:
    """Layer, part, rows and number of cells of every layer, K before V."""
    layer = 0
    for cache in state.caches:
        for stream in cache.streams:
            n_cells = len(stream.positions)
            for i, rows in enumerate(stream.k):
                yield layer + i, "K", rows, n_cells
                if stream.v:
                    yield layer + i, "V", stream.v[i], n_cells
        layer += len(cache.streams[0].k) if cache.streams else 0
    if state.recurrent:
        half = len(state.recurrent.rows) // 2
        for i, rows in enumerate(state.recurrent.rows):
            yield layer + i % half, "R/S", rows, len(state.recurrent.positions)


def _first_bad_cell(data: memoryview, rows: Rows, n_cells: int) -> int | None:
    if rows.ggml_type in FLOAT_EXPONENTS:
        kind, exponent = FLOAT_EXPONENTS[rows.ggml_type]
        width = np.dtype(kind).itemsize
        found = _search(data, rows.offset, n_cells * rows.row_bytes // width, kind, exponent)
        if found is None:
            return None
        return found % n_cells if rows.element_bytes else found // (rows.row_bytes // width)
    if rows.ggml_type in SCALE_WORDS:
        block_bytes = ALL_TYPES[rows.ggml_type].block_bytes
        words = SCALE_WORDS[rows.ggml_type]
        block = _search_scales(data, rows.offset, n_cells * rows.row_bytes // block_bytes, block_bytes, words)
        if block is None:
            return None
        return block % n_cells if rows.element_bytes else block // (rows.row_bytes // block_bytes)
    return None


def _search(data: memoryview, offset: int, count: int, kind: str, exponent: int) -> int | None:
    """The index of the first of `count` floats whose exponent is all ones."""
    values = np.frombuffer(data, dtype=kind, count=count, offset=offset)
    for start in range(0, count, _CHUNK_VALUES):
        bad = _all_ones(values[start : start + _CHUNK_VALUES], exponent)
        if bad.any():
            return start + int(bad.argmax())
    return None


def _search_scales(data: memoryview, offset: int, n_blocks: int, block_bytes: int, words: int) -> int | None:
    """The index of the first of `n_blocks` blocks with a scale or minimum (f16, at its head) that is not finite."""
    blocks = np.frombuffer(data, dtype=np.uint8, count=n_blocks * block_bytes, offset=offset)
    heads = blocks.reshape(n_blocks, block_bytes)[:, : 2 * words]
    for start in range(0, n_blocks, _CHUNK_VALUES):
        scales = np.ascontiguousarray(heads[start : start + _CHUNK_VALUES]).view("<u2")
        bad = _all_ones(scales, _F16_EXPONENT).any(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def _all_ones(values: NDArray[Any], exponent: int) -> NDArray[np.bool_]:
    return np.asarray((values & values.dtype.type(exponent)) == exponent)
