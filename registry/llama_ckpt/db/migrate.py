"""The schema's version: read without alembic, changed with it."""

from __future__ import annotations

import uuid
from importlib.resources import files

import sqlalchemy as sa

from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import VERSION_TABLE, registry_info
from llama_ckpt.errors import SchemaTooNew

REVISIONS = ("0001", "0002")
HEAD = REVISIONS[-1]


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


def upgrade(database: Database) -> str | None:
    """Creates the schema or brings it to HEAD, and gives the revision found before. One transaction where the database
    can (SQLite, PostgreSQL): if it is interrupted, the schema is as it was.

    Raises:
        SchemaTooNew: a newer llama-ckpt made it; nothing is changed.
        DatabaseUnavailable: the database cannot be reached or written.

    """
    found = require_known(database)
    if found == HEAD:
        return found
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("llama_ckpt.migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with database.migration() as db:
        config.attributes["connection"] = db
        command.upgrade(config, "head")
        if (
            found is None
            and db.scalar(sa.select(registry_info.c.value).where(registry_info.c.name == "registry_id")) is None
        ):
            db.execute(sa.insert(registry_info).values(name="registry_id", value=uuid.uuid4().hex))
    return found
