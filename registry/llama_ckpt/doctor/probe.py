"""Try with a small file whether the store's file system does what a save relies on.

The steps are those of `Store.write`, in a folder that neither the store's walk nor gc sees: create, write, fsync, rename,
fsync of the folder; then a move to another folder, as into quarantine; read back; remove.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llama_ckpt.doctor.diagnosis import clock_ahead_s
from llama_ckpt.errors import LlamaCkptError, StoreUnavailable
from llama_ckpt.store import writers
from llama_ckpt.store.disk import BINARY, NOFOLLOW, fsync_folder, store_errors, write_all
from llama_ckpt.store.writers import Owner

_FOLDER = ".llama-ckpt-probe"
_PROBE_NAME = re.compile(rf"{re.escape(_FOLDER)}\.(?P<owner>{writers.TAG})\.[0-9a-f]{{8}}")
_CONTENTS = ("a/probe.tmp", "a/probe", "b/probe", "a", "b")
_PROBE_BYTES = 4096
_N_FSYNCS = 3  # the median counts: one of them may have waited for another process's writes
_DAY_S = 86_400


@dataclass(slots=True)
class ProbeResult:
    """The measurements up to the step that failed: `failed_at`, with its `error`; both None if no step failed.

    `fsync_s` is the duration of one fsync of 4 KiB, `clock_ahead_s` how far the file system's clock is ahead of this host's;
    None if the step was not reached. `syncs_folders` is False if the file system has no fsync of folders.
    """

    failed_at: str | None = None
    error: LlamaCkptError | None = None
    fsync_s: float | None = None
    clock_ahead_s: float | None = None
    syncs_folders: bool = True
    done: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str, root: Path) -> Iterator[None]:
        """Records a step as done, or as the one that failed."""
        try:
            with store_errors(root / _FOLDER, needed=_PROBE_BYTES):
                yield
        except LlamaCkptError as error:
            self.failed_at, self.error = name, error
            raise
        self.done.append(name)


def probe(root: Path) -> ProbeResult:
    """Tries every step of a save once in the store's folder, and removes its files in any case.

    Only a process that is killed leaves its folder of at most 4 KiB behind. The next probe on this machine removes it; a probe
    on another machine removes it after a day. Never raises for a fault of the file system: the result has it.
    """
    result = ProbeResult()
    folder = root / f"{_FOLDER}.{writers.my_tag()}.{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(LlamaCkptError):  # it is in the answer, with its step
        try:
            with result.step("create", root):
                _remove_left_over(root)
                for new in (folder, folder / "a", folder / "b"):
                    new.mkdir(mode=0o700)
            _save_like(root, folder, result)
        except LlamaCkptError:
            with contextlib.suppress(OSError):  # a faulty file system may fail here too; the first failure is reported
                _clear(folder)
            raise
        except BaseException:
            _clear(folder)
            raise
        with result.step("remove", root):
            _clear(folder)
    return result


def _save_like(root: Path, folder: Path, result: ProbeResult) -> None:
    """The steps of a save and of a quarantine."""
    temporary, target, moved = folder / "a" / "probe.tmp", folder / "a" / "probe", folder / "b" / "probe"
    data = os.urandom(_PROBE_BYTES)
    before = time.time()
    _write(root, temporary, data, result)
    with result.step("write", root):
        # By name and after the close: on NFS these are the server's attributes, not the client's cached ones.
        written_at = temporary.stat().st_mtime
        result.clock_ahead_s = clock_ahead_s(written_at, before, time.time())
    with result.step("rename", root):
        temporary.rename(target)
    with result.step("fsync of the folder", root):
        result.syncs_folders = fsync_folder(target.parent)
    with result.step("move to another folder", root):
        target.rename(moved)
    with result.step("read back", root):
        if moved.read_bytes() != data:
            raise StoreUnavailable(path=root, reason="it gives other bytes than were written")


def _write(root: Path, path: Path, data: bytes, result: ProbeResult) -> None:
    took: list[float] = []
    with result.step("create", root):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY, 0o600)
    try:
        for _ in range(_N_FSYNCS):
            with result.step("write", root):
                os.lseek(fd, 0, os.SEEK_SET)
                write_all(fd, memoryview(data))
            with result.step("fsync", root):
                started = time.perf_counter()
                os.fsync(fd)
                took.append(time.perf_counter() - started)
    finally:
        os.close(fd)
    result.fsync_s = statistics.median(took)


def _remove_left_over(root: Path) -> None:
    """Removes the folders of probes that were killed."""
    with os.scandir(root) as entries:
        left = [e for e in entries if _PROBE_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for entry in left:
        match = _PROBE_NAME.fullmatch(entry.name)
        gone = match is not None and writers.ask(match["owner"]) is Owner.GONE
        if gone or time.time() - entry.stat(follow_symlinks=False).st_mtime > _DAY_S:
            with contextlib.suppress(OSError):  # another user's folder, which we may not delete: no reason to fail
                _clear(Path(entry.path))


def _clear(folder: Path) -> None:
    """Removes a probe's files and folders by their names. A folder with any other content stays."""
    for name in _CONTENTS:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            if name in ("a", "b"):
                path.rmdir()
            else:
                path.unlink()
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


# -- facts about the file system -----------------------------------------------------------------------------------------


def inodes(root: Path) -> tuple[int, int] | None:
    """Free inodes for a user without privileges, and all inodes; None if the file system does not count them.

    Raises:
        OSError: the system cannot say.
    """
    if not hasattr(os, "statvfs"):  # Windows
        return None
    status = os.statvfs(root)
    return (status.f_favail, status.f_files) if status.f_files else None


def devices(root: Path) -> dict[str, int]:
    """The device number of the root and of each folder directly in it, by name (the root: "").

    Raises:
        OSError: a folder cannot be read.
    """
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return {"": root.stat().st_dev} | {name: (root / name).lstat().st_dev for name in folders}
