"""Operations on a sequence's state: cut, tail, join, gather, translate, transpose, replace layers. Pure; states in, states out.

Each takes states as `llama_state_seq_get_data` gives them and gives one that `llama_state_seq_set_data` takes. What an
engine itself would have written for the result is what comes out, byte for byte (tests/engine/test_live_states.py).
The result is a new buffer; nothing of the given ones is changed or kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import BadInput, Incompatible, Unsupported
from llama_ckpt.formats.kv.layout import Dialect, KvState
from llama_ckpt.formats.kv.pieces import Block, Piece, Pieces, assemble, selection, take_apart
from llama_ckpt.formats.kv.types import is_quantised, type_name

Rotation = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CellRange:
    """The cells of a state whose positions are `start` to `end` - 1."""

    state: memoryview
    start: int
    end: int


def cut(state: memoryview, n_tokens: int) -> memoryview:
    """The state of the first `n_tokens` positions: what the engine itself returns when it holds no more.

    Raises:
        BadInput: `n_tokens` is not 1 to the number of cells.
        Unsupported: the layout is not known, or its memory has not one cell a token.
    """
    parsed, pieces = take_apart(state)
    first, last = _ends(parsed)
    if not first < n_tokens <= last + 1:
        raise BadInput(what="tokens to cut at", value=n_tokens, reason=f"the state holds positions {first} to {last}")
    return assemble(_between(pieces, first, n_tokens))


def tail(state: memoryview, start: int) -> memoryview:
    """The state with only the cells from position `start` on: a delta's payload.

    Raises:
        BadInput: `start` is not one of the state's positions.
        Unsupported: as `cut`.
    """
    parsed, pieces = take_apart(state)
    first, last = _ends(parsed)
    if not first <= start <= last:
        raise BadInput(what="first token of a tail", value=start, reason=f"the state holds positions {first} to {last}")
    return assemble(_between(pieces, start, last + 1))


def join(head: memoryview, behind: memoryview) -> memoryview:
    """The state of both: `behind` holds the positions that follow the head's last. The inverse of `cut` and `tail`.

    Raises:
        Incompatible: the positions do not follow one another, or layers, types or layout differ.
        Unsupported: as `cut`.
    """
    of_head, first = take_apart(head)
    of_tail, second = take_apart(behind)
    last, start = _ends(of_head)[1], _ends(of_tail)[0]
    if start != last + 1:
        raise Incompatible(reason=f"the first state ends with position {last}, the second begins with {start}")
    return assemble(_joined([first, second]))


def gather(stretches: Sequence[CellRange]) -> memoryview:
    """One state of stretches of several, each of which begins where the one before it ends: a chain of deltas with what they
    stand on. Costs one buffer of the result's size, however many they are.

    Raises:
        Incompatible: a state has not all positions of its stretch, or layers, types or layout differ.
        Unsupported: as `cut`.
    """
    taken = []
    for one in stretches:
        parsed, pieces = take_apart(one.state)
        first, last = _ends(parsed)
        if not first <= one.start < one.end <= last + 1:
            raise Incompatible(reason=f"positions {one.start} to {one.end - 1} of a state that holds {first} to {last}")
        taken.append(_between(pieces, one.start, one.end))
    return assemble(_joined(taken))


def equal_cells(one: memoryview, two: memoryview) -> int:
    """How many cells from the first position on are the same in both states, bit for bit, in every layer. 0 for states that
    begin at other positions, hold their cells in another order, or differ in layers, types or layout.

    Raises:
        Unsupported: as `cut`.
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
    """How many cells from the first on stand at one position after the other."""
    steps = np.flatnonzero(np.diff(positions) != 1)
    return int(steps[0]) + 1 if steps.size else len(positions)


