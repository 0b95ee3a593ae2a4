"""Verify: are the files valid, and do rows and files agree? Damage is a finding, never an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.db import collecting, marks, rows
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import CorruptFile, FileMissing, UnsafePath
from llama_ckpt.formats import FileFormat, container, engine_files, legacy
from llama_ckpt.formats.engine_files import EngineFile
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import KvState
from llama_ckpt.formats.kv.types import ALL_TYPES
from llama_ckpt.gc_values import Finding, FindingKind
from llama_ckpt.store.disk import map_file
from llama_ckpt.store.layout import Entry, EntryKind
from llama_ckpt.store.store import Store
from llama_ckpt.values import Check, CheckName, Checkpoint, Status

_IN_ORDER = (
    CheckName.HEADER,
    CheckName.CRC32,
    CheckName.STRUCTURE,
    CheckName.VALUES,
    CheckName.DIMENSIONS,
    CheckName.ROW,
)
_GHOST_KINDS = {
    EntryKind.CHECKPOINT: FindingKind.ORPHAN,
    EntryKind.TEMPORARY: FindingKind.TEMPORARY,
    EntryKind.FOREIGN: FindingKind.FOREIGN,
}
_PATHS_PER_QUERY = 500
_TYPE_NAMES = {"none", *(kind.name for kind in ALL_TYPES.values())}
_NO_CHECKSUM = (
    "this format has no checksum: a changed number, or an end between two parts of the memory, cannot be seen"
)


class Verifier:
    """Checks one checkpoint or all of them. It changes no file, and of a row at most the time of its last check.

    With `deep` it also checks that every value of K and V is finite.
    """

    def __init__(self, database: Database, store: Store, *, deep: bool = False) -> None:
        self._database = database
        self._store = store
        self._deep = deep

    def checkpoint(self, row: Checkpoint) -> list[Check]:
        """One result per check of a checkpoint's file: header, CRCs, structure, values, the model's dimensions, agreement with
        the row; and for a delta, its parent. The parent's own file is checked with the parent's row.

        Raises:
            StoreUnavailable: the file cannot be read now; nothing is known of it.
            DatabaseUnavailable: the database cannot be read.
        """
        of_parent = [] if row.parent_no is None else [self._parent(row, row.parent_no)]
        return of_parent if row.is_covered else [*self._file(row), *of_parent]

    def _parent(self, row: Checkpoint, parent_no: int) -> Check:
        parent = self._database.query(lambda db: rows.by_number(db, parent_no))
        if parent is None or parent.n_tokens < row.start_token or parent.fingerprint != row.fingerprint:
            reason = f"the first {row.start_token} cells are not those of checkpoint number {parent_no}"
            return Check(name=CheckName.PARENT, ok=False, detail=reason)
        if row.status is Status.ACTIVE and parent.status is not Status.ACTIVE:
            return Check(name=CheckName.PARENT, ok=False, detail=f"{parent.id} is STALE ({parent.stale_reason})")
        return Check(name=CheckName.PARENT, ok=True, detail=f"the first {row.start_token} cells are in {parent.id}")

    def _file(self, row: Checkpoint) -> list[Check]:
        try:
            with self._store.map(row.file_path) as view:
                return _checks(view, row.file_path, row, self._database, deep=self._deep)
        except (FileMissing, UnsafePath) as error:
            now = self._database.query(lambda db: rows.get(db, row.id))
            if now is None or now.status is not row.status:
                reason = "the checkpoint was collected or went STALE meanwhile"
                return [Check(name=CheckName.FILE, ok=None, detail=reason)]
            return [Check(name=CheckName.FILE, ok=False, detail=str(error))]

    def everything(
        self, *, older_than_s: float = 0.0, max_duration_s: float | None = None
    ) -> Iterator[tuple[Checkpoint, list[Check]]]:
        """Every ACTIVE checkpoint with its checks, the least recently checked first. With `older_than_s`, only checkpoints that
        were not checked for that long. The time of a check that passed is recorded in the row, so that several runs limited
        by `max_duration_s` cover everything.

        Raises:
            StoreUnavailable, DatabaseUnavailable: as `checkpoint`.
        """
        started = time.monotonic()
        with self._database.read() as db:
            ids = rows.least_recently_verified(db, older_than_s)
        for checkpoint_id in ids:
            if max_duration_s is not None and time.monotonic() - started >= max_duration_s:
                return
            with self._database.read() as db:
                row = rows.get(db, checkpoint_id)
            if row is None or row.status is Status.STALE:
                continue
            checks = self.checkpoint(row)
            if _proves_row_and_file(checks):
                with self._database.write() as db:
                    marks.record_verified(db, row)
            yield row, checks

    def findings(self) -> list[Finding]:
        """Every disagreement between rows and files: ACTIVE rows whose file is missing or damaged, files without a row,
        left-over temporaries, foreign entries in the store's folders. The list of a clean store is empty.

        Raises:
            StoreUnavailable, DatabaseUnavailable: as `checkpoint`, or the store cannot be walked.
        """
        of_rows = [finding for row, checks in self.everything() for finding in findings_of(row, checks)]
        return of_rows + list(self.ghosts())

    def ghosts(self) -> Iterator[Finding]:
        """Files without a row, left-over temporaries, and foreign entries in the store's folders. Quarantined files are left
        out: gc has reported them already.

        Raises:
            StoreUnavailable, DatabaseUnavailable: the store cannot be walked, or the database cannot be read.
        """
        entries = list(self._store.walk())
        for i in range(0, len(entries), _PATHS_PER_QUERY):
            batch = entries[i : i + _PATHS_PER_QUERY]
            # No row has a foreign name, and a database may not be able to store it.
            own_paths = [entry.path for entry in batch if entry.kind is not EntryKind.FOREIGN]
            with self._database.read() as db:
                known = collecting.known_paths(db, own_paths)
            yield from (
                _ghost(entry) for entry in batch if entry.path not in known and entry.kind is not EntryKind.QUARANTINED
            )


def _ghost(entry: Entry) -> Finding:
    return Finding(
        kind=_GHOST_KINDS[entry.kind],
        path=entry.path,
        detail=entry.detail or "no row names it",
        size_bytes=entry.size_bytes,
    )


def file_checks(path: Path, database: Database | None, *, deep: bool = False) -> list[Check]:
    """One result per check of a file of any format, without a row. The model of a LLAM file is looked up in `database` if one
    is given. With `deep`, every value of K and V is checked too.

    Raises:
        FileMissing, UnsafePath, StoreUnavailable: the file cannot be read.
        DatabaseUnavailable: the database cannot be read.
    """
    with map_file(path) as view:
        if container.padding_of(view) is not None and legacy.read(view, str(path)) is None:
            return _checks(view, str(path), None, database, deep=deep)
        return _checks_of_other(view, str(path), deep=deep)


def _checks(
    view: memoryview, name: str, row: Checkpoint | None, database: Database | None, *, deep: bool
) -> list[Check]:
    """The checks of a LLAM file."""
    passed: list[CheckName] = []
    try:
        file = formats.open_checkpoint(view, name, passed.append)
    except CorruptFile as error:
        return _failed(passed, error, deep=deep)
    checks = [_passed(check, file.contents.padding) for check in passed]
    if deep:
        checks.append(_values(file.contents.payload, file.state))
    checks.append(_dimensions(file, database))
    if row is not None:
        try:
            formats.require_agreement(file, row, name)
        except CorruptFile as error:
            return [*checks, Check(name=CheckName.ROW, ok=False, detail=error.reason)]
        checks.append(Check(name=CheckName.ROW, ok=True))
    return checks


def _checks_of_other(view: memoryview, name: str, *, deep: bool) -> list[Check]:
    """The checks of an engine's file, of LLAM version 1, and of a file that is no checkpoint."""
    opened = formats.open_file(view, name)
    identified = opened.identified
    why_not = identified.why_not or ""
    if identified.format is FileFormat.UNKNOWN:
        return [Check(name=CheckName.MAGIC, ok=False, detail=why_not)]
    checks = [_passed(CheckName.MAGIC, identified.padding)]
    if identified.format is not FileFormat.STATE:
        checks.append(_version(identified))
    if not identified.whole:
        return [*checks, Check(name=CheckName.STRUCTURE, ok=False, detail=why_not)]
    checks += [_structure(identified), Check(name=CheckName.CRC32, ok=None, detail=_NO_CHECKSUM)]
    if deep and isinstance(opened.content, EngineFile):
        checks.append(_values(opened.content.body, opened.content.state))
    elif deep and isinstance(opened.content, KvState):
        checks.append(_values(view, opened.content))
    return [*checks, _tokens(identified)]


