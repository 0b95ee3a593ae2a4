"""What cannot work: one clear sentence, the exit code of docs/cli.md, and nothing changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.program import program

from llama_ckpt.db import migrate
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import (
    BadInput,
    DatabaseUnavailable,
    DoctorFailed,
    SchemaTooNew,
    SchemaTooOld,
    StoreUnavailable,
)
from llama_ckpt.registry import DATABASE_FILE, Registry

UNREACHABLE = "postgresql+psycopg://user:secret@127.0.0.1:1/x"
# Commands that never open a database.
OFFLINE = {("inspect",), ("repair",), ("config",), ("db", "sql"), ("schedule", "install"), ("schedule", "uninstall")}
DOCTOR = ("doctor",)  # it tells of a database that fails among all else: test_doctor.py


# -- databases ----------------------------------------------------------------------------------------------------------


def test_an_unreachable_database_is_told_by_every_command_without_its_password(run, complete, leaf):
    words = complete(leaf)
    ran = run(*words, "--database-url", UNREACHABLE)
    assert "secret" not in ran.out + ran.err
    if leaf in OFFLINE - {("schedule", "install")}:
        assert (ran.code, ran.err) == (0, "")
    elif leaf == ("schedule", "install"):
        ran.refused(BadInput, "LLAMA_CKPT_DATABASE_PASSWORD_FILE")  # a unit is no place for a password
    elif leaf == DOCTOR:
        assert (ran.code, "127.0.0.1" in ran.out) == (DoctorFailed.exit_code, True)
    else:
        ran.refused(DatabaseUnavailable, "127.0.0.1", "user:***@")


@pytest.mark.parametrize("form", ["--json", "--quiet"])
def test_config_shows_the_url_without_its_password_in_every_form(run, form, monkeypatch):
    shown = run("config", form, "--database-url", UNREACHABLE).succeeded().out
    assert "127.0.0.1:1/x" in shown
    assert "secret" not in shown
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_PASSWORD", "secret")
    assert "secret" not in run("config", form).succeeded().out


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://user@127.0.0.1:1/x?password=secret",
        "postgresql+psycopg://user:a@secret@127.0.0.1:1/x",
        "mysql://user:secret@127.0.0.1/x",
        "user:secret@127.0.0.1",
        "postgresql+psycopg://user:secret@127.0.0.1:noport/x",
        "oracle+oracledb://user:secret@127.0.0.1:1/?service_name=x",
    ],
)
@pytest.mark.parametrize("words", [["ls"], ["config"], ["db", "current"]], ids=" ".join)
def test_no_spelling_of_a_url_shows_its_password(run, tmp_path, url, words):
    ran = run(*words, "--database-url", url, "--store", tmp_path / "store")
    assert "secret" not in ran.out + ran.err
    assert "internal error" not in ran.err


def test_a_url_of_the_wrong_kind_in_the_settings_file_is_told_without_its_password(run, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text('database_url = ["postgresql+psycopg://user:secret@127.0.0.1:1/x"]')
    monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(path))
    assert "secret" not in run("config").refused(BadInput, "database_url", "mine.toml")


def test_a_password_from_the_environment_is_never_shown(run, complete, leaf, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_PASSWORD", "secret")
    ran = run(*complete(leaf), "--database-url", "postgresql+psycopg://user@127.0.0.1:1/x")
    assert "secret" not in ran.out + ran.err


def test_a_password_that_works_is_shown_by_no_command(run, postgresql_url, tmp_path, monkeypatch):
    url = sa.make_url(postgresql_url)
    if url.password is None:  # a server that trusts this machine takes any
        url = url.set(password="quite-secret")
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_URL", url.render_as_string(hide_password=False))
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "store"))
    for words in (["stats"], ["config"], ["db", "current"], ["db", "upgrade"], ["db", "check"], ["ls"]):
        for form in ([], ["--json"], ["--quiet"]):
            ran = run(*words, *form)
            assert ran.code == 0
            assert url.password not in ran.out + ran.err


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("nonsense", "nonsense"),
        ("mysql://host/x", "mysql"),
        ("sqlite://", "file"),
        ("sqlite:///:memory:", "file"),
        ("postgresql+psycopg://user@host:noport/x", "noport"),
    ],
)
@pytest.mark.parametrize("words", [["ls"], ["stats"], ["gc", "--yes"], ["db", "upgrade"], ["config"]], ids=" ".join)
def test_a_url_that_cannot_be_used_is_told(run, tmp_path, url, word, words):
    store = tmp_path / "store"
    store.mkdir()
    run(*words, "--database-url", url, "--store", store).refused(BadInput, "database URL", word)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("options", ["mode=rwc&uri=true", "nonsense=1", "cache=shared"])
def test_a_sqlite_url_with_options_is_refused_or_makes_one_private_file(run, tmp_path, options):
    ran = run("db", "upgrade", "--database-url", f"sqlite:///{tmp_path}/rows.sqlite3?{options}")
    if ran.code:
        ran.refused(BadInput, "database URL")
    made = [path.name for path in tmp_path.iterdir() if path.name.startswith("rows")]
    assert made == ([] if ran.code else ["rows.sqlite3"])
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in made)


def test_a_file_that_is_no_database_is_told_and_left_as_it_is(run, tmp_path, complete, leaf):
    words = complete(leaf)
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"this is no database, but 100 bytes long, which is what a header of SQLite has at least" * 3)
    before = file.read_bytes()
    ran = run(*words, "--database-url", f"sqlite:///{file}")
    if leaf in OFFLINE:
        ran.succeeded()
    elif leaf == DOCTOR:
        assert ran.code == DoctorFailed.exit_code
    else:
        ran.refused(DatabaseUnavailable, "no SQLite database", str(file))
    assert file.read_bytes() == before


def test_a_damaged_database_is_told(run, populated):
    database = populated.root / DATABASE_FILE
    database.write_bytes(database.read_bytes()[:100])
    run("ls").refused(DatabaseUnavailable)


def test_sqlite_in_a_folder_that_is_not_there_is_told_and_none_is_made(run, tmp_path):
    url = f"sqlite:///{tmp_path}/nowhere/rows.sqlite3"
    for words in (["ls"], ["stats"], ["db", "upgrade"]):
        run(*words, "--database-url", url, "--store", tmp_path / "store").refused(DatabaseUnavailable, "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def newer(populated):
    """The database was made by a newer llama-ckpt."""
    with contextlib.closing(sqlite3.connect(populated.root / DATABASE_FILE)) as db:
        db.execute("UPDATE llama_ckpt_schema SET version_num = '9999'")
        db.commit()


def test_a_newer_database_is_told_by_every_command_and_nothing_is_changed(run, populated, newer, complete, leaf):
    before = populated.snapshot()
    ran = run(*complete(leaf))
    if leaf in OFFLINE | {("db", "current"), ("db", "check")}:  # test_stats_config_db.py
        assert "Traceback" not in ran.err
    elif leaf == DOCTOR:
        assert (ran.code, "9999" in ran.out) == (DoctorFailed.exit_code, True)
    else:
        ran.refused(SchemaTooNew, "9999", "newer llama-ckpt")
    assert populated.snapshot() == before


def test_an_older_database_on_a_server_is_upgraded_only_when_that_is_asked_for(run, older_postgresql, tmp_path):
    options = ["--database-url", older_postgresql, "--store", tmp_path / "store"]
    for words in (["ls"], ["gc", "--yes"], ["match", "--text", "one"]):
        run(*words, *options).refused(SchemaTooOld, "0001", "llama-ckpt db upgrade")
    assert run("db", "current", "-q", *options).succeeded().lines == ["0001"]
    run("db", "upgrade", *options).succeeded()
    assert run("ls", "--json", *options).json() == []


@pytest.fixture
def older_postgresql(postgresql_url):
    """A schema of its own at revision 0001, on the tests' server."""
    made = sa.make_url(postgresql_url).update_query_dict({"options": "-csearch_path=older"})
    url = made.render_as_string(hide_password=False)
    database = Database(url)
    with database.write() as db:
        db.exec_driver_sql("CREATE SCHEMA older")
    migrate.upgrade(database, "0001")
    yield url
    with database.write() as db:
        db.exec_driver_sql("DROP SCHEMA older CASCADE")
    database.close()


