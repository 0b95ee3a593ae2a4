"""What of a state is stored already: the checkpoint that a new one can stand on, and from which cell on it differs.

Cells are compared, not assumed: two evaluations of the same tokens can differ in the last bits when they were batched otherwise.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial

from llama_ckpt.checkpoints import search as finding
from llama_ckpt.checkpoints.read import Asked, Reading, cells_of
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
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
from llama_ckpt.fingerprint import TokenIds, tokens_hash
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.values import Checkpoint, MemoryKind, Outcome, Status

log = logging.getLogger("llama_ckpt")

_MOST_TURNS = 64  # that are looked back for what an input goes on from: each is a look-up
MIN_SHARE = 0.25  # of its tokens; a delta that spares less is written full, and restores without a second file


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Where a new checkpoint belongs among those that are stored: the one that it stands on and the position of its first own
    cell, if it is to be a delta; the number of the longest one that all of its tokens begin with, and of a longer one that
    begins with all of its own.
    """

    parent: Checkpoint | None = None
    start_token: int = 0
    extends_no: int | None = None
    extended_by_no: int | None = None


def plan_delta(
    context: RegistryContext, engine: HeldState, token_ids: TokenIds, state: memoryview, besides: Checkpoint | None
) -> DeltaPlan:
    """The place of a state of these tokens, not standing on `besides`. It is no delta where nothing like it is stored, its cells
    are not the same, too few are, or the chain would be too long. A stored file that is found missing or damaged on
    the way goes STALE; any other trouble only means that nothing is shared.
    """
    if engine.memory_kind is not MemoryKind.FULL:
        return DeltaPlan()
    share = math.ceil(MIN_SHARE * len(token_ids))
    question = MatchQuery(
        input_hash=tokens_hash(token_ids),
        token_ids=token_ids,
        fingerprint=engine.fingerprint,
        at_least=max(context.min_match_tokens, min(context.block_size, share)),
    )
    if len(token_ids) < question.at_least:
        return DeltaPlan()
    found = finding.match(context, question)
    row = found.checkpoint
    if found.outcome is not Outcome.HIT or row is None:
        return DeltaPlan()
    try:
        place = DeltaPlan(
            extends_no=_extended(context, row, min(found.n_matching, len(token_ids) - 1)),
            extended_by_no=row.ckpt_no if row.n_tokens > found.n_matching == len(token_ids) else None,
        )
        if context.delta_depth and found.n_matching >= share and (besides is None or row.id != besides.id):
            n_shared = _n_equal(context, engine, row, token_ids[: found.n_matching], state)
            if n_shared >= max(context.min_match_tokens, share):
                return _on(context, row, n_shared, place)
    except (Incompatible, Unsupported, StoreUnavailable, DatabaseUnavailable) as error:
        log.info("nothing is shared with checkpoint %s: %s", row.id, error)
        return DeltaPlan()
    return place


def _on(context: RegistryContext, row: Checkpoint, n_shared: int, place: DeltaPlan) -> DeltaPlan:
    """A place on the lowest of a row's chain whose own file has the cell before the first own one: what stands above it is not
    needed.
    """
    below = [one for one in context.chain(row) if one.start_token < n_shared]
    if len(below) > context.delta_depth:
        return place
    return replace(place, parent=below[-1], start_token=n_shared)


def _extended(context: RegistryContext, row: Checkpoint, n_tokens: int) -> int | None:
    """The number of the longest ACTIVE checkpoint whose tokens are the first ones, at most `n_tokens`, of `row`; None also where
    that lies many turns back.
    """
    for _ in range(_MOST_TURNS):
        if row.n_tokens <= n_tokens and row.status is Status.ACTIVE:
            return row.ckpt_no
        number = row.extends_no
        shorter = None if number is None else context.database.query(partial(rows.by_number, ckpt_no=number))
        if shorter is None:
            return None
        row = shorter
    return None


def _n_equal(context: RegistryContext, engine: HeldState, row: Checkpoint, shared: TokenIds, state: memoryview) -> int:
    """How many cells of a checkpoint are those of the state, bit for bit, among those of the tokens that both have."""
    reading = Reading(row)
    asked = Asked(begins_with=shared, n_tokens=row.n_tokens)
    try:
        with cells_of(context, engine, row, asked, reading) as cells:
            return min(len(shared), kv_edit.equal_cells(state, cells.state))
    except (CorruptFile, FileMissing, UnsafePath) as error:
        context.condemn(reading.row, error)
        return 0
