"""Checkpoint files: what a file is, and everything in it, verified. Pure."""

from __future__ import annotations

from llama_ckpt.formats.checkpoint import (
    CheckpointFile,
    dimension_mismatch,
    fingerprint_of,
    open_checkpoint,
    require_agreement,
)
from llama_ckpt.formats.identification import Identified, identify

__all__ = [
    "CheckpointFile",
    "Identified",
    "dimension_mismatch",
    "fingerprint_of",
    "identify",
    "open_checkpoint",
    "require_agreement",
]
