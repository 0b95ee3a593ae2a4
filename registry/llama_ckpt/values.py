"""The values that pass between the layers: frozen, without behaviour of their own beyond formatting.

Times are whole microseconds since 1970-01-01 UTC by the database's clock, sizes are bytes, hashes are raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llama_ckpt.errors import LlamaCkptError

FieldValue = str | int | float | bool | list[str] | dict[str, str]


class Status(StrEnum):
    """Whether a row may be offered to a restore."""

    ACTIVE = "ACTIVE"
    STALE = "STALE"


class StaleReason(StrEnum):
    """Why a row may not be offered."""

    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    MISSING = "missing"
    INCOMPATIBLE = "incompatible"
    REMOVED = "removed"


class MemoryKind(StrEnum):
    """The kind of memory a model keeps. Only `FULL` attention caches can be cut at a token."""

    FULL = "full"
    SWA = "swa"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"


class Outcome(StrEnum):
    """What a match or a restore came to. Never a bool: "nothing fits" and "it broke" are two things."""

    HIT = "hit"
    NO_MATCH = "no_match"
    FAILED = "failed"


class SaveOutcome(StrEnum):
    """What a save came to. `REFUSED`: it would pass a limit of the policy, and all that could go is worth more."""

    SAVED = "saved"
    DEDUPLICATED = "deduplicated"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The identity of a model and its KV layout: `digest` is SHA-256 of the canonical JSON of `fields`."""

    digest: bytes
    fields: Mapping[str, FieldValue]

    @property
    def weights_sha256(self) -> bytes:
        """SHA-256 that names the weights, 32 raw bytes."""
        return bytes.fromhex(str(self.fields["weights"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDimensions:
    """The shape of one token's KV state: layers, KV heads of layer 0 (0: unknown), bytes of K and V over all layers."""

    n_layer: int
    n_kv_head: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A row of `llama_model`."""

    fingerprint: Fingerprint
    model_name: str
    dimensions: ModelDimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A row of `llama_checkpoint_meta`: the KV state of `n_tokens` tokens, kept in one file of the store."""

    ckpt_no: int
    id: str
    model_name: str
    fingerprint: bytes
    input_hash: bytes
    tokens_hash: bytes
    n_tokens: int
    memory_kind: MemoryKind
    file_path: str
    file_size: int
    payload_crc32: int
    status: Status
    stale_reason: StaleReason | None
    stale_us: int | None
    created_us: int
    last_used_us: int
    hit_count: int
    prefill_ms: int | None
    expires_us: int | None
    lease_until_us: int | None
    verified_us: int | None
    pinned: bool
    label: str | None
    start_token: int = 0
    parent_no: int | None = None


class SeenRow(NamedTuple):
    """A row as a plan saw it. Whoever carries the plan out compares: a row that was used since then is left alone."""

    ckpt_no: int
    id: str
    last_used_us: int
    hit_count: int

    @classmethod
    def of(cls, row: Checkpoint) -> SeenRow:
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


class StoredFile(NamedTuple):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """What a save puts into the row; the database adds number, times and counters."""

    id: str
    model_name: str
    fingerprint: bytes
    input_hash: bytes
    tokens_hash: bytes
    n_tokens: int
    memory_kind: MemoryKind
    file_path: str
    file_size: int
    payload_crc32: int
    prefill_ms: int | None
    expires_in_s: float | None
    label: str | None
    start_token: int = 0
    parent_no: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLink:
    """A row of `checkpoint_prefix`: the file of checkpoint `ckpt_no` (`file_tokens` tokens) begins with `n_tokens` tokens of
    which `prefix_hash` (16 raw bytes) is the chained hash.
    """

    prefix_hash: bytes
    n_tokens: int
    file_tokens: int
    ckpt_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fingerprint field that keeps two states apart, with both values as text."""

    field: str
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.field}: saved {self.saved}, now {self.now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """The answer to "which checkpoint matches this input?".

    `n_reusable` is the count of tokens whose evaluation a restore spares: at most n-1, since a restored state has no
    logits and the last token is decoded again. `nearest` and `differences` explain a `NO_MATCH`, `error` a `FAILED`.
    """

    outcome: Outcome
    reason: str
    input_hash: bytes
    checkpoint: Checkpoint | None = None
    n_reusable: int = 0
    nearest: Checkpoint | None = None
    differences: tuple[Difference, ...] = ()
    error: LlamaCkptError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What a save did. `bytes_written` is 0 unless it was `SAVED`; a `REFUSED` one has no checkpoint, and `reason` says why."""

    outcome: SaveOutcome
    checkpoint: Checkpoint | None
    bytes_written: int
    elapsed_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What a restore did. On anything but a hit `n_restored` is 0; `reason` says why, and `error` is set on `FAILED`."""

    outcome: Outcome
    reason: str
    n_restored: int
    n_evaluated: int
    checkpoint: Checkpoint | None
    elapsed_s: float
    error: LlamaCkptError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What `warm` did: the engine holds the input in every case.

    `problem` is set when the registry or the store failed on the way: the input was evaluated without them.
    """

    restore: RestoreResult
    save: SaveResult | None
    n_restored: int
    n_evaluated: int
    elapsed_s: float
    problem: LlamaCkptError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a verification. `ok` is None where the check could not be made, and `detail` says why."""

    name: str
    ok: bool | None
    detail: str = ""

    def __str__(self) -> str:
        words = {True: "OK", False: "FAILED", None: "not checked"}
        if self.name == "Dimensions":
            words |= {True: "match model", False: "differ from model"}
        return f"{self.name} {words[self.ok]}" + (f": {self.detail}" if self.detail else "")


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
    """One thing gc would do: free a file, delete a row, or mark a row whose file is gone. A file without a row goes only if it
    still has the time `mtime_ns`. An unreadable file goes to the quarantine first, and from there a grace later.
    """

    kind: GcKind
    path: str
    reason: str
    size_bytes: int
    age_s: float
    row: SeenRow | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What one prune and one gc after it did: rows marked STALE, and gc's report in numbers."""

    n_marked: int
    n_items: int
    n_failed: int
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """That a retention policy condemns a checkpoint, and by which rule."""

    row: SeenRow
    model_name: str
    label: str | None
    size_bytes: int
    rule: str
    stale_reason: StaleReason


class RuleWord(StrEnum):
    """What a rule says of a checkpoint."""

    KEEPS = "keeps"
    CONDEMNS = "condemns"
    SILENT = "is silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOpinion:
    """What one rule of a policy says of one checkpoint, and why."""

    rule: str
    word: RuleWord
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals over the registry, recounted from the rows at every call."""

    n_active: int
    n_stale: int
    active_bytes: int
    stale_bytes: int
    n_tokens: int
    hit_count: int
    spared_ms: int
    models: tuple[ModelStats, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """Totals of one fingerprint's ACTIVE rows; `bytes_per_token` is what one token costs on disk."""

    model_name: str
    fingerprint: bytes
    n_active: int
    active_bytes: int
    n_tokens: int
    hit_count: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token of these checkpoints."""
        return self.active_bytes / self.n_tokens if self.n_tokens else 0.0
