"""The command in odd surroundings: no home, closed streams, a working folder that is deleted, a reader that stops reading."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.program import program

from llama_ckpt.db.connect import sqlite_url
from llama_ckpt.errors import BadInput
from llama_ckpt.registry import DATABASE_FILE


@pytest.fixture
def no_home(monkeypatch):
    """A user without a home: as in a container that runs under a number."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))


def test_a_user_without_a_home_needs_only_the_settings_that_are_given(run, populated, no_home):
    assert run("ls", "--store", populated.root, "-q").succeeded().lines
    run("stats", "--store", populated.root).succeeded()
    assert "no home folder" in run("config", "--store", populated.root).succeeded().out


def test_a_user_without_a_home_and_without_a_store_is_asked_for_one(run, no_home, monkeypatch):
    monkeypatch.delenv("LLAMA_CKPT_STORE", raising=False)
    run("ls").refused(BadInput, "no home folder", "LLAMA_CKPT_STORE")


def test_a_relative_store_in_a_deleted_folder_is_refused_by_name(tmp_path, monkeypatch, run):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run("ls", "--store", "here").refused(BadInput, "here", "the working folder is deleted")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_streams_and_leaves_the_database_sound(populated, closed):
    line = f'"{sys.executable}" -m llama_ckpt_cli prune --max-count 1 --yes --store "{populated.root}" {closed}'
    assert subprocess.run(["sh", "-c", line], check=False, capture_output=True).returncode == 0
    assert len(program("ls", "-q", "--store", populated.root, capture_output=True).stdout.splitlines()) == 1
    url = sqlite_url(populated.root / DATABASE_FILE)
    assert program("db", "check", "--database-url", url, "--store", populated.root).returncode == 0


def test_a_reader_that_stops_reading_ends_the_command_in_silence(populated):
    reading, writing = os.pipe()
    os.close(reading)
    done = program("ls", "--store", populated.root, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["ls", "--limit", 2**63], "--limit"),
        (["gc", "runs", "--last", 10**20], "--last"),
        (["gc", "--max-delete", 10**20], "--max-delete"),
        (["warm", "--threads", 100_000], "--threads"),
        (["warm", "--n-ctx", 2**32 + 1], "--n-ctx"),
        (["batch", "--n-ctx", 2**32 + 1], "--n-ctx"),
        (["adopt", "--n-ctx", 2**32 + 1, "."], "--n-ctx"),
    ],
    ids=str,
)
def test_a_number_beyond_what_the_program_can_use_is_refused_with_its_range(run, populated, words, option):
    done = run(*words)
    assert done.code == 2
    assert option in done.err
    assert "less than or equal to" in done.err


@pytest.mark.parametrize("text", ["7", "1M", "2H", "90 S"])
def test_a_duration_whose_unit_is_not_clear_is_refused(run, populated, text):
    run("prune", "--dry-run", "--max-age", text).refused(BadInput, text, "with its unit")


def test_a_path_with_terminal_escapes_reaches_no_terminal_through_the_log(populated, tmp_path):
    bad = tmp_path / "x\x1b]0;owned\x07\x1b[2J.llam"
    bad.write_bytes(b"\0\0\0" + next(populated.root.rglob("*.llam")).read_bytes())
    done = program("adopt", bad, "--store", populated.root, capture_output=True)
    assert "\x1b" not in done.stderr + done.stdout
    assert "\\x1b" in done.stderr + done.stdout
