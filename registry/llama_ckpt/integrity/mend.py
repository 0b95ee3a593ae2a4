"""Undoing and mending: STALE rows back to ACTIVE while their files are whole, sound orphans back into the registry."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from llama_ckpt.checkpoints.orphans import active, after_their_parents, found_in_store
from llama_ckpt.checkpoints.register import register_orphan
from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import marks, prefixes, rows
from llama_ckpt.errors import Conflict, CorruptFile, FileMissing, NotFound, StoreUnavailable, UnsafePath
from llama_ckpt.fingerprint import links_of
from llama_ckpt.gc_values import Finding, FindingKind
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.values import Checkpoint, StaleReason, Status

log = logging.getLogger("llama_ckpt")

_UNDOABLE = {StaleReason.EVICTED, StaleReason.EXPIRED, StaleReason.REMOVED, StaleReason.SUPERSEDED}


class Mender:
    """Brings checkpoints back, each after every byte of its file was checked."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._verifier = Verifier(context.database, context.store)

    def pruned_since(self, since_us: int) -> list[Checkpoint]:
        """The rows that went STALE since then, by prune or for their expiry, in order of their number.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        undone = (StaleReason.EVICTED, StaleReason.EXPIRED)
        with self._context.database.read() as db:
            stale = list(rows.scan(db, Status.STALE))
        return [r for r in stale if r.stale_reason in undone and (r.stale_us or 0) >= since_us]

    def unprune(self, rows: Sequence[Checkpoint]) -> list[tuple[Checkpoint, str]]:
        """Makes STALE rows ACTIVE again whose files are whole, and says of each "ACTIVE" or why not. A row comes back without
        its expiry. Interrupted, those that are back are back.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be read, or the store is not there (not mounted); nothing is
                known of the rest.
        """
        self._context.require_store()
        # A parent before its deltas: their numbers are above its own.
        return [(row, self._unprune(row)) for row in sorted(rows, key=lambda row: row.ckpt_no)]

    def _unprune(self, row: Checkpoint) -> str:
        if row.status is Status.ACTIVE:
            return "it is ACTIVE"
        if row.stale_reason not in _UNDOABLE:
            return f"it is {row.stale_reason}: that is no matter of policy"
        if not row.is_covered and (reason := self._damage(row)):
            return reason
        try:
            token_ids = token_ids_of(self._context, row)
        except (CorruptFile, FileMissing, UnsafePath) as error:
            return str(error)
        self._context.hook("checked")
        try:
            with self._context.database.write() as db:
                marks.release_active_key(db, row.fingerprint, row.input_hash, row.parent_no)
                back = marks.reactivate(db, row)
                if back:
                    prefixes.link(db, links_of(row, token_ids, self._context.block_size))
        except Conflict:
            return "another checkpoint of the same input is ACTIVE"
        self._context.hook("reactivated")
        return "ACTIVE" if back else "it was collected meanwhile, or the checkpoint that it is a delta of is not ACTIVE"

    def _damage(self, row: Checkpoint) -> str | None:
        """What is wrong with a row's own file."""
        try:
            if row.file_size == 0 or self._context.store.size(row.file_path) is None:
                return "its file is freed already"
        except UnsafePath as error:
            return str(error)
        return "; ".join(str(check) for check in self._verifier.checkpoint(row) if check.ok is False) or None

    def repair(self, findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
        """Marks the rows of missing and damaged files STALE and registers sound orphans again; says what became of each.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be used, or the store is not there (not mounted); what was mended
                stays so.
        """
        # An unmarked store is a new one while there are no rows: one whose database was lost, say.
        if self._context.store.owner() is None and self._context.database.query(rows.is_empty):
            self._context.store.claim(self._context.registry_id)
        self._context.require_store()
        first = (self._repair(finding) for finding in findings)
        done = after_their_parents(first, lambda one: one.lacks, self._is_there, lambda one: self._repair(one.finding))
        return [(repaired.finding, repaired.outcome) for repaired in done]

    def link(self) -> int:
        """Links the ACTIVE checkpoints that have no prefix links, since a version without them saved them, and says how many.
        Until then they are found by the hash of their whole input alone. Only the heads of files are read; one that cannot be
        used is left for `repair`. Interrupted, those that are linked are linked.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be used; the rest has no links yet.
        """
        self._context.require_store()
        with self._context.database.read() as db:
            numbers = {row.id: row.ckpt_no for row in rows.scan(db, Status.ACTIVE) if row.file_size > 0}
            have = prefixes.linked(db, list(numbers.values()))
        return sum(self._link(checkpoint_id) for checkpoint_id, number in numbers.items() if number not in have)

    def _link(self, checkpoint_id: str) -> bool:
        row = self._context.database.query(lambda db: rows.get(db, checkpoint_id))
        if row is None or row.status is Status.STALE:
            return False
        try:
            links = links_of(row, token_ids_of(self._context, row), self._context.block_size)
        except (CorruptFile, FileMissing, UnsafePath) as error:
            log.warning("checkpoint %s gets no links: %s", row.id, error)
            return False
        with self._context.database.write() as db:
            return prefixes.link_later(db, row.ckpt_no, links)

    def _is_there(self, checkpoint_id: str) -> bool:
        return active(self._context, checkpoint_id) is not None

    def _repair(self, finding: Finding) -> _Repaired:
        if finding.checkpoint_id is not None:
            return _Repaired(finding, self._mark(finding, finding.checkpoint_id))
        if finding.kind is FindingKind.ORPHAN:
            return self._adopt(finding)
        return _Repaired(finding, "left for gc" if finding.kind is FindingKind.TEMPORARY else "left alone")

    def _mark(self, finding: Finding, checkpoint_id: str) -> str:
        row = active(self._context, checkpoint_id)
        if row is None:
            return "its row went meanwhile"
        reasons = {FindingKind.MISSING: StaleReason.MISSING, FindingKind.CORRUPT: StaleReason.CORRUPT}
        self._context.make_stale(row, reasons[finding.kind], finding.detail)
        return "marked STALE"

    def _adopt(self, finding: Finding) -> _Repaired:
        try:
            found = found_in_store(self._context, finding.path)
        except NotFound as error:
            return _Repaired(finding, f"left for gc: {error}", lacks=str(error.values["name"]))
        except (CorruptFile, FileMissing, UnsafePath) as error:
            return _Repaired(finding, f"left for gc: {error}")
        try:
            register_orphan(self._context, found.model, found.new, found.token_ids)
        except Conflict:
            or_parent = "" if found.new.parent_no is None else ", or what it stands on went STALE"
            return _Repaired(finding, f"left for gc: another checkpoint of the same input is ACTIVE{or_parent}")
        except StoreUnavailable as error:
            return _Repaired(finding, f"not registered: {error}")
        return _Repaired(finding, "registered again")


@dataclass(frozen=True, slots=True)
class _Repaired:
    """What became of a finding; `lacks` is the id of what a delta waits for."""

    finding: Finding
    outcome: str
    lacks: str | None = None
