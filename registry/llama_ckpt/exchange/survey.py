"""Survey a folder: identify every file by its content, and recognise other programs' folders. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.errors import FileMissing, LlamaCkptError, StoreUnavailable
from llama_ckpt.exchange.foreign import ForeignFolder, recognise
from llama_ckpt.store.disk import map_file, store_errors

# Opening and closing a database file drops the locks that this process has on it (POSIX), so these are not opened.
_DATABASE_SUFFIXES = (".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".sqlite3-journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One entry of a folder: a file (`found` says what it is), a folder of another program (`folder`), or an entry that could
    not be read (`problem` says why).
    """

    path: Path
    size_bytes: int = 0
    found: formats.Identified | None = None
    folder: ForeignFolder | None = None
    problem: str | None = None


def survey(folder: Path) -> Iterator[Surveyed]:
    """Every entry under a folder, in order of the names. A folder of another program is one entry and is not entered; symlinks
    are reported and not followed. Reads every byte of a file that has a checksum.

    Raises:
        StoreUnavailable: the folder itself cannot be listed. A subfolder that cannot be listed is an entry with a `problem`.
    """
    foreign = recognise(folder) if folder.is_dir() else None
    if foreign is not None:
        yield Surveyed(path=folder, size_bytes=foreign.disk_bytes, folder=foreign)
        return
    with store_errors(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        if path.is_symlink():
            yield Surveyed(path=path, problem="a symlink, which is not followed")
        elif path.is_dir():
            try:
                yield from survey(path)
            except StoreUnavailable as error:
                yield Surveyed(path=path, problem=str(error))
        elif (entry := _file(path)) is not None:
            yield entry


def _file(path: Path) -> Surveyed | None:
    """One file; None if it was removed after the folder was listed."""
    if path.name.endswith(_DATABASE_SUFFIXES):
        return Surveyed(path=path, problem="a database, which is not opened")
    try:
        with map_file(path) as view:
            return Surveyed(path=path, size_bytes=len(view), found=formats.identify(view, str(path)))
    except FileMissing:
        return None
    except LlamaCkptError as error:
        return Surveyed(path=path, problem=str(error))