def _tokens(identified: formats.Identified) -> Check:
    """Whether the token ids fit the cells. None if the file does not say which tokens its state has."""
    if identified.restorable:
        return Check(name=CheckName.TOKENS, ok=True, detail=str(identified.n_tokens))
    says_its_tokens = identified.n_tokens and not identified.n_media and identified.memory != "recurrent"
    return Check(name=CheckName.TOKENS, ok=False if says_its_tokens else None, detail=identified.why_not or "")


def _version(identified: formats.Identified) -> Check:
    version = identified.version
    if identified.format is FileFormat.LLAM:
        return Check(name=CheckName.VERSION, ok=version == legacy.VERSION, detail=str(version or ""))
    known = version in engine_files.VERSIONS[identified.format]
    note = "" if known else ", which is not known here: held to the layouts that are"
    return Check(name=CheckName.VERSION, ok=True if known else None, detail=f"{version}{note}")


def _structure(identified: formats.Identified) -> Check:
    """The structure of an engine's file. Some valid structures cannot be distinguished from damage: then `ok` is None."""
    summary = f"{identified.memory} memory, {identified.n_cells} cells, K {identified.type_k}, V {identified.type_v}"
    if identified.n_layer_v != identified.n_layer:
        doubt = (
            f"V in {identified.n_layer_v} of {identified.n_layer} layers:"
            " a few models keep none, or the file ends where V begins"
        )
        return Check(name=CheckName.STRUCTURE, ok=None, detail=f"{summary}, {doubt}")
    if not {identified.type_k, identified.type_v} <= _TYPE_NAMES:
        return Check(name=CheckName.STRUCTURE, ok=None, detail=f"{summary}: a type that is not known here")
    return Check(name=CheckName.STRUCTURE, ok=True, detail=summary)


