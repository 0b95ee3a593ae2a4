"""What `Registry` asks of rows and does with them alone, without an engine and without a file."""

from __future__ import annotations

import re

from llama_ckpt import saving
from llama_ckpt.db import queries
from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.parts import Parts
from llama_ckpt.values import Checkpoint, Fingerprint, RegisteredModel, StaleReason, Stats, Status

_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")


class Rows:
    """The rows of a registry."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.database = parts.database
        self.store = parts.store
        self.registry_id = parts.registry_id

    def get(self, checkpoint_id: str) -> Checkpoint:
        """One checkpoint, by its id or the beginning of it (at least 4 hex digits).

        Raises:
            NotFound: there is none.
            BadInput: no id, or several begin like this.
        """
        wanted = checkpoint_id.lower()
        if not _ID_PREFIX.fullmatch(wanted):
            raise BadInput(what="checkpoint id", value=checkpoint_id, reason="expected 4 to 32 hex digits")
        with self.database.read() as db:
            ids = queries.ids_like(db, wanted, 2)
            row = queries.get(db, ids[0]) if len(ids) == 1 else None
        if len(ids) > 1:
            raise BadInput(
                what="checkpoint id",
                value=checkpoint_id,
                reason="several ids begin like this; give more digits",
            )
        if row is None:
            raise NotFound(what="checkpoint", name=checkpoint_id, hint="llama-ckpt ls shows the ids.")
        return row

    def list(
        self,
        *,
        status: Status | None = None,
        model_name: str | None = None,
        label: str | None = None,
        at_most: int | None = None,
    ) -> list[Checkpoint]:
        """Checkpoints, newest first."""
        if any(text is not None and saving.clean_name(text) != text for text in (model_name, label)):
            return []  # no row can have such a name
        return self.database.query(
            lambda db: queries.list_checkpoints(db, status=status, model_name=model_name, label=label, at_most=at_most)
        )

    def clock_us(self) -> int:
        """The database's clock, by which all times of rows are told: microseconds since 1970."""
        return self.database.query(queries.clock_us)

    def models(self) -> tuple[RegisteredModel, ...]:
        """The models that were ever saved for."""
        return tuple(self.database.query(queries.models))

    def stats(self) -> Stats:
        """Totals, recounted from the rows."""
        return self.database.query(queries.stats)

    def pin(self, checkpoint_id: str) -> Checkpoint:
        """Shields a checkpoint from prune, gc and remove.

        Raises:
            NotFound, BadInput: as `get`.
        """
        return self._set_pinned(checkpoint_id, True)

    def unpin(self, checkpoint_id: str) -> Checkpoint:
        """Takes a pin away.

        Raises:
            NotFound, BadInput: as `get`.
        """
        return self._set_pinned(checkpoint_id, False)

    def _set_pinned(self, checkpoint_id: str, pinned: bool) -> Checkpoint:
        row = self.get(checkpoint_id)
        with self.database.write() as db:
            queries.set_pinned(db, row.id, pinned)
        return self.get(row.id)

    def remove(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE, so that it is offered no more; gc frees its file after the grace.

        Raises:
            NotFound, BadInput: as `get`; or it is pinned.
        """
        row = self.get(checkpoint_id)
        with self.database.write() as db:
            now = queries.get(db, row.id)
            if now is not None and now.pinned:
                raise BadInput(what="checkpoint", value=row.id, reason="it is pinned; unpin it first")
            if queries.has_active_child(db, row):
                raise BadInput(what="checkpoint", value=row.id, reason="a delta needs it; remove that first")
            queries.mark_stale(db, row, StaleReason.REMOVED)
        return self.get(row.id)

    def report_bad(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE that passed every check but did not work, so that it is not offered again and the next
        save of its input writes a new one.

        Raises:
            NotFound, BadInput: as `get`.
        """
        row = self.get(checkpoint_id)
        self.parts.make_stale(row, StaleReason.CORRUPT, "it was reported bad")
        return self.get(row.id)

    def invalidate(self, fingerprint: Fingerprint | bytes) -> int:
        """Makes all checkpoints of a fingerprint STALE in one transaction, and says how many."""
        digest = fingerprint if isinstance(fingerprint, bytes) else fingerprint.digest
        with self.database.write() as db:
            return queries.mark_model_stale(db, digest, StaleReason.INCOMPATIBLE)
