"""What the engine's memory looks like in a state: caches, streams, rows, and the dialects that differ between engines. Pure.

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
    """How an engine lays out the state of a model whose types and layers are given.

    `n_stream` is 0 for engines from before streams (llama.cpp until July 2025: no count of streams, cells without sequence
    ids), `rotation_words` says whether two words tell the rotation of K and V (ggsq 4, ggsn 11), `cell_extension` the bytes
    that each cell has more for models with 2-D positions: 8 (x, y) or 12 (x, y, token id).
    """

    n_stream: int = 1
    rotation_words: bool = False
    cell_extension: int = 0

    def __str__(self) -> str:
        extension = f" cell_extension={self.cell_extension}" if self.cell_extension else ""
        return f"streams={self.n_stream} rotation_words={int(self.rotation_words)}{extension}"

    @classmethod
    def from_text(cls, text: str) -> Dialect:
        """The dialect that `str()` of it gave.

        Raises:
            BadInput: the text is no dialect.
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
    """One layer's K or V, from byte `offset` on: `n_cells` rows of `row_bytes`; where `element_bytes` is set, transposed:
    `row_bytes / element_bytes` runs of `n_cells` elements.
    """

    ggml_type: int
    row_bytes: int
    offset: int
    element_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The cells of one stream of a cache and their rows. `positions` has shape `[n_cells]`; K and V one entry a layer.

    The cells' words stand at bytes `cells_at` to `cells_end`; each has `ids_per_cell` sequence ids, or as many as it says
    itself where that is -1 (a whole context's state only).
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
    """One attention cache: the streams of it that hold cells."""

    n_stream: int
    streams: tuple[Stream, ...]

    @property
    def n_cells(self) -> int:
        """Cells in all streams."""
        return sum(len(stream.positions) for stream in self.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """The recurrent cells of a state: R of each layer that has it, then S of each. They cannot be cut at a token."""

    positions: Positions
    n_layer: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """A state, parsed to its last byte. What speaks of one cache (`positions`, `k`, `v`, …) speaks of the first."""

    caches: tuple[Cache, ...]
    recurrent: Recurrent | None = None
    cell_extension: int = 0

    @property
    def first(self) -> Stream | None:
        """The stream with cells of the first cache; None for a model with nothing but recurrent memory, or no cells."""
        return next((stream for cache in self.caches for stream in cache.streams), None)

    @property
    def n_stream(self) -> int:
        """Streams of a cache; 0 where the dialect has none."""
        return self.caches[0].n_stream if self.caches else 0

    @property
    def positions(self) -> Positions:
        """Positions of the first cache's cells; shape `[n_cells]`."""
        return self.first.positions if self.first else _NONE

    @property
    def v_transposed(self) -> bool:
        """Whether V stands by element and not by cell: contexts without flash attention."""
        return self.first.v_transposed if self.first else False

    @property
    def rotation_words(self) -> tuple[int, int] | None:
        """Sizes of the rotations of K and V, 0 for none; None where the dialect does not tell."""
        return self.first.rotation_words if self.first else None

    @property
    def k(self) -> tuple[Rows, ...]:
        """K of the first cache's layers."""
        return self.first.k if self.first else ()

    @property
    def v(self) -> tuple[Rows, ...]:
        """V of the first cache's layers; empty for models that keep none."""
        return self.first.v if self.first else ()

    @property
    def n_cells(self) -> int:
        """Cells of the first cache: for one sequence of full attention one a token."""
        return len(self.positions)

    @property
    def n_layer(self) -> int:
        """Layers that keep K, over all caches."""
        return sum(len(cache.streams[0].k) for cache in self.caches if cache.streams)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers of all caches."""
        streams = [cache.streams[0] for cache in self.caches if cache.streams]
        return sum(rows.row_bytes for stream in streams for rows in (*stream.k, *stream.v))

    @property
    def type_k(self) -> str:
        """Ggml's name of layer 0's K type, "none" where there is no attention cache."""
        return type_name(self.k[0].ggml_type) if self.k else "none"

    @property
    def type_v(self) -> str:
        """Ggml's name of layer 0's V type, "none" for a model that keeps no V."""
        return type_name(self.v[0].ggml_type) if self.v else "none"

    @property
    def layout(self) -> Dialect:
        """What must agree between a state and the engine that reads it, beside model and types."""
        return Dialect(self.n_stream, self.rotation_words is not None, self.cell_extension)

    @property
    def dialect(self) -> str:
        """`layout` as text, for metadata and for people."""
        return str(self.layout)

    @property
    def memory(self) -> str:
        """What the sections show: "full", "swa" (a later cache holds fewer cells), "caches" (several, all with the same
        cells: a short sliding-window state or one with an indexer), "recurrent" or "hybrid".
        """
        if self.recurrent is not None:
            return "hybrid" if self.caches else "recurrent"
        if len(self.caches) == 1:
            return "full"
        return "caches" if len({cache.n_cells for cache in self.caches}) == 1 else "swa"


def not_sliceable(state: KvState) -> str | None:
    """Why a state cannot be cut, joined or read from a token on, in words; None for one that can.

    It can when all of its memory is attention and every cache has the same positions, each once and without a gap.
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
    """Holds a state to what a full checkpoint of `n_tokens` tokens is: one cell at each position start .. n_tokens-1.

    Raises:
        Unsupported: another number of cells, a position twice or missing, or memory that is not all attention.
    """
    if state.n_cells != n_tokens - start:
        raise Unsupported(what="this state", reason=f"it has {state.n_cells} cells for {n_tokens - start} tokens")
    if not np.array_equal(np.sort(state.positions), np.arange(start, n_tokens, dtype=np.int32)):
        raise Unsupported(what="this state", reason=f"its positions are not {start} to {n_tokens - 1}, once each")
    if why := not_sliceable(state):
        raise Unsupported(what="this state", reason=why)


def require_whole_sequence(state: KvState, n_tokens: int) -> None:
    """Holds a state that cannot be cut (sliding windows, recurrent memory) to what `n_tokens` evaluated tokens leave: every part
    of it ends with the last of them, and holds none twice.

    Raises:
        Unsupported: a part that holds nothing, ends elsewhere, or has a position twice.
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
