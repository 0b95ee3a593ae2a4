"""`Collector`: prune marks rows by policy, gc frees bytes. A plan is data; running it re-checks every item.

Rows go first and are committed, files after: a crash leaves at most a file without a row, which the next run collects.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from llama_ckpt.db import coordination, queries
from llama_ckpt.errors import Busy, EvidenceRefused, StoreUnavailable, UnsafePath
from llama_ckpt.files import Entry
from llama_ckpt.parts import Parts
from llama_ckpt.retention import Policy, judge
from llama_ckpt.values import (
    Checkpoint,
    Finding,
    FindingKind,
    GcItem,
    GcKind,
    GcPlan,
    GcReport,
    GcRun,
    StaleReason,
    Status,
    Sweep,
    Verdict,
)

log = logging.getLogger("llama_ckpt")

DEFAULT_STALE_GRACE_S = 24 * 3600.0
DEFAULT_GHOST_GRACE_S = 3600.0
_LEASE = "gc"
_LEASE_S = 300.0
_BATCH = 100
_FEW = 10  # below so many files a share says nothing
_SHARE = 0.2
_CLOCKS_APART_S = 300
_S = 1_000_000

T = TypeVar("T")


NOTHING = GcPlan(items=(), findings=(), n_files=0, n_rows=0)


class Collector:
    """Prune and gc over one registry's rows and files. One run at a time over all hosts, by a lease with an expiry."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._database = parts.database
        self._store = parts.store
        self._holder = f"{socket.gethostname()[:60]}:{os.getpid()}:{time.monotonic_ns()}"

    # -- prune -----------------------------------------------------------------------------------------------------

    def plan_prune(self, policy: Policy) -> list[Verdict]:
        """The ACTIVE rows that a policy condemns, each with its rule. Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        with self._database.read() as db:
            now_us = queries.clock_us(db)
            return [v for v in judge(queries.scan(db, Status.ACTIVE), policy, now_us) if not v.keep]

    def prune(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Marks the rows of a prune plan STALE and gives those it marked. A row that was used, pinned or leased since the
        plan stays ACTIVE. If it is interrupted, the rows of whole batches are marked and the next run does the rest.

        Raises:
            Busy: another run is under way.
            DatabaseUnavailable: the database failed; what was committed stays marked.
        """
        marked: list[Verdict] = []
        with self._only_run() as fence:
            run_no = self._start("prune")
            try:
                for batch in _batches(verdicts):
                    self._renew(fence)
                    marked += self._mark(run_no, batch, len(marked))
            finally:
                self._end(run_no, n_items=len(marked), n_failed=0, freed_bytes=0)
        return marked

    def _mark(self, run_no: int, batch: Sequence[Verdict], first: int) -> list[Verdict]:
        """One transaction: the rows of a batch that nothing happened to, and their record."""
        done = []
        with self._database.write() as db:
            for verdict in batch:
                reason = verdict.stale_reason or StaleReason.EVICTED
                if queries.mark_stale_untouched(db, verdict.checkpoint, reason):
                    done.append(verdict)
            items = [(_item(v.checkpoint, GcKind.STALE, v.rule, 0.0), "marked") for v in done]
            coordination.add_run_items(db, run_no, first, items)
            self._parts.hook("marked")
        return done

    # -- gc --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        *,
        stale_grace_s: float = DEFAULT_STALE_GRACE_S,
        ghost_grace_s: float = DEFAULT_GHOST_GRACE_S,
        force: str | None = None,
    ) -> GcPlan:
        """What gc would do now: STALE rows past their grace, files without a row and temporaries past theirs, ACTIVE rows
        whose file is gone. Reads only. Foreign things in the store are named as findings and never touched.

        `force` with the registry's id overrides a refusal.

        Raises:
            EvidenceRefused: what was seen suggests that store and database do not belong together, or that the store is
                not there (not mounted).
            StoreUnavailable: the store cannot be walked in full.
            DatabaseUnavailable: the database cannot be read.
        """
        entries = list(self._store.walk())
        self._parts.hook("walked")
        with self._database.read() as db:
            now_us = queries.clock_us(db)
            rows = list(queries.scan(db))
        items = [
            *_stale_items(rows, now_us, stale_grace_s),
            *self._missing_items(rows, entries, now_us),
            *_ghost_items(entries, rows, now_us, ghost_grace_s),
        ]
        if force != self._parts.registry_id:
            self._require_clock(now_us)
            self._require_evidence(entries, rows, items)
        foreign = [
            Finding(kind=FindingKind.FOREIGN, path=e.path, detail=e.detail, size_bytes=e.size_bytes)
            for e in entries
            if e.kind == "foreign"
        ]
        return GcPlan(items=tuple(items), findings=tuple(foreign), n_files=len(entries), n_rows=len(rows))

    def _require_evidence(self, entries: Sequence[Entry], rows: Sequence[Checkpoint], items: Sequence[GcItem]) -> None:
        registry_id, root, owner = self._parts.registry_id, self._store.root, self._store.owner()
        ghosts = sum(item.kind in (GcKind.ORPHAN, GcKind.TEMPORARY) for item in items)
        missing = sum(item.kind is GcKind.MISSING for item in items)
        evidence = None
        if owner not in (None, registry_id):
            evidence = f"the store {root} belongs to registry {owner}, this database is registry {registry_id}"
        elif rows and owner is None:
            evidence = f"{len(rows)} rows name files, but {root} bears no marker of this registry: is it mounted?"
        elif not rows and len(entries) >= _FEW:
            evidence = f"the registry is empty, but {root} has {len(entries)} files: is this the right database?"
        elif ghosts >= _FEW and ghosts > _SHARE * len(entries):
            evidence = f"{ghosts} of {len(entries)} files would go as ghosts: is this the right database?"
        elif missing >= _FEW and missing > _SHARE * len(rows):
            evidence = f"the files of {missing} of {len(rows)} rows are gone: is all of {root} mounted?"
        if evidence:
            raise EvidenceRefused(evidence=evidence, registry_id=registry_id)

    def _require_clock(self, now_us: int) -> None:
        apart_s = time.time() - now_us / _S
        if abs(apart_s) > _CLOCKS_APART_S:
            evidence = f"this host's clock is {apart_s:+.0f} s from the database's, and files are aged by it"
            raise EvidenceRefused(evidence=evidence, registry_id=self._parts.registry_id)

    def _missing_items(self, rows: Sequence[Checkpoint], entries: Sequence[Entry], now_us: int) -> Iterator[GcItem]:
        seen = {e.path for e in entries}
        for row in rows:
            # A file that was saved after the walk is not in it: the file itself decides.
            if row.status is Status.ACTIVE and row.file_path not in seen and self._is_gone(row):
                yield _item(row, GcKind.MISSING, "its file is gone", (now_us - row.created_us) / _S, size_bytes=0)

    def _is_gone(self, row: Checkpoint) -> bool:
        """Whether nothing of ours can be under a row's path."""
        try:
            return self._store.size(row.file_path) is None
        except UnsafePath:
            return True  # no file of ours can be there, and what is there is not ours

    def run(self, plan: GcPlan) -> GcReport:
        """Carries a plan out. What was used, pinned, leased or registered since the plan survives; one file that cannot be
        deleted is reported and does not stop the rest. Interrupted at any point, the next run finishes the work.

        Raises:
            Busy: another run is under way, or took over.
            DatabaseUnavailable: the database failed; files of rows that were deleted are collected by the next run.
        """
        done: list[tuple[GcItem, str]] = []
        freed = n_failed = 0
        with self._only_run() as fence:
            self._store.claim(self._parts.registry_id)  # an unmarked store gets here by force only, or empty
            run_no = self._start("gc")
            try:
                for batch in _batches(plan.items):
                    self._renew(fence)
                    results = self._take_rows(batch)
                    self._parts.hook("rows deleted")
                    outcomes = [self._finish(item, result) for item, result in results]
                    with self._database.write() as db:
                        coordination.add_run_items(db, run_no, len(done), [(i, r) for i, r, _ in outcomes])
                    done += [(item, result) for item, result, _ in outcomes]
                    freed += sum(size for _, _, size in outcomes)
                    n_failed += sum(result.startswith("failed") for _, result, _ in outcomes)
            finally:
                self._end(run_no, n_items=len(done), n_failed=n_failed, freed_bytes=freed)
        return GcReport(run_no=run_no, done=tuple(done), freed_bytes=freed, n_failed=n_failed)

    def _take_rows(self, batch: Sequence[GcItem]) -> list[tuple[GcItem, str]]:
        """Deletes or marks the rows of a batch in one transaction; says of each item whether its file may go."""
        with self._database.write() as db:
            named = queries.known_paths(db, [i.path for i in batch if i.checkpoint is None])
            results = []
            for item in batch:
                if item.checkpoint is None:
                    result = "skipped: a row names it now" if item.path in named else "file"
                elif item.kind is GcKind.MISSING:
                    gone = self._is_gone(item.checkpoint)
                    marked = gone and queries.mark_stale_untouched(db, item.checkpoint, StaleReason.MISSING)
                    result = "marked" if marked else "skipped: used or back since the plan"
                else:
                    deleted = queries.delete_untouched(db, item.checkpoint)
                    result = "file" if deleted else "skipped: used, pinned, leased or needed by a delta"
                results.append((item, result))
        return results

    def _finish(self, item: GcItem, result: str) -> tuple[GcItem, str, int]:
        """Unlinks the file where it may go; gives what happened and the bytes freed."""
        if result != "file":
            return item, result, 0
        try:
            size = self._store.remove(item.path, mtime_ns=item.mtime_ns)
        except (StoreUnavailable, UnsafePath) as error:
            log.warning("gc goes on without %s: %s", item.path, error)
            return item, f"failed: {error}", 0
        if size is None:
            return item, "skipped: it changed since the plan", 0
        self._parts.hook("file deleted")
        return item, "deleted", size

    def sweep(self, policy: Policy) -> Sweep:
        """Prunes by the policy, then frees what is due: what a schedule does at each run.

        Raises:
            Busy: another run is under way.
            EvidenceRefused, StoreUnavailable, DatabaseUnavailable: as `plan` and `run`.
        """
        marked = self.prune(self.plan_prune(policy))
        report = self.run(self.plan(stale_grace_s=policy.stale_grace_s, ghost_grace_s=policy.ghost_grace_s))
        return Sweep(
            n_marked=len(marked), n_items=len(report.done), n_failed=report.n_failed, freed_bytes=report.freed_bytes
        )

    # -- runs --------------------------------------------------------------------------------------------------------

    def runs(self, at_most: int = 20) -> list[GcRun]:
        """The records of the last runs, newest first."""
        with self._database.read() as db:
            return coordination.runs(db, at_most)

    @contextmanager
    def _only_run(self) -> Iterator[int]:
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

    def _renew(self, fence: int) -> None:
        with self._database.write() as db:
            held = coordination.renew_lease(db, _LEASE, fence, _LEASE_S)
            holder, left = coordination.lease_holder(db, _LEASE)
        if not held:
            raise Busy(what="prune or gc", holder=holder, seconds_left=left)

    def _start(self, kind: str) -> int:
        with self._database.write() as db:
            return coordination.start_run(db, kind, self._holder)

    def _end(self, run_no: int, *, n_items: int, n_failed: int, freed_bytes: int) -> None:
        with self._database.write() as db:
            coordination.end_run(db, run_no, n_items=n_items, n_failed=n_failed, freed_bytes=freed_bytes)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for i in range(0, len(items), _BATCH):
        yield items[i : i + _BATCH]


