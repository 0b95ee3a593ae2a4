"""Registering: a file that is in its place gets its row, once, with the links of its prefixes; and what a save must know of the
rows and the store before that.

A crash leaves at most a file without a row, never a row without a whole file.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, marks, prefixes, rows
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import (
    BadInput,
    CommitOutcomeUnknown,
    Conflict,
    DatabaseUnavailable,
    FileMissing,
    StoreUnavailable,
    UnsafePath,
)
from llama_ckpt.fingerprint import TokenIds, links_of, tokens_hash
from llama_ckpt.formats import container, magic
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Checkpoint, MemoryKind, NewCheckpoint, RegisteredModel, StaleReason

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


def claim_store(context: RegistryContext) -> None:
    """The first save marks the store. Later on an unmarked store is a wrong or unmounted one: nothing is written there.

    Raises:
        StoreUnavailable: it bears no marker though rows name files in it, or another registry's.
    """
    if context.store.owner() is None and context.database.query(rows.is_empty):
        context.store.claim(context.registry_id)
    context.require_store()


def usable(context: RegistryContext, digest: bytes, input_hash: bytes) -> Checkpoint | None:
    """The ACTIVE row of this input if its file is there in full, and those that it stands on; a row that fails this is made
    STALE, with the deltas on it.

    Raises:
        StoreUnavailable, DatabaseUnavailable: they cannot say.
    """
    row = context.database.query(lambda db: rows.find_active(db, digest, input_hash))
    return row if row is not None and _is_whole(context, row) else None


def usable_or_renewed(
    context: RegistryContext, digest: bytes, input_hash: bytes, expires_in_s: float | None = None
) -> Checkpoint | None:
    """As `usable`; or the row of this input whose time is over, if deltas that are offered stand on it: it gets a new time, of
    `expires_in_s` seconds or without end, and keeps its file. To make it STALE for a new one would take the deltas along.

    Raises:
        StoreUnavailable, DatabaseUnavailable: they cannot say.
    """
    if (row := usable(context, digest, input_hash)) is not None:
        return row
    row = context.database.query(lambda db: rows.find_expired(db, digest, input_hash))
    if row is None or not _is_whole(context, row):
        return None
    with context.database.write() as db:
        if not marks.renew(db, row, expires_in_s):
            return None
        return rows.get(db, row.id)


def _is_whole(context: RegistryContext, row: Checkpoint) -> bool:
    """Whether the files of a row and of those that it stands on are there in full; one that fails this is made STALE."""
    try:
        return all(_has_its_file(context, one) for one in context.chain(row))
    except FileMissing:  # purged at this moment
        return False


def _has_its_file(context: RegistryContext, row: Checkpoint) -> bool:
    if row.is_covered:
        return True
    try:
        size = context.store.size(row.file_path)
    except UnsafePath as error:
        context.make_stale(row, StaleReason.CORRUPT, str(error))
        return False
    if size is None:
        context.require_store()
        context.make_stale(row, StaleReason.MISSING, "its file is gone")
        return False
    if not row.file_size <= size <= row.file_size + magic.MAX_PADDING:
        context.make_stale(row, StaleReason.CORRUPT, f"its file has {size} bytes instead of {row.file_size}")
        return False
    return True


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


def model_of(engine: HeldState) -> RegisteredModel:
    """An engine's model as a row."""
    return RegisteredModel(
        fingerprint=engine.fingerprint, model_name=clean_name(engine.model_name), dimensions=engine.dimensions
    )


def register(
    context: RegistryContext,
    model: RegisteredModel,
    new: NewCheckpoint,
    token_ids: TokenIds,
    old: Checkpoint | None = None,
) -> Checkpoint:
    """Adds the row of a file that is in its place, with its links, instead of the row `old`; or gives the row of whoever was
    first. If it fails, the file is removed: except after a commit without an answer, since a row without a file is worse than a
    file without a row.

    Raises:
        DatabaseUnavailable, StoreUnavailable: the row cannot be written; or the file was collected meanwhile.
        Conflict: others were first again and again, with files that were of no use; or what a delta stands on went STALE.
    """
    try:
        for _ in range(_MAX_TRIES):
            try:
                return _insert(context, model, new, old, token_ids)
            except Conflict as error:
                conflict = error
                theirs = usable_or_renewed(context, new.fingerprint, new.input_hash, new.expires_in_s)
                if theirs is not None and (old is None or theirs.id != old.id):
                    if theirs.id != new.id:  # else somebody gave our own file its row
                        _discard(context, new)
                    return theirs
        raise conflict
    except CommitOutcomeUnknown:
        if (row := _ask_again(context, new)) is None:
            raise
        return row
    except Exception:
        if not _is_registered(context, new):  # else somebody gave our own file its row
            _discard(context, new)
        raise


def _insert(
    context: RegistryContext, model: RegisteredModel, new: NewCheckpoint, old: Checkpoint | None, token_ids: TokenIds
) -> Checkpoint:
    """One try at the row with its links. The file is made young before, and looked for after the INSERT: a process that slept
    between its rename and here may have lost it to gc.
    """
    if new.file_size:
        context.store.touch(new.file_path)
    with context.database.write() as db:
        marks.release_active_key(db, new.fingerprint, new.input_hash, new.parent_no, old)
        rows.put_model(db, model)
        row = rows.insert_checkpoint(db, new)
        prefixes.link(db, links_of(row, token_ids, context.block_size))
        context.hook("inserted")
        if new.file_size and context.store.size(new.file_path) != new.file_size:
            raise StoreUnavailable(path=new.file_path, reason="it was collected while it was saved; save again")
    context.hook("committed")
    return row


def _ask_again(context: RegistryContext, new: NewCheckpoint) -> Checkpoint | None:
    """Whether the row is there after all. If not, it may still come; the file stays, and gc collects it if no row names it."""
    row = None
    with contextlib.suppress(DatabaseUnavailable):  # the caller tells the failure that led here
        row = context.database.query(lambda db: rows.get(db, new.id))
    if row is None:
        log.warning("the database gave no answer; %s may be left for gc to collect", new.file_path)
    return row


def _is_registered(context: RegistryContext, new: NewCheckpoint) -> bool:
    """Whether a row names the file, as far as the database says."""
    with contextlib.suppress(DatabaseUnavailable):  # the caller tells the failure that led here
        return context.database.query(lambda db: rows.get(db, new.id)) is not None
    return False


def _discard(context: RegistryContext, new: NewCheckpoint) -> None:
    try:
        context.store.remove(new.file_path)
    except StoreUnavailable as error:
        log.warning("a file that no row names is left for gc to collect: %s", error)


def register_orphan(
    context: RegistryContext, model: RegisteredModel, new: NewCheckpoint, token_ids: TokenIds
) -> Checkpoint:
    """Gives a file of our own store its row again, where it lies. If it fails, the file stays for gc.

    Raises:
        Conflict: another checkpoint of the same input is ACTIVE.
        StoreUnavailable: gc has taken the file meanwhile.
        DatabaseUnavailable: the row cannot be written.
    """
    context.store.touch(new.file_path)  # gc takes it for fresh until the row is there
    with context.database.write() as db:
        marks.release_active_key(db, new.fingerprint, new.input_hash, new.parent_no)
        rows.put_model(db, model)
        row = rows.insert_checkpoint(db, new)
        prefixes.link(db, links_of(row, token_ids, context.block_size))
        collecting.forget_ghosts(db, [new.file_path])
        context.store.modified_ns(new.file_path)  # gc may have taken it before the touch
    return row
