"""The values that pass between the layers: frozen, without behaviour beyond formatting. `str()` of a value is one line.

Times are whole microseconds since 1970-01-01 UTC by the database's clock, sizes are bytes, hashes are raw bytes. Other
modules import the names from here, not from `rows` and `results`.
"""

from __future__ import annotations

from llama_ckpt.values.results import (
    Divergence,
    MatchResult,
    MergeResult,
    ModelStats,
    Outcome,
    RestoreResult,
    SaveOutcome,
    SaveResult,
    Stats,
    WarmResult,
)
from llama_ckpt.values.rows import (
    US_PER_S,
    Check,
    CheckName,
    Checkpoint,
    Difference,
    FieldValue,
    Fingerprint,
    MemoryKind,
    ModelDimensions,
    NewCheckpoint,
    PrefixLink,
    RegisteredModel,
    StaleReason,
    Status,
)

__all__ = [
    "US_PER_S",
    "Check",
    "CheckName",
    "Checkpoint",
    "Difference",
    "Divergence",
    "FieldValue",
    "Fingerprint",
    "MatchResult",
    "MemoryKind",
    "MergeResult",
    "ModelDimensions",
    "ModelStats",
    "NewCheckpoint",
    "Outcome",
    "PrefixLink",
    "RegisteredModel",
    "RestoreResult",
    "SaveOutcome",
    "SaveResult",
    "StaleReason",
    "Stats",
    "Status",
    "WarmResult",
]
