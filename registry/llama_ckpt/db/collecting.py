"""The statements of prune, gc and the byte budget. Nothing here commits.

Rows are read in pages, few columns at a time, so that a registry of a million rows need not be in memory. Marks and deletes
go in batches: the rows are locked in order, compared with the plan, and changed in one statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from llama_ckpt.db.marks import mark, unlink
from llama_ckpt.db.rows import ACTIVE, STALE, batches, clock_us, deltas_of, in_pages
from llama_ckpt.db.tables import ghost_seen, llama_model, save_claim
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import now_us
from llama_ckpt.gc_values import Candidate, FileRow, GcItem, RowVersion
from llama_ckpt.values import StaleReason

_PAGE_ROWS = 5000
_BUDGET_KEY = bytes(32)
BLOCK_BYTES = 4096


def candidates(db: sa.Connection) -> Iterator[Candidate]:
    """The columns that a policy reads of every ACTIVE row, in order of their number."""
    columns = [*(meta.c[name] for name in Candidate._fields), meta.c.status]
    for row in in_pages(db, columns, _PAGE_ROWS):
        if row[-1] == ACTIVE:
            yield Candidate._make(row[:-1])


def stored_files(db: sa.Connection) -> Iterator[FileRow]:
    """The columns that gc reads of every row, in order of their number."""
    for row in in_pages(db, [meta.c[name] for name in FileRow._fields], _PAGE_ROWS):
        yield FileRow._make(row)


def least_recently_used(db: sa.Connection, at_most: int) -> list[Candidate]:
    """The least recently used ACTIVE rows with a file, in order of their number. They are neither pinned nor leased, and no
    ACTIVE delta outside of them needs them.
    """
    columns = [meta.c[name] for name in Candidate._fields]
    query = sa.select(*columns).where(meta.c.status == ACTIVE, meta.c.file_size > 0, *_free())
    rows = {row.ckpt_no: row for row in db.execute(query.order_by(meta.c.last_used_us).limit(at_most))}
    return [Candidate._make(rows[n]) for n in _unneeded(db, set(rows), ACTIVE)]


def newest(db: sa.Connection, column: str, value: str, n: int) -> set[int]:
    """The numbers of the newest `n` ACTIVE rows of a model (`model_name`) or a label (`label`)."""
    query = sa.select(meta.c.ckpt_no).where(meta.c[column] == value, meta.c.status == ACTIVE)
    return set(db.scalars(query.order_by(meta.c.created_us.desc(), meta.c.ckpt_no.desc()).limit(n)))


def stale_with_file(db: sa.Connection, at_most: int) -> list[tuple[RowVersion, str, int]]:
    """STALE rows that have a file and are neither pinned nor leased, longest STALE first: row, path and bytes."""
    query = sa.select(*_SEEN, meta.c.file_path, meta.c.file_size).where(*_STALE_ROWS, meta.c.file_size > 0, *_free())
    rows = db.execute(query.order_by(meta.c.stale_us, meta.c.ckpt_no).limit(at_most))
    return [(RowVersion._make(row[:4]), row.file_path, int(row.file_size)) for row in rows]


# By the index of the times, in which few rows have one.
_STALE_ROWS = [meta.c.stale_us.is_not(None), meta.c.status == STALE]
_SEEN = [meta.c[name] for name in RowVersion._fields]


def _free() -> list[sa.ColumnElement[bool]]:
    leased = sa.or_(meta.c.lease_until_us.is_(None), meta.c.lease_until_us <= now_us())
    return [meta.c.pinned == 0, leased]


# -- marks and deletes: only rows that did not change since the plan ---------------------------------------------------------


def mark_untouched(db: sa.Connection, rows: Mapping[RowVersion, StaleReason]) -> set[int]:
    """Marks ACTIVE rows STALE, each for its reason, if they did not change since the plan: no use, no pin, no lease, and every
    ACTIVE delta that needs them is marked with them. Gives the numbers of those that it marked.
    """
    numbers = _untouched_leaves(db, list(rows), ACTIVE)
    reasons = {row.ckpt_no: reason for row, reason in rows.items()}
    for reason in sorted(set(rows.values())):
        for batch in batches([number for number in numbers if reasons[number] is reason]):
            mark(db, [meta.c.ckpt_no.in_(batch)], reason)
    unlink(db, numbers)
    return set(numbers)


def delete_untouched(db: sa.Connection, rows: Sequence[RowVersion]) -> set[int]:
    """Deletes STALE rows if they did not change since the plan and all their deltas are deleted with them. Gives the numbers of
    those that it deleted.
    """
    numbers = _untouched_leaves(db, rows, STALE)
    # Deltas before their parents: the database refuses to delete a row that another row names.
    for batch in batches(sorted(numbers, reverse=True)):
        db.execute(sa.delete(meta).where(meta.c.ckpt_no.in_(batch)))
    return set(numbers)


def forget_files(db: sa.Connection, rows: Sequence[RowVersion]) -> set[int]:
    """Sets the size of STALE rows to 0 before their files are unlinked, so that no process makes them ACTIVE again. Gives the
    numbers of the rows that are still STALE and neither pinned nor leased.
    """
    numbers = sorted(row.ckpt_no for row in rows)
    free: set[int] = set()
    for batch in batches(numbers):
        query = sa.select(meta.c.ckpt_no).where(meta.c.ckpt_no.in_(batch), meta.c.status == STALE, *_free())
        free.update(db.scalars(query.order_by(meta.c.ckpt_no).with_for_update()))
    for batch in batches(sorted(free)):
        db.execute(sa.update(meta).where(meta.c.ckpt_no.in_(batch)).values(file_size=0))
    return free


def remember_file(db: sa.Connection, row: RowVersion, size: int) -> None:
    """Undoes `forget_files` for one row, whose file could not be unlinked."""
    db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no, meta.c.file_size == 0).values(file_size=size))


def purgeable(
    db: sa.Connection, input_hash: bytes | None, label: str | None, model_name: str | None
) -> list[tuple[RowVersion, str]]:
    """The rows of an input, a label or a model, or all rows, and all deltas that need them; with the paths of their files.
    Highest number first: a delta before its parent.
    """
    wanted = [(meta.c.input_hash, input_hash), (meta.c.label, label), (meta.c.model_name, model_name)]
    query = sa.select(*_SEEN, meta.c.file_path).where(*(c == value for c, value in wanted if value is not None))
    rows: dict[int, Any] = {row.ckpt_no: row for row in db.execute(query)}
    rows |= deltas_of(db, rows, [*_SEEN, meta.c.file_path])
    return [(RowVersion._make(rows[n][:4]), rows[n].file_path) for n in sorted(rows, reverse=True)]


def condemn(db: sa.Connection, numbers: Sequence[int]) -> int:
    """Marks rows STALE and sets their size to 0, also pinned and leased ones. From then on no process offers them, adds a delta
    to them or makes them ACTIVE again. Gives the bytes of their files.
    """
    sizes: dict[int, int] = {}
    for batch in batches(sorted(numbers)):
        query = sa.select(meta.c.ckpt_no, meta.c.file_size).where(meta.c.ckpt_no.in_(batch))
        locked = db.execute(query.order_by(meta.c.ckpt_no).with_for_update())
        sizes.update((row.ckpt_no, int(row.file_size)) for row in locked)
    for batch in batches(sorted(sizes)):
        mark(db, [meta.c.ckpt_no.in_(batch)], StaleReason.REMOVED)
        db.execute(sa.update(meta).where(meta.c.ckpt_no.in_(batch)).values(file_size=0))
    unlink(db, sorted(sizes))
    return sum(sizes.values())


def delete_rows(db: sa.Connection, numbers: Sequence[int]) -> None:
    """Deletes rows, also pinned and leased ones. Give deltas before their parents."""
    for batch in batches(numbers):
        db.execute(sa.delete(meta).where(meta.c.ckpt_no.in_(batch)))


def fingerprints_of(db: sa.Connection, model_name: str) -> set[bytes]:
    """The fingerprints of the models with this name."""
    return set(db.scalars(sa.select(llama_model.c.fingerprint).where(llama_model.c.model_name == model_name)))


def _untouched_leaves(db: sa.Connection, rows: Sequence[RowVersion], status: str) -> list[int]:
    """The numbers, in order, of rows that did not change since the plan and that only rows among them need. Locks them."""
    seen = {row.ckpt_no: row for row in rows}
    numbers = sorted(seen)
    untouched: set[int] = set()
    for batch in batches(numbers):
        query = sa.select(*_SEEN).where(meta.c.ckpt_no.in_(batch), meta.c.status == status, *_free())
        # In order of the number, as all processes lock: no deadlocks. SQLite has one writer and locks nothing here.
        for row in db.execute(query.order_by(meta.c.ckpt_no).with_for_update()):
            planned = seen[row.ckpt_no]
            if (row.last_used_us, row.hit_count) == (planned.last_used_us, planned.hit_count):
                untouched.add(row.ckpt_no)
    # A statement of its own, after the locks: it sees all that was committed before them. A save of a delta changes the parent.
    return _unneeded(db, untouched, status)


def _unneeded(db: sa.Connection, numbers: set[int], status: str) -> list[int]:
    """Those of `numbers`, in order, that only deltas among them need. ACTIVE rows are needed by ACTIVE deltas only."""
    children: dict[int, list[int]] = {}
    for batch in batches(sorted(numbers)):
        query = sa.select(meta.c.parent_no, meta.c.ckpt_no).where(meta.c.parent_no.in_(batch))
        for parent, child in db.execute(query if status == STALE else query.where(meta.c.status == ACTIVE)):
            children.setdefault(int(parent), []).append(int(child))
    left = set(numbers)
    # Repeated until nothing changes: on a server that numbers rows in several places a delta's number may be below its parent's.
    while needed := {number for number in left if not left.issuperset(children.get(number, ()))}:
        left -= needed
    return sorted(left)


# -- ghosts ------------------------------------------------------------------------------------------------------------------


def known_paths(db: sa.Connection, paths: Sequence[str]) -> set[str]:
    """Those of `paths` that a row names."""
    known: set[str] = set()
    for batch in batches(paths):
        known.update(db.scalars(sa.select(meta.c.file_path).where(meta.c.file_path.in_(batch))))
    return known


def ghosts_seen(db: sa.Connection) -> dict[str, int]:
    """The ghosts that earlier runs saw: path to the modification time of the file, in ns since 1970."""
    return {
        path: int(mtime_ns) for path, mtime_ns in db.execute(sa.select(ghost_seen.c.file_path, ghost_seen.c.mtime_ns))
    }


def note_ghosts(db: sa.Connection, ghosts: Sequence[GcItem]) -> None:
    """Records the ghosts that this run saw, for the next run, instead of those that the last run saw."""
    db.execute(sa.delete(ghost_seen))
    seen_us = clock_us(db)
    rows = [
        {"file_path": g.path, "mtime_ns": g.mtime_ns or 0, "size_bytes": g.size_bytes, "seen_us": seen_us}
        for g in ghosts
    ]
    if rows:
        db.execute(sa.insert(ghost_seen), rows)


def forget_ghosts(db: sa.Connection, paths: Sequence[str]) -> None:
    """Deletes the records of ghosts whose files are gone or have a row now. The budget counted them until here."""
    for batch in batches(paths):
        db.execute(sa.delete(ghost_seen).where(ghost_seen.c.file_path.in_(batch)))


# -- the byte budget -----------------------------------------------------------------------------------------------------------


def queue_for_budget(db: sa.Connection) -> None:
    """Lets one transaction at a time decide what the budget has room for; others wait here until it ends."""
    changed = db.execute(sa.update(save_claim).where(save_claim.c.claim_key == _BUDGET_KEY).values(expires_us=now_us()))
    if changed.rowcount == 0:  # the row that the schema was created with was deleted
        db.execute(sa.insert(save_claim).values(claim_key=_BUDGET_KEY, holder="budget", reserved_bytes=0, expires_us=0))


def used_bytes(db: sa.Connection) -> int:
    """Bytes in use: the files of all rows, rounded up to blocks, the bytes that claims reserve, and the ghosts that gc saw.
    Counted again at every call.
    """
    # One statement, which sees one moment: between two of them a claim's bytes could become a row's, and be counted in neither.
    # The last block of a file may hold one byte.
    rows = sa.select(sa.func.coalesce(sa.func.sum(meta.c.file_size + BLOCK_BYTES), 0)).where(meta.c.file_size > 0)
    reserved = sa.select(sa.func.coalesce(sa.func.sum(save_claim.c.reserved_bytes), 0)).where(
        save_claim.c.expires_us >= now_us()
    )
    ghosts = sa.select(sa.func.coalesce(sa.func.sum(ghost_seen.c.size_bytes), 0))
    total = rows.scalar_subquery() + reserved.scalar_subquery() + ghosts.scalar_subquery()
    return int(db.execute(sa.select(total)).scalar_one())


def pending_bytes(db: sa.Connection) -> int:
    """Bytes of the files of STALE rows, which gc will delete."""
    query = sa.select(sa.func.coalesce(sa.func.sum(meta.c.file_size), 0)).where(*_STALE_ROWS)
    return int(db.execute(query).scalar_one())
