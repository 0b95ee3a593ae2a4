"""Bring rows and files back into agreement: STALE rows to ACTIVE while their files are valid, valid orphans to rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from llama_ckpt.checkpoints.orphans import RegistrableFile, WaitingDeltas, active_row, read_orphan
from llama_ckpt.checkpoints.register import claim_store, register_orphan
from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import marks, prefixes, rows
from llama_ckpt.errors import Conflict, CorruptFile, FileMissing, MissingParent, StoreUnavailable, UnsafePath
from llama_ckpt.fingerprint import links_of
from llama_ckpt.gc_values import Finding, FindingKind
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.values import Checkpoint, StaleReason, Status

log = logging.getLogger("llama_ckpt")

_UNDOABLE = {StaleReason.EVICTED, StaleReason.EXPIRED, StaleReason.REMOVED, StaleReason.SUPERSEDED}
_STALE_REASONS = {FindingKind.MISSING: StaleReason.MISSING, FindingKind.CORRUPT: StaleReason.CORRUPT}


class MendOutcome(StrEnum):
    """What `unprune` did to a row (the first three), or `apply` to a finding."""

    REACTIVATED = "ACTIVE"
    UNCHANGED = "unchanged"
    CONFLICT = "conflict"
    REGISTERED = "registered again"
    NOT_REGISTERED = "not registered"
    MARKED_STALE = "marked STALE"
    ROW_GONE = "its row went meanwhile"
    LEFT_FOR_GC = "left for gc"
    LEFT_ALONE = "left alone"


@dataclass(frozen=True, slots=True)
class Unpruned:
    """What became of a STALE row. `detail` says why it is not ACTIVE again; "" if it is."""

    checkpoint: Checkpoint
    outcome: MendOutcome
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.outcome.value


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What became of a finding; `detail` says why, "" where that is evident. `missing_parent` is the id of the checkpoint that
    a delta needs and that is not ACTIVE.
    """

    finding: Finding
    outcome: MendOutcome
    detail: str = ""
    missing_parent: str | None = None

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.detail}" if self.detail else self.outcome.value


