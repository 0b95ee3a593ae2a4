"""Restoring: match, lease, open, verify, and only then the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llama_ckpt import formats
from llama_ckpt.db import queries
from llama_ckpt.engine import Engine
from llama_ckpt.errors import (
    CorruptFile,
    DatabaseUnavailable,
    EngineFailed,
    FileMissing,
    Incompatible,
    LlamaCkptError,
    StoreUnavailable,
    UnsafePath,
)
from llama_ckpt.fingerprint import Input, TokenIds, tokens_hash
from llama_ckpt.parts import Parts
from llama_ckpt.saving import token_ids_of
from llama_ckpt.values import Checkpoint, MatchResult, Outcome, RestoreResult, StaleReason

log = logging.getLogger("llama_ckpt")

LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What became of one candidate; `stale` is the reason for which its row may not be offered again."""

    outcome: Outcome
    reason: str
    stale: StaleReason | None = None
    error: LlamaCkptError | None = None


def restore(parts: Parts, engine: Engine, given: Input, match: Callable[..., MatchResult]) -> RestoreResult:
    """As `Registry.restore`; `match` is `Registry.match`."""
    started = time.perf_counter()
    token_ids = token_ids_of(engine, given)
    found = match(given, fingerprint=engine.fingerprint)
    row = found.checkpoint
    attempt = (
        _Attempt(found.outcome, found.reason, error=found.error)
        if row is None
        else _attempt(parts, engine, row, token_ids)
    )
    parts.metrics.count(attempt.outcome.value)
    hit = row is not None and attempt.outcome is Outcome.HIT
    return RestoreResult(
        outcome=attempt.outcome,
        reason=attempt.reason,
        n_restored=len(token_ids) - 1 if hit else 0,
        n_evaluated=1 if hit else 0,
        checkpoint=row,
        elapsed_s=time.perf_counter() - started,
        error=attempt.error,
    )


def _attempt(parts: Parts, engine: Engine, row: Checkpoint, token_ids: TokenIds) -> _Attempt:
    """One candidate: leased, loaded, and what happened recorded."""
    if row.n_tokens > engine.n_ctx:
        reason = f"the checkpoint has {row.n_tokens} cells, the context {engine.n_ctx}: set a larger n_ctx"
        return _Attempt(Outcome.NO_MATCH, reason)
    try:
        with parts.database.write() as db:
            until = queries.lease(db, row, LEASE_S)
    except DatabaseUnavailable as error:
        return _Attempt(Outcome.FAILED, str(error), error=error)
    if until is None:
        return _Attempt(Outcome.NO_MATCH, "the checkpoint went STALE at this moment")
    parts.hook("leased")
    attempt = _load(parts, engine, row, token_ids)
    with _noted(row):
        with parts.database.write() as db:
            queries.release(db, row, until)
            if attempt.outcome is Outcome.HIT:
                queries.record_hit(db, row)
        if attempt.stale is not None:
            parts.make_stale(row, attempt.stale, attempt.reason)
    return attempt


def _load(parts: Parts, engine: Engine, row: Checkpoint, token_ids: TokenIds) -> _Attempt:
    try:
        with parts.store.map(row.file_path) as view:
            file = _verified(parts, engine, row, token_ids, view)
            engine.load(file.contents.payload, token_ids)
    except FileMissing as error:
        return _missing(parts, error)
    except (CorruptFile, UnsafePath) as error:
        return _Attempt(Outcome.NO_MATCH, str(error), StaleReason.CORRUPT)
    except Incompatible as error:  # with this engine: another one may still use it
        return _Attempt(Outcome.NO_MATCH, str(error))
    except StoreUnavailable as error:
        return _Attempt(Outcome.FAILED, str(error), error=_without_frames(error))
    except EngineFailed as error:
        return _Attempt(Outcome.FAILED, str(error), StaleReason.INCOMPATIBLE, _without_frames(error))
    return _Attempt(Outcome.HIT, "restored")


def _missing(parts: Parts, missing: FileMissing) -> _Attempt:
    try:
        parts.require_store()
    except StoreUnavailable as error:
        return _Attempt(Outcome.FAILED, str(error), error=_without_frames(error))
    return _Attempt(Outcome.NO_MATCH, str(missing), StaleReason.MISSING)


def _without_frames(error: LlamaCkptError) -> LlamaCkptError:
    """An error that lives on in a result must not keep the map of the file alive through its traceback."""
    return error.with_traceback(None)


def _verified(
    parts: Parts, engine: Engine, row: Checkpoint, token_ids: TokenIds, view: memoryview
) -> formats.CheckpointFile:
    """The file, held to itself, to its row and to the engine."""
    file = formats.open_checkpoint(view, row.file_path)
    if file.contents.padding:
        log.info("detected padding: %d byte(s) of zeros before the magic of %s", file.contents.padding, row.file_path)
        parts.metrics.count("padding_detected")
    formats.require_agreement(file, row, row.file_path)
    if row.tokens_hash != tokens_hash(token_ids):
        raise Incompatible(reason="the engine's tokenizer gives other tokens for this input than at the save")
    if file.state.dialect != engine.dialect:
        raise Incompatible(
            reason=f"the file's state is of dialect '{file.state.dialect}', the engine speaks '{engine.dialect}'"
        )
    if mismatch := formats.dimension_mismatch(file.dimensions, engine.dimensions):
        raise CorruptFile(path=row.file_path, check="Dimensions", reason=mismatch)
    return file


@contextmanager
def _noted(row: Checkpoint) -> Iterator[None]:
    """The engine's state is right whether or not the row can be written; a lost note costs a statistic or another try."""
    try:
        yield
    except DatabaseUnavailable as error:
        log.warning("what became of checkpoint %s was not recorded: %s", row.id, error)
