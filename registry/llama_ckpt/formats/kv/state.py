"""Parse the engine's sequence state: the offsets of its cells and rows. Pure.

Source: llama.cpp's `llama_kv_cache::state_write` (b11434, src/llama-kv-cache.cpp).

Layout, little-endian, as `llama_state_seq_get_data` gives it for an ordinary attention cache:

    u32 0xaf143cd8, i32 sequence id
    u32 n_stream; per stream u32 n_cells, and when there are cells:
        per cell  i32 position, u32 n_seq_id (1) [, x, y [, token id] in models with 2-D positions], i32 sequence id
        u32 v_transposed, u32 n_layer [, u32 n_rot_k, u32 n_rot_v in newer engines]
        per layer K:  i32 ggml type, u64 row bytes, n_cells rows
        per layer V:  the same; transposed: i32 type, u32 element bytes, u32 n_embd, n_embd rows of n_cells elements
                      (absent for models that keep no V)

Other models write several such caches one after the other, with recurrent cells between or after them. docs/formats.md
describes all of it. Every count is bounded by the size of the data before anything is allocated for it.
"""

from __future__ import annotations

import struct

import numpy as np

from llama_ckpt.errors import Unsupported
from llama_ckpt.formats.kv.layout import (
    Cache,
    Dialect,
    KvState,
    Positions,
    Recurrent,
    Rows,
    Stream,
    not_sliceable,
    require_plain_sequence,
    require_whole_sequence,
)
from llama_ckpt.formats.kv.types import ALL_TYPES, GGML_TYPES, type_name

__all__ = [
    "GGML_TYPES",
    "IO_MAGIC",
    "PREFIX_BYTES",
    "Dialect",
    "KvState",
    "Rows",
    "not_sliceable",
    "parse",
    "parse_body",
    "prefix",
    "require_plain_sequence",
    "require_whole_sequence",
    "type_name",
]

IO_MAGIC = 0xAF143CD8
PREFIX_BYTES = 8
MAX_STREAMS = 256
MAX_LAYERS = 1024
MAX_CACHES = 3
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_SHARED_CELLS = 1 << 20  # read one by one: this bounds the time, not the memory

# Every known dialect. The extension got its third word (token id) with ggsq 3.
_DIALECTS = (
    Dialect(1, rotation_words=False),
    Dialect(1, rotation_words=True),
    Dialect(1, rotation_words=False, cell_extension=8),
    Dialect(1, rotation_words=False, cell_extension=12),
    Dialect(1, rotation_words=True, cell_extension=12),
    Dialect(0, rotation_words=False),
)
_F32 = 0
_NO_POSITIONS: Positions = np.empty(0, dtype=np.int32)


def prefix(seq_id: int = 0) -> bytes:
    """The eight bytes that `llama_state_seq_get_data` puts before a body: magic and sequence id."""
    return struct.pack("<Ii", IO_MAGIC, seq_id)


# Offset of the cells, their number, their size without ids -> their positions, the offset behind them, and what is wrong.
OneByOne = dict[tuple[int, int, int], tuple[Positions, int, str]]


class _Misfit(Exception):  # noqa: N818 - never leaves this module
    """The bytes are not a state in the dialect that is tried."""


def parse(state: memoryview) -> KvState:
    """Parses a sequence's state: eight bytes of magic and sequence id, and the body.

    Reads a few hundred bytes per layer and copies no row. Tries every known dialect; a dialect fits only if the state ends
    exactly at the last byte.

    Raises:
        Unsupported: the bytes are not a sequence's state in a known layout, or fit two layouts.
    """
    start = bytes(state[:4])
    if len(state) < PREFIX_BYTES or start != struct.pack("<I", IO_MAGIC):
        begins = f"{int.from_bytes(start, 'little'):#010x}" if len(start) == 4 else f"{len(state)} bytes"
        raise Unsupported(
            what="the layout of this state", reason=f"begins with {begins}, not {IO_MAGIC:#010x} and a sequence id"
        )
    return parse_body(state, PREFIX_BYTES)


