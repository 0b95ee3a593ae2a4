"""What lies in a store: the names that are ours, and the walk over its folders. Opens no file, follows no symlink."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt.store import writers as owners

SUFFIX = ".llam"
TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = "quarantine"
PATH = re.compile(
    rf"((?P<a>[0-9a-f]{{2}})/(?P<b>[0-9a-f]{{2}})/(?P<id>(?P=a)(?P=b)[0-9a-f]{{28}})(?P<suffix>\.llam|(\.(?P<owner>{owners.TAG}))?\.tmp)"
    rf"|{QUARANTINE}/[0-9a-f]{{32}}\.llam)"
)
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing found in the store. `kind` is "checkpoint", "temporary", "quarantined" or "foreign"; times in ns since 1970.
    `owner` is the tag of the process that writes a temporary.
    """

    path: str
    kind: str
    size_bytes: int
    mtime_ns: int
    detail: str = ""
    owner: str = ""


def walk(root: Path) -> Iterator[Entry]:
    """Everything in the shard folders under `root` and its quarantine.

    Raises:
        OSError: a folder cannot be listed. A partial list is never taken for a whole one.
    """
    top = str(root)
    for a in _shards(top):
        for b in _shards(f"{top}/{a}"):
            yield from _entries(f"{top}/{a}/{b}", f"{a}/{b}")
    aside = root / QUARANTINE
    if aside.is_dir() and not aside.is_symlink():
        yield from _entries(str(aside), QUARANTINE)


def _shards(folder: str) -> list[str]:
    """The names of a folder's shards, in order. A store has up to 65,536 of them: paths are put together as text."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def _entries(folder: str, relative: str) -> Iterator[Entry]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed between the listing and here
                yield _entry(entry.stat(follow_symlinks=False), f"{relative}/{entry.name}")


def _entry(found: os.stat_result, relative: str) -> Entry:
    match = PATH.fullmatch(relative)
    if not stat.S_ISREG(found.st_mode):
        return Entry(relative, "foreign", 0, found.st_mtime_ns, "not a regular file")
    if match is None:
        return Entry(relative, "foreign", found.st_size, found.st_mtime_ns, "not a name of ours")
    if match["id"] is None:
        return Entry(relative, "quarantined", found.st_size, found.st_mtime_ns)
    kind = "checkpoint" if match["suffix"] == SUFFIX else "temporary"
    return Entry(relative, kind, found.st_size, found.st_mtime_ns, owner=match["owner"] or "")
