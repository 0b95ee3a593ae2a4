"""What a person sees on a terminal of 80 columns: help in groups and plain words, tables that fit."""

from __future__ import annotations

import re
import sys

import pytest
import typer.main
from support.sample_engine import SampleEngine
from support.words import refused_words

from llama_ckpt.registry import Registry
from llama_ckpt.store.store import path_of
from llama_ckpt_cli.app import app
from llama_ckpt_cli.help_format import CLEAN, COMMAND_GROUPS, DATABASES, LOOK, OPERATE, USE

LONG_NAME = "Meta-Llama-3.1-8B-Instruct-abliterated-i1-Q4_K_M"


@pytest.fixture
def run80(run, monkeypatch):
    """Runs the command with a terminal of 80 columns on stdout."""

    def command(*words):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        return run(*words)

    return command


# -- words ----------------------------------------------------------------------------------------------------------------


def test_the_help_of_every_command_is_in_plain_words(run, leaf):
    shown = run(*leaf, "--help").succeeded().out
    assert refused_words(" ".join(shown.split())) == []


@pytest.mark.parametrize("group", [[], ["db"], ["schedule"]], ids=["llama-ckpt", "db", "schedule"])
def test_the_help_of_every_group_is_in_plain_words(run, group):
    assert refused_words(" ".join(run(*group, "--help").succeeded().out.split())) == []


# -- help -----------------------------------------------------------------------------------------------------------------


def sections_of(shown: str) -> dict[str, list[str]]:
    """The names that stand in each section of a help text."""
    sections, name = {}, ""
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            name = line[:-1]
        elif found := re.match(r"  (\S+)", line):
            sections.setdefault(name, []).append(found.group(1))
    return sections


def test_every_command_is_in_exactly_one_group_of_the_help(run):
    sections = sections_of(run("--help").succeeded().out)
    assert [name for name in sections if name in COMMAND_GROUPS] == list(COMMAND_GROUPS)
    assert "Commands" not in sections
    listed = [name for group in COMMAND_GROUPS for name in sections[group]]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("warm", USE),
        ("ls", USE),
        ("explain", LOOK),
        ("prune", CLEAN),
        ("gc", CLEAN),
        ("export", OPERATE),
        ("db", DATABASES),
    ],
)
def test_a_command_is_listed_where_its_users_look(run, name, group):
    assert name in sections_of(run("--help").out)[group]


def test_the_list_of_commands_has_complete_sentences_in_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--help").succeeded().out
    assert "..." not in shown.partition("\n\n")[2]
    assert max(map(len, shown.splitlines())) <= 80
    flat = " ".join(shown.split())
    for name, one in typer.main.get_command(app).commands.items():
        assert f"{name} {one.get_short_help_str(10_000)}" in flat
        assert one.get_short_help_str(10_000).endswith(".")


def test_minus_h_is_help_everywhere(run, leaf):
    assert run(*leaf, "-h").succeeded().out == run(*leaf, "--help").succeeded().out


@pytest.mark.parametrize("group", [[], ["db"], ["schedule"]], ids=["llama-ckpt", "db", "schedule"])
def test_minus_h_is_help_of_a_group(run, group):
    assert run(*group, "-h").succeeded().out == run(*group, "--help").succeeded().out


def test_help_fits_80_columns(run, leaf, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run(*leaf, "-h").succeeded().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "option", "risk"),
    [
        (["gc"], "--force", "another registry needs"),
        (["gc"], "--now", "still running"),
        (["gc"], "--stale-grace", "cannot be undone"),
        (["gc"], "--ghost-grace", "can delete its file"),
        (["repair"], "--trust-payload", "damaged state"),
        (["repair"], "--trust-tokens", "does not contain"),
        (["repair"], "--no-backup", "lost"),
        (["export"], "--force", "lost"),
        (["purge"], "--all", "every file"),
    ],
)
def test_a_dangerous_option_says_what_is_at_risk(run, words, option, risk):
    flat = " ".join(run(*words, "--help").succeeded().out.split())
    assert risk in flat.partition(f" {option} ")[2].partition(" --")[0] or risk in flat.rpartition(f" {option} ")[2]


