"""Saving: the state that an engine holds becomes a file and then a row, once.

The order that keeps data safe: the file first (staged, durable, then under its name), the row last. A crash leaves at most
a file without a row.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, replace

from llama_ckpt import admission
from llama_ckpt.db import prefixes, queries
from llama_ckpt.deltas import Base, base_of
from llama_ckpt.engine import Engine
from llama_ckpt.errors import (
    BadInput,
    Conflict,
    DatabaseUnavailable,
    EngineStateMismatch,
    StoreUnavailable,
    UnsafePath,
    Unsupported,
)
from llama_ckpt.files import path_of
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, input_hash, links_of, text_bytes, tokens_hash
from llama_ckpt.formats import container, kv_edit, kv_state
from llama_ckpt.parts import Parts
from llama_ckpt.values import (
    Checkpoint,
    MemoryKind,
    NewCheckpoint,
    RegisteredModel,
    SaveOutcome,
    SaveResult,
    StaleReason,
)

log = logging.getLogger("llama_ckpt")

_MAX_TRIES = 5
_NAME_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a caller says of a save beyond the input.

    Raises:
        BadInput: a label of no or over 200 characters, or an expiry that is not in the future.
    """

    label: str | None = None
    expires_in_s: float | None = None
    prefill_ms: int | None = None

    def __post_init__(self) -> None:
        if self.label is not None:
            _require_label(self.label)
        if self.expires_in_s is not None and not 0 < self.expires_in_s < 1e10:
            raise BadInput(what="expires_in_s", value=self.expires_in_s, reason="give seconds greater than 0")
        if self.prefill_ms is not None and not 0 <= self.prefill_ms < 1 << 53:
            raise BadInput(what="prefill_ms", value=self.prefill_ms, reason="give milliseconds from 0 on")


def _require_label(label: str) -> None:
    if not 0 < len(label) <= _NAME_LENGTH:
        raise BadInput(what="label", value=label[:40], reason=f"a label has 1 to {_NAME_LENGTH} characters")
    if clean_name(label) != label:
        raise BadInput(what="label", value=label[:40], reason="a label has no NUL and no lone surrogate")


def clean_name(name: str) -> str:
    """A name as every database can hold it: at most 200 characters, valid UTF-8, no NUL, not empty."""
    return name.encode(errors="replace").decode().replace("\0", "?")[:_NAME_LENGTH] or "unnamed"


