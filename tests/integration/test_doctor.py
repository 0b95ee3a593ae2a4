"""`doctor.examine`: each thing that can be wrong is made wrong, and its line says so while the others go on."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import shutil
import stat
import time
import uuid
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from llama_ckpt.collector import schedule
from llama_ckpt.config import DEFAULTS
from llama_ckpt.db import health, migrate, mounts, schedules
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.doctor import Diagnosis, Level, examine, worst
from llama_ckpt.doctor import probe as store_probe
from llama_ckpt.doctor import store as doctor_store
from llama_ckpt.errors import BadInput, StoreUnavailable
from llama_ckpt.gc_values import ScheduleState
from llama_ckpt.registry import DATABASE_FILE, Registry
from llama_ckpt.store import writers as owners
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import Store
from llama_ckpt.values import US_PER_S

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
HOUR_S = 3600
# Lines that tell of the machine, which may have little room, a slow disk, or its temporary files in memory.
OF_THE_MACHINE = {"file system", "free space", "fsync"}
CHECKS_OF_A_FOLDER = ("store mode", "file system", "writable", "fsync", "rename", "free space", "store clock")


def look(root: Path, url: str, **settings: str):
    """Every line by its name; and nothing may be different afterwards."""
    before = tree(root)
    found = examine(root=root, database_url=url, settings=DEFAULTS | settings)
    assert tree(root) == before, "doctor left something behind"
    lines = {diagnosis.name: diagnosis for diagnosis in found}
    assert len(lines) == len(found)
    return lines


def tree(root: Path) -> set[str]:
    found = {str(path.relative_to(root)) for path in root.rglob("*")} if root.is_dir() else {str(root.exists())}
    return {name for name in found if not name.startswith(DATABASE_FILE)}


@pytest.fixture
def look_at(registry, saved, database_url):
    """Looks at a registry with one checkpoint, on each database: `look_at(max_age="1d")`."""
    return lambda **settings: look(registry.store.root, database_url, **settings)


@pytest.fixture
def fresh(tmp_path):
    """An empty registry on SQLite, for what has nothing to do with the database."""
    root = tmp_path / "fresh"
    Registry.open(store=root).close()
    return lambda **settings: look(root, sqlite_url(root / DATABASE_FILE), **settings)


def assert_line(line, level, *words):
    assert line.level is level, line
    for word in words:
        assert word in str(line)
    if level is not OK and "not checked" not in line.detail:
        assert line.advice or level is FAIL
    assert "\n" not in str(line)


def test_a_sound_registry_has_nothing_that_fails_and_every_line_has_a_figure_or_a_name(look_at):
    found = look_at()
    assert {name for name, line in found.items() if line.level is not OK} <= OF_THE_MACHINE
    assert not [line for line in found.values() if line.level is FAIL]
    assert all(line.detail for line in found.values())
    assert_line(found["marker"], OK, "store and database are registry")
    assert_line(found["files"], OK, "1 ACTIVE row, 1 file")
    assert_line(found["schema"], OK, migrate.HEAD)
    assert "ms" in found["fsync"].detail


def test_the_worst_level_is_that_of_the_worst_line(look_at):
    found = list(look_at().values())
    assert worst([]) is OK
    assert worst([*found, Diagnosis("x", WARN, "")]) is WARN
    assert worst([Diagnosis("x", FAIL, ""), *found]) is FAIL


def test_versions_are_told_also_without_the_engine(fresh, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = fresh()
    assert_line(found["llama-cpp-python"], OK, "not installed")
    assert_line(found["SQLite"], OK, "3.")
    assert_line(found["Python"], OK, "3.")


# -- the store's folder ---------------------------------------------------------------------------------------------------


def test_before_the_first_use_nothing_fails_and_nothing_is_made(tmp_path):
    root = tmp_path / "above" / "store"
    found = look(root, sqlite_url(root / DATABASE_FILE))
    assert not (tmp_path / "above").exists()
    assert_line(found["store"], WARN, "is not there yet", "mount it first")
    assert_line(found["database"], WARN, "the first command that needs it makes it")
    assert_line(found["marker"], OK, "there is no registry yet")
    for name in (*CHECKS_OF_A_FOLDER, "left-over writes", "files"):
        assert_line(found[name], WARN, "not checked: there is no ")
    for name in ("database writes", "schema", "database clock"):
        assert_line(found[name], WARN, "not checked: there is no database")
    assert worst(found.values()) is WARN


def test_a_file_in_the_place_of_the_store_fails(tmp_path):
    (tmp_path / "store").write_text("x")
    found = look(tmp_path / "store", sqlite_url(tmp_path / "rows.sqlite3"))
    assert_line(found["store"], FAIL, "is no folder")
    assert_line(found["writable"], WARN, "not checked")


def test_a_store_that_cannot_be_made_below_a_file_fails(tmp_path):
    (tmp_path / "file").write_text("x")
    found = look(tmp_path / "file" / "store", sqlite_url(tmp_path / "rows.sqlite3"))
    assert_line(found["store"], FAIL, "cannot be made", "is no folder")


def test_a_store_that_cannot_be_made_for_want_of_rights_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = look(tmp_path / "store", sqlite_url(tmp_path / "rows.sqlite3"))
    assert_line(found["store"], FAIL, "not ours to write in")


def test_a_store_that_may_not_be_looked_at_fails(registry, look_at, monkeypatch):
    real = Path.stat

    def refuses(self, **options):
        if self == registry.store.root:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuses)
        found = {
            d.name: d
            for d in examine(root=registry.store.root, database_url=registry.database.url.render_as_string(False))
        }
    assert_line(found["store"], FAIL, "the system refuses", "Permission denied")
    assert_line(found["writable"], WARN, "not checked")
    assert_line(found["left-over writes"], WARN, "not checked")


@pytest.mark.skipif(os.name == "nt", reason="modes mean nothing there")
@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_store_that_others_reach_into_is_a_warning(registry, look_at, mode):
    registry.store.root.chmod(mode)
    assert_line(look_at()["store mode"], WARN, f"{mode:04o}", "a transcript", "chmod 700")


# -- what its file system does ----------------------------------------------------------------------------------------------


def raising(number):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    return fails


def test_a_full_disk_fails_with_what_frees_space(look_at, monkeypatch):
    monkeypatch.setattr(store_probe, "write_all", raising(errno.ENOSPC))
    found = look_at()
    assert_line(found["writable"], FAIL, "write: ", "ENOSPC", "llama-ckpt gc")
    assert_line(found["fsync"], WARN, "not checked: write failed before")
    assert_line(found["rename"], WARN, "not checked: write failed before")
    assert_line(found["store clock"], WARN, "not checked: write failed before")
    assert_line(found["database"], OK)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "belong to"), (errno.EROFS, "mounted for writing"), (errno.EIO, "system's log")],
)
def test_a_folder_that_cannot_be_written_fails_with_the_reason(look_at, monkeypatch, number, words):
    monkeypatch.setattr(Path, "mkdir", raising(number))
    assert_line(look_at()["writable"], FAIL, "create: ", errno.errorcode[number], words)


def test_an_fsync_that_fails_is_told_by_its_own_line(look_at, monkeypatch):
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    found = look_at()
    assert_line(found["fsync"], FAIL, "fsync: ", "EIO", "durable")
    assert_line(found["writable"], OK, "created and written")
    assert_line(found["rename"], WARN, "not checked: fsync failed before")


def of_folders_only(number):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    return fsync


@pytest.mark.skipif(os.name == "nt", reason="folders are not synced there")
def test_a_folder_that_cannot_be_synced_fails_and_one_that_is_never_synced_is_a_warning(look_at, monkeypatch):
    monkeypatch.setattr(os, "fsync", of_folders_only(errno.EIO))
    assert_line(look_at()["fsync"], FAIL, "fsync of the folder: ", "EIO")
    monkeypatch.setattr(os, "fsync", of_folders_only(errno.EINVAL))
    assert_line(look_at()["fsync"], WARN, "syncs no folders", "lost with the power")


def test_a_slow_fsync_is_a_warning_with_its_time(look_at, monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 0.3)
    assert_line(look_at()["fsync"], WARN, "300.0 ms for 4 KiB", "a save waits for two")


def test_one_slow_fsync_of_several_says_nothing(look_at, monkeypatch):
    waits = iter([0, 5.0] + [0, 0.001] * 1000)
    now = [0.0]

    def perf_counter():
        now[0] += next(waits)
        return now[0]

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    assert_line(look_at()["fsync"], OK, "1.0 ms")


def test_a_rename_that_fails_is_told_by_its_own_line(look_at, monkeypatch):
    monkeypatch.setattr(Path, "rename", raising(errno.EIO))
    found = look_at()
    assert_line(found["rename"], FAIL, "rename: ", "EIO")
    assert_line(found["writable"], OK)


def test_a_file_system_that_renames_within_folders_only_fails(look_at, monkeypatch):
    real = Path.rename

    def rename(self, target):
        if self.parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert_line(look_at()["rename"], FAIL, "move to another folder: ", "EXDEV", "one file system")


def test_a_shard_on_another_disk_fails(registry, look_at, monkeypatch):
    names = {"": 1, "ab": 1, "cd": 2, "quarantine": 1}
    monkeypatch.setattr(store_probe, "devices", lambda _: names)
    assert_line(look_at()["rename"], FAIL, "cd in the store is on another file system", "quarantine")


def test_the_file_system_is_asked_of_the_root_and_every_folder_in_it(registry, saved):
    root = registry.store.root
    asked = store_probe.devices(root)
    assert set(asked) == {"", saved.file_path[:2]}
    assert set(asked.values()) == {root.stat().st_dev}


def test_a_file_that_reads_back_otherwise_fails(look_at, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert_line(look_at()["writable"], FAIL, "read back: ", "other bytes than were written")


def test_a_probe_that_cannot_be_removed_is_told(registry, database_url, monkeypatch):
    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", raising(errno.EPERM))
    found = {d.name: d for d in examine(root=registry.store.root, database_url=database_url)}
    assert_line(found["writable"], FAIL, "remove: ", "EPERM")
    monkeypatch.setattr(Path, "unlink", real)
    shutil.rmtree(next(registry.store.root.glob(".llama-ckpt-probe.*")))


def test_ctrl_c_in_the_middle_leaves_nothing(registry, database_url, monkeypatch):
    def interrupted(_fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        look(registry.store.root, database_url)
    assert list(registry.store.root.glob(".llama-ckpt-probe.*")) == []


def test_what_a_killed_probe_left_goes_with_the_next_one_and_nothing_else_does(registry, database_url):
    root = registry.store.root
    machine, pid, started = owners.my_tag().split("-")
    of_a_dead_process = root / f".llama-ckpt-probe.{machine}-{pid}-{int(started) - 1000}.00000001"
    elsewhere = root / ".llama-ckpt-probe.ffffffff-1-1.00000002"
    long_ago = root / ".llama-ckpt-probe.ffffffff-1-1.00000003"
    not_ours = root / ".llama-ckpt-probe.mine"
    for folder in (of_a_dead_process, elsewhere, long_ago, not_ours):
        (folder / "a").mkdir(parents=True)
        (folder / "a" / "probe.tmp").write_bytes(b"x")
    os.utime(long_ago, (time.time() - 2 * 86_400,) * 2)
    examine(root=root, database_url=database_url)
    assert [path.exists() for path in (of_a_dead_process, elsewhere, long_ago, not_ours)] == [False, True, False, True]


def test_something_foreign_in_a_probes_folder_stays(registry, database_url):
    left = registry.store.root / ".llama-ckpt-probe.ffffffff-1-1.00000003"
    left.mkdir()
    (left / "mine.txt").write_text("x")
    os.utime(left, (time.time() - 2 * 86_400,) * 2)
    look(registry.store.root, database_url)
    assert (left / "mine.txt").read_text() == "x"


# -- which file system, and how much room -------------------------------------------------------------------------------------


@pytest.fixture
def mounted(fresh, tmp_path, monkeypatch):
    """The line of the store's file system, for a line of mountinfo that ends like this."""

    def line(kind, options="rw"):
        text = tmp_path / "mountinfo"
        text.write_text(
            f"22 1 8:1 / / rw - ext4 /dev/sda rw\n36 22 0:40 / {tmp_path} {options} - {kind} server:/x rw\n"
        )
        monkeypatch.setattr(doctor_store, "read_mountinfo", text.read_text)
        return fresh()["file system"]

    return line


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "btrfs"])
def test_a_disk_is_named(mounted, tmp_path, kind):
    assert_line(mounted(kind, "rw,noatime"), OK, f"{kind} at {tmp_path}")


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("soft", "EIO in the middle of a save"),
        ("softerr", "in the middle of a save"),
        ("nocto", "another host may not see"),
        ("nobarrier", "does not reach the disk"),
        ("barrier=0", "does not reach the disk"),
    ],
)
def test_an_option_that_breaks_a_promise_is_a_warning_with_the_reason(mounted, kind, option, words):
    assert_line(mounted(kind, f"rw,relatime,{option}"), WARN, f"option {option}: ", words, "mount it without")


