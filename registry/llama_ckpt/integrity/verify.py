"""`Verifier`: are the files whole, and do rows and files agree? A damaged file is a finding, no error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.db import collecting, marks, rows
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import CorruptFile, FileMissing, UnsafePath
from llama_ckpt.formats import container, engine_files, legacy
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import KvState
from llama_ckpt.formats.kv.types import ALL_TYPES
from llama_ckpt.gc_values import Finding, FindingKind
from llama_ckpt.store.disk import map_file
from llama_ckpt.store.store import Store
from llama_ckpt.values import Check, Checkpoint, Status

_ORDER = ("Header", "CRC32", "Structure", "Values", "Dimensions", "Row")
_BATCH = 500
_TYPE_NAMES = {"none", *(kind.name for kind in ALL_TYPES.values())}
_NO_CHECKSUM = (
    "this format has no checksum: a changed number, or an end between two parts of the memory, cannot be seen"
)


class Verifier:
    """Checks one checkpoint, or everything. Of a row it changes at most when it was checked, of a file nothing.

    With `deep` it looks at every number of K and V as well: whether it is one.
    """

    def __init__(self, database: Database, store: Store, *, deep: bool = False) -> None:
        self._database = database
        self._store = store
        self._deep = deep

    def checkpoint(self, row: Checkpoint) -> list[Check]:
        """One line per check of a checkpoint's file: header, CRCs, structure, values, dimensions of its model, its row; and of a
        delta whether what it stands on is there. The parents' files are checked with their own rows.

        Raises:
            StoreUnavailable: the file cannot be read now; nothing is known of it.
            DatabaseUnavailable: the database cannot be read.
        """
        above = [] if row.parent_no is None else [self._parent(row, row.parent_no)]
        return above if row.is_covered else [*self._file(row), *above]

    def _parent(self, row: Checkpoint, parent_no: int) -> Check:
        parent = self._database.query(lambda db: rows.by_number(db, parent_no))
        if parent is None or parent.n_tokens < row.start_token or parent.fingerprint != row.fingerprint:
            reason = f"the first {row.start_token} cells are not those of checkpoint number {parent_no}"
            return Check(name="Parent", ok=False, detail=reason)
        if row.status is Status.ACTIVE and parent.status is not Status.ACTIVE:
            return Check(name="Parent", ok=False, detail=f"{parent.id} is STALE ({parent.stale_reason})")
        return Check(name="Parent", ok=True, detail=f"the first {row.start_token} cells are in {parent.id}")

    def _file(self, row: Checkpoint) -> list[Check]:
        try:
            with self._store.map(row.file_path) as view:
                return _checks(view, row.file_path, row, self._database, self._deep)
        except (FileMissing, UnsafePath) as error:
            now = self._database.query(lambda db: rows.get(db, row.id))
            if now is None or now.status is not row.status:
                return [Check(name="File", ok=None, detail="the checkpoint was collected or went STALE meanwhile")]
            return [Check(name="File", ok=False, detail=str(error))]

    def everything(
        self, *, older_than_s: float = 0.0, max_duration_s: float | None = None
    ) -> Iterator[tuple[Checkpoint, list[Check]]]:
        """Every ACTIVE checkpoint with its checks, the least recently checked first; with `older_than_s` only those that were
        not checked for so long. What passes is noted in its row, so that runs that end after `max_duration_s` spread a full
        check over days.

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
            if _is_its_rows_and_whole(checks):
                with self._database.write() as db:
                    marks.record_verified(db, row)
            yield row, checks

    def findings(self) -> list[Finding]:
        """Every disagreement between rows and files: ACTIVE rows whose file is missing or damaged, files without a row,
        left-over temporaries, foreign things in the store's folders. An empty list is a clean store.

        Raises:
            StoreUnavailable, DatabaseUnavailable: as `checkpoint`, or the store cannot be walked.
        """
        found = [finding for row, checks in self.everything() for finding in findings_of(row, checks)]
        return found + list(self.ghosts())

    def ghosts(self) -> Iterator[Finding]:
        """Files without a row, left-over temporaries and foreign things in the store's folders. What is in quarantine has been
        found already.

        Raises:
            StoreUnavailable, DatabaseUnavailable: the store cannot be walked, the database not read.
        """
        entries = list(self._store.walk())
        for i in range(0, len(entries), _BATCH):
            batch = entries[i : i + _BATCH]
            with self._database.read() as db:
                # A foreign name may be one that no database can hold; and no row names it.
                known = collecting.known_paths(db, [e.path for e in batch if e.kind != "foreign"])
            for entry in batch:
                if entry.path in known or entry.kind == "quarantined":
                    continue
                kind = {"checkpoint": FindingKind.ORPHAN, "temporary": FindingKind.TEMPORARY}.get(entry.kind)
                yield Finding(
                    kind=kind or FindingKind.FOREIGN,
                    path=entry.path,
                    detail=entry.detail or "no row names it",
                    size_bytes=entry.size_bytes,
                )


def file_checks(path: Path, database: Database | None, *, deep: bool = False) -> list[Check]:
    """One line per check of a file of any format, without a row. Of one of ours the model is looked up in `database`, where there
    is one; with `deep` every number of K and V is looked at.

    Raises:
        FileMissing, UnsafePath, StoreUnavailable: the file cannot be read.
        DatabaseUnavailable: the database cannot be read.
    """
    with map_file(path) as view:
        if container.padding_of(view) is not None and legacy.read(view, str(path)) is None:
            return _checks(view, str(path), None, database, deep)
        return _checks_of_other(view, str(path), deep)


