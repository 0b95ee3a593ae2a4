"""What the registry needs of an engine, as protocols. `llamacpp.LlamaCppEngine` is the engine that ships.

Owns all that knows llama_cpp: no module outside this package imports it, and this one does not either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.formats.kv.edit import Rotation
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.values import Fingerprint, MemoryKind, ModelDimensions

Progress = Callable[[int, int], None]
Vector = NDArray[np.float32]


def no_progress(_done: int, _total: int) -> None:
    """Ignores the progress."""


class Tokenizer(Protocol):
    """Turns texts into the token ids of one model."""

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, as a completion of it would evaluate them; shape `[n_tokens]`."""


class Vocabulary(Tokenizer, Protocol):
    """A model's tokenizer, in both directions."""

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of token ids for people to read, with special tokens spelt out."""


class HeldState(Tokenizer, Protocol):
    """The KV state of one sequence of tokens, and the model it belongs to: an engine's, or a prefix or copy of it."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of model and KV layout."""

    @property
    def model_name(self) -> str:
        """The model's name, for people."""

    @property
    def engine_name(self) -> str:
        """The engine and its version, for the file's metadata."""

    @property
    def memory_kind(self) -> MemoryKind:
        """The kind of memory that the model keeps."""

    @property
    def dimensions(self) -> ModelDimensions:
        """The shape of one token's KV state."""

    @property
    def layout(self) -> Dialect | None:
        """The layout of the states that the engine reads and writes; None if it is not known."""

    @property
    def rotation(self) -> Rotation | None:
        """How the engine rotates K and V: the sizes of the two matrices, 0 for none; None if it is not known."""

    def held_token_ids(self) -> TokenIds:
        """The token ids of the held state, in order of position; shape `[n_tokens]`."""

    def capture(self) -> memoryview:
        """A copy of the state of the held tokens, as bytes.

        Raises:
            EngineFailed: the engine gave no state.
        """


class Engine(HeldState, Vocabulary, Protocol):
    """One live context that holds the KV state of one sequence of tokens."""

    @property
    def n_ctx(self) -> int:
        """The number of cells that one sequence can have."""

    def load(self, state: memoryview, token_ids: TokenIds) -> None:
        """Replaces the held state by `state`, which contains the cells of exactly these tokens. A state has no logits: evaluate
        the last token again before you sample the next one.

        Raises:
            EngineFailed: the engine refused the state. It then holds nothing, and its data is cleared.
            BadInput: more tokens than the context has cells.
        """

    def evaluate(self, token_ids: TokenIds, progress: Progress = no_progress, *, n_kept: int = 0) -> None:
        """Brings the engine to the state of `token_ids`, with the logits of the last token. It keeps the first `n_kept` held
        cells, drops the others and computes the rest, the last token by itself. `progress` is called with the number of tokens
        done and the total.

        Raises:
            EngineFailed: the engine failed. It then holds nothing, and its data is cleared.
            EngineStateMismatch: the first `n_kept` held tokens are not those of the input, or are all of it.
            BadInput: more tokens than the context has cells, or a token id that is not in the vocabulary.
        """

    def next_token(self) -> tuple[int, float]:
        """The most likely next token, and its probability: the maximum of the softmax of the last logits, at temperature 1.

        Raises:
            EngineFailed: there are no logits.
        """

    def embedding(self) -> Vector | None:
        """The embedding of the evaluated input if the model pools, not normalised, shape `[n_embd]`; None if it does not pool.

        Raises:
            Unsupported: it pools over all tokens, some of which may come from a restored state.
        """
