"""The plan of gc: compares the files of the store with the rows. Reads only.

Rows are streamed, and of files only paths, sizes and times are kept: a store of a million rows takes some hundred megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_ckpt.checkpoints.budget import CLAIM_S
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, rows
from llama_ckpt.errors import CorruptFile, StoreMismatch, StoreUnavailable, UnsafePath
from llama_ckpt.formats import container
from llama_ckpt.gc_values import FileRow, Finding, FindingKind, GcItem, GcKind, GcPlan, RowVersion
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store import writers as owners
from llama_ckpt.store.layout import Entry
from llama_ckpt.store.writers import Owner
from llama_ckpt.values import US_PER_S, StaleReason, Status

_MIN_FILES_FOR_EVIDENCE = 10  # a share of fewer files says nothing
_MAX_LOST_SHARE = 0.2
_MAX_CLOCK_SKEW_S = 300


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """The items that the comparison of files and rows gave, by kind. `living` are temporaries of living processes that no claim
    counts any more: the budget counts them, and nothing deletes them.
    """

    now_us: int
    n_files: int
    n_rows: int = 0
    stale: list[GcItem] = field(default_factory=list)
    missing: list[GcItem] = field(default_factory=list)
    ghosts: list[GcItem] = field(default_factory=list)
    waiting: list[GcItem] = field(default_factory=list)
    living: list[GcItem] = field(default_factory=list)

    @property
    def items(self) -> list[GcItem]:
        # Deltas before their parents: the database refuses to delete a row that another row names.
        return [*reversed(self.stale), *self.missing, *self.ghosts]


class Planner:
    """Plans gc over one registry's rows and files."""

    def __init__(self, context: RegistryContext, policy: Policy, *, skip_grace: bool) -> None:
        self._context = context
        self._store = context.store
        self._stale_grace_s = policy.stale_grace_s
        self._ghost_grace_s = policy.ghost_grace_s
        self._skip_grace = skip_grace

    def plan(self, only: Collection[GcKind] | None, force: str | None) -> GcPlan:
        """As `Collector.plan`."""
        entries = list(self._store.walk())
        self._context.hook("walked")
        compared = self._compare(entries)
        if force != self._context.registry_id:
            self._require_clock(compared.now_us)
            self._require_evidence(entries, compared)
        foreign = [
            Finding(kind=FindingKind.FOREIGN, path=e.path, detail=e.detail, size_bytes=e.size_bytes)
            for e in entries
            if e.kind == "foreign"
        ]
        # Ghosts of other kinds than `only` wait as well, so that the next run still knows that they were seen.
        excluded = [ghost for ghost in compared.ghosts if only is not None and ghost.kind not in only]
        return GcPlan(
            items=tuple(item for item in compared.items if only is None or item.kind in only),
            findings=tuple(foreign),
            n_files=compared.n_files,
            n_rows=compared.n_rows,
            waiting=(*compared.waiting, *compared.living, *excluded),
        )

    def _compare(self, entries: Sequence[Entry]) -> _Comparison:
        """One pass over the rows. A file that no row names is a ghost."""
        unnamed = {entry.path: entry for entry in entries if entry.kind != "foreign"}
        with self._context.database.read() as db:
            compared = _Comparison(now_us=rows.clock_us(db), n_files=len(entries))
            seen = collecting.ghosts_seen(db)
            for row in collecting.stored_files(db):
                compared.n_rows += 1
                entry = unnamed.pop(row.file_path, None)
                if row.status == Status.STALE:
                    compared.stale += self._stale_item(row, compared.now_us, entry)
                elif entry is None and row.file_size > 0:
                    compared.missing += self._missing_item(row, compared.now_us)
        for entry in unnamed.values():
            self._judge_ghost(entry, compared, seen)
        return compared

    def _stale_item(self, row: FileRow, now_us: int, entry: Entry | None) -> Iterator[GcItem]:
        age_s = (now_us - (row.stale_us or now_us)) / US_PER_S
        # The row says that it has no file, but there is one: a process was killed just before it unlinked the file. No row
        # counts its bytes, so it is deleted without grace.
        is_unlink_due = entry is not None and row.file_size == 0
        if row.pinned or (row.lease_until_us or 0) > now_us:
            return
        if age_s < self._stale_grace_s and not is_unlink_due:
            return
        mtime_ns = None if entry is None else entry.mtime_ns
        if entry is None and row.file_size > 0 and not self._store.is_gone(row.file_path):
            mtime_ns = self._store.modified_ns(row.file_path)  # it was saved after the walk
        unreadable = entry is not None and row.stale_reason == StaleReason.CORRUPT
        kind, reason = GcKind.UNREADABLE if unreadable else GcKind.STALE, f"STALE: {row.stale_reason}"
        yield _item(row, kind, reason=reason, age_s=age_s, size_bytes=row.file_size, mtime_ns=mtime_ns)

    def _missing_item(self, row: FileRow, now_us: int) -> Iterator[GcItem]:
        # A file that was saved after the walk is not in it: look for the file itself.
        if self._store.is_gone(row.file_path):
            age_s = (now_us - row.created_us) / US_PER_S
            yield _item(row, GcKind.MISSING, reason="its file is gone", age_s=age_s, size_bytes=0)

    def _judge_ghost(self, entry: Entry, compared: _Comparison, seen: Mapping[str, int]) -> None:
        """Adds a ghost to those that are due or to those that wait; to neither if it is too young or being written."""
        # The clock that is behind decides, so that no ghost is taken for older than it is.
        now_ns = min(compared.now_us * 1000, time.time_ns())
        age_s = max(0.0, (now_ns - entry.mtime_ns) / 1e9)  # clocks differ by less than a tick
        if entry.kind == "quarantined":
            ghost = _ghost(entry, GcKind.UNREADABLE, reason="unreadable, in quarantine", age_s=age_s)
            is_due = self._skip_grace or age_s >= self._stale_grace_s
            (compared.ghosts if is_due else compared.waiting).append(ghost)
            return
        owner = owners.ask(entry.owner)
        if owner is Owner.ALIVE:  # a slow writer, however old its file
            if age_s > CLAIM_S:
                reason = "a write of a process that lives"
                compared.living.append(_ghost(entry, GcKind.TEMPORARY, reason=reason, age_s=age_s))
            return
        if entry.kind == "temporary" and owner is Owner.GONE:
            compared.ghosts.append(_ghost(entry, GcKind.TEMPORARY, reason="a write whose process is gone", age_s=age_s))
        elif age_s >= self._ghost_grace_s:
            is_due = self._skip_grace or seen.get(entry.path) == entry.mtime_ns
            (compared.ghosts if is_due else compared.waiting).append(self._orphan(entry, age_s))

    def _orphan(self, entry: Entry, age_s: float) -> GcItem:
        if entry.kind == "temporary":
            return _ghost(entry, GcKind.TEMPORARY, reason="a write that never ended", age_s=age_s)
        kind, reason = GcKind.ORPHAN, "no row names it"
        try:
            container.read_header(memoryview(self._store.head(entry.path)), entry.path, entry.size_bytes)
        except CorruptFile as error:
            kind, reason = GcKind.UNREADABLE, f"no row names it, and {error.values['reason']}"
        except (StoreUnavailable, UnsafePath) as error:
            reason = f"no row names it; it cannot be opened: {error}"
        return _ghost(entry, kind, reason=reason[:400], age_s=age_s)

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _require_evidence(self, entries: Sequence[Entry], compared: _Comparison) -> None:
        registry_id, root, owner = self._context.registry_id, self._store.root, self._store.owner()
        n_ghosts, n_missing = len(compared.ghosts) + len(compared.waiting), len(compared.missing)
        n_files = len(entries)
        evidence = None
        if owner not in (None, registry_id):
            evidence = f"the store {root} belongs to registry {owner}, this database is registry {registry_id}"
        elif compared.n_rows and owner is None:
            evidence = (
                f"{compared.n_rows} rows name files, but {root} contains no marker of this registry: is it mounted?"
            )
        elif not compared.n_rows and n_files >= _MIN_FILES_FOR_EVIDENCE:
            evidence = f"the registry is empty, but {root} has {n_files} files: is this the right database?"
        elif n_ghosts >= _MIN_FILES_FOR_EVIDENCE and n_ghosts > _MAX_LOST_SHARE * n_files:
            evidence = f"{n_ghosts} of {n_files} files would go as ghosts: is this the right database?"
        elif n_missing >= _MIN_FILES_FOR_EVIDENCE and n_missing > _MAX_LOST_SHARE * compared.n_rows:
            evidence = f"the files of {n_missing} of {compared.n_rows} rows are gone: is all of {root} mounted?"
        if evidence:
            raise StoreMismatch(evidence=evidence, registry_id=registry_id)

    def _require_clock(self, now_us: int) -> None:
        skew_s = time.time() - now_us / US_PER_S
        if abs(skew_s) > _MAX_CLOCK_SKEW_S:
            evidence = f"this host's clock is {skew_s:+.0f} s from the database's, and files are aged by it"
            raise StoreMismatch(evidence=evidence, registry_id=self._context.registry_id)


def _item(
    row: FileRow, kind: GcKind, *, reason: str, age_s: float, size_bytes: int, mtime_ns: int | None = None
) -> GcItem:
    return GcItem(
        kind=kind,
        path=row.file_path,
        reason=reason,
        size_bytes=size_bytes,
        age_s=age_s,
        row=RowVersion(row.ckpt_no, row.id, row.last_used_us, row.hit_count),
        mtime_ns=mtime_ns,
    )


def _ghost(entry: Entry, kind: GcKind, *, reason: str, age_s: float) -> GcItem:
    return GcItem(
        kind=kind, path=entry.path, reason=reason, size_bytes=entry.size_bytes, age_s=age_s, mtime_ns=entry.mtime_ns
    )
