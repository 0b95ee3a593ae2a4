"""A batch of inputs, one after the other: each is computed from the longest beginning that the engine holds or the registry has,
and what is to be kept is saved while the next one is evaluated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, get_args

from llama_ckpt.checkpoints import restore as restoring
from llama_ckpt.checkpoints.match import common_prefix
from llama_ckpt.checkpoints.register import SaveOptions
from llama_ckpt.checkpoints.restore import RestoreOptions
from llama_ckpt.checkpoints.save import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine, Progress, Vector
from llama_ckpt.errors import BadInput, LlamaCkptError, without_frames
from llama_ckpt.fingerprint import Input, TokenIds, hash_input
from llama_ckpt.values import Checkpoint, MatchResult, MemoryKind, Outcome, SaveResult
from llama_ckpt.warm.background import BackgroundSaver, Saved

LOOK_AHEAD = 32  # inputs among which a shared prefix is looked for

What = Literal["prefix", "full", "none"]


_PendingSave = tuple[Future[Saved] | None, LlamaCkptError | None]


class BatchOutcome(StrEnum):
    """How much of an input need not be computed: `HIT` all but its last token, `PARTIAL` some, `MISS` nothing. `FAILED`: it could
    not be computed at all.
    """

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """An input with a label of its own for what is saved of it."""

    given: Input
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRecord:
    """What became of one input, the `index`th from 0 on. The engine holds it until the next record is asked for.

    Of its tokens the cells of `n_kept` were those that the engine held from before, `n_restored` came from the checkpoint
    `restored_from`, and `n_evaluated` were computed: together they are all. `next_token` is the most likely token to follow and
    `confidence` its probability (the maximum of the softmax of the logits); where the model pools there is the `embedding`
    instead, shape `[n_embd]`, as the model gives it, not normalised. `error` is set on `FAILED` alone.

    What this input had saved (itself, or the prefix that it shares) is in flight when the record comes: `save`, `problem` and
    `checkpoint_id` tell of it as soon as it has ended, which is when the next save begins or the iterator ends at the latest.
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
        """What the save came to; None when there was none, when it failed, and while it is in flight."""
        saved = self._saved()
        return saved if isinstance(saved, SaveResult) else None

    @property
    def problem(self) -> LlamaCkptError | None:
        """What failed on the way: database, store or save. The input was computed all the same."""
        saved = self._saved()
        return self.trouble or (saved if isinstance(saved, LlamaCkptError) else None)

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that this input had saved, else that it was restored from."""
        row = (self.save.checkpoint if self.save else None) or self.restored_from
        return row.id if row else None

    def _saved(self) -> Saved | None:
        return self.saving.result() if self.saving is not None and self.saving.done() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a batch is to be run, as `Registry.batch` describes it.

    Raises:
        BadInput: `save` is none of the three words, or as `SaveOptions`.
    """

    save: What = "prefix"
    shared_prefix: Input | None = None
    saved_as: SaveOptions = SaveOptions()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.save not in get_args(What):
            raise BadInput(what="save", value=self.save, reason=f"give one of {', '.join(get_args(What))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """An input on its way; or why it is none."""

    index: int
    given: Input
    input_hash: bytes
    token_ids: TokenIds
    saved_as: SaveOptions


@dataclass(frozen=True, slots=True)
class _Unusable:
    index: int
    error: LlamaCkptError


class Batch:
    """One run over some inputs. `match` is `Registry.match`; `progress` hears tokens done and in all of the input at hand.

    Raises:
        BadInput: the shared prefix cannot be used.
    """

    def __init__(
        self,
        context: RegistryContext,
        engine: Engine,
        match: Callable[..., MatchResult],
        options: BatchOptions,
        progress: Progress,
    ) -> None:
        self._context = context
        self._engine = engine
        self._match = match
        self._options = options
        self._progress = progress
        given = options.shared_prefix
        self._prefix_ids = None if given is None else token_ids_of(engine, given)
        self._n_ahead = LOOK_AHEAD if options.save == "prefix" and given is None else 0
        self._saver = BackgroundSaver(context)

    def run(self, inputs: Iterable[Input | BatchInput]) -> Generator[BatchRecord, None, None]:
        """A record for each input, in order. Whatever ends it, the save in flight is finished."""
        with self._saver:
            for item, following in self._with_following(inputs):
                yield self._record(item, following)

    def _with_following(
        self, inputs: Iterable[Input | BatchInput]
    ) -> Iterator[tuple[_Item | _Unusable, Sequence[_Item | _Unusable]]]:
        """Each input with those that come next."""
        waiting: deque[_Item | _Unusable] = deque()
        for index, one in enumerate(inputs):
            waiting.append(self._item(index, one))
            if len(waiting) > self._n_ahead:
                yield waiting.popleft(), waiting
        while waiting:
            yield waiting.popleft(), waiting

    def _item(self, index: int, one: Input | BatchInput) -> _Item | _Unusable:
        given, label = (one.given, one.label) if isinstance(one, BatchInput) else (one, None)
        saved_as = self._options.saved_as
        try:
            return _Item(
                index=index,
                given=given,
                input_hash=hash_input(given),
                token_ids=token_ids_of(self._engine, given),
                saved_as=saved_as if label is None else replace(saved_as, label=label),
            )
        except LlamaCkptError as error:
            return _Unusable(index, without_frames(error))

    # -- one input -----------------------------------------------------------------------------------------------------

    def _record(self, item: _Item | _Unusable, following: Sequence[_Item | _Unusable]) -> BatchRecord:
        started = time.perf_counter()
        if isinstance(item, _Unusable):
            return BatchRecord(
                index=item.index, input_hash=None, outcome=BatchOutcome.FAILED, elapsed_s=0.0, error=item.error
            )
        try:
            record, n_known = self._computed(item, following)
        except LlamaCkptError as error:
            return BatchRecord(
                index=item.index,
                input_hash=item.input_hash,
                outcome=BatchOutcome.FAILED,
                elapsed_s=time.perf_counter() - started,
                error=without_frames(error),
            )
        if self._is_cut and (n_saved := self._n_to_save(item, following, n_known)):
            record = self._begin_save(record, item, n_saved, time.perf_counter() - started)
        return replace(record, elapsed_s=time.perf_counter() - started)

    def _computed(self, item: _Item, following: Sequence[_Item | _Unusable]) -> tuple[BatchRecord, int]:
        """The input computed; and how many of its tokens the registry has, or will when the save in flight has ended. Of memory
        that cannot be cut the save begins where the evaluation comes by.
        """
        engine, ids = self._engine, item.token_ids
        n_kept, in_flight = self._n_held(ids), self._saver.n_shared(ids)
        if min(in_flight, len(ids) - 1) > n_kept:  # worth waiting for: no token is computed that is about to be stored
            self._saver.finish()
            in_flight = 0
        found = self._match(item.given, fingerprint=engine.fingerprint, token_ids=ids, vocabulary=engine)
        n_known = found.n_matching if found.outcome is Outcome.HIT else 0
        n_restored = n_evaluated = 0
        trouble = found.error
        if found.outcome is Outcome.HIT and found.n_reusable > n_kept:
            back = restoring.restore(self._context, engine, ids, lambda *_, **__: found, RestoreOptions())
            n_restored, n_evaluated, trouble = back.n_restored, back.n_evaluated, back.error
            hit = back.outcome is Outcome.HIT
            n_kept, n_known = (0, n_known) if hit else (self._n_held(ids), 0)
        passing: _PendingSave = None, None
        if n_evaluated == 0:
            n_evaluated = len(ids) - n_kept - n_restored
            n_at = n_kept or n_restored
            n_saved = 0 if self._is_cut else min(self._n_to_save(item, following, n_known), len(ids) - 1)
            if n_saved > n_at:
                started, saved_as = time.perf_counter(), self._options.saved_as
                engine.evaluate(ids[:n_saved], self._progress, n_kept=n_at)
                if n_at == 0:  # what the rest took says nothing of the whole
                    saved_as = replace(saved_as, prefill_ms=round((time.perf_counter() - started) * 1000))
                passing, n_at = self._begun(item, n_saved, saved_as), n_saved
            engine.evaluate(ids, self._progress, n_kept=n_at)
        embedding = engine.embedding()
        next_token, confidence = engine.next_token() if embedding is None else (None, None)
        record = BatchRecord(
            index=item.index,
            input_hash=item.input_hash,
            outcome=_outcome(len(ids), n_kept + n_restored),
            elapsed_s=0.0,
            n_kept=n_kept,
            n_restored=n_restored,
            n_evaluated=n_evaluated,
            restored_from=found.checkpoint if n_restored else None,
            next_token=next_token,
            confidence=confidence,
            embedding=embedding,
            saving=passing[0],
            trouble=passing[1] or (trouble and without_frames(trouble)),
        )
        return record, max(n_known, in_flight)

    @property
    def _is_cut(self) -> bool:
        return self._engine.memory_kind is MemoryKind.FULL

    def _n_held(self, token_ids: TokenIds) -> int:
        """How many cells that the engine holds serve an input. Memory that cannot be cut serves whole or not at all."""
        held = self._engine.held_token_ids()
        n = min(common_prefix(held, token_ids), len(token_ids) - 1)
        return n if n == len(held) or self._engine.memory_kind is MemoryKind.FULL else 0

    # -- what is kept of it --------------------------------------------------------------------------------------------

    def _n_to_save(self, item: _Item, following: Sequence[_Item | _Unusable], n_known: int) -> int:
        """How many tokens of the input are to be saved; 0 for nothing. `n_known` of them the registry has."""
        n_tokens = len(item.token_ids)
        match self._options.save:
            case "full":
                return n_tokens if n_known < n_tokens else 0
            case "prefix":
                if self._prefix_ids is not None:
                    others = [self._prefix_ids]
                else:
                    others = [one.token_ids for one in following if isinstance(one, _Item)]
                n_shared = max((common_prefix(item.token_ids, other) for other in others), default=0)
                comes_again = 1 < n_shared == n_tokens > n_known
                return n_shared if comes_again or n_shared - n_known >= self._context.min_match_tokens else 0
            case _:
                return 0

    def _begin_save(self, record: BatchRecord, item: _Item, n_saved: int, took_s: float) -> BatchRecord:
        """The record with its save on the way, or with the reason why there is none."""
        # A part of the input is not this input's alone.
        saved_as = item.saved_as if n_saved == len(item.token_ids) else self._options.saved_as
        if record.outcome is BatchOutcome.MISS:  # what the rest took says nothing of the whole
            saved_as = replace(saved_as, prefill_ms=round(took_s * 1000 * n_saved / len(item.token_ids)))
        saving, trouble = self._begun(item, n_saved, saved_as)
        return replace(record, saving=saving, trouble=record.trouble or trouble)

    def _begun(self, item: _Item, n_saved: int, saved_as: SaveOptions) -> _PendingSave:
        """The save of the first held tokens on its way, or why there is none."""
        given: Input = item.given
        if n_saved < len(item.token_ids):
            prefix = self._options.shared_prefix
            whole = self._prefix_ids is not None and n_saved == len(self._prefix_ids)
            given = prefix if whole and prefix is not None else item.token_ids[:n_saved]
        try:
            return self._saver.save(self._engine, n_saved, given, saved_as), None
        except LlamaCkptError as error:
            return None, without_frames(error)


def _outcome(n_tokens: int, n_spared: int) -> BatchOutcome:
    if n_spared == 0:
        return BatchOutcome.MISS
    return BatchOutcome.HIT if n_spared == n_tokens - 1 else BatchOutcome.PARTIAL