def _values(data: memoryview, state: KvState) -> Check:
    if bad := kv_values.first_not_finite(data, state):
        detail = f"{kv_values.describe(state, bad)} is no finite number"
        return Check(name=CheckName.VALUES, ok=False, detail=detail)
    unchecked = kv_values.unchecked_types(state)
    detail = f"not of type {', '.join(unchecked)}" if unchecked else ""
    return Check(name=CheckName.VALUES, ok=None if unchecked else True, detail=detail)


def _dimensions(file: formats.CheckpointFile, database: Database | None) -> Check:
    models = []
    if database is not None:
        with database.read() as db:
            models = rows.models(db, file.fingerprint.digest)
    if not models:
        return Check(name=CheckName.DIMENSIONS, ok=None, detail="the model is not registered here")
    mismatch = formats.dimension_mismatch(file.dimensions, models[0].dimensions)
    return Check(name=CheckName.DIMENSIONS, ok=mismatch is None, detail=mismatch or "")


def all_ok(checks: list[Check]) -> bool:
    """Whether no check failed. A check that could not be made does not count."""
    return all(check.ok is not False for check in checks)


def _passed(name: CheckName, padding: int) -> Check:
    shows_padding = padding and name in (CheckName.HEADER, CheckName.MAGIC)
    note = f"after {padding} zero bytes before the magic" if shows_padding else ""
    return Check(name=name, ok=True, detail=note)


def _proves_row_and_file(checks: list[Check]) -> bool:
    """Whether a row may be recorded as checked. The dimensions do not count: they are a property of the model."""
    was_compared_with_row = any(check.name is CheckName.ROW for check in checks)
    return was_compared_with_row and all_ok([check for check in checks if check.name is not CheckName.DIMENSIONS])


def _failed(passed: list[CheckName], error: CorruptFile, *, deep: bool) -> list[Check]:
    """The checks of a file of which one failed: those before it, itself, and those that could not be made."""
    failed = CheckName(error.check)
    not_wanted = (CheckName.ROW,) if deep else (CheckName.ROW, CheckName.VALUES)
    not_made = [name for name in _IN_ORDER if name not in (*passed, failed, *not_wanted)]
    return [
        *(Check(name=name, ok=True) for name in passed if name is not failed),
        Check(name=failed, ok=False, detail=error.reason),
        *(Check(name=name, ok=None, detail=f"{failed} failed") for name in not_made),
    ]


def findings_of(row: Checkpoint, checks: list[Check]) -> Iterator[Finding]:
    """The failed checks of a checkpoint as findings."""
    for check in checks:
        if check.ok is False:
            kind = FindingKind.MISSING if check.name is CheckName.FILE else FindingKind.CORRUPT
            yield Finding(
                kind=kind, path=row.file_path, detail=str(check), checkpoint_id=row.id, size_bytes=row.file_size
            )
