"""The store: files appear whole or not at all, and nothing outside of it is ever touched."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
import subprocess
import sys
import types

import numpy as np
import pytest

from llama_ckpt.errors import FileMissing, StoreFull, StoreUnavailable, UnsafePath
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.store import disk
from llama_ckpt.store import writers as owners
from llama_ckpt.store.disk import map_file
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import Store, path_of

ID = "abcd0123456789abcdef0123456789ab"
PATH = f"ab/cd/{ID}.llam"
HEAD = bytes(range(256)) * 16
PAYLOAD = memoryview(bytes(range(255, -1, -1)) * 100)
WHOLE = HEAD + bytes(PAYLOAD)
STEPS = ["created", "head", "written", "staged", "renamed"]


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path / "store")
    made.create()
    return made


@pytest.fixture
def outside(tmp_path):
    """A folder that is not the store's, with a file as the store would name it, and one more."""
    folder = tmp_path / "outside"
    (folder / "cd").mkdir(parents=True)
    (folder / "cd" / f"{ID}.llam").write_bytes(b"mine")
    (folder / "victim").write_bytes(b"mine too")
    return folder


def contents(folder) -> dict[str, bytes | None]:
    """Everything below a folder: path to bytes, None for what is no regular file."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in folder.rglob("*")
    }


def files_in(store: Store) -> list[str]:
    return [name for name, data in contents(store.root).items() if data is not None]


def read(store: Store, path: str = PATH) -> bytes:
    with store.map(path) as view:
        return bytes(view)


# -- write, map, size, remove ---------------------------------------------------------------------------------------------


def test_a_written_file_is_there_in_full_under_its_name_and_nothing_else_is(store):
    assert store.write(ID, HEAD, PAYLOAD) == len(WHOLE)
    assert path_of(ID) == PATH
    assert files_in(store) == [PATH]
    assert read(store) == WHOLE
    assert store.size(PATH) == len(WHOLE)


def test_a_payload_of_any_item_size_is_written_byte_for_byte(store):
    numbers = np.arange(1000, dtype=np.float32)
    store.write(ID, b"", memoryview(numbers))
    assert read(store) == numbers.tobytes()


def test_a_payload_larger_than_one_call_to_the_system_is_written_in_full(store, monkeypatch):
    monkeypatch.setattr(disk, "_CHUNK_BYTES", 1000)
    store.write(ID, HEAD, PAYLOAD)
    assert read(store) == WHOLE


def test_a_system_that_writes_a_thousand_bytes_at_a_time_gives_the_whole_file(store, monkeypatch):
    real, sizes = os.write, []

    def short(fd, data):
        sizes.append(real(fd, memoryview(data)[:1000]))
        return sizes[-1]

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.write", short)
        store.write(ID, HEAD, PAYLOAD)
    assert read(store) == WHOLE
    assert max(sizes) == 1000
    assert sum(sizes) == len(WHOLE)


def test_folders_and_files_are_the_owners_alone_whatever_the_umask(store, tmp_path):
    before = os.umask(0)
    try:
        other = Store(tmp_path / "other")
        other.create()
        other.write(ID, HEAD, PAYLOAD)
        other.claim("mine")
    finally:
        os.umask(before)
    for path in (other.root, *other.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_file_is_synced_before_it_gets_its_name_and_its_folder_after(store, monkeypatch):
    told = []

    def recorded(name, real):
        def call(*args, **kw):
            told.append((name, stat.S_ISDIR(os.fstat(args[0]).st_mode)) if name == "fsync" else (name, None))
            return real(*args, **kw)

        return call

    (store.root / "ab" / "cd").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fsync", recorded("fsync", os.fsync))
        patch.setattr("llama_ckpt.store.store.os.rename", recorded("rename", os.rename))
        store.write(ID, HEAD, PAYLOAD)
    assert told == [("fsync", False), ("rename", None), ("fsync", True)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise on this system")
def test_the_page_cache_is_dropped_where_it_was_asked_for_after_the_sync_and_the_file_is_whole(tmp_path, monkeypatch):
    told = []
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fsync", lambda fd: told.append("fsync"))
        patch.setattr("llama_ckpt.store.store.os.posix_fadvise", lambda *args: told.append(args[1:]))
        for drop in (False, True):
            store = Store(tmp_path / str(drop), drop_page_cache=drop)
            store.create()
            (store.root / "ab" / "cd").mkdir(parents=True)
            store.write(ID, HEAD, PAYLOAD)
            assert read(store) == WHOLE
    assert told == ["fsync", "fsync", "fsync", (0, 0, os.POSIX_FADV_DONTNEED), "fsync"]
    real = Store(tmp_path / "real", drop_page_cache=True)
    real.create()
    real.write(ID, HEAD, PAYLOAD)
    assert read(real) == WHOLE


def test_the_steps_of_a_write_are_told_in_order(tmp_path):
    told: list[str] = []
    store = Store(tmp_path / "store", hook=told.append)
    store.create()
    store.write(ID, HEAD, PAYLOAD)
    assert told == STEPS


def test_a_file_that_is_not_there_is_missing_and_its_removal_frees_nothing(store):
    with pytest.raises(FileMissing, match=PATH), store.map(PATH):
        pass
    assert store.size(PATH) is None
    assert store.remove(PATH) == 0


def test_a_removed_file_is_gone_and_its_bytes_are_told_once(store):
    store.write(ID, HEAD, PAYLOAD)
    assert store.remove(PATH) == len(WHOLE)
    assert store.remove(PATH) == 0
    assert files_in(store) == []


def test_a_temporary_file_can_be_removed_by_its_name(store):
    store.write(ID, HEAD, PAYLOAD)
    (store.root / PATH).rename((store.root / PATH).with_suffix(".tmp"))
    assert store.remove(PATH.replace(".llam", ".tmp")) == len(WHOLE)


def test_a_file_with_another_time_than_planned_stays(store):
    store.write(ID, HEAD, PAYLOAD)
    planned = (store.root / PATH).stat().st_mtime_ns
    os.utime(store.root / PATH, ns=(planned, planned + 1))
    assert store.remove(PATH, mtime_ns=planned) is None
    assert read(store) == WHOLE
    assert store.remove(PATH, mtime_ns=planned + 1) == len(WHOLE)
    assert store.remove(PATH, mtime_ns=planned + 1) == 0


def test_a_touched_file_is_young_again_and_otherwise_as_it_was(store):
    store.write(ID, HEAD, PAYLOAD)
    os.utime(store.root / PATH, ns=(0, 0))
    store.touch(PATH)
    (entry,) = store.walk()
    assert entry.mtime_ns > 1_700_000_000_000_000_000
    assert read(store) == WHOLE


def test_a_file_that_is_gone_cannot_be_touched_and_does_not_come_back(store):
    with pytest.raises(StoreUnavailable, match="ENOENT"):
        store.touch(PATH)
    store.write(ID, HEAD, PAYLOAD)
    store.remove(PATH)
    with pytest.raises(StoreUnavailable, match="ENOENT"):
        store.touch(PATH)
    assert files_in(store) == []


def test_an_empty_file_maps_to_nothing(store):
    store.write(ID, b"", memoryview(b""))
    assert read(store) == b""


def test_a_mapped_file_is_read_only(store):
    store.write(ID, HEAD, PAYLOAD)
    with store.map(PATH) as view:
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_a_slice_that_outlives_its_map_can_still_be_read(store):
    store.write(ID, HEAD, PAYLOAD)
    with store.map(PATH) as view:
        kept = view[len(HEAD) :]
    assert kept == PAYLOAD


def test_a_file_removed_while_it_is_mapped_can_be_read_to_its_end(store):
    store.write(ID, HEAD, PAYLOAD)
    with store.map(PATH) as view:
        store.remove(PATH)
        assert bytes(view) == WHOLE


def test_an_error_inside_a_map_comes_out_as_it_is(store):
    store.write(ID, HEAD, PAYLOAD)
    with pytest.raises(ZeroDivisionError), store.map(PATH):
        1 / 0  # noqa: B018


# -- writes that do not get through ---------------------------------------------------------------------------------------


def stopping_at(step: str, error: BaseException):
    def hook(now: str) -> None:
        if now == step:
            raise error

    return hook


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EFBIG, StoreFull),
        (errno.EIO, StoreUnavailable),
        (errno.EROFS, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.ENOENT, StoreUnavailable),
    ],
)
def test_a_write_that_fails_at_any_step_leaves_no_file_and_says_why(tmp_path, step, number, expected):
    store = Store(tmp_path / "store", hook=stopping_at(step, OSError(number, os.strerror(number))))
    store.create()
    with pytest.raises(expected) as caught:
        store.write(ID, HEAD, PAYLOAD)
    assert f"{os.strerror(number)} (errno {errno.errorcode[number]})" in str(caught.value)
    assert files_in(store) == []
    assert Store(store.root).write(ID, HEAD, PAYLOAD) == len(WHOLE)


def test_a_full_store_says_how_many_bytes_were_needed_and_what_to_do(tmp_path):
    store = Store(tmp_path / "store", hook=stopping_at("written", OSError(errno.ENOSPC, "No space left on device")))
    store.create()
    with pytest.raises(StoreFull, match=f"no room for {len(WHOLE)} bytes under .*llama-ckpt gc"):
        store.write(ID, HEAD, PAYLOAD)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("step", STEPS)
def test_an_error_or_an_interruption_at_any_step_comes_out_as_it_is_and_leaves_no_file(tmp_path, step, error):
    store = Store(tmp_path / "store", hook=stopping_at(step, error))
    store.create()
    with pytest.raises(type(error)) as caught:
        store.write(ID, HEAD, PAYLOAD)
    assert caught.value is error
    assert files_in(store) == []


LIMITED = f"""
import os, resource, sys
from pathlib import Path
from llama_ckpt.errors import StoreFull
from llama_ckpt.store.store import Store
root, limit = Path(sys.argv[1]), int(sys.argv[2])
store = Store(root)
store.create()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    store.write({ID!r}, bytes(4096), memoryview(bytes(25600)))
except StoreFull as error:
    print(error)
