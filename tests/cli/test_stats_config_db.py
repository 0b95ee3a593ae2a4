from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.config import DEFAULTS
from llama_ckpt.db import migrate
from llama_ckpt.errors import BadInput, NotFound, SchemaTooNew, VerifyFailed
from llama_ckpt.registry import DATABASE_FILE, Registry
from llama_ckpt.retention.policy import SETTINGS, Step
from llama_ckpt.values import Outcome

# -- stats --------------------------------------------------------------------------------------------------------------


def test_stats_count_checkpoints_bytes_hits_and_time_spared(run, populated):
    run("rm", populated.ids["two"])
    populated.set_row("one", hit_count=2)
    shown = run("stats").succeeded()
    assert shown.fields["ACTIVE"].startswith("3 checkpoints, ")
    assert shown.fields["STALE"].startswith("1 checkpoint, ")
    assert shown.fields["evaluation time saved"] == "3.0 s"
    assert str(populated.root) in shown.fields["store"]
    assert shown.fields["database"] == populated.url
    assert {line.split()[0] for line in shown.lines if "KiB" in line and "checkpoint" not in line} >= {
        "sample",
        "other",
    }
    totals = run("stats", "--json").succeeded().json()["totals"]
    assert (totals["n_active"], totals["n_stale"], totals["hit_count"]) == (3, 1, 2)
    active = sum(populated.path(name).stat().st_size for name in ("one", "crlf", "other"))
    assert (totals["active_bytes"], totals["stale_bytes"]) == (active, populated.path("two").stat().st_size)
    assert run("stats", "-q").succeeded().lines == ["3"]


def test_stats_show_what_was_met_in_files_over_all_processes(run, populated):
    assert run("stats", "--json").succeeded().json()["totals"]["events"] == {}
    assert "met in files" not in run("stats").succeeded().out
    populated.path("other").write_bytes(bytes(3) + populated.path("other").read_bytes())
    engine = SampleEngine(samples.F16_FLASH, weights="cd" * 32)
    for _ in range(2):
        with Registry.open(store=populated.root) as registry:
            assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert ["padding_detected", "2"] in [line.split() for line in run("stats").succeeded().lines]
    assert run("stats", "--json").succeeded().json()["totals"]["events"] == {"padding_detected": 2}


def test_stats_of_an_empty_registry_are_zeros(run, empty):
    assert run("stats").succeeded().fields["ACTIVE"].startswith("0 checkpoints")


def test_stats_show_the_last_runs(run, populated):
    run("prune", "--max-age", "0s", "--yes").succeeded()
    run("gc", "--stale-grace", "0s", "--yes").succeeded()
    last, first = [line for line in run("stats").succeeded().lines if line.startswith("run ")]
    assert last.startswith("run 2 gc ")
    assert "3 items" in last, "the newest stays"
    assert first.startswith("run 1 prune ")


# -- config -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings_file(tmp_path):
    """`settings_file(text)`: the user's settings, where the program looks for them by itself."""

    def write(text):
        path = tmp_path / "xdg_config_home" / "llama-ckpt" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_without_any_setting_everything_is_by_default_and_nothing_is_made(run, tmp_path):
    shown = run("config", "--json").succeeded().json()
    assert {name: shown[name]["origin"] for name in DEFAULTS} == dict.fromkeys(DEFAULTS, "default")
    assert shown["store"]["value"] == str(tmp_path / "xdg_data_home" / "llama-ckpt")
    assert shown["database_url"]["value"].endswith("/xdg_data_home/llama-ckpt/" + DATABASE_FILE)
    assert not (tmp_path / "xdg_data_home").exists()


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(
    run, tmp_path, monkeypatch, settings_file
):
    def shown(*options):
        found = run("config", "--json", *options).succeeded().json()["store"]
        return found["value"], found["origin"]

    path = settings_file('store = "/from/the/file"\n')
    assert shown() == ("/from/the/file", f"file {path}")
    monkeypatch.setenv("LLAMA_CKPT_STORE", "/from/the/environment")
    assert shown() == ("/from/the/environment", "environment LLAMA_CKPT_STORE")
    assert shown("--store", "/from/the/flag") == ("/from/the/flag", "flag")


def test_the_table_names_every_setting_its_origin_and_the_file(run, monkeypatch, settings_file):
    path = settings_file("stale_grace = 3600\ndrop_page_cache = true\n")
    monkeypatch.setenv("LLAMA_CKPT_MAX_AGE", "30d")
    shown = run("config").succeeded()
    rows = {line.split()[0]: line for line in shown.lines if line.strip()}
    assert set(DEFAULTS) <= set(rows)
    assert rows["stale_grace"].split() == ["stale_grace", "3600", "file", str(path)]
    assert rows["drop_page_cache"].split()[1] == "true"
    assert rows["max_age"].split() == ["max_age", "30d", "environment", "LLAMA_CKPT_MAX_AGE"]
    assert str(path) in shown.lines[-1]


