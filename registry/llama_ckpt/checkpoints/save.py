"""Saves the state that an engine holds, once: as a file, then as a row.

The order that keeps data safe: the file first (staged, durable, then under its name), the row last. A crash leaves at most
a file without a row.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import replace

from llama_ckpt.checkpoints import budget as admission
from llama_ckpt.checkpoints.captured import CapturedState
from llama_ckpt.checkpoints.deltas import DeltaPlan, plan_delta
from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions, clean_name
from llama_ckpt.checkpoints.register import claim_store, model_of, register, row_of, usable_or_renewed
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import Conflict, EngineStateMismatch
from llama_ckpt.fingerprint import TokenIds, common_prefix, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import Checkpoint, NewCheckpoint, SaveOutcome, SaveResult

log = logging.getLogger("llama_ckpt")


def save(
    context: RegistryContext,
    engine: HeldState,
    prompt: ResolvedInput,
    options: SaveOptions,
    *,
    unusable: Collection[str] = (),
) -> SaveResult:
    """As `Registry.save`. `unusable` are ids of checkpoints that a restore found to be unusable for this engine: if one of
    them is of this input, the new one supersedes it.
    """
    started = time.perf_counter()
    digest = engine.fingerprint.digest
    row, old = usable_or_renewed(context, digest, prompt.input_hash, options.expires_in_s), None
    if row is not None and (row.id in unusable or not _is_of(row, prompt)):
        row, old = None, row
    if row is not None:
        result = SaveResult(outcome=SaveOutcome.DEDUPLICATED, checkpoint=row, bytes_written=0, elapsed_s=0.0)
    else:
        _require_held(engine, prompt.token_ids)
        result = write(context, _capture(engine, prompt), options, old)
    context.metrics.count(result.outcome.value)
    return replace(result, elapsed_s=time.perf_counter() - started)


def _is_of(row: Checkpoint, prompt: ResolvedInput) -> bool:
    """Whether a row with this input hash is a checkpoint of this input."""
    return prompt.required_tokens_hash in (None, row.tokens_hash)


def _require_held(engine: HeldState, token_ids: TokenIds) -> None:
    held = engine.held_token_ids()
    if len(held) != len(token_ids):
        raise EngineStateMismatch(reason=f"it holds {len(held)} tokens, the input has {len(token_ids)}")
    if (n_common := common_prefix(held, token_ids)) < len(token_ids):
        raise EngineStateMismatch(reason=f"they differ from token {n_common} on")


def _capture(engine: HeldState, prompt: ResolvedInput) -> CapturedState:
    return CapturedState(
        engine=engine,
        input_hash=prompt.input_hash,
        token_ids=prompt.token_ids,
        payload=engine.capture(),
        written_by={"engine": engine.engine_name},
    )


def write(
    context: RegistryContext, captured: CapturedState, options: SaveOptions, old: Checkpoint | None = None
) -> SaveResult:
    """Writes the cells of a state that are not stored yet, and registers it, instead of the row `old`. If its parent goes away
    meanwhile, it is written in full.

    Raises:
        StoreFull, StoreUnavailable, DatabaseUnavailable: as `Registry.save`.
    """
    claim_store(context)
    plan = plan_delta(context, captured, old)
    if plan.parent is not None:
        try:
            return _write(context, captured, options, old, plan)
        except Conflict as error:
            log.info("written in full: %s", error)
    return _write(context, captured, options, old, replace(plan, parent=None, start_token=0))


def _write(
    context: RegistryContext, captured: CapturedState, options: SaveOptions, old: Checkpoint | None, plan: DeltaPlan
) -> SaveResult:
    new, head, payload = _encode(captured, options, plan)
    granted = admission.admit(context, new)
    if granted.refused is not None:
        return SaveResult(
            outcome=SaveOutcome.REFUSED, checkpoint=None, bytes_written=0, elapsed_s=0.0, reason=granted.refused
        )
    try:
        if new.file_size:
            context.store.write(new.id, head, payload)
        row = register(context, model_of(captured.engine), new, captured.token_ids, old)
    finally:
        admission.release(context, granted)
    if row.id != new.id:
        return SaveResult(outcome=SaveOutcome.DEDUPLICATED, checkpoint=row, bytes_written=0, elapsed_s=0.0)
    return SaveResult(outcome=SaveOutcome.SAVED, checkpoint=row, bytes_written=new.file_size, elapsed_s=0.0)


def _encode(captured: CapturedState, options: SaveOptions, plan: DeltaPlan) -> tuple[NewCheckpoint, bytes, memoryview]:
    """The row, the bytes before the payload, and the payload: the cells that the parent does not have. No bytes if it has all."""
    header, head, payload = _header(captured, plan), b"", memoryview(b"")
    if plan.start_token < len(captured.token_ids):
        payload = kv_edit.tail(captured.payload, plan.start_token) if plan.parent else captured.payload
        head, header = _head(captured, payload, header, plan)
    new = row_of(
        header,
        checkpoint_id=uuid.uuid4().hex,
        model_name=clean_name(captured.engine.model_name),
        memory_kind=captured.engine.memory_kind,
        token_ids=captured.token_ids,
        options=options,
        plan=plan,
    )
    return new, head, payload


def _header(captured: CapturedState, plan: DeltaPlan) -> container.Header:
    """The header without what depends on the payload."""
    flags = container.FLAG_SLICEABLE if captured.can_be_truncated else 0
    return container.Header(
        flags=flags | (container.FLAG_DELTA if plan.parent else 0),
        seq_len=len(captured.token_ids),
        start_token=plan.start_token,
        n_layer=captured.engine.dimensions.n_layer,
        n_kv_head=captured.engine.dimensions.n_kv_head,
        metadata_size=0,
        fingerprint=captured.engine.fingerprint.digest,
        input_hash=captured.input_hash,
        created_ns=time.time_ns(),
    )


def _head(
    captured: CapturedState, payload: memoryview, header: container.Header, plan: DeltaPlan
) -> tuple[bytes, container.Header]:
    """The bytes before a payload, and the complete header."""
    engine, start, state = captured.engine, plan.start_token, kv_state.parse(payload)
    metadata = {
        "dialect": state.dialect,
        "fingerprint": dict(engine.fingerprint.fields),
        "memory_kind": engine.memory_kind.value,
        "model_name": clean_name(engine.model_name),
        **captured.written_by,
    }
    if plan.parent:
        metadata |= {"parent": plan.parent.id, "tokens_before": tokens_hash(captured.token_ids[:start]).hex()}
    header = replace(header, n_layer=state.n_layer)
    return container.encode_head(header, metadata, captured.token_ids[start:], payload)
