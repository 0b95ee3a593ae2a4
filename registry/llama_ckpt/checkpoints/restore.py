"""Restoring, warming, merging: lease, open, verify, and only then the engine; what became of it is recorded as the lease ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llama_ckpt.checkpoints.read import Asked, Cells, Reading, cells_of, other_mode
from llama_ckpt.checkpoints.save import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import leases, usage
from llama_ckpt.engine import Engine
from llama_ckpt.errors import (
    BadInput,
    Conflict,
    CorruptFile,
    DatabaseUnavailable,
    EngineStateMismatch,
    FileMissing,
    Incompatible,
    LlamaCkptError,
    UnsafePath,
    Unsupported,
    without_frames,
)
from llama_ckpt.fingerprint import Input, TokenIds, hash_input, tokens_hash
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.metrics import Event
from llama_ckpt.values import Checkpoint, MatchResult, MergeResult, Outcome, RestoreResult

log = logging.getLogger("llama_ckpt")

_MORE_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How a restore is to be made, as `Registry.restore` describes it. `layers` None: all of them."""

    layers: frozenset[int] | None = None
    check_values: bool = False
    transpose_v: bool = False

    @classmethod
    def of(
        cls, engine: Engine, layers: Iterable[int] | None, *, check_values: bool, transpose_v: bool
    ) -> RestoreOptions:
        """The options, with `layers` held to those that the engine has.

        Raises:
            BadInput: no layer, or one that is not there.
        """
        chosen = None if layers is None else frozenset(layers)
        n_layer = engine.dimensions.n_layer
        if chosen is not None and (not chosen or not chosen <= frozenset(range(n_layer))):
            unknown = sorted(chosen - frozenset(range(n_layer)), key=str)
            raise BadInput(
                what="layers", value=unknown, reason=f"the model has {n_layer}: name some of 0 to {n_layer - 1}"
            )
        return cls(layers=chosen, check_values=check_values, transpose_v=transpose_v)