@pytest.mark.parametrize("kind", ["fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"])
def test_an_object_store_is_a_warning(mounted, kind):
    assert_line(mounted(kind), WARN, kind, "rename is no single step")


def test_a_store_in_memory_is_a_warning(mounted):
    assert_line(mounted("tmpfs"), WARN, "outlives a restart")


def test_nfs_is_told_with_what_is_relied_on(fresh, tmp_path, monkeypatch):
    """SQLite's file stands in the store here, and refuses such a place by itself: only doctor is told that it is NFS."""
    text = tmp_path / "mountinfo"
    text.write_text(f"36 22 0:40 / {tmp_path} rw,hard,vers=4.2,nolock,noatime - nfs4 server:/x rw\n")
    monkeypatch.setattr(doctor_store, "read_mountinfo", text.read_text)
    assert_line(fresh()["file system"], OK, "nfs4", "rename is one step on the server", "with lookupcache=positive")
    text.write_text(text.read_text().replace("server:/x rw", "server:/x rw,lookupcache=pos"))
    assert "lookupcache" not in fresh()["file system"].detail


def test_a_system_that_tells_no_file_systems_is_no_fault(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_store, "read_mountinfo", lambda: "")
    assert_line(fresh()["file system"], OK, "does not tell")


def test_mountinfo_is_read_with_its_escapes_and_the_later_of_two_mounts_counts():
    text = "\n".join(
        [
            "22 1 8:1 / / rw - ext4 /dev/sda rw",
            "nonsense",
            r"30 22 0:5 / /a\040b rw,noatime shared:1 master:2 - xfs /dev/my\040disk rw,attr2",
            r"31 22 0:6 / /a\040b ro - nfs4 server:/x rw,soft",
        ]
    )
    assert mounts.mount_of(Path("/c"), text).kind == "ext4"
    found = mounts.mount_of(Path("/a b/store"), text)
    assert (found.kind, found.source, found.point) == ("nfs4", "server:/x", Path("/a b"))
    assert found.options == {"ro", "rw", "soft"}
    assert mounts.mount_of(Path("/c"), "") is None


