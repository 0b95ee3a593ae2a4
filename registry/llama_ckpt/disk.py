"""What the system does with files: map, write, make durable; and its errors as ours."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_ckpt.errors import FileMissing, LlamaCkptError, StoreFull, StoreUnavailable, UnsafePath

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK = 1 << 26


@contextlib.contextmanager
def map_file(path: Path | str) -> Iterator[memoryview]:
    """The bytes of any regular file, mapped read-only; an empty file gives an empty view.

    Raises:
        FileMissing: there is no such file.
        UnsafePath: it is a symlink or no regular file.
        StoreUnavailable: the system cannot read it.
    """
    with told(path):
        try:
            fd = os.open(path, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
        except FileNotFoundError as error:
            raise FileMissing(path=path) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise UnsafePath(path=path, reason="not a regular file")
            mapped = _map(fd, found.st_size) if found.st_size else None
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
        with contextlib.suppress(BufferError):  # a caller's slice is still alive: the map goes with it
            mapped.close()


def _map(fd: int, size: int) -> mmap.mmap:
    """Maps a file and reads it in ahead, so that a page that cannot be read is an error here and no SIGBUS later."""
    if not hasattr(mmap, "PROT_READ"):  # Windows
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if sys.platform == "linux":
        try:
            mapped.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14, which reads page by page as we go
                mapped.close()
                raise OSError(errno.EIO, f"its pages cannot be read: {error.strerror}") from error
    return mapped


_MADV_POPULATE_READ = 22  # linux/mman.h
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not hang


def read_start(path: Path | str, n_bytes: int) -> tuple[bytes, int]:
    """The first `n_bytes` of a file, or all if it is shorter; and the size of the whole in bytes."""
    fd = os.open(path, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafePath(path=path, reason="not a regular file")
        return os.read(fd, n_bytes), found.st_size
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of it, in parts that can be interrupted."""
    with memoryview(data).cast("B") as view:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at : at + _CHUNK])


def write_new(path: Path, parts: Sequence[memoryview], mode: int) -> None:
    """Writes a new file of these parts, one after the other, and makes its bytes durable. If it fails there is none.

    Raises:
        StoreFull: no room.
        StoreUnavailable: any other failure of the file system, or the file is there already.
    """
    size = sum(part.nbytes for part in parts)
    with told(path, needed=size):
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


def put_in_place(temporary: Path, target: Path) -> None:
    """Gives a file its name, unless something has it already."""
    # link fails where the target exists, so the first marker stays; where there are no hard links, rename does.
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        if not target.exists():
            os.rename(temporary, target)


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    if os.name == "nt":  # Windows cannot open a folder; its rename is journalled
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def told(path: Path | str, needed: int = 0) -> Iterator[None]:
    """Turns the system's errors into ours, by number."""
    try:
        yield
    except LlamaCkptError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(needed=needed, path=Path(path).parent, reason=reason_of(error)) from error
        if error.errno in (errno.ELOOP, errno.ENXIO):
            reason = "it is a symlink" if error.errno == errno.ELOOP else "not a regular file"
            raise UnsafePath(path=path, reason=reason) from error
        raise StoreUnavailable(path=path, reason=reason_of(error)) from error


def reason_of(error: OSError) -> str:
    """The system's words and number."""
    return f"{error.strerror or error} (errno {errno.errorcode.get(error.errno or 0, str(error.errno))})"
