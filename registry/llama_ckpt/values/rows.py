"""Rows of the registry, fingerprints and checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from llama_ckpt.humanize import bytes_, plural, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

US_PER_S = 1_000_000  # microseconds in a second

FieldValue = str | int | float | bool | list[str] | dict[str, str]


class Status(StrEnum):
    """Whether a row may be offered to a restore."""

    ACTIVE = "ACTIVE"
    STALE = "STALE"


class StaleReason(StrEnum):
    """Why a row is STALE."""

    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    MISSING = "missing"
    INCOMPATIBLE = "incompatible"
    REMOVED = "removed"


class MemoryKind(StrEnum):
    """The kind of memory that a model has. Only the cache of `FULL` attention can be truncated at a token."""

    FULL = "full"
    SWA = "swa"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"

    @property
    def can_be_truncated(self) -> bool:
        """Whether the first cells of a state are a state of their own, so that a prefix of it can be used."""
        return self is MemoryKind.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The identity of a model and its KV layout: `digest` is SHA-256 of the canonical JSON of `fields`."""

    digest: bytes
    fields: Mapping[str, FieldValue]

    @property
    def weights_sha256(self) -> bytes:
        """SHA-256 that identifies the weights, 32 raw bytes."""
        return bytes.fromhex(str(self.fields["weights"]))

    def __str__(self) -> str:
        return self.digest.hex()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDimensions:
    """The shape of one token's KV state: number of layers, KV heads of layer 0 (0: unknown), bytes of K and V over all layers."""

    n_layer: int
    n_kv_head: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A row of `llama_model`."""

    fingerprint: Fingerprint
    model_name: str
    dimensions: ModelDimensions

    def __str__(self) -> str:
        shape = self.dimensions
        heads = f", {plural(shape.n_kv_head, 'KV head')}" if shape.n_kv_head else ""
        return (
            f"{printable(self.model_name)}: {plural(shape.n_layer, 'layer')}{heads}, {bytes_(shape.kv_token_bytes)} per token "
            f"(fingerprint {self.fingerprint})"
        )


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
        """Whether its parent has all of its cells, so that it has no file and a size of 0."""
        return self.start_token == self.n_tokens

    @property
    def short_id(self) -> str:
        """The first 12 characters of the id, as people see and type it."""
        return self.id[:12]

    def __str__(self) -> str:
        status = self.status if self.stale_reason is None else f"{self.status} ({self.stale_reason})"
        label = "" if self.label is None else f", label {printable(self.label)}"
        delta = "" if self.parent_no is None else f", a delta from token {self.start_token:,}"
        return (
            f"checkpoint {self.short_id} of {printable(self.model_name)}: {plural(self.n_tokens, 'token')}{delta}, "
            f"{bytes_(self.file_size)}{label}, {status}{', pinned' if self.pinned else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """The values of a new row; the database adds number, times and counters. `extends_no` is the number of the longest
    checkpoint whose tokens are a prefix of this one's. `extended_by_no` is the number of a longer checkpoint that starts with
    all tokens of this one: it extends this one from now on.
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
    """A row of `checkpoint_prefix`: `prefix_hash` (16 raw bytes) is the chained hash of the first `n_tokens` tokens of checkpoint
    `ckpt_no`, which has `file_tokens` tokens in all. The checkpoint's own file, not its parent's, contains the last of them.
    """

    prefix_hash: bytes
    n_tokens: int
    file_tokens: int
    ckpt_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fingerprint field in which two states differ, with both values as text."""

    field: str
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.field}: saved {self.saved}, now {self.now}"


class CheckName(StrEnum):
    """What is checked of a file or a row. A checkpoint's file is checked in the order of the first six."""

    HEADER = "Header"
    CRC32 = "CRC32"
    STRUCTURE = "Structure"
    VALUES = "Values"
    DIMENSIONS = "Dimensions"
    ROW = "Row"
    PARENT = "Parent"
    FILE = "File"
    MAGIC = "Magic"
    VERSION = "Version"
    TOKENS = "Tokens"
    COPY = "Copy"
    REPAIR = "Repair"
    GGUF = "GGUF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a verification. `ok` is None if the check could not be made, and `detail` says why."""

    name: CheckName
    ok: bool | None
    detail: str = ""

    def __str__(self) -> str:
        words = {True: "OK", False: "FAILED", None: "not checked"}
        if self.name is CheckName.DIMENSIONS:
            words |= {True: "match model", False: "differ from model"}
        return f"{self.name} {words[self.ok]}" + (f": {self.detail}" if self.detail else "")