else:
    print("written")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits on Windows")
@pytest.mark.parametrize("short_by", [1, 100, 29696 // 2, 29696])
def test_a_file_that_the_system_cuts_short_is_an_error_and_leaves_nothing(tmp_path, short_by):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "store", str(29696 - short_by)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no room for 29696 bytes" in done.stdout
    assert "EFBIG" in done.stdout
    assert files_in(Store(tmp_path / "store")) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits on Windows")
def test_a_limit_of_the_very_size_is_enough(tmp_path):
    subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "store", "29696"], check=True, capture_output=True)
    assert Store(tmp_path / "store").size(PATH) == 29696


@pytest.mark.parametrize("free", [0, len(WHOLE) - 1])
def test_without_free_space_nothing_is_begun(tmp_path, monkeypatch, free):
    told: list[str] = []
    store = Store(tmp_path / "store", hook=told.append)
    store.create()
    monkeypatch.setattr(
        "llama_ckpt.store.store.shutil.disk_usage", lambda _path: types.SimpleNamespace(free=free, total=1 << 50)
    )
    with pytest.raises(StoreFull, match=f"no room for {len(WHOLE)} bytes under .*: {free} bytes are free"):
        store.write(ID, HEAD, PAYLOAD)
    assert (told, contents(store.root)) == ([], {})


