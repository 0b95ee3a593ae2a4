"""Databases to measure on: SQLite beside the files, and a PostgreSQL server if one answers."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import sqlalchemy as sa

SERVER = os.environ.get("LLAMA_CKPT_BENCH_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres")


def why_no_server() -> str:
    """Why PostgreSQL is not measured; empty if a server answers."""
    try:
        with _server().connect():
            return ""
    except (sa.exc.OperationalError, ModuleNotFoundError) as error:
        return str(error).splitlines()[0]


def server_version() -> dict[str, str]:
    """The version of the server by its name; empty if none answers."""
    if why_no_server():
        return {}
    with _server().connect() as db:
        return {"postgresql": str(db.exec_driver_sql("SHOW server_version").scalar())}


def _server() -> sa.Engine:
    url = sa.make_url(SERVER)
    return sa.create_engine(
        url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool, connect_args={"connect_timeout": 3}
    )


@contextlib.contextmanager
def database_url(kind: str) -> Iterator[str | None]:
    """The URL of an empty database: None for SQLite beside the files; for "postgresql" one that is dropped at the end."""
    if kind == "sqlite":
        yield None
        return
    name, server = f"llama_ckpt_bench_{uuid.uuid4().hex[:12]}", _server()
    with server.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(SERVER).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as db:
            db.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
