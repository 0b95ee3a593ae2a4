"""Runs a batch of inputs, one after the other. Each is computed from the longest prefix that the engine holds or the registry
has, and what is to be kept is saved while the next one is evaluated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, get_args

from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions
from llama_ckpt.checkpoints.restore import Candidates
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine, Progress, Vector
from llama_ckpt.engine.held import n_reusable
from llama_ckpt.errors import BadInput, LlamaCkptError, without_frames
from llama_ckpt.fingerprint import Input, TokenIds, common_prefix
from llama_ckpt.values import Checkpoint, MatchResult, Outcome, RestoreResult, SaveResult
from llama_ckpt.warm.background import BackgroundSaver, Saved

LOOK_AHEAD = 32  # inputs to read ahead, in which a shared prefix is looked for

SaveMode = Literal["prefix", "full", "none"]

_PendingSave = tuple[Future[Saved] | None, LlamaCkptError | None]
_NO_SAVE: _PendingSave = None, None


class BatchOutcome(StrEnum):
    """How much of an input did not have to be computed: `HIT` all but its last token, `PARTIAL` some tokens, `MISS` none.
    `FAILED`: the input could not be computed at all.
    """

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """An input of a batch, with a label of its own for its checkpoint."""

    prompt: Input
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRecord:
    """The result of one input, the `index`th, counted from 0. The engine holds the input until the next record is asked for.

    Of its tokens the engine held the first `n_kept` already, `n_restored` came from the checkpoint `restored_from`, and
    `n_evaluated` were computed: together they are all. `next_token` is the most likely next token and `confidence` its
    probability (the maximum of the softmax of the logits). If the model pools, there is the `embedding` instead, shape
    `[n_embd]`, as the model gives it, not normalised. `error` is set if and only if the outcome is `FAILED`.

    The save that this input started (of itself, or of the prefix that it shares) is still running when the record comes. `save`,
    `problem` and `checkpoint_id` report it once it has ended: at the latest when the next save starts or the iterator ends.
    """

    index: int
    input_hash: bytes | None
    outcome: BatchOutcome
    elapsed_s: float
    n_kept: int = 0
    n_restored: int = 0
    n_evaluated: int = 0
    restored_from: Checkpoint | None = None
    next_token: int | None = None
    confidence: float | None = None
    embedding: Vector | None = None
    error: LlamaCkptError | None = None
    trouble: LlamaCkptError | None = None
    saving: Future[Saved] | None = None

    @property
    def save(self) -> SaveResult | None:
        """The result of the save; None if there was none, if it failed, and while it is running."""
        saved = self._saved()
        return saved if isinstance(saved, SaveResult) else None

    @property
    def problem(self) -> LlamaCkptError | None:
        """What failed on the way: database, store or save. The input was computed all the same."""
        saved = self._saved()
        return self.trouble or (saved if isinstance(saved, LlamaCkptError) else None)

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the checkpoint that this input saved; if it saved none, of the one that it was restored from."""
        row = (self.save.checkpoint if self.save else None) or self.restored_from
        return row.id if row else None

    def _saved(self) -> Saved | None:
        return self.saving.result() if self.saving is not None and self.saving.done() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of `Registry.batch`.

    Raises:
        BadInput: `save` is none of the three words.
    """

    save: SaveMode = "prefix"
    shared_prefix: ResolvedInput | None = None
    saved_as: SaveOptions = SaveOptions()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.save not in get_args(SaveMode):
            raise BadInput(what="save", value=self.save, reason=f"give one of {', '.join(get_args(SaveMode))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """An input of the batch that can be used."""

    index: int
    prompt: ResolvedInput
    saved_as: SaveOptions

    @property
    def token_ids(self) -> TokenIds:
        return self.prompt.token_ids


@dataclass(frozen=True, slots=True)
class _Unusable:
    index: int
    error: LlamaCkptError


_Following = Sequence[_Item | _Unusable]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The state from which an input is evaluated: the engine holds the cells of `n_kept` or of `n_restored` tokens.

    `n_evaluated` is not 0 if nothing is left to evaluate. The registry has `n_known` tokens of the input, and the save in flight
    adds up to `n_in_flight`. `unusable` are the checkpoints that could not be restored, `trouble` what failed on the way.
    """

    n_kept: int = 0
    n_restored: int = 0
    n_evaluated: int = 0
    n_known: int = 0
    n_in_flight: int = 0
    restored_from: Checkpoint | None = None
    unusable: frozenset[str] = frozenset()
    trouble: LlamaCkptError | None = None