def test_quiet_prints_names_and_values(run, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_STALE_GRACE", "2h")
    lines = run("config", "-q").succeeded().lines
    assert [line.split("=")[0] for line in lines] == list(DEFAULTS)
    assert "stale_grace=2h" in lines


def test_another_settings_file_is_named_by_the_environment(run, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text('store = "/from/mine"\n')
    monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(path))
    assert run("config", "--json").json()["store"] == {"value": "/from/mine", "origin": f"file {path}"}


def test_a_settings_file_that_was_named_and_does_not_exist_is_an_error(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(tmp_path / "nothing.toml"))
    run("config").refused(BadInput, "nothing.toml")


@pytest.mark.parametrize(
    ("text", "word"),
    [("nonsense = 1", "nonsense"), ("not toml", "config.toml"), ("store = []", "store"), ("max_age = {}", "max_age")],
)
@pytest.mark.parametrize("words", [["config"], ["ls"], ["stats"]], ids=" ".join)
def test_a_settings_file_that_cannot_be_used_is_an_error(run, settings_file, text, word, words):
    settings_file(text)
    run(*words).refused(BadInput, word, "config.toml")


def test_a_setting_that_is_neither_true_nor_false_is_an_error(run, populated, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_DROP_PAGE_CACHE", "perhaps")
    run("ls").refused(BadInput, "drop_page_cache", "perhaps")


def test_the_settings_are_what_the_commands_use(run, populated, monkeypatch, settings_file):
    monkeypatch.delenv("LLAMA_CKPT_STORE")
    settings_file(f"store = {str(populated.root)!r}\n")
    assert len(run("ls", "-q").succeeded().lines) == 4


@pytest.mark.parametrize("declared", SETTINGS, ids=lambda declared: declared.name)
def test_a_setting_of_the_policy_is_an_option_with_its_help_and_a_row_of_the_documentation(run, declared):
    commands = [["gc"]] if declared.step is Step.GC else [["prune"], ["explain"]]
    for words in [*commands, ["schedule", "run"], ["schedule", "install"]]:
        shown = " ".join(run(*words, "--help").succeeded().out.split())
        assert re.search(rf"--{declared.name.replace('_', '-')} [A-Z]+ {re.escape(declared.help)}", shown)
    docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = docs.partition("\n## Settings\n")[2].partition("\n## ")[0]
    assert re.search(rf"^\|[^|]*`{declared.name}`[^|]*\|[^|]*LLAMA_CKPT_", table, re.MULTILINE)


def test_a_field_that_is_added_to_the_policy_is_a_setting_everywhere():
    program = """
import contextlib, dataclasses, io, os
from llama_ckpt.retention import policy as module

declared = module.setting("max_spam", module.Kind.COUNT, "Limit the number of spams.")
spam = dataclasses.field(default=None, metadata=declared)
module.Policy = dataclasses.make_dataclass(
    "Policy", [("max_spam", int | None, spam)], bases=(module.Policy,), frozen=True, kw_only=True
)
module.SETTINGS = module.settings_of(module.Policy)

from llama_ckpt.config import DEFAULTS, policy_of, settings
from llama_ckpt_cli.app import main

assert DEFAULTS["max_spam"] == ""
found = settings({}, {"LLAMA_CKPT_MAX_SPAM": "3"}, None)
assert found["max_spam"].origin == "environment LLAMA_CKPT_MAX_SPAM"
assert policy_of({name: setting.value for name, setting in found.items()}).max_spam == 3
for words in (["prune"], ["explain"], ["schedule", "run"], ["schedule", "install"], ["doctor"], ["config"]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*words, "--help"] if len(words) > 1 or words[0] in ("prune", "explain") else words)
    shown = " ".join(out.getvalue().split())
    text = {"doctor": "limits: max_spam", "config": "max_spam 3 environment LLAMA_CKPT_MAX_SPAM"}.get(
        words[0], "--max-spam N Limit the number of spams."
    )
    assert text in shown, (words, shown)
"""
    environment = {"LLAMA_CKPT_MAX_SPAM": "3"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment)
    assert (ran.returncode, ran.stderr) == (0, "")


# -- db -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A place for a registry where there is none yet."""
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "new"))
    return tmp_path / "new"


def test_upgrade_makes_a_schema_once(run, new):
    made = run("db", "upgrade", "--json").succeeded().json()
    assert (made["before"], made["now"]) == (None, migrate.HEAD)
    assert run("db", "upgrade", "--json").succeeded().json()["before"] == migrate.HEAD
    assert "is already there" in run("db", "upgrade").succeeded().out
    assert run("ls", "--json").json() == []


