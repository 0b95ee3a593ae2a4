"""The store: a folder of checkpoint files, addressed by relative paths.

Layout: `<root>/ab/cd/<id>.llam`, where `<id>` is 32 hex digits that start with `abcd`; `<id>.<owner>.tmp` while it is written;
`quarantine/<id>.llam` after it was found unreadable; a marker file with the registry's id. Names are generated, never taken
from input; nothing outside the root is opened or unlinked, and no symlink is followed. Folders have mode 0700 and files 0600: a
KV file is a transcript.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_ckpt.errors import Conflict, FileMissing, StoreFull, UnsafePath
from llama_ckpt.store import marker, writers
from llama_ckpt.store.disk import (
    BINARY,
    NOFOLLOW,
    NONBLOCK,
    copy_rest,
    fsync_folder,
    link_file,
    map_file,
    put_in_place,
    read_start,
    store_errors,
    write_all,
    write_with_holes,
)
from llama_ckpt.store.layout import PATH, QUARANTINE, SUFFIX, TEMPORARY_SUFFIX, Entry, walk

_HEAD_BYTES = 256

StepHook = Callable[[str], None]


def no_hook(_step: str) -> None:
    """The default hook, which does nothing. Tests replace it by one that raises or exits at a named step."""


def path_of(checkpoint_id: str) -> str:
    """The relative path of a checkpoint's file, with forward slashes on every system."""
    return f"{checkpoint_id[:2]}/{checkpoint_id[2:4]}/{checkpoint_id}{SUFFIX}"