def test_free_space_of_the_very_size_is_enough(store, monkeypatch):
    monkeypatch.setattr(
        "llama_ckpt.store.store.shutil.disk_usage", lambda _path: types.SimpleNamespace(free=len(WHOLE), total=1 << 50)
    )
    assert store.free_bytes() == len(WHOLE)
    store.write(ID, HEAD, PAYLOAD)
    assert read(store) == WHOLE


def test_a_file_of_which_fewer_bytes_arrived_than_were_written_is_an_error(store, monkeypatch):
    real = os.write
    with monkeypatch.context() as patch:  # the system takes all and keeps less
        patch.setattr("llama_ckpt.store.store.os.write", lambda fd, data: real(fd, memoryview(data)[:-1]) + 1)
        with pytest.raises(StoreUnavailable, match=f"{len(WHOLE) - 2} of {len(WHOLE)} bytes arrived"):
            store.write(ID, HEAD, PAYLOAD)
    assert files_in(store) == []


def test_a_file_whose_size_reads_shorter_than_written_is_an_error(store, monkeypatch):
    real = os.fstat
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fstat", lambda fd: types.SimpleNamespace(st_size=real(fd).st_size - 1))
        with pytest.raises(StoreUnavailable, match=f"{len(WHOLE) - 1} of {len(WHOLE)} bytes arrived"):
            store.write(ID, HEAD, PAYLOAD)
    assert files_in(store) == []