def save(
    parts: Parts, engine: Engine, given: Input, options: SaveOptions, *, instead_of: Checkpoint | None = None
) -> SaveResult:
    """As `Registry.save`. `instead_of` is a row that a restore found of no use to this engine: it is superseded."""
    started = time.perf_counter()
    of_input = input_hash(given)
    row, old = usable(parts, engine.fingerprint.digest, of_input), None
    if row is not None and not _stands_for(row, engine, given, instead_of):
        row, old = None, row
    if row is not None:
        result = SaveResult(outcome=SaveOutcome.DEDUPLICATED, checkpoint=row, bytes_written=0, elapsed_s=0.0)
    else:
        token_ids = token_ids_of(engine, given)
        _require_held(engine, token_ids)
        result = _save(parts, _captured(engine, of_input, token_ids), options, old)
    parts.metrics.count(result.outcome.value)
    return replace(result, elapsed_s=time.perf_counter() - started)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What an engine holds of an input: the tokens and a copy of their state."""

    engine: Engine
    of_input: bytes
    token_ids: TokenIds
    payload: memoryview


def _captured(engine: Engine, of_input: bytes, token_ids: TokenIds) -> _Captured:
    if engine.memory_kind is not MemoryKind.FULL:
        raise Unsupported(
            what=f"saving {engine.memory_kind} memory", reason="this version saves full attention caches only"
        )
    payload = engine.capture()
    kv_state.require_plain_sequence(kv_state.parse(payload), len(token_ids))
    return _Captured(engine=engine, of_input=of_input, token_ids=token_ids, payload=payload)


def _save(parts: Parts, captured: _Captured, options: SaveOptions, old: Checkpoint | None) -> SaveResult:
    """Writes what is not stored yet. If the checkpoint that it stands on goes meanwhile, it is written in full."""
    _claim_store(parts)
    base = base_of(parts, captured.engine, captured.token_ids, captured.payload, old)
    if base is not None:
        try:
            return _write(parts, captured, options, old, base)
        except Conflict as error:
            log.info("written in full: %s", error)
    return _write(parts, captured, options, old, None)


def _write(
    parts: Parts, captured: _Captured, options: SaveOptions, old: Checkpoint | None, base: Base | None
) -> SaveResult:
    new, head, payload = _encode(captured, options, base)
    granted = admission.admit(parts, new)
    if granted.refused is not None:
        return SaveResult(
            outcome=SaveOutcome.REFUSED, checkpoint=None, bytes_written=0, elapsed_s=0.0, reason=granted.refused
        )
    try:
        if new.file_size:
            parts.store.write(new.id, head, payload)
        row = _register(parts, captured.engine, new, old, captured.token_ids)
    finally:
        admission.release(parts, granted)
    if row.id != new.id:
        return SaveResult(outcome=SaveOutcome.DEDUPLICATED, checkpoint=row, bytes_written=0, elapsed_s=0.0)
    return SaveResult(outcome=SaveOutcome.SAVED, checkpoint=row, bytes_written=new.file_size, elapsed_s=0.0)


def token_ids_of(engine: Engine, given: Input) -> TokenIds:
    """The token ids of an input: the engine's for a text; shape `[n_tokens]`.

    Raises:
        BadInput: the input is empty or no input.
    """
    if isinstance(given, str):
        text_bytes(given)
        return engine.token_ids(given)
    return as_token_ids(given)


def _stands_for(row: Checkpoint, engine: Engine, given: Input, instead_of: Checkpoint | None) -> bool:
    """Whether a row of this input hash is of this input. For a text the hash says so, unless it has NUL characters: then its
    bytes can be those of token ids.
    """
    if instead_of is not None and row.id == instead_of.id:
        return False
    if isinstance(given, str) and "\0" not in given:
        return True
    return row.tokens_hash == tokens_hash(token_ids_of(engine, given))


def _claim_store(parts: Parts) -> None:
    """The first save marks the store. Later on an unmarked store is a wrong or unmounted one: nothing is written there."""
    if parts.store.owner() is None and parts.database.query(queries.is_empty):
        parts.store.claim(parts.registry_id)
    parts.require_store()


def _require_held(engine: Engine, token_ids: TokenIds) -> None:
    held = engine.held_token_ids()
    if len(held) != len(token_ids):
        raise EngineStateMismatch(reason=f"it holds {len(held)} tokens, the input has {len(token_ids)}")
    differ = (held != token_ids).nonzero()[0]
    if differ.size:
        raise EngineStateMismatch(reason=f"they differ from token {int(differ[0])} on")


def usable(parts: Parts, digest: bytes, of_input: bytes) -> Checkpoint | None:
    """The ACTIVE row of this input if its file is there in full, and those that it stands on; a row that fails this is made
    STALE, with the deltas on it.
    """
    row = parts.database.query(lambda db: queries.find_active(db, digest, of_input))
    if row is None:
        return None
    chain = [row] if row.parent_no is None else [*parts.database.query(lambda db: queries.ancestors(db, row)), row]
    return row if all(_has_its_file(parts, one) for one in chain) else None


def _has_its_file(parts: Parts, row: Checkpoint) -> bool:
    if row.is_covered:
        return True
    try:
        size = parts.store.size(row.file_path)
    except UnsafePath as error:
        parts.make_stale(row, StaleReason.CORRUPT, str(error))
        return False
    if size is None:
        parts.require_store()
        parts.make_stale(row, StaleReason.MISSING, "its file is gone")
        return False
    if not row.file_size <= size <= row.file_size + container.MAX_PADDING:
        parts.make_stale(row, StaleReason.CORRUPT, f"its file has {size} bytes instead of {row.file_size}")
        return False
    return True


def _encode(captured: _Captured, options: SaveOptions, base: Base | None) -> tuple[NewCheckpoint, bytes, memoryview]:
    """The row, the bytes before the payload, and the payload: of what the base does not hold. No bytes where it holds all."""
    engine, token_ids, start = captured.engine, captured.token_ids, base.start_token if base else 0
    head, payload, full = b"", memoryview(b""), None
    if start < len(token_ids):
        payload = kv_edit.tail(captured.payload, start) if base else captured.payload
        head, full = _head(captured, payload, base)
    checkpoint_id = uuid.uuid4().hex
    new = NewCheckpoint(
        id=checkpoint_id,
        model_name=clean_name(engine.model_name),
        fingerprint=engine.fingerprint.digest,
        input_hash=captured.of_input,
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
        parent_no=base.parent.ckpt_no if base else None,
    )
    return new, head, payload


def _head(captured: _Captured, payload: memoryview, base: Base | None) -> tuple[bytes, container.Header]:
    engine, start = captured.engine, base.start_token if base else 0
    state = kv_state.parse(payload)
    header = container.Header(
        flags=container.FLAG_SLICEABLE | (container.FLAG_DELTA if base else 0),
        seq_len=len(captured.token_ids),
        start_token=start,
        n_layer=state.n_layer,
        n_kv_head=engine.dimensions.n_kv_head,
        metadata_size=0,
        fingerprint=engine.fingerprint.digest,
        input_hash=captured.of_input,
        created_ns=time.time_ns(),
    )
    metadata = {
        "dialect": state.dialect,
        "engine": engine.engine_name,
        "fingerprint": dict(engine.fingerprint.fields),
        "memory_kind": engine.memory_kind.value,
        "model_name": clean_name(engine.model_name),
    }
    if base:
        metadata["parent"] = base.parent.id
    return container.encode_head(header, metadata, captured.token_ids[start:], payload)


class _CommitUnanswered(Exception):  # noqa: N818 - never leaves this module
    """The connection was lost while the commit was under way: the row may be there, or may yet come."""


def _register(
    parts: Parts, engine: Engine, new: NewCheckpoint, old: Checkpoint | None, token_ids: TokenIds
) -> Checkpoint:
    """Adds the row and its links, or gives the row of whoever was first. If it fails, the file is removed: except after a
    commit without an answer, since a row without a file is worse than a file without a row.
    """
    model = RegisteredModel(fingerprint=engine.fingerprint, model_name=new.model_name, dimensions=engine.dimensions)
    try:
        for _ in range(_MAX_TRIES):
            try:
                return _insert(parts, model, new, old, token_ids)
            except Conflict as error:
                conflict = error
                theirs = usable(parts, new.fingerprint, new.input_hash)
                if theirs is not None and (old is None or theirs.id != old.id):
                    _discard(parts, new)
                    return theirs
        raise conflict
    except _CommitUnanswered as lost:
        row = _ask_again(parts, new)
        if row is None and lost.__cause__ is not None:
            raise lost.__cause__ from None
        return row  # type: ignore[return-value] # the cause is always there
    except Exception:
        _discard(parts, new)
        raise


def _insert(
    parts: Parts, model: RegisteredModel, new: NewCheckpoint, old: Checkpoint | None, token_ids: TokenIds
) -> Checkpoint:
    """One try at the row with its links. The file is made young before, and looked for after the INSERT: a process that slept
    between its rename and here may have lost it to gc.
    """
    committing = False
    try:
        if new.file_size:
            parts.store.touch(new.file_path)
        with parts.database.write() as db:
            queries.expire_due(db, new.fingerprint, new.input_hash)
            if old is not None:
                queries.mark_stale(db, old, StaleReason.SUPERSEDED)
            queries.put_model(db, model)
            row = queries.insert_checkpoint(db, new)
            prefixes.link(db, links_of(row, token_ids, parts.block_size))
            parts.hook("inserted")
            if new.file_size and parts.store.size(new.file_path) != new.file_size:
                raise StoreUnavailable(path=new.file_path, reason="it was collected while it was saved; save again")
            committing = True
        parts.hook("committed")
    except DatabaseUnavailable as error:
        if committing:
            raise _CommitUnanswered from error
        raise
    return row


def _ask_again(parts: Parts, new: NewCheckpoint) -> Checkpoint | None:
    """Whether the row is there after all. If not, it may still come; the file stays, and gc collects it if no row names it."""
    row = None
    with contextlib.suppress(DatabaseUnavailable):  # the caller tells the failure that led here
        row = parts.database.query(lambda db: queries.get(db, new.id))
    if row is None:
        log.warning("the database gave no answer; %s may be left for gc to collect", new.file_path)
    return row


def _discard(parts: Parts, new: NewCheckpoint) -> None:
    try:
        parts.store.remove(new.file_path)
    except StoreUnavailable as error:
        log.warning("a file that no row names is left for gc to collect: %s", error)
