"""Registers a checkpoint: a file that is in its place gets its row, once, with the links of its prefixes. Also the checks of rows
and store that a save makes before that.

A crash leaves at most a file without a row, never a row without a complete file.
"""

from __future__ import annotations

import contextlib
import logging

from llama_ckpt.checkpoints.deltas import DeltaPlan
from llama_ckpt.checkpoints.inputs import SaveOptions, clean_name
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, marks, prefixes, rows
from llama_ckpt.db.connect import Connection
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import (
    CommitOutcomeUnknown,
    Conflict,
    DatabaseUnavailable,
    FileMissing,
    LlamaCkptError,
    StoreUnavailable,
    UnsafePath,
)
from llama_ckpt.fingerprint import TokenIds, links_of, tokens_hash
from llama_ckpt.formats import container, magic
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Checkpoint, MemoryKind, NewCheckpoint, RegisteredModel, StaleReason

log = logging.getLogger("llama_ckpt")

_MAX_TRIES = 5


def claim_store(context: RegistryContext) -> None:
    """Marks the store at the first save. Later an unmarked store is a wrong or an unmounted one, and nothing is written there.

    Raises:
        StoreUnavailable: the store contains another registry's marker; or none, although rows name files in it.
    """
    if context.store.owner() is None and context.database.query(rows.is_empty):
        context.store.claim(context.registry_id)
    context.require_store()


def usable_or_renewed(
    context: RegistryContext, digest: bytes, input_hash: bytes, expires_in_s: float | None = None
) -> Checkpoint | None:
    """The ACTIVE row of this input if its file and those of its parents have their full size. A row that fails this is made
    STALE, together with the deltas that need it.

    An expired row that ACTIVE deltas need is renewed instead: it keeps its file, and expires in `expires_in_s` seconds from now,
    or never. If it went STALE to make place for a new row, the deltas would go with it.

    Raises:
        StoreUnavailable, DatabaseUnavailable: store or database cannot be read.
    """

    def look(db: Connection) -> tuple[Checkpoint | None, bool]:
        row = rows.find_active(db, digest, input_hash)
        return (row, False) if row is not None else (rows.find_expired(db, digest, input_hash), True)

    row, is_expired = context.database.query(look)
    if row is None or not _is_complete(context, row):
        return None
    if not is_expired:
        return row
    with context.database.write() as db:
        return rows.get(db, row.id) if marks.renew(db, row, expires_in_s) else None


def _is_complete(context: RegistryContext, row: Checkpoint) -> bool:
    """Whether the files of a row and of its parents have their full size; a row that fails this is made STALE."""
    try:
        return all(_has_its_file(context, member) for member in context.chain(row))
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


NO_DELTA = DeltaPlan()


def row_of(
    header: container.Header,
    *,
    checkpoint_id: str,
    model_name: str,
    memory_kind: MemoryKind,
    token_ids: TokenIds,
    options: SaveOptions,
    plan: DeltaPlan = NO_DELTA,
) -> NewCheckpoint:
    """The row of a file with this header that is stored under an id. `token_ids` are all of the checkpoint's, with those that the
    parent stores. A header without a payload belongs to no file: the parent has all cells, and the row has a size of 0.
    """
    has_file = header.payload_size > 0
    return NewCheckpoint(
        id=checkpoint_id,
        model_name=model_name,
        fingerprint=header.fingerprint,
        input_hash=header.input_hash,
        tokens_hash=tokens_hash(token_ids),
        n_tokens=header.seq_len,
        memory_kind=memory_kind,
        file_path=path_of(checkpoint_id),
        file_size=header.payload_offset + header.payload_size if has_file else 0,
        payload_crc32=header.payload_crc32,
        prefill_ms=options.prefill_ms,
        expires_in_s=options.expires_in_s,
        label=options.label,
        start_token=plan.start_token,
        parent_no=plan.parent.ckpt_no if plan.parent else None,
        extends_no=plan.extends_no,
        extended_by_no=plan.extended_by_no,
    )