@pytest.mark.parametrize("call", ["fsync", "rename", "write"])
def test_a_call_that_fails_by_itself_leaves_no_file(store, monkeypatch, call):
    def broken(*_args, **_kw):
        raise OSError(errno.EIO, "Input/output error")

    (store.root / "ab" / "cd").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(f"llama_ckpt.store.store.os.{call}", broken)
        with pytest.raises(StoreUnavailable, match="EIO"):
            store.write(ID, HEAD, PAYLOAD)
    assert files_in(store) == []


def test_a_store_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreUnavailable, match="the store cannot be used"):
            Store(root).create()
    assert (tmp_path / "file").read_bytes() == b""


def test_a_store_that_is_gone_says_so_at_every_verb(tmp_path):
    store = Store(tmp_path / "never made")
    for verb in (store.free_bytes, lambda: store.write(ID, HEAD, PAYLOAD), lambda: list(store.walk())):
        with pytest.raises(StoreUnavailable):
            verb()
    assert not store.root.exists()


# -- errors of the moment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EPERM])
def test_a_file_that_cannot_be_opened_now_is_no_missing_file(store, monkeypatch, number):
    store.write(ID, HEAD, PAYLOAD)

    def broken(*_args, **_kw):
        raise OSError(number, "told by the system")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.open", broken)
        with pytest.raises(StoreUnavailable, match=rf"told by the system \(errno {errno.errorcode[number]}\)"):
            read(store)
    assert read(store) == WHOLE


def test_a_file_whose_pages_cannot_be_read_is_an_error_and_no_crash(store, monkeypatch):
    store.write(ID, HEAD, PAYLOAD)

    class Damaged(mmap.mmap):
        def madvise(self, *_args):
            raise OSError(errno.EFAULT, "Bad address")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.disk.mmap.mmap", Damaged)
        patch.setattr("llama_ckpt.store.disk.sys.platform", "linux")
        with pytest.raises(StoreUnavailable, match="its pages cannot be read: Bad address"):
            read(store)


def test_a_kernel_that_cannot_read_ahead_reads_as_it_goes(store, monkeypatch):
    store.write(ID, HEAD, PAYLOAD)
    monkeypatch.setattr(disk, "_MADV_POPULATE_READ", 9999)  # no kernel knows it
    assert read(store) == WHOLE


def test_a_file_cut_short_between_its_opening_and_its_mapping_is_an_error_of_the_moment(store, monkeypatch):
    store.write(ID, HEAD, PAYLOAD)
    real = os.fstat

    def larger(fd):
        found = real(fd)
        return types.SimpleNamespace(st_mode=found.st_mode, st_size=found.st_size + 10_000_000)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fstat", larger)
        with pytest.raises(StoreUnavailable, match="EIO"):
            read(store)
    assert read(store) == WHOLE


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_syncs_no_folders_is_no_error_but_one_that_fails_is(store, monkeypatch, number, fails):
    real = os.fsync

    def files_only(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, "told by the system")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fsync", files_only)
        if fails:
            with pytest.raises(StoreUnavailable, match="EIO"):
                store.write(ID, HEAD, PAYLOAD)
        else:
            store.write(ID, HEAD, PAYLOAD)
    assert files_in(store) == ([] if fails else [PATH])


