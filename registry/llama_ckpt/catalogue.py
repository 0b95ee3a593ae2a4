"""`Catalogue`: what a registry knows of its checkpoints and does with them where no engine is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llama_ckpt.checkpoints import flatten as flattening
from llama_ckpt.checkpoints import search as finding
from llama_ckpt.checkpoints.register import clean_name
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import marks, rows, usage
from llama_ckpt.engine import Vocabulary
from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, hash_input
from llama_ckpt.values import Checkpoint, Fingerprint, MatchResult, RegisteredModel, StaleReason, Stats, Status

_MARKED_AT_ONCE = 2000
_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")


class Catalogue:
    """The rows of a registry: found, listed, pinned, removed, made whole. `Registry` is one."""

    def __init__(self, context: RegistryContext) -> None:
        self.context = context
        self.database = context.database
        self.store = context.store
        self.registry_id = context.registry_id

    # -- find ----------------------------------------------------------------------------------------------------------

    def match(
        self,
        given: Input,
        *,
        fingerprint: Fingerprint | None = None,
        token_ids: Sequence[int] | TokenIds | None = None,
        vocabulary: Vocabulary | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """Says which checkpoint serves an input: the same input, by its hash; else, where its token ids are at hand, the one
        that begins with the most tokens like it. They are at hand if they are the input, if `token_ids` gives them, or
        `vocabulary` (an engine is one) can; it also gives the text where an input and the checkpoint part.

        The state must fit `fingerprint` (an engine's); or belong to a registered model's name, or to `weights` (SHA-256);
        without any of them every model counts, by prefix the first 16. The same input is found in the database alone. By prefix
        the heads of at most 16 files a model are read, and a checkpoint whose file is found missing or damaged goes STALE. A
        database or store that fails gives `FAILED`, never an exception. docs/matching.md has the promise.

        Raises:
            BadInput: the input is empty or no input.
        """
        question = MatchQuery(
            input_hash=hash_input(given),
            given=given,
            token_ids=None if token_ids is None else as_token_ids(token_ids),
            vocabulary=vocabulary,
            fingerprint=fingerprint,
            model=model,
            weights=weights,
        )
        return finding.match(self.context, question)

    def match_hash(
        self,
        input_hash: bytes,
        *,
        fingerprint: Fingerprint | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """As `match`, for an input of which only the SHA-256 is known (32 raw bytes): the same input or nothing.

        Raises:
            BadInput: not 32 bytes.
        """
        if len(input_hash) != 32:
            raise BadInput(what="input hash", value=input_hash.hex(), reason="a SHA-256 has 32 bytes (64 hex digits)")
        question = MatchQuery(input_hash=input_hash, fingerprint=fingerprint, model=model, weights=weights)
        return finding.match(self.context, question)

    # -- care ----------------------------------------------------------------------------------------------------------

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
            ids = rows.ids_like(db, wanted, 2)
            row = rows.get(db, ids[0]) if len(ids) == 1 else None
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
        if any(text is not None and clean_name(text) != text for text in (model_name, label)):
            return []  # no row can have such a name
        return self.database.query(
            lambda db: rows.list_checkpoints(db, status=status, model_name=model_name, label=label, at_most=at_most)
        )

    def clock_us(self) -> int:
        """The database's clock, by which all times of rows are told: microseconds since 1970."""
        return self.database.query(rows.clock_us)

    def models(self) -> tuple[RegisteredModel, ...]:
        """The models that were ever saved for."""
        return tuple(self.database.query(rows.models))

    def stats(self) -> Stats:
        """Totals, recounted from the rows."""
        return self.database.query(usage.stats)

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
            marks.set_pinned(db, row.id, pinned)
        return self.get(row.id)

    def remove(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE, so that it is offered no more; gc frees its file after the grace.

        Raises:
            NotFound, BadInput: as `get`; or it is pinned.
        """
        row = self.get(checkpoint_id)
        with self.database.write() as db:
            now = rows.get(db, row.id)
            if now is not None and now.pinned:
                raise BadInput(what="checkpoint", value=row.id, reason="it is pinned; unpin it first")
            if rows.has_active_child(db, row):
                raise BadInput(
                    what="checkpoint",
                    value=row.id,
                    reason="a delta needs it: remove that first, or make it whole with: llama-ckpt flatten ID",
                )
            marks.mark_stale(db, row, StaleReason.REMOVED)
        return self.get(row.id)

    def parent_of(self, row: Checkpoint) -> Checkpoint:
        """What a delta stands on.

        Raises:
            NotFound: it is no delta, or both are gone.
        """
        with self.database.read() as db:
            parent = None if row.parent_no is None else rows.by_number(db, row.parent_no)
        if parent is None:
            raise NotFound(what="parent of checkpoint", name=row.id, hint="It is whole, or was collected meanwhile.")
        return parent

    def flatten(self, checkpoint_id: str) -> Checkpoint:
        """Makes a delta whole: it gets a file with all of its cells, and what it stood on can be removed. One that is whole stays
        as it is. Interrupted, it is a delta or whole, and at most a file without a row is left for gc.

        Raises:
            NotFound, BadInput: as `get`; or it is STALE.
            CorruptFile, FileMissing, UnsafePath: a file of it or of what it stands on is no good.
            Incompatible, Unsupported: its files were written by engines whose states cannot be made one: restore it and save it.
            StoreFull, StoreUnavailable: the new file cannot be written, or others cannot be read.
            Conflict: it was flattened meanwhile, or went STALE.
            DatabaseUnavailable: the database failed.
        """
        row = self.get(checkpoint_id)
        if row.status is Status.STALE:
            raise BadInput(what="checkpoint", value=row.id, reason=f"it is STALE ({row.stale_reason})")
        if row.parent_no is not None:
            flattening.flatten(self.context, row)
        return self.get(row.id)

    def report_bad(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE that passed every check but did not work, so that it is not offered again and the next
        save of its input writes a new one.

        Raises:
            NotFound, BadInput: as `get`.
        """
        row = self.get(checkpoint_id)
        self.context.make_stale(row, StaleReason.CORRUPT, "it was reported bad")
        return self.get(row.id)

    def invalidate(self, fingerprint: Fingerprint | bytes) -> int:
        """Makes all checkpoints of a fingerprint STALE, and says how many. In batches, so that others write meanwhile;
        interrupted, those that are marked are marked.

        Raises:
            DatabaseUnavailable: the database failed.
        """
        digest, n_marked = fingerprint if isinstance(fingerprint, bytes) else fingerprint.digest, 0
        while True:
            with self.database.write() as db:
                rows = marks.active_of_model(db, digest, _MARKED_AT_ONCE)
                n_marked += len(marks.mark_all_stale(db, rows, StaleReason.INCOMPATIBLE))
            if not rows:
                return n_marked
