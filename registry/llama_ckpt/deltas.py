"""What of a state is stored already: the checkpoint that a new one can stand on, and from which cell on it differs.

Cells are compared, not assumed: two evaluations of the same tokens can differ in the last bits when they were batched otherwise.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from llama_ckpt import finding
from llama_ckpt.engine import HeldState
from llama_ckpt.errors import (
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    Incompatible,
    StoreUnavailable,
    UnsafePath,
    Unsupported,
)
from llama_ckpt.finding import Question
from llama_ckpt.fingerprint import TokenIds, tokens_hash
from llama_ckpt.formats import kv_edit
from llama_ckpt.parts import Parts
from llama_ckpt.payloads import Asked, Reading, cells_of
from llama_ckpt.values import Checkpoint, MemoryKind, Outcome

log = logging.getLogger("llama_ckpt")

MIN_SHARE = 0.25  # of its tokens; a delta that spares less is written full, and restores without a second file


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a new one stands on, and the position of the first cell that is the new one's own."""

    parent: Checkpoint
    start_token: int


def base_of(
    parts: Parts, engine: HeldState, token_ids: TokenIds, state: memoryview, besides: Checkpoint | None
) -> Base | None:
    """The best base for a state of these tokens, other than `besides`; None where it is to be written full: nothing like it is
    stored, its cells are not the same, too few are, or the chain would be too long. A stored file that is found missing or
    damaged on the way goes STALE; any other trouble only means that nothing is shared.
    """
    at_least = max(parts.min_match_tokens, math.ceil(MIN_SHARE * len(token_ids)))
    if engine.memory_kind is not MemoryKind.FULL or parts.delta_depth == 0 or len(token_ids) < at_least:
        return None
    question = Question(
        of_input=tokens_hash(token_ids), token_ids=token_ids, fingerprint=engine.fingerprint, at_least=at_least
    )
    found = finding.match(parts, question)
    row = found.checkpoint
    if found.outcome is not Outcome.HIT or row is None or (besides is not None and row.id == besides.id):
        return None
    try:
        n_shared = _n_equal(parts, engine, row, token_ids[: found.n_matching], state)
        chain = parts.chain(row)
    except (Incompatible, Unsupported, StoreUnavailable, DatabaseUnavailable) as error:
        log.info("nothing is shared with checkpoint %s: %s", row.id, error)
        return None
    if n_shared < at_least:
        return None
    # The cell before the first own one lies in the parent's own file: what stands above it is not needed.
    below = [one for one in chain if one.start_token < n_shared]
    return None if len(below) > parts.delta_depth else Base(below[-1], n_shared)


def _n_equal(parts: Parts, engine: HeldState, row: Checkpoint, shared: TokenIds, state: memoryview) -> int:
    """How many cells of a checkpoint are those of the state, bit for bit, among those of the tokens that both have."""
    reading = Reading(row)
    asked = Asked(begins_with=shared, n_tokens=row.n_tokens)
    try:
        with cells_of(parts, engine, row, asked, reading) as cells:
            return min(len(shared), kv_edit.equal_cells(state, cells.state))
    except (CorruptFile, FileMissing, UnsafePath) as error:
        parts.condemn(reading.row, error)
        return 0
