"""`doctor` on the database: can it be reached and written, is its file valid, is its schema current, is its clock right?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llama_ckpt.db import health, migrate, rows, schedules
from llama_ckpt.db.connect import Database
from llama_ckpt.db.schedules import ScheduleRow
from llama_ckpt.doctor.diagnosis import Diagnosis, Level, clock_ahead_s, fail, guarded, not_checked, of_clocks, ok, warn
from llama_ckpt.errors import BadInput, DatabaseUnavailable, LlamaCkptError
from llama_ckpt.humanize import bytes_

_QUICK_CHECK_BYTES = (
    1 << 30
)  # larger files are not checked: the check reads the complete file, some seconds per gigabyte
NAMES = ("database", "database writes", "schema", "database clock")
SQLITE_NAME = "SQLite file"


@dataclass(frozen=True, slots=True)
class RegistryFacts:
    """Facts from the rows. `n_active` is the number of ACTIVE rows that have a file, `n_named` that of all rows that have one."""

    registry_id: str
    n_active: int
    n_named: int
    schedules: tuple[ScheduleRow, ...]


@dataclass(slots=True)
class DatabaseReport:
    """The diagnoses, and the facts from the rows. `facts` is None if there is no registry (`has_none`) or it cannot be read;
    `why` is the reason.
    """

    diagnoses: list[Diagnosis] = field(default_factory=list)
    facts: RegistryFacts | None = None
    has_none: bool = False
    why: str = ""

    def skip(self, why: str, *names: str) -> DatabaseReport:
        """Records why the remaining checks could not be made."""
        self.why = why
        self.diagnoses += [not_checked(name, why) for name in names]
        return self


def examine_database(url: str, password: str | None, root: Path) -> DatabaseReport:
    """One diagnosis per name in `NAMES`, and one of the file if the database is SQLite. Creates no database, schema or row.
    `root` is the store's folder, which need not exist.
    """
    report = DatabaseReport()
    try:
        database = Database(url, password)
    except (BadInput, DatabaseUnavailable) as error:
        report.diagnoses.append(fail("database", str(error)))
        return report.skip("there is no usable database", *NAMES[1:])
    try:
        return _examine(database, report, root)
    finally:
        database.close()


def _examine(database: Database, report: DatabaseReport, root: Path) -> DatabaseReport:
    if not _exists(database):
        report.diagnoses.append(guarded("database", lambda: _absent(Path(database.url.database or ""), root)))
        report.has_none = report.diagnoses[-1].level is Level.WARN
        return report.skip("there is no database", *NAMES[1:])
    report.diagnoses.append(guarded("database", lambda: _reached(database)))
    if report.diagnoses[-1].level is Level.FAIL:
        return report.skip("the database cannot be reached", *NAMES[1:])
    if database.dialect == "sqlite":
        report.diagnoses.append(guarded(SQLITE_NAME, lambda: _sqlite_file(database)))
    report.diagnoses.append(guarded("schema", lambda: _schema(database)))
    checks: dict[str, Callable[[], Diagnosis]] = {
        "database writes": lambda: _writes(database),
        "database clock": lambda: _clock(database),
    }
    at_head = _current(database)
    if at_head != migrate.HEAD:
        report.has_none = at_head is None
        checks["database writes"] = lambda: not_checked("database writes", "the schema is not this version's")
        report.why = "the database has no schema yet" if at_head is None else "the schema is not this version's"
    report.diagnoses += [guarded(name, check) for name, check in checks.items()]
    if at_head == migrate.HEAD:
        _ask_facts(database, report)
    return report


def _exists(database: Database) -> bool:
    try:
        return database.exists()
    except OSError:  # a folder that we may not read: the connection attempt reports why
        return True


def _current(database: Database) -> str | None:
    try:
        return migrate.current(database)
    except LlamaCkptError:  # the diagnosis of the schema has reported it
        return "unknown"


def _absent(file: Path, root: Path) -> Diagnosis:
    """The diagnosis of an SQLite file that does not exist. A database on a server is assumed to exist until it is asked."""
    folder = file.absolute().parent
    if not folder.is_dir() and folder != root:  # opening a registry creates the store's own folder
        return fail(
            "database", f"{file} cannot be made: there is no folder {folder}", "make it, or name another --database-url"
        )
    return warn("database", f"there is no {file} yet", "the first command that needs it makes it")


def _reached(database: Database) -> Diagnosis:
    with database.read() as db:
        rows.clock_us(db)  # the first query also waits for the connection
        started = time.perf_counter()
        rows.clock_us(db)
        took_ms = (time.perf_counter() - started) * 1000
        return ok("database", f"{database.shown_url}, {health.product(db)}, a question takes {took_ms:.1f} ms")


def _sqlite_file(database: Database) -> Diagnosis:
    file = Path(database.url.database or "")
    n_bytes = file.stat().st_size
    with database.read() as db:
        mode = health.journal_mode(db)
        wrong = health.quick_check(db) if n_bytes < _QUICK_CHECK_BYTES else []
    if wrong:
        return fail(SQLITE_NAME, f"damaged: {'; '.join(wrong)}", "restore it from a backup")
    if mode != "wal":
        advice = "readers and writers wait for each other; is the file, or its folder, read-only?"
        return warn(SQLITE_NAME, f"journal mode {mode}, not wal", advice)
    checked = "sound" if n_bytes < _QUICK_CHECK_BYTES else "too large to check here (PRAGMA quick_check does)"
    return ok(SQLITE_NAME, f"{bytes_(n_bytes)}, write-ahead log, {checked}")


def _schema(database: Database) -> Diagnosis:
    current, head = migrate.current(database), migrate.HEAD
    if current == head:
        return ok("schema", f"{head}, as this version makes it")
    if current is None:
        return warn(
            "schema", "there is none yet", "the first command that needs it makes it, or: llama-ckpt db upgrade"
        )
    if current not in migrate.REVISIONS:
        return fail(
            "schema", f"{current} is of a newer llama-ckpt, this one knows {head}", "install a newer llama-ckpt"
        )
    message = f"{current} is older than this version's {head}"
    if database.dialect == "sqlite":
        return warn("schema", message, "it is upgraded when it is next opened")
    return fail("schema", message, "when no older llama-ckpt uses it any more: llama-ckpt db upgrade")


def _writes(database: Database) -> Diagnosis:
    started = time.perf_counter()
    with database.write() as db:
        health.write_nothing(db)
    return ok("database writes", f"a transaction takes {(time.perf_counter() - started) * 1000:.1f} ms")


def _clock(database: Database) -> Diagnosis:
    with database.read() as db:
        rows.clock_us(db)  # connects before the time is taken
        before = time.time()
        reading = rows.clock_us(db) / 1_000_000
        ahead_s = clock_ahead_s(reading, before, time.time())
    return of_clocks("database clock", "the database's clock", ahead_s)


def _ask_facts(database: Database, report: DatabaseReport) -> None:
    def ask() -> Diagnosis:
        with database.read() as db:
            n_active, n_named = health.n_files_named(db)
            report.facts = RegistryFacts(rows.registry_id(db), n_active, n_named, tuple(schedules.schedules(db)))
        return ok("rows", "")

    asked = guarded("rows", ask)
    if report.facts is None:
        report.diagnoses.append(asked)
        report.skip("the rows cannot be read")
