"""`RegistryContext`: what one registry consists of. Everything that works on a registry takes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from llama_ckpt.db import marks, prefixes, rows
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import CorruptFile, EngineFailed, FileMissing, LlamaCkptError, UnsafePath
from llama_ckpt.metrics import MetricsSink, NullSink
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import StepHook, Store, no_hook
from llama_ckpt.values import Checkpoint, StaleReason

DEFAULT_DELTA_DEPTH = 8
DEFAULT_MIN_TOKENS = 16

log = logging.getLogger("llama_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryContext:
    """The database and the store of a registry, and its settings.

    `metrics` gets the counts. `hook` is called with the name of each step that a crash could follow, for tests. `policy` has the
    limits that saves keep to. `block_size` is the number of token ids in a block of the prefix hashes, stored with the registry.
    A shared prefix of fewer than `min_match_tokens` tokens is no match. A delta depends on at most `delta_depth` other
    checkpoints; 0 for no deltas.
    """

    database: Database
    store: Store
    registry_id: str
    metrics: MetricsSink = NullSink()  # noqa: RUF009 - it keeps nothing
    hook: StepHook = no_hook
    policy: Policy = Policy()  # noqa: RUF009 - frozen
    block_size: int = prefixes.DEFAULT_BLOCK_SIZE
    min_match_tokens: int = DEFAULT_MIN_TOKENS
    delta_depth: int = DEFAULT_DELTA_DEPTH

    def require_store(self) -> None:
        """Requires the store's marker. Call it before you take an absent file for a lost one: a folder that is not mounted, or
        another one, has none of the files either.

        Raises:
            StoreUnavailable: the store contains no marker, or another registry's.
        """
        self.store.require_owner(self.registry_id, unmarked=False)

    def chain(self, row: Checkpoint) -> list[Checkpoint]:
        """The rows whose files contain a checkpoint's cells: the parents of a delta, the complete one first, and itself last.

        Raises:
            DatabaseUnavailable: the parents of a delta cannot be looked up.
            FileMissing: a parent's row is gone.
        """
        if row.parent_no is None:
            return [row]
        return [*self.database.query(lambda db: rows.ancestors(db, row)), row]

    def condemn(self, row: Checkpoint, error: LlamaCkptError) -> None:
        """Makes a row STALE if the error shows that it must not be offered again; else does nothing.

        Raises:
            DatabaseUnavailable: the row cannot be written.
        """
        if (reason := _stale_for(error)) is not None:
            self.make_stale(row, reason, str(error))

    def make_stale(self, row: Checkpoint, reason: StaleReason, why: str) -> None:
        """Makes a row STALE and logs it, unless it is STALE already.

        Raises:
            DatabaseUnavailable: the row cannot be written.
        """
        with self.database.write() as db:
            marked = marks.mark_stale(db, row, reason)
        if marked:
            log.warning("checkpoint %s is now STALE (%s): %s", row.id, reason, why)
            self.metrics.count("marked_stale")


def _stale_for(error: LlamaCkptError) -> StaleReason | None:
    """Why a row with this error must not be offered again. One that does not fit this engine may fit another: None."""
    match error:
        case FileMissing():
            return StaleReason.MISSING
        case CorruptFile() | UnsafePath():
            return StaleReason.CORRUPT
        case EngineFailed():
            return StaleReason.INCOMPATIBLE
        case _:
            return None
