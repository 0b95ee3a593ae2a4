"""What one registry consists of, handed to the services that work on it."""

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
    """A database, a store, and where counts and steps are told. `hook` hears the name of each step that a crash could
    follow; tests stop there. `policy` limits what saves may take. `block_size` is that of the prefix hashes, stored with the
    registry; `min_match_tokens` the count below which a shared prefix is no match; `delta_depth` how many checkpoints a delta may
    stand on, 0 for no deltas.
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
        """Holds the store to its marker before an absent file is taken for a lost one: an unmounted folder, or a wrong one,
        has none of our files, and nothing may be concluded from it.

        Raises:
            StoreUnavailable: the store bears no marker, or another registry's.
        """
        self.store.require_owner(self.registry_id, unmarked=False)

    def chain(self, row: Checkpoint) -> list[Checkpoint]:
        """What a checkpoint's cells are in: for a delta what it stands on, the full one first, and itself at the end.

        Raises:
            DatabaseUnavailable: what a delta stands on cannot be looked up.
        """
        if row.parent_no is None:
            return [row]
        return [*self.database.query(lambda db: rows.ancestors(db, row)), row]

    def condemn(self, row: Checkpoint, error: LlamaCkptError) -> None:
        """Makes a row STALE if what went wrong with it says that it may not be offered again.

        Raises:
            DatabaseUnavailable: the row cannot be written.
        """
        if (reason := _stale_for(error)) is not None:
            self.make_stale(row, reason, str(error))

    def make_stale(self, row: Checkpoint, reason: StaleReason, why: str) -> None:
        """Makes a row STALE, if it is not so already, and says so in the log.

        Raises:
            DatabaseUnavailable: the row cannot be written.
        """
        with self.database.write() as db:
            marked = marks.mark_stale(db, row, reason)
        if marked:
            log.warning("checkpoint %s is now STALE (%s): %s", row.id, reason, why)
            self.metrics.count("marked_stale")


def _stale_for(error: LlamaCkptError) -> StaleReason | None:
    """Why a row that failed so may not be offered again. What does not fit this engine may fit another."""
    match error:
        case FileMissing():
            return StaleReason.MISSING
        case CorruptFile() | UnsafePath():
            return StaleReason.CORRUPT
        case EngineFailed():
            return StaleReason.INCOMPATIBLE
        case _:
            return None