Usage = namedtuple("Usage", "total used free")
GB = 1_000_000_000


@pytest.mark.parametrize(
    ("free", "settings", "level", "words"),
    [
        (60 * GB, {}, OK, "(60%)"),
        (4 * GB, {}, WARN, "(4%)"),
        (60 * GB, {"min_free": "70GB"}, WARN, "min_free is 65.2 GiB"),
        (60 * GB, {"min_free": "70%"}, WARN, "min_free is 65.2 GiB"),
        (60 * GB, {"min_free": "50%"}, OK, "(60%)"),
    ],
)
def test_little_room_is_a_warning(fresh, monkeypatch, free, settings, level, words):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * GB, 100 * GB - free, free))
    monkeypatch.setattr(store_probe, "inodes", lambda _: None)
    assert_line(fresh(**settings)["free space"], level, words, *(["prune"] if level is WARN else []))


def test_few_inodes_are_a_warning(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * GB, 0, 60 * GB))
    monkeypatch.setattr(store_probe, "inodes", lambda _: (40, 1000))
    assert_line(fresh()["free space"], WARN, "40 of 1,000 inodes")


# -- clocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        (2, OK, "2.0 s off"),
        (60, WARN, "behind this host's"),
        (-60, WARN, "ahead of this host's"),
        (1000, FAIL, "gc refuses to run"),
        (-1000, FAIL, "gc refuses to run"),
    ],
)
def test_a_clock_of_this_host_that_is_off_is_seen_by_file_system_and_database(
    look_at, monkeypatch, ahead_s, level, words
):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    found = look_at()
    assert_line(found["store clock"], level, words, "file system's clock")
    assert_line(found["database clock"], level, words, "database's clock")


