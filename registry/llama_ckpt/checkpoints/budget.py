"""Whether a save may write: the byte budget and the minimum of free space, checked before a file is written, over all processes.

One transaction at a time decides, and reserves the bytes that it grants with a claim. Room is made by deleting STALE files, and
then by marking those rows STALE that the policy would prune first. A save whose own checkpoint the policy would prune before
them is refused. Bytes are counted again at every save, from the rows, the claims and the ghosts that gc saw: no counter can
drift.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, coordination, rows
from llama_ckpt.db.coordination import UnlinkClaim
from llama_ckpt.errors import Conflict, DatabaseUnavailable, StoreFull, StoreUnavailable, UnsafePath
from llama_ckpt.gc_values import Candidate, Disk, RowVersion
from llama_ckpt.retention import rules as retention
from llama_ckpt.values import NewCheckpoint, StaleReason

log = logging.getLogger("llama_ckpt")

CLAIM_S = 600.0  # by then a write has ended or its process is gone
_MAX_ROWS_COMPARED = 1000  # the least recently used: of a million rows no more are compared for one save
_MAX_ROUNDS = 50
_HOLDER = coordination.holder("save")
_NEW_ROW_NO = 1 << 62  # above all numbers: the newest


@dataclass(frozen=True, slots=True)
class Admission:
    """The key of a claim on room (None where no limit is set), or the reason of a refusal."""

    claim: bytes | None = None
    refused: str | None = None


def admit(context: RegistryContext, new: NewCheckpoint) -> Admission:
    """Reserves room for a file, and makes room if there is none. If it is interrupted, the claim lasts until it expires, and gc
    deletes the files of rows that were marked STALE to make room.

    Raises:
        DatabaseUnavailable, StoreUnavailable: the limits cannot be checked; do not write the file then.
    """
    policy = context.policy
    if not policy.limits_of_saves() or new.file_size == 0:
        return Admission()
    size = new.file_size + collecting.BLOCK_BYTES
    if policy.max_bytes is not None and size > policy.max_bytes:
        return Admission(refused=f"{new.file_size} bytes are more than all of max_bytes ({policy.max_bytes})")
    claim, passed_over = secrets.token_bytes(32), {new.parent_no or 0}  # its parent is kept
    for _ in range(_MAX_ROUNDS):
        lacking = _claim(context, claim, size)
        if lacking <= 0:
            return Admission(claim=claim)
        freed = _make_room(context, new, lacking, passed_over)
        if freed is None:
            limits = ", ".join(policy.limits_of_saves())
            return Admission(
                refused=f"it needs {lacking} bytes more than {limits} leaves, and what is there is worth more"
            )
        log.info("made room for a save: %d file(s) deleted or marked", freed)
    return Admission(refused="others took the room as fast as it was made")


def release(context: RegistryContext, granted: Admission) -> None:
    """Ends a claim: the row counts the bytes now, or nothing was written. If the database fails, the claim expires by itself."""
    if granted.claim is not None:
        try:
            with context.database.write() as db:
                coordination.drop_claim(db, granted.claim, _HOLDER)
        except DatabaseUnavailable as error:
            log.warning("the room that a save had reserved is free again in %.0f s: %s", CLAIM_S, error)


@contextmanager
def admitted(context: RegistryContext, new: NewCheckpoint) -> Iterator[None]:
    """Reserves room for a file while the block writes and registers it; ends the claim after the block.

    Raises:
        StoreFull: the limits leave no room, with the reason.
        DatabaseUnavailable, StoreUnavailable: as `admit`.
    """
    granted = admit(context, new)
    if granted.refused is not None:
        raise StoreFull(needed=new.file_size, path=context.store.root, reason=granted.refused)
    try:
        yield
    finally:
        release(context, granted)


def _claim(context: RegistryContext, claim: bytes, size: int) -> int:
    """Reserves the bytes if they fit, and gives 0 or less then; else the number of bytes that are lacking."""
    try:
        return _claim_once(context, claim, size)
    except Conflict:  # another process inserted the row at which saves queue, at this moment
        return _claim_once(context, claim, size)


def _claim_once(context: RegistryContext, claim: bytes, size: int) -> int:
    with context.database.write() as db:
        collecting.queue_for_budget(db)
        reserved = coordination.claimed_bytes(db)
        free, total = (
            context.store.space()
        )  # read after the claims: a save that ended its claim in between has written its file
        lacking = context.policy.floor_bytes(Disk(free=free, total=total)) - (free - reserved - size)
        if context.policy.max_bytes is not None:
            lacking = max(lacking, collecting.used_bytes(db) + size - context.policy.max_bytes)
        if lacking <= 0:
            coordination.take_claim(db, claim, _HOLDER, size, CLAIM_S)
    return lacking


def _make_room(context: RegistryContext, new: NewCheckpoint, lacking: int, passed_over: set[int]) -> int | None:
    """Takes one step towards `lacking` free bytes: deletes STALE files, or marks ACTIVE rows STALE if there are none. Gives the
    number of files deleted or rows marked; None: the policy gives up no more. Rows that could not be taken, since they were
    used in between or their file cannot be unlinked, are added to `passed_over`.
    """
    with context.database.read() as db:
        stale = collecting.stale_with_file(db, _MAX_ROWS_COMPARED)
    stale = [entry for entry in stale if entry[0].ckpt_no not in passed_over]
    if stale:
        return _unlink_stale(context, _first_of(stale, lacking), passed_over)
    victims = _victims(context, new, lacking, passed_over)
    if not victims:
        return None
    with context.database.write() as db:
        marked = collecting.mark_untouched(db, dict.fromkeys(victims, StaleReason.EVICTED))
    passed_over.update(row.ckpt_no for row in victims if row.ckpt_no not in marked)
    context.metrics.count("evicted", len(marked))
    return len(marked)  # the next round deletes their files


def _victims(context: RegistryContext, new: NewCheckpoint, lacking: int, passed_over: set[int]) -> list[RowVersion]:
    """The ACTIVE rows that the policy gives up before the new checkpoint, as many as free `lacking` bytes; none if all of them
    do not.
    """
    with context.database.read() as db:
        now_us = rows.clock_us(db)
        others = collecting.least_recently_used(db, _MAX_ROWS_COMPARED)
    staying = passed_over | _last_of_their_groups(context, others)
    others = [c for c in others if c.ckpt_no not in staying]
    total = 0
    victims: list[RowVersion] = []
    for row in retention.places_before(_as_candidate(new, now_us), others, context.policy, now_us):
        victims.append(RowVersion(row.ckpt_no, row.id, row.last_used_us, row.hit_count))
        total += row.file_size + collecting.BLOCK_BYTES
        if total >= lacking:
            return victims
    return []


def _last_of_their_groups(context: RegistryContext, rows: Sequence[Candidate]) -> set[int]:
    """The numbers of the newest N rows of each model and label among `rows`, which the policy always keeps."""
    staying: set[int] = set()
    groups = (("model_name", context.policy.keep_last_per_model), ("label", context.policy.keep_last_per_label))
    with context.database.read() as db:
        for column, n in groups:
            for name in {getattr(row, column) for row in rows} - {None} if n else ():
                staying |= collecting.newest(db, column, name, n)
    return staying


def _first_of(rows: Sequence[tuple[RowVersion, str, int]], lacking: int) -> list[tuple[RowVersion, str, int]]:
    """The first of some rows, as many as free `lacking` bytes, or all of them."""
    taken, total = [], 0
    for row in rows:
        taken.append(row)
        total += row[2] + collecting.BLOCK_BYTES
        if total >= lacking:
            break
    return taken


def _unlink_stale(context: RegistryContext, stale: Sequence[tuple[RowVersion, str, int]], passed_over: set[int]) -> int:
    """Unlinks the files of STALE rows, and gives their number; the rows are left for gc. Before that the rows are marked as rows
    without a file, so that no process makes them ACTIVE again.
    """
    context.require_store()
    claim = UnlinkClaim("freeing")
    with context.database.write() as db:
        free = collecting.forget_files(db, [row for row, _, _ in stale])
        going = [entry for entry in stale if entry[0].ckpt_no in free]
        claim.take(db, sum(size + collecting.BLOCK_BYTES for _, _, size in going))
    context.hook("room promised")
    stuck = []
    for row, path, size in going:
        try:
            context.store.remove(path)
        except (StoreUnavailable, UnsafePath) as error:
            log.warning("no room comes from %s: %s", path, error)
            stuck.append((row, size))
    passed_over.update(row.ckpt_no for row, _, _ in stale if row.ckpt_no not in free)
    passed_over.update(row.ckpt_no for row, _ in stuck)
    context.hook("room made")
    with context.database.write() as db:
        for row, size in stuck:
            collecting.remember_file(db, row, size)
        claim.drop(db)
    return len(going) - len(stuck)


def _as_candidate(new: NewCheckpoint, now_us: int) -> Candidate:
    """The new checkpoint as the policy would see its row."""
    return Candidate(
        ckpt_no=_NEW_ROW_NO,
        id=new.id,
        model_name=new.model_name,
        label=new.label,
        n_tokens=new.n_tokens,
        file_size=new.file_size,
        created_us=now_us,
        last_used_us=now_us,
        hit_count=0,
        prefill_ms=new.prefill_ms,
        expires_us=None,
        lease_until_us=None,
        pinned=0,
        parent_no=new.parent_no,
        extends_no=None,
    )
