"""Brings an engine to the state of an input: keeps or restores the longest known prefix, evaluates the rest, and saves the state.
Of many processes that need the same tokens, one evaluates them (`single_flight`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions
from llama_ckpt.checkpoints.restore import Candidates
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine, Progress
from llama_ckpt.engine.held import n_reusable
from llama_ckpt.errors import BadInput, LlamaCkptError
from llama_ckpt.fingerprint import TokenIds, common_prefix, flight_key
from llama_ckpt.values import MatchResult, Outcome, RestoreResult, SaveResult, WarmResult
from llama_ckpt.warm.single_flight import SingleFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    """The options of `Registry.warm`."""

    save: SaveOptions
    shared_prefix: ResolvedInput | None
    wait_s: float
    progress: Progress


def warm(context: RegistryContext, engine: Engine, prompt: ResolvedInput, options: WarmOptions) -> WarmResult:
    """As `Registry.warm`."""
    started = time.perf_counter()
    n_tokens = len(prompt.token_ids)
    warming = _Warming(context, engine, options)
    if options.shared_prefix is not None:
        _require_prefix(options.shared_prefix, prompt)
        warming.prepare(options.shared_prefix, prompt)
    restored, saved = warming.bring(prompt)
    if warming.of_prefix is not None and warming.of_prefix.n_restored > restored.n_restored:
        restored = warming.of_prefix
    return WarmResult(
        restore=restored,
        save=saved,
        n_restored=warming.n_restored,
        n_evaluated=warming.n_evaluated,
        n_kept=max(0, n_tokens - warming.n_restored - warming.n_evaluated),
        waited_s=warming.flight.waited_s,
        gave_up=warming.flight.gave_up,
        elapsed_s=time.perf_counter() - started,
        problem=warming.problem or warming.flight.problem,
    )


def _require_prefix(shared: ResolvedInput, prompt: ResolvedInput) -> None:
    """A text can be a prefix of a text, and token ids of token ids."""
    prefix, whole = shared.prompt, prompt.prompt
    if isinstance(prefix, str) and isinstance(whole, str):
        is_prefix = whole.startswith(prefix)
    elif isinstance(prefix, str) or isinstance(whole, str):
        reason = "input and shared prefix are of two kinds: give both as text, or both as token ids"
        raise BadInput(what="shared_prefix", value=type(prefix).__name__, reason=reason)
    else:
        is_prefix = common_prefix(shared.token_ids, prompt.token_ids) == len(shared.token_ids)
    if not is_prefix:
        value = f"{type(prefix).__name__} of {len(prefix)}"
        raise BadInput(what="shared_prefix", value=value, reason="the input does not begin with it")


class _Warming:
    """One call of `warm`, and what it has done so far."""

    def __init__(self, context: RegistryContext, engine: Engine, options: WarmOptions) -> None:
        self._context, self._engine, self._options = context, engine, options
        self.flight = SingleFlight(context, options.wait_s)
        self.n_restored = self.n_evaluated = 0
        self.of_prefix: RestoreResult | None = None
        self.problem: LlamaCkptError | None = None

    def prepare(self, shared: ResolvedInput, prompt: ResolvedInput) -> None:
        """Brings the engine to the state of the shared prefix first, unless it or the registry has what the input shares with it.
        The tokenizer may split the input differently at the end of the prefix: then they share some tokens less.
        """
        n_shared = common_prefix(shared.token_ids, prompt.token_ids)
        if n_shared < self._context.min_match_tokens or self._n_held(prompt.token_ids) >= n_shared:
            return
        match = Candidates(self._context, self._engine, prompt).find()
        if _n_known(match, prompt.token_ids) < n_shared:
            self.of_prefix, _ = self.bring(shared)

    def bring(self, prompt: ResolvedInput) -> tuple[RestoreResult, SaveResult | None]:
        """Brings the engine to the state of an input. However it ends, the claim is given back."""
        candidates = Candidates(self._context, self._engine, prompt)
        try:
            restored = self._restore(candidates)
            self.n_restored += restored.n_restored
            self.n_evaluated += restored.n_evaluated
            self.problem = self.problem or restored.error
            if restored.n_evaluated:  # the registry had all of it
                return restored, None
            return restored, self._compute(prompt, restored.n_restored, candidates.unusable)
        finally:
            self.flight.leave()

    def _restore(self, candidates: Candidates) -> RestoreResult:
        """Restores the best checkpoint, unless the engine holds as much of the input already."""
        token_ids = candidates.token_ids
        for _ in candidates.tries():
            match = self._find(candidates)
            n_held, n_known = self._n_held(token_ids), _n_known(match, token_ids)
            if match.outcome is Outcome.HIT and n_known <= n_held and n_known < len(token_ids):
                return _kept(n_held)
            result = candidates.restore(match)
        return candidates.conclude(result)

    def _find(self, candidates: Candidates) -> MatchResult:
        """The best checkpoint, once no other process is computing what the registry lacks: it is claimed by then, or was
        waited for long enough.
        """
        token_ids, fingerprint = candidates.token_ids, self._engine.fingerprint
        while True:
            match = candidates.find()
            n_known = _n_known(match, token_ids)
            if n_known == len(token_ids) or match.outcome is Outcome.FAILED:
                return match
            if not self._engine.memory_kind.can_be_truncated:
                n_known = (
                    len(token_ids) - 1
                )  # the state of another input cannot be truncated: only that of this one helps
            key = flight_key(fingerprint.digest, token_ids, n_known, self._context.block_size)
            if self.flight.should_compute(key):
                return match

    def _n_held(self, token_ids: TokenIds) -> int:
        return n_reusable(self._engine, token_ids, self._context.min_match_tokens)

    def _compute(self, prompt: ResolvedInput, n_restored: int, unusable: frozenset[str]) -> SaveResult | None:
        """Evaluates what the engine does not hold, and saves the state; None if it could not be saved."""
        before, options = time.perf_counter(), self._options.save
        token_ids = prompt.token_ids
        n_tokens, n_kept, saved = len(token_ids), n_restored or self._n_held(token_ids), None
        # A restore must decode the last token again, for its logits. A state that cannot be truncated cannot give
        # that token back: so it is saved one token short.
        can_be_truncated = self._engine.memory_kind.can_be_truncated
        if not can_be_truncated and n_kept < n_tokens - 1:
            self._engine.evaluate(token_ids[:-1], self._progress, n_kept=n_kept)
            saved = self._save(ResolvedInput(token_ids[:-1]), options, unusable)
            self._engine.evaluate(token_ids, self._progress, n_kept=n_tokens - 1)
        else:
            self._engine.evaluate(token_ids, self._progress, n_kept=n_kept)
        self.n_evaluated += n_tokens - n_kept
        if n_kept == 0:  # the time for a part would say nothing about the whole
            options = replace(options, prefill_ms=round((time.perf_counter() - before) * 1000))
        return self._save(prompt, options, unusable) if can_be_truncated else saved

    def _save(self, prompt: ResolvedInput, options: SaveOptions, unusable: frozenset[str]) -> SaveResult | None:
        self.flight.renew(force=True)
        try:
            return saving.save(self._context, self._engine, prompt, options, unusable=unusable)
        except LlamaCkptError as error:
            self.problem = error  # the caller finds it in the result
            return None

    def _progress(self, done: int, total: int) -> None:
        self.flight.renew()
        self._options.progress(done, total)


def _n_known(match: MatchResult, token_ids: TokenIds) -> int:
    return min(match.n_matching, len(token_ids)) if match.outcome is Outcome.HIT else 0


def _kept(n_held: int) -> RestoreResult:
    return RestoreResult(
        outcome=Outcome.NO_MATCH,
        reason=f"the engine holds the first {n_held} tokens of the input already",
        n_restored=0,
        n_evaluated=0,
        checkpoint=None,
        elapsed_s=0.0,
    )