class Store:
    """A folder of checkpoint files.

    `drop_page_cache` drops the written pages from the page cache after the fsync, for hosts that save much and read little.
    """

    def __init__(self, root: Path, *, drop_page_cache: bool = False, hook: StepHook = no_hook) -> None:
        self.root = root
        self._drop_page_cache = drop_page_cache
        self._hook = hook

    def create(self) -> None:
        """Creates the root with mode 0700 if it does not exist.

        Raises:
            StoreUnavailable: it cannot be created, or is not a folder.
        """
        with store_errors(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, registry_id: str) -> None:
        """Marks the store as this registry's. A store that has a readable marker stays as it is.

        Raises:
            StoreUnavailable: the marker cannot be written.
        """
        marker.claim(self.root, registry_id)

    def owner(self) -> str | None:
        """The id of the registry that the store is marked for; None if it has no readable marker."""
        return marker.owner(self.root)

    def require_owner(self, registry_id: str, *, unmarked: bool) -> None:
        """Checks that the store is marked for this registry. With `unmarked`, a store without a marker passes too.

        Raises:
            StoreUnavailable: the marker names another registry, or there is none.
        """
        marker.require_owner(self.root, registry_id, unmarked=unmarked)

    def free_bytes(self) -> int:
        """Free bytes of the file system, as a user without privileges sees them."""
        return self.space()[0]

    def space(self) -> tuple[int, int]:
        """Free and total bytes of the file system, as a user without privileges sees them.

        Raises:
            StoreUnavailable: the system gives no answer.
        """
        with store_errors(self.root):
            usage = shutil.disk_usage(self.root)
            return usage.free, usage.total

    def write(self, checkpoint_id: str, head: bytes, payload: memoryview) -> int:
        """Writes a checkpoint file and gives its size in bytes: staged, length checked, fsync, rename, folder fsync.

        If it fails, or an exception such as KeyboardInterrupt ends it, there is no file. If the process is killed, there is at
        most a temporary file. A file gets its name only after it is complete and durable.

        Raises:
            StoreFull: there is not enough free space before the write, or the system says so while writing.
            StoreUnavailable: any other failure of the file system.
        """
        size = len(head) + payload.nbytes

        def fill(fd: int) -> None:
            write_all(fd, memoryview(head))
            self._hook("head")
            write_with_holes(fd, payload)

        return self._put(checkpoint_id, size, fill)

    def copy_in(self, checkpoint_id: str, source: Path, content: memoryview) -> int:
        """Copies a checkpoint file from elsewhere into the store, in the steps of `write`, and gives its size in bytes. `content`
        is the mapped content of `source`, without padding before it.

        Raises:
            Conflict: there is a file of that id already; it stays.
            StoreFull, StoreUnavailable: as `write`, or the source cannot be read.
        """
        with store_errors(source):
            of_source = os.open(source, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
        try:
            return self._put(checkpoint_id, content.nbytes, lambda fd: copy_rest(of_source, fd, content), is_named=True)
        finally:
            os.close(of_source)

    def link_in(self, checkpoint_id: str, source: Path) -> int:
        """Adds a hard link to a checkpoint file from elsewhere, and gives its size in bytes. Both names share the bytes from then
        on, and the mode, which becomes 0600: a change through one name is visible through the other.

        Raises:
            Conflict: there is a file of that id already; it stays.
            BadInput: it is on another file system, or the file system has no hard links.
            StoreUnavailable: the system refuses for another reason, as for another user's file.
        """
        target = Path(self._locate(path_of(checkpoint_id)))
        with store_errors(target):
            self._make_shards(target.parent)
            with _conflicts(target):
                size = link_file(source, target)
            self._finish(target)
        return size

    def _put(
        self,
        checkpoint_id: str,
        size: int,
        fill: Callable[[int], None],
        *,
        is_named: bool = False,
    ) -> int:
        """Writes a file of `size` bytes with `fill`: staged, length checked, fsync, rename, folder fsync. `is_named` says that
        the id comes from elsewhere and was not generated here, so that there may be a file of that id.
        """
        target = Path(self._locate(path_of(checkpoint_id)))
        temporary = target.with_suffix(f".{writers.my_tag()}{TEMPORARY_SUFFIX}")
        free = self.free_bytes()
        if free < size:
            raise StoreFull(needed=size, path=self.root, reason=f"{free} bytes are free")
        with store_errors(target, needed=size):
            self._make_shards(target.parent)
            try:
                self._stage(temporary, fill, size)
                self._hook("staged")
                _give_new_name(temporary, target) if is_named else os.rename(temporary, target)
            except BaseException:  # Ctrl-C too: gc leaves the temporaries of a process that lives alone
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            self._finish(target)
        return size

    def _finish(self, target: Path) -> None:
        """Makes the name of a new file durable. If that fails or is interrupted, the file is removed."""
        try:
            self._hook("renamed")
            fsync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            raise

    def _stage(self, temporary: Path, fill: Callable[[int], None], size: int) -> None:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY, 0o600)
        try:
            self._hook("created")
            fill(fd)
            self._hook("written")
            written = os.fstat(fd).st_size
            if written != size:
                raise OSError(errno.EIO, f"{written} of {size} bytes arrived")
            os.fsync(fd)
            if self._drop_page_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _make_shards(self, folder: Path) -> None:
        for shard in (folder.parent, folder):
            _require_plain_folder(shard)
            if not shard.is_dir():
                with contextlib.suppress(FileExistsError):
                    shard.mkdir(mode=0o700)
                fsync_folder(shard.parent)

    @contextlib.contextmanager
    def map(self, relative: str) -> Iterator[memoryview]:
        """The bytes of a stored file, mapped and read ahead, without a copy. The view is valid inside the `with` only.

        Raises:
            FileMissing: there is no such file.
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the system cannot read it now (EIO, EACCES, ESTALE): nothing is known of the file.
        """
        with map_file(self._locate(relative)) as view:
            yield view

    def size(self, relative: str) -> int | None:
        """The size in bytes of a stored file; None if it does not exist or is not a regular file.

        Raises:
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the system gives no answer.
        """
        path = self._locate(relative)
        with store_errors(path):
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def is_gone(self, relative: str) -> bool:
        """Whether there is no checkpoint file at a row's path: nothing exists there, or something that the store did not write.

        Raises:
            StoreUnavailable: the system gives no answer.
        """
        try:
            return self.size(relative) is None
        except UnsafePath:
            return True

    def modified_ns(self, relative: str) -> int:
        """The time of the last write or touch of a stored file, in ns since 1970.

        Raises:
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the file is gone, or the system cannot say.
        """
        path = self._locate(relative)
        with store_errors(path):
            return os.lstat(path).st_mtime_ns

    def head(self, relative: str) -> bytes:
        """The first 256 bytes of a stored file, enough for the header after padding; less if the file is shorter.

        Raises:
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the file is gone, or the system cannot read it.
        """
        path = self._locate(relative)
        with store_errors(path):
            return read_start(path, _HEAD_BYTES)[0]

    def beginning(self, relative: str, n_bytes: int) -> tuple[bytes, int]:
        """The first `n_bytes` of a stored file, or all of a shorter one; and the size of the file in bytes.

        Raises:
            FileMissing: there is no such file.
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the system cannot read it now: nothing is known of the file.
        """
        path = self._locate(relative)
        with store_errors(path):
            try:
                return read_start(path, n_bytes)
            except FileNotFoundError as error:
                raise FileMissing(path=path) from error

    def touch(self, relative: str) -> None:
        """Sets a stored file's time to now, so that its grace period starts again.

        Raises:
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the file is gone, or the system refuses.
        """
        path = self._locate(relative)
        with store_errors(path):
            # The system's time stamps advance in ticks of some milliseconds; without + 1, a touch within a tick is lost.
            now_ns = max(time.time_ns(), os.lstat(path).st_mtime_ns + 1)
            os.utime(path, ns=(now_ns, now_ns))

    def remove(self, relative: str, *, mtime_ns: int | None = None) -> int | None:
        """Unlinks a stored file and gives the bytes freed; 0 if it does not exist. With `mtime_ns`, a file with another time
        stays, and the result is None.

        Raises:
            UnsafePath: the path is not one that the store gives, a part of it is a symlink, or it is not a regular file.
            StoreUnavailable: the system refuses.
        """
        path = self._locate(relative)
        with store_errors(path):
            try:
                status = os.lstat(path)
                if not stat.S_ISREG(status.st_mode):
                    raise UnsafePath(path=path, reason="not a regular file")
                if mtime_ns is not None and status.st_mtime_ns != mtime_ns:
                    return None
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return 0
            return status.st_size

    def quarantine(self, relative: str, *, mtime_ns: int | None = None) -> str | None:
        """Moves a stored file into the quarantine and gives its new path; its age counts from now. With `mtime_ns`, a file with
        another time stays, and the result is None.

        Raises:
            UnsafePath: the path is not one that the store gives, or a part of it is a symlink.
            StoreUnavailable: the file is gone, or the system refuses.
        """
        path, target = self._locate(relative), self.root / QUARANTINE / Path(relative).name
        _require_plain_folder(target.parent)
        with store_errors(path):
            if mtime_ns is not None and os.lstat(path).st_mtime_ns != mtime_ns:
                return None
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(path, target)
            os.utime(target)
            fsync_folder(target.parent)
        return f"{QUARANTINE}/{target.name}"

    def walk(self) -> Iterator[Entry]:
        """Every entry in the store's shard folders and its quarantine. Opens no file and follows no symlink.

        Raises:
            StoreUnavailable: a folder cannot be listed. Stop then: a partial list must not be taken for a complete one.
        """
        with store_errors(self.root):
            yield from walk(self.root)

    def _locate(self, relative: str) -> str:
        """A path as text: gc needs one per file, and `Path` would take as long as the system call."""
        if not PATH.fullmatch(relative):
            raise UnsafePath(path=relative, reason="not a path that this store gives")
        folder, (*parts, name) = os.fspath(self.root), relative.split("/")
        for part in parts:
            folder = f"{folder}/{part}"
            _require_plain_folder(folder)
        return f"{folder}/{name}"


def _give_new_name(temporary: Path, target: Path) -> None:
    with _conflicts(target):
        put_in_place(temporary, target)
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _conflicts(target: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise Conflict(what=f"{target.name} is there already") from error


def _require_plain_folder(folder: str | Path) -> None:
    """Refuses a symlink, even to a folder, and anything that is not a folder. Nothing at all is fine."""
    try:
        mode = os.lstat(folder).st_mode
    except FileNotFoundError:
        return
    except OSError:
        with store_errors(Path(folder)):
            raise
    if not stat.S_ISDIR(mode):
        raise UnsafePath(path=folder, reason="it is a symlink or no folder")
