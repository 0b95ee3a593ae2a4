"""Alembic's entry point. Runs over the connection that llama-ckpt gives, or in a checkout over LLAMA_CKPT_DATABASE_URL."""

from __future__ import annotations

import os

from alembic import context
from alembic.ddl.oracle import OracleImpl
from sqlalchemy import Connection, Table

from llama_ckpt.db.tables import VERSION_TABLE, metadata


class ScriptableOracle(OracleImpl):
    """Alembic's implementation without `INSERT … RETURNING … INTO :ret_0`: a script cannot bind the returned value."""

    __dialect__ = "oracle"

    def version_table_impl(self, **options: object) -> Table:
        """The version table, whose inserts return nothing."""
        table = super().version_table_impl(**options)  # type: ignore[arg-type]
        table.implicit_returning = False
        return table


def run(connection: Connection) -> None:
    """Runs the migrations on `connection`. If the caller has begun a transaction, the caller ends it."""
    context.configure(
        connection=connection, target_metadata=metadata, version_table=VERSION_TABLE, render_as_batch=True
    )
    with context.begin_transaction():
        context.run_migrations()


def write_script(dialect: str) -> None:
    """Writes the statements to the configuration's buffer, and runs none."""
    context.configure(
        dialect_name=dialect, target_metadata=metadata, version_table=VERSION_TABLE, literal_binds=True, as_sql=True
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    """Writes a script, or runs the migrations over the given connection or over the URL in the environment."""
    given = context.config.attributes
    if context.is_offline_mode():
        write_script(given.get("dialect") or os.environ.get("LLAMA_CKPT_SCRIPT_DIALECT", "postgresql"))
    elif "connection" in given:
        run(given["connection"])
    else:
        from llama_ckpt.db.connect import Database

        url = os.environ.get("LLAMA_CKPT_DATABASE_URL")
        if not url:
            raise SystemExit(
                "set LLAMA_CKPT_DATABASE_URL to the database to migrate, e.g. sqlite:////tmp/registry.sqlite3"
            )
        database = Database(url)
        with database.migration() as migrating:
            run(migrating)
        database.close()


main()
