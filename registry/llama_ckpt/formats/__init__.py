"""Checkpoint files: what a file is, and its contents, verified. Pure functions of bytes.

Owns every file format and their repair. It imports `fingerprint`, `values` and `errors`, and neither opens nor writes a file.
"""

from __future__ import annotations

from llama_ckpt.formats.checkpoint import (
    CheckpointFile,
    dimension_mismatch,
    fingerprint_of,
    open_checkpoint,
    require_agreement,
)
from llama_ckpt.formats.engine_verdicts import EngineVerdict, engine_verdicts
from llama_ckpt.formats.identification import Identified, OpenedFile, identify, open_file
from llama_ckpt.formats.magic import FileFormat
from llama_ckpt.formats.repair import FileRepair, plan_file_repair

__all__ = [
    "CheckpointFile",
    "EngineVerdict",
    "FileFormat",
    "FileRepair",
    "Identified",
    "OpenedFile",
    "dimension_mismatch",
    "engine_verdicts",
    "fingerprint_of",
    "identify",
    "open_checkpoint",
    "open_file",
    "plan_file_repair",
    "require_agreement",
]
