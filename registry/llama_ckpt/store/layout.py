"""The names of the store's own files, and the walk over its folders. Opens no file, follows no symlink."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llama_ckpt.store import writers

SUFFIX = ".llam"
TEMPORARY_SUFFIX = ".tmp"
QUARANTINE = "quarantine"
PATH = re.compile(
    rf"((?P<a>[0-9a-f]{{2}})/(?P<b>[0-9a-f]{{2}})/(?P<id>(?P=a)(?P=b)[0-9a-f]{{28}})(?P<suffix>\.llam|(\.(?P<owner>{writers.TAG}))?\.tmp)"
    rf"|{QUARANTINE}/[0-9a-f]{{32}}\.llam)"
)
_SHARD = re.compile(r"[0-9a-f]{2}")


class EntryKind(StrEnum):
    """What a name in the store is, by its path. `FOREIGN`: not a name that the store gives, or not a regular file."""

    CHECKPOINT = "checkpoint"
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the store. `path` is relative to the root, times are in ns since 1970, `detail` says why it is foreign.
    `owner` is the tag of the process that writes a temporary.
    """

    path: str
    kind: EntryKind
    size_bytes: int
    mtime_ns: int
    detail: str = ""
    owner: str = ""


def is_checkpoint_path(relative: str) -> bool:
    """Whether a relative path is one that the store gives to a checkpoint's file."""
    match = PATH.fullmatch(relative)
    return match is not None and match["suffix"] == SUFFIX


def walk(root: Path) -> Iterator[Entry]:
    """Every entry in the shard folders under `root` and in its quarantine.

    Raises:
        OSError: a folder cannot be listed. Stop then: a partial list must not be taken for a complete one.
    """
    top = str(root)
    for a in _shards(top):
        for b in _shards(f"{top}/{a}"):
            yield from _entries(f"{top}/{a}/{b}", f"{a}/{b}")
    quarantine = root / QUARANTINE
    if quarantine.is_dir() and not quarantine.is_symlink():
        yield from _entries(str(quarantine), QUARANTINE)


def _shards(folder: str) -> list[str]:
    """The names of a folder's shards, in order. A store has up to 65,536 of them, so paths are joined as text."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def _entries(folder: str, relative: str) -> Iterator[Entry]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed between the listing and here
                yield _entry(entry.stat(follow_symlinks=False), f"{relative}/{entry.name}")


def _entry(status: os.stat_result, relative: str) -> Entry:
    match = PATH.fullmatch(relative)
    if not stat.S_ISREG(status.st_mode):
        return Entry(relative, EntryKind.FOREIGN, 0, status.st_mtime_ns, "not a regular file")
    if match is None:
        return Entry(relative, EntryKind.FOREIGN, status.st_size, status.st_mtime_ns, "not a name of ours")
    if match["id"] is None:
        return Entry(relative, EntryKind.QUARANTINED, status.st_size, status.st_mtime_ns)
    kind = EntryKind.CHECKPOINT if match["suffix"] == SUFFIX else EntryKind.TEMPORARY
    return Entry(relative, kind, status.st_size, status.st_mtime_ns, owner=match["owner"] or "")
