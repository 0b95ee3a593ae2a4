"""On which file systems SQLite may be, by the lines that the kernel reports."""

from __future__ import annotations

import logging

import pytest

from llama_ckpt.db import connect
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.errors import DatabaseUnavailable


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Opens a database on a file system of this kind."""

    def open_on(kind):
        line = f"36 22 0:40 / {tmp_path} rw,relatime - {kind} source rw\n"
        monkeypatch.setattr(connect, "read_mountinfo", lambda: line)
        Database(sqlite_url(tmp_path / "registry.sqlite3")).close()

    return open_on


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs4", "cifs", "9p", "ceph", "ocfs2", "gfs2", "wekafs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs"),
        *(
            "fuse.rclone",
            "fuse.s3fs",
            "fuse.gcsfuse",
            "fuse.mfs",
            "fuse.seaweedfs",
            "fuse.sshfs",
            "fuse.of-tomorrow",
            "fuse",
        ),
    ],
)
def test_sqlite_is_refused_on_a_file_system_that_may_be_of_several_machines(mounted, kind):
    with pytest.raises(DatabaseUnavailable, match=f"not known to be local .{kind}.*PostgreSQL"):
        mounted(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk", "fuse.fuse-overlayfs"])
def test_sqlite_is_allowed_on_a_local_file_system_without_a_word(mounted, kind, caplog):
    mounted(kind)
    assert caplog.records == []


@pytest.mark.parametrize("kind", ["virtiofs", "vboxsf", "fuse.vmhgfs-fuse"])
def test_sqlite_in_a_folder_that_a_host_shares_with_a_virtual_machine_is_a_warning(mounted, kind, caplog):
    with caplog.at_level(logging.WARNING, "llama_ckpt"):
        mounted(kind)
    assert "shares with a virtual machine" in caplog.text
    assert kind in caplog.text