def test_current_tells_the_databases_schema_and_the_programs(run, populated):
    assert run("db", "current", "-q").succeeded().lines == [migrate.HEAD]
    assert run("db", "current").succeeded().out.startswith(populated.url)
    run("db", "downgrade", "0001", "--yes").succeeded()
    assert run("db", "current", "--json").json()["current"] == "0001"


def test_questions_about_a_database_that_is_not_there_make_none(run, new):
    assert run("db", "current", "-q").succeeded().lines == ["none"]
    run("db", "check").refused(NotFound, "llama-ckpt db upgrade")
    assert not new.exists()


def test_an_upgrade_brings_an_older_schema_up_with_its_rows(run, populated):
    run("db", "downgrade", "0001", "--yes").succeeded()
    assert run("db", "upgrade", "--json").succeeded().json()["before"] == "0001"
    assert len(run("ls", "-q").lines) == 4
    run("verify", "--all").succeeded()


def test_check_finds_what_someone_changed_by_hand(run, populated):
    assert migrate.HEAD in run("db", "check").succeeded().out
    assert run("db", "check", "--json").json()["differences"] == []
    with contextlib.closing(sqlite3.connect(populated.root / DATABASE_FILE)) as db:
        db.execute("DROP INDEX ix_llama_ckpt_meta_used")
        db.commit()
    ran = run("db", "check", "-q")
    ran.failed(VerifyFailed)
    assert len(ran.lines) == 1
    assert "ix_llama_ckpt_meta_used" in ran.out


def test_check_of_a_newer_schema_does_not_call_it_this_versions(run, populated, newer):
    run("db", "check").refused(SchemaTooNew, "9999")


@pytest.fixture
def newer(populated):
    with contextlib.closing(sqlite3.connect(populated.root / DATABASE_FILE)) as db:
        db.execute("UPDATE llama_ckpt_schema SET version_num = '9999'")
        db.commit()


def test_current_shows_a_newer_schema_without_complaint(run, populated, newer):
    assert run("db", "current", "--json").succeeded().json()["current"] == "9999"


def test_a_downgrade_without_a_terminal_needs_yes(run, populated):
    before = populated.snapshot()
    run("db", "downgrade", "0001").refused(BadInput, "there is no terminal to ask on", "--yes")
    assert populated.snapshot() == before


def test_a_downgrade_without_a_terminal_advises_only_what_it_has(run, populated):
    assert "--dry-run" not in run("db", "downgrade", "0001").err


def test_a_person_who_does_not_agree_keeps_the_schema(run, populated, answer):
    answer("n")
    assert run("db", "downgrade", "0001").code == 0
    assert run("db", "current", "-q").lines == [migrate.HEAD]


def test_a_downgrade_to_a_revision_that_is_none_is_refused(run, populated):
    run("db", "downgrade", "nonsense", "--yes").refused(BadInput, "nonsense", migrate.HEAD)


def test_a_downgrade_that_would_go_up_is_refused(run, populated):
    run("db", "downgrade", "0001", "--yes").succeeded()
    run("db", "downgrade", migrate.HEAD, "--yes").refused(BadInput, migrate.HEAD, "llama-ckpt db upgrade")


@pytest.mark.parametrize("dialect", ["postgresql", "oracle"])
def test_the_script_for_a_dba_needs_no_database_and_is_all_that_is_printed(run, new, dialect):
    script = run("db", "sql", "--dialect", dialect).succeeded().out
    assert "CREATE TABLE llama_checkpoint_meta" in script
    assert run("db", "sql", "--dialect", dialect, "--json").json()["script"].strip() == script.strip()
    assert run("db", "sql", "--dialect", dialect, "-q").out == script
    assert not new.exists()


def test_a_script_from_a_revision_on_has_only_what_is_new(run, new):
    script = run("db", "sql", "--dialect", "postgresql", "--from", "0001").succeeded().out
    assert "CREATE TABLE checkpoint_prefix" in script
    assert "CREATE TABLE llama_checkpoint_meta" not in script


@pytest.mark.parametrize(
    "options", [["--dialect", "sqlite"], ["--dialect", "oracle", "--from", "7"], ["--dialect", "oracle", "--to", "7"]]
)
def test_a_script_that_cannot_be_made_is_refused(run, new, options):
    run("db", "sql", *options).refused(BadInput, repr(options[-1]))


def test_a_script_that_would_go_down_is_refused(run, new):
    run("db", "sql", "--dialect", "oracle", "--from", "0002", "--to", "0001").refused(BadInput)
