"""Marks on rows: lock, mark STALE, reactivate, renew, pin. A connection and values in, values out; nothing here commits.

Only portable SQL: each statement runs unchanged on every supported database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE, STALE, batches, due, has_active_child, touch_active
from llama_ckpt.db.tables import checkpoint_prefix
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import expiry_us, now_us
from llama_ckpt.errors import Conflict
from llama_ckpt.fingerprint import active_key
from llama_ckpt.values import Checkpoint, NewCheckpoint, StaleReason


def release_active_key(
    db: sa.Connection, digest: bytes, input_hash: bytes, parent_no: int | None, old: Checkpoint | None = None
) -> None:
    """Frees the key of an input for a row that is to stand on `parent_no`: its ACTIVE row goes STALE if its time is over, and
    `old` as superseded, with the deltas on it.

    Raises:
        Conflict: deltas stand on the one whose time is over: it is to be renewed (`renew`).
    """
    going: dict[int, tuple[Checkpoint, StaleReason]] = {}
    if (expired := due(db, digest, input_hash)) is not None:
        if has_active_child(db, expired):
            raise Conflict(what="the checkpoint of this input has expired, and deltas stand on it")
        going[expired.ckpt_no] = (expired, StaleReason.EXPIRED)
    if old is not None:
        going[old.ckpt_no] = (old, StaleReason.SUPERSEDED)
    if not going:
        return
    lock(db, {*going, *_descendants(db, going), *([] if parent_no is None else [parent_no])})
    for row, reason in going.values():
        mark_stale(db, row, reason)


def renew(db: sa.Connection, row: Checkpoint, expires_in_s: float | None) -> bool:
    """Gives an ACTIVE row whose time is over a new one, or none; False when it is STALE by now."""
    due = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.expires_us <= now_us()]
    values = {"expires_us": expiry_us(expires_in_s), "last_used_us": now_us()}
    return db.execute(sa.update(meta).where(*due).values(**values)).rowcount == 1


def record_verified(db: sa.Connection, row: Checkpoint) -> None:
    """Notes that every byte of a checkpoint's file was checked just now."""
    db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no).values(verified_us=now_us()))


def mark_stale(db: sa.Connection, row: Checkpoint, reason: StaleReason) -> bool:
    """Makes an ACTIVE row STALE, and with it every delta that needs it; False when it is STALE already, or has another file by
    now.
    """
    return bool(mark_all_stale(db, {row.ckpt_no: row.file_path}, reason))


def mark_all_stale(db: sa.Connection, paths: Mapping[int, str], reason: StaleReason) -> set[int]:
    """Makes ACTIVE rows STALE, each number given with the path of its file, and with them every delta that needs them. A row
    that has another file by now is left: what was found out about the old one says nothing of it. Gives the numbers of those
    of `paths` that it marked.
    """
    files = lock(db, {*paths, *_descendants(db, paths)})
    found = {number for number, path in paths.items() if files.get(number) == path}
    # Now that what they stand on is locked nobody adds a delta to it; one that was added before is locked late.
    needing = _descendants(db, found)
    lock(db, needing - files.keys())
    for some in batches(sorted(found | needing)):
        mark(db, [meta.c.ckpt_no.in_(some)], reason)
    unlink(db, sorted(found | needing))
    return found


def lock(db: sa.Connection, numbers: Iterable[int]) -> dict[int, str]:
    """Locks those of some rows that are ACTIVE, in order of the number, as everybody does: no deadlocks. Gives their paths by
    number. SQLite's writers are alone and lock nothing here.
    """
    found: dict[int, str] = {}
    for some in batches(sorted(numbers)):
        query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(meta.c.ckpt_no.in_(some), meta.c.status == ACTIVE)
        found |= {row.ckpt_no: row.file_path for row in db.execute(query.order_by(meta.c.ckpt_no).with_for_update())}
    return found


def active_of_model(db: sa.Connection, digest: bytes, at_most: int) -> dict[int, str]:
    """The newest ACTIVE rows of a fingerprint: the paths of their files by number."""
    active = [meta.c.fingerprint == digest, meta.c.status == ACTIVE]
    query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(*active).order_by(meta.c.ckpt_no.desc()).limit(at_most)
    return {row.ckpt_no: row.file_path for row in db.execute(query)}


def _descendants(db: sa.Connection, parents: Iterable[int]) -> set[int]:
    """The ACTIVE deltas that need some rows, directly or not."""
    found: set[int] = set()
    level = set(parents)
    while level:
        below: set[int] = set()
        for some in batches(sorted(level)):
            below.update(
                db.scalars(sa.select(meta.c.ckpt_no).where(meta.c.parent_no.in_(some), meta.c.status == ACTIVE))
            )
        level = below - found
        found |= below
    return found


def mark(db: sa.Connection, which: Sequence[sa.ColumnElement[bool]], reason: StaleReason) -> int:
    """Makes the ACTIVE rows that fit all conditions STALE, and says how many. Links and deltas are the caller's to see to."""
    values = {"status": STALE, "active_key": None, "stale_reason": reason.value, "stale_us": now_us()}
    return db.execute(sa.update(meta).where(meta.c.status == ACTIVE, *which).values(**values)).rowcount


def unlink(db: sa.Connection, ckpt_nos: Sequence[int]) -> None:
    """Takes the prefix links of rows that went STALE; in the transaction of the mark, so that a link always leads to an
    ACTIVE row.
    """
    for some in batches(ckpt_nos):
        db.execute(sa.delete(checkpoint_prefix).where(checkpoint_prefix.c.ckpt_no.in_(some)))


def reactivate(db: sa.Connection, row: Checkpoint) -> bool:
    """Makes a STALE row ACTIVE again, without its expiry; False when it is gone, ACTIVE, or a delta of what is not ACTIVE.

    Raises:
        sqlalchemy IntegrityError: another row of this fingerprint and input is ACTIVE.
    """
    if row.parent_no is not None and not touch_active(db, row.parent_no):
        return False
    # A row of size 0 has lost its file, or is about to; or it never had one, since its parent has all of its cells.
    whole = sa.or_(meta.c.file_size > 0, meta.c.start_token == meta.c.n_tokens)
    stale = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == STALE, meta.c.file_size == row.file_size]
    values = {
        "status": ACTIVE,
        "active_key": active_key(row.fingerprint, row.input_hash),
        "stale_reason": None,
        "stale_us": None,
        "expires_us": None,
        "last_used_us": now_us(),
    }
    return db.execute(sa.update(meta).where(*stale, whole).values(**values)).rowcount == 1


def replace_file(db: sa.Connection, row: Checkpoint, whole: NewCheckpoint) -> bool:
    """Gives an ACTIVE delta a file that has all of its cells, so that it stands on nothing; False when it went STALE, or somebody
    did so already.
    """
    seen = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.file_path == row.file_path]
    values = {
        "file_path": whole.file_path,
        "file_size": whole.file_size,
        "payload_crc32": whole.payload_crc32,
        "start_token": 0,
        "parent_no": None,
    }
    return db.execute(sa.update(meta).where(*seen).values(**values)).rowcount == 1


def set_pinned(db: sa.Connection, checkpoint_id: str, pinned: bool) -> None:
    """Pins or unpins a row."""
    db.execute(sa.update(meta).where(meta.c.id == checkpoint_id).values(pinned=int(pinned)))