# -- stores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["ls"], ["stats"], ["gc", "--yes"], ["match", "--text", "one"], ["db", "upgrade"]])
def test_a_store_that_is_a_file_is_told(run, tmp_path, words):
    file = tmp_path / "file"
    file.write_text("mine")
    for store in (file, file / "below"):
        run(*words, "--store", store).refused(StoreUnavailable, str(file))
    assert file.read_text() == "mine"


def test_a_store_of_another_registry_is_told(run, populated, tmp_path):
    url = f"sqlite:///{tmp_path}/other.sqlite3"
    for words in (["ls"], ["gc", "--yes"], ["stats"]):
        run(*words, "--database-url", url).refused(StoreUnavailable, "belongs to registry")
    assert len(run("ls", "-q").succeeded().lines) == 4


@pytest.mark.parametrize("name", ["with spaces", "日本語", "n" * 200, "q'uote\"s", "percent%20 &;?#"])
def test_a_store_may_have_any_name(run, populated, tmp_path, monkeypatch, name):
    monkeypatch.delenv("LLAMA_CKPT_STORE")
    root = tmp_path / name
    populated.root.rename(root)
    assert len(run("ls", "-q", "--store", root).succeeded().lines) == 4
    run("verify", "--all", "--store", root).succeeded()
    assert str(root) in run("stats", "--store", root).succeeded().out


