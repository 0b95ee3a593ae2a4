"""Marks on rows: lock, mark STALE, reactivate, renew, pin. Nothing here commits.

Only portable SQL: each statement runs unchanged on every supported database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE, STALE, batches, deltas_of, due, has_active_child, touch_active
from llama_ckpt.db.tables import checkpoint_prefix
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import expiry_us, now_us
from llama_ckpt.errors import Conflict
from llama_ckpt.fingerprint import active_key
from llama_ckpt.values import Checkpoint, NewCheckpoint, StaleReason


def release_active_key(
    db: sa.Connection, digest: bytes, input_hash: bytes, parent_no: int | None, old: Checkpoint | None = None
) -> None:
    """Releases the unique key of (fingerprint, input) before a new row is inserted. Marks the current ACTIVE row STALE if it has
    expired, and `old`, if given, as superseded, with the deltas that need it. Locks them and `parent_no`, the parent of the new
    row, in one order.

    Raises:
        Conflict: the current row has expired and deltas need it: renew it instead (`renew`).
    """
    going: dict[int, tuple[Checkpoint, StaleReason]] = {}
    if (expired := due(db, digest, input_hash)) is not None:
        if has_active_child(db, expired):
            raise Conflict(what="the checkpoint of this input has expired, and deltas need it")
        going[expired.ckpt_no] = (expired, StaleReason.EXPIRED)
    if old is not None:
        going[old.ckpt_no] = (old, StaleReason.SUPERSEDED)
    if not going:
        return
    lock(db, {*going, *_active_deltas(db, going), *([] if parent_no is None else [parent_no])})
    for row, reason in going.values():
        mark_stale(db, row, reason)


def renew(db: sa.Connection, row: Checkpoint, expires_in_s: float | None) -> bool:
    """Gives an expired ACTIVE row a new expiry, or none; False when it is STALE or not expired any more."""
    due = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.expires_us <= now_us()]
    values = {"expires_us": expiry_us(expires_in_s), "last_used_us": now_us()}
    return db.execute(sa.update(meta).where(*due).values(**values)).rowcount == 1


def record_verified(db: sa.Connection, row: Checkpoint) -> None:
    """Records that every byte of a checkpoint's file was verified just now."""
    db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no).values(verified_us=now_us()))


def mark_stale(db: sa.Connection, row: Checkpoint, reason: StaleReason) -> bool:
    """Marks an ACTIVE row STALE, and every delta that needs it; False when it is STALE already, or has another file now."""
    return bool(mark_all_stale(db, {row.ckpt_no: row.file_path}, reason))


def mark_all_stale(db: sa.Connection, paths: Mapping[int, str], reason: StaleReason) -> set[int]:
    """Marks ACTIVE rows STALE, and every delta that needs them. `paths` has the path of the file by the number of the row. A row
    that has another file now is skipped, since the reason is about the old file. Gives the numbers of those of `paths` that it
    marked.
    """
    files = lock(db, {*paths, *_active_deltas(db, paths)})
    marked = {number for number, path in paths.items() if files.get(number) == path}
    # The parents are locked now, so no delta is added any more. Those added since the first query are locked here.
    needing = _active_deltas(db, marked)
    lock(db, needing - files.keys())
    for numbers in batches(sorted(marked | needing)):
        mark(db, [meta.c.ckpt_no.in_(numbers)], reason)
    unlink(db, sorted(marked | needing))
    return marked


def lock(db: sa.Connection, numbers: Iterable[int]) -> dict[int, str]:
    """Locks those of some rows that are ACTIVE, in order of their number, as all processes do: no deadlocks. Gives the paths of
    their files by number. SQLite has one writer and locks nothing here.
    """
    paths: dict[int, str] = {}
    for batch in batches(sorted(numbers)):
        query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(meta.c.ckpt_no.in_(batch), meta.c.status == ACTIVE)
        paths |= {row.ckpt_no: row.file_path for row in db.execute(query.order_by(meta.c.ckpt_no).with_for_update())}
    return paths


def active_of_model(db: sa.Connection, digest: bytes, at_most: int) -> dict[int, str]:
    """The newest ACTIVE rows of a fingerprint: the paths of their files by number."""
    active = [meta.c.fingerprint == digest, meta.c.status == ACTIVE]
    query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(*active).order_by(meta.c.ckpt_no.desc()).limit(at_most)
    return {row.ckpt_no: row.file_path for row in db.execute(query)}


def _active_deltas(db: sa.Connection, parents: Iterable[int]) -> set[int]:
    """The numbers of the ACTIVE deltas that need some rows, directly or not."""
    return set(deltas_of(db, parents, [meta.c.ckpt_no], meta.c.status == ACTIVE))


def mark(db: sa.Connection, which: Sequence[sa.ColumnElement[bool]], reason: StaleReason) -> int:
    """Marks the ACTIVE rows that meet all conditions STALE, and gives their number. Does not touch their links and deltas."""
    values = {"status": STALE, "active_key": None, "stale_reason": reason.value, "stale_us": now_us()}
    return db.execute(sa.update(meta).where(meta.c.status == ACTIVE, *which).values(**values)).rowcount


def unlink(db: sa.Connection, ckpt_nos: Sequence[int]) -> None:
    """Deletes the prefix links of rows that became STALE. Call it in the transaction of the mark, so that a link always leads to
    an ACTIVE row.
    """
    for batch in batches(ckpt_nos):
        db.execute(sa.delete(checkpoint_prefix).where(checkpoint_prefix.c.ckpt_no.in_(batch)))


def reactivate(db: sa.Connection, row: Checkpoint) -> bool:
    """Makes a STALE row ACTIVE again, without an expiry; False when it is deleted or ACTIVE, has lost its file since `row` was
    read, or its parent is not ACTIVE.

    Raises:
        sqlalchemy IntegrityError: another row of this fingerprint and input is ACTIVE.
    """
    if row.parent_no is not None and not touch_active(db, row.parent_no):
        return False
    # The size becomes 0 before the file is deleted to make room, so the file that the caller checked may be going.
    stale = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == STALE, meta.c.file_size == row.file_size]
    values = {
        "status": ACTIVE,
        "active_key": active_key(row.fingerprint, row.input_hash),
        "stale_reason": None,
        "stale_us": None,
        "expires_us": None,
        "last_used_us": now_us(),
    }
    return db.execute(sa.update(meta).where(*stale).values(**values)).rowcount == 1


def replace_file(db: sa.Connection, row: Checkpoint, full: NewCheckpoint) -> bool:
    """Gives an ACTIVE delta a file that has all of its cells, so that it has no parent any more; False when it became STALE, or
    another process did so already.
    """
    seen = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.file_path == row.file_path]
    values = {
        "file_path": full.file_path,
        "file_size": full.file_size,
        "payload_crc32": full.payload_crc32,
        "start_token": 0,
        "parent_no": None,
    }
    return db.execute(sa.update(meta).where(*seen).values(**values)).rowcount == 1


def set_pinned(db: sa.Connection, checkpoint_id: str, pinned: bool) -> None:
    """Pins or unpins a row."""
    db.execute(sa.update(meta).where(meta.c.id == checkpoint_id).values(pinned=int(pinned)))
