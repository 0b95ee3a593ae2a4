"""Databases for tests: one as new, without making its schema again, and one of a PostgreSQL server for a while."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import sqlalchemy as sa

from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta, metadata, registry_info, registry_lease, save_claim

POSTGRESQL = os.environ.get("LLAMA_CKPT_TEST_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres")


@contextlib.contextmanager
def temporary_database(server_url: str) -> Iterator[str]:
    """The URL of a new database on a PostgreSQL server, without a schema; it is dropped at the end.

    Raises:
        sqlalchemy.exc.OperationalError: there is no such server.
    """
    url = sa.make_url(server_url)
    name = f"llama_ckpt_test_{uuid.uuid4().hex[:12]}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 3})
    try:
        with server.connect() as db:
            db.exec_driver_sql(f"CREATE DATABASE {name}")
        try:
            yield url.set(database=name).render_as_string(hide_password=False)
        finally:
            with server.connect() as db:
                db.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        server.dispose()


def empty(url: str) -> None:
    """Deletes every row of ours and draws a new registry id."""
    database = Database(url)
    with database.write() as db:
        db.execute(sa.update(llama_checkpoint_meta).values(parent_no=None, start_token=0))
        for table in reversed(metadata.sorted_tables):
            if table not in (registry_lease, save_claim):
                db.execute(sa.delete(table))
        db.execute(sa.delete(save_claim).where(save_claim.c.holder != "budget"))
        db.execute(sa.update(registry_lease).values(holder=None, fence=0, expires_us=0))
        db.execute(sa.insert(registry_info).values(name="registry_id", value=uuid.uuid4().hex))
    database.close()


def waits_for_a_lock(database: Database) -> bool:
    """Whether a connection to this PostgreSQL database waits for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with database.read() as db:
        return bool(db.scalar(sa.text(waiting)))