# -- the database --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def version(database_url, registry):
    """Writes another revision into the database's version; the right one stands there again at the end."""
    database = Database(database_url)

    def write(revision):
        with database.write() as db:
            db.execute(sa.text("UPDATE llama_ckpt_schema SET version_num = :r"), {"r": revision})

    yield write
    write(migrate.HEAD)
    database.close()


def test_a_schema_of_a_newer_version_fails_and_what_depends_on_it_is_not_checked(look_at, version):
    version("9999")
    found = look_at(max_age="1d")
    assert_line(found["schema"], FAIL, "9999", "install a newer llama-ckpt")
    for name in ("database writes", "marker", "files", "policy"):
        assert_line(found[name], WARN, "not checked: the schema is not this version's")
    assert_line(found["writable"], OK)


def test_an_older_schema_is_upgraded_on_sqlite_and_fails_on_a_server(look_at, version, database_url):
    version(migrate.REVISIONS[0])
    line = look_at()["schema"]
    if database_url.startswith("sqlite"):
        assert_line(line, WARN, "upgraded when it is next opened")
    else:
        assert_line(line, FAIL, "llama-ckpt db upgrade")


def test_a_database_without_a_schema_is_a_warning_and_stays_without(tmp_path):
    (tmp_path / "rows.sqlite3").write_bytes(b"")
    url = sqlite_url(tmp_path / "rows.sqlite3")
    found = look(tmp_path / "store", url)
    assert_line(found["schema"], WARN, "there is none yet")
    assert_line(found["database writes"], WARN, "not checked")
    with contextlib.closing(Database(url)) as database:
        assert migrate.current(database) is None


