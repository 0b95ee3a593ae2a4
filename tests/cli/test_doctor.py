"""`llama-ckpt doctor`: what a person, a script and a monitor see of it."""

from __future__ import annotations

import shutil
import sys

import pytest

from llama_ckpt.doctor import probe as store_probe
from llama_ckpt.doctor import store as doctor_store
from llama_ckpt.doctor.diagnosis import fail, ok, warn
from llama_ckpt.errors import DoctorFailed
from llama_ckpt.store.marker import MARKER


@pytest.fixture
def plain_machine(monkeypatch, tmp_path):
    """A disk with room, of a type that is not told, whose fsync takes no time: every line depends on the registry alone."""
    monkeypatch.setattr(doctor_store, "read_mountinfo", lambda: "")
    monkeypatch.setattr(doctor_store, "_SLOW_FSYNC_S", 1000)
    monkeypatch.setattr(doctor_store, "_room", lambda *_: ok("free space", "much"))


@pytest.fixture
def other_registry(populated):
    """The store is marked for another registry."""
    (populated.root / MARKER).write_text('{"registry_id": "' + "ab" * 16 + '"}')


def test_a_sound_registry_has_a_line_for_each_check_and_exit_code_0(run, populated, plain_machine):
    lines = run("doctor").succeeded().lines
    assert {line.split()[0] for line in lines} == {"OK"}
    names = [line[6:].split(":")[0] for line in lines]
    assert len(set(names)) == len(names) > 15
    assert {"writable", "fsync", "rename", "free space", "database", "schema", "marker", "policy"} <= set(names)


def test_nothing_of_rows_and_files_changes(run, populated):
    before = populated.snapshot(), sorted(populated.root.rglob("*"))
    run("doctor").succeeded()
    assert (populated.snapshot(), sorted(populated.root.rglob("*"))) == before


def test_what_fails_is_a_line_with_advice_and_exit_code_22(run, populated, plain_machine, other_registry):
    ran = run("doctor")
    ran.failed(DoctorFailed, "1 of ", "checks failed")
    (line,) = [line for line in ran.lines if not line.startswith("OK ")]
    assert line.startswith(f"FAIL  marker: the store is of registry {'ab' * 16}, the database of ")
    assert "name the right database or store" in line


def test_a_warning_alone_is_no_failure(run, populated, plain_machine, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_MAX_AGE", "7d")
    lines = run("doctor").succeeded().lines
    assert [line for line in lines if not line.startswith("OK ")] == [
        "WARN  policy: limits: max_age: nothing prunes: llama-ckpt schedule install (or a timer of your own)"
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [(ok("free space", "x"), "OK"), (warn("free space", "x"), "WARN"), (fail("free space", "x"), "FAIL")],
)
def test_quiet_prints_the_worst_level_only(run, populated, plain_machine, monkeypatch, line, word):
    monkeypatch.setattr(doctor_store, "_room", lambda *_: line)
    ran = run("doctor", "-q")
    assert ran.lines == [word]
    assert ran.code == (DoctorFailed.exit_code if word == "FAIL" else 0)


def test_json_has_every_check_and_the_worst_level_also_when_something_fails(
    run, populated, plain_machine, other_registry
):
    ran = run("doctor", "--json")
    ran.failed(DoctorFailed)
    answer = ran.json()
    assert answer["worst"] == "FAIL"
    assert {frozenset(check) for check in answer["checks"]} == {frozenset(["name", "level", "detail", "advice"])}
    assert [check["name"] for check in answer["checks"] if check["level"] == "FAIL"] == ["marker"]


def test_on_a_host_without_any_registry_nothing_fails_and_nothing_is_made(run, tmp_path):
    ran = run("doctor").succeeded()
    assert "WARN  store: " in ran.out
    assert not (tmp_path / "xdg_data_home").exists()


@pytest.mark.parametrize("words", [[], ["--json"], ["-q"]])
def test_it_works_when_everything_is_broken(run, tmp_path, words):
    (tmp_path / "store").write_text("no folder")
    (tmp_path / "rows.sqlite3").write_bytes(b"no database" * 1000)
    url = f"sqlite:///{tmp_path}/rows.sqlite3"
    ran = run("doctor", "--store", tmp_path / "store", "--database-url", url, *words)
    ran.failed(DoctorFailed, "2 of ")


def test_connections_are_closed_also_when_something_fails(run, populated, other_registry):
    ran = run("doctor")
    ran.failed(DoctorFailed)
    assert ran.n_left_open == 0


def test_a_password_is_never_shown(run, populated):
    ran = run("doctor", "--database-url", "postgresql+psycopg://someone:geheim@127.0.0.1:1/x")
    ran.failed(DoctorFailed)
    assert "geheim" not in ran.out + ran.err
    assert "FAIL  database: " in ran.out


def test_a_name_with_a_line_break_makes_no_line_of_its_own(run, tmp_path):
    ran = run("doctor", "--store", tmp_path / "a\nOK    writable: yes")
    assert not [line for line in ran.lines if line.startswith("OK    writable")]


def test_a_model_without_the_engine_fails_with_what_installs_it(run, populated, gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    for module in ("_llama", "llamacpp"):
        monkeypatch.delitem(sys.modules, f"llama_ckpt.engine.{module}", raising=False)
    ran = run("doctor", "--model", gguf)
    ran.failed(DoctorFailed, "1 of ")
    assert "FAIL  model reuse: " in ran.lines[-1]
    assert "pip install 'llama-ckpt[llama]'" in ran.lines[-1]


@pytest.mark.llama
@pytest.mark.parametrize("there", [True, False])
def test_a_model_file_that_is_none_fails_with_the_reason(run, populated, gguf, there):
    pytest.importorskip("llama_cpp")
    if not there:
        gguf.unlink()
    ran = run("doctor", "--model", gguf)
    ran.failed(DoctorFailed, "1 of ")
    assert ran.lines[-1].startswith("FAIL  model reuse: model file: ")
    assert ("cannot load it" if there else "there is no such file") in ran.lines[-1]


def test_a_store_that_cannot_be_written_fails_and_is_otherwise_looked_at(run, populated, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_probe, "write_all", full)
    ran = run("doctor")
    ran.failed(DoctorFailed, "1 of ")
    assert "FAIL  writable: write: No space left on device (errno ENOSPC): free some space" in ran.out
    assert "OK    files: 4 ACTIVE rows, 4 files" in ran.lines


def test_a_store_that_is_not_mounted_fails(run, populated, tmp_path):
    (tmp_path / "rows").mkdir()
    shutil.copy(populated.root / "registry.sqlite3", tmp_path / "rows" / "registry.sqlite3")
    (tmp_path / "mountpoint").mkdir()
    url = f"sqlite:///{tmp_path}/rows/registry.sqlite3"
    ran = run("doctor", "--store", tmp_path / "mountpoint", "--database-url", url)
    ran.failed(DoctorFailed)
    assert "is it mounted?" in ran.out
