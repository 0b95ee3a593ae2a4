"""Checkpoint files: what a file is, and everything in it, verified. Pure."""

from __future__ import annotations

from llama_ckpt.formats.checkpoint import (
    CheckpointFile,
    dimension_mismatch,
    fingerprint_of,
    open_checkpoint,
    require_agreement,
)
from llama_ckpt.formats.engine_verdicts import EngineVerdict, engine_verdicts
from llama_ckpt.formats.identification import Identified, identify
from llama_ckpt.formats.repair import Repair, plan_repair

__all__ = [
    "CheckpointFile",
    "EngineVerdict",
    "Identified",
    "Repair",
    "dimension_mismatch",
    "engine_verdicts",
    "fingerprint_of",
    "identify",
    "open_checkpoint",
    "plan_repair",
    "require_agreement",
]