def test_a_server_that_does_not_answer_fails_once_and_the_store_is_checked_all_the_same(registry, saved):
    url = "postgresql+psycopg://someone:secret@127.0.0.1:1/nothing"
    found = look(registry.store.root, url)
    assert_line(found["database"], FAIL, "127.0.0.1")
    for name in ("database writes", "schema", "database clock", "marker", "files"):
        assert_line(found[name], WARN, "not checked: the database cannot be reached")
    assert_line(found["writable"], OK)
    assert_line(found["left-over writes"], OK)
    assert "secret" not in "".join(map(str, found.values()))


@pytest.mark.parametrize("url", ["mysql://host/x", "sqlite://", "postgresql+psycopg://host"])
def test_a_url_that_cannot_be_used_fails_with_the_reason(tmp_path, url):
    found = look(tmp_path, url)
    assert_line(found["database"], FAIL, "cannot be used")
    assert_line(found["schema"], WARN, "not checked: there is no usable database")


def test_sqlite_in_a_folder_that_is_not_there_fails(tmp_path):
    found = look(tmp_path / "store", sqlite_url(tmp_path / "nowhere" / "rows.sqlite3"))
    assert_line(found["database"], FAIL, "there is no folder")
    assert not (tmp_path / "nowhere").exists()
    assert_line(found["marker"], WARN, "not checked")


