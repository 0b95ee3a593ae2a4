"""Recognise other programs' folders and count their entries, without changing or running anything in them.

llama-cpp-python's `LlamaDiskCache` keeps pickles of `LlamaState` in a folder of the package diskcache: `cache.db` (SQLite)
lists the entries; values of 32 KiB and more are files beside it, `ab/cd/….val` (diskcache 5.6.3, core.py). A pickle runs code
when it is read, so the entries are counted and measured, and never opened.
"""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt.errors import StoreUnavailable

DATABASE = "cache.db"
_COLUMNS = {"key", "raw", "size", "mode", "filename", "value"}
_PICKLE = 4  # diskcache's MODE_PICKLE
_HEAD_BYTES = 4096
# The head of every pickle of a LlamaState contains the names of its module and class.
_STATE_NAMES = (b"llama_cpp.llama", b"LlamaState")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFolder:
    """A folder of diskcache. `entry_bytes` is the size of the values by its database, `disk_bytes` that of all files.

    `of_llama` says whether the checked entry is a pickled `LlamaState`: then the folder is a `LlamaDiskCache`, else another
    program's. `n_missing` is the number of entries whose file does not exist, `n_orphans` that of files without an entry.
    """

    path: Path
    what: str
    of_llama: bool
    n_entries: int
    entry_bytes: int
    disk_bytes: int
    n_missing: int
    n_orphans: int
    limit_bytes: int | None

    @property
    def why_not(self) -> str:
        """Why nothing in it can be restored."""
        return (
            "its entries are Python pickles, which run code when they are read: they are counted and never opened. "
            "Evaluate the inputs again, or save them from the program that holds them"
        )


def recognise(folder: Path) -> ForeignFolder | None:
    """The kind of another program's folder and its number of entries and bytes; None for a folder that is not recognised.

    Reads names, sizes, `cache.db` and the first 4 KiB of one value. Writes nothing into the folder and follows no symlink.

    Raises:
        StoreUnavailable: the folder cannot be read, or its `cache.db` is damaged.
    """
    database = folder / DATABASE
    try:
        if database.is_symlink() or not database.is_file():
            return None
        with _opened(database) as db:
            columns = {row[1] for row in db.execute("PRAGMA table_info(Cache)")}
            return _diskcache(folder, db) if columns >= _COLUMNS else None
    except sqlite3.Error as error:
        raise StoreUnavailable(path=database, reason=f"it is no SQLite database that can be read: {error}") from error
    except OSError as error:
        raise StoreUnavailable(path=folder, reason=error.strerror or str(error)) from error


@contextmanager
def _opened(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection that changes nothing. SQLite reads a write-ahead log only if it may write, so such a database is copied."""
    log = database.with_name(database.name + "-wal")
    if not log.is_file() or log.is_symlink() or log.stat().st_size == 0:
        with closing(_connect(database)) as db:
            yield db
        return
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-") as scratch:
        copy = Path(scratch) / DATABASE
        shutil.copyfile(database, copy, follow_symlinks=False)
        shutil.copyfile(log, copy.with_name(log.name), follow_symlinks=False)
        with closing(sqlite3.connect(copy)) as db:
            yield db


def _connect(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def _diskcache(folder: Path, db: sqlite3.Connection) -> ForeignFolder:
    n_entries, entry_bytes = db.execute(
        "SELECT count(*), total(CASE WHEN filename IS NULL THEN length(CAST(value AS BLOB)) ELSE size END) FROM Cache"
    ).fetchone()
    named = {str(name) for (name,) in db.execute("SELECT filename FROM Cache WHERE filename IS NOT NULL")}
    on_disk, disk_bytes = _files(folder)
    of_llama = _holds_states(folder, db, on_disk)
    what = "a LlamaDiskCache of llama-cpp-python" if of_llama else "a folder of the Python package diskcache"
    return ForeignFolder(
        path=folder,
        what=what,
        of_llama=of_llama,
        n_entries=int(n_entries),
        entry_bytes=int(entry_bytes) if math.isfinite(entry_bytes) else 0,
        disk_bytes=disk_bytes,
        n_missing=len(named - on_disk),
        n_orphans=len(on_disk - named),
        limit_bytes=_limit(db),
    )


def _files(folder: Path) -> tuple[set[str], int]:
    """The value files, by the names that the database uses, and the size of all files in bytes."""
    values, total = set(), 0
    for top, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            path = Path(top) / name
            total += path.lstat().st_size
            if name.endswith(".val") and not path.is_symlink():
                values.add(path.relative_to(folder).as_posix())
    return values, total


def _holds_states(folder: Path, db: sqlite3.Connection, on_disk: set[str]) -> bool:
    """Whether the first readable entry is a pickled `LlamaState`, by the names in its head."""
    rows = db.execute("SELECT filename, substr(value, 1, ?) FROM Cache WHERE mode = ?", (_HEAD_BYTES, _PICKLE))
    for filename, value in rows:
        if filename is None:
            head = value if isinstance(value, bytes) else b""
        elif filename.replace("\\", "/") in on_disk:
            with (folder / filename).open("rb") as file:
                head = file.read(_HEAD_BYTES)
        else:
            continue
        return all(name in head for name in _STATE_NAMES)
    return False


def _limit(db: sqlite3.Connection) -> int | None:
    try:
        row = db.execute("SELECT value FROM Settings WHERE key = 'size_limit'").fetchone()
    except sqlite3.OperationalError:  # no such table: another version of diskcache
        return None
    return int(row[0]) if row and isinstance(row[0], int) else None
