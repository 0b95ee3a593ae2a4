"""`Purger`: deletes rows and files at once, without grace, and proves that they are gone. For inputs that must be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama_ckpt.collector.lease import RunLease
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import collecting
from llama_ckpt.db.coordination import UnlinkClaim
from llama_ckpt.errors import BadInput, CorruptFile, StoreUnavailable, UnsafePath
from llama_ckpt.formats import container
from llama_ckpt.gc_values import RowVersion
from llama_ckpt.store.layout import Entry

# Rows of one transaction: other processes write between two of them.
_BATCH_ROWS = 2000
Row = tuple[RowVersion, str]  # with the path of its file


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Which checkpoints to purge: those of one input, one label or one model's name, or `everything`. Give exactly one.

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
    """What a purge deleted. A second look at rows and files found nothing left of it. `n_ghosts` of the files had no row."""

    n_rows: int
    n_files: int
    n_ghosts: int
    freed_bytes: int


class Purger:
    """Deletes rows with their files, and the deltas that need them. Pins, leases and grace periods do not protect them."""

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._database, self._store = context.database, context.store
        self._lease = RunLease(context.database)

    def plan(self, purge: Purge) -> list[Row]:
        """The rows that a purge would delete, with their files' paths, deltas before their parents. Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        with self._database.read() as db:
            return collecting.purgeable(db, purge.input_hash, purge.label, purge.model_name)

    def run(self, purge: Purge) -> PurgeReport:
        """Deletes files and rows, then looks for them again. The rows are marked STALE first and deleted last. So if the purge
        is interrupted, or a file cannot be deleted, the rows still name what is left, and the next purge or gc deletes it.
        A reader that has a file open can read it to the end; its bytes are freed when the reader closes it.

        Raises:
            Busy: prune or gc is under way.
            StoreUnavailable: a file could not be deleted (the others are), or the second look found something.
            DatabaseUnavailable: the database failed.
        """
        self._context.require_store()
        with self._lease.held() as fence:
            claim = UnlinkClaim("purge")
            rows = self._condemn(purge, claim, fence)
            self._context.hook("rows condemned")
            freed = self._unlink([path for _, path in rows])
            self._context.hook("files deleted")
            self._delete(rows, fence)
            with self._database.write() as db:
                claim.drop(db)
            self._context.hook("rows deleted")
            paths = list(self._ghosts(purge))
            ghosts = self._unlink(paths)
            with self._database.write() as db:
                collecting.forget_ghosts(db, paths)
        self._prove(purge, [path for _, path in rows])
        return PurgeReport(
            n_rows=len(rows), n_files=sum(map(bool, freed)), n_ghosts=len(ghosts), freed_bytes=sum(freed) + sum(ghosts)
        )

    def _condemn(self, purge: Purge, claim: UnlinkClaim, fence: int) -> list[Row]:
        """Marks the rows STALE and without a file, so that no process uses them any more. Gives them, deltas before their
        parents. The claim counts their bytes until the files are deleted.
        """
        rows: dict[int, Row] = {}
        n_bytes = 0
        # Until no new rows are found: another process may add a delta in between.
        while added := [row for row in self.plan(purge) if row[0].ckpt_no not in rows]:
            for batch in _batches(added):
                with self._database.write() as db:
                    self._lease.renew(db, fence)
                    n_bytes += collecting.condemn(db, [row.ckpt_no for row, _ in batch])
                    claim.take(db, n_bytes)
                rows |= {row[0].ckpt_no: row for row in batch}
        return [rows[number] for number in sorted(rows, reverse=True)]

    def _delete(self, rows: Sequence[Row], fence: int) -> None:
        for batch in _batches(rows):
            with self._database.write() as db:
                self._lease.renew(db, fence)
                collecting.delete_rows(db, [row.ckpt_no for row, _ in batch])

    def _unlink(self, paths: Sequence[str]) -> list[int]:
        """Deletes files and gives the bytes of each.

        Raises:
            StoreUnavailable: some could not be deleted; the others are.
        """
        freed, failures = [], []
        for path in paths:
            try:
                freed.append(self._store.remove(path) or 0)
            except UnsafePath:
                freed.append(0)  # this registry writes no file there, so a file there is another program's
            except StoreUnavailable as error:
                failures.append(str(error))
        if failures:
            reason = f"{len(failures)} file(s) could not be deleted, such as: {failures[0]}. Purge again"
            raise StoreUnavailable(path=self._store.root, reason=reason)
        return freed

    def _ghosts(self, purge: Purge) -> Iterator[str]:
        """Files without a row whose headers say that they are to be purged; with `everything` all files without a row."""
        entries = [entry for entry in self._store.walk() if entry.kind != "foreign"]
        with self._database.read() as db:
            named = collecting.known_paths(db, [entry.path for entry in entries])
            digests = collecting.fingerprints_of(db, purge.model_name) if purge.model_name else set()
        for entry in entries:
            if entry.path not in named and (purge.everything or self._is_of(purge, digests, entry)):
                yield entry.path

    def _is_of(self, purge: Purge, digests: set[bytes], entry: Entry) -> bool:
        """Whether the header of a file names the input, or a model of the purge (`digests`)."""
        try:
            head = memoryview(self._store.head(entry.path))
            header, _ = container.read_header(head, entry.path, entry.size_bytes)
        except (CorruptFile, StoreUnavailable, UnsafePath):
            return False  # without a header it is gc's to delete
        return header.input_hash == purge.input_hash or header.fingerprint in digests

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
    return (rows[at : at + _BATCH_ROWS] for at in range(0, len(rows), _BATCH_ROWS))
