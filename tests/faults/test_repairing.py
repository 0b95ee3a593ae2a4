"""Repair in place, killed or failing at every step: the original or the repaired file is under its name, whole."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest
from support import child, small

from llama_ckpt.errors import BadInput, StoreFull, StoreUnavailable
from llama_ckpt.integrity.repair import FileRepairer
from llama_ckpt.store import disk

WHOLE = small.checkpoint()
PADDED = bytes(5) + WHOLE
KILLED_AT = """
import json, os, sys
from pathlib import Path
from llama_ckpt.integrity.repair import FileRepairer
path, step, keep = json.loads(sys.argv[1])
FileRepairer(in_place=True, keep_backup=keep, hook=lambda now: os._exit(137) if now == step else None).repair(Path(path))
"""


@pytest.fixture
def damaged(tmp_path):
    path = tmp_path / "files" / "state.llam"
    path.parent.mkdir()
    path.write_bytes(PADDED)
    return path


def temporaries(path):
    return [p for p in path.parent.iterdir() if p.suffix == ".tmp"]


@pytest.mark.parametrize("keep", [True, False], ids=["backup", "no backup"])
@pytest.mark.parametrize(
    ("step", "content", "n_temporaries", "backed_up"),
    [("written", PADDED, 1, False), ("backed up", PADDED, 1, True), ("replaced", WHOLE, 0, True)],
)
def test_a_repair_killed_at_any_step_leaves_the_original_or_the_repaired_file(
    damaged, step, content, n_temporaries, backed_up, keep
):
    line = [sys.executable, "-c", KILLED_AT, json.dumps([str(damaged), step, keep])]
    killed = subprocess.run(line, env=child.environment(), capture_output=True, text=True, check=False, timeout=60)
    assert killed.returncode == child.KILLED, killed.stderr
    assert damaged.read_bytes() == content
    backup = damaged.with_name("state.llam.bak")
    assert backup.exists() == (backed_up and keep)
    assert not backup.exists() or backup.read_bytes() == PADDED
    assert len(temporaries(damaged)) == n_temporaries
    if content == PADDED:
        assert FileRepairer(in_place=True).repair(damaged).backup == backup
        assert (damaged.read_bytes(), backup.read_bytes()) == (WHOLE, PADDED)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_the_original_alone(damaged, number, monkeypatch):
    def fail(*_args):
        raise OSError(number, "told by the system")

    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(StoreFull if number == errno.ENOSPC else StoreUnavailable, match="told by the system"):
        FileRepairer(in_place=True).repair(damaged)
    assert {p.name: p.read_bytes() for p in damaged.parent.iterdir()} == {"state.llam": PADDED}


def test_a_file_system_without_second_names_gets_a_copy_for_a_backup(damaged, monkeypatch):
    def no_links(*_args):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr("pathlib.Path.hardlink_to", no_links)
    done = FileRepairer(in_place=True).repair(damaged)
    assert (done.backup.read_bytes(), damaged.read_bytes()) == (PADDED, WHOLE)


def test_a_backup_that_appears_at_the_last_moment_is_kept(damaged):
    backup = damaged.with_name("state.llam.bak")

    def meanwhile(step):
        if step == "written":
            backup.write_bytes(b"of another program")

    with pytest.raises(BadInput, match="it is there already"):
        FileRepairer(in_place=True, hook=meanwhile).repair(damaged)
    assert (damaged.read_bytes(), backup.read_bytes(), temporaries(damaged)) == (PADDED, b"of another program", [])


def test_an_output_that_appears_at_the_last_moment_is_kept(damaged):
    def meanwhile(step):
        if step == "written":
            damaged.with_name("state.llam.repaired").write_bytes(b"of another program")

    with pytest.raises(BadInput, match="it is there already"):
        FileRepairer(hook=meanwhile).repair(damaged)
    assert damaged.with_name("state.llam.repaired").read_bytes() == b"of another program"
    assert temporaries(damaged) == []


@pytest.mark.parametrize("how", ["replaced", "written into"])
def test_a_file_that_another_program_changes_meanwhile_is_left_to_it(damaged, how):
    def meanwhile(step):
        if step == "written":
            if how == "replaced":
                damaged.unlink()
            damaged.write_bytes(b"of another program, longer or not")

    with pytest.raises(StoreUnavailable, match="another program changed it"):
        FileRepairer(in_place=True, hook=meanwhile).repair(damaged)
    assert {p.name: p.read_bytes() for p in damaged.parent.iterdir()} == {
        "state.llam": b"of another program, longer or not"
    }


def test_what_does_not_read_back_gets_no_name(damaged, monkeypatch):
    """As when the disk lies: the bytes that were written are not those that are read."""
    real = disk.write_all
    monkeypatch.setattr("llama_ckpt.store.disk.write_all", lambda fd, data: real(fd, memoryview(bytes(len(data)))))
    with pytest.raises(Exception, match="does not read back"):
        FileRepairer(in_place=True).repair(damaged)
    assert {p.name: p.read_bytes() for p in damaged.parent.iterdir()} == {"state.llam": PADDED}