def _item(row: Checkpoint, kind: GcKind, reason: str, age_s: float, size_bytes: int | None = None) -> GcItem:
    size = row.file_size if size_bytes is None else size_bytes
    return GcItem(kind=kind, path=row.file_path, reason=reason, size_bytes=size, age_s=age_s, checkpoint=row)


def _stale_items(rows: Sequence[Checkpoint], now_us: int, grace_s: float) -> Iterator[GcItem]:
    for row in reversed(rows):  # a delta before its parent: the database keeps a row that another one names
        if row.status is not Status.STALE or row.pinned:
            continue
        age_s = (now_us - (row.stale_us or now_us)) / _S
        leased = row.lease_until_us is not None and row.lease_until_us > now_us
        if age_s >= grace_s and not leased:
            yield _item(row, GcKind.STALE, f"STALE: {row.stale_reason}", age_s)


def _ghost_items(entries: Sequence[Entry], rows: Sequence[Checkpoint], now_us: int, grace_s: float) -> Iterator[GcItem]:
    named = {row.file_path for row in rows}
    # Whichever of the two clocks is behind decides: a ghost is never taken for older than it is.
    now_ns = min(now_us * 1000, time.time_ns())
    for entry in entries:
        if entry.kind == "foreign" or entry.path in named:
            continue
        age_s = max(0.0, (now_ns - entry.mtime_ns) / 1e9)  # clocks differ by less than a tick
        if age_s >= grace_s:
            kind = GcKind.TEMPORARY if entry.kind == "temporary" else GcKind.ORPHAN
            reason = "a write that never ended" if kind is GcKind.TEMPORARY else "no row names it"
            yield GcItem(
                kind=kind,
                path=entry.path,
                reason=reason,
                size_bytes=entry.size_bytes,
                age_s=age_s,
                mtime_ns=entry.mtime_ns,
            )
