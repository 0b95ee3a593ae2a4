"""The values of a parsed state: caches, streams, rows, and the dialects in which engines differ. Pure.

A state is one or more *sections*: attention caches (one for an ordinary model, two for one with a sliding window or an
indexer, three for a few) and, for recurrent and hybrid models, the recurrent cells. docs/formats.md has the byte tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import BadInput, Unsupported
from llama_ckpt.formats.kv.types import type_name

Positions = NDArray[np.int32]
_NONE = np.empty(0, dtype=np.int32)


class Dialect(NamedTuple):
    """How an engine lays out the state of a model with given types and layers.

    `n_stream` is 0 for engines without streams (llama.cpp until July 2025: no count of streams, cells without sequence ids).
    `rotation_words` says whether two words give the rotation of K and V (ggsq 4, ggsn 11). `cell_extension` is the number of
    extra bytes in each cell for models with 2-D positions: 8 (x, y) or 12 (x, y, token id).
    """

    n_stream: int = 1
    rotation_words: bool = False
    cell_extension: int = 0

    def __str__(self) -> str:
        extension = f" cell_extension={self.cell_extension}" if self.cell_extension else ""
        return f"streams={self.n_stream} rotation_words={int(self.rotation_words)}{extension}"

    @classmethod
    def from_text(cls, text: str) -> Dialect:
        """The inverse of `str()`.

        Raises:
            BadInput: the text is not a dialect.
        """
        try:
            words = {name: int(value) for name, value in (word.split("=") for word in text.split())}
            dialect = cls(words["streams"], bool(words["rotation_words"]), words.get("cell_extension", 0))
        except (ValueError, KeyError) as error:
            raise BadInput(what="dialect", value=text, reason="it is none") from error
        if str(dialect) != text:
            raise BadInput(what="dialect", value=text, reason="it is none")
        return dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One layer's K or V, from byte `offset` on: `n_cells` rows of `row_bytes`. If `element_bytes` is set, it is transposed:
    `row_bytes / element_bytes` runs of `n_cells` elements.
    """

    ggml_type: int
    row_bytes: int
    offset: int
    element_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The cells of one stream of a cache and their rows. `positions` has shape `[n_cells]`; K and V have one entry per layer.

    The words of the cells are at bytes `cells_at` to `cells_end`. Each cell has `ids_per_cell` sequence ids; -1 means that each
    cell has its own count (only in the state of a whole context).
    """

    index: int
    cells_at: int
    cells_end: int
    ids_per_cell: int
    positions: Positions
    v_transposed: bool
    rotation_words: tuple[int, int] | None
    k: tuple[Rows, ...]
    v: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One attention cache: those of its streams that have cells."""

    n_stream: int
    streams: tuple[Stream, ...]

    @property
    def n_cells(self) -> int:
        """Number of cells in all streams."""
        return sum(len(stream.positions) for stream in self.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """The recurrent cells of a state: R of each layer that has it, then S of each. They cannot be truncated at a token."""

    positions: Positions
    n_layer: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """A state, parsed to its last byte. Properties of one cache (`positions`, `k`, `v`, …) are those of the first."""

    caches: tuple[Cache, ...]
    recurrent: Recurrent | None = None
    cell_extension: int = 0

    @property
    def first(self) -> Stream | None:
        """The first stream with cells; None for a model with only recurrent memory, or if there are no cells."""
        return next((stream for cache in self.caches for stream in cache.streams), None)

    @property
    def n_stream(self) -> int:
        """Number of streams of a cache; 0 if the dialect has none."""
        return self.caches[0].n_stream if self.caches else 0

    @property
    def positions(self) -> Positions:
        """Positions of the first cache's cells; shape `[n_cells]`."""
        return self.first.positions if self.first else _NONE

    @property
    def v_transposed(self) -> bool:
        """Whether V is stored by element, not by cell: contexts without flash attention."""
        return self.first.v_transposed if self.first else False

    @property
    def rotation_words(self) -> tuple[int, int] | None:
        """Sizes of the rotations of K and V, 0 for none; None if the dialect has no rotation words."""
        return self.first.rotation_words if self.first else None

    @property
    def k(self) -> tuple[Rows, ...]:
        """K of the first cache's layers."""
        return self.first.k if self.first else ()

    @property
    def v(self) -> tuple[Rows, ...]:
        """V of the first cache's layers; empty for models that do not keep V."""
        return self.first.v if self.first else ()

    @property
    def n_cells(self) -> int:
        """Number of cells of the first cache: one per token for one sequence of full attention."""
        return len(self.positions)

    @property
    def n_layer(self) -> int:
        """Number of layers that keep K, over all caches."""
        return sum(len(cache.streams[0].k) for cache in self.caches if cache.streams)

    @property
    def token_bytes(self) -> int:
        """Size of K and V of one token over all layers of all caches, in bytes."""
        streams = [cache.streams[0] for cache in self.caches if cache.streams]
        return sum(rows.row_bytes for stream in streams for rows in (*stream.k, *stream.v))

    @property
    def type_k(self) -> str:
        """Ggml's name of layer 0's K type; "none" if there is no attention cache."""
        return type_name(self.k[0].ggml_type) if self.k else "none"

    @property
    def type_v(self) -> str:
        """Ggml's name of layer 0's V type; "none" for a model that does not keep V."""
        return type_name(self.v[0].ggml_type) if self.v else "none"

    @property
    def layout(self) -> Dialect:
        """The dialect, which must agree with that of the engine that reads the state, as model and types must."""
        return Dialect(self.n_stream, self.rotation_words is not None, self.cell_extension)

    @property
    def dialect(self) -> str:
        """`layout` as text, for metadata and messages."""
        return str(self.layout)

    @property
    def memory(self) -> str:
        """The kind of memory by the sections: "full", "swa" (a later cache has fewer cells), "caches" (several caches with the
        same number of cells: a short sliding-window state, or one with an indexer), "recurrent" or "hybrid".
        """
        if self.recurrent is not None:
            return "hybrid" if self.caches else "recurrent"
        if len(self.caches) == 1:
            return "full"
        return "caches" if len({cache.n_cells for cache in self.caches}) == 1 else "swa"


def not_sliceable(state: KvState) -> str | None:
    """Why a state cannot be truncated, joined or read from a token on; None if it can.

    It can if all of its memory is attention and every cache has the same positions, each once and without a gap.
    """
    if state.recurrent is not None:
        return f"{state.memory} memory holds one state of all tokens, not one a token"
    streams = [cache.streams for cache in state.caches]
    if any(len(of_cache) != 1 for of_cache in streams):
        return "it holds no cells, or cells of more than one stream"
    reference = np.sort(state.positions)
    if not len(reference):
        return "it holds no cells"
    span = int(reference[-1]) - int(reference[0]) + 1
    if span != len(reference) or not (np.diff(reference) == 1).all():
        return "its positions have a gap, or one twice"
    for number, (stream,) in enumerate(streams[1:], 1):
        if not np.array_equal(np.sort(stream.positions), reference):
            return (
                f"cache {number} holds {len(stream.positions)} of {len(reference)} cells: its window has moved on, "
                "and what fell out of it cannot be had back"
            )
    return None


def require_plain_sequence(state: KvState, n_tokens: int, start: int = 0) -> None:
    """Checks that a state is that of a full attention checkpoint: one cell at each position start .. n_tokens-1.

    Raises:
        Unsupported: another number of cells, a position that is missing or occurs twice, or memory other than attention.
    """
    if state.n_cells != n_tokens - start:
        raise Unsupported(what="this state", reason=f"it has {state.n_cells} cells for {n_tokens - start} tokens")
    if not np.array_equal(np.sort(state.positions), np.arange(start, n_tokens, dtype=np.int32)):
        raise Unsupported(what="this state", reason=f"its positions are not {start} to {n_tokens - 1}, once each")
    if why := not_sliceable(state):
        raise Unsupported(what="this state", reason=why)


def require_whole_sequence(state: KvState, n_tokens: int) -> None:
    """Checks that a state that cannot be truncated (sliding windows, recurrent memory) is that of `n_tokens` tokens: every part
    of it ends with the last token and has no position twice.

    Raises:
        Unsupported: a part has no cells, ends with another position, or has a position twice.
    """
    parts = [stream.positions for cache in state.caches for stream in cache.streams]
    if any(len(cache.streams) != 1 for cache in state.caches) or (not parts and state.recurrent is None):
        raise Unsupported(what="this state", reason="a part of it holds nothing, or more than one sequence")
    if state.recurrent is not None:
        parts.append(state.recurrent.positions)
    for positions in parts:
        last = int(positions.max()) if len(positions) else -1
        if last != n_tokens - 1 or len(np.unique(positions)) != len(positions) or int(positions.min()) < 0:
            raise Unsupported(what="this state", reason=f"a part of it ends with position {last}, of {n_tokens} tokens")