def test_a_file_that_is_no_database_fails(tmp_path):
    (tmp_path / "rows.sqlite3").write_bytes(b"no database at all" * 1000)
    assert_line(look(tmp_path / "store", sqlite_url(tmp_path / "rows.sqlite3"))["database"], FAIL, "SQLITE_NOTADB")


def test_a_damaged_sqlite_file_fails(tmp_path):
    root = tmp_path / "store"
    Registry.open(store=root).close()
    data = bytearray((root / DATABASE_FILE).read_bytes())
    with contextlib.closing(Database(sqlite_url(root / DATABASE_FILE))) as database, database.read() as db:
        page = db.execute(
            sa.text("SELECT rootpage FROM sqlite_master WHERE name = 'uq_llama_ckpt_meta_active'")
        ).scalar_one()
    data[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    (root / DATABASE_FILE).write_bytes(data)
    assert_line(look(root, sqlite_url(root / DATABASE_FILE))["SQLite file"], FAIL, "backup")


def test_a_large_sqlite_file_is_not_read_whole(fresh, monkeypatch):
    monkeypatch.setattr("llama_ckpt.doctor.database._QUICK_CHECK_BYTES", 1)
    assert_line(fresh()["SQLite file"], OK, "too large to check here")


def test_a_journal_mode_that_cannot_be_changed_is_a_warning(fresh, monkeypatch):
    monkeypatch.setattr(health, "journal_mode", lambda _: "delete")
    assert_line(fresh()["SQLite file"], WARN, "journal mode delete", "read-only?")


def test_rows_that_say_nothing_fail_and_the_store_is_checked_all_the_same(fresh, tmp_path):
    with (
        contextlib.closing(Database(sqlite_url(tmp_path / "fresh" / DATABASE_FILE))) as database,
        database.write() as db,
    ):
        db.execute(sa.text("DELETE FROM registry_info"))
    found = fresh()
    assert_line(found["rows"], FAIL)
    assert_line(found["marker"], WARN, "not checked: the rows cannot be read")
    assert_line(found["writable"], OK)


def test_a_database_that_refuses_writes_fails(postgresql_url, tmp_path):
    url = sa.make_url(postgresql_url).update_query_dict({"options": "-c default_transaction_read_only=on"})
    found = look(tmp_path / "other", url.render_as_string(hide_password=False))
    assert_line(found["database"], OK, "PostgreSQL")
    assert_line(found["database writes"], FAIL, "read-only")


# -- the marker ----------------------------------------------------------------------------------------------------------------


def test_a_store_without_marker_and_rows_is_new(registry, database_url):
    assert_line(look(registry.store.root, database_url)["marker"], OK, "the first save marks it")


def test_an_unmounted_store_fails(registry, saved, database_url, tmp_path):
    (tmp_path / "mountpoint").mkdir(mode=0o700)
    found = look(tmp_path / "mountpoint", database_url)
    assert_line(found["marker"], FAIL, "1 row of registry", "name files in it", "is it mounted?")
    assert_line(found["files"], WARN, "1 ACTIVE row, 0 files")


def test_a_store_that_is_not_there_though_rows_name_files_fails(registry, saved, database_url, tmp_path):
    found = look(tmp_path / "nowhere", database_url)
    assert_line(found["marker"], FAIL, "is it mounted?")
    assert_line(found["store"], WARN, "is not there yet")


def test_a_marker_that_cannot_be_read_is_told_as_one(registry, saved, look_at):
    (registry.store.root / MARKER).write_text("{")
    assert_line(look_at()["marker"], FAIL, "a marker that cannot be read")


def test_a_store_of_another_registry_fails_with_both_names(registry, saved, look_at):
    other = uuid.uuid4().hex
    marker = registry.store.root / MARKER
    marker.write_text(marker.read_text().replace(registry.registry_id, other))
    assert_line(look_at()["marker"], FAIL, other, registry.registry_id)


def test_a_store_whose_database_is_gone_fails(tmp_path):
    Store(tmp_path).claim("ab" * 16)
    found = look(tmp_path, sqlite_url(tmp_path / DATABASE_FILE))
    assert_line(found["marker"], FAIL, "ab" * 16, "there is no database", "backup")


# -- files ------------------------------------------------------------------------------------------------------------------


def plant(root: Path, age_s: float, owner: str = "") -> Path:
    folder = root / "ab" / "cd"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"abcd{uuid.uuid4().hex[:28]}{owner and '.'}{owner}.tmp"
    path.write_bytes(bytes(3000))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_old_temporaries_are_a_warning_with_their_bytes(registry, look_at, left_in_store):
    left_in_store.add("temporary")
    for age_s in (2 * HOUR_S, 50 * HOUR_S, 60):
        plant(registry.store.root, age_s)
    assert_line(look_at()["left-over writes"], WARN, "2 temporary files", "5.9 KiB", "llama-ckpt gc")


def test_a_slow_writer_that_lives_is_no_left_over(registry, look_at, left_in_store):
    left_in_store.add("temporary")
    plant(registry.store.root, 2 * HOUR_S, owners.my_tag())
    assert_line(look_at()["left-over writes"], OK, "none")


def test_fewer_files_than_rows_are_a_warning(registry, saved, look_at, left_in_store):
    left_in_store.add("missing")
    (registry.store.root / saved.file_path).unlink()
    assert_line(look_at()["files"], WARN, "1 ACTIVE row, 0 files", "llama-ckpt verify --all")


def test_a_store_that_cannot_be_walked_fails(registry, look_at, monkeypatch):
    def walk(self):
        raise StoreUnavailable(path=self.root, reason="Stale file handle (errno ESTALE)")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(Store, "walk", walk)
        found = look_at()
    assert_line(found["left-over writes"], FAIL, "ESTALE")
    assert_line(found["files"], WARN, "not checked")


def test_a_huge_store_is_not_counted_to_its_end(look_at, monkeypatch):
    module = importlib.import_module("llama_ckpt.doctor.examine")
    monkeypatch.setattr(module, "_MAX_COUNTED_FILES", 0)
    assert_line(look_at()["files"], OK, "over 0 files (no more were counted)")


# -- policy -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduled(database_url, registry):
    """Puts a schedule's row: it runs next in so many seconds (None: it does not say)."""

    def put(next_in_s, spec="every 15m"):
        with registry.database.write() as db:
            schedules.put(db, "host:/store", spec, next_in_s)
            schedules.finished(db, "host:/store", "3 marked STALE")

    return put


LIMITS = ["max_age", "max_idle", "max_bytes", "max_count", "min_free", "max_bytes_per_model", "max_count_per_label"]


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_without_a_schedule_is_a_warning(fresh, name):
    line = fresh(**{name: "1d" if name in ("max_age", "max_idle") else "1"})["policy"]
    assert_line(line, WARN, name, "nothing prunes: llama-ckpt schedule install")


def test_without_a_limit_no_schedule_is_needed(look_at):
    assert_line(look_at()["policy"], OK, "no limit is set")


def test_a_limit_without_a_database_is_a_limit_without_a_schedule(tmp_path):
    found = look(tmp_path / "store", sqlite_url(tmp_path / "store" / DATABASE_FILE), max_age="1d")
    assert_line(found["policy"], WARN, "nothing prunes")


@pytest.mark.parametrize("next_in_s", [600, 0, -30])
def test_a_limit_with_a_schedule_that_runs_is_told_with_its_last_run(look_at, scheduled, next_in_s):
    scheduled(next_in_s)
    assert_line(look_at(max_age="1d")["policy"], OK, "max_age", "host:/store", "every 15m", "3 marked STALE")


@pytest.mark.parametrize("next_in_s", [-2 * HOUR_S, None])
def test_a_schedule_that_died_or_was_stopped_is_none(look_at, scheduled, next_in_s):
    scheduled(next_in_s)
    assert_line(look_at(max_age="1d")["policy"], WARN, "host:/store runs no more", "nothing prunes")


def test_a_timer_of_the_systems_that_ran_of_late_is_a_schedule(look_at, scheduled):
    scheduled(None, schedules.ONCE)
    assert_line(look_at(max_age="1d")["policy"], OK, "host:/store")


def test_a_timer_that_did_not_run_for_days_is_none(look_at, scheduled, registry):
    scheduled(None, schedules.ONCE)
    with registry.database.write() as db:
        db.execute(sa.text("UPDATE gc_schedule SET last_us = last_us - 259200000000"))
    assert_line(look_at(max_age="1d")["policy"], WARN, "nothing prunes")


@pytest.mark.parametrize(("late_s", "alive"), [(59, True), (300, False), (601, False)])
def test_doctor_and_schedule_status_agree_on_a_schedule_that_is_late(
    look_at, scheduled, registry, monkeypatch, late_s, alive
):
    scheduled(0)
    read = schedules.schedules
    monkeypatch.setattr(
        schedules, "schedules", lambda db: [replace(row, now_us=row.next_us + late_s * US_PER_S) for row in read(db)]
    )
    (status,) = schedule.statuses(registry.context)
    assert status.state is (ScheduleState.WAITING if alive else ScheduleState.OVERDUE)
    assert look_at(max_age="1d")["policy"].level is (OK if alive else WARN)


@pytest.mark.parametrize(("name", "value"), [("max_age", "soon"), ("low_water", "200%"), ("order", "best")])
def test_a_setting_that_cannot_be_read_fails_and_the_rest_is_checked(look_at, name, value):
    found = look_at(**{name: value})
    assert_line(found["policy"], FAIL, value, "llama-ckpt config")
    assert_line(found["graces"], WARN, "not checked")
    assert_line(found["writable"], OK)


@pytest.mark.parametrize(
    ("settings", "level", "words"),
    [
        ({}, OK, "stale 86400 s, ghost 3600 s"),
        ({"ghost_grace": "9m"}, WARN, "shorter than a slow save"),
        ({"ghost_grace": "10m"}, OK, "ghost 600 s"),
        ({"stale_grace": "0s"}, WARN, "cannot be undone"),
    ],
)
def test_a_grace_that_is_too_short_is_a_warning(fresh, settings, level, words):
    line = fresh(**settings)["graces"]
    assert (line.level, words in str(line)) == (level, True)


# -- faults of the checks themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a fault"), OSError("no such thing"), BadInput(what="x", value=1, reason="r")]
)
def test_a_check_that_fails_itself_is_a_line_and_stops_no_other(look_at, monkeypatch, error):
    def broken(*_):
        raise error

    before = set(look_at())
    monkeypatch.setattr(doctor_store, "_mode", broken)
    monkeypatch.setattr(store_probe, "probe", broken)
    found = look_at()
    assert set(found) == before
    assert_line(found["store mode"], FAIL, str(error))
    assert_line(found["writable"], FAIL, str(error))
    assert_line(found["fsync"], WARN, "not checked: nothing was tried")
    assert_line(found["schema"], OK)
