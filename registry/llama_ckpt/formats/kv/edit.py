"""Operations on a sequence's state: truncate, tail, join, gather, translate, transpose, replace layers. Pure; states in, states
out.

Each takes states as `llama_state_seq_get_data` gives them and gives one that `llama_state_seq_set_data` takes. The result is,
byte for byte, the state that an engine would write itself (tests/engine/test_live_states.py). It is a new buffer; the inputs
are neither changed nor kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import BadInput, Incompatible, Unsupported
from llama_ckpt.formats.kv.layout import Dialect, KvState
from llama_ckpt.formats.kv.pieces import Block, Piece, Pieces, assemble, selection_of, take_apart
from llama_ckpt.formats.kv.types import is_quantised, type_name

Rotation = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CellRange:
    """The cells of a state whose positions are `start` to `end` - 1."""

    state: memoryview
    start: int
    end: int


def truncate(state: memoryview, n_tokens: int) -> memoryview:
    """The state of the first `n_tokens` positions, as the engine gives it when it holds no more.

    Raises:
        BadInput: `n_tokens` is not 1 to the number of cells.
        Unsupported: the layout is not known, or the memory does not have one cell per token.
    """
    parsed, pieces = take_apart(state)
    first, last = _first_and_last(parsed)
    if not first < n_tokens <= last + 1:
        raise BadInput(what="tokens to cut at", value=n_tokens, reason=f"the state holds positions {first} to {last}")
    return assemble(_select_range(pieces, first, n_tokens))


def tail(state: memoryview, start: int) -> memoryview:
    """The cells from position `start` on: a delta's payload.

    Raises:
        BadInput: `start` is not one of the state's positions.
        Unsupported: as `truncate`.
    """
    parsed, pieces = take_apart(state)
    first, last = _first_and_last(parsed)
    if not first <= start <= last:
        raise BadInput(what="first token of a tail", value=start, reason=f"the state holds positions {first} to {last}")
    return assemble(_select_range(pieces, start, last + 1))


def join(head: memoryview, behind: memoryview) -> memoryview:
    """The state of both: `behind` holds the positions that follow the head's last. The inverse of `truncate` and `tail`.

    Raises:
        Incompatible: the positions of `behind` do not follow those of `head`, or layers, types or layout differ.
        Unsupported: as `truncate`.
    """
    of_head, first = take_apart(head)
    of_tail, second = take_apart(behind)
    last, start = _first_and_last(of_head)[1], _first_and_last(of_tail)[0]
    if start != last + 1:
        raise Incompatible(reason=f"the first state ends with position {last}, the second begins with {start}")
    return assemble(_concatenate([first, second]))


def gather(ranges: Sequence[CellRange]) -> memoryview:
    """One state from ranges of several states, each of which starts at the end of the one before: a chain of deltas with their
    first parent. Allocates one buffer of the result's size for any number of ranges.

    Raises:
        Incompatible: a state does not have all positions of its range, or layers, types or layout differ.
        Unsupported: as `truncate`.
    """
    selected = []
    for part in ranges:
        parsed, pieces = take_apart(part.state)
        first, last = _first_and_last(parsed)
        if not first <= part.start < part.end <= last + 1:
            raise Incompatible(
                reason=f"positions {part.start} to {part.end - 1} of a state that holds {first} to {last}"
            )
        selected.append(_select_range(pieces, part.start, part.end))
    return assemble(_concatenate(selected))


def equal_cells(one: memoryview, two: memoryview) -> int:
    """The number of cells, from the first position on, that are bit for bit the same in both states in every layer. 0 for
    states that start at different positions, have their cells in another order, or differ in layers, types or layout.

    Raises:
        Unsupported: as `truncate`.
    """
    (_, first), (_, second) = take_apart(one), take_apart(two)
    try:
        require_same_shape(first, second)
    except Incompatible:
        return 0
    n = min(_in_order(piece.positions) for piece in (*first.caches, *second.caches))
    for a, b in zip(first.caches, second.caches, strict=True):
        n = _equal_rows(a.cells, b.cells, n)
        for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True):
            n = _equal_rows(x.parts[0][0], y.parts[0][0], n)
    return n


def _in_order(positions: NDArray[np.int32]) -> int:
    """The number of cells, from the first on, whose positions follow one another."""
    steps = np.flatnonzero(np.diff(positions) != 1)
    return int(steps[0]) + 1 if steps.size else len(positions)


def _equal_rows(one: NDArray[Any], two: NDArray[Any], n: int) -> int:
    """The number of equal rows at the start of the first `n`."""
    a, b = one[:n], two[:n]
    contiguous = a.flags.c_contiguous and b.flags.c_contiguous
    if contiguous and a.reshape(-1).view(np.uint8).data == b.reshape(-1).view(np.uint8).data:  # one memcmp
        return n
    differ = (a != b).any(axis=1)
    return int(differ.argmax()) if differ.any() else n


def to_dialect(
    state: memoryview,
    dialect: Dialect,
    *,
    seq_id: int = 0,
    rotation: Rotation | None = None,
    now: Rotation | None = None,
) -> memoryview:
    """The same cells as an engine of that dialect writes them for sequence `seq_id`.

    `rotation` are the sizes of the rotations of K and V (0: none), for a state that does not contain them; `now` are those of
    the engine. Both are needed only if one of the dialects has rotation words, the other does not, and a type is quantised:
    engines do not rotate float types.

    Raises:
        Incompatible: state and engine rotate differently, or the engine has no such sequence.
        Unsupported: as `truncate`; or the rotation is not known, the cells' extensions differ, or the dialect is that of an
            engine without streams: such states are read, not written.
    """
    parsed, pieces = take_apart(state)
    if dialect.cell_extension != parsed.cell_extension:
        raise Unsupported(
            what="translating this state",
            reason=f"its cells have {parsed.cell_extension} bytes more, the engine's {dialect.cell_extension}",
        )
    if dialect.n_stream < 1:
        raise Unsupported(what=f"the dialect {dialect}", reason="states of before streams are read, not written")
    # all sequences share a single stream; with more streams, sequence n is in stream n
    if seq_id < 0 or (dialect.n_stream > 1 and seq_id >= dialect.n_stream):
        raise Incompatible(reason=f"there is no sequence {seq_id} in an engine of {dialect.n_stream} streams")
    caches = tuple(
        replace(
            piece,
            n_stream=dialect.n_stream,
            index=seq_id if dialect.n_stream > 1 else 0,
            rotation_words=_rotation_words(piece, dialect, rotation, now),
        )
        for piece in pieces.caches
    )
    return assemble(replace(pieces, seq_id=seq_id, cell_id=seq_id, caches=caches))


def transpose_v(state: memoryview, *, transposed: bool) -> memoryview:
    """The same values with V by element (`transposed`: contexts without flash attention) or by cell (with it).

    The two modes compute slightly different values, so a transposed state continues about as well as a state that the engine
    computed itself, but not equally: callers make it optional.

    Raises:
        Unsupported: V is quantised, so that its blocks cannot be transposed; or as `truncate`.
    """
    _, pieces = take_apart(state)
    caches = []
    for piece in pieces.caches:
        for block in piece.v:
            if is_quantised(block.ggml_type):
                what = f"turning V of type {type_name(block.ggml_type)}"
                raise Unsupported(what=what, reason="only float types can be turned: a block holds 32 values of a row")
        caches.append(replace(piece, v_transposed=transposed))
    return assemble(replace(pieces, caches=tuple(caches)))


def replace_layers(state: memoryview, other: memoryview, layers: Iterable[int]) -> memoryview:
    """`state` with K and V of some layers from `other`. Layers count over all caches, in the state's order.

    Raises:
        BadInput: a layer that the state does not have.
        Incompatible: the states hold other positions, or layers, types or layout differ.
        Unsupported: as `truncate`.
    """
    parsed, mine = take_apart(state)
    _, theirs = take_apart(other)
    require_same_shape(mine, theirs)
    wanted = set(layers)
    if unknown := sorted(layer for layer in wanted if not 0 <= layer < parsed.n_layer):
        raise BadInput(what="layers", value=unknown, reason=f"the state has layers 0 to {parsed.n_layer - 1}")
    caches, before = [], 0
    for one, two in zip(mine.caches, theirs.caches, strict=True):
        if not np.array_equal(one.positions, two.positions):
            raise Incompatible(reason=f"positions {_span(one)} here, {_span(two)} in the other state")
        caches.append(
            replace(
                one,
                k=tuple(two.k[i] if before + i in wanted else block for i, block in enumerate(one.k)),
                v=tuple(two.v[i] if before + i in wanted else block for i, block in enumerate(one.v)),
            )
        )
        before += len(one.k)
    return assemble(replace(mine, caches=tuple(caches)))


def require_same_shape(one: Pieces, two: Pieces) -> None:
    """Checks that two states have the same caches, layers, types, row sizes and dialect.

    Raises:
        Incompatible: the first difference.
    """
    if (len(one.caches), one.extension) != (len(two.caches), two.extension):
        raise Incompatible(reason=f"{len(one.caches)} caches in one state, {len(two.caches)} in the other")
    for a, b in zip(one.caches, two.caches, strict=True):
        for what, of_one, of_two in (
            ("layers", len(a.k), len(b.k)),
            ("layers with V", len(a.v), len(b.v)),
            ("V transposed", a.v_transposed, b.v_transposed),
            ("streams", a.n_stream, b.n_stream),
            ("rotation words", a.rotation_words, b.rotation_words),
        ):
            if of_one != of_two:
                raise Incompatible(reason=f"{what}: {of_one} in one state, {of_two} in the other")
        for part in ("k", "v"):
            for layer, (x, y) in enumerate(zip(getattr(a, part), getattr(b, part), strict=True)):
                if (x.ggml_type, x.row_bytes) != (y.ggml_type, y.row_bytes):
                    raise Incompatible(reason=f"{part.upper()} of layer {layer}: {_shape(x)}, in the other {_shape(y)}")


def _first_and_last(state: KvState) -> tuple[int, int]:
    """The first and the last position of a state's cells."""
    return int(state.positions.min()), int(state.positions.max())