@pytest.mark.parametrize("verb", ["size", "remove"])
def test_a_file_that_cannot_be_looked_at_now_is_no_missing_file(store, monkeypatch, verb):
    store.write(ID, HEAD, PAYLOAD)
    real = os.lstat

    def broken(path):
        if os.fspath(path).endswith(".llam"):
            raise OSError(errno.EACCES, "Permission denied")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.lstat", broken)
        with pytest.raises(StoreUnavailable, match="EACCES"):
            getattr(store, verb)(PATH)
    assert read(store) == WHOLE


def test_a_file_that_cannot_be_removed_now_stays_and_says_so(store, monkeypatch):
    store.write(ID, HEAD, PAYLOAD)

    def broken(_path):
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.unlink", broken)
        with pytest.raises(StoreUnavailable, match="EPERM"):
            store.remove(PATH)
    assert read(store) == WHOLE


@pytest.mark.parametrize("which", ["root", "ab", "cd"])
def test_a_folder_that_cannot_be_listed_now_gives_an_error_and_no_partial_list(store, monkeypatch, which):
    store.write(ID, HEAD, PAYLOAD)
    real = os.scandir
    name = store.root.name if which == "root" else which

    def broken(path):
        if os.path.basename(path) == name:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.scandir", broken)
        with pytest.raises(StoreUnavailable, match="EIO"):
            list(store.walk())


# -- nothing outside is touched -------------------------------------------------------------------------------------------

NAMES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../outside/victim",
    f"ab/cd/../../../outside/cd/{ID}.llam",
    f"ab/cd/../cd/{ID}.llam",
    f"/ab/cd/{ID}.llam",
    f"./ab/cd/{ID}.llam",
    f"ab//cd/{ID}.llam",
    f"ab\\cd\\{ID}.llam",
    f"ab/cd/{ID}",
    f"ab/cd/{ID}.llam ",
    f"ab/cd/{ID}.llam\n",
    f"ab/cd/{ID}.llam\0",
    f"ab/cd/{ID}.llam/",
    f"ab/cd/{ID}.llam.bak",
    f"ab/cd/{ID}.LLAM",
    f"ab/cd/{ID.upper()}.llam",
    f"AB/CD/{ID}.llam",
    f"ab/ce/{ID}.llam",
    f"cd/ab/{ID}.llam",
    f"ab/cd/{ID[:-1]}.llam",
    f"ab/cd/{ID}0.llam",
    f"ab/cd/{ID[:-1]}\u0661.llam",  # a digit, but not of ours
    "llama-ckpt-store.json",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", [read, Store.size, Store.touch, Store.remove], ids=["map", "size", "touch", "remove"])
def test_a_name_that_the_store_never_gives_is_refused(store, outside, verb, name):
    store.write(ID, HEAD, PAYLOAD)
    store.claim("mine")
    before = contents(outside.parent)
    with pytest.raises(UnsafePath, match="Nothing outside the store is opened or deleted"):
        verb(store, name)
    assert contents(outside.parent) == before


def link_shard(store, outside):
    """The folder ab leads out of the store."""
    (store.root / "ab").symlink_to(outside)


def link_second_shard(store, outside):
    """The folder ab/cd leads out of the store."""
    (store.root / "ab").mkdir()
    (store.root / "ab" / "cd").symlink_to(outside / "cd")


@pytest.mark.parametrize("link", [link_shard, link_second_shard])
def test_a_shard_folder_that_is_a_symlink_is_not_followed(store, outside, link):
    link(store, outside)
    before = contents(outside)
    for verb in (
        lambda: read(store),
        lambda: store.size(PATH),
        lambda: store.remove(PATH),
        lambda: store.touch(PATH),
        lambda: store.write(ID, HEAD, PAYLOAD),
    ):
        with pytest.raises(UnsafePath, match="it is a symlink or no folder"):
            verb()
    assert list(store.walk()) == []
    assert contents(outside) == before


