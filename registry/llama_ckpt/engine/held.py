"""What an engine holds: how many of its cells an input can reuse, and a prefix of it as a state of its own."""

from __future__ import annotations

from llama_ckpt.engine import HeldState
from llama_ckpt.errors import Unsupported
from llama_ckpt.fingerprint import TokenIds, common_prefix
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv.edit import Rotation
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.values import Fingerprint, MemoryKind, ModelDimensions


def n_reusable(held: HeldState, token_ids: TokenIds, min_tokens: int) -> int:
    """The number of held cells to keep for an input, at most all but one: the last token is decoded again, for its logits.

    0 if the memory cannot be truncated and holds other cells too; and if fewer than `min_tokens` would be kept, unless
    exactly the input is held. This is the rule for stored checkpoints (`match.by_prefix`), applied to held cells.
    """
    held_ids = held.held_token_ids()
    n_common = common_prefix(held_ids, token_ids)
    n_kept = min(n_common, len(token_ids) - 1)
    if n_kept < len(held_ids) and not held.memory_kind.can_be_truncated:
        return 0
    # Almost all inputs of a model share their first tokens (BOS, the start of a chat template). To keep these few saves no time,
    # but it has two costs. It moves the batch boundaries, so that the cells differ from those of a cold run in the last bits and
    # cannot be shared with stored checkpoints. And the evaluation does not start from nothing, so `prefill_ms` is not known.
    is_same_input = n_common == len(held_ids) == len(token_ids)
    return n_kept if n_kept >= min_tokens or is_same_input else 0


class PrefixView:
    """The first `n_tokens` tokens that an engine holds, as a state of their own. The engine's live cells stay as they are.

    With `copy` the state is copied at once, and the engine may go on: a save in another thread reads the copy. Without it the
    state is read when it is asked for.

    Raises:
        EngineFailed, Unsupported: with `copy`, as `capture`.
    """

    def __init__(self, engine: HeldState, n_tokens: int, *, copy: bool = False) -> None:
        self._engine, self._n_tokens = engine, n_tokens
        self._token_ids = engine.held_token_ids()[:n_tokens] if copy else None
        self._state = self._captured() if copy else None

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the engine."""
        return self._engine.fingerprint

    @property
    def model_name(self) -> str:
        """That of the engine."""
        return self._engine.model_name

    @property
    def engine_name(self) -> str:
        """That of the engine."""
        return self._engine.engine_name

    @property
    def memory_kind(self) -> MemoryKind:
        """That of the engine."""
        return self._engine.memory_kind

    @property
    def dimensions(self) -> ModelDimensions:
        """Those of the engine."""
        return self._engine.dimensions

    @property
    def layout(self) -> Dialect | None:
        """That of the engine."""
        return self._engine.layout

    @property
    def rotation(self) -> Rotation | None:
        """That of the engine."""
        return self._engine.rotation

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, by the engine's tokenizer; shape `[n_tokens]`."""
        return self._engine.token_ids(text)

    def held_token_ids(self) -> TokenIds:
        """The token ids of the prefix; shape `[n_tokens]`."""
        return self._engine.held_token_ids()[: self._n_tokens] if self._token_ids is None else self._token_ids

    def capture(self) -> memoryview:
        """The state of the prefix: what the engine itself would give if it held no more.

        Raises:
            EngineFailed: the engine gave no state.
            Unsupported: the prefix ends before the held tokens do, and the memory cannot be truncated.
        """
        return self._captured() if self._state is None else self._state

    def _captured(self) -> memoryview:
        is_part = self._n_tokens < len(self._engine.held_token_ids())
        if is_part and not self.memory_kind.can_be_truncated:
            raise Unsupported(what=f"a part of {self.memory_kind} memory", reason="it cannot be truncated")
        state = self._engine.capture()
        return kv_edit.truncate(state, self._n_tokens) if is_part else state