def model_of(engine: HeldState) -> RegisteredModel:
    """The row of an engine's model."""
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
    """Adds the row of a file that is in its place, with its links, instead of the row `old`. If another process was first,
    its row is returned and the file is removed. If it fails, the file is removed too, unless the outcome of the commit is not
    known: a row without a file is worse than a file without a row. The same holds if it is interrupted.

    Raises:
        DatabaseUnavailable, StoreUnavailable: the row cannot be written; or gc has taken the file meanwhile.
        Conflict: others were first again and again, with unusable files; or the parent of a delta went STALE.
    """
    try:
        for _ in range(_MAX_TRIES):
            try:
                return _insert(context, model, new, old, token_ids)
            except Conflict as error:
                conflict = error
                theirs = usable_or_renewed(context, new.fingerprint, new.input_hash, new.expires_in_s)
                if theirs is not None and (old is None or theirs.id != old.id):
                    if theirs.id != new.id:  # else another process gave our own file its row
                        _discard(context, new)
                    return theirs
        raise conflict
    except CommitOutcomeUnknown:
        if (row := _ask_again(context, new)) is None:
            raise
        return row
    except LlamaCkptError:  # the database kept nothing of it
        if _is_registered(context, new) is not True:  # else another process gave our own file its row
            _discard(context, new)
        raise
    except BaseException:  # Ctrl-C too, which may have come after the commit
        discard_unregistered(context, new)
        raise


def _insert(
    context: RegistryContext, model: RegisteredModel, new: NewCheckpoint, old: Checkpoint | None, token_ids: TokenIds
) -> Checkpoint:
    """One try to insert the row with its links. The file is touched before, so that gc takes it for new, and looked for after the
    INSERT: if this process slept since the rename, gc may have taken it.
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
    """The row, if the commit was done after all. If not, it may still be: the file stays, and gc takes it if no row names it."""
    row = None
    with contextlib.suppress(DatabaseUnavailable):  # the caller raises the failure that led here
        row = context.database.query(lambda db: rows.get(db, new.id))
    if row is None:
        log.warning("the database gave no answer; %s may be left for gc to collect", new.file_path)
    return row


def discard_unregistered(context: RegistryContext, new: NewCheckpoint) -> None:
    """Removes the file of a registration that was interrupted, if no row names it. If the database cannot say, the file is left
    for gc: a row without a file is worse than a file without a row.
    """
    if _is_registered(context, new) is False:
        _discard(context, new)


def _is_registered(context: RegistryContext, new: NewCheckpoint) -> bool | None:
    """Whether a row names the file; None if the database cannot be asked."""
    with contextlib.suppress(DatabaseUnavailable):  # the caller raises the failure that led here
        return context.database.query(lambda db: rows.by_path(db, new.file_path)) is not None
    return None


def _discard(context: RegistryContext, new: NewCheckpoint) -> None:
    try:
        context.store.remove(new.file_path)
    except StoreUnavailable as error:
        log.warning("a file that no row names is left for gc to collect: %s", error)


def register_orphan(
    context: RegistryContext, model: RegisteredModel, new: NewCheckpoint, token_ids: TokenIds
) -> Checkpoint:
    """Gives a file of our own store its row again, under the name it has. If that fails, the file stays for gc.

    Raises:
        Conflict: another checkpoint of the same input is ACTIVE.
        StoreUnavailable: gc has taken the file meanwhile.
        DatabaseUnavailable: the row cannot be written.
    """
    context.store.touch(new.file_path)  # gc takes it for new until the row is there
    with context.database.write() as db:
        marks.release_active_key(db, new.fingerprint, new.input_hash, new.parent_no)
        rows.put_model(db, model)
        row = rows.insert_checkpoint(db, new)
        prefixes.link(db, links_of(row, token_ids, context.block_size))
        collecting.forget_ghosts(db, [new.file_path])
        context.store.modified_ns(new.file_path)  # gc may have taken it before the touch
    return row