def _equal_rows(one: NDArray[Any], two: NDArray[Any], n: int) -> int:
    """How many of the first `n` rows are equal."""
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

    `rotation` is how K and V of the state are rotated, for a state that does not tell (0: not), `now` how the engine does.
    Both need saying only where a dialect with rotation words meets one without and a type is quantised: of float types an
    engine rotates none.

    Raises:
        Incompatible: state and engine rotate differently, or the engine has no such sequence.
        Unsupported: as `cut`; or the rotation is not known, the cells' extensions differ, or the dialect is of an engine from
            before streams, which is read only.
    """
    parsed, pieces = take_apart(state)
    if dialect.cell_extension != parsed.cell_extension:
        raise Unsupported(
            what="translating this state",
            reason=f"its cells have {parsed.cell_extension} bytes more, the engine's {dialect.cell_extension}",
        )
    if dialect.n_stream < 1:
        raise Unsupported(what=f"the dialect {dialect}", reason="states of before streams are read, not written")
    # with one stream all sequences share it; with more, sequence n lives in stream n
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
    """The same numbers with V by element (`transposed`, contexts without flash attention) or by cell (with it).

    The two modes compute slightly different numbers, so a state carried over continues as good as, not equal to, a fresh
    one: a caller offers it as a choice.

    Raises:
        Unsupported: V is quantised: its blocks cannot be turned; or as `cut`.
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
    """`state` with K and V of some layers as in `other`. Layers count over all caches, in the state's order.

    Raises:
        BadInput: a layer that is not there.
        Incompatible: the states hold other positions, or layers, types or layout differ.
        Unsupported: as `cut`.
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
    """Holds two states to the same caches, layers, types, row sizes and dialect.

    Raises:
        Incompatible: naming what differs.
    """
    if (len(one.caches), one.extension) != (len(two.caches), two.extension):
        raise Incompatible(reason=f"{len(one.caches)} caches in one state, {len(two.caches)} in the other")
    for a, b in zip(one.caches, two.caches, strict=True):
        for what, here, there in (
            ("layers", len(a.k), len(b.k)),
            ("layers with V", len(a.v), len(b.v)),
            ("V transposed", a.v_transposed, b.v_transposed),
            ("streams", a.n_stream, b.n_stream),
            ("rotation words", a.rotation_words, b.rotation_words),
        ):
            if here != there:
                raise Incompatible(reason=f"{what}: {here} in one state, {there} in the other")
        for part in ("k", "v"):
            for layer, (x, y) in enumerate(zip(getattr(a, part), getattr(b, part), strict=True)):
                if (x.ggml_type, x.row_bytes) != (y.ggml_type, y.row_bytes):
                    raise Incompatible(reason=f"{part.upper()} of layer {layer}: {_shape(x)}, in the other {_shape(y)}")


def _ends(state: KvState) -> tuple[int, int]:
    """The first and the last position of a state's cells."""
    return int(state.positions.min()), int(state.positions.max())


def _between(pieces: Pieces, start: int, end: int) -> Pieces:
    """The cells of positions start .. end-1."""

    def chosen(piece: Piece) -> Piece:
        return piece.of(selection((piece.positions >= start) & (piece.positions < end)))

    return replace(pieces, caches=tuple(chosen(piece) for piece in pieces.caches))


def _joined(parts: Sequence[Pieces]) -> Pieces:
    """The cells of all parts, in their order."""
    for other in parts[1:]:
        require_same_shape(parts[0], other)
    caches = tuple(
        replace(
            same[0],
            cells=np.concatenate([piece.cells for piece in same]),
            k=tuple(_end_to_end(blocks) for blocks in zip(*(piece.k for piece in same), strict=True)),
            v=tuple(_end_to_end(blocks) for blocks in zip(*(piece.v for piece in same), strict=True)),
        )
        for same in zip(*(pieces.caches for pieces in parts), strict=True)
    )
    return replace(parts[0], caches=caches)


def _end_to_end(blocks: Sequence[Block]) -> Block:
    return replace(blocks[0], parts=tuple(part for block in blocks for part in block.parts))


def _rotation_words(piece: Piece, dialect: Dialect, rotation: Rotation | None, now: Rotation | None) -> Rotation | None:
    """What the target dialect says of the rotation, after it was made sure that both sides mean the same."""
    stated = piece.rotation_words
    if not dialect.rotation_words and stated is None:
        if None not in (rotation, now) and rotation != now:
            raise Incompatible(reason=f"K and V rotated by {rotation} in the state, by {now} in the engine")
        return None
    of_state = stated if stated is not None else _known(piece, rotation)
    of_engine = now if dialect.rotation_words else _known(piece, now)
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


def _known(piece: Piece, said: Rotation | None) -> Rotation | None:
    """The rotation where it is beyond doubt: as somebody said, or none because no type is quantised.

    A cache without V may be an indexer's, which some models rotate whatever its type.
    """
    if said is not None or not piece.v:
        return said
    return None if any(is_quantised(block.ggml_type) for block in (*piece.k, *piece.v)) else (0, 0)


def _types(piece: Piece) -> str:
    return " and ".join(sorted({type_name(block.ggml_type) for block in (*piece.k, *piece.v)}))


def _shape(block: Block) -> str:
    return f"{type_name(block.ggml_type)} rows of {block.row_bytes} bytes"


def _span(piece: Piece) -> str:
    return f"{int(piece.positions.min())} to {int(piece.positions.max())} ({len(piece.positions)} cells)"
