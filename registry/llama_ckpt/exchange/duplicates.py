"""What the adoption of a LLAM file and of an engine's file have in common: duplicates and padding."""

from __future__ import annotations

import logging
from pathlib import Path

from llama_ckpt.checkpoints.register import usable_or_renewed
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import Incompatible
from llama_ckpt.values import Checkpoint

log = logging.getLogger("llama_ckpt")


def find_registered(
    context: RegistryContext, digest: bytes, input_hash: bytes, tokens_hash: bytes, *, dry_run: bool
) -> Checkpoint | None:
    """The ACTIVE row of the same model and input, if there is one. Unless `dry_run`, a row whose file is gone or damaged is
    marked STALE instead.

    Raises:
        Incompatible: there is such a row, and it has other tokens.
        DatabaseUnavailable, StoreUnavailable: they cannot be read.
    """
    if dry_run:
        row = context.database.query(lambda db: rows.find_active(db, digest, input_hash))
    else:
        row = usable_or_renewed(context, digest, input_hash)
    if row is not None and row.tokens_hash != tokens_hash:
        raise Incompatible(reason=f"checkpoint {row.id} is of the same input hash and has other tokens")
    return row


def count_padding(context: RegistryContext, path: Path, padding: int) -> None:
    """Logs and counts zero bytes before a file's magic; the adopted file does not have them."""
    if padding:
        log.info("detected padding: %d byte(s) of zeros before the magic of %s", padding, path)
        context.metrics.count("padding_detected")
