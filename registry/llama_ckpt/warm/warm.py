"""Warming: the engine comes to hold an input, by the longest beginning of it that it or the registry has, and the rest is
evaluated and saved; of many processes that lack the same rest one does that (`single_flight`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llama_ckpt.checkpoints import restore as restoring
from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.match import common_prefix
from llama_ckpt.checkpoints.register import SaveOptions
from llama_ckpt.checkpoints.restore import RestoreOptions
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine, Progress
from llama_ckpt.errors import BadInput, LlamaCkptError
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, flight_key
from llama_ckpt.values import MatchResult, MemoryKind, Outcome, RestoreResult, SaveResult, WarmResult
from llama_ckpt.warm.single_flight import SingleFlight

Match = Callable[..., MatchResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    """How an input is to be warmed, as `Registry.warm` describes it."""

    save: SaveOptions
    shared_prefix: Input | None
    wait_s: float
    progress: Progress


def warm(context: RegistryContext, engine: Engine, given: Input, match: Match, options: WarmOptions) -> WarmResult:
    """As `Registry.warm`; `match` is `Registry.match`."""
    started = time.perf_counter()
    token_ids = saving.token_ids_of(engine, given)
    warming = _Warming(context, engine, match, options)
    if options.shared_prefix is not None:
        _require_prefix(options.shared_prefix, given)
        warming.prepare(options.shared_prefix, given, token_ids)
    restored, saved = warming.bring(given, token_ids)
    if warming.of_prefix is not None and warming.of_prefix.n_restored > restored.n_restored:
        restored = warming.of_prefix
    return WarmResult(
        restore=restored,
        save=saved,
        n_restored=warming.n_restored,
        n_evaluated=warming.n_evaluated,
        n_kept=max(0, len(token_ids) - warming.n_restored - warming.n_evaluated),
        waited_s=warming.flight.waited_s,
        gave_up=warming.flight.gave_up,
        elapsed_s=time.perf_counter() - started,
        problem=warming.problem or warming.flight.problem,
    )


def _require_prefix(prefix: Input, given: Input) -> None:
    """A text is a prefix of a text, token ids of token ids."""
    if isinstance(prefix, str) and isinstance(given, str):
        is_prefix = given.startswith(prefix)
    elif isinstance(prefix, str) or isinstance(given, str):
        reason = "input and shared prefix are of two kinds: give both as text, or both as token ids"
        raise BadInput(what="shared_prefix", value=type(prefix).__name__, reason=reason)
    else:
        ids = as_token_ids(prefix)
        is_prefix = common_prefix(ids, as_token_ids(given)) == len(ids)
    if not is_prefix:
        told = f"{type(prefix).__name__} of {len(prefix)}"
        raise BadInput(what="shared_prefix", value=told, reason="the input does not begin with it")


class _Warming:
    """One call of `warm`, and what it did so far."""

    def __init__(self, context: RegistryContext, engine: Engine, match: Match, options: WarmOptions) -> None:
        self._context, self._engine, self._match, self._options = context, engine, match, options
        self.flight = SingleFlight(context, options.wait_s)
        self.n_restored = self.n_evaluated = 0
        self.of_prefix: RestoreResult | None = None
        self.problem: LlamaCkptError | None = None

    def prepare(self, prefix: Input, given: Input, token_ids: TokenIds) -> None:
        """Brings the engine to the state of a shared prefix first, if neither it nor the registry has what the input shares with
        it. At the prefix's end a tokenizer may cut the input otherwise: then they share some tokens less.
        """
        prefix_ids = saving.token_ids_of(self._engine, prefix)
        n_shared = common_prefix(prefix_ids, token_ids)
        if n_shared < self._context.min_match_tokens or self._n_held(token_ids) >= n_shared:
            return
        if self._n_known(self._ask(given), token_ids) < n_shared:
            self.of_prefix, _ = self.bring(prefix, prefix_ids)

    def bring(self, given: Input, token_ids: TokenIds) -> tuple[RestoreResult, SaveResult | None]:
        """Brings the engine to the state of an input, and leaves it to others when that has ended, however it did."""
        try:
            restored = self._restore(given, token_ids, self._found(given, token_ids, None))
            failed = restored if restored.outcome is not Outcome.HIT and restored.checkpoint is not None else None
            if failed is not None and failed.outcome is Outcome.NO_MATCH:  # of no use for good: the next best one
                restored = self._restore(given, token_ids, self._found(given, token_ids, failed))
            self.n_restored += restored.n_restored
            self.n_evaluated += restored.n_evaluated
            self.problem = self.problem or restored.error
            if restored.n_evaluated:  # all of it was there
                return restored, None
            return restored, self._compute(given, token_ids, restored.n_restored, failed)
        finally:
            self.flight.leave()

    def _found(self, given: Input, token_ids: TokenIds, failed: RestoreResult | None) -> MatchResult:
        """What the registry has of an input, when nobody else computes what it lacks: that is claimed then, or was waited for
        long enough.
        """
        while True:
            found = self._ask(given, failed)
            n_known = self._n_known(found, token_ids)
            if n_known == len(token_ids) or found.outcome is Outcome.FAILED:
                return found
            if self._engine.memory_kind is not MemoryKind.FULL:
                n_known = len(token_ids) - 1  # another's state cannot be cut: only that of the whole input is of use
            key = flight_key(self._engine.fingerprint.digest, token_ids, n_known, self._context.block_size)
            if self.flight.enter(key):
                return found

    def _ask(self, given: Input, failed: RestoreResult | None = None) -> MatchResult:
        """The best checkpoint; none where that is the one of which a restore has failed."""
        found = self._match(given, fingerprint=self._engine.fingerprint)
        if failed is None or failed.checkpoint is None or found.checkpoint is None:
            return found
        if found.checkpoint.id != failed.checkpoint.id:
            return found
        return MatchResult(outcome=Outcome.NO_MATCH, reason=failed.reason, input_hash=found.input_hash)

    def _n_known(self, found: MatchResult, token_ids: TokenIds) -> int:
        return min(found.n_matching, len(token_ids)) if found.outcome is Outcome.HIT else 0

    def _n_held(self, token_ids: TokenIds) -> int:
        """How many of the input's tokens the engine holds, if it is of use to keep them; fewer than all, as the last one is
        decoded again.
        """
        held = self._engine.held_token_ids()
        n_held = min(common_prefix(held, token_ids), len(token_ids) - 1)
        if self._engine.memory_kind is not MemoryKind.FULL and n_held < len(held):
            return 0  # it cannot be cut
        return n_held if n_held >= self._context.min_match_tokens else 0

    def _restore(self, given: Input, token_ids: TokenIds, found: MatchResult) -> RestoreResult:
        """Restores what was found, unless the engine holds as much of the input already."""
        n_held, n_known = self._n_held(token_ids), self._n_known(found, token_ids)
        if found.outcome is not Outcome.HIT or n_known == len(token_ids) or n_known > n_held:
            return restoring.restore(self._context, self._engine, given, lambda *_, **__: found, RestoreOptions())
        return RestoreResult(
            outcome=Outcome.NO_MATCH,
            reason=f"the engine holds the first {n_held} tokens of the input already",
            n_restored=0,
            n_evaluated=0,
            checkpoint=None,
            elapsed_s=0.0,
        )

    def _compute(
        self, given: Input, token_ids: TokenIds, n_restored: int, failed: RestoreResult | None
    ) -> SaveResult | None:
        """Evaluates what the engine does not hold, and saves the whole; None where it could not be saved."""
        before, options = time.perf_counter(), self._options.save
        n_kept = n_restored or self._n_held(token_ids)
        n_tokens, saved = len(token_ids), None
        # A state that cannot be cut cannot give its last token back, whose logits a restore must compute: it is saved one short.
        is_cut = self._engine.memory_kind is MemoryKind.FULL
        if not is_cut and n_kept < n_tokens - 1:
            self._engine.evaluate(token_ids[:-1], self._progress, n_kept=n_kept)
            saved = self._save(token_ids[:-1], options, failed)
            self._engine.evaluate(token_ids, self._progress, n_kept=n_tokens - 1)
        else:
            self._engine.evaluate(token_ids, self._progress, n_kept=n_kept)
        self.n_evaluated += n_tokens - n_kept
        if n_kept == 0:  # what the rest took says nothing of the whole
            options = replace(options, prefill_ms=round((time.perf_counter() - before) * 1000))
        return self._save(given, options, failed) if is_cut else saved

    def _save(self, given: Input, options: SaveOptions, failed: RestoreResult | None) -> SaveResult | None:
        self.flight.renew(at_once=True)
        try:
            # What failed for the moment may be whole: only what was seen to be of no use is superseded.
            no_use = failed.checkpoint if failed is not None and failed.outcome is Outcome.NO_MATCH else None
            return saving.save(self._context, self._engine, given, options, instead_of=no_use)
        except LlamaCkptError as error:
            self.problem = error  # the caller's to tell: it is in the result
            return None

    def _progress(self, done: int, total: int) -> None:
        self.flight.renew()
        self._options.progress(done, total)