def parse_body(data: memoryview, at: int = 0, *, whole_context: bool = False) -> KvState:
    """As `parse`, for the body alone, from byte `at` to the end of `data`.

    With `whole_context`, the body is that of all sequences, as in a ggsn file: cells in any number of streams, or none at all.
    Each cell has the ids of the sequences that it belongs to.

    Raises:
        Unsupported: as `parse`.
    """
    states: list[KvState] = []
    reasons: list[str] = []
    one_by_one: OneByOne = {}
    for dialect in _DIALECTS:
        if states and dialect.n_stream == 0:
            break  # short rows fit the oldest dialect by chance: it has the fewest words to check
        try:
            states.append(_Reader(data, at, dialect, whole_context, one_by_one).state())
        except _Misfit as misfit:
            reasons.append(str(misfit))
    if not states:
        reason = "; or, with rotation words: ".join(reasons[:2])
        raise Unsupported(what="the layout of this state", reason=reason)
    if len(states) > 1 and any(state.first is not None or state.recurrent for state in states):
        fits = " and ".join(f"{state.memory} {state.dialect}" for state in states)
        raise Unsupported(what="the layout of this state", reason=f"it fits more than one: {fits}")
    return states[0]


class _Reader:
    """A cursor that raises `_Misfit` instead of leaving the buffer, and the grammar of one dialect."""

    def __init__(self, data: memoryview, at: int, dialect: Dialect, whole_context: bool, one_by_one: OneByOne) -> None:
        self.one_by_one = one_by_one  # shared by all attempts: they differ only in the bytes behind the cells
        self.data = data
        self.at = at
        self.dialect = dialect
        self.whole_context = whole_context

    def take(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        self.skip(size)
        return struct.unpack_from(layout, self.data, self.at - size)

    def skip(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise _Misfit(f"byte {start} + {size} lies beyond the end at {len(self.data)}")
        return start

    def state(self) -> KvState:
        caches, recurrent = self.sections(())
        return KvState(caches=caches, recurrent=recurrent, cell_extension=self.dialect.cell_extension)

    def sections(self, before: tuple[Cache, ...]) -> tuple[tuple[Cache, ...], Recurrent | None]:
        """The sections from here to the end. No word says whether a cache keeps V: both are tried, with V first."""
        start = self.at
        reason = ""  # the text, not the exception, which would keep this frame and the caller's buffer alive
        for with_v in (True, False) if len(before) < MAX_CACHES else ():
            self.at = start
            try:
                cache = self.cache(with_v)
                for other in before:
                    _require_same_kind(other, cache)
                return self.rest((*before, cache))
            except _Misfit as misfit:
                reason = reason or str(misfit)
        self.at = start
        try:
            return self.recurrent_and_rest(before)
        except _Misfit as misfit:
            raise _Misfit(reason or str(misfit)) from None

    def rest(self, caches: tuple[Cache, ...]) -> tuple[tuple[Cache, ...], Recurrent | None]:
        left = len(self.data) - self.at
        if left == 0:
            return caches, None
        try:
            return self.sections(caches)
        except _Misfit as misfit:
            raise _Misfit(
                f"{left} bytes are left after the last row, and they are no further cache: {misfit}"
            ) from None

    # -- attention ---------------------------------------------------------------------------------------------------

    def cache(self, with_v: bool) -> Cache:
        n_stream = 0
        if self.dialect.n_stream:
            (n_stream,) = self.take("<I")
            if not 1 <= n_stream <= MAX_STREAMS:
                raise _Misfit(f"{n_stream} streams")
        streams: list[Stream] = []
        for index in range(max(n_stream, 1)):
            (n_cells,) = self.take("<I")
            if n_cells == 0 and n_stream:
                continue  # dialects without streams write layers and types even without a cell
            if streams and not self.whole_context:
                raise _Misfit("cells in more than one stream")
            streams.append(self.stream(index, n_cells, with_v))
            _require_like(streams[0], streams[-1])
        if not streams and not self.whole_context:
            raise _Misfit("no cells")
        return Cache(n_stream=n_stream, streams=tuple(streams))

    def stream(self, index: int, n_cells: int, with_v: bool) -> Stream:
        cells_at = self.at
        ids_per_cell, positions = self.ragged_cells(n_cells) if self.whole_context else self.cells(n_cells)
        cells_end = self.at
        v_transposed, n_layer = self.take("<II")
        if v_transposed > 1 or not 1 <= n_layer <= MAX_LAYERS:
            raise _Misfit(f"v_transposed {v_transposed}, {n_layer} layers")
        rotations = self.take("<II") if self.dialect.rotation_words else None
        k = tuple(self.rows(n_cells) for _ in range(n_layer))
        read_v = self.transposed if v_transposed else self.rows
        v = tuple(read_v(n_cells) for _ in range(n_layer if with_v else 0))
        _require_one_type("K", k)
        _require_one_type("V", v)
        may_be_recurrent = self.dialect.n_stream == 0 and (n_cells == 1 or self.whole_context)
        if may_be_recurrent and not v_transposed and _all_f32(k, v):
            raise _Misfit("f32 rows of cells without streams are recurrent memory")
        return Stream(
            index=index,
            cells_at=cells_at,
            cells_end=cells_end,
            ids_per_cell=ids_per_cell,
            positions=positions,
            v_transposed=bool(v_transposed),
            rotation_words=(rotations[0], rotations[1]) if rotations else None,
            k=k,
            v=v,
        )

    def cells(self, n_cells: int) -> tuple[int, Positions]:
        """The cells of one sequence, with one id each, or none in dialects without streams."""
        ids = 1 if self.dialect.n_stream else 0
        words = self.words(n_cells, 2 + self.dialect.cell_extension // 4 + ids)
        if not (words[:, 1] == ids).all():
            raise _Misfit(
                f"a cell that does not belong to exactly {'one sequence' if ids else 'the one that is saved'}"
            )
        return ids, words[:, 0].astype(np.int32)

    def words(self, n_cells: int, per_cell: int) -> Positions:
        start = self.skip(4 * per_cell * n_cells)
        return np.frombuffer(self.data[start : self.at], dtype="<i4").reshape(n_cells, per_cell)

    def ragged_cells(self, n_cells: int) -> tuple[int, Positions]:
        """The cells of a whole context. Each has its own number of sequence ids."""
        start, fixed = self.at, 8 + self.dialect.cell_extension
        try:
            words = self.words(n_cells, fixed // 4 + 1)
            if (words[:, 1] == 1).all():  # nearly always: one sequence
                return 1, words[:, 0].astype(np.int32)
        except _Misfit:
            pass
        self.at = start
        self.skip((fixed + 4) * n_cells)  # checks that the bytes exist before positions are allocated
        self.at = start
        if n_cells > MAX_SHARED_CELLS:
            raise _Misfit(f"{n_cells} cells of several sequences, at most {MAX_SHARED_CELLS} are read")
        key = (start, n_cells, fixed)
        if key not in self.one_by_one:
            self.one_by_one[key] = self.cells_one_by_one(n_cells)
        positions, self.at, problem = self.one_by_one[key]
        if problem:
            raise _Misfit(problem)
        return -1, positions

    def cells_one_by_one(self, n_cells: int) -> tuple[Positions, int, str]:
        """Positions, the offset behind the last cell, and what is wrong with the cells ("" if nothing is)."""
        positions = np.empty(n_cells, dtype=np.int32)
        try:
            for i in range(n_cells):
                positions[i], n_ids = self.take("<iI")
                if not 1 <= n_ids <= MAX_SEQUENCES:
                    return _NO_POSITIONS, self.at, f"cell {i} belongs to {n_ids} sequences"
                self.skip(self.dialect.cell_extension + 4 * n_ids)
        except _Misfit as misfit:
            return _NO_POSITIONS, self.at, str(misfit)
        return positions, self.at, ""

    def rows(self, n_cells: int) -> Rows:
        ggml_type, row_bytes = self.take("<iQ")
        block_bytes = ALL_TYPES[ggml_type].block_bytes if ggml_type in ALL_TYPES else 1
        if row_bytes == 0 or row_bytes % block_bytes:
            raise _Misfit(f"rows of {row_bytes} bytes of {type_name(ggml_type)}")
        return Rows(ggml_type=ggml_type, row_bytes=row_bytes, offset=self.skip(n_cells * row_bytes))

    def transposed(self, n_cells: int) -> Rows:
        ggml_type, element, n_embd = self.take("<iII")
        known = ALL_TYPES[ggml_type].block_bytes if ggml_type in ALL_TYPES else element
        if element == 0 or n_embd == 0 or element != known:
            raise _Misfit(f"transposed V of {n_embd} rows of {element} bytes an element of {type_name(ggml_type)}")
        offset = self.skip(n_cells * n_embd * element)
        return Rows(ggml_type=ggml_type, row_bytes=element * n_embd, offset=offset, element_bytes=element)

    # -- recurrent memory --------------------------------------------------------------------------------------------

    def recurrent_and_rest(self, before: tuple[Cache, ...]) -> tuple[tuple[Cache, ...], Recurrent | None]:
        """Recurrent cells, to the end or up to the cache of an indexer behind them."""
        if not before and self.dialect != _DIALECTS[0]:
            raise _Misfit("recurrent memory alone has but one dialect")
        (n_cells,) = self.take("<I")
        _, positions = self.ragged_cells(n_cells) if self.whole_context else self.recurrent_cells(n_cells)
        transposed, n_layer = self.take("<II")
        if transposed or not 1 <= n_layer <= MAX_LAYERS:
            raise _Misfit(f"s_transposed {transposed}, {n_layer} layers of recurrent memory")
        rows: list[Rows] = []
        while self.at < len(self.data):
            if rows and len(rows) % 2 == 0 and (indexer := self.indexer(before)):
                return (*before, indexer), Recurrent(positions=positions, n_layer=n_layer, rows=tuple(rows))
            if len(rows) == 2 * n_layer:
                raise _Misfit(f"more than {len(rows)} rows of recurrent memory in {n_layer} layers")
            rows.append(self.recurrent_rows(n_cells))
        if len(rows) % 2 or len(rows) < 2:
            raise _Misfit(f"{len(rows)} rows of recurrent memory in {n_layer} layers")
        return before, Recurrent(positions=positions, n_layer=n_layer, rows=tuple(rows))

    def recurrent_cells(self, n_cells: int) -> tuple[int, Positions]:
        if n_cells != 1:  # one sequence has one state
            raise _Misfit(f"{n_cells} recurrent cells of one sequence")
        words = self.words(n_cells, 2)
        if words[0, 1] != 0:
            raise _Misfit("a recurrent cell with sequence ids")
        return 0, words[:, 0].astype(np.int32)

    def recurrent_rows(self, n_cells: int) -> Rows:
        """R or S of a layer, f32 in every model. In models with only short convolutions, the rows of S have no bytes."""
        ggml_type, row_bytes = self.take("<iQ")
        if ggml_type != _F32 or row_bytes % 4:
            raise _Misfit(f"recurrent rows of {row_bytes} bytes of {type_name(ggml_type)}")
        return Rows(ggml_type=ggml_type, row_bytes=row_bytes, offset=self.skip(n_cells * row_bytes))

    def indexer(self, before: tuple[Cache, ...]) -> Cache | None:
        """A cache that ends exactly at the last byte; None if there is none, and then the cursor does not move."""
        start = self.at
        for with_v in (False, True) if before and len(before) < MAX_CACHES else ():
            try:
                cache = self.cache(with_v)
                if self.at == len(self.data):
                    return cache
            except _Misfit:
                pass
            self.at = start
        return None


def _require_one_type(part: str, rows: tuple[Rows, ...]) -> None:
    """Checks that all layers of a cache have the same type: `llama_kv_cache` takes one type_k and one type_v."""
    for layer, of_layer in enumerate(rows):
        if of_layer.ggml_type != rows[0].ggml_type:
            types = f"{type_name(of_layer.ggml_type)}, of layer 0 {type_name(rows[0].ggml_type)}"
            raise _Misfit(f"{part} of layer {layer} is {types}")


def _require_like(one: Stream, two: Stream) -> None:
    """Checks that two streams of a cache have the same types, rows, rotation and order of V."""
    for part in ("k", "v"):
        shapes = [[(r.ggml_type, r.row_bytes, r.element_bytes) for r in getattr(stream, part)] for stream in (one, two)]
        if shapes[0] != shapes[1]:
            raise _Misfit(f"{part.upper()} of stream {two.index} has other types or rows than of stream {one.index}")
    if (one.v_transposed, one.rotation_words) != (two.v_transposed, two.rotation_words):
        raise _Misfit(f"V or rotation of stream {two.index} stands otherwise than of stream {one.index}")


def _require_same_kind(one: Cache, two: Cache) -> None:
    """Checks that caches with V have the same types and streams. An indexer's cache, without V, may differ."""
    if not one.streams or not two.streams or not (one.streams[0].v and two.streams[0].v):
        return
    kinds = [(s.k[0].ggml_type, s.v[0].ggml_type, s.v_transposed) for s in (one.streams[0], two.streams[0])]
    if kinds[0] != kinds[1] or one.n_stream != two.n_stream:
        raise _Misfit("a further cache has other types of K and V, or other streams, than the first")


def _all_f32(k: tuple[Rows, ...], v: tuple[Rows, ...]) -> bool:
    return all(rows.ggml_type == _F32 for rows in (*k, *v))
