"""Saving: the state that an engine holds becomes a file and then a row, once.

The order that keeps data safe: the file first (staged, durable, then under its name), the row last. A crash leaves at most
a file without a row.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llama_ckpt.checkpoints import budget as admission
from llama_ckpt.checkpoints.deltas import DeltaPlan, plan_delta
from llama_ckpt.checkpoints.register import SaveOptions, claim_store, clean_name, model_of, register, usable_or_renewed
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import Conflict, EngineStateMismatch
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, hash_input, text_bytes, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Checkpoint, MemoryKind, NewCheckpoint, SaveOutcome, SaveResult

log = logging.getLogger("llama_ckpt")


def save(
    context: RegistryContext,
    engine: HeldState,
    given: Input,
    options: SaveOptions,
    *,
    instead_of: Checkpoint | None = None,
) -> SaveResult:
    """As `Registry.save`. `instead_of` is a row that a restore found of no use to this engine: it is superseded."""
    started = time.perf_counter()
    input_hash = hash_input(given)
    digest = engine.fingerprint.digest
    row, old = usable_or_renewed(context, digest, input_hash, options.expires_in_s), None
    if row is not None and not _stands_for(row, engine, given, instead_of):
        row, old = None, row
    if row is not None:
        result = SaveResult(outcome=SaveOutcome.DEDUPLICATED, checkpoint=row, bytes_written=0, elapsed_s=0.0)
    else:
        token_ids = token_ids_of(engine, given)
        _require_held(engine, token_ids)
        result = write(context, _captured(engine, input_hash, token_ids), options, old)
    context.metrics.count(result.outcome.value)
    return replace(result, elapsed_s=time.perf_counter() - started)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """The state of an input that belongs to an engine's model. `written_by` is metadata that tells who computed it.

    Raises:
        Unsupported: the state is not of these tokens: of full attention one cell for each, of other memory up to the last.
    """

    engine: HeldState
    input_hash: bytes
    token_ids: TokenIds
    payload: memoryview
    written_by: Mapping[str, str]

    def __post_init__(self) -> None:
        require = kv_state.require_plain_sequence if self.is_sliceable else kv_state.require_whole_sequence
        require(kv_state.parse(self.payload), len(self.token_ids))

    @property
    def is_sliceable(self) -> bool:
        """Whether a part of it is a state, too."""
        return self.engine.memory_kind is MemoryKind.FULL


def _captured(engine: HeldState, input_hash: bytes, token_ids: TokenIds) -> CapturedState:
    return CapturedState(
        engine=engine,
        input_hash=input_hash,
        token_ids=token_ids,
        payload=engine.capture(),
        written_by={"engine": engine.engine_name},
    )


def write(
    context: RegistryContext, captured: CapturedState, options: SaveOptions, old: Checkpoint | None = None
) -> SaveResult:
    """Writes what of a state is not stored yet, and registers it, instead of the row `old`. If the checkpoint that it stands on
    goes meanwhile, it is written in full.

    Raises:
        StoreFull, StoreUnavailable, DatabaseUnavailable: as `Registry.save`.
    """
    claim_store(context)
    place = plan_delta(context, captured.engine, captured.token_ids, captured.payload, old)
    if place.parent is not None:
        try:
            return _write(context, captured, options, old, place)
        except Conflict as error:
            log.info("written in full: %s", error)
    return _write(context, captured, options, old, replace(place, parent=None, start_token=0))


def _write(
    context: RegistryContext, captured: CapturedState, options: SaveOptions, old: Checkpoint | None, place: DeltaPlan
) -> SaveResult:
    new, head, payload = _encode(captured, options, place)
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


def token_ids_of(engine: HeldState, given: Input) -> TokenIds:
    """The token ids of an input: the engine's for a text; shape `[n_tokens]`.

    Raises:
        BadInput: the input is empty or no input.
    """
    if isinstance(given, str):
        text_bytes(given)
        return engine.token_ids(given)
    return as_token_ids(given)


def _stands_for(row: Checkpoint, engine: HeldState, given: Input, instead_of: Checkpoint | None) -> bool:
    """Whether a row of this input hash is of this input. For a text the hash says so, unless it has NUL characters: then its
    bytes can be those of token ids.
    """
    if instead_of is not None and row.id == instead_of.id:
        return False
    if isinstance(given, str) and "\0" not in given:
        return True
    return row.tokens_hash == tokens_hash(token_ids_of(engine, given))


def _require_held(engine: HeldState, token_ids: TokenIds) -> None:
    held = engine.held_token_ids()
    if len(held) != len(token_ids):
        raise EngineStateMismatch(reason=f"it holds {len(held)} tokens, the input has {len(token_ids)}")
    differ = (held != token_ids).nonzero()[0]
    if differ.size:
        raise EngineStateMismatch(reason=f"they differ from token {int(differ[0])} on")


def _encode(captured: CapturedState, options: SaveOptions, place: DeltaPlan) -> tuple[NewCheckpoint, bytes, memoryview]:
    """The row, the bytes before the payload, and the payload: of what the parent does not hold. No bytes where it holds all."""
    engine, token_ids, start = captured.engine, captured.token_ids, place.start_token
    head, payload, full = b"", memoryview(b""), None
    if start < len(token_ids):
        payload = kv_edit.tail(captured.payload, start) if place.parent else captured.payload
        head, full = _head(captured, payload, place)
    checkpoint_id = uuid.uuid4().hex
    new = NewCheckpoint(
        id=checkpoint_id,
        model_name=clean_name(engine.model_name),
        fingerprint=engine.fingerprint.digest,
        input_hash=captured.input_hash,
        tokens_hash=tokens_hash(token_ids),
        n_tokens=len(token_ids),
        memory_kind=engine.memory_kind,
        file_path=path_of(checkpoint_id),
        file_size=full.payload_offset + full.payload_size if full else 0,
        payload_crc32=full.payload_crc32 if full else 0,
        prefill_ms=options.prefill_ms,
        expires_in_s=options.expires_in_s,
        label=options.label,
        start_token=start,
        parent_no=place.parent.ckpt_no if place.parent else None,
        extends_no=place.extends_no,
        extended_by_no=place.extended_by_no,
    )
    return new, head, payload


def _head(captured: CapturedState, payload: memoryview, place: DeltaPlan) -> tuple[bytes, container.Header]:
    engine, start = captured.engine, place.start_token
    state = kv_state.parse(payload)
    header = container.Header(
        flags=(container.FLAG_SLICEABLE if captured.is_sliceable else 0)
        | (container.FLAG_DELTA if place.parent else 0),
        seq_len=len(captured.token_ids),
        start_token=start,
        n_layer=state.n_layer,
        n_kv_head=engine.dimensions.n_kv_head,
        metadata_size=0,
        fingerprint=engine.fingerprint.digest,
        input_hash=captured.input_hash,
        created_ns=time.time_ns(),
    )
    metadata = {
        "dialect": state.dialect,
        "fingerprint": dict(engine.fingerprint.fields),
        "memory_kind": engine.memory_kind.value,
        "model_name": clean_name(engine.model_name),
        **captured.written_by,
    }
    if place.parent:
        metadata |= {"parent": place.parent.id, "tokens_before": tokens_hash(captured.token_ids[:start]).hex()}
    return container.encode_head(header, metadata, captured.token_ids[start:], payload)
