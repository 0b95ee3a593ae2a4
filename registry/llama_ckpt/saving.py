"""Saving: the state that an engine holds becomes a file and then a row, once.

The order that keeps data safe: the file first (staged, durable, then under its name), the row last. A crash leaves at most
a file without a row.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from llama_ckpt import admission
from llama_ckpt.admission import Admission
from llama_ckpt.db import queries
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
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, input_hash, text_bytes, tokens_hash
from llama_ckpt.formats import container, kv_state
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
    row, old, size = usable(parts, engine.fingerprint.digest, of_input), None, 0
    granted = Admission()
    if row is not None and not _stands_for(row, engine, given, instead_of):
        row, old = None, row
    if row is None:
        token_ids = token_ids_of(engine, given)
        _require_held(engine, token_ids)
        new, head, payload = _encode(engine, of_input, token_ids, options)
        claim_store(parts)
        granted = admission.admit(parts, new)
        if granted.refused is None:
            try:
                size = parts.store.write(new.id, head, payload)
                row = register(parts, model_of(engine), new, old)
            finally:
                admission.release(parts, granted)
            size = size if row.id == new.id else 0
    outcome = SaveOutcome.SAVED if size else SaveOutcome.DEDUPLICATED if row else SaveOutcome.REFUSED
    parts.metrics.count(outcome.value)
    elapsed_s = time.perf_counter() - started
    return SaveResult(
        outcome=outcome, checkpoint=row, bytes_written=size, elapsed_s=elapsed_s, reason=granted.refused or ""
    )


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


def claim_store(parts: Parts) -> None:
    """The first save marks the store. Later on an unmarked store is a wrong or unmounted one: nothing is written there.

    Raises:
        StoreUnavailable: it bears no marker though rows name files in it, or another registry's.
    """
    if parts.store.owner() is None and parts.database.query(queries.count_rows) == 0:
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
    """The ACTIVE row of this input if its file is there in full; a row that fails this is made STALE.

    Raises:
        StoreUnavailable, DatabaseUnavailable: they cannot say.
    """
    row = parts.database.query(lambda db: queries.find_active(db, digest, of_input))
    if row is None:
        return None
    try:
        size = parts.store.size(row.file_path)
    except UnsafePath as error:
        parts.make_stale(row, StaleReason.CORRUPT, str(error))
        return None
    if size is None:
        parts.require_store()
        parts.make_stale(row, StaleReason.MISSING, "its file is gone")
        return None
    if not row.file_size <= size <= row.file_size + container.MAX_PADDING:
        parts.make_stale(row, StaleReason.CORRUPT, f"its file has {size} bytes instead of {row.file_size}")
        return None
    return row


def _encode(
    engine: Engine, of_input: bytes, token_ids: TokenIds, options: SaveOptions
) -> tuple[NewCheckpoint, bytes, memoryview]:
    """The row, the bytes before the payload, and the payload."""
    if engine.memory_kind is not MemoryKind.FULL:
        raise Unsupported(
            what=f"saving {engine.memory_kind} memory", reason="this version saves full attention caches only"
        )
    payload = engine.capture()
    new, head = encode(engine, of_input, token_ids, payload, {"engine": engine.engine_name}, options)
    return new, head, payload


def encode(
    engine: Engine,
    of_input: bytes,
    token_ids: TokenIds,
    payload: memoryview,
    written_by: Mapping[str, str],
    options: SaveOptions,
) -> tuple[NewCheckpoint, bytes]:
    """The row of a state that belongs to an engine's model, and the bytes of its file before the payload. `written_by` is
    metadata that tells who computed the state.

    Raises:
        Unsupported: the state is not of full attention with one cell for each token.
    """
    state = kv_state.parse(payload)
    kv_state.require_plain_sequence(state, len(token_ids))
    model_name = clean_name(engine.model_name)
    header = container.Header(
        flags=container.FLAG_SLICEABLE,
        seq_len=len(token_ids),
        start_token=0,
        n_layer=state.n_layer,
        n_kv_head=engine.dimensions.n_kv_head,
        metadata_size=0,
        fingerprint=engine.fingerprint.digest,
        input_hash=of_input,
        created_ns=time.time_ns(),
    )
    metadata = {
        "dialect": state.dialect,
        "fingerprint": dict(engine.fingerprint.fields),
        "memory_kind": engine.memory_kind.value,
        "model_name": model_name,
        **written_by,
    }
    head, full = container.encode_head(header, metadata, token_ids, payload)
    return row_of(full, uuid.uuid4().hex, model_name, engine.memory_kind, token_ids, options), head


def row_of(
    header: container.Header,
    checkpoint_id: str,
    model_name: str,
    memory_kind: MemoryKind,
    token_ids: TokenIds,
    options: SaveOptions,
) -> NewCheckpoint:
    """The row of a file with this header that is kept under an id."""
    return NewCheckpoint(
        id=checkpoint_id,
        model_name=model_name,
        fingerprint=header.fingerprint,
        input_hash=header.input_hash,
        tokens_hash=tokens_hash(token_ids),
        n_tokens=header.seq_len,
        memory_kind=memory_kind,
        file_path=path_of(checkpoint_id),
        file_size=header.payload_offset + header.payload_size,
        payload_crc32=header.payload_crc32,
        prefill_ms=options.prefill_ms,
        expires_in_s=options.expires_in_s,
        label=options.label,
    )


def model_of(engine: Engine) -> RegisteredModel:
    """An engine's model as a row."""
    return RegisteredModel(
        fingerprint=engine.fingerprint, model_name=clean_name(engine.model_name), dimensions=engine.dimensions
    )


class _CommitUnanswered(Exception):  # noqa: N818 - never leaves this module
    """The connection was lost while the commit was under way: the row may be there, or may yet come."""


def register(parts: Parts, model: RegisteredModel, new: NewCheckpoint, old: Checkpoint | None = None) -> Checkpoint:
    """Adds the row of a file that is in its place, instead of the row `old`; or gives the row of whoever was first. If it
    fails, the file is removed: except after a commit without an answer, since a row without a file is worse than a file
    without a row.

    Raises:
        DatabaseUnavailable, StoreUnavailable: the row cannot be written; or the file was collected meanwhile.
        Conflict: others were first again and again, with files that were of no use.
    """
    try:
        for _ in range(_MAX_TRIES):
            try:
                return _insert(parts, model, new, old)
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


def _insert(parts: Parts, model: RegisteredModel, new: NewCheckpoint, old: Checkpoint | None) -> Checkpoint:
    """One try at the row. The file is made young before, and looked for after the INSERT: a process that slept between its
    rename and here may have lost it to gc.
    """
    committing = False
    try:
        parts.store.touch(new.file_path)
        with parts.database.write() as db:
            queries.expire_due(db, new.fingerprint, new.input_hash)
            if old is not None:
                queries.mark_stale(db, old, StaleReason.SUPERSEDED)
            queries.put_model(db, model)
            row = queries.insert_checkpoint(db, new)
            parts.hook("inserted")
            if parts.store.size(new.file_path) != new.file_size:
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