def test_no_folder_is_made_behind_a_shard_folder_that_is_a_symlink(store, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (store.root / "ab").symlink_to(elsewhere)
    with pytest.raises(UnsafePath):
        store.write(ID, HEAD, PAYLOAD)
    assert contents(elsewhere) == {}


def test_a_shard_folder_that_becomes_a_symlink_while_a_write_begins_is_not_followed(store, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def meanwhile(_path):
        (store.root / "ab").symlink_to(elsewhere)
        return types.SimpleNamespace(free=1 << 40, total=1 << 50)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.shutil.disk_usage", meanwhile)
        with pytest.raises(UnsafePath, match="it is a symlink or no folder"):
            store.write(ID, HEAD, PAYLOAD)
    assert contents(elsewhere) == {}


@pytest.mark.parametrize("checkpoint_id", ["../../../escaped", "....//escaped", "short", ID.upper()])
def test_a_write_under_an_id_that_is_none_is_refused(store, tmp_path, checkpoint_id):
    before = contents(tmp_path)
    with pytest.raises(UnsafePath):
        store.write(checkpoint_id, HEAD, PAYLOAD)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("target", ["there", "gone"])
def test_a_symlink_in_place_of_a_file_is_neither_read_nor_removed_nor_followed(store, outside, target):
    (store.root / "ab" / "cd").mkdir(parents=True)
    (store.root / PATH).symlink_to(outside / ("victim" if target == "there" else "nothing"))
    before = contents(outside)
    for verb in (read, Store.remove):
        with pytest.raises(UnsafePath):
            verb(store, PATH)
    assert store.size(PATH) is None
    assert (store.root / PATH).is_symlink()
    assert contents(outside) == before


def test_a_symlink_in_place_of_the_temporary_file_is_not_written_through(store, outside):
    (store.root / "ab" / "cd").mkdir(parents=True)
    (store.root / PATH).with_suffix(f".{owners.my_tag()}.tmp").symlink_to(outside / "victim")
    before = contents(outside)
    with pytest.raises(StoreUnavailable):
        store.write(ID, HEAD, PAYLOAD)
    assert contents(outside) == before


def make_fifo(path):
    os.mkfifo(path)


def make_folder(path):
    path.mkdir()
    (path / "something").write_bytes(b"x")


@pytest.mark.parametrize("make", [make_fifo, make_folder])
def test_what_is_no_regular_file_is_neither_read_nor_removed_and_has_no_size(store, make):
    (store.root / "ab" / "cd").mkdir(parents=True)
    make(store.root / PATH)
    before = contents(store.root)
    for verb in (read, Store.remove):
        with pytest.raises(UnsafePath, match="not a regular file"):
            verb(store, PATH)
    assert store.size(PATH) is None
    assert contents(store.root) == before


@pytest.mark.parametrize("part", ["ab", "ab/cd"])
def test_a_file_in_place_of_a_shard_folder_is_refused_and_stays(store, part):
    (store.root / part).parent.mkdir(exist_ok=True)
    (store.root / part).write_bytes(b"mine")
    for verb in (read, Store.size, Store.remove):
        with pytest.raises(UnsafePath, match="it is a symlink or no folder"):
            verb(store, PATH)
    with pytest.raises((UnsafePath, StoreUnavailable)):
        store.write(ID, HEAD, PAYLOAD)
    assert (store.root / part).read_bytes() == b"mine"


def test_any_file_can_be_mapped_by_its_path_but_no_symlink_folder_or_fifo(tmp_path):
    (tmp_path / "file").write_bytes(b"data")
    with map_file(tmp_path / "file") as view:
        assert bytes(view) == b"data"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(UnsafePath), map_file(tmp_path / name):
            pass
    with pytest.raises(FileMissing), map_file(tmp_path / "none"):
        pass


# -- walk -----------------------------------------------------------------------------------------------------------------


def test_an_empty_store_has_nothing(store):
    assert list(store.walk()) == []


def test_a_walk_tells_checkpoints_temporaries_and_foreign_things_apart(store, outside):
    ids = ["00" * 16, ID, "ff" * 16]
    for checkpoint_id in reversed(ids):
        store.write(checkpoint_id, HEAD, PAYLOAD)
    store.claim("mine")
    folder = store.root / "ab" / "cd"
    (folder / f"{ID}.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"notes")
    (folder / f"{ID}.llam.bak").write_bytes(b"copy")
    (folder / f"{'ff' * 16}.llam").write_bytes(b"in the wrong folder")
    make_folder(folder / "folder")
    os.mkfifo(folder / "fifo")
    (folder / f"abcd{'0' * 28}.llam").symlink_to(outside / "victim")
    found = {entry.path: (entry.kind, entry.size_bytes, entry.detail) for entry in store.walk()}
    assert found == {
        f"00/00/{ids[0]}.llam": ("checkpoint", len(WHOLE), ""),
        PATH: ("checkpoint", len(WHOLE), ""),
        f"ff/ff/{ids[2]}.llam": ("checkpoint", len(WHOLE), ""),
        f"ab/cd/{ID}.tmp": ("temporary", 4, ""),
        "ab/cd/notes.txt": ("foreign", 5, "not a name of ours"),
        f"ab/cd/{ID}.llam.bak": ("foreign", 4, "not a name of ours"),
        f"ab/cd/{'ff' * 16}.llam": ("foreign", 19, "not a name of ours"),
        "ab/cd/folder": ("foreign", 0, "not a regular file"),
        "ab/cd/fifo": ("foreign", 0, "not a regular file"),
        f"ab/cd/abcd{'0' * 28}.llam": ("foreign", 0, "not a regular file"),
    }


def test_a_walk_goes_in_the_order_of_the_names_and_tells_times(store):
    ids = ["ff" * 16, "00" * 16, ID, "abcd" + "0" * 28]
    for i, checkpoint_id in enumerate(ids):
        store.write(checkpoint_id, HEAD, PAYLOAD)
        os.utime(store.root / path_of(checkpoint_id), ns=(0, 1_700_000_000_000_000_000 + i))
    entries = list(store.walk())
    assert [entry.path for entry in entries] == sorted(path_of(i) for i in ids)
    times = {entry.path: entry.mtime_ns - 1_700_000_000_000_000_000 for entry in entries}
    assert times == {path_of(checkpoint_id): i for i, checkpoint_id in enumerate(ids)}


def test_a_walk_stays_in_the_folders_that_the_store_makes(store):
    store.write(ID, HEAD, PAYLOAD)
    for name in ("a", "abc", "AB", "zz", "ab/c", "ab/CD", "ab/cde", ".git/ob"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
        (store.root / name / f"{ID}.llam").write_bytes(b"x")
    assert [entry.path for entry in store.walk()] == [PATH]


def test_a_file_that_vanishes_during_a_walk_is_left_out(store, monkeypatch):
    store.write(ID, HEAD, PAYLOAD)
    store.write("abcd" + "f" * 28, HEAD, PAYLOAD)
    walk = store.walk()
    first = next(walk)
    assert first.path == PATH
    store.remove(path_of("abcd" + "f" * 28))
    assert list(walk) == []


def test_a_name_that_is_no_text_is_a_foreign_thing(store):
    store.write(ID, HEAD, PAYLOAD)
    (store.root / "ab" / "cd" / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    assert sorted(entry.kind for entry in store.walk()) == ["checkpoint", "foreign"]


def test_a_name_that_is_no_text_does_not_stop_a_verification(tmp_path):
    with Registry.open(None, tmp_path / "store") as registry:
        (registry.store.root / "ab" / "cd").mkdir(parents=True)
        (registry.store.root / "ab" / "cd" / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
        findings = Verifier(registry.database, registry.store).findings()
    assert [finding.kind.value for finding in findings] == ["foreign"]


# -- the marker -----------------------------------------------------------------------------------------------------------


def test_a_store_belongs_to_the_registry_that_claims_it_first(store):
    assert store.owner() is None
    store.claim("mine")
    store.claim("theirs")
    assert store.owner() == "mine"
    for unmarked in (False, True):
        store.require_owner("mine", unmarked=unmarked)
        with pytest.raises(StoreUnavailable, match="belongs to registry mine, this database is registry theirs"):
            store.require_owner("theirs", unmarked=unmarked)
    assert files_in(store) == [MARKER]
    assert json.loads((store.root / MARKER).read_bytes())["registry_id"] == "mine"


def test_a_store_without_a_marker_is_anybodys_only_where_that_may_be(store):
    store.require_owner("mine", unmarked=True)
    with pytest.raises(StoreUnavailable, match=r"contains no marker of this registry.*is it mounted.*gc --force mine"):
        store.require_owner("mine", unmarked=False)
    assert contents(store.root) == {}


def test_of_two_that_claim_at_the_same_moment_the_first_stays(store, monkeypatch):
    real, entered = os.fsync, []

    def meanwhile(fd):
        real(fd)
        if not entered:
            entered.append(True)
            Store(store.root).claim("theirs")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.fsync", meanwhile)
        store.claim("mine")
    assert store.owner() == "theirs"
    assert files_in(store) == [MARKER]


def test_a_marker_is_put_in_place_where_there_are_no_hard_links(store, monkeypatch):
    def refuse(*_args, **_kw):
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.link", refuse)
        store.claim("mine")
        store.claim("theirs")
    assert store.owner() == "mine"
    assert files_in(store) == [MARKER]


def test_a_temporary_marker_of_a_process_that_died_is_not_in_the_way(store):
    (store.root / f".{MARKER}.{'0' * 32}").write_bytes(b"half")
    store.claim("mine")
    assert store.owner() == "mine"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"null", b'"text"', b"[" * 100_000], ids=lambda c: c[:8]
)
def test_a_marker_that_cannot_be_read_names_no_owner_and_is_not_overwritten(store, content):
    (store.root / MARKER).write_bytes(content)
    assert store.owner() is None
    store.claim("mine")
    assert contents(store.root) == {MARKER: content}


@pytest.mark.parametrize("content", [b"{}", b'{"registry_id": null}', b'{"registry_id": 7}', b'{"made_by": "x"}'])
def test_a_marker_without_a_registrys_id_names_no_owner(store, content):
    (store.root / MARKER).write_bytes(content)
    assert store.owner() is None


def test_a_marker_that_cannot_be_written_is_an_error_and_leaves_nothing(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.write", failing_write)
        with pytest.raises(StoreFull, match="No space left on device"):
            store.claim("mine")
    assert store.owner() is None
    assert contents(store.root) == {}


def failing_write(*_args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoints_path_is_made_of_its_id_with_forward_slashes():
    assert re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{32}\.llam", path_of(ID))
    assert path_of("0123" + "f" * 28) == f"01/23/0123{'f' * 28}.llam"


# -- holes ---------------------------------------------------------------------------------------------------------------------


def blocks_of(store):
    return (store.root / PATH).stat().st_blocks * 512


def test_a_layer_of_zeros_takes_no_blocks_and_reads_as_it_was(store):
    layer = os.urandom(1 << 18)
    payload = layer + bytes(1 << 20) + layer + bytes(1 << 19)
    head = HEAD.ljust(4096, b"\0")
    assert store.write(ID, head, memoryview(payload)) == 4096 + len(payload)
    assert read(store) == head + payload
    whole = store.root / "dense"
    whole.write_bytes(bytes(1 << 20))
    if whole.stat().st_blocks * 512 < 1 << 20:
        pytest.skip("this file system packs zeros by itself")
    assert blocks_of(store) <= 2 * len(layer) + 3 * 4096


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 65536, 65537, 200_000])
@pytest.mark.parametrize("where", ["all zeros", "zeros first", "zeros last", "one byte in the middle"])
def test_bytes_with_runs_of_zeros_are_written_as_they_are(store, n, where):
    data = bytearray(n)
    if where == "one byte in the middle" and n:
        data[n // 2] = 1
    payload = {"zeros first": bytes(data) + b"x" * 5000, "zeros last": b"x" * 5000 + bytes(data)}.get(
        where, bytes(data)
    )
    head = HEAD.ljust(4096, b"\0")
    store.write(ID, head, memoryview(payload))
    assert read(store) == head + payload
