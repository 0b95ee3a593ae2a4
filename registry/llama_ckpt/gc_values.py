"""The values of prune and gc: what is looked at, planned, done and recorded.

Times are whole microseconds since 1970-01-01 UTC by the database's clock unless a name says otherwise, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llama_ckpt.humanize import bytes_, plural, printable
from llama_ckpt.values import Checkpoint, StaleReason


class RowVersion(NamedTuple):
    """A row as a plan saw it. Whoever carries the plan out compares: a row that was used since then is left alone."""

    ckpt_no: int
    id: str
    last_used_us: int
    hit_count: int

    @classmethod
    def of(cls, row: Checkpoint) -> RowVersion:
        """What a plan keeps of a row."""
        return cls(row.ckpt_no, row.id, row.last_used_us, row.hit_count)


class Candidate(NamedTuple):
    """What a retention policy looks at: of a row only this, since a registry may have a million of them."""

    ckpt_no: int
    id: str
    model_name: str
    label: str | None
    n_tokens: int
    file_size: int
    created_us: int
    last_used_us: int
    hit_count: int
    prefill_ms: int | None
    expires_us: int | None
    lease_until_us: int | None
    pinned: int
    parent_no: int | None
    extends_no: int | None


class FileRow(NamedTuple):
    """What gc looks at: where a row says that its file is, and whether the row may still be offered. A row of size 0 has none."""

    ckpt_no: int
    id: str
    file_path: str
    file_size: int
    status: str
    stale_reason: str | None
    stale_us: int | None
    created_us: int
    last_used_us: int
    hit_count: int
    lease_until_us: int | None
    pinned: int


class FindingKind(StrEnum):
    """What disagrees between rows and files."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    ORPHAN = "orphan"
    TEMPORARY = "temporary"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One disagreement between rows and files."""

    kind: FindingKind
    path: str
    detail: str
    checkpoint_id: str | None = None
    size_bytes: int = 0


class GcKind(StrEnum):
    """Why an item is in a gc plan."""

    STALE = "stale"
    ORPHAN = "orphan"
    UNREADABLE = "unreadable"
    TEMPORARY = "temporary"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcItem:
    """One thing gc would do: free a file, delete a row, or mark a row whose file is gone. A file goes only if it still has the
    time `mtime_ns`; None: there is none. An unreadable file goes to the quarantine first, and from there a grace later.
    """

    kind: GcKind
    path: str
    reason: str
    size_bytes: int
    age_s: float
    row: RowVersion | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What a gc run would do, and what it saw and left alone: foreign things (`findings`), and ghosts that wait for a later
    run (`waiting`): seen for the first time, or in quarantine.
    """

    items: tuple[GcItem, ...]
    findings: tuple[Finding, ...]
    n_files: int
    n_rows: int
    waiting: tuple[GcItem, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk that running the plan frees."""
        return sum(item.size_bytes for item in self.items)

    def __str__(self) -> str:
        found = f"{plural(len(self.items), 'item')}, {bytes_(self.size_bytes)} to free"
        seen = f"{plural(self.n_files, 'file')} and {plural(self.n_rows, 'row')} compared"
        return f"{found}; {seen}" + (f", {len(self.waiting):,} for a later run" if self.waiting else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a gc run did: per item "deleted", "marked", "quarantined", "skipped: why" or "failed: why". `n_left` items were left
    for the next run, since the time or the number of deletions was limited.
    """

    run_no: int
    done: tuple[tuple[GcItem, str], ...]
    freed_bytes: int
    n_failed: int
    n_left: int = 0

    def __str__(self) -> str:
        done = f"run {self.run_no}: {plural(len(self.done), 'item')}, {bytes_(self.freed_bytes)} freed"
        return f"{done}, {self.n_failed:,} failed, {self.n_left:,} left for the next run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSummary:
    """What one prune and one gc after it did: rows marked STALE, and gc's report in numbers."""

    n_marked: int
    n_items: int
    n_failed: int
    freed_bytes: int

    def __str__(self) -> str:
        marked = f"{plural(self.n_marked, 'checkpoint')} marked STALE"
        return f"{marked}; {plural(self.n_items, 'item')}, {bytes_(self.freed_bytes)} freed, {self.n_failed:,} failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """That a retention policy condemns a checkpoint, and by which rule."""

    row: RowVersion
    model_name: str
    label: str | None
    size_bytes: int
    rule: str
    stale_reason: StaleReason

    def __str__(self) -> str:
        return f"checkpoint {self.row.id[:12]} of {printable(self.model_name)} ({bytes_(self.size_bytes)}): {self.rule}"


class RuleEffect(StrEnum):
    """What a rule says of a checkpoint."""

    KEEPS = "keeps"
    CONDEMNS = "condemns"
    SILENT = "is silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOpinion:
    """What one rule of a policy says of one checkpoint, and why."""

    rule: str
    word: RuleEffect
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system under the store, in bytes; `pending` is what gc will free of what was marked already."""

    free: int
    total: int
    pending: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRun:
    """A row of `gc_run`: the record of one prune or gc."""

    run_no: int
    kind: str
    host: str
    started_us: int
    ended_us: int | None
    n_items: int
    n_failed: int
    freed_bytes: int
