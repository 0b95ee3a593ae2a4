"""What lies in a folder: every file told apart by its content, folders of other programs recognised. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.errors import FileMissing, LlamaCkptError, StoreUnavailable
from llama_ckpt.exchange.foreign import ForeignFolder, recognise
from llama_ckpt.store.disk import map_file, store_errors

# To open and close a database drops the locks that this process has on it (POSIX), so these are not looked into.
_DATABASES = (".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".sqlite3-journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One thing in a folder: a file and what it is (`found`), a folder of another program, or what could not be looked at and
    why (`problem`).
    """

    path: Path
    size_bytes: int = 0
    found: formats.Identified | None = None
    folder: ForeignFolder | None = None
    problem: str | None = None


def survey(folder: Path) -> Iterator[Surveyed]:
    """Everything under a folder, in order of its names. A folder of another program is one entry, and nothing in it is opened;
    symlinks are named and not followed. Reads every byte of what has a checksum.

    Raises:
        StoreUnavailable: the folder itself cannot be listed. One in it that cannot is an entry with its `problem`.
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
        elif (one := _file(path)) is not None:
            yield one


def _file(path: Path) -> Surveyed | None:
    """One file; None where it went meanwhile."""
    if path.name.endswith(_DATABASES):
        return Surveyed(path=path, problem="a database, which is not opened")
    try:
        with map_file(path) as view:
            return Surveyed(path=path, size_bytes=len(view), found=formats.identify(view, str(path)))
    except FileMissing:
        return None
    except LlamaCkptError as error:
        return Surveyed(path=path, problem=str(error))
