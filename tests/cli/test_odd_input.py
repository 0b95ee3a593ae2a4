"""Input that nobody expects: what the user sees is a sentence, or the text as it is."""

from __future__ import annotations

import sqlite3

import pytest

from llama_ckpt.errors import BadInput
from llama_ckpt.registry import DATABASE_FILE


def test_a_word_between_colons_is_no_emoji(run, populated):
    with sqlite3.connect(populated.root / DATABASE_FILE) as db:
        db.execute("UPDATE llama_checkpoint_meta SET label = 'run:100:b'")
    assert "run:100:b" in run("ls").succeeded().out


@pytest.mark.parametrize("given", [["--json"], ["--only", "stale"], ["--yes"]], ids=" ".join)
def test_an_option_before_a_subcommand_is_not_lost_unseen(run, populated, given):
    run("gc", *given, "runs").refused(BadInput, "put it after runs", given[0])
    run("gc", "runs").succeeded()


def test_a_home_folder_of_nobody_is_told(run):
    run("ls", "--store", "~there-is-no-such-user/store").refused(BadInput, "there-is-no-such-user")


def test_a_number_of_thousands_of_digits_is_no_token_id(run, populated, tmp_path):
    (tmp_path / "ids.txt").write_text("1 " + "9" * 5000)
    run("match", "--tokens", tmp_path / "ids.txt").refused(BadInput, "at most 20 digits")


def test_a_models_name_with_a_slash_is_a_name(run, populated):
    with sqlite3.connect(populated.root / DATABASE_FILE) as db:
        for table in ("llama_model", "llama_checkpoint_meta"):
            db.execute(f"UPDATE {table} SET model_name = 'Some/Model-7B'")
    assert run("match", "--text", "one", "--model", "Some/Model-7B", "-q").succeeded().lines == [populated.ids["one"]]
    run("match", "--text", "one", "--model", "not/there.gguf").refused(BadInput, "there is no such file")
