"""The values of prune and gc: what they read, plan, do and record.

Times are whole microseconds since 1970-01-01 UTC by the database's clock unless a name says otherwise, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llama_ckpt.humanize import bytes_, plural, printable
from llama_ckpt.values import Checkpoint, StaleReason


class RowVersion(NamedTuple):
    """A row as a plan saw it. The run compares it with the row of that moment, and leaves a row alone that was used since."""

    ckpt_no: int
    id: str
    last_used_us: int
    hit_count: int

    @classmethod
    def of(cls, row: Checkpoint) -> RowVersion:
        """The version of a checkpoint's row."""
        return cls(row.ckpt_no, row.id, row.last_used_us, row.hit_count)


class Candidate(NamedTuple):
    """The columns of a row that a retention policy reads. No more of them, since a registry may have a million rows."""

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
    """The columns of a row that gc reads: the path of its file, and its status. A row of size 0 has no file."""

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
    """How rows and files disagree."""

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
    """One thing that gc would do: delete a file, delete a row, or mark a row whose file is gone. A file is deleted only if its
    modification time is still `mtime_ns` (None: there is no file). An unreadable file is moved to the quarantine first, and
    deleted from there after a grace period.
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
    """What a gc run would do (`items`), and what it leaves alone: other programs' files (`findings`), and ghosts that a later run
    may delete (`waiting`), since they were seen for the first time, are in quarantine, or are written by a process that lives.
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


class GcOutcome(StrEnum):
    """What became of an item of a gc plan."""

    DELETED = "deleted"
    MARKED = "marked"
    QUARANTINED = "quarantined"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcResult:
    """What gc did with one item. `detail` is the new path of a quarantined file, or why an item was skipped or failed.
    `freed_bytes` is the size of a deleted file. As text it is one sentence, such as "skipped: it changed since the plan".
    """

    item: GcItem
    outcome: GcOutcome
    detail: str = ""
    freed_bytes: int = 0

    def __str__(self) -> str:
        if not self.detail:
            return self.outcome.value
        return f"{self.outcome}{' as ' if self.outcome is GcOutcome.QUARANTINED else ': '}{self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a gc run did, item by item. `n_left` items are left for the next run, since the time or the number of deletions was
    limited.
    """

    run_no: int
    done: tuple[GcResult, ...]
    freed_bytes: int
    n_failed: int
    n_left: int = 0

    def __str__(self) -> str:
        done = f"run {self.run_no}: {plural(len(self.done), 'item')}, {bytes_(self.freed_bytes)} freed"
        return f"{done}, {self.n_failed:,} failed, {self.n_left:,} left for the next run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSummary:
    """What one prune and the gc after it did: the number of rows marked STALE, and gc's report in numbers."""

    n_marked: int
    n_items: int
    n_failed: int
    freed_bytes: int

    def __str__(self) -> str:
        marked = f"{plural(self.n_marked, 'checkpoint')} marked STALE"
        return f"{marked}; {plural(self.n_items, 'item')}, {bytes_(self.freed_bytes)} freed, {self.n_failed:,} failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of a retention policy to mark a checkpoint STALE, and the rule that made it."""

    row: RowVersion
    model_name: str
    label: str | None
    size_bytes: int
    rule: str
    stale_reason: StaleReason

    def __str__(self) -> str:
        return f"checkpoint {self.row.id[:12]} of {printable(self.model_name)} ({bytes_(self.size_bytes)}): {self.rule}"


class RuleEffect(StrEnum):
    """The effect of a rule on a checkpoint. `NO_EFFECT`: the rule neither keeps nor condemns it."""

    KEEPS = "keeps"
    CONDEMNS = "condemns"
    NO_EFFECT = "is silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOpinion:
    """The effect of one rule of a policy on one checkpoint, and why."""

    rule: str
    effect: RuleEffect
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system under the store, in bytes. `pending` is the size of the STALE files that gc has yet to delete."""

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


class ScheduleState(StrEnum):
    """The state of a schedule's process, by its row. `ONCE`: a timer of the system starts each run."""

    WAITING = "waiting"
    OVERDUE = "overdue: the process seems gone"
    STOPPED = "stopped"
    ONCE = "by another timer"
