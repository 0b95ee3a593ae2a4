"""The values that pass between the layers: frozen, without behaviour of their own beyond formatting.

Times are whole microseconds since 1970-01-01 UTC by the database's clock, sizes are bytes, hashes are raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

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
    extends_no: int | None = None

    @property
    def is_covered(self) -> bool:
        """Whether all of its cells are its parent's, so that it has no file and a size of 0."""
        return self.start_token == self.n_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """What a save puts into the row; the database adds number, times and counters. `extends_no` is the number of the longest
    checkpoint that all of its tokens begin with; `extended_by_no` that of a longer one that begins with all of its own, which
    goes on from it from now on.
    """

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
    extends_no: int | None = None
    extended_by_no: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLink:
    """A row of `checkpoint_prefix`: checkpoint `ckpt_no`, of `file_tokens` tokens in all, begins with `n_tokens` tokens of which
    `prefix_hash` (16 raw bytes) is the chained hash, and its own file holds the last of them.
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
class Divergence:
    """Where an input and a checkpoint part: at token index `at`, counted from 0. The texts are of the tokens before it, which
    both have, and of those from there on in each; None where no tokenizer is at hand.
    """

    at: int
    before: str | None = None
    in_input: str | None = None
    in_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """The answer to "which checkpoint matches this input?".

    `n_matching` is the count of tokens that input and checkpoint begin with alike; `n_reusable` that of tokens whose evaluation
    a restore spares: at most n-1, since a restored state has no logits and the last token is decoded again. `n_tokens` is the
    input's count, None where it is not known. `nearest` and `differences` explain a `NO_MATCH`, for which `n_matching` is that
    of `nearest`; `divergence` says where checkpoint or nearest part from the input, if they do; `error` explains a `FAILED`.
    """

    outcome: Outcome
    reason: str
    input_hash: bytes
    checkpoint: Checkpoint | None = None
    n_matching: int = 0
    n_reusable: int = 0
    n_tokens: int | None = None
    nearest: Checkpoint | None = None
    divergence: Divergence | None = None
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
    """What a restore did. On anything but a hit `n_restored` is 0; `reason` says why, and `error` is set on `FAILED`.

    `n_restored` is the count of tokens whose evaluation was spared. `n_evaluated` is 1 where the whole input was restored and its
    last token decoded again; 0 where the checkpoint has only the input's first `n_restored` tokens: the engine then holds these,
    and the rest is the caller's to evaluate (`warm` does).
    """

    outcome: Outcome
    reason: str
    n_restored: int
    n_evaluated: int
    checkpoint: Checkpoint | None
    elapsed_s: float
    error: LlamaCkptError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge did: the cells of `n_merged` tokens came from `checkpoint` behind those that were held, and the engine now
    holds `n_held` in all. The last token was decoded again, for its logits.
    """

    checkpoint: Checkpoint
    n_merged: int
    n_held: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What `warm` did: the engine holds the input in every case.

    Of the input's tokens `n_restored` came from checkpoints, `n_evaluated` were computed (those of a shared prefix among them),
    and the engine held `n_kept` already. `restore` is the restore that brought most; `save` is None where nothing was saved.
    `waited_s` is how long it waited for another process that computed the same; `gave_up` says that the limit ended that and
    it was computed here too. `problem` is set when registry or store failed on the way: the input was evaluated without them.
    """

    restore: RestoreResult
    save: SaveResult | None
    n_restored: int
    n_evaluated: int
    elapsed_s: float
    n_kept: int = 0
    waited_s: float = 0.0
    gave_up: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals over the registry, recounted from the rows at every call.

    `events` has how often each of `metrics.Event` was met by all processes since the registry was made, without those that
    never were.
    """

    n_active: int
    n_stale: int
    active_bytes: int
    stale_bytes: int
    n_tokens: int
    hit_count: int
    spared_ms: int
    models: tuple[ModelStats, ...] = field(default=())
    events: Mapping[str, int] = field(default_factory=dict)


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
