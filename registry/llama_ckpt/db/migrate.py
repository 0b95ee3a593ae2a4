"""The schema's version: read without alembic, changed with it."""

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
_alembic = threading.Lock()  # its context is a global of the process


def current(database: Database) -> str | None:
    """The revision the database is at; None for a database without our tables. Reads only.

    Raises:
        DatabaseUnavailable: the database cannot be reached.
    """
    with database.read() as db:
        if not sa.inspect(db).has_table(VERSION_TABLE):
            return None
        table = sa.table(VERSION_TABLE, sa.column("version_num"))
        return db.scalar(sa.select(table.c.version_num))


def require_known(database: Database) -> str | None:
    """The revision the database is at, held to those this code knows.

    Raises:
        SchemaTooNew: a newer llama-ckpt made it.
        DatabaseUnavailable: the database cannot be reached.
    """
    found = current(database)
    if found is not None and found not in REVISIONS:
        raise SchemaTooNew(url=database.shown_url, found=found, known=HEAD)
    return found


def prepare(database: Database, *, upgrade_older: bool) -> None:
    """Makes sure that the schema is this version's: created where there is none, upgraded where that is wanted.

    Raises:
        SchemaTooNew, SchemaTooOld: another version of llama-ckpt made it; nothing is changed.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    found = require_known(database)
    if found == HEAD:
        return
    if found is not None and not upgrade_older:
        raise SchemaTooOld(url=database.shown_url, found=found, known=HEAD)
    upgrade(database)


def upgrade(database: Database, revision: str = HEAD) -> str | None:
    """Creates the schema or brings it up to `revision`, and gives the revision found before. One transaction where the database
    can (SQLite, PostgreSQL): if it is interrupted, the schema is as it was. Two that upgrade at once queue.

    Raises:
        SchemaTooNew: a newer llama-ckpt made it; nothing is changed.
        BadInput: no such revision.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    found = require_known(database)
    _require_revision(revision)
    if found is not None and revision < found:
        raise BadInput(
            what="revision to reach", value=revision, reason=f"the database is at {found}; downgrade goes back"
        )
    if found != revision:
        _run(database, "upgrade", revision)
    return found


def downgrade(database: Database, revision: str) -> str | None:
    """Takes the schema back to `revision` ("base": none of our tables, and no row), and gives the revision found before.

    Raises:
        SchemaTooNew: a newer llama-ckpt made it; nothing is changed.
        BadInput: no such revision.
        DatabaseUnavailable: the database cannot be reached or written.
    """
    found = require_known(database)
    if revision != "base":
        _require_revision(revision)
        if found is None or revision > found:
            reason = f"the database is at {found or 'no schema'}; llama-ckpt db upgrade goes up"
            raise BadInput(what="revision to go back to", value=revision, reason=reason)
    _run(database, "downgrade", revision)
    return found


def check(database: Database) -> list[str]:
    """What differs between the database's schema and the one this version expects, in sentences; nothing when they agree.
    Reads only.

    Raises:
        SchemaTooNew: a newer llama-ckpt made it.
        DatabaseUnavailable: the database cannot be reached.
    """
    from llama_ckpt.db.comparing import differences

    require_known(database)
    with database.read() as db:
        return differences(db)


def script(dialect: str, start: str = "base", end: str = HEAD) -> str:
    """The statements from revision `start` to `end` as a script that a DBA can read and run with psql or SQL*Plus.

    Raises:
        BadInput: another dialect than "postgresql" and "oracle", or no such revision.
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


# Stop at the first error; take & in a text for itself; allow blank lines inside a statement. Oracle commits each DDL by
# itself, but the version's row is DML.
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
