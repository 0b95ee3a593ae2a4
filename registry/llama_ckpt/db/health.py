"""What `doctor` asks a database about itself and about what runs over it. Nothing here commits or changes a row."""

from __future__ import annotations

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_info


def n_files_named(db: sa.Connection) -> tuple[int, int]:
    """How many ACTIVE rows name a file, and how many rows in all do."""
    query = sa.select(meta.c.status, sa.func.count()).where(meta.c.file_size > 0).group_by(meta.c.status)
    counts = {str(status): int(n) for status, n in db.execute(query)}
    return counts.get(ACTIVE, 0), sum(counts.values())


def product(db: sa.Connection) -> str:
    """The database's name and version, e.g. "PostgreSQL 16.4"."""
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "oracle": "Oracle"}
    version = ".".join(str(part) for part in db.dialect.server_version_info or ())
    return f"{names.get(db.dialect.name, db.dialect.name)} {version}".strip()


def write_nothing(db: sa.Connection) -> None:
    """A write that changes no row, in a transaction for writing: it fails where a real one would, for want of rights, on a
    standby, on a read-only file.
    """
    db.execute(sa.update(registry_info).where(registry_info.c.name == "").values(value=""))


def journal_mode(db: sa.Connection) -> str:
    """SQLite's journal mode: "wal" as we set it; another one where the file cannot be changed."""
    return str(db.exec_driver_sql("PRAGMA journal_mode").scalar_one()).lower()


def quick_check(db: sa.Connection, at_most: int = 3) -> list[str]:
    """SQLite's own complaints about the structure of its file; an empty list is a sound one. Reads the whole file."""
    rows = db.exec_driver_sql(f"PRAGMA quick_check({int(at_most)})").scalars()
    lines = [line for row in rows for line in str(row).splitlines()]
    return [
        line for line in lines if line != "ok" and not line.startswith("***")
    ]  # a heading: "*** in database main ***"
