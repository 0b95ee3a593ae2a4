"""Which files an adoption looks at: those that were named, and every file in the folders that were named."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt.errors import LlamaCkptError, StoreUnavailable, Unsupported
from llama_ckpt.exchange import foreign


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that may be a checkpoint. `is_named`: the caller named it; else it is in a folder that the caller named."""

    path: Path
    is_named: bool


@dataclass(frozen=True, slots=True)
class UnreadFolder:
    """A folder that is not entered, and why. `is_refused` is False for a folder of a program that keeps no checkpoints."""

    path: Path
    error: LlamaCkptError
    is_refused: bool = True


def candidates(paths: Sequence[Path]) -> Iterator[Candidate | UnreadFolder]:
    """The files at these paths and in these folders, folder by folder in order of the names. No symlink is followed."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            yield from _in_folder(path)
        else:
            yield Candidate(path, is_named=True)


def _in_folder(top: Path) -> Iterator[Candidate | UnreadFolder]:
    """The files in a folder. A folder of another program is one entry and is not entered."""
    unlisted: list[OSError] = []
    for name, folders, names in os.walk(top, onerror=unlisted.append):
        folder = Path(name)
        try:
            other = foreign.recognise(folder)
        except StoreUnavailable as error:
            yield UnreadFolder(folder, error)
            other = None
        if other is not None:
            folders.clear()
            reason = Unsupported(what=f"adopting {other.what}", reason=other.why_not)
            yield UnreadFolder(folder, reason, is_refused=other.of_llama)
            continue
        folders.sort()
        for file_name in sorted(names):
            yield Candidate(folder / file_name, is_named=False)
    for failed in unlisted:
        path = Path(failed.filename or top)
        yield UnreadFolder(path, StoreUnavailable(path=path, reason=failed.strerror or str(failed)))


def why_not_a_file(path: Path) -> str | None:
    """Why a directory entry is not a regular file that can be read; None if it is one."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISREG(mode):
        return None
    return "a symlink" if stat.S_ISLNK(mode) else "not a regular file"