def _select_range(pieces: Pieces, start: int, end: int) -> Pieces:
    """The cells of positions start .. end-1."""
    caches = (
        piece.select(selection_of((piece.positions >= start) & (piece.positions < end))) for piece in pieces.caches
    )
    return replace(pieces, caches=tuple(caches))


def _concatenate(parts: Sequence[Pieces]) -> Pieces:
    """The cells of all parts, in their order."""
    for other in parts[1:]:
        require_same_shape(parts[0], other)
    caches = tuple(
        replace(
            same[0],
            cells=np.concatenate([piece.cells for piece in same]),
            k=tuple(_concatenate_blocks(blocks) for blocks in zip(*(piece.k for piece in same), strict=True)),
            v=tuple(_concatenate_blocks(blocks) for blocks in zip(*(piece.v for piece in same), strict=True)),
        )
        for same in zip(*(pieces.caches for pieces in parts), strict=True)
    )
    return replace(parts[0], caches=caches)


def _concatenate_blocks(blocks: Sequence[Block]) -> Block:
    return replace(blocks[0], parts=tuple(part for block in blocks for part in block.parts))


def _rotation_words(piece: Piece, dialect: Dialect, rotation: Rotation | None, now: Rotation | None) -> Rotation | None:
    """The rotation words in the target dialect, None if it has none, after a check that state and engine rotate alike."""
    stated = piece.rotation_words
    if not dialect.rotation_words and stated is None:
        if None not in (rotation, now) and rotation != now:
            raise Incompatible(reason=f"K and V rotated by {rotation} in the state, by {now} in the engine")
        return None
    of_state = stated if stated is not None else _certain_rotation(piece, rotation)
    of_engine = now if dialect.rotation_words else _certain_rotation(piece, now)
    if of_state is None:
        raise Unsupported(
            what="translating this state",
            reason=f"{_types(piece)} caches may be rotated, this state does not say whether it is",
        )
    if of_engine is None and not dialect.rotation_words:
        raise Unsupported(
            what="translating this state",
            reason=f"{_types(piece)} caches may be rotated, and the engine's dialect does not say whether its are",
        )
    if of_engine is not None and of_engine != of_state:
        raise Incompatible(reason=f"K and V rotated by {of_state} in the state, by {of_engine} in the engine")
    return of_state if dialect.rotation_words else None


def _certain_rotation(piece: Piece, stated: Rotation | None) -> Rotation | None:
    """The rotation as stated, or (0, 0) because no type is quantised; None if it is not certain.

    A cache without V may be that of an indexer, which some models rotate for every type.
    """
    if stated is not None or not piece.v:
        return stated
    return None if any(is_quantised(block.ggml_type) for block in (*piece.k, *piece.v)) else (0, 0)


def _types(piece: Piece) -> str:
    return " and ".join(sorted({type_name(block.ggml_type) for block in (*piece.k, *piece.v)}))


def _shape(block: Block) -> str:
    return f"{type_name(block.ggml_type)} rows of {block.row_bytes} bytes"


def _span(piece: Piece) -> str:
    return f"{int(piece.positions.min())} to {int(piece.positions.max())} ({len(piece.positions)} cells)"
