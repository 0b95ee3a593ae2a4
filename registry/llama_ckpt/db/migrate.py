"""The schema's version: reading it needs no alembic, changing it does."""

from __future__ import annotations

import io
import threading
from importlib.resources import files
from typing import TYPE_CHECKING

import sqlalchemy as sa

from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import VERSION_TABLE
from llama_ckpt.errors import BadInput, SchemaTooNew, SchemaTooOld

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
HEAD = REVISIONS[-1]
_alembic = threading.Lock()  # its context is global to the process


def current(database: Database) -> str | None:
    """The revision of the database; None if it has no tables of llama-ckpt. Reads only.

    Raises:
        DatabaseUnavailable: the database cannot be reached.
    """
    with database.read() as db:
        if not sa.inspect(db).has_table(VERSION_TABLE):
            return None
        table = sa.table(VERSION_TABLE, sa.column("version_num"))
        return db.scalar(sa.select(table.c.version_num))


def require_known(database: Database) -> str | None:
    """The revision of the database, checked against those that this version knows. Reads only.

    Raises:
        SchemaTooNew: a newer llama-ckpt created the schema.
        DatabaseUnavailable: the database cannot be reached.
    """
    existing = current(database)
    if existing is not None and existing not in REVISIONS:
        raise SchemaTooNew(url=database.shown_url, found=existing, known=HEAD)
    return existing


def prepare(database: Database, *, upgrade_older: bool) -> None:
    """Creates the schema if there is none, and upgrades an older one if `upgrade_older` is True.

    Raises:
        SchemaTooNew, SchemaTooOld: another version of llama-ckpt created the schema; nothing is changed.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    existing = require_known(database)
    if existing == HEAD:
        return
    if existing is not None and not upgrade_older:
        raise SchemaTooOld(url=database.shown_url, found=existing, known=HEAD)
    upgrade(database)


def upgrade(database: Database, revision: str = HEAD) -> str | None:
    """Creates the schema or upgrades it to `revision`, and gives the revision before. On SQLite and PostgreSQL this is one
    transaction: if it is interrupted, the schema is as it was. Two upgrades at the same time queue.

    Raises:
        SchemaTooNew: a newer llama-ckpt created the schema; nothing is changed.
        BadInput: there is no such revision, or it is older than the database's.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    existing = require_known(database)
    _require_revision(revision)
    if existing is not None and revision < existing:
        raise BadInput(
            what="revision to reach", value=revision, reason=f"the database is at {existing}; downgrade goes back"
        )
    if existing != revision:
        _run(database, "upgrade", revision)
    return existing


def downgrade(database: Database, revision: str) -> str | None:
    """Downgrades the schema to `revision`, and gives the revision before. "base" drops all tables of llama-ckpt with their rows.

    Raises:
        SchemaTooNew: a newer llama-ckpt created the schema; nothing is changed.
        BadInput: there is no such revision, or it is newer than the database's.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    existing = require_known(database)
    if revision != "base":
        _require_revision(revision)
        if existing is None or revision > existing:
            reason = f"the database is at {existing or 'no schema'}; llama-ckpt db upgrade goes up"
            raise BadInput(what="revision to go back to", value=revision, reason=reason)
    _run(database, "downgrade", revision)
    return existing


def check(database: Database) -> list[str]:
    """The differences between the database's schema and the one that this version expects, as sentences; empty if they agree.
    Reads only.

    Raises:
        SchemaTooNew: a newer llama-ckpt created the schema.
        DatabaseUnavailable: the database cannot be reached.
    """
    from llama_ckpt.db.comparing import differences

    require_known(database)
    with database.read() as db:
        return differences(db)


def script(dialect: str, start: str = "base", end: str = HEAD) -> str:
    """The statements from revision `start` to `end`, as a script that a DBA can read and run with psql or SQL*Plus.

    Raises:
        BadInput: the dialect is not "postgresql" or "oracle", or there is no such revision.
    """
    if dialect not in _SCRIPT_FRAMES:
        raise BadInput(what="dialect", value=dialect, reason=f"scripts are made for {' and '.join(_SCRIPT_FRAMES)}")
    for revision in {start, end} - {"base"}:
        _require_revision(revision)
    if start != "base" and start >= end:
        raise BadInput(what="--to", value=end, reason=f"a script goes up, from {start} to a later revision")
    from alembic import command

    config = _config()
    config.output_buffer = io.StringIO()
    config.attributes["dialect"] = dialect
    with _alembic:
        command.upgrade(config, f"{start}:{end}" if start != "base" else end, sql=True)
    head, tail = _SCRIPT_FRAMES[dialect]
    return f"{head}\n{config.output_buffer.getvalue().strip()}\n{tail}\n"


# Stop at the first error, take & literally, allow blank lines inside a statement. Oracle commits each DDL statement by itself,
# but the version's row is DML.
_SCRIPT_FRAMES = {
    "postgresql": ("\\set ON_ERROR_STOP on\n", ""),
    "oracle": ("WHENEVER SQLERROR EXIT FAILURE ROLLBACK\nSET DEFINE OFF\nSET SQLBLANKLINES ON\n", "\nCOMMIT;"),
}


def _require_revision(revision: str) -> None:
    if revision not in REVISIONS:
        raise BadInput(what="revision", value=revision, reason=f"known are {', '.join(REVISIONS)}")


def _run(database: Database, verb: str, revision: str) -> None:
    from alembic import command

    config = _config()
    with _alembic, database.migration() as db:
        config.attributes["connection"] = db
        getattr(command, verb)(config, revision)


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("llama_ckpt.migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
