"""The engine's sequence state: where its cells and rows stand. Pure; learnt from llama.cpp's `llama_kv_cache::state_write`.

Layout, little-endian, as `llama_state_seq_get_data` gives it for an ordinary attention cache:

    u32 0xaf143cd8, i32 sequence id
    u32 n_stream; per stream u32 n_cells, and when there are cells:
        per cell  i32 position, u32 n_seq_id (1), i32 sequence id
        u32 v_transposed, u32 n_layer [, u32 n_rot_k, u32 n_rot_v in newer engines]
        per layer K:  i32 ggml type, u64 row bytes, n_cells rows
        per layer V:  the same; transposed: i32 type, u32 element bytes, u32 n_embd, n_embd rows of n_cells elements
                      (absent for models that keep no V)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import Unsupported

IO_MAGIC = 0xAF143CD8
MAX_STREAMS = 256
MAX_LAYERS = 1024

# ggml type id -> name, values per block, bytes per block (ggml.h, ggml-common.h): the types a KV cache can have.
GGML_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    20: ("iq4_nl", 32, 18),
    30: ("bf16", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One layer's K or V: `n_cells` rows of `row_bytes`, from byte `offset` on (transposed: `n_embd` runs of elements)."""

    ggml_type: int
    row_bytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """A sequence state, parsed to its last byte. `positions` has shape `[n_cells]`; K and V have one entry a layer."""

    n_stream: int
    positions: NDArray[np.int32]
    v_transposed: bool
    rotation_words: tuple[int, int] | None
    k: tuple[Rows, ...]
    v: tuple[Rows, ...]

    @property
    def n_cells(self) -> int:
        """Cells of the sequence: one a token."""
        return len(self.positions)

    @property
    def n_layer(self) -> int:
        """Layers that keep K."""
        return len(self.k)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return sum(rows.row_bytes for rows in (*self.k, *self.v))

    @property
    def type_k(self) -> str:
        """Ggml's name of layer 0's K type."""
        return type_name(self.k[0].ggml_type)

    @property
    def type_v(self) -> str:
        """Ggml's name of layer 0's V type, "none" for a model that keeps no V."""
        return type_name(self.v[0].ggml_type) if self.v else "none"

    @property
    def dialect(self) -> str:
        """What must agree between a state and the engine that reads it, beside model and types."""
        return f"streams={self.n_stream} rotation_words={0 if self.rotation_words is None else 1}"


def type_name(ggml_type: int) -> str:
    """Ggml's name of a type id."""
    return GGML_TYPES[ggml_type][0] if ggml_type in GGML_TYPES else f"ggml type {ggml_type}"


class _Misfit(Exception):  # noqa: N818 - never leaves this module
    """The bytes are not what this dialect says."""


def parse(state: memoryview) -> KvState:
    """The places of all cells and rows of `state`; reads a few hundred bytes a layer, copies no row.

    Both known dialects are tried; one that does not end exactly at the last byte does not count.

    Raises:
        Unsupported: the bytes are no attention cache's state of one sequence in a layout known here.
    """
    reasons = []
    for rotation in (False, True):
        try:
            return _Reader(state).sequence(rotation)
        except _Misfit as misfit:
            reasons.append(str(misfit))
    raise Unsupported(what="the layout of this state", reason="; or, with rotation words: ".join(reasons))


def require_plain_sequence(state: KvState, n_tokens: int) -> None:
    """Holds a state to what a full checkpoint of `n_tokens` tokens is: one cell at each position 0 .. n_tokens-1.

    Raises:
        Unsupported: another number of cells, or a position twice or missing.
    """
    if state.n_cells != n_tokens:
        raise Unsupported(what="this state", reason=f"it has {state.n_cells} cells for {n_tokens} tokens")
    if not np.array_equal(np.sort(state.positions), np.arange(n_tokens, dtype=np.int32)):
        raise Unsupported(what="this state", reason=f"its positions are not 0 to {n_tokens - 1}, once each")


class _Reader:
    """A cursor that refuses to leave the buffer."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        self.skip(size)
        return struct.unpack_from(layout, self.data, self.at - size)

    def skip(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise _Misfit(f"byte {start} + {size} lies beyond the end at {len(self.data)}")
        return start

    def sequence(self, rotation: bool) -> KvState:
        magic, _seq_id = self.take("<Ii")
        if magic != IO_MAGIC:
            raise _Misfit(f"begins with {magic:#010x}, not {IO_MAGIC:#010x}")
        (n_stream,) = self.take("<I")
        if not 1 <= n_stream <= MAX_STREAMS:
            raise _Misfit(f"{n_stream} streams")
        found = None
        for _ in range(n_stream):
            (n_cells,) = self.take("<I")
            if n_cells == 0:
                continue
            if found is not None:
                raise _Misfit("cells in more than one stream")
            found = self.stream(n_stream, n_cells, rotation)
        if found is None:
            raise _Misfit("no cells")
        if self.at != len(self.data):
            raise _Misfit(f"{len(self.data) - self.at} bytes are left after the last row")
        return found

    def stream(self, n_stream: int, n_cells: int, rotation: bool) -> KvState:
        cells = self.skip(12 * n_cells)
        words = np.frombuffer(self.data[cells : self.at], dtype="<i4").reshape(n_cells, 3)
        if not (words[:, 1] == 1).all():
            raise _Misfit("a cell that does not belong to exactly one sequence")
        v_transposed, n_layer = self.take("<II")
        if v_transposed > 1 or not 1 <= n_layer <= MAX_LAYERS:
            raise _Misfit(f"v_transposed {v_transposed}, {n_layer} layers")
        rotations = self.take("<II") if rotation else None
        k = tuple(self.rows(n_cells) for _ in range(n_layer))
        v: tuple[Rows, ...] = ()
        if self.at < len(self.data):
            v = tuple(self.transposed(n_cells) if v_transposed else self.rows(n_cells) for _ in range(n_layer))
        return KvState(
            n_stream=n_stream,
            positions=words[:, 0].astype(np.int32),
            v_transposed=bool(v_transposed),
            rotation_words=(rotations[0], rotations[1]) if rotations else None,
            k=k,
            v=v,
        )

    def rows(self, n_cells: int) -> Rows:
        ggml_type, row_bytes = self.take("<iQ")
        _, _, block_bytes = GGML_TYPES.get(ggml_type, ("", 1, 1))
        if row_bytes == 0 or row_bytes % block_bytes:
            raise _Misfit(f"rows of {row_bytes} bytes of {type_name(ggml_type)}")
        return Rows(ggml_type=ggml_type, row_bytes=row_bytes, offset=self.skip(n_cells * row_bytes))

    def transposed(self, n_cells: int) -> Rows:
        ggml_type, element, n_embd = self.take("<iII")
        if element == 0 or n_embd == 0:
            raise _Misfit(f"transposed V of {n_embd} rows of {element} bytes an element")
        return Rows(ggml_type=ggml_type, row_bytes=element * n_embd, offset=self.skip(n_cells * n_embd * element))