class Reconciler:
    """Undoes prunes and repairs disagreements between rows and files, each after every byte of the file was checked."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._verifier = Verifier(context.database, context.store)

    def pruned_since(self, since_us: int) -> list[Checkpoint]:
        """The rows that prune marked STALE, or that expired, at or after `since_us` (microseconds since 1970), by number.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        by_prune = (StaleReason.EVICTED, StaleReason.EXPIRED)
        with self._context.database.read() as db:
            stale = list(rows.scan(db, Status.STALE))
        return [row for row in stale if row.stale_reason in by_prune and (row.stale_us or 0) >= since_us]

    def unprune(self, rows: Sequence[Checkpoint]) -> list[Unpruned]:
        """Marks STALE rows ACTIVE again if their files are valid. A row comes back without its expiry.

        The results are in order of the rows' numbers: a parent comes before its deltas. If it is interrupted, the rows that
        were reactivated stay ACTIVE, and the others are unchanged.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be read, or the store is not mounted. Nothing is known of the
                remaining rows.
        """
        self._context.require_store()
        return [self._unprune(row) for row in sorted(rows, key=lambda row: row.ckpt_no)]

    def _unprune(self, row: Checkpoint) -> Unpruned:
        if row.status is Status.ACTIVE:
            return Unpruned(row, MendOutcome.UNCHANGED, "it is ACTIVE")
        if row.stale_reason not in _UNDOABLE:
            return Unpruned(row, MendOutcome.UNCHANGED, f"it is {row.stale_reason}: that is no matter of policy")
        if not row.is_covered and (damage := self._damage(row)):
            return Unpruned(row, MendOutcome.UNCHANGED, damage)
        try:
            token_ids = token_ids_of(self._context, row)
        except (CorruptFile, FileMissing, UnsafePath) as error:
            return Unpruned(row, MendOutcome.UNCHANGED, str(error))
        self._context.hook("checked")
        try:
            with self._context.database.write() as db:
                marks.release_active_key(db, row.fingerprint, row.input_hash, row.parent_no)
                is_active = marks.reactivate(db, row)
                if is_active:
                    prefixes.link(db, links_of(row, token_ids, self._context.block_size))
        except Conflict:
            return Unpruned(row, MendOutcome.CONFLICT, "another checkpoint of the same input is ACTIVE")
        self._context.hook("reactivated")
        if is_active:
            return Unpruned(row, MendOutcome.REACTIVATED)
        reason = "it was collected meanwhile, or the checkpoint that it is a delta of is not ACTIVE"
        return Unpruned(row, MendOutcome.UNCHANGED, reason)

    def _damage(self, row: Checkpoint) -> str | None:
        """What is wrong with a row's own file; None if nothing is."""
        try:
            if row.file_size == 0 or self._context.store.size(row.file_path) is None:
                return "its file is freed already"
        except UnsafePath as error:
            return str(error)
        return "; ".join(str(check) for check in self._verifier.checkpoint(row) if check.ok is False) or None

    def apply(self, findings: Sequence[Finding]) -> list[Reconciled]:
        """Marks the rows of missing and damaged files STALE, and registers valid orphans. Leaves everything else alone.

        The results are in the order in which the findings were handled: a delta comes after its parent. If it is interrupted,
        what was repaired stays so.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be used, or the store is not mounted.
        """
        claim_store(self._context)  # the store of a lost database has no marker of the new one
        return list(self._apply(findings))

    def _apply(self, findings: Sequence[Finding]) -> Iterator[Reconciled]:
        """Handles the findings in their order, except that a delta whose parent is not ACTIVE is handled again after it."""
        waiting: WaitingDeltas[Reconciled] = WaitingDeltas()
        for finding in findings:
            result = self._reconcile(finding)
            if result.missing_parent is None:
                yield result
            else:
                waiting.add(result.missing_parent, result)
        while ready := waiting.take_ready(lambda parent_id: active_row(self._context, parent_id) is not None):
            for left in ready:
                yield self._reconcile(left.finding)
        yield from waiting.take_rest()

    def _reconcile(self, finding: Finding) -> Reconciled:
        if finding.checkpoint_id is not None:
            return self._mark(finding, finding.checkpoint_id)
        if finding.kind is FindingKind.ORPHAN:
            return self._adopt(finding)
        is_temporary = finding.kind is FindingKind.TEMPORARY
        return Reconciled(finding, MendOutcome.LEFT_FOR_GC if is_temporary else MendOutcome.LEFT_ALONE)

    def _mark(self, finding: Finding, checkpoint_id: str) -> Reconciled:
        row = active_row(self._context, checkpoint_id)
        if row is None:
            return Reconciled(finding, MendOutcome.ROW_GONE)
        self._context.make_stale(row, _STALE_REASONS[finding.kind], finding.detail)
        return Reconciled(finding, MendOutcome.MARKED_STALE)

    def _adopt(self, finding: Finding) -> Reconciled:
        try:
            orphan = read_orphan(self._context, finding.path)
        except MissingParent as error:
            return Reconciled(finding, MendOutcome.LEFT_FOR_GC, str(error), missing_parent=error.checkpoint_id)
        except (CorruptFile, FileMissing, UnsafePath) as error:
            return Reconciled(finding, MendOutcome.LEFT_FOR_GC, str(error))
        return self._register(finding, orphan)

    def _register(self, finding: Finding, orphan: RegistrableFile) -> Reconciled:
        try:
            register_orphan(self._context, orphan.model, orphan.new, orphan.token_ids)
        except Conflict:
            or_parent = "" if orphan.new.parent_no is None else ", or its parent went STALE"
            reason = f"another checkpoint of the same input is ACTIVE{or_parent}"
            return Reconciled(finding, MendOutcome.LEFT_FOR_GC, reason)
        except StoreUnavailable as error:
            return Reconciled(finding, MendOutcome.NOT_REGISTERED, str(error))
        return Reconciled(finding, MendOutcome.REGISTERED)

    def link(self) -> int:
        """Adds prefix links to the ACTIVE checkpoints without any, which versions without links saved; gives their number.
        Until then a checkpoint is found only by the hash of its complete input.

        Reads only the heads of files. A file that cannot be used is left for `apply`. If it is interrupted, the links that
        were added stay.

        Raises:
            DatabaseUnavailable, StoreUnavailable: they cannot be used; the remaining checkpoints have no links yet.
        """
        self._context.require_store()
        with self._context.database.read() as db:
            numbers = {row.id: row.ckpt_no for row in rows.scan(db, Status.ACTIVE) if row.file_size > 0}
            linked = prefixes.linked(db, list(numbers.values()))
        return sum(self._link(checkpoint_id) for checkpoint_id, number in numbers.items() if number not in linked)

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
