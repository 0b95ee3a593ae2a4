"""File operations of the system: map, write, copy, make durable; and the mapping of its errors to ours."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from llama_ckpt.errors import BadInput, FileMissing, LlamaCkptError, StoreFull, StoreUnavailable, UnsafePath

_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# copy_file_range fails with these: across file systems on an older kernel; file system, kernel or sandbox without it.
_CANNOT_COPY_ERRNOS = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_CHUNK_BYTES = 1 << 26
_PAGE_BYTES = 4096
_MIN_HOLE_PAGES = 16


@contextlib.contextmanager
def map_file(path: Path | str) -> Iterator[memoryview]:
    """The bytes of any regular file, mapped read-only; an empty file gives an empty view. Valid inside the `with` only.

    Raises:
        FileMissing: there is no such file.
        UnsafePath: it is a symlink, or not a regular file.
        StoreUnavailable: the system cannot read it.
    """
    with store_errors(path):
        try:
            fd = os.open(path, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
        except FileNotFoundError as error:
            raise FileMissing(path=path) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafePath(path=path, reason="not a regular file")
            mapped = _map(fd, status.st_size) if status.st_size else None
        except ValueError as error:
            raise OSError(errno.EIO, "it changed while it was opened") from error
        finally:
            os.close(fd)
    if mapped is None:
        yield memoryview(b"")
        return
    try:
        with memoryview(mapped) as view:
            yield view
    finally:
        with contextlib.suppress(BufferError):  # a slice of the caller is still alive: the map is closed with it
            mapped.close()


def _map(fd: int, size: int) -> mmap.mmap:
    """Maps a file and reads it ahead, so that an unreadable page is an error here and not a SIGBUS later."""
    if not hasattr(mmap, "PROT_READ"):  # Windows
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if sys.platform == "linux":
        try:
            mapped.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14, which reads the pages on access
                mapped.close()
                raise OSError(errno.EIO, f"its pages cannot be read: {error.strerror}") from error
    return mapped


_MADV_POPULATE_READ = 22  # linux/mman.h
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block


def read_start(path: Path | str, n_bytes: int) -> tuple[bytes, int]:
    """The first `n_bytes` of a file, or all of a shorter one; and the size of the file in bytes.

    Raises:
        UnsafePath: it is not a regular file.
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath(path=path, reason="not a regular file")
        # A read may stop before an unreadable part, so a short read does not mean the end of the file: the next one fails.
        data = bytearray()
        while part := os.read(fd, n_bytes - len(data)):
            data += part
        return bytes(data), status.st_size
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of `data`, in chunks, so that it can be interrupted between them."""
    with memoryview(data).cast("B") as view:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at : at + _CHUNK_BYTES])


def write_with_holes(fd: int, data: memoryview) -> None:
    """Appends all of `data` to a file whose size is a multiple of the page size. Long runs of zeros become holes, which take no
    blocks if the file system has holes; reading gives zeros there.
    """
    start, at = os.fstat(fd).st_size, 0
    with memoryview(data).cast("B") as view:
        for begin, end in _zeros(view):
            write_all(fd, view[at:begin])
            os.ftruncate(fd, start + end)
            os.lseek(fd, start + end, os.SEEK_SET)
            at = end
        write_all(fd, view[at:])


def _zeros(data: memoryview) -> list[tuple[int, int]]:
    """Offsets of the start and end of runs of zero pages, of at least 64 KiB each: shorter holes would fragment the file."""
    pages = np.frombuffer(data, dtype=np.uint8, count=len(data) // _PAGE_BYTES * _PAGE_BYTES).reshape(-1, _PAGE_BYTES)
    zero = pages[:, 0] == 0  # two bytes exclude most pages
    zero &= pages[:, _PAGE_BYTES // 2] == 0
    zero[zero] = ~pages[zero].any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], zero, [False]]))).reshape(-1, 2)
    return [(int(a) * _PAGE_BYTES, int(b) * _PAGE_BYTES) for a, b in edges if b - a >= _MIN_HOLE_PAGES]


def write_new(path: Path, parts: Sequence[memoryview], mode: int) -> None:
    """Writes a new file of these parts, one after the other, and makes its bytes durable. If it fails, there is no file.

    Raises:
        StoreFull: no room.
        StoreUnavailable: any other failure of the file system, or the file exists already.
    """
    size = sum(part.nbytes for part in parts)
    with store_errors(path, needed=size):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY, mode)
        try:
            for part in parts:
                write_all(fd, part)
            written = os.fstat(fd).st_size
            if written != size:
                raise OSError(errno.EIO, f"{written} of {size} bytes arrived")
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)


def copy_rest(source: int, target: int, data: memoryview) -> None:
    """Copies the last `len(data)` bytes of an open file; `data` is the same bytes, mapped. If the system has copy_file_range, the
    bytes do not pass through this process, and file systems that can share blocks (Btrfs, XFS) share them.
    """
    start, at = os.fstat(source).st_size - len(data), 0
    while hasattr(os, "copy_file_range") and at < len(data):
        try:
            copied = os.copy_file_range(source, target, len(data) - at, start + at)
        except OSError as error:
            if error.errno not in _CANNOT_COPY_ERRNOS:
                raise
            break
        if copied == 0:  # the source became shorter
            break
        at += copied
    write_all(target, data[at:])


def link_file(source: Path, target: Path) -> int:
    """Gives a file a second name, makes its bytes durable and its mode 0600, and gives its size in bytes.

    Raises:
        BadInput: the names are on two file systems, or the file system has no hard links.
        OSError: the system refuses for another reason, as for another user's file; there is no second name then.
    """
    fd = os.open(source, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
    try:
        os.link(source, target, follow_symlinks=os.link not in os.supports_follow_symlinks)
        try:
            if os.name != "nt":  # Windows has no such modes, and does not sync a file that is open for reading
                os.fchmod(fd, 0o600)
                os.fsync(fd)
            return os.fstat(fd).st_size
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK):
            reason = f"it cannot be linked into the store ({error.strerror}); adopt it without --link"
            raise BadInput(what="file", value=str(source), reason=reason) from error
        raise
    finally:
        os.close(fd)


def write_file(path: Path, pieces: Sequence[bytes | memoryview], *, replace: bool) -> int:
    """Writes a file outside the store and gives its size in bytes: a temporary beside it, fsync, then its name. The mode is 0600.

    If it is interrupted, there is at most a temporary beside the file; an existing file stays complete until it is replaced.

    Raises:
        BadInput: the file exists and `replace` is not set, or its folder does not exist.
        StoreFull, StoreUnavailable: it cannot be written; nothing is left of it.
    """
    if not path.parent.is_dir():
        raise BadInput(what="output file", value=str(path), reason="its folder is not there")
    if not replace and os.path.lexists(path):
        raise BadInput(what="output file", value=str(path), reason=_EXISTS)
    views = [memoryview(piece) for piece in pieces]
    size = sum(view.nbytes for view in views)
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    with store_errors(path, needed=size):
        try:
            write_new(temporary, views, 0o600)
            if replace:
                os.replace(temporary, path)
            else:
                _name_once(temporary, path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return size


_EXISTS = "it is there already; --force replaces it"


def _name_once(temporary: Path, path: Path) -> None:
    """Gives a file its name. If another process has made a file of that name, that file stays."""
    try:
        put_in_place(temporary, path)
    except FileExistsError as error:
        raise BadInput(what="output file", value=str(path), reason=_EXISTS) from error


def put_in_place(temporary: Path, target: Path) -> None:
    """Gives a file another name: a second one if the file system has hard links, else in place of its own.

    Raises:
        FileExistsError: the name exists already; it stays.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # there are no hard links
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        os.rename(temporary, target)


def fsync_folder(folder: Path) -> bool:
    """Makes the names in a folder durable. False if the file system has no fsync of folders.

    Raises:
        OSError: the fsync failed.
    """
    if os.name == "nt":  # Windows cannot open a folder; its rename is journalled
        return True
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not sync folders
            raise
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def store_errors(path: Path | str, needed: int = 0) -> Iterator[None]:
    """Maps the system's errors to ours, by number. `needed` is the number of bytes to be written."""
    try:
        yield
    except LlamaCkptError:
        raise
    except OSError as error:
        if error.errno in _NO_SPACE_ERRNOS:
            raise StoreFull(needed=needed, path=Path(path).parent, reason=reason_of(error)) from error
        if error.errno in (errno.ELOOP, errno.ENXIO):
            reason = "it is a symlink" if error.errno == errno.ELOOP else "not a regular file"
            raise UnsafePath(path=path, reason=reason) from error
        raise StoreUnavailable(path=path, reason=reason_of(error)) from error


def reason_of(error: OSError) -> str:
    """The system's message and the name of its error number."""
    return f"{error.strerror or error} (errno {errno.errorcode.get(error.errno or 0, str(error.errno))})"