def test_purge_says_that_it_cannot_be_undone(run):
    assert "cannot be undone" in " ".join(run("purge", "--help").out.split())


# -- tables ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowded(populated, run):
    """A registry whose rows are as wide as they come: long names and labels, large numbers, every status, ghosts."""
    engine = SampleEngine(weights="ef" * 32, model_name=LONG_NAME)
    engine.evaluate(engine.ids)
    with Registry.open(store=populated.root) as registry:
        for name in ("long", "pinned"):
            saved = registry.save(engine, name, label="a label of forty characters, no fewer..")
            populated.ids[name] = saved.checkpoint.id
    for name in ("long", "pinned", "one", "two"):
        populated.set_row(name, n_tokens=1_048_576, hit_count=1_234_567, created_us=1, last_used_us=1)
    run("pin", populated.ids["pinned"])
    run("rm", populated.ids["two"])
    ghost = populated.root / path_of("ab" * 16)
    ghost.parent.mkdir(parents=True, exist_ok=True)
    ghost.write_bytes(b"not a checkpoint" * 1000)
    return populated


WIDE = {
    "ls": (["ls", "--all"], ["id", "model", "tokens", "size", "saved", "status"]),
    "gc": (
        ["gc", "--dry-run", "--now", "--stale-grace", "0s", "--ghost-grace", "0s"],
        ["kind", "file", "size", "age", "reason"],
    ),
    "stats": (["stats"], ["model", "fingerprint", "checkpoints", "size", "per", "token", "hits"]),
    "prune": (["prune", "--dry-run", "--max-age", "0s"], ["id", "model", "size", "rule"]),
}


@pytest.mark.parametrize(("words", "heads"), WIDE.values(), ids=WIDE)
def test_a_table_fits_80_columns_without_a_folded_cell(run80, crowded, words, heads):
    shown = run80(*words).succeeded()
    assert max(map(len, shown.lines)) <= 80
    at = next(i for i, line in enumerate(shown.lines) if line.split() == heads)
    assert set(shown.lines[at + 1]) == {"─"}
    body = [line for line in shown.lines[at + 2 :] if re.match(r"\S", line)]
    assert body == shown.lines[at + 2 :], "a line that starts with a blank is the rest of a folded cell"


@pytest.mark.parametrize("words", [words for words, _ in WIDE.values()], ids=WIDE)
def test_output_begins_with_a_line_of_text(run80, crowded, words):
    assert run80(*words).succeeded().lines[0].strip()


def test_status_words_and_ids_stay_usable_in_80_columns(run, run80, crowded):
    lines = run80("ls", "--all").succeeded().lines
    row = {
        name: next(line for line in lines if line.startswith(crowded.ids[name][:8]))
        for name in ("pinned", "two", "crlf")
    }
    assert "ACTIVE pinned" in row["pinned"]
    assert "STALE (removed" in row["two"] or "STALE (remov…" in row["two"]
    assert "ACTIVE" in row["crlf"].split()
    shown_id = row["pinned"].split()[0]
    assert run("show", shown_id, "-q").succeeded().lines == [str(crowded.path("pinned").relative_to(crowded.root))]
    assert "Meta" in row["pinned"]
    assert "K_M" in row["pinned"], "a model's name keeps both ends"


@pytest.mark.parametrize("words", [words for words, _ in WIDE.values()], ids=WIDE)
def test_without_a_terminal_nothing_is_shortened(run, crowded, words):
    shown = run(*words).succeeded().out
    assert "…" not in shown
    if words[0] != "gc":
        assert LONG_NAME in shown


def test_counts_have_thousands_separators(run, crowded):
    shown = run("show", crowded.ids["long"]).succeeded().fields
    assert (shown["tokens"].split()[0], shown["hits"]) == ("1,048,576", "1,234,567")
    assert "1,048,576" in run("ls").succeeded().out
