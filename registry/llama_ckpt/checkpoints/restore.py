"""Restore and merge: lease the row, open and verify its files, and only then touch the engine. The result is recorded with the
end of the lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llama_ckpt.checkpoints import search
from llama_ckpt.checkpoints.inputs import ResolvedInput
from llama_ckpt.checkpoints.read import CellRequest, Cells, ChainReader, leased, other_mode
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine
from llama_ckpt.errors import (
    BadInput,
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
from llama_ckpt.fingerprint import TokenIds, common_prefix
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.values import Checkpoint, MatchResult, MergeResult, Outcome, RestoreResult

log = logging.getLogger("llama_ckpt")

# Each candidate costs the read and the check of its files. If so many in a row are unusable, it is not one damaged file: the
# disk or the model has changed, and to evaluate the input is faster than to try the rest.
MAX_CANDIDATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """The options of `Registry.restore`. `layers` None means all of them."""

    layers: frozenset[int] | None = None
    check_values: bool = False
    transpose_v: bool = False

    @classmethod
    def for_engine(
        cls, engine: Engine, layers: Iterable[int] | None, *, check_values: bool, transpose_v: bool
    ) -> RestoreOptions:
        """The options, if the engine has these `layers`.

        Raises:
            BadInput: no layer, or one that the engine does not have.
        """
        chosen = None if layers is None else frozenset(layers)
        n_layer = engine.dimensions.n_layer
        if chosen is not None and (not chosen or not chosen <= frozenset(range(n_layer))):
            unknown = sorted(chosen - frozenset(range(n_layer)), key=str)
            raise BadInput(
                what="layers", value=unknown, reason=f"the model has {n_layer}: name some of 0 to {n_layer - 1}"
            )
        return cls(layers=chosen, check_values=check_values, transpose_v=transpose_v)


class Candidates:
    """The checkpoints that can serve one input, the best first, then the next best: `restore`, `warm` and `batch` try them.

        for _ in candidates.tries():
            result = candidates.restore(candidates.find())

    A checkpoint that turns out to be unusable (damaged, missing, or not for this engine) is not found again, and there is
    another try, up to `MAX_CANDIDATES` in all. An error that may be gone in a moment ends the tries, and so does a miss.

    Raises:
        BadInput: the input cannot be used.
    """

    def __init__(
        self,
        context: RegistryContext,
        engine: Engine,
        prompt: ResolvedInput,
        options: RestoreOptions = RestoreOptions(),
    ) -> None:
        self._context, self._engine, self._prompt, self._options = context, engine, prompt, options
        # At once: what is found must have the tokens that the input has today, and with token ids a search is one read.
        self.token_ids = prompt.token_ids
        self._unusable: list[RestoreResult] = []

    @property
    def unusable(self) -> frozenset[str]:
        """The ids of the checkpoints that turned out to be unusable for this engine."""
        return frozenset(result.checkpoint.id for result in self._unusable if result.checkpoint is not None)

    def tries(self) -> Iterator[None]:
        """One item for each try: the first, and another after each checkpoint that turned out to be unusable."""
        for n_before in range(MAX_CANDIDATES):
            yield
            if len(self._unusable) == n_before:
                return

    def find(self) -> MatchResult:
        """The best of the checkpoints that are not known to be unusable."""
        query = self._query()
        answer = search.find(self._context, query)
        if answer.outcome is Outcome.NO_MATCH and self._options.transpose_v:
            query = replace(query, fingerprint=other_mode(self._engine.fingerprint))
            transposed = search.find(self._context, query)
            return transposed if transposed.outcome is Outcome.HIT else answer
        return answer

    def restore(self, match: MatchResult) -> RestoreResult:
        """As `restore_found`, and remembers the checkpoint if it is unusable."""
        result = restore_found(self._context, self._engine, self._prompt, match, self._options)
        if result.outcome is Outcome.NO_MATCH and result.checkpoint is not None:
            self._unusable.append(result)
        return result

    def conclude(self, last: RestoreResult) -> RestoreResult:
        """The result to report after the tries, counted in the metrics. If nothing was restored, the fault of the best checkpoint
        says most; if there was none, the reason says which other models have the input.
        """
        if last.outcome is Outcome.NO_MATCH:
            last = self._unusable[0] if self._unusable else self._explained(last)
        self._context.metrics.count(last.outcome.value)
        return last

    def _explained(self, last: RestoreResult) -> RestoreResult:
        miss = MatchResult(outcome=last.outcome, reason=last.reason, input_hash=self._prompt.input_hash)
        explained = search.explain(self._context, self._query(), miss)
        return replace(last, outcome=explained.outcome, reason=explained.reason, error=explained.error)

    def _query(self) -> MatchQuery:
        return MatchQuery(
            input_hash=self._prompt.input_hash,
            prompt=self._prompt,
            fingerprint=self._engine.fingerprint,
            excluded=self.unusable,
        )


def restore(context: RegistryContext, engine: Engine, prompt: ResolvedInput, options: RestoreOptions) -> RestoreResult:
    """As `Registry.restore`. The checkpoint may be longer or shorter than the input, or differ from it after some tokens: those
    that match are restored.
    """
    started = time.perf_counter()
    candidates = Candidates(context, engine, prompt, options)
    for _ in candidates.tries():
        result = candidates.restore(candidates.find())
    return replace(candidates.conclude(result), elapsed_s=time.perf_counter() - started)


def restore_found(
    context: RegistryContext,
    engine: Engine,
    prompt: ResolvedInput,
    match: MatchResult,
    options: RestoreOptions = RestoreOptions(),
) -> RestoreResult:
    """Restores the checkpoint of an answer that the caller has, and no other. Without a checkpoint the result is that of the
    answer.

    Raises:
        BadInput: the context is too small, or the input cannot be used.
    """
    started = time.perf_counter()
    outcome, reason, error, n_evaluated = match.outcome, match.reason, match.error, 0
    if match.checkpoint is not None:
        try:
            _require_same_tokens(match.checkpoint, prompt)
            request = _request(prompt, match, options)
            n_evaluated = _load(context, engine, match.checkpoint, request, _Target(prompt.token_ids, options.layers))
            reason = "restored"
        except BadInput:
            raise
        except LlamaCkptError as failure:
            outcome, reason = _outcome_of(failure), str(failure)
            error = without_frames(failure) if outcome is Outcome.FAILED else None
    return RestoreResult(
        outcome=outcome,
        reason=reason,
        n_restored=match.n_matching - n_evaluated if outcome is Outcome.HIT else 0,
        n_evaluated=n_evaluated,
        checkpoint=match.checkpoint,
        elapsed_s=time.perf_counter() - started,
        error=error,
    )


def merge(context: RegistryContext, engine: Engine, row: Checkpoint) -> MergeResult:
    """As `Registry.merge`, for a row."""
    started = time.perf_counter()
    held = engine.held_token_ids()
    if len(held) == 0:
        raise EngineStateMismatch(reason="it holds nothing to append to; restore() loads a complete checkpoint")
    if row.n_tokens <= len(held):
        reason = (
            f"the checkpoint ends after {row.n_tokens} tokens, the engine holds {len(held)}: there is nothing to append"
        )
        raise Incompatible(reason=reason)
    _require_room(engine, row.n_tokens)
    head = engine.capture()
    request = CellRequest(begins_with=held, n_tokens=row.n_tokens)
    with _in_use(context, row) as reader, reader.cells(engine, request) as cells:
        joined = kv_edit.join(head, kv_edit.tail(cells.state, len(held)))
        _load_all(engine, Cells(state=joined, token_ids=cells.token_ids))
    context.metrics.count("merged")
    return MergeResult(
        checkpoint=row,
        n_merged=row.n_tokens - len(held),
        n_held=row.n_tokens,
        elapsed_s=time.perf_counter() - started,
    )


# -- one checkpoint into the engine --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """The state to reach: the tokens of the input, and the layers to load; None for all."""

    token_ids: TokenIds
    layers: frozenset[int] | None


def _request(prompt: ResolvedInput, match: MatchResult, options: RestoreOptions) -> CellRequest:
    return CellRequest(
        begins_with=prompt.token_ids[: match.n_matching],
        n_tokens=match.n_matching,
        check_values=options.check_values,
        transpose_v=options.transpose_v,
    )


def _load(context: RegistryContext, engine: Engine, row: Checkpoint, request: CellRequest, target: _Target) -> int:
    """Brings the requested cells into the engine, and returns the number of tokens that were evaluated for it: 0 or 1."""
    _require_room(engine, request.n_tokens)
    live = None if target.layers is None else _live_state(engine, target.token_ids)
    with _in_use(context, row) as reader, reader.cells(engine, request) as cells:
        if live is not None:
            state = kv_edit.replace_layers(live, cells.state, target.layers or ())
            cells = Cells(state=state, token_ids=cells.token_ids)
        if request.n_tokens == len(target.token_ids):
            _load_all(engine, cells)
            return 1
        engine.load(cells.state, cells.token_ids)
        return 0


def _live_state(engine: Engine, token_ids: TokenIds) -> memoryview:
    """The state that the engine holds, if it is exactly that of the input."""
    held = engine.held_token_ids()
    if not common_prefix(held, token_ids) == len(held) == len(token_ids):
        reason = (
            f"layers are put into a state of exactly the input's {len(token_ids)} tokens, it holds {len(held)} others"
        )
        raise EngineStateMismatch(reason=reason)
    return engine.capture()


def _load_all(engine: Engine, cells: Cells) -> None:
    """Loads the cells. A state has no logits, so the last token is decoded again, as at the end of a cold run."""
    engine.load(cells.state, cells.token_ids)
    engine.evaluate(cells.token_ids, n_kept=len(cells.token_ids) - 1)


def _require_room(engine: Engine, n_tokens: int) -> None:
    if n_tokens > engine.n_ctx:
        reason = f"the state has {n_tokens} cells, the context {engine.n_ctx}: set a larger n_ctx"
        raise Incompatible(reason=reason)


def _require_same_tokens(row: Checkpoint, prompt: ResolvedInput) -> None:
    """A checkpoint with this input hash must have the input's tokens. One of another input shares a prefix, which is compared
    when the file is open.
    """
    if row.input_hash == prompt.input_hash and row.tokens_hash != prompt.tokens_hash:
        raise Incompatible(reason="the engine's tokenizer gives other tokens for this input than at the save")


@contextmanager
def _in_use(context: RegistryContext, row: Checkpoint) -> Iterator[ChainReader]:
    """A reader of a row that is leased meanwhile. A block that ends without an error counts as a hit. An error that shows that a
    file is unusable makes its row STALE, and the deltas that need it.

    Raises:
        DatabaseUnavailable: the row cannot be leased.
        Incompatible: it is not ACTIVE any more.
    """
    reader = ChainReader(context, row)
    try:
        with leased(context, row, Incompatible(reason=f"checkpoint {row.id} went STALE at this moment")) as use:
            use.events = reader.events
            yield reader
            use.is_hit = True
    except LlamaCkptError as error:
        try:
            context.condemn(reader.current, error)
        except DatabaseUnavailable as lost:  # the next restore finds the same, and tries again
            log.warning("what became of checkpoint %s was not recorded: %s", reader.current.id, lost)
        raise


def _outcome_of(error: LlamaCkptError) -> Outcome:
    """NO_MATCH if the checkpoint is unusable for this engine; FAILED if something broke that may work again."""
    match error:
        case FileMissing() | CorruptFile() | UnsafePath() | Incompatible() | Unsupported() | EngineStateMismatch():
            return Outcome.NO_MATCH
        case _:
            return Outcome.FAILED
