"""Purging: rows and files that go now, without grace, and the proof that they are gone. For whoever must forget an input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama_ckpt.collector import Collector
from llama_ckpt.db import collecting
from llama_ckpt.errors import CorruptFile, StoreUnavailable, UnsafePath
from llama_ckpt.formats import container
from llama_ckpt.parts import Parts
from llama_ckpt.values import SeenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """What is to go: the checkpoints of one input, one label or one model's name, or `everything`. One of them is given."""

    input_hash: bytes | None = None
    label: str | None = None
    model_name: str | None = None
    everything: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeReport:
    """What went, and that a second look found nothing of it. `n_ghosts` of the files had no row."""

    n_rows: int
    n_files: int
    n_ghosts: int
    freed_bytes: int


class Purger:
    """Deletes rows with their files, whatever pins, leases and graces say; and the deltas that need them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._database, self._store = parts.database, parts.store

    def plan(self, purge: Purge) -> list[tuple[SeenRow, str]]:
        """The rows that would go, with their files' paths, deltas before what they need. Reads only.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        with self._database.read() as db:
            return collecting.purgeable(db, purge.input_hash, purge.label, purge.model_name)

    def run(self, purge: Purge) -> PurgeReport:
        """Deletes rows and files, then looks again. Interrupted, what is deleted stays so; run it again. A reader that has
        a file open keeps reading it; the bytes are freed when it closes.

        Raises:
            Busy: prune or gc is under way.
            StoreUnavailable: a file could not be deleted, or the second look found something.
            DatabaseUnavailable: the database failed.
        """
        self._parts.require_store()
        with Collector(self._parts).only_run():
            rows = self.plan(purge)
            with self._database.write() as db:
                collecting.delete_rows(db, [row.ckpt_no for row, _ in rows])
            self._parts.hook("rows deleted")
            freed = [self._remove(path) for _, path in rows]
            ghosts = [self._store.remove(path) or 0 for path in self._ghosts(purge)]
        self._prove(purge, [path for _, path in rows])
        return PurgeReport(
            n_rows=len(rows), n_files=sum(map(bool, freed)), n_ghosts=len(ghosts), freed_bytes=sum(freed) + sum(ghosts)
        )

    def _remove(self, path: str) -> int:
        try:
            return self._store.remove(path) or 0
        except UnsafePath:  # no file of ours can be there, and what is there is not ours
            return 0

    def _is_there(self, path: str) -> bool:
        try:
            return self._store.size(path) is not None
        except UnsafePath:
            return False

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
            except (CorruptFile, StoreUnavailable):
                continue  # it tells nothing of itself: gc's
            if header.input_hash == purge.input_hash or header.fingerprint in digests:
                yield entry.path

    def _prove(self, purge: Purge, paths: Sequence[str]) -> None:
        left = [path for _, path in self.plan(purge)]
        left += [path for path in paths if self._is_there(path)]
        left += list(self._ghosts(purge))
        if left:
            reason = (
                f"{len(left)} file(s) are still there, such as {left[0]}: was it saved again meanwhile? Purge again"
            )
            raise StoreUnavailable(path=self._store.root, reason=reason)
