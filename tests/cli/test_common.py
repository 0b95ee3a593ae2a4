"""What holds for every command there is, and for every one that comes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ckpt import __version__
from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.registry import Registry
from llama_ckpt_cli.policy_options import GRACES, LIMITS

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
FORMS = [["--json"], ["--quiet"], ["-q"], []]


def test_help_describes_every_command(run, leaf, click_command):
    shown = run(*leaf, "--help").succeeded()
    assert shown.out.startswith(f"Usage: llama-ckpt {' '.join(leaf)} ")
    assert len(click_command.help) > 10
    assert click_command.help.split("\n")[0][:40] in " ".join(shown.out.split())


def test_every_option_and_argument_of_every_command_is_described(leaf, click_command):
    for parameter in click_command.params:
        assert parameter.help, f"{' '.join(leaf)} {parameter.name}"


def test_every_option_of_every_command_stands_in_the_documentation(leaf, click_command):
    section = DOCS.read_text(encoding="utf-8").partition("\n## Options of each command\n")[2].partition("\n## ")[0]
    row = " ".join(line for line in section.splitlines() if line.startswith(f"| `{' '.join(leaf)}` |"))
    told = set(re.findall(r"`(--[a-z-]+)", row))
    if "limit of the policy" in row or "the policy as" in row:
        told |= {f"--{name.replace('_', '-')}" for name in LIMITS}
    if "the policy as" in row:
        told |= {f"--{name.replace('_', '-')}" for name in GRACES}
    there = {name for p in click_command.params for name in p.opts if name.startswith("--")}
    assert there - {"--database-url", "--store", "--json", "--quiet", "--help"} == told


def test_every_command_takes_the_four_common_options(run, leaf):
    options = ["--database-url", "sqlite:////nowhere/x.sqlite3", "--store", "/nowhere", "--json", "--quiet"]
    run(*leaf, *options, "--help").succeeded()
    wrong = run(*leaf, "--no-such-option", "--help")
    assert (wrong.code, wrong.out) == (2, "")


def test_every_command_works_on_the_registry_that_the_common_options_name(run, populated, complete, leaf, monkeypatch):
    """The store is named by the flags alone; SQLite stands elsewhere than beside the files."""
    words = complete(leaf)
    elsewhere = populated.root.with_name("rows.sqlite3")
    (populated.root / "registry.sqlite3").rename(elsewhere)
    monkeypatch.delenv("LLAMA_CKPT_STORE")
    ran = run(*words, "--database-url", f"sqlite:///{elsewhere}", "--store", populated.root, "--json")
    assert (ran.code, ran.err) == (0, "")
    ran.json()
    assert not (populated.root / "registry.sqlite3").exists()
    assert not (populated.root.parent / "xdg_data_home").exists()


def test_json_is_all_that_is_on_stdout(run, complete, leaf):
    words = complete(leaf)
    assert run(*words, "--json").succeeded().json() is not None


def test_quiet_prints_bare_values_and_says_nothing_on_stderr(run, populated, complete, leaf):
    root, ids = populated.root, populated.ids
    expected = {
        ("match",): [ids["one"]],
        ("ls",): [ids[name] for name in ("crlf", "two", "one", "other")],
        ("show",): [str(populated.path("one").relative_to(root))],
        ("pin",): [ids["one"], ids["two"]],
        ("unpin",): [ids["one"]],
        ("rm",): [ids["one"]],
        ("flatten",): [ids["one"]],
        ("adopt",): [ids["one"]],
        ("export",): [str(populated.exported)],
        ("inspect",): ["whole: every check passed"],
        ("verify",): [],
        ("repair",): [],
        ("prune",): [ids[name] for name in ("other", "one", "two")],  # the newest stays
        ("unprune",): [],
        ("explain",): ["keeps"],
        ("purge",): [],
        ("gc", "runs"): [],
        ("schedule", "run"): [],
        ("schedule", "uninstall"): [],
        ("schedule", "status"): [],
        ("gc",): ["0"],
        ("stats",): ["4"],
        ("db", "upgrade"): ["0007"],
        ("db", "downgrade"): ["0001"],
        ("db", "current"): ["0007"],
        ("db", "check"): [],
    }
    words = complete(leaf)
    short, long = run(*words, "-q"), run(*words, "--quiet")
    assert (short.code, short.err, long.code, long.err) == (0, "", 0, "")
    if leaf in expected:
        assert short.lines == expected[leaf]
    else:
        assert leaf in {("config",), ("db", "sql"), ("doctor",), ("schedule", "install")}  # test_stats_config_db.py
        assert short.out == long.out != ""


def test_a_command_says_something_to_a_person(run, complete, leaf):
    words = complete(leaf)
    shown = run(*words).succeeded()
    assert shown.out.strip()
    with pytest.raises(json.JSONDecodeError):
        shown.json()


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_an_error_is_one_sentence_on_stderr_in_every_form(run, populated, form):
    run("show", "0" * 32, *form).refused(NotFound, "0" * 32)
    run("match", "--hash", "nonsense", *form).refused(BadInput, "nonsense")


def test_the_traceback_is_let_through_when_it_is_wanted(run, populated, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_DEBUG", "1")
    with pytest.raises(NotFound):
        run("show", "0" * 32)


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_fault_of_the_program_asks_to_be_reported_and_has_a_traceback_when_it_is_wanted(
    run, populated, monkeypatch, debug
):
    def broken(*_, **__):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Registry, "list", broken)
    monkeypatch.setenv("LLAMA_CKPT_DEBUG", debug)
    if debug:
        with pytest.raises(ZeroDivisionError):
            run("ls")
    else:
        ran = run("ls")
        assert (ran.code, ran.out) == (1, "")
        assert "internal error: ZeroDivisionError: a fault" in ran.err
        assert "LLAMA_CKPT_DEBUG=1" in ran.err
        assert "Traceback" not in ran.err


@pytest.fixture
def heard():
    """Python hears SIGINT, also where a shell has put the tests into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_ctrl_c_ends_a_command_with_130_and_no_traceback(run, populated, monkeypatch, heard, form):
    monkeypatch.setattr(Registry, "list", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    ran = run("ls", *form)
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


def test_the_version_is_told(run):
    assert run("--version").succeeded().out == f"llama-ckpt {__version__}\n"


@pytest.mark.parametrize("words", [["nonsense"], ["db", "nonsense"], ["ls", "too", "many"]], ids=" ".join)
def test_a_wrong_use_is_told_with_where_help_is(run, words):
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert "--help" in ran.err


@pytest.mark.parametrize("words", [[], ["db"]], ids=["llama-ckpt", "db"])
def test_a_group_alone_lists_its_commands(run, words):
    ran = run(*words)
    assert ran.code == 2
    assert "Usage: " in ran.out + ran.err
    assert "upgrade" in ran.out + ran.err or "\nDatabases:\n" in ran.out + ran.err


def test_a_command_closes_every_database_connection_that_it_opens(run, complete, leaf):
    assert run(*complete(leaf)).n_left_open == 0


def test_verify_of_a_file_closes_every_database_connection_that_it_opens(run, populated):
    assert run("verify", populated.path("one")).n_left_open == 0


def test_help_loads_neither_engine_nor_numbers_nor_database(leaf, helped):
    code, out, loaded = helped[" ".join(leaf)]
    assert (code, loaded) == (0, [])
    assert out.startswith("Usage: ")


@pytest.fixture(scope="module")
def helped(all_leaves):
    """Help of every command, in one process that has loaded nothing else."""
    program = """
import contextlib, io, json, sys
from llama_ckpt_cli.app import main
answers = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*words, "--help"])
    loaded = [name for name in ("llama_cpp", "numpy", "sqlalchemy", "alembic", "rich") if name in sys.modules]
    answers[" ".join(words)] = code, out.getvalue(), loaded
print(json.dumps(answers))
"""
    order = json.dumps([list(words) for words in all_leaves])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_CKPT_")}
    child = subprocess.run(
        [sys.executable, "-c", program], input=order, capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(child.stdout)
