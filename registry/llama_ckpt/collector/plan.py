"""What gc would do: the walk of the store held against the rows. Reads only.

Rows are streamed and files held by their path alone, so that a store of a million rows is planned in some hundred megabytes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, rows
from llama_ckpt.errors import CorruptFile, StoreMismatch, StoreUnavailable, UnsafePath
from llama_ckpt.formats import container
from llama_ckpt.gc_values import FileRow, Finding, FindingKind, GcItem, GcKind, GcPlan, RowVersion
from llama_ckpt.store import writers as owners
from llama_ckpt.store.layout import Entry
from llama_ckpt.store.writers import Owner
from llama_ckpt.values import StaleReason, Status

_FEW = 10  # below so many files a share says nothing
_SHARE = 0.2
_CLOCKS_APART_S = 300
_S = 1_000_000


@dataclass(slots=True, kw_only=True)
class _Found:
    """What the walk and the rows came to."""

    now_us: int
    n_files: int
    n_rows: int = 0
    stale: list[GcItem] = field(default_factory=list)
    missing: list[GcItem] = field(default_factory=list)
    ghosts: list[GcItem] = field(default_factory=list)
    waiting: list[GcItem] = field(default_factory=list)

    @property
    def items(self) -> list[GcItem]:
        # A delta before its parent: the database keeps a row that another one names.
        return [*reversed(self.stale), *self.missing, *self.ghosts]


class Planner:
    """Plans gc over one registry's rows and files."""

    def __init__(self, context: RegistryContext, *, stale_grace_s: float, ghost_grace_s: float, at_once: bool) -> None:
        self._context = context
        self._store = context.store
        self._stale_grace_s = stale_grace_s
        self._ghost_grace_s = ghost_grace_s
        self._at_once = at_once

    def plan(self, only: Collection[GcKind] | None, force: str | None) -> GcPlan:
        """As `Collector.plan`."""
        entries = list(self._store.walk())
        self._context.hook("walked")
        found = self._compare(entries)
        if force != self._context.registry_id:
            self._require_clock(found.now_us)
            self._require_evidence(entries, found)
        foreign = [
            Finding(kind=FindingKind.FOREIGN, path=e.path, detail=e.detail, size_bytes=e.size_bytes)
            for e in entries
            if e.kind == "foreign"
        ]
        return GcPlan(
            items=tuple(item for item in found.items if only is None or item.kind in only),
            findings=tuple(foreign),
            n_files=found.n_files,
            n_rows=found.n_rows,
            # What is due but not asked for waits as well, and is not forgotten.
            waiting=(*found.waiting, *(ghost for ghost in found.ghosts if only is not None and ghost.kind not in only)),
        )

    def _compare(self, entries: Sequence[Entry]) -> _Found:
        """One pass over the rows; what no row names is a ghost."""
        unnamed = {entry.path: entry for entry in entries if entry.kind != "foreign"}
        with self._context.database.read() as db:
            found = _Found(now_us=rows.clock_us(db), n_files=len(entries))
            seen = collecting.ghosts_seen(db)
            for row in collecting.stored_files(db):
                found.n_rows += 1
                entry = unnamed.pop(row.file_path, None)
                if row.status == Status.STALE:
                    found.stale += self._stale_item(row, found.now_us, entry)
                elif entry is None and row.file_size > 0:
                    found.missing += self._missing_item(row, found.now_us)
        for entry in unnamed.values():
            self._judge_ghost(entry, found, seen)
        return found

    def _stale_item(self, row: FileRow, now_us: int, entry: Entry | None) -> Iterator[GcItem]:
        age_s = (now_us - (row.stale_us or now_us)) / _S
        leased = row.lease_until_us is not None and row.lease_until_us > now_us
        # A file whose row says that it has none was about to be unlinked when its process was killed: nothing counts its bytes.
        promised = entry is not None and row.file_size == 0
        if leased or row.pinned or (age_s < self._stale_grace_s and not promised):
            return
        mtime_ns = None if entry is None else entry.mtime_ns
        if entry is None and row.file_size > 0 and not self._store.is_gone(row.file_path):
            mtime_ns = self._store.modified_ns(row.file_path)  # it came after the walk
        unreadable = entry is not None and row.stale_reason == StaleReason.CORRUPT
        kind = GcKind.UNREADABLE if unreadable else GcKind.STALE
        yield _item(row, kind, f"STALE: {row.stale_reason}", age_s, row.file_size, mtime_ns)

    def _missing_item(self, row: FileRow, now_us: int) -> Iterator[GcItem]:
        # A file that was saved after the walk is not in it: the file itself decides.
        if self._store.is_gone(row.file_path):
            yield _item(row, GcKind.MISSING, "its file is gone", (now_us - row.created_us) / _S, 0)

    def _judge_ghost(self, entry: Entry, found: _Found, seen: Mapping[str, int]) -> None:
        """Goes now, waits, or is nobody's business yet."""
        # Whichever of the two clocks is behind decides: a ghost is never taken for older than it is.
        now_ns = min(found.now_us * 1000, time.time_ns())
        age_s = max(0.0, (now_ns - entry.mtime_ns) / 1e9)  # clocks differ by less than a tick
        if entry.kind == "quarantined":
            ghost = _ghost(entry, GcKind.UNREADABLE, "unreadable, in quarantine", age_s)
            (found.ghosts if self._at_once or age_s >= self._stale_grace_s else found.waiting).append(ghost)
            return
        owner = owners.ask(entry.owner)
        if owner is Owner.ALIVE:
            return  # a slow writer, however old its file
        if entry.kind == "temporary" and owner is Owner.GONE:
            found.ghosts.append(_ghost(entry, GcKind.TEMPORARY, "a write whose process is gone", age_s))
        elif age_s >= self._ghost_grace_s:
            ghost = self._orphan(entry, age_s)
            due = self._at_once or seen.get(entry.path) == entry.mtime_ns
            (found.ghosts if due else found.waiting).append(ghost)

    def _orphan(self, entry: Entry, age_s: float) -> GcItem:
        if entry.kind == "temporary":
            return _ghost(entry, GcKind.TEMPORARY, "a write that never ended", age_s)
        try:
            container.read_header(memoryview(self._store.head(entry.path)), entry.path, entry.size_bytes)
        except CorruptFile as error:
            return _ghost(entry, GcKind.UNREADABLE, f"no row names it, and {error.values['reason']}"[:400], age_s)
        except (StoreUnavailable, UnsafePath) as error:
            return _ghost(entry, GcKind.ORPHAN, f"no row names it; it cannot be opened: {error}"[:400], age_s)
        return _ghost(entry, GcKind.ORPHAN, "no row names it", age_s)

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _require_evidence(self, entries: Sequence[Entry], found: _Found) -> None:
        registry_id, root, owner = self._context.registry_id, self._store.root, self._store.owner()
        n_ghosts, n_missing = len(found.ghosts) + len(found.waiting), len(found.missing)
        n_files = len(entries)
        evidence = None
        if owner not in (None, registry_id):
            evidence = f"the store {root} belongs to registry {owner}, this database is registry {registry_id}"
        elif found.n_rows and owner is None:
            evidence = f"{found.n_rows} rows name files, but {root} bears no marker of this registry: is it mounted?"
        elif not found.n_rows and n_files >= _FEW:
            evidence = f"the registry is empty, but {root} has {n_files} files: is this the right database?"
        elif n_ghosts >= _FEW and n_ghosts > _SHARE * n_files:
            evidence = f"{n_ghosts} of {n_files} files would go as ghosts: is this the right database?"
        elif n_missing >= _FEW and n_missing > _SHARE * found.n_rows:
            evidence = f"the files of {n_missing} of {found.n_rows} rows are gone: is all of {root} mounted?"
        if evidence:
            raise StoreMismatch(evidence=evidence, registry_id=registry_id)

    def _require_clock(self, now_us: int) -> None:
        apart_s = time.time() - now_us / _S
        if abs(apart_s) > _CLOCKS_APART_S:
            evidence = f"this host's clock is {apart_s:+.0f} s from the database's, and files are aged by it"
            raise StoreMismatch(evidence=evidence, registry_id=self._context.registry_id)


def _item(
    row: FileRow, kind: GcKind, reason: str, age_s: float, size_bytes: int, mtime_ns: int | None = None
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


def _ghost(entry: Entry, kind: GcKind, reason: str, age_s: float) -> GcItem:
    return GcItem(
        kind=kind, path=entry.path, reason=reason, size_bytes=entry.size_bytes, age_s=age_s, mtime_ns=entry.mtime_ns
    )
