"""`LlamaCkptCache`: a registry behind llama-cpp-python's own cache interface, for `llama.set_cache(…)`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llama_ckpt.engine import Engine, HeldState
from llama_ckpt.engine._llama import BaseLlamaCache
from llama_ckpt.engine.held import PrefixView, n_reusable
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.errors import LlamaCkptError
from llama_ckpt.fingerprint import TokenIds, as_token_ids, common_prefix
from llama_ckpt.values import Fingerprint, MatchResult, Outcome, RestoreResult, SaveResult, Stats

log = logging.getLogger("llama_ckpt")


class CheckpointRegistry(Protocol):
    """The part of `llama_ckpt.Registry` that the cache uses; see there."""

    context: Any

    def match(self, prompt: TokenIds, *, fingerprint: Fingerprint | None = None) -> MatchResult:
        """Find the checkpoint that serves these token ids."""

    def restore(self, engine: Engine, prompt: TokenIds) -> RestoreResult:
        """Put the engine into the state of these token ids."""

    def save(self, engine: HeldState, prompt: TokenIds) -> SaveResult:
        """Save the state of these token ids."""

    def stats(self) -> Stats:
        """Totals over the registry."""


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The result of a look-up: the token ids whose cells the `Llama` holds now. It contains no state to load."""

    input_ids: TokenIds


class LlamaCkptCache(BaseLlamaCache):
    """A cache for the `Llama` of an engine: `engine.llama.set_cache(LlamaCkptCache(registry, engine))`. Completions and chats,
    streamed or not, then reuse the longest prefix of their prompt that any process of this registry has saved. Seed and sampler
    are not touched. A registry that fails does not stop a completion: the log says what failed.

    A look-up restores into the `Llama` itself, through every check of `Registry.restore`, if that gives more of the prompt than
    the `Llama` holds already. It removes nothing from the registry. After a completion the state of its prompt is saved, once;
    with `answers` the state of prompt and answer is saved instead. The default is the prompt because the next request shares
    its end, while an answer is seldom continued token by token and a sampled one seldom comes again.

    `cache_size` is the number of bytes of the registry's ACTIVE checkpoints, and `capacity_bytes` is its `max_bytes`. The byte
    budget is the registry's (`Registry.open(policy=Policy(max_bytes=…))`), and its prune and gc free the files.

    llama-cpp-python copies the complete state and scores of the context before it calls the cache; the cache drops that copy
    without reading it (docs/llama-cpp-python.md has the cost, and how to avoid it).
    """

    def __init__(self, registry: CheckpointRegistry, engine: LlamaCppEngine, *, answers: bool = False) -> None:
        max_bytes = registry.context.policy.max_bytes
        super().__init__(sys.maxsize if max_bytes is None else max_bytes)
        self._registry, self._engine, self._answers = registry, engine, answers
        self._asked: TokenIds = np.empty(0, dtype=np.int32)

    @property
    def cache_size(self) -> int:
        """Bytes of the registry's ACTIVE checkpoints.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        return self._registry.stats().active_bytes

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether `Registry.match` finds a checkpoint for these token ids. The `Llama` is not touched."""
        try:
            match = self._registry.match(as_token_ids(key), fingerprint=self._engine.fingerprint)
        except LlamaCkptError as error:
            log.warning("the cache cannot look up a prompt: %s", error)
            return False
        return match.outcome is Outcome.HIT

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Brings the `Llama` to the longest prefix of these token ids that it or the registry has, and returns what it then
        holds.

        Raises:
            KeyError: it holds no prefix of them.
        """
        self._asked = np.empty(0, dtype=np.int32)
        try:
            self._asked = as_token_ids(key)
            self._restore(self._asked)
        except LlamaCkptError as error:
            log.warning("nothing was restored for a completion: %s", error)
            raise KeyError(len(key)) from error
        held = self._engine.held_token_ids()
        if not common_prefix(held, self._asked):
            raise KeyError(len(key))
        return HeldPrefix(held)

    def _restore(self, token_ids: TokenIds) -> None:
        match = self._registry.match(token_ids, fingerprint=self._engine.fingerprint)
        # The `Llama` itself keeps what it holds, however few tokens they are: so there is no minimum here.
        if match.outcome is Outcome.HIT and match.n_reusable > n_reusable(self._engine, token_ids, min_tokens=0):
            restored = self._registry.restore(self._engine, token_ids)
            log.info("%s: %d of %d tokens: %s", restored.outcome, restored.n_restored, len(token_ids), restored.reason)
        elif match.error is not None:
            log.warning("nothing was restored for a completion: %s", match.reason)

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Saves the state of these token ids that the `Llama` holds: up to the end of the prompt; or all of it, with `answers`
        or if the memory cannot be truncated. The state in `value` is ignored.
        """
        try:
            token_ids = as_token_ids(key)
            n_tokens = min(
                self._n_to_save(token_ids), self._engine.llama.n_tokens
            )  # the last one may not be evaluated yet
            saved = self._registry.save(PrefixView(self._engine, n_tokens), token_ids[:n_tokens])
            log.info("%s: %d tokens", saved.outcome, n_tokens)
        except LlamaCkptError as error:
            log.warning("a completion was not saved: %s", error)

    def _n_to_save(self, token_ids: TokenIds) -> int:
        n_prompt = len(self._asked)
        continues_prompt = n_prompt > 0 and common_prefix(self._asked, token_ids) == n_prompt
        if continues_prompt and self._engine.memory_kind.can_be_truncated and not self._answers:
            return n_prompt
        return len(token_ids)