class Batch:
    """One run over inputs. `progress` is called with tokens done and in all of the current input.

    Raises:
        BadInput: the shared prefix cannot be used.
    """

    def __init__(self, context: RegistryContext, engine: Engine, options: BatchOptions, progress: Progress) -> None:
        self._context = context
        self._engine = engine
        self._options = options
        self._progress = progress
        shared = options.shared_prefix
        self._prefix_ids = None if shared is None else shared.token_ids
        self._n_ahead = LOOK_AHEAD if options.save == "prefix" and shared is None else 0
        self._saver = BackgroundSaver(context)

    def run(self, inputs: Iterable[Input | BatchInput]) -> Generator[BatchRecord, None, None]:
        """A record for each input, in order. However it ends, the save in flight is finished."""
        with self._saver:
            for item, following in self._with_following(inputs):
                yield self._record(item, following)

    def _with_following(self, inputs: Iterable[Input | BatchInput]) -> Iterator[tuple[_Item | _Unusable, _Following]]:
        """Each input, with those that come next."""
        waiting: deque[_Item | _Unusable] = deque()
        for index, given in enumerate(inputs):
            waiting.append(self._item(index, given))
            if len(waiting) > self._n_ahead:
                yield waiting.popleft(), waiting
        while waiting:
            yield waiting.popleft(), waiting

    def _item(self, index: int, given: Input | BatchInput) -> _Item | _Unusable:
        prompt, label = (given.prompt, given.label) if isinstance(given, BatchInput) else (given, None)
        saved_as = self._options.saved_as
        try:
            return _Item(
                index=index,
                prompt=ResolvedInput(prompt, self._engine).resolve(),
                saved_as=saved_as if label is None else replace(saved_as, label=label),
            )
        except LlamaCkptError as error:
            return _Unusable(index, without_frames(error))

    # -- one input -----------------------------------------------------------------------------------------------------

    def _record(self, item: _Item | _Unusable, following: _Following) -> BatchRecord:
        """The record of an input, computed and with its save started. A save of memory that cannot be truncated starts early."""
        started = time.perf_counter()
        if isinstance(item, _Unusable):
            return _failed(item.index, None, item.error, 0.0)
        try:
            start = self._restore(item)
            passing = self._evaluate(item, start, following) if start.n_evaluated == 0 else _NO_SAVE
            record = self._computed(item, start, passing)
        except LlamaCkptError as error:
            return _failed(item.index, item.prompt.input_hash, error, time.perf_counter() - started)
        n_known = max(start.n_known, start.n_in_flight)
        if self._engine.memory_kind.can_be_truncated and (n_saved := self._n_to_save(item, following, n_known)):
            record = self._save_prefix(record, item, start, n_saved, time.perf_counter() - started)
        return replace(record, elapsed_s=time.perf_counter() - started)

    def _restore(self, item: _Item) -> _Start:
        """Restores the best checkpoint, unless the engine holds as much of the input already."""
        n_in_flight = self._saver.n_shared(item.token_ids)
        if min(n_in_flight, len(item.token_ids) - 1) > self._n_held(item):  # do not compute what is about to be stored
            self._saver.finish()
            n_in_flight = 0
        candidates = Candidates(self._context, self._engine, item.prompt)
        start, result = _Start(), None
        for _ in candidates.tries():
            match = candidates.find()
            is_hit = match.outcome is Outcome.HIT
            start = _Start(n_known=match.n_matching if is_hit else 0, trouble=match.error)
            if not is_hit or match.n_reusable <= self._n_held(item):
                break
            result = candidates.restore(match)
            start = _after(match, result)
        if result is not None:
            candidates.conclude(result)
        n_kept = 0 if start.n_restored else self._n_held(item)
        return replace(start, n_kept=n_kept, n_in_flight=n_in_flight, unusable=candidates.unusable)

    def _n_held(self, item: _Item) -> int:
        return n_reusable(self._engine, item.token_ids, self._context.min_match_tokens)

    def _evaluate(self, item: _Item, start: _Start, following: _Following) -> _PendingSave:
        """Evaluates the rest of an input. A state that cannot be truncated is saved on the way, at the token where it ends."""
        engine, ids, n_held = self._engine, item.token_ids, start.n_kept or start.n_restored
        passing = _NO_SAVE
        if not engine.memory_kind.can_be_truncated:
            n_saved = min(self._n_to_save(item, following, start.n_known), len(ids) - 1)
            if n_saved > n_held:
                started, saved_as = time.perf_counter(), self._options.saved_as
                engine.evaluate(ids[:n_saved], self._progress, n_kept=n_held)
                if n_held == 0:  # the time for a part would say nothing about the whole
                    saved_as = replace(saved_as, prefill_ms=round((time.perf_counter() - started) * 1000))
                passing, n_held = self._start_save(item, start, n_saved, saved_as), n_saved
        engine.evaluate(ids, self._progress, n_kept=n_held)
        return passing

    def _computed(self, item: _Item, start: _Start, passing: _PendingSave) -> BatchRecord:
        """The record of an input whose tokens the engine holds now."""
        n_spared = start.n_kept + start.n_restored
        embedding = self._engine.embedding()
        next_token, confidence = self._engine.next_token() if embedding is None else (None, None)
        return BatchRecord(
            index=item.index,
            input_hash=item.prompt.input_hash,
            outcome=_outcome(len(item.token_ids), n_spared),
            elapsed_s=0.0,
            n_kept=start.n_kept,
            n_restored=start.n_restored,
            n_evaluated=start.n_evaluated or len(item.token_ids) - n_spared,
            restored_from=start.restored_from if start.n_restored else None,
            next_token=next_token,
            confidence=confidence,
            embedding=embedding,
            saving=passing[0],
            trouble=passing[1] or (start.trouble and without_frames(start.trouble)),
        )

    # -- what is kept of it --------------------------------------------------------------------------------------------

    def _n_to_save(self, item: _Item, following: _Following, n_known: int) -> int:
        """The number of tokens of the input to save, 0 for nothing, if the registry has the first `n_known` of them."""
        n_tokens = len(item.token_ids)
        match self._options.save:
            case "full":
                return n_tokens if n_known < n_tokens else 0
            case "prefix":
                if self._prefix_ids is not None:
                    others = [self._prefix_ids]
                else:
                    others = [other.token_ids for other in following if isinstance(other, _Item)]
                n_shared = max((common_prefix(item.token_ids, other) for other in others), default=0)
                comes_again = 1 < n_shared == n_tokens > n_known
                return n_shared if comes_again or n_shared - n_known >= self._context.min_match_tokens else 0
            case _:
                return 0

    def _save_prefix(self, record: BatchRecord, item: _Item, start: _Start, n_saved: int, took_s: float) -> BatchRecord:
        """The record, with the save of its first `n_saved` tokens started, or with the reason why there is none."""
        # The label of an input is for the checkpoint of the whole input: a prefix belongs to others, too.
        saved_as = item.saved_as if n_saved == len(item.token_ids) else self._options.saved_as
        if record.outcome is BatchOutcome.MISS:  # the time for a part would say nothing about the whole
            saved_as = replace(saved_as, prefill_ms=round(took_s * 1000 * n_saved / len(item.token_ids)))
        saving, trouble = self._start_save(item, start, n_saved, saved_as)
        return replace(record, saving=saving, trouble=record.trouble or trouble)

    def _start_save(self, item: _Item, start: _Start, n_saved: int, saved_as: SaveOptions) -> _PendingSave:
        """Starts the save of the first `n_saved` held tokens; or the error why that cannot be done."""
        prompt, shared = item.prompt, self._options.shared_prefix
        if n_saved < len(item.token_ids):
            if shared is not None and n_saved == len(shared.token_ids):
                prompt = shared
            else:
                prompt = ResolvedInput(item.token_ids[:n_saved])
        try:
            return self._saver.save(self._engine, prompt, saved_as, unusable=start.unusable), None
        except LlamaCkptError as error:
            return None, without_frames(error)


def _after(match: MatchResult, result: RestoreResult) -> _Start:
    """Where the evaluation starts after a restore, whether it worked or not."""
    if result.outcome is not Outcome.HIT:
        return _Start(trouble=result.error)
    return _Start(
        n_restored=result.n_restored,
        n_evaluated=result.n_evaluated,
        n_known=match.n_matching,
        restored_from=match.checkpoint,
    )


def _failed(index: int, input_hash: bytes | None, error: LlamaCkptError, elapsed_s: float) -> BatchRecord:
    return BatchRecord(
        index=index,
        input_hash=input_hash,
        outcome=BatchOutcome.FAILED,
        elapsed_s=elapsed_s,
        error=without_frames(error),
    )


def _outcome(n_tokens: int, n_spared: int) -> BatchOutcome:
    if n_spared == 0:
        return BatchOutcome.MISS
    return BatchOutcome.HIT if n_spared == n_tokens - 1 else BatchOutcome.PARTIAL