def _checks(view: memoryview, name: str, row: Checkpoint | None, database: Database | None, deep: bool) -> list[Check]:
    passed: list[str] = []
    try:
        file = formats.open_checkpoint(view, name, passed.append)
    except CorruptFile as error:
        return _failed(passed, error, deep)
    checks = [_with_padding(check, file.contents.padding) for check in passed]
    if deep:
        checks.append(_values(file.contents.payload, file.state))
    checks.append(_dimensions(file, database))
    if row is not None:
        try:
            formats.require_agreement(file, row, name)
        except CorruptFile as error:
            return [*checks, Check(name="Row", ok=False, detail=error.values["reason"])]
        checks.append(Check(name="Row", ok=True))
    return checks


def _checks_of_other(view: memoryview, name: str, deep: bool) -> list[Check]:
    """As `_checks`, for what engines write, and for what is no checkpoint."""
    found = formats.identify(view, name)
    why_not = found.why_not or ""
    if found.format == "unknown":
        return [Check(name="Magic", ok=False, detail=why_not)]
    checks = [_with_padding("Magic", found.padding)]
    if found.format != "state":
        checks.append(_version(found))
    if not found.whole:
        return [*checks, Check(name="Structure", ok=False, detail=why_not)]
    checks += [_structure(found), Check(name="CRC32", ok=None, detail=_NO_CHECKSUM)]
    if deep:
        checks.append(_values(*_body(view, name, found)))
    tokens_are_told = found.restorable or bool(found.n_tokens and not found.n_media and found.memory != "recurrent")
    ok = found.restorable if tokens_are_told else None
    checks.append(Check(name="Tokens", ok=ok, detail=str(found.n_tokens) if found.restorable else why_not))
    return checks


def _version(found: formats.Identified) -> Check:
    if found.format == "LLAM":
        return Check(name="Version", ok=found.version == legacy.VERSION, detail=str(found.version or ""))
    known = found.version in engine_files.VERSIONS[found.format]
    note = "" if known else ", which is not known here: held to the layouts that are"
    return Check(name="Version", ok=True if known else None, detail=f"{found.version}{note}")


def _structure(found: formats.Identified) -> Check:
    """What the structure of an engine's file comes to; not all of it can be told from damage."""
    told = f"{found.memory} memory, {found.n_cells} cells, K {found.type_k}, V {found.type_v}"
    if found.n_layer_v != found.n_layer:
        doubt = (
            f"V in {found.n_layer_v} of {found.n_layer} layers: a few models keep none, or the file ends where V begins"
        )
        return Check(name="Structure", ok=None, detail=f"{told}, {doubt}")
    if not {found.type_k, found.type_v} <= _TYPE_NAMES:
        return Check(name="Structure", ok=None, detail=f"{told}: a type that is not known here")
    return Check(name="Structure", ok=True, detail=told)


def _body(view: memoryview, name: str, found: formats.Identified) -> tuple[memoryview, KvState]:
    if found.format == "state":
        return view, kv_state.parse(view)
    file = engine_files.read(view, name)
    return file.body, file.state


def _values(data: memoryview, state: KvState) -> Check:
    if bad := kv_values.first_not_finite(data, state):
        return Check(name="Values", ok=False, detail=f"{kv_values.told(state, bad)} is no finite number")
    unseen = kv_values.types_not_looked_at(state)
    return Check(
        name="Values", ok=None if unseen else True, detail=f"not of type {', '.join(unseen)}" if unseen else ""
    )


def _dimensions(file: formats.CheckpointFile, database: Database | None) -> Check:
    models = []
    if database is not None:
        with database.read() as db:
            models = rows.models(db, file.fingerprint.digest)
    if not models:
        return Check(name="Dimensions", ok=None, detail="the model is not registered here")
    mismatch = formats.dimension_mismatch(file.dimensions, models[0].dimensions)
    return Check(name="Dimensions", ok=mismatch is None, detail=mismatch or "")


def all_ok(checks: list[Check]) -> bool:
    """Whether no check failed; one that could not be made does not count against a file."""
    return all(check.ok is not False for check in checks)


def _with_padding(name: str, padding: int) -> Check:
    note = f"after {padding} zero bytes before the magic" if padding and name in ("Header", "Magic") else ""
    return Check(name=name, ok=True, detail=note)


def _is_its_rows_and_whole(checks: list[Check]) -> bool:
    """Whether a row may be noted as checked. The dimensions are the model's matter."""
    rows_own = any(check.name == "Row" for check in checks)
    return rows_own and all_ok([check for check in checks if check.name != "Dimensions"])


def _failed(passed: list[str], error: CorruptFile, deep: bool) -> list[Check]:
    failed = error.values["check"]
    left_out = ("Row",) if deep else ("Row", "Values")
    rest = [name for name in _ORDER if name not in (*passed, failed, *left_out)]
    return [
        *(Check(name=name, ok=True) for name in passed if name != failed),
        Check(name=failed, ok=False, detail=error.values["reason"]),
        *(Check(name=name, ok=None, detail=f"{failed} failed") for name in rest),
    ]


def findings_of(row: Checkpoint, checks: list[Check]) -> Iterator[Finding]:
    """What failed of a checkpoint's checks, as findings."""
    for check in checks:
        if check.ok is False:
            kind = FindingKind.MISSING if check.name == "File" else FindingKind.CORRUPT
            yield Finding(
                kind=kind, path=row.file_path, detail=str(check), checkpoint_id=row.id, size_bytes=row.file_size
            )
