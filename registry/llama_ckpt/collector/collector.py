"""`Collector`: prune marks rows by policy, gc frees bytes. A plan is data; running it re-checks every item.

Rows go first and are committed, files after: a crash leaves at most a file without a row, which the next run collects.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llama_ckpt.collector.plan import Planner
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, coordination, marks, rows
from llama_ckpt.errors import Busy, StoreUnavailable, UnsafePath
from llama_ckpt.gc_values import CollectionSummary, Disk, GcItem, GcKind, GcPlan, GcReport, GcRun, RuleOpinion, Verdict
from llama_ckpt.retention import explain as explaining
from llama_ckpt.retention import rules as retention
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.layout import QUARANTINE
from llama_ckpt.threads import run_parallel
from llama_ckpt.values import Checkpoint, StaleReason

_CHANGED = "skipped: it changed since the plan"
log = logging.getLogger("llama_ckpt")

DEFAULT_STALE_GRACE_S = Policy().stale_grace_s
DEFAULT_GHOST_GRACE_S = Policy().ghost_grace_s
_LEASE = "gc"
_LEASE_S = 300.0
_FIRST_BATCH = 100
_MOST = 2000
# About as long as a transaction may hold up others: on SQLite, which has one writer at a time, every save; on a server whoever
# wants one of its very rows.
_HOLDS_S = {"sqlite": 0.02}
_HOLDS_ROWS_S = 0.25
# An unlink waits for the disk or the server much longer than it computes.
_UNLINKS_AT_ONCE = 8

T = TypeVar("T")


NOTHING = GcPlan(items=(), findings=(), n_files=0, n_rows=0)


def never() -> bool:
    """Whether to stop: no."""
    return False


@dataclass(slots=True)
class _Progress:
    """What a run has done so far. The record of a batch, and the end of its `claim`, are written with the rows of the next:
    one transaction a batch.
    """

    done: list[tuple[GcItem, str]] = field(default_factory=list)
    n_recorded: int = 0
    claim: bytes = b""
    freed: int = 0
    n_failed: int = 0

    def add(self, outcomes: Sequence[tuple[GcItem, str, int]]) -> None:
        self.done += [(item, result) for item, result, _ in outcomes]
        self.freed += sum(size for _, _, size in outcomes)
        self.n_failed += sum(result.startswith("failed") for _, result, _ in outcomes)


class _Pace:
    """Cuts work into batches of which each transaction takes about as long as it may on this database."""

    def __init__(self, dialect: str) -> None:
        self._size, self._holds_s = _FIRST_BATCH, _HOLDS_S.get(dialect, _HOLDS_ROWS_S)

    def batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        at = 0
        while at < len(items):
            batch = items[at : at + self._size]
            at += len(batch)
            yield batch

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        took_s = time.monotonic() - started
        if took_s < self._holds_s / 2:
            self._size = min(self._size * 2, _MOST)
        elif took_s > self._holds_s:
            self._size = max(self._size // 2, _FIRST_BATCH)


class Collector:
    """Prune and gc over one registry's rows and files. One run at a time over all hosts, by a lease with an expiry."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._database = context.database
        self._store = context.store
        self._holder = f"{socket.gethostname()[:60]}:{os.getpid()}:{time.monotonic_ns()}"

    # -- prune -----------------------------------------------------------------------------------------------------

    def plan_prune(self, policy: Policy) -> list[Verdict]:
        """The ACTIVE rows that a policy condemns, each with its rule, in the order in which they were saved. Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
            StoreUnavailable: the free space is asked for and the store cannot say.
        """
        with self._database.read() as db:
            now_us, disk = rows.clock_us(db), None
            if policy.min_free is not None or policy.min_free_share is not None:
                free, total = self._store.space()
                disk = Disk(free=free, total=total, pending=collecting.pending_bytes(db))
            return list(retention.judge(collecting.candidates(db), policy, now_us, disk))

    def explain(self, row: Checkpoint, policy: Policy) -> list[RuleOpinion]:
        """What each rule of a policy says of one ACTIVE checkpoint; the last says what becomes of it.

        Raises:
            NotFound: it is STALE, or gone.
            DatabaseUnavailable, StoreUnavailable: as `plan_prune`.
        """
        with self._database.read() as db:
            free, total = self._store.space()
            disk = Disk(free=free, total=total, pending=collecting.pending_bytes(db))
            return explaining.explain(collecting.candidates(db), row, policy, rows.clock_us(db), disk)

    def prune(self, verdicts: Sequence[Verdict], stopped: Callable[[], bool] = never) -> list[Verdict]:
        """Marks the rows of a prune plan STALE and gives those it marked. A row that was used, pinned or leased since the
        plan stays ACTIVE. If it is interrupted, or `stopped` says so between two batches, the rows of whole batches are marked
        and the next run does the rest.

        Raises:
            Busy: another run is under way, or took over.
            DatabaseUnavailable: the database failed; what was committed stays marked.
        """
        marked: list[Verdict] = []
        pace = _Pace(self._database.dialect)
        with self.only_run() as fence:
            run_no = self._start("prune")
            try:
                # Newest first: a delta is marked before its parent, or with it.
                for batch in pace.batches(sorted(verdicts, key=lambda v: -v.row.ckpt_no)):
                    if stopped():
                        break
                    with pace.timed():
                        marked += self._mark(run_no, fence, batch, len(marked))
            finally:
                with self._database.write() as db:
                    coordination.end_run(db, run_no, n_items=len(marked), n_failed=0, freed_bytes=0)
        numbers = {verdict.row.ckpt_no for verdict in marked}
        return [verdict for verdict in verdicts if verdict.row.ckpt_no in numbers]

    def _mark(self, run_no: int, fence: int, batch: Sequence[Verdict], first: int) -> list[Verdict]:
        """One transaction: the rows of a batch that nothing happened to, and their record."""
        with self._database.write() as db:
            renew(db, fence)
            numbers = collecting.mark_untouched(db, {v.row: v.stale_reason for v in batch})
            done = [v for v in batch if v.row.ckpt_no in numbers]
            coordination.add_run_items(db, run_no, first, [(_marked(v), "marked") for v in done])
            self._context.hook("marked")
        return done

    # -- gc --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        *,
        stale_grace_s: float = DEFAULT_STALE_GRACE_S,
        ghost_grace_s: float = DEFAULT_GHOST_GRACE_S,
        at_once: bool = False,
        only: Collection[GcKind] | None = None,
        force: str | None = None,
    ) -> GcPlan:
        """What gc would do: STALE rows past their grace, files without a row and temporaries past theirs, ACTIVE rows whose
        file is gone. Reads only. Foreign things in the store are named as findings and never touched.

        A ghost goes when it is older than the grace and an earlier run saw it; with `at_once` the first run takes it. A
        temporary whose process is known to live stays, one whose process is known to be gone goes. `only` these kinds.
        `force` with the registry's id overrides a refusal.

        Raises:
            StoreMismatch: what was seen suggests that store and database do not belong together, or that the store is
                not there (not mounted).
            StoreUnavailable: the store cannot be walked in full.
            DatabaseUnavailable: the database cannot be read.
        """
        planner = Planner(self._context, stale_grace_s=stale_grace_s, ghost_grace_s=ghost_grace_s, at_once=at_once)
        return planner.plan(only, force)

    def run(
        self,
        plan: GcPlan,
        *,
        max_duration_s: float | None = None,
        max_delete: int | None = None,
        stopped: Callable[[], bool] = never,
    ) -> GcReport:
        """Carries a plan out. What was used, pinned, leased or registered since the plan survives; one file that cannot be
        deleted is reported and does not stop the rest. Interrupted at any point, the next run finishes the work.
        After `max_duration_s`, or when `stopped` says so, no new batch begins, and at most `max_delete` items are worked on.

        Raises:
            Busy: another run is under way, or took over.
            DatabaseUnavailable: the database failed; files of rows that were deleted are collected by the next run.
        """
        progress, pace, started = _Progress(), _Pace(self._database.dialect), time.monotonic()
        with self.only_run() as fence:
            self._store.claim(self._context.registry_id)  # an unmarked store gets here by force only, or empty
            run_no = self._start("gc")
            try:
                for batch in pace.batches(plan.items[:max_delete]):
                    if stopped() or (max_duration_s is not None and time.monotonic() - started >= max_duration_s):
                        break
                    with pace.timed():
                        results = self._take_rows(run_no, fence, batch, progress)
                    self._context.hook("rows deleted")
                    self._finish_all(results, progress)
                self._remember(plan, progress)
            finally:
                self._end(run_no, progress)
        return GcReport(
            run_no=run_no,
            done=tuple(progress.done),
            freed_bytes=progress.freed,
            n_failed=progress.n_failed,
            n_left=len(plan.items) - len(progress.done),
        )

    def _take_rows(
        self, run_no: int, fence: int, batch: Sequence[GcItem], progress: _Progress
    ) -> list[tuple[GcItem, str]]:
        """One transaction: the record of the batch before; the rows of this one deleted or marked. Says of each item whether
        its file may go.
        """
        missing = [i for i in batch if i.kind is GcKind.MISSING and self._store.is_gone(i.path)]
        stale = [i.row for i in batch if i.row and i.kind is not GcKind.MISSING]
        # Until the files are gone their bytes are in use, though no row counts them: a claim does.
        claim = secrets.token_bytes(32)
        with self._database.write() as db:
            renew(db, fence)
            self._record(db, run_no, progress)
            named = collecting.known_paths(db, [i.path for i in batch if i.row is None])
            # Pinned or leased: of a file that is gone nothing can be restored.
            gone = {i.row.ckpt_no: i.path for i in missing if i.row}
            marked = marks.mark_all_stale(db, gone, StaleReason.MISSING)
            deleted = collecting.delete_untouched(db, stale)
            results = [(item, _result(item, named, marked, deleted)) for item in batch]
            freeing = sum(item.size_bytes for item, result in results if result == "file" and item.row)
            coordination.take_claim(db, claim, self._holder, freeing, _LEASE_S)
        progress.n_recorded, progress.claim = len(progress.done), claim
        return results

    def _record(self, db: Any, run_no: int, progress: _Progress) -> None:
        """Writes what was done and not yet recorded. What it says of is gone: its claim ends."""
        coordination.add_run_items(db, run_no, progress.n_recorded, progress.done[progress.n_recorded :])
        coordination.drop_claim(db, progress.claim, self._holder)

    def _finish_all(self, results: Sequence[tuple[GcItem, str]], progress: _Progress) -> None:
        """Finishes the items of a batch. Interrupted, `progress` has what was done."""
        done: dict[int, tuple[GcItem, str, int]] = {}
        try:
            run_parallel(self._finish, results, _UNLINKS_AT_ONCE, done)
        finally:
            progress.add([done[at] for at in sorted(done)])

    def _finish(self, decided: tuple[GcItem, str]) -> tuple[GcItem, str, int]:
        """Unlinks the file where it may go; gives what happened and the bytes freed."""
        item, result = decided
        if result != "file":
            return item, result, 0
        try:
            if item.mtime_ns is None:  # a row without a file: one that is there by now is somebody else's
                self._store.size(item.path)
                return item, "deleted", 0
            if item.kind is GcKind.UNREADABLE and not item.path.startswith(QUARANTINE):
                aside = self._store.quarantine(item.path, mtime_ns=item.mtime_ns)
                return item, _CHANGED if aside is None else f"quarantined as {aside}", 0
            size = self._store.remove(item.path, mtime_ns=item.mtime_ns)
        except (StoreUnavailable, UnsafePath) as error:
            log.warning("gc goes on without %s: %s", item.path, error)
            return item, f"failed: {error}", 0
        if size is None:
            return item, _CHANGED, 0
        self._context.hook("file deleted")
        return item, "deleted", size

    def _remember(self, plan: GcPlan, progress: _Progress) -> None:
        """Notes the ghosts that are left, for the next run."""
        gone = {item.path for item, result in progress.done if result.startswith(("deleted", "quarantined"))}
        left = [item for item in (*plan.waiting, *plan.items) if item.row is None and item.path not in gone]
        # The row of a file that could not be deleted, or that changed, is gone: it is a ghost that was seen, now.
        stuck = [item for item, result in progress.done if item.row and result.startswith(("failed", _CHANGED))]
        left += [replace(item, mtime_ns=at) for item in stuck if (at := self._modified_ns(item.path)) is not None]
        with self._database.write() as db:
            named = collecting.known_paths(db, [item.path for item in left])  # somebody may have given it a row again
            collecting.note_ghosts(db, [item for item in left if item.path not in named])

    def _modified_ns(self, path: str) -> int | None:
        try:
            return self._store.modified_ns(path)
        except (StoreUnavailable, UnsafePath):
            return None  # it is not among the files that a walk finds

    def sweep(self, policy: Policy, stopped: Callable[[], bool] = never) -> CollectionSummary:
        """Prunes by the policy, then frees what is due: what a schedule does at each run. When `stopped` says so it ends after
        the batch at hand.

        Raises:
            Busy: another run is under way.
            StoreMismatch, StoreUnavailable, DatabaseUnavailable: as `plan` and `run`.
        """
        marked = self.prune(self.plan_prune(policy), stopped)
        plan = self.plan(stale_grace_s=policy.stale_grace_s, ghost_grace_s=policy.ghost_grace_s)
        report = self.run(plan, stopped=stopped)
        return CollectionSummary(
            n_marked=len(marked), n_items=len(report.done), n_failed=report.n_failed, freed_bytes=report.freed_bytes
        )

    # -- runs --------------------------------------------------------------------------------------------------------

    def runs(self, at_most: int = 20) -> list[GcRun]:
        """The records of the last runs, newest first."""
        with self._database.read() as db:
            return coordination.runs(db, at_most)

    @contextmanager
    def only_run(self) -> Iterator[int]:
        """Holds the lease of whoever prunes or frees, over all hosts; gives its fence.

        Raises:
            Busy: another has it.
        """
        with self._database.write() as db:
            fence = coordination.take_lease(db, _LEASE, self._holder, _LEASE_S)
            holder, left = coordination.lease_holder(db, _LEASE)
        if fence is None:
            raise Busy(what="prune or gc", holder=holder, seconds_left=left)
        try:
            yield fence
        finally:
            with self._database.write() as db:
                coordination.drop_lease(db, _LEASE, fence)

    def _start(self, kind: str) -> int:
        with self._database.write() as db:
            return coordination.start_run(db, kind, self._holder)

    def _end(self, run_no: int, progress: _Progress) -> None:
        with self._database.write() as db:
            self._record(db, run_no, progress)
            coordination.end_run(
                db, run_no, n_items=len(progress.done), n_failed=progress.n_failed, freed_bytes=progress.freed
            )


def renew(db: Any, fence: int) -> None:
    """Puts off the lease's expiry, in the transaction of the work.

    Raises:
        Busy: another took it.
    """
    if not coordination.renew_lease(db, _LEASE, fence, _LEASE_S):
        holder, left = coordination.lease_holder(db, _LEASE)
        raise Busy(what="prune or gc", holder=holder, seconds_left=left)


def _marked(verdict: Verdict) -> GcItem:
    return GcItem(
        kind=GcKind.STALE,
        path=verdict.row.id,
        reason=verdict.rule,
        size_bytes=verdict.size_bytes,
        age_s=0.0,
        row=verdict.row,
    )


def _result(item: GcItem, named: set[str], marked: set[int], deleted: set[int]) -> str:
    if item.row is None:
        return "skipped: a row names it now" if item.path in named else "file"
    if item.kind is GcKind.MISSING:
        return "marked" if item.row.ckpt_no in marked else "skipped: back, or STALE, since the plan"
    return "file" if item.row.ckpt_no in deleted else "skipped: used, pinned, leased or needed by a delta"
