"""`LlamaCkptCache`: a registry behind llama-cpp-python's own cache interface, for `llama.set_cache(…)`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llama_ckpt.engine import Engine
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.errors import EngineMissing, LlamaCkptError
from llama_ckpt.fingerprint import TokenIds, as_token_ids
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.values import Fingerprint, MatchResult, MemoryKind, Outcome, RestoreResult, SaveResult, Stats

try:
    from llama_cpp import Llama
    from llama_cpp.llama_cache import BaseLlamaCache
except (ImportError, OSError, RuntimeError) as error:  # as in `llamacpp`
    raise EngineMissing(reason=str(error)) from error

log = logging.getLogger("llama_ckpt")


class CheckpointRegistry(Protocol):
    """What the cache asks of a registry: `llama_ckpt.Registry` is one, and says what these do."""

    context: Any

    def match(self, given: TokenIds, *, fingerprint: Fingerprint | None = None) -> MatchResult:
        """Which checkpoint serves these token ids."""

    def restore(self, engine: Engine, given: TokenIds) -> RestoreResult:
        """Puts the engine into its state."""

    def save(self, engine: Engine, given: TokenIds) -> SaveResult:
        """Saves what the engine holds."""

    def stats(self) -> Stats:
        """Totals over the registry."""


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """What a look-up gives: the ids of the tokens whose cells the `Llama` holds now. There is no state in it to load."""

    input_ids: TokenIds


class LlamaCkptCache(BaseLlamaCache):
    """A cache for the `Llama` of an engine: `engine.llama.set_cache(LlamaCkptCache(registry, engine))`. Its completions and
    chats, streamed or not, then reuse the longest beginning of their prompt that any process on this registry saved. Seed and
    sampler are untouched. The registry never stands in a completion's way: what fails is in the log.

    A look-up restores into the `Llama` itself, through every check of `Registry.restore`, if that brings more of the prompt than
    the `Llama` holds already; it never consumes. After a completion the state of its prompt is saved, once; with `answers` that
    of prompt and answer. An answer is seldom continued token by token, and a sampled one seldom comes again: the end of the
    prompt is what the next request shares.

    `cache_size` is the bytes of the registry's ACTIVE checkpoints, `capacity_bytes` what `max_bytes` says: the byte budget is the
    registry's (`Registry.open(policy=Policy(max_bytes=…))`), and its prune and gc collect.

    Before it hands over what was computed, llama-cpp-python itself copies the whole context's state and scores; that copy is
    dropped unseen (docs/llama-cpp-python.md has what it costs, and how to go without).
    """

    def __init__(self, registry: CheckpointRegistry, engine: LlamaCppEngine, *, answers: bool = False) -> None:
        max_bytes = registry.context.policy.max_bytes
        super().__init__(sys.maxsize if max_bytes is None else max_bytes)
        self._registry, self._engine, self._answers = registry, engine, answers
        self._asked: list[int] = []

    @property
    def cache_size(self) -> int:
        """Bytes of the registry's ACTIVE checkpoints.

        Raises:
            DatabaseUnavailable: they cannot be counted now.
        """
        return self._registry.stats().active_bytes

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether a checkpoint begins like these token ids, as `Registry.match` says. The `Llama` is left alone."""
        try:
            found = self._registry.match(as_token_ids(key), fingerprint=self._engine.fingerprint)
        except LlamaCkptError as error:
            log.warning("the cache cannot be asked: %s", error)
            return False
        return found.outcome is Outcome.HIT

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Brings the `Llama` to the longest beginning of these token ids that it or the registry has, and says what it holds.

        Raises:
            KeyError: it holds no beginning of them.
        """
        self._asked = list(key)
        try:
            token_ids = as_token_ids(key)
            self._restore(token_ids)
        except LlamaCkptError as error:
            log.warning("nothing was restored for a completion: %s", error)
            raise KeyError(len(key)) from error
        held = self._engine.held_token_ids()
        if not _n_common(held, self._asked):
            raise KeyError(len(key))
        return HeldPrefix(held)

    def _restore(self, token_ids: TokenIds) -> None:
        found = self._registry.match(token_ids, fingerprint=self._engine.fingerprint)
        if found.outcome is Outcome.HIT and found.n_reusable > self._n_held():
            restored = self._registry.restore(self._engine, token_ids)
            log.info("%s: %d of %d tokens: %s", restored.outcome, restored.n_restored, len(token_ids), restored.reason)
        elif found.error is not None:
            log.warning("nothing was restored for a completion: %s", found.reason)

    def _n_held(self) -> int:
        """How many of the asked tokens the `Llama` holds, if it can go on from there."""
        held = self._engine.held_token_ids()
        n_held = _n_common(held, self._asked)
        return n_held if n_held == len(held) or self._engine.memory_kind is MemoryKind.FULL else 0

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Saves what the `Llama` holds of these token ids: up to the end of the prompt, or all of it with `answers`, and where
        its memory cannot be cut. The state in `value` is not looked at.
        """
        n_prompt = len(self._asked)
        is_asked = n_prompt > 0 and list(key[:n_prompt]) == self._asked
        is_cut = self._engine.memory_kind is MemoryKind.FULL
        n_tokens = n_prompt if is_asked and is_cut and not self._answers else len(key)
        n_tokens = min(n_tokens, self._engine.llama.n_tokens)  # the last token may have been sampled only
        try:
            token_ids = as_token_ids(key[:n_tokens])
            saved = self._registry.save(PrefixView(self._engine, n_tokens), token_ids)
            log.info("%s: %d tokens", saved.outcome, n_tokens)
        except LlamaCkptError as error:
            log.warning("a completion was not saved: %s", error)


def _n_common(held: TokenIds, asked: list[int]) -> int:
    return int(Llama.longest_token_prefix(held.tolist(), asked))


class PrefixView(LlamaCppEngine):
    """An engine, for saving, as if it held no more than its first `n_tokens` tokens. Its live cells stay as they are."""

    def __init__(self, engine: LlamaCppEngine, n_tokens: int) -> None:
        vars(self).update(vars(engine))
        self._n_tokens = n_tokens

    def held_token_ids(self) -> TokenIds:
        """The first of the held token ids; shape `[n_tokens]`."""
        return super().held_token_ids()[: self._n_tokens]

    def capture(self) -> memoryview:
        """Their state: what the engine itself would give if it held no others.

        Raises:
            EngineFailed: the engine gave no state.
        """
        state = super().capture()
        return state if self._n_tokens == self.llama.n_tokens else kv_edit.truncate(state, self._n_tokens)
