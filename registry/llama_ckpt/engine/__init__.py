"""What the registry asks of an engine. `llamacpp.LlamaCppEngine` is the one that ships; nothing here imports llama_cpp."""

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
    """Hears nothing."""


class Vocabulary(Protocol):
    """A model's tokenizer."""

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, as a completion of it would evaluate them; shape `[n_tokens]`."""

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of some token ids, special tokens spelt out, for people to read."""


class HeldState(Protocol):
    """The KV state of one sequence of tokens, and whose it is: an engine's, or a copy of what one held."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of model and KV layout."""

    @property
    def model_name(self) -> str:
        """What people call the model."""

    @property
    def engine_name(self) -> str:
        """The engine and its version, for the file's metadata."""

    @property
    def memory_kind(self) -> MemoryKind:
        """The kind of memory the model keeps."""

    @property
    def dimensions(self) -> ModelDimensions:
        """The shape of one token's KV state."""

    @property
    def layout(self) -> Dialect | None:
        """How the engine lays out its states: what it reads and writes. None where that is not known."""

    @property
    def rotation(self) -> Rotation | None:
        """How the engine rotates K and V: the sizes of the two matrices, 0 for none. None where that is not known."""

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, as a completion of it would evaluate them; shape `[n_tokens]`."""

    def held_token_ids(self) -> TokenIds:
        """The token ids whose state the engine holds, in order of position; shape `[n_tokens]`."""

    def capture(self) -> memoryview:
        """A copy of the state of the held tokens, as bytes.

        Raises:
            EngineFailed: the engine gave no state.
        """


class Engine(HeldState, Vocabulary, Protocol):
    """One live context that holds the KV state of one sequence of tokens."""

    @property
    def n_ctx(self) -> int:
        """Cells that one sequence can have."""

    def load(self, state: memoryview, token_ids: TokenIds) -> None:
        """Replaces the held state by `state`, the cells of exactly these tokens. A state has no logits: before the next token is
        sampled, the last one is evaluated again.

        Raises:
            EngineFailed: the engine refused; it then holds nothing, and its data is cleared.
            BadInput: more tokens than the context has cells.
        """

    def evaluate(self, token_ids: TokenIds, progress: Progress = no_progress, *, n_kept: int = 0) -> None:
        """Brings the engine to the state of `token_ids`, with the last token's logits: keeps the first `n_kept` of the held
        tokens' cells, drops the others and computes the rest, the last token by itself. `progress` hears tokens done and in all.

        Raises:
            EngineFailed: the engine failed; it then holds nothing, and its data is cleared.
            EngineStateMismatch: the first `n_kept` held tokens are not the input's, or they are all of it.
            BadInput: more tokens than the context has cells, or an id that the vocabulary has not.
        """

    def next_token(self) -> tuple[int, float]:
        """The token that is most likely to follow what was evaluated last, and its probability: the maximum of the softmax of its
        logits, at temperature 1.

        Raises:
            EngineFailed: there are no logits.
        """

    def embedding(self) -> Vector | None:
        """What a model that pools gives for what was evaluated last, not normalised, shape `[n_embd]`; None where it does not
        pool.

        Raises:
            Unsupported: it pools over all tokens, of which some may not have been evaluated now.
        """