def restore(
    context: RegistryContext, engine: Engine, given: Input, match: Callable[..., MatchResult], options: RestoreOptions
) -> RestoreResult:
    """As `Registry.restore`; `match` is `Registry.match`. The checkpoint that it names may be longer or shorter than the input,
    or differ from it after `n_matching` tokens: these are restored. Where one turns out to be of no use, the next best is tried.
    """
    started = time.perf_counter()
    token_ids = token_ids_of(engine, given)
    found = _found(engine, given, token_ids, match, options)
    first = result = _tried(context, engine, given, token_ids, found, options)
    for _ in range(_MORE_TRIES):
        if result.outcome is not Outcome.NO_MATCH or result.checkpoint is None:
            break
        found = _found(engine, given, token_ids, match, options)
        if found.checkpoint is None or found.checkpoint.id == result.checkpoint.id:
            break  # there is no other
        result = _tried(context, engine, given, token_ids, found, options)
    told = first if result.outcome is Outcome.NO_MATCH else result  # the best one's fault says most
    context.metrics.count(told.outcome.value)
    return replace(told, elapsed_s=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A vocabulary for one text, whose token ids are known already."""

    engine: Engine
    ids: TokenIds

    def token_ids(self, _text: str) -> TokenIds:
        return self.ids

    def text_of(self, token_ids: TokenIds) -> str:
        return self.engine.text_of(token_ids)


def _found(
    engine: Engine, given: Input, token_ids: TokenIds, match: Callable[..., MatchResult], options: RestoreOptions
) -> MatchResult:
    # As a vocabulary and not as ids: an input found by its hash may have other tokens by now, and that is told below.
    known = _Tokenized(engine, token_ids)
    found = match(given, fingerprint=engine.fingerprint, vocabulary=known)
    if found.outcome is Outcome.NO_MATCH and options.transpose_v:
        turned = match(given, fingerprint=other_mode(engine.fingerprint), vocabulary=known)
        found = turned if turned.outcome is Outcome.HIT else found
    return found


def _tried(
    context: RegistryContext,
    engine: Engine,
    given: Input,
    token_ids: TokenIds,
    found: MatchResult,
    options: RestoreOptions,
) -> RestoreResult:
    """What comes of one answer: of a checkpoint, if it names one, what its load does."""
    outcome, reason, error, n_evaluated = found.outcome, found.reason, found.error, 0
    if found.checkpoint is not None:
        try:
            _require_same_tokens(found.checkpoint, given, token_ids)
            n_evaluated = _load(context, engine, found.checkpoint, token_ids, found.n_matching, options)
            reason = "restored"
        except BadInput:
            raise
        except LlamaCkptError as failure:
            outcome, reason = _outcome_of(failure), str(failure)
            error = without_frames(failure) if outcome is Outcome.FAILED else None
    return RestoreResult(
        outcome=outcome,
        reason=reason,
        n_restored=found.n_matching - n_evaluated if outcome is Outcome.HIT else 0,
        n_evaluated=n_evaluated,
        checkpoint=found.checkpoint,
        elapsed_s=0.0,
        error=error,
    )


def merge(context: RegistryContext, engine: Engine, row: Checkpoint) -> MergeResult:
    """As `Registry.merge`, for a row."""
    started = time.perf_counter()
    held = engine.held_token_ids()
    if len(held) == 0:
        raise EngineStateMismatch(reason="it holds nothing to append to; restore() loads a whole checkpoint")
    if row.n_tokens <= len(held):
        reason = (
            f"the checkpoint ends after {row.n_tokens} tokens, the engine holds {len(held)}: there is nothing to append"
        )
        raise Incompatible(reason=reason)
    _require_room(engine, row.n_tokens)
    head = engine.capture()
    asked = Asked(begins_with=held, n_tokens=row.n_tokens)
    with _leased(context, row) as reading, cells_of(context, engine, row, asked, reading) as cells:
        joined = kv_edit.join(head, kv_edit.tail(cells.state, len(held)))
        _take(engine, Cells(state=joined, token_ids=cells.token_ids))
    context.metrics.count("merged")
    return MergeResult(
        checkpoint=row,
        n_merged=row.n_tokens - len(held),
        n_held=row.n_tokens,
        elapsed_s=time.perf_counter() - started,
    )


def _load(
    context: RegistryContext,
    engine: Engine,
    row: Checkpoint,
    token_ids: TokenIds,
    n_tokens: int,
    options: RestoreOptions,
) -> int:
    """Brings the first `n_tokens` cells into the engine, and gives how many tokens were evaluated for it."""
    _require_room(engine, n_tokens)
    asked = Asked(
        begins_with=token_ids[:n_tokens],
        n_tokens=n_tokens,
        check_values=options.check_values,
        transpose_v=options.transpose_v,
    )
    live = None if options.layers is None else _live_state(engine, token_ids)
    with _leased(context, row) as reading, cells_of(context, engine, row, asked, reading) as cells:
        if live is not None:
            state = kv_edit.replace_layers(live, cells.state, options.layers or ())
            cells = Cells(state=state, token_ids=cells.token_ids)
        if n_tokens == len(token_ids):
            _take(engine, cells)
            return 1
        engine.load(cells.state, cells.token_ids)
        return 0


def _live_state(engine: Engine, token_ids: TokenIds) -> memoryview:
    """The state that the engine holds, if it is the input's."""
    held = engine.held_token_ids()
    if len(held) != len(token_ids) or (held != token_ids).any():
        reason = (
            f"layers are put into a state of exactly the input's {len(token_ids)} tokens, it holds {len(held)} others"
        )
        raise EngineStateMismatch(reason=reason)
    return engine.capture()


def _take(engine: Engine, cells: Cells) -> None:
    """Loads the cells. A state has no logits, so the last token is decoded again, as after a cold run that ended with it."""
    engine.load(cells.state, cells.token_ids)
    engine.evaluate(cells.token_ids, n_kept=len(cells.token_ids) - 1)


def _require_room(engine: Engine, n_tokens: int) -> None:
    if n_tokens > engine.n_ctx:
        reason = f"the state has {n_tokens} cells, the context {engine.n_ctx}: set a larger n_ctx"
        raise Incompatible(reason=reason)


def _require_same_tokens(row: Checkpoint, given: Input, token_ids: TokenIds) -> None:
    """A checkpoint of the very input must be of its very tokens. One of another input shares a prefix, and that is looked at when
    the file is open.
    """
    if row.input_hash == hash_input(given) and row.tokens_hash != tokens_hash(token_ids):
        raise Incompatible(reason="the engine's tokenizer gives other tokens for this input than at the save")


@contextmanager
def _leased(context: RegistryContext, row: Checkpoint) -> Iterator[Reading]:
    """A row that is leased while the block reads its files. Afterwards the lease is given back, and with it is recorded what the
    block met and what became of it: a hit, or a row that went STALE for what the block raised, and the deltas on it with it.

    Raises:
        DatabaseUnavailable: the row cannot be leased.
        Incompatible: it is not ACTIVE any more.
    """
    with context.database.write() as db:
        until = leases.lease(db, row)
    if until is None:
        raise Incompatible(reason=f"checkpoint {row.id} went STALE at this moment")
    context.hook("leased")
    reading = Reading(row)
    try:
        yield reading
    except LlamaCkptError as error:
        _record(context, row, until, reading.events, hit=False)
        with _noted(reading.row):
            context.condemn(reading.row, error)
        raise
    _record(context, row, until, reading.events, hit=True)


def _record(context: RegistryContext, row: Checkpoint, until: int, events: set[Event], *, hit: bool) -> None:
    """Gives the lease back, counts the hit and the events: one transaction."""
    for event in events:
        context.metrics.count(event.value)
    with _noted(row):
        for n_left in range(
            len(events), -1, -1
        ):  # of each event another process may count its day's first at this moment
            try:
                with context.database.write() as db:
                    leases.release(db, row, until, hit=hit)
                    usage.count(db, [event.value for event in events])
                return
            except Conflict as error:
                if n_left == 0:
                    raise DatabaseUnavailable(url=context.database.shown_url, reason=str(error)) from error


@contextmanager
def _noted(row: Checkpoint) -> Iterator[None]:
    """The engine's state is right whether or not the row can be written; a lost note costs a statistic or another try."""
    try:
        yield
    except DatabaseUnavailable as error:
        log.warning("what became of checkpoint %s was not recorded: %s", row.id, error)


def _outcome_of(error: LlamaCkptError) -> Outcome:
    """Whether nothing fits, or something broke."""
    match error:
        case FileMissing() | CorruptFile() | UnsafePath() | Incompatible() | Unsupported() | EngineStateMismatch():
            return Outcome.NO_MATCH
        case _:
            return Outcome.FAILED
