"""Alembic's entry: over a given connection (from the product), or over LLAMA_CKPT_DATABASE_URL (from a checkout)."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from llama_ckpt.db.tables import VERSION_TABLE, metadata


def run(connection: Connection) -> None:
    """Runs the migrations on `connection`. The caller owns the transaction where it has begun one."""
    context.configure(
        connection=connection, target_metadata=metadata, version_table=VERSION_TABLE, render_as_batch=True
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from llama_ckpt.db.connect import Database

    url = os.environ.get("LLAMA_CKPT_DATABASE_URL")
    if not url:
        raise SystemExit("set LLAMA_CKPT_DATABASE_URL to the database to migrate, e.g. sqlite:////tmp/registry.sqlite3")
    database = Database(url)
    with database.migration() as migrating:
        run(migrating)
    database.close()
