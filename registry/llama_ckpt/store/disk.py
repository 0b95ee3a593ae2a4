"""What the system does with files: map, write, make durable; and its errors as ours."""

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

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Of copy_file_range: another file system on an older kernel, one that cannot, a system without it, a sandbox.
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_CHUNK = 1 << 26
_PAGE = 4096
_LEAST_HOLE = 16


@contextlib.contextmanager
def map_file(path: Path | str) -> Iterator[memoryview]:
    """The bytes of any regular file, mapped read-only; an empty file gives an empty view.

    Raises:
        FileMissing: there is no such file.
        UnsafePath: it is a symlink or no regular file.
        StoreUnavailable: the system cannot read it.
    """
    with store_errors(path):
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
        # A read may end early where the next one fails: what is missing then is no end of the file.
        data = bytearray()
        while part := os.read(fd, n_bytes - len(data)):
            data += part
        return bytes(data), found.st_size
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of it, in parts that can be interrupted."""
    with memoryview(data).cast("B") as view:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at : at + _CHUNK])


def write_with_holes(fd: int, data: memoryview) -> None:
    """Writes all of it behind what is written already, a whole number of pages; long runs of zeros become holes, which take no
    blocks where the file system has them. Reading gives zeros there as ever.
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
    """Where whole pages of zeros begin and end, of at least 64 KiB each: shorter holes would scatter the file."""
    pages = np.frombuffer(data, dtype=np.uint8, count=len(data) // _PAGE * _PAGE).reshape(-1, _PAGE)
    zero = pages[:, 0] == 0  # of most pages one look is enough
    zero &= pages[:, _PAGE // 2] == 0
    zero[zero] = ~pages[zero].any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], zero, [False]]))).reshape(-1, 2)
    return [(int(a) * _PAGE, int(b) * _PAGE) for a, b in edges if b - a >= _LEAST_HOLE]


def write_new(path: Path, parts: Sequence[memoryview], mode: int) -> None:
    """Writes a new file of these parts, one after the other, and makes its bytes durable. If it fails there is none.

    Raises:
        StoreFull: no room.
        StoreUnavailable: any other failure of the file system, or the file is there already.
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
    """Copies the last `len(data)` bytes of an open file; `data` is the same bytes, mapped. Where the system can, they never pass
    through this process, and file systems that share blocks (Btrfs, XFS) share them.
    """
    start, at = os.fstat(source).st_size - len(data), 0
    while hasattr(os, "copy_file_range") and at < len(data):
        try:
            copied = os.copy_file_range(source, target, len(data) - at, start + at)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            break
        if copied == 0:  # the source became shorter
            break
        at += copied
    write_all(target, data[at:])


def link_file(source: Path, target: Path) -> int:
    """Gives a file a second name, makes its bytes durable and its mode 0600, and gives its size in bytes.

    Raises:
        BadInput: the names would be on two file systems, or on one without hard links.
        OSError: the system refuses otherwise, as for another user's file; there is no second name then.
    """
    fd = os.open(source, os.O_RDONLY | NOFOLLOW | BINARY | NONBLOCK)
    try:
        os.link(source, target, follow_symlinks=os.link not in os.supports_follow_symlinks)
        try:
            if os.name != "nt":  # Windows has no such modes, and syncs no file that is open for reading
                os.fchmod(fd, 0o600)
                os.fsync(fd)
            return os.fstat(fd).st_size
        except OSError:
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
    """Writes a file of one's own, anywhere, and gives its size in bytes: beside it first, fsync, then under its name, mode 0600.

    Interrupted, there is at most a temporary beside it; a file that is there already stays whole until the new one is.

    Raises:
        BadInput: there is such a file and `replace` is not set, or the folder is not there.
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
    """Gives a file its name; whoever made one of that name meanwhile keeps it."""
    try:
        put_in_place(temporary, path)
    except FileExistsError as error:
        raise BadInput(what="output file", value=str(path), reason=_EXISTS) from error


def put_in_place(temporary: Path, target: Path) -> None:
    """Gives a file its name, beside the one it has or instead of it.

    Raises:
        FileExistsError: something has the name already; it stays.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # there are no hard links
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
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
def store_errors(path: Path | str, needed: int = 0) -> Iterator[None]:
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
