"""The statements of `doctor`: a database's product, settings and structure. Nothing here commits or changes a row."""

from __future__ import annotations

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_info


def n_files_named(db: sa.Connection) -> tuple[int, int]:
    """The number of ACTIVE rows with a file, and the number of all rows with a file."""
    query = sa.select(meta.c.status, sa.func.count()).where(meta.c.file_size > 0).group_by(meta.c.status)
    counts = {str(status): int(n) for status, n in db.execute(query)}
    return counts.get(ACTIVE, 0), sum(counts.values())


def product(db: sa.Connection) -> str:
    """The database's name and version, e.g. "PostgreSQL 16.4"."""
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "oracle": "Oracle"}
    version = ".".join(str(part) for part in db.dialect.server_version_info or ())
    return f"{names.get(db.dialect.name, db.dialect.name)} {version}".strip()


def write_nothing(db: sa.Connection) -> None:
    """Writes without changing a row. Fails where a real write would: without the right to write, on a standby server, on a
    read-only file.
    """
    db.execute(sa.update(registry_info).where(registry_info.c.name == "").values(value=""))


def journal_mode(db: sa.Connection) -> str:
    """SQLite's journal mode: "wal" as `connect` sets it; another one if the file cannot be changed."""
    return str(db.exec_driver_sql("PRAGMA journal_mode").scalar_one()).lower()


def quick_check(db: sa.Connection, at_most: int = 3) -> list[str]:
    """The errors that SQLite finds in the structure of its file; empty for a sound one. Reads the complete file."""
    rows = db.exec_driver_sql(f"PRAGMA quick_check({int(at_most)})").scalars()
    lines = [line for row in rows for line in str(row).splitlines()]
    return [
        line for line in lines if line != "ok" and not line.startswith("***")
    ]  # a heading: "*** in database main ***"
