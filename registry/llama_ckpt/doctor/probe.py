"""Does the store's file system do what a save relies on? Tried with a small file of its own, which never stays.

The steps are those of `Store.write`, in a folder that neither the store's walk nor gc ever sees: create, write, fsync, rename,
fsync of the folder; then the move to another folder that a quarantine is, read back, and removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llama_ckpt.doctor.diagnosis import apart_s
from llama_ckpt.errors import LlamaCkptError, StoreUnavailable
from llama_ckpt.store import writers as owners
from llama_ckpt.store.disk import BINARY, NOFOLLOW, store_errors, write_all
from llama_ckpt.store.writers import Owner

_FOLDER = ".llama-ckpt-probe"
_OURS = re.compile(rf"{re.escape(_FOLDER)}\.(?P<owner>{owners.TAG})\.[0-9a-f]{{8}}")
_INSIDE = ("a/probe.tmp", "a/probe", "b/probe", "a", "b")
_BLOCK = 4096
_N_SYNCS = 3  # the median of them: one may have waited for what another process writes
_DAY_S = 86_400


@dataclass(slots=True)
class Probed:
    """What was measured, up to the step that failed: `failed_at`, with its `error`; both None when all of it worked.

    `fsync_s` is one fsync of 4 KiB, `clock_ahead_s` how far the file system's clock is before this host's; None: not reached.
    `syncs_folders` is False where the file system has no fsync of a folder.
    """

    failed_at: str | None = None
    error: LlamaCkptError | None = None
    fsync_s: float | None = None
    clock_ahead_s: float | None = None
    syncs_folders: bool = True
    done: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str, root: Path) -> Iterator[None]:
        """Notes a step as done, or as the one that failed."""
        try:
            with store_errors(root / _FOLDER, needed=_BLOCK):
                yield
        except LlamaCkptError as error:
            self.failed_at, self.error = name, error
            raise
        self.done.append(name)


def probe(root: Path) -> Probed:
    """Tries every step of a save in the store's folder, once, and takes away what it wrote, whatever happens.

    Only a process that is killed leaves its folder of at most 4 KiB behind, which the next probe on this machine removes (any
    machine's after a day). Never raises for what the file system does: that is in the answer.
    """
    found = Probed()
    folder = root / f"{_FOLDER}.{owners.my_tag()}.{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(LlamaCkptError):  # it is in the answer, with its step
        try:
            with found.step("create", root):
                _sweep(root)
                for new in (folder, folder / "a", folder / "b"):
                    new.mkdir(mode=0o700)
            _as_a_save(root, folder, found)
        except LlamaCkptError:
            with contextlib.suppress(OSError):  # a file system that fails may fail here too; the first failure is told
                _clear(folder)
            raise
        except BaseException:
            _clear(folder)
            raise
        with found.step("remove", root):
            _clear(folder)
    return found


def _as_a_save(root: Path, folder: Path, found: Probed) -> None:
    temporary, target, aside = folder / "a" / "probe.tmp", folder / "a" / "probe", folder / "b" / "probe"
    data = os.urandom(_BLOCK)
    before = time.time()
    _write(root, temporary, data, found)
    with found.step("write", root):
        # Asked for by name and after the close: on NFS these are the server's attributes, not what the client guessed.
        there = temporary.stat().st_mtime
        found.clock_ahead_s = apart_s(there, before, time.time())
    with found.step("rename", root):
        temporary.rename(target)
    with found.step("fsync of the folder", root):
        found.syncs_folders = _syncs(target.parent)
    with found.step("move to another folder", root):
        target.rename(aside)
    with found.step("read back", root):
        if aside.read_bytes() != data:
            raise StoreUnavailable(path=root, reason="it gives other bytes than were written")


def _write(root: Path, path: Path, data: bytes, found: Probed) -> None:
    took: list[float] = []
    with found.step("create", root):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY, 0o600)
    try:
        for _ in range(_N_SYNCS):
            with found.step("write", root):
                os.lseek(fd, 0, os.SEEK_SET)
                write_all(fd, memoryview(data))
            with found.step("fsync", root):
                started = time.perf_counter()
                os.fsync(fd)
                took.append(time.perf_counter() - started)
    finally:
        os.close(fd)
    found.fsync_s = statistics.median(took)


def _syncs(folder: Path) -> bool:
    """Whether the names in a folder can be made durable. A save goes on without, where the system says that there is no such
    thing (`disk.fsync_folder`); here it is told.
    """
    if os.name == "nt":  # Windows cannot open a folder; its rename is journalled
        return True
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        os.close(fd)
    return True


def _sweep(root: Path) -> None:
    """Removes what killed probes left."""
    with os.scandir(root) as entries:
        left = [e for e in entries if _OURS.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for entry in left:
        match = _OURS.fullmatch(entry.name)
        gone = match is not None and owners.ask(match["owner"]) is Owner.GONE
        if gone or time.time() - entry.stat(follow_symlinks=False).st_mtime > _DAY_S:
            with contextlib.suppress(OSError):  # another's, who may not be deleted: no reason to fail
                _clear(Path(entry.path))


def _clear(folder: Path) -> None:
    """Removes a probe's files and folders by their names; anything else in it stays, and so does the folder then."""
    for name in _INSIDE:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            if name in ("a", "b"):
                path.rmdir()
            else:
                path.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


# -- what the system says of the file system -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a folder's file system is mounted: its type, what is mounted, and all options."""

    point: Path
    kind: str
    source: str
    options: frozenset[str]


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that holds `path`, by the text of Linux's /proc/self/mountinfo (proc(5)); None: unknown."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, of_type = before.split(), after.split()
        if len(fields) < 6 or len(of_type) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        # Of two mounts on one point the later one is seen.
        if path.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            options = ",".join([fields[5], *of_type[2:3]]).split(",")
            best = Mount(point, of_type[0], _unescaped(of_type[1]), frozenset(options))
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), text)


def inodes(root: Path) -> tuple[int, int] | None:
    """Free inodes for a user without privileges, and all; None where the file system counts none.

    Raises:
        OSError: the system cannot say.
    """
    if not hasattr(os, "statvfs"):  # Windows
        return None
    found = os.statvfs(root)
    return (found.f_favail, found.f_files) if found.f_files else None


def devices(root: Path) -> dict[str, int]:
    """The file system's number of the root and of each folder directly in it, by name (the root: "").

    Raises:
        OSError: a folder cannot be asked.
    """
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return {"": root.stat().st_dev} | {name: (root / name).lstat().st_dev for name in folders}
