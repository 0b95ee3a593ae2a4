"""Extract one sequence's state from the body of a whole context, as in ggsn files. Pure.

Source: `llama_kv_cache::state_write` with sequence -1 (llama.cpp b11434, src/llama-kv-cache.cpp). The body is the same, but
every cell lists all sequences that it belongs to, and there may be cells of several streams.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import Unsupported
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import KvState, Positions, Stream
from llama_ckpt.formats.kv.pieces import Piece, Pieces, assemble, block_of, selection_of


def sequence_state(body: memoryview, seq_id: int = 0) -> memoryview:
    """The state of one sequence of a whole context, as `llama_state_seq_get_data` gives it.

    Raises:
        Unsupported: the layout is not known, the memory is recurrent, or no cell belongs to that sequence.
    """
    state = kv_state.parse_body(body, whole_context=True)
    if state.recurrent is not None:
        raise Unsupported(what="taking one sequence out of this context", reason=f"it has {state.memory} memory")
    pieces = []
    for number, cache in enumerate(state.caches):
        stream, mask = _only_stream(body, state, number, seq_id)
        pieces.append(_piece(body, state, cache.n_stream, stream).select(selection_of(mask)))
    sequence = Pieces(seq_id=seq_id, cell_id=seq_id, extension=state.cell_extension, caches=tuple(pieces))
    return assemble(sequence)


def positions_of(body: memoryview, state: KvState, seq_id: int = 0) -> list[Positions]:
    """The positions of one sequence in each cache of a whole context; each of shape `[n_cells]`.

    Raises:
        Unsupported: a cache has no cell of that sequence, or has cells of it in several streams.
    """
    selected = (_only_stream(body, state, number, seq_id) for number in range(len(state.caches)))
    return [stream.positions[mask] for stream, mask in selected]


def _only_stream(body: memoryview, state: KvState, number: int, seq_id: int) -> tuple[Stream, NDArray[np.bool_]]:
    """The only stream of a cache with cells of a sequence, and the mask of these cells; shape `[n_cells]`."""
    of_streams = [(stream, _holds(body, state, stream, seq_id)) for stream in state.caches[number].streams]
    holding = [(stream, mask) for stream, mask in of_streams if mask.any()]
    if len(holding) != 1:
        reason = f"cache {number} has cells of sequence {seq_id} in {len(holding)} streams"
        raise Unsupported(what="taking one sequence out of this context", reason=reason)
    return holding[0]


def sequences(body: memoryview) -> dict[int, int]:
    """The number of cells in the first cache of each sequence of a whole context.

    Raises:
        Unsupported: the layout is not known.
    """
    state = kv_state.parse_body(body, whole_context=True)
    counts: dict[int, int] = {}
    for stream in state.caches[0].streams if state.caches else ():
        for ids in _ids(body, state, stream):
            for seq_id in ids:
                counts[seq_id] = counts.get(seq_id, 0) + 1
    return counts


def _ids(body: memoryview, state: KvState, stream: Stream) -> Iterator[tuple[int, ...]]:
    """The sequence ids of each cell, in order of the cells."""
    at = stream.cells_at
    for _ in range(len(stream.positions)):
        (n_ids,) = struct.unpack_from("<I", body, at + 4)
        at += 8 + state.cell_extension
        yield struct.unpack_from(f"<{n_ids}i", body, at)
        at += 4 * n_ids


def _holds(body: memoryview, state: KvState, stream: Stream, seq_id: int) -> NDArray[np.bool_]:
    """The mask of the cells that belong to a sequence; shape `[n_cells]`."""
    if stream.ids_per_cell == 1:
        return np.asarray(_table(body, state, stream)[:, -1] == seq_id)
    ids_of_cells = _ids(body, state, stream)
    return np.fromiter((seq_id in ids for ids in ids_of_cells), dtype=np.bool_, count=len(stream.positions))


def _table(body: memoryview, state: KvState, stream: Stream) -> NDArray[np.int32]:
    """The words of cells with one sequence id each; shape `[n_cells, words]`."""
    words = 3 + state.cell_extension // 4
    flat = np.frombuffer(body, dtype="<i4", count=len(stream.positions) * words, offset=stream.cells_at)
    return flat.reshape(-1, words)


def _piece(body: memoryview, state: KvState, n_stream: int, stream: Stream) -> Piece:
    n_cells, extra = len(stream.positions), state.cell_extension // 4
    cells = np.empty((n_cells, 1 + extra), dtype=np.int32)
    cells[:, 0] = stream.positions
    if extra and stream.ids_per_cell == 1:
        cells[:, 1:] = _table(body, state, stream)[:, 2:-1]
    elif extra:
        at = stream.cells_at
        for i, ids in enumerate(_ids(body, state, stream)):
            cells[i, 1:] = struct.unpack_from(f"<{extra}i", body, at + 8)
            at += 8 + state.cell_extension + 4 * len(ids)
    return Piece(
        n_stream=n_stream,
        index=stream.index,
        cells=cells,
        v_transposed=stream.v_transposed,
        rotation_words=stream.rotation_words,
        k=tuple(block_of(body, rows, n_cells) for rows in stream.k),
        v=tuple(block_of(body, rows, n_cells) for rows in stream.v),
    )
