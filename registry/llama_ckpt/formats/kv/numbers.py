"""K and V as numbers, and the distance of two states of the same tokens. Pure.

Source of the quantised blocks: llama.cpp b11434, ggml/src/ggml-common.h and ggml-quants.c (`dequantize_row_…`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import Incompatible, Unsupported
from llama_ckpt.formats.kv.pieces import Block, Piece, Pieces, take_apart
from llama_ckpt.formats.kv.types import ALL_TYPES, type_name

Floats = NDArray[np.float32]
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)  # kvalues_iq4nl


class Distance(NamedTuple):
    """How far two states are apart. The distance of a row is the norm of the difference over the norm of the reference's row:
    0 for equal rows, about 1.4 for unrelated ones. `typical` is the median over all rows, `furthest` the greatest median of
    one part and layer, which are named.
    """

    typical: float
    furthest: float
    part: str
    layer: int


def distance(state: memoryview, reference: memoryview) -> Distance:
    """The distance of K and V of a state from those of a reference of the same model and tokens.

    Raises:
        Incompatible: layers, types, row sizes or the number of cells differ.
        Unsupported: the layout or a number format is not known, or the memory does not have one cell per token.
    """
    _, mine = take_apart(state)
    _, theirs = take_apart(reference)
    _require_same_rows(mine, theirs)
    medians, rows = [], []
    for one, two in zip(mine.caches, theirs.caches, strict=True):
        for part, layer, a, b in _pairs(one, two):
            of_rows = _apart(numbers(a)[np.argsort(one.positions)], numbers(b)[np.argsort(two.positions)])
            rows.append(of_rows)
            medians.append((float(np.median(of_rows)), part, layer))
    # NaN counts as the greatest distance
    furthest, part, layer = max(medians, key=lambda entry: np.inf if np.isnan(entry[0]) else entry[0])
    return Distance(float(np.median(np.concatenate(rows))), furthest, part, layer)


def _require_same_rows(one: Pieces, two: Pieces) -> None:
    """Checks that two states have rows of the same types and sizes. Their order and dialect may differ."""
    shapes = [
        [
            (part, len(cache.cells), [(b.ggml_type, b.row_bytes) for b in getattr(cache, part)])
            for cache in pieces.caches
            for part in ("k", "v")
        ]
        for pieces in (one, two)
    ]
    if shapes[0] != shapes[1]:
        raise Incompatible(reason="the two states have other layers, types, row sizes or numbers of cells")


def _pairs(one: Piece, two: Piece) -> list[tuple[str, int, Block, Block]]:
    return [
        (part, layer, a, b)
        for part, mine, theirs in (("K", one.k, two.k), ("V", one.v, two.v))
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True))
    ]


def _apart(values: Floats, reference: Floats) -> Floats:
    """The distance of each row; 0 where both are zero."""
    gap = np.linalg.norm(values - reference, axis=1)
    length = np.linalg.norm(reference, axis=1)
    return np.asarray(np.where(gap == 0, 0, gap / np.maximum(length, np.finfo(np.float32).tiny)), dtype=np.float32)


def numbers(block: Block) -> Floats:
    """K or V of a layer as float32, shape `[n_cells, n_values]`.

    Raises:
        Unsupported: no KV cache has the number format.
    """
    ((values, selection),) = block.parts
    cells = np.ascontiguousarray(values[selection])
    raw = cells.view(np.uint8).reshape(len(cells), -1)
    kind = block.ggml_type
    if kind not in _READERS:
        raise Unsupported(what=f"reading numbers of type {type_name(kind)}", reason="no KV cache of llama.cpp has it")
    read = _READERS[kind](raw.reshape(-1, ALL_TYPES[kind].block_bytes))
    return read.reshape(len(cells), -1)


# Each reader takes bytes of shape [n_blocks, block_bytes] and gives float32 of shape [n_blocks, block_values].


def _f32(blocks: NDArray[np.uint8]) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: NDArray[np.uint8]) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: NDArray[np.uint8]) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: NDArray[np.uint8], word: int = 0) -> Floats:
    return np.ascontiguousarray(blocks[:, 2 * word : 2 * word + 2]).view("<f2").astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8], at: int) -> NDArray[np.uint8]:
    """32 numbers of four bits: the low halves of 16 bytes, then the high ones."""
    packed = blocks[:, at : at + 16]
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: NDArray[np.uint8], at: int) -> NDArray[np.uint8]:
    """The fifth bit of each of the 32 numbers, shifted to its place."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _q8_0(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _q4_0(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * (_nibbles(blocks, 2).astype(np.float32) - 8)


def _q4_1(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * _nibbles(blocks, 4) + _scale(blocks, 1)


def _q5_0(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * ((_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).astype(np.float32) - 16)


def _q5_1(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)) + _scale(blocks, 1)


def _iq4_nl(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks) * _IQ4_NL[_nibbles(blocks, 2)]


_READERS: dict[int, Callable[[NDArray[np.uint8]], Floats]] = {
    0: _f32,
    1: _f16,
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    20: _iq4_nl,
    30: _bf16,
}
