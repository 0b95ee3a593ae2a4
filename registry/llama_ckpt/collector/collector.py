"""`Collector`: prune marks rows STALE by a policy, gc deletes files. A plan is a value; running it checks every item again.

Rows are deleted and committed first, files after. So a crash leaves at most a file without a row, which the next run deletes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_ckpt.collector.batches import BatchSizer
from llama_ckpt.collector.lease import RunLease
from llama_ckpt.collector.plan import Planner
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, coordination, marks, rows
from llama_ckpt.db.coordination import UnlinkClaim
from llama_ckpt.errors import StoreUnavailable, UnsafePath
from llama_ckpt.gc_values import (
    CollectionSummary,
    Disk,
    GcItem,
    GcKind,
    GcOutcome,
    GcPlan,
    GcReport,
    GcResult,
    GcRun,
    RuleOpinion,
    Verdict,
)
from llama_ckpt.retention import explain as explaining
from llama_ckpt.retention import rules as retention
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.layout import QUARANTINE
from llama_ckpt.threads import run_parallel
from llama_ckpt.values import Checkpoint, StaleReason

log = logging.getLogger("llama_ckpt")

_DEFAULT_POLICY = Policy()
# An unlink waits for the disk or the server much longer than it computes.
_UNLINK_THREADS = 8
_CHANGED = "it changed since the plan"

NOTHING = GcPlan(items=(), findings=(), n_files=0, n_rows=0)


def not_stopped() -> bool:
    """The default of `stopped`: the run is never asked to stop."""
    return False


@dataclass(slots=True)
class _Progress:
    """What a run has done so far. To need one transaction a batch, the transaction of batch N+1 also writes the record of
    batch N and drops batch N's claim; the end of the run does so for the last batch.
    """

    done: list[GcResult] = field(default_factory=list)
    n_recorded: int = 0
    claim: UnlinkClaim | None = None  # of the last batch
    left_behind: list[GcItem] = field(default_factory=list)  # their rows are deleted, their files may still be there

    @property
    def n_failed(self) -> int:
        return sum(result.outcome is GcOutcome.FAILED for result in self.done)

    @property
    def freed_bytes(self) -> int:
        return sum(result.freed_bytes for result in self.done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowChanges:
    """What the transaction of a batch read and changed: paths that rows name, numbers of marked and of deleted rows."""

    named: set[str]
    marked: set[int]
    deleted: set[int]

    def result(self, item: GcItem) -> GcResult | None:
        """The result of an item; None: its file may be deleted now."""
        if item.row is None:
            return _skipped(item, "a row names it now") if item.path in self.named else None
        if item.kind is GcKind.MISSING:
            if item.row.ckpt_no in self.marked:
                return GcResult(item=item, outcome=GcOutcome.MARKED)
            return _skipped(item, "back, or STALE, since the plan")
        if item.row.ckpt_no in self.deleted:
            return None
        return _skipped(item, "used, pinned, leased or needed by a delta")


class Collector:
    """Prune and gc over one registry's rows and files. One run at a time over all hosts, by a lease with an expiry."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._database = context.database
        self._store = context.store
        self._lease = RunLease(context.database)

    # -- prune -----------------------------------------------------------------------------------------------------

    def plan_prune(self, policy: Policy) -> list[Verdict]:
        """The ACTIVE rows that a policy condemns, each with the rule that does, in the order in which they were saved.
        Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
            StoreUnavailable: the policy limits the free space, and the store cannot report it.
        """
        with self._database.read() as db:
            now_us, disk = rows.clock_us(db), None
            if policy.min_free is not None or policy.min_free_share is not None:
                disk = self._disk(db)
            return list(retention.judge(collecting.candidates(db), policy, now_us, disk))

    def explain(self, row: Checkpoint, policy: Policy) -> list[RuleOpinion]:
        """The effect of each rule of a policy on one ACTIVE checkpoint. The last opinion is the decision of prune.

        Raises:
            NotFound: the checkpoint is STALE, or its row is deleted.
            DatabaseUnavailable, StoreUnavailable: as `plan_prune`.
        """
        with self._database.read() as db:
            disk = self._disk(db)
            return explaining.explain(collecting.candidates(db), row, policy, rows.clock_us(db), disk)

    def _disk(self, db: Any) -> Disk:
        free, total = self._store.space()
        return Disk(free=free, total=total, pending=collecting.pending_bytes(db))

    def prune(self, verdicts: Sequence[Verdict], stopped: Callable[[], bool] = not_stopped) -> list[Verdict]:
        """Marks the rows of a prune plan STALE, and gives those that it marked. A row that was used, pinned or leased since the
        plan stays ACTIVE. If the run is interrupted, or `stopped` gives True between two batches, the rows of complete batches
        are marked, and the next run marks the others.

        Raises:
            Busy: another run is under way, or took over.
            DatabaseUnavailable: the database failed; what was committed stays marked.
        """
        marked: list[Verdict] = []
        sizer = BatchSizer(self._database.dialect)
        with self._lease.held() as fence:
            run_no = self._start("prune")
            try:
                # Newest first: a delta is marked before its parent, or with it.
                for batch in sizer.batches(sorted(verdicts, key=lambda v: -v.row.ckpt_no)):
                    if stopped():
                        break
                    with sizer.timed():
                        marked += self._mark(run_no, fence, batch, len(marked))
            finally:
                with self._database.write() as db:
                    coordination.end_run(db, run_no, n_items=len(marked), n_failed=0, freed_bytes=0)
        numbers = {verdict.row.ckpt_no for verdict in marked}
        return [verdict for verdict in verdicts if verdict.row.ckpt_no in numbers]

    def _mark(self, run_no: int, fence: int, batch: Sequence[Verdict], first: int) -> list[Verdict]:
        """One transaction: marks the rows of a batch that did not change since the plan, and records them."""
        with self._database.write() as db:
            self._lease.renew(db, fence)
            numbers = collecting.mark_untouched(db, {v.row: v.stale_reason for v in batch})
            done = [v for v in batch if v.row.ckpt_no in numbers]
            coordination.add_run_items(db, run_no, first, [_marked(v) for v in done])
            self._context.hook("marked")
        return done

    # -- gc --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        policy: Policy = _DEFAULT_POLICY,
        *,
        skip_grace: bool = False,
        only: Collection[GcKind] | None = None,
        force: str | None = None,
    ) -> GcPlan:
        """What gc would do: delete STALE rows that are older than the policy's `stale_grace_s`, ghosts and temporaries that are
        older than its `ghost_grace_s`, and mark ACTIVE rows whose file is gone. Reads only. Other programs' files in the store
        are listed as findings and never touched.

        A ghost is deleted when it is older than its grace period and an earlier run saw it. With `skip_grace` no earlier run
        need have seen it, and files in quarantine are deleted at any age. A temporary is kept if its process is known
        to live, and deleted at any age if its process is known to be gone. `only` limits the plan to these kinds. `force`,
        given the registry's id, overrides a refusal.

        Raises:
            StoreMismatch: the rows and files suggest that store and database do not belong together, or that the store is
                not mounted.
            StoreUnavailable: a folder of the store cannot be read.
            DatabaseUnavailable: the database cannot be read.
        """
        return Planner(self._context, policy, skip_grace=skip_grace).plan(only, force)

    def run(
        self,
        plan: GcPlan,
        *,
        max_duration_s: float | None = None,
        max_delete: int | None = None,
        stopped: Callable[[], bool] = not_stopped,
    ) -> GcReport:
        """Carries a plan out. Items that were used, pinned, leased or registered since the plan are kept. A file that cannot be
        deleted is reported and does not stop the others. If the run is interrupted at any point, the next run finishes it.
        No new batch begins after `max_duration_s`, or when `stopped` gives True; at most `max_delete` items are handled.

        Raises:
            Busy: another run is under way, or took over.
            DatabaseUnavailable: the database failed; the next run deletes the files of rows that were deleted.
        """
        progress, sizer, started = _Progress(), BatchSizer(self._database.dialect), time.monotonic()
        with self._lease.held() as fence:
            self._store.claim(self._context.registry_id)  # a store without a marker gets here by force only, or empty
            run_no = self._start("gc")
            try:
                for batch in sizer.batches(plan.items[:max_delete]):
                    if stopped() or (max_duration_s is not None and time.monotonic() - started >= max_duration_s):
                        break
                    with sizer.timed():
                        changes = self._take_rows(run_no, fence, batch, progress)
                    self._context.hook("rows deleted")
                    self._finish_all(batch, changes, progress)
                self._record_ghosts(plan, progress)
            finally:
                self._end(run_no, progress)
        return GcReport(
            run_no=run_no,
            done=tuple(progress.done),
            freed_bytes=progress.freed_bytes,
            n_failed=progress.n_failed,
            n_left=len(plan.items) - len(progress.done),
        )

    def _take_rows(self, run_no: int, fence: int, batch: Sequence[GcItem], progress: _Progress) -> _RowChanges:
        """One transaction: records the batch before, and deletes or marks the rows of this one."""
        stale = {item.row: item for item in batch if item.row is not None and item.kind is not GcKind.MISSING}
        gone = self._still_missing(batch)
        claim = UnlinkClaim("gc")
        with self._database.write() as db:
            self._lease.renew(db, fence)
            self._record(db, run_no, progress)
            changes = _RowChanges(
                named=collecting.known_paths(db, [item.path for item in batch if item.row is None]),
                marked=marks.mark_all_stale(db, gone, StaleReason.MISSING),
                deleted=collecting.delete_untouched(db, list(stale)),
            )
            claim.take(db, sum(item.size_bytes for row, item in stale.items() if row.ckpt_no in changes.deleted))
        progress.n_recorded, progress.claim = len(progress.done), claim
        return changes

    def _still_missing(self, batch: Sequence[GcItem]) -> dict[int, str]:
        """The numbers and paths of the rows whose files are still gone. Pins and leases do not matter: such a checkpoint cannot
        be restored.
        """
        missing = [(item.row.ckpt_no, item.path) for item in batch if item.row and item.kind is GcKind.MISSING]
        return {number: path for number, path in missing if self._store.is_gone(path)}

    def _record(self, db: Any, run_no: int, progress: _Progress) -> None:
        """Records the results that have no record yet, and drops the claim on the bytes of their files."""
        coordination.add_run_items(db, run_no, progress.n_recorded, progress.done[progress.n_recorded :])
        if progress.claim is not None:
            progress.claim.drop(db)

    def _finish_all(self, batch: Sequence[GcItem], changes: _RowChanges, progress: _Progress) -> None:
        """Deletes the files of a batch that may be deleted. If it is interrupted, `progress` has what was done."""
        todo = [(item, changes.result(item)) for item in batch]
        done: dict[int, GcResult] = {}
        try:
            run_parallel(self._finish, todo, _UNLINK_THREADS, done)
        finally:
            for at in sorted(done):
                result, (item, decided) = done[at], todo[at]
                progress.done.append(result)
                kept = result.outcome in (GcOutcome.SKIPPED, GcOutcome.FAILED)
                if decided is None and item.row is not None and kept:
                    progress.left_behind.append(item)

    def _finish(self, decided: tuple[GcItem, GcResult | None]) -> GcResult:
        item, result = decided
        return self._delete_file(item) if result is None else result

    def _delete_file(self, item: GcItem) -> GcResult:
        """Unlinks the file of an item, or moves it to the quarantine."""
        try:
            if item.mtime_ns is None:  # the row had no file: a file that is there now belongs to another save
                self._store.size(item.path)
                return GcResult(item=item, outcome=GcOutcome.DELETED)
            if item.kind is GcKind.UNREADABLE and not item.path.startswith(QUARANTINE):
                new_path = self._store.quarantine(item.path, mtime_ns=item.mtime_ns)
                if new_path is None:
                    return _skipped(item, _CHANGED)
                return GcResult(item=item, outcome=GcOutcome.QUARANTINED, detail=new_path)
            size = self._store.remove(item.path, mtime_ns=item.mtime_ns)
        except (StoreUnavailable, UnsafePath) as error:
            log.warning("gc goes on without %s: %s", item.path, error)
            return GcResult(item=item, outcome=GcOutcome.FAILED, detail=str(error))
        if size is None:
            return _skipped(item, _CHANGED)
        self._context.hook("file deleted")
        return GcResult(item=item, outcome=GcOutcome.DELETED, freed_bytes=size)

    def _record_ghosts(self, plan: GcPlan, progress: _Progress) -> None:
        """Records the ghosts that are left, for the next run."""
        freed = (GcOutcome.DELETED, GcOutcome.QUARANTINED)
        gone = {result.item.path for result in progress.done if result.outcome in freed}
        left = [item for item in (*plan.waiting, *plan.items) if item.row is None and item.path not in gone]
        # A file that could not be deleted, or that changed, has no row any more: it is a ghost, seen by this run.
        dated = [(item, self._modified_ns(item.path)) for item in progress.left_behind]
        left += [replace(item, mtime_ns=mtime_ns) for item, mtime_ns in dated if mtime_ns is not None]
        with self._database.write() as db:
            named = collecting.known_paths(db, [item.path for item in left])  # another process may have added a row
            collecting.note_ghosts(db, [item for item in left if item.path not in named])

    def _modified_ns(self, path: str) -> int | None:
        try:
            return self._store.modified_ns(path)
        except (StoreUnavailable, UnsafePath):
            return None  # it is not among the files that a walk lists

    def collect(self, policy: Policy, stopped: Callable[[], bool] = not_stopped) -> CollectionSummary:
        """Prunes by a policy, then deletes what is due: one run of a schedule. When `stopped` gives True it ends after the
        current batch.

        Raises:
            Busy: another run is under way.
            StoreMismatch, StoreUnavailable, DatabaseUnavailable: as `plan` and `run`.
        """
        marked = self.prune(self.plan_prune(policy), stopped)
        report = self.run(self.plan(policy), stopped=stopped)
        return CollectionSummary(
            n_marked=len(marked), n_items=len(report.done), n_failed=report.n_failed, freed_bytes=report.freed_bytes
        )

    # -- runs --------------------------------------------------------------------------------------------------------

    def runs(self, at_most: int = 20) -> list[GcRun]:
        """The records of the last runs, newest first.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        with self._database.read() as db:
            return coordination.runs(db, at_most)

    def _start(self, kind: str) -> int:
        with self._database.write() as db:
            return coordination.start_run(db, kind, self._lease.holder)

    def _end(self, run_no: int, progress: _Progress) -> None:
        with self._database.write() as db:
            self._record(db, run_no, progress)
            coordination.end_run(
                db, run_no, n_items=len(progress.done), n_failed=progress.n_failed, freed_bytes=progress.freed_bytes
            )


def _marked(verdict: Verdict) -> GcResult:
    """The record of a row that prune marked."""
    item = GcItem(
        kind=GcKind.STALE,
        path=verdict.row.id,
        reason=verdict.rule,
        size_bytes=verdict.size_bytes,
        age_s=0.0,
        row=verdict.row,
    )
    return GcResult(item=item, outcome=GcOutcome.MARKED)


def _skipped(item: GcItem, why: str) -> GcResult:
    return GcResult(item=item, outcome=GcOutcome.SKIPPED, detail=why)
