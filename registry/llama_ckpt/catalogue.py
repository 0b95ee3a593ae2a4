"""`Catalogue`: the part of a registry that needs no engine: find, list, pin, remove and flatten checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llama_ckpt.checkpoints import flatten as flattening
from llama_ckpt.checkpoints import search
from llama_ckpt.checkpoints.inputs import ResolvedInput, clean_name
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import marks, rows, usage
from llama_ckpt.engine import Vocabulary
from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.fingerprint import Input, TokenIds
from llama_ckpt.values import Checkpoint, Fingerprint, MatchResult, RegisteredModel, StaleReason, Stats, Status

_MARKED_AT_ONCE = 2000  # rows in one transaction
_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")


class Catalogue:
    """The checkpoints of a registry: find, list, pin, remove, flatten. `Registry` is one."""

    def __init__(self, context: RegistryContext) -> None:
        self.context = context
        self.database = context.database
        self.store = context.store
        self.registry_id = context.registry_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}(database={self.database.shown_url!r}, store={str(self.store.root)!r})"

    # -- find ----------------------------------------------------------------------------------------------------------

    def match(
        self,
        prompt: Input,
        *,
        fingerprint: Fingerprint | None = None,
        token_ids: Sequence[int] | TokenIds | None = None,
        vocabulary: Vocabulary | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """Finds the checkpoint that serves a prompt: one of exactly this prompt, by its hash; else the one that shares the
        longest prefix of tokens with it. A prefix is looked for if the token ids are known: the prompt is token ids,
        `token_ids` gives those of a text, or `vocabulary` (an engine is one) computes them. The vocabulary also gives the
        text at which prompt and checkpoint differ.

        The state must fit `fingerprint` (an engine's), or belong to the registered model with the name `model` or to `weights`
        (SHA-256, 32 raw bytes). Without any of them all models count; a prefix is looked for in the first 16. Exactly this
        prompt is found in the database alone. For a prefix the start of at most 16 files a model is read, and a checkpoint whose
        file is missing or damaged is made STALE. If database or store fail the outcome is `FAILED`, and nothing is raised.
        docs/matching.md says which checkpoint is found.

        Raises:
            BadInput: the prompt is empty, or neither text nor token ids.
        """
        resolved = ResolvedInput(prompt, vocabulary, token_ids=token_ids)
        query = MatchQuery(
            input_hash=resolved.input_hash,
            prompt=resolved,
            text_of=None if vocabulary is None else vocabulary.text_of,
            fingerprint=fingerprint,
            model=model,
            weights=weights,
        )
        return search.match(self.context, query)

    def match_hash(
        self,
        input_hash: bytes,
        *,
        fingerprint: Fingerprint | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """As `match`, for a prompt of which only the input hash is known (SHA-256, 32 raw bytes): finds exactly this prompt only.

        Raises:
            BadInput: not 32 bytes.
        """
        if len(input_hash) != 32:
            raise BadInput(what="input hash", value=input_hash.hex(), reason="a SHA-256 has 32 bytes (64 hex digits)")
        query = MatchQuery(input_hash=input_hash, fingerprint=fingerprint, model=model, weights=weights)
        return search.match(self.context, query)

    # -- care ----------------------------------------------------------------------------------------------------------

    def get(self, checkpoint_id: str) -> Checkpoint:
        """One checkpoint, by its id or the first digits of it (at least 4 hex digits).

        Raises:
            NotFound: there is none.
            BadInput: not an id, or several ids start with these digits.
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
        """The checkpoints with this status, model name and label, newest first, `at_most` so many; None does not filter."""
        if any(text is not None and clean_name(text) != text for text in (model_name, label)):
            return []  # no row can have such a name
        return self.database.query(
            lambda db: rows.list_checkpoints(db, status=status, model_name=model_name, label=label, at_most=at_most)
        )

    def clock_us(self) -> int:
        """The database's clock, which all times in rows are from: microseconds since 1970-01-01 UTC."""
        return self.database.query(rows.clock_us)

    def models(self) -> tuple[RegisteredModel, ...]:
        """All models for which a checkpoint was ever saved."""
        return tuple(self.database.query(rows.models))

    def stats(self) -> Stats:
        """Totals over all checkpoints, counted from the rows at this call."""
        return self.database.query(usage.stats)

    def pin(self, checkpoint_id: str) -> Checkpoint:
        """Protects a checkpoint from prune, gc and remove.

        Raises:
            NotFound, BadInput: as `get`.
        """
        return self._set_pinned(checkpoint_id, True)

    def unpin(self, checkpoint_id: str) -> Checkpoint:
        """Removes a pin.

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
        """Makes a checkpoint STALE: it is not found any more, and gc deletes its file after the grace period.

        Raises:
            NotFound, BadInput: as `get`; or it is pinned, or an ACTIVE delta needs it.
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
                    reason="a delta needs it: remove that first, or make it complete with: llama-ckpt flatten ID",
                )
            marks.mark_stale(db, row, StaleReason.REMOVED)
        return self.get(row.id)

    def parent_of(self, row: Checkpoint) -> Checkpoint:
        """The parent of a delta.

        Raises:
            NotFound: it is not a delta, or both rows are gone.
        """
        with self.database.read() as db:
            parent = None if row.parent_no is None else rows.by_number(db, row.parent_no)
        if parent is None:
            raise NotFound(what="parent of checkpoint", name=row.id, hint="It has no parent, or was deleted meanwhile.")
        return parent

    def flatten(self, checkpoint_id: str) -> Checkpoint:
        """Rewrites a delta as a complete file with all of its cells, so that the checkpoints it depends on can be removed. A
        checkpoint that is no delta stays as it is. Interrupted, it is as before or flattened, and at most a file without a row
        is left for gc.

        Raises:
            NotFound, BadInput: as `get`; or it is STALE.
            CorruptFile, FileMissing, UnsafePath: one of its files, or of its parents', is damaged or missing.
            Incompatible, Unsupported: its files were written by engines whose states cannot be joined: restore it and save it.
            StoreFull, StoreUnavailable: the new file cannot be written, or the old ones cannot be read.
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
        """Makes a checkpoint STALE that passed every check but did not work: it is not found again, and the next save of its
        prompt writes a new one.

        Raises:
            NotFound, BadInput: as `get`.
        """
        row = self.get(checkpoint_id)
        self.context.make_stale(row, StaleReason.CORRUPT, "it was reported bad")
        return self.get(row.id)

    def invalidate(self, fingerprint: Fingerprint | bytes) -> int:
        """Makes all checkpoints of a fingerprint (or of its digest) STALE, and returns how many. It works in batches, so that
        others can write in between; interrupted, the batches so far stay marked.

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
