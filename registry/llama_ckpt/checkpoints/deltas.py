"""How much of a state is stored already: the parent that a new checkpoint can have, and the first cell that differs from it.

Cells are compared, not assumed equal: two evaluations of the same tokens can differ in the last bits if their batches differed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial

from llama_ckpt.checkpoints import search
from llama_ckpt.checkpoints.captured import CapturedState
from llama_ckpt.checkpoints.inputs import ResolvedInput
from llama_ckpt.checkpoints.read import CellRequest, ChainReader
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import (
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    Incompatible,
    StoreUnavailable,
    UnsafePath,
    Unsupported,
)
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.values import Checkpoint, MatchResult, Outcome, Status

log = logging.getLogger("llama_ckpt")

_MAX_EXTENDS_STEPS = 64  # how far to follow `extends_no`; each step is one query
MIN_SHARE = 0.25  # of the tokens. A delta that spares less is written in full, and restores without a second file


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """The relations of a new checkpoint to those that are stored.

    If it is to be a delta, `parent` is its parent and `start_token` the position of its first own cell. `extends_no` is the
    number of the longest checkpoint whose tokens are all a prefix of its own; `extended_by_no` that of a longer checkpoint that
    starts with all of its tokens.
    """

    parent: Checkpoint | None = None
    start_token: int = 0
    extends_no: int | None = None
    extended_by_no: int | None = None


def plan_delta(context: RegistryContext, captured: CapturedState, replaced: Checkpoint | None) -> DeltaPlan:
    """The relations of a state that is to be saved instead of the row `replaced`, if there is one, which cannot be its parent.

    It is no delta if nothing like it is stored, its cells are not equal, too few are, or the chain would be too long. A stored
    file that is found missing or damaged on the way makes its row STALE; after any other error nothing is shared.
    """
    token_ids = captured.token_ids
    share = math.ceil(MIN_SHARE * len(token_ids))
    at_least = max(context.min_match_tokens, min(context.block_size, share))
    if not captured.can_be_truncated or len(token_ids) < at_least:
        return DeltaPlan()
    nearest = _nearest(context, captured, at_least)
    row, n_matching = nearest.checkpoint, nearest.n_matching
    if nearest.outcome is not Outcome.HIT or row is None:
        return DeltaPlan()
    try:
        plan = DeltaPlan(
            extends_no=_extended(context, row, min(n_matching, len(token_ids) - 1)),
            extended_by_no=row.ckpt_no if row.n_tokens > n_matching == len(token_ids) else None,
        )
        if context.delta_depth and n_matching >= share and (replaced is None or row.id != replaced.id):
            n_shared = _n_equal(context, captured, row, n_matching)
            if n_shared >= max(context.min_match_tokens, share):
                return _with_parent(context, plan, row, n_shared)
    except (Incompatible, Unsupported, StoreUnavailable, DatabaseUnavailable) as error:
        log.info("nothing is shared with checkpoint %s: %s", row.id, error)
        return DeltaPlan()
    return plan


def _nearest(context: RegistryContext, captured: CapturedState, at_least: int) -> MatchResult:
    """The checkpoint that shares the most tokens with the state, at least so many; a miss need not be explained."""
    prompt = ResolvedInput(captured.token_ids)
    query = MatchQuery(
        input_hash=prompt.input_hash,
        prompt=prompt,
        fingerprint=captured.engine.fingerprint,
        at_least=at_least,
    )
    return search.find(context, query)


def _with_parent(context: RegistryContext, plan: DeltaPlan, row: Checkpoint, n_shared: int) -> DeltaPlan:
    """The plan with the lowest row of a chain as parent whose own file has the cell before the first own one. The rows above it
    are not needed.
    """
    below = [member for member in context.chain(row) if member.start_token < n_shared]
    if len(below) > context.delta_depth:
        return plan
    return replace(plan, parent=below[-1], start_token=n_shared)


def _extended(context: RegistryContext, row: Checkpoint, n_tokens: int) -> int | None:
    """The number of the longest ACTIVE checkpoint, among `row` and those that it extends, with at most `n_tokens` tokens; None if
    there is none, or it is too many steps away.
    """
    for _ in range(_MAX_EXTENDS_STEPS):
        if row.n_tokens <= n_tokens and row.status is Status.ACTIVE:
            return row.ckpt_no
        number = row.extends_no
        shorter = None if number is None else context.database.query(partial(rows.by_number, ckpt_no=number))
        if shorter is None:
            return None
        row = shorter
    return None


def _n_equal(context: RegistryContext, captured: CapturedState, row: Checkpoint, n_matching: int) -> int:
    """The number of cells, among those of the `n_matching` shared tokens, that a checkpoint and the state have bit for bit."""
    reader = ChainReader(context, row)
    request = CellRequest(begins_with=captured.token_ids[:n_matching], n_tokens=row.n_tokens)
    try:
        with reader.cells(captured.engine, request) as cells:
            return min(n_matching, kv_edit.equal_cells(captured.payload, cells.state))
    except (CorruptFile, FileMissing, UnsafePath) as error:
        context.condemn(reader.current, error)
        return 0
