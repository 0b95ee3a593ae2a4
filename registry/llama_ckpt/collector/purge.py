"""Purging: rows and files that go now, without grace, and the proof that they are gone. For whoever must forget an input."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama_ckpt.collector.collector import Collector, renew
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting, coordination
from llama_ckpt.errors import BadInput, CorruptFile, StoreUnavailable, UnsafePath
from llama_ckpt.formats import container
from llama_ckpt.gc_values import RowVersion

_CLAIM_S = 600.0
_HOLDER = f"purge on {socket.gethostname()[:60]}"


# In one transaction: others write in between.
_AT_ONCE = 2000
Row = tuple[RowVersion, str]  # with the path of its file


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """What is to go: the checkpoints of one input, one label or one model's name, or `everything`. One of them is given.

    Raises:
        BadInput: none or several are given.
    """

    input_hash: bytes | None = None
    label: str | None = None
    model_name: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        given = [self.input_hash, self.label, self.model_name, self.everything or None]
        if sum(value is not None for value in given) != 1:
            reason = "give one of input_hash, label, model_name, everything"
            raise BadInput(what="purge", value=self, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeReport:
    """What went, and that a second look found nothing of it. `n_ghosts` of the files had no row."""

    n_rows: int
    n_files: int
    n_ghosts: int
    freed_bytes: int


class Purger:
    """Deletes rows with their files, whatever pins, leases and graces say; and the deltas that need them."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._database, self._store = context.database, context.store

    def plan(self, purge: Purge) -> list[Row]:
        """The rows that would go, with their files' paths, deltas before what they need. Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        with self._database.read() as db:
            return collecting.purgeable(db, purge.input_hash, purge.label, purge.model_name)

    def run(self, purge: Purge) -> PurgeReport:
        """Deletes files and rows, then looks again. The rows go STALE first and are deleted last: interrupted, or where a file
        cannot be deleted, they still say what is to go, and the next run finishes it, as gc does. A reader that has a file
        open keeps reading it; the bytes are freed when it closes.

        Raises:
            Busy: prune or gc is under way.
            StoreUnavailable: a file could not be deleted (the others are), or the second look found something.
            DatabaseUnavailable: the database failed.
        """
        self._context.require_store()
        with Collector(self._context).only_run() as fence:
            claim = secrets.token_bytes(32)
            rows = self._condemn(purge, claim, fence)
            self._context.hook("rows condemned")
            freed = self._unlink([path for _, path in rows])
            self._context.hook("files deleted")
            self._delete(rows, fence)
            with self._database.write() as db:
                coordination.drop_claim(db, claim, _HOLDER)
            self._context.hook("rows deleted")
            paths = list(self._ghosts(purge))
            ghosts = self._unlink(paths)
            with self._database.write() as db:
                collecting.forget_ghosts(db, paths)
        self._prove(purge, [path for _, path in rows])
        return PurgeReport(
            n_rows=len(rows), n_files=sum(map(bool, freed)), n_ghosts=len(ghosts), freed_bytes=sum(freed) + sum(ghosts)
        )

    def _condemn(self, purge: Purge, claim: bytes, fence: int) -> list[Row]:
        """The rows, deltas before what they stand on, of which nobody makes use from here on. A claim counts their bytes until
        they are freed.
        """
        rows: dict[int, Row] = {}
        n_bytes = 0
        while more := [row for row in self.plan(purge) if row[0].ckpt_no not in rows]:  # a delta may be added meanwhile
            for some in _batches(more):
                with self._database.write() as db:
                    renew(db, fence)
                    n_bytes += collecting.condemn(db, [row.ckpt_no for row, _ in some])
                    coordination.take_claim(db, claim, _HOLDER, n_bytes, _CLAIM_S)
                rows |= {row[0].ckpt_no: row for row in some}
        return [rows[number] for number in sorted(rows, reverse=True)]

    def _delete(self, rows: Sequence[Row], fence: int) -> None:
        for some in _batches(rows):
            with self._database.write() as db:
                renew(db, fence)
                collecting.delete_rows(db, [row.ckpt_no for row, _ in some])

    def _unlink(self, paths: Sequence[str]) -> list[int]:
        """Deletes files and gives their bytes. One that cannot be deleted stops none of the others, and is told then."""
        freed, stuck = [], []
        for path in paths:
            try:
                freed.append(self._store.remove(path) or 0)
            except UnsafePath:
                freed.append(0)  # no file of ours can be there, and what is there is not ours
            except StoreUnavailable as error:
                stuck.append(str(error))
        if stuck:
            reason = f"{len(stuck)} file(s) could not be deleted, such as: {stuck[0]}. Purge again"
            raise StoreUnavailable(path=self._store.root, reason=reason)
        return freed

    def _ghosts(self, purge: Purge) -> Iterator[str]:
        """Files without a row that are of what is purged, as far as their headers tell; with `everything` all of them."""
        entries = [entry for entry in self._store.walk() if entry.kind != "foreign"]
        with self._database.read() as db:
            named = collecting.known_paths(db, [entry.path for entry in entries])
            digests = collecting.fingerprints_of(db, purge.model_name) if purge.model_name else set()
        for entry in entries:
            if entry.path in named:
                continue
            if purge.everything:
                yield entry.path
                continue
            try:
                header, _ = container.read_header(
                    memoryview(self._store.head(entry.path)), entry.path, entry.size_bytes
                )
            except (CorruptFile, StoreUnavailable, UnsafePath):
                continue  # it tells nothing of itself: gc's
            if header.input_hash == purge.input_hash or header.fingerprint in digests:
                yield entry.path

    def _prove(self, purge: Purge, paths: Sequence[str]) -> None:
        left = [path for _, path in self.plan(purge)]
        left += [path for path in paths if not self._store.is_gone(path)]
        left += list(self._ghosts(purge))
        if left:
            reason = (
                f"{len(left)} file(s) are still there, such as {left[0]}: was it saved again meanwhile? Purge again"
            )
            raise StoreUnavailable(path=self._store.root, reason=reason)


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    return (rows[at : at + _AT_ONCE] for at in range(0, len(rows), _AT_ONCE))