def test_a_store_whose_name_is_no_text_is_told(run, tmp_path):
    ran = run("ls", "--store", f"{tmp_path}/\udcff")
    assert ran.out == ""
    assert "internal error" not in ran.err


AS_ANOTHER_USER = """
import contextlib, io, json, os, sys
from llama_ckpt_cli.app import main
order = json.load(sys.stdin)
# What is imported must be readable: everything is, once, before the rights are given up.
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for words in order["first"]:
        main(words)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
answers = []
for words in order["then"]:
    out, err = io.StringIO(), io.StringIO()
    import logging
    logging.getLogger("llama_ckpt").handlers[:] = []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture
def shared(template):
    """A folder that everybody may read, in which the store `read-only` cannot be written."""
    folder = Path(tempfile.mkdtemp(prefix="llama-ckpt-test-"))
    folder.chmod(0o755)
    root = folder / "read-only"
    shutil.copytree(template.root, root)
    (folder / "config").mkdir()
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def as_another_user(shared, template):
    """Runs commands, in one process, as somebody who may not write into the read-only store."""

    def run(*commands):
        scratch = ["--store", str(shared / "scratch")]
        shutil.copytree(template.root, shared / "scratch")
        first = [["ls"], ["rm", template.ids["one"]], ["gc", "--yes", "--stale-grace", "0s"], ["verify", "--all"]]
        order = {"first": [[*w, *scratch] for w in first], "then": [list(map(str, words)) for words in commands]}
        environment = {**os.environ, "XDG_CONFIG_HOME": str(shared / "config"), "HOME": str(shared)}
        child = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert child.returncode == 0, child.stderr
        return json.loads(child.stdout)

    return run


def test_a_read_only_store_and_one_that_cannot_be_made_in_a_read_only_folder_are_told_and_nothing_is_changed(
    as_another_user, shared, template
):
    root, one = shared / "read-only", template.ids["one"]
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    writing = [["rm", one], ["pin", one], ["gc", "--yes"], ["prune", "--max-age", "0s", "--yes"]]
    *answers, (code, out, err) = as_another_user(
        *([*words, "--store", root] for words in writing), ["ls", "--store", root / "new"]
    )
    assert (code, out) == (StoreUnavailable.exit_code, "")
    assert "EACCES" in err
    assert err.count("\n") == 1
    assert [code for code, _, _ in answers] == [DatabaseUnavailable.exit_code] * 4
    for _, out, err in answers:
        assert out == ""
        assert err.startswith("llama-ckpt: the database")
        assert "read-only" in err
        assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


def test_a_gc_in_a_read_only_store_tells_each_file_and_deletes_none(as_another_user, shared, template):
    """The rows stand elsewhere and can be written."""
    elsewhere = shared / "rows"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    rows = Path(shutil.copy(shared / "read-only" / DATABASE_FILE, elsewhere))
    rows.chmod(0o666)
    options = ["--store", shared / "read-only", "--database-url", f"sqlite:///{rows}"]
    removed, collected = as_another_user(
        ["rm", template.ids["one"], *options], ["gc", "--stale-grace", "0s", "--yes", *options]
    )
    assert removed[0] == 0
    assert template.ids["one"] in collected[1]
    assert "EACCES" in collected[1]
    assert "1 file could not be deleted" in collected[1]
    assert len(list((shared / "read-only").rglob("*.llam"))) == 4


# -- streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["ls"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_gone_away_makes_no_noise(populated, words):
    """As in `llama-ckpt ls | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = program(*words, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert ran.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_onto_a_full_disk_is_told_in_one_sentence(populated):
    with open("/dev/full", "w") as full:
        ran = program("ls", stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode != 0
    assert "No space left on device" in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_what_the_outputs_encoding_cannot_say_is_spelt_out(populated, encoding, monkeypatch):
    populated.set_row("one", label="日本語 \N{SNOWMAN}")
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    ran = program("show", populated.ids["one"], capture_output=True, encoding=encoding.split(":")[0])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (r"\u65e5\u672c\u8a9e" if encoding == "ascii" else "日本語") in ran.stdout


def test_json_in_an_encoding_that_cannot_say_it_is_json_all_the_same(populated, monkeypatch):
    populated.set_row("one", label="é 日本語")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ran = program("show", populated.ids["one"], "--json", capture_output=True)
    assert json.loads(ran.stdout)["label"] == "é 日本語"


def test_a_traceback_reaches_stderr_when_it_is_wanted(populated, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_DEBUG", "1")
    ran = program("show", "0" * 32, capture_output=True)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert "Traceback (most recent call last)" in ran.stderr
    assert "NotFound" in ran.stderr


def test_what_the_registry_logs_goes_to_stderr_and_quiet_keeps_it_back(run, populated, monkeypatch):
    """An error of the moment is logged as a warning."""
    from llama_ckpt.errors import StoreUnavailable
    from llama_ckpt.store.store import Store

    def refuse(*_, **__):
        raise StoreUnavailable(path="x", reason="Permission denied (errno EACCES)")

    run("rm", populated.ids["one"], populated.ids["two"])
    for name in ("one", "two"):
        populated.made_older(name, "stale_us", 48 * 3600)
    populated.set_row("two", pinned=1)
    monkeypatch.setattr(Store, "remove", refuse)
    loud = run("gc", "--yes", "--json")
    assert loud.json()["n_failed"] == 1
    assert loud.err.startswith("llama-ckpt: gc goes on without")
    populated.set_row("two", pinned=0)
    quiet = run("gc", "--yes", "--json", "--quiet")
    assert quiet.json()["n_failed"] == 1
    assert quiet.code == StoreUnavailable.exit_code, "cron must notice"
    assert quiet.err.count("\n") == 1, "the failure alone, none of the log"


def test_a_registry_that_was_opened_is_closed_when_a_command_fails(run, populated, monkeypatch):
    closed = []
    real = Registry.close
    monkeypatch.setattr(Registry, "close", lambda self: (closed.append(self), real(self)))
    run("show", "0" * 32)
    assert len(closed) == 1
