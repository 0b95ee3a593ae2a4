"""`db sql --dialect oracle`: what a DBA reads and runs. Held to a golden file, so that no change of it goes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import plsql

from llama_ckpt.db import migrate

GOLDEN = Path(__file__).with_name("schema.golden.sql")


def statements():
    return [unit for unit in plsql.split(migrate.script("oracle")) if unit.kind != "sqlplus"]


def test_the_script_is_the_one_that_was_read_by_a_person():
    """After a wanted change: `llama-ckpt db sql --dialect oracle > tests/oracle/schema.golden.sql`, and read the difference."""
    assert migrate.script("oracle").rstrip() == GOLDEN.read_text(encoding="utf-8").rstrip()


def test_every_unit_is_terminated_once():
    units = plsql.split(migrate.script("oracle"))
    assert {u.kind for u in units} == {"sqlplus", "sql"}
    texts = [u.text for u in units]
    assert len(texts) == len(set(texts)), "a statement that ends with ; and / runs twice"


def test_no_bind_is_left_and_nothing_is_asked_back():
    for unit in statements():
        code = plsql.without_strings(unit.text)
        assert ":" not in code
        assert "RETURNING" not in code


def test_it_ends_with_the_commit_of_the_versions_row():
    last, commit = statements()[-2:]
    assert f"SET version_num='{migrate.HEAD}'" in last.text
    assert commit.text == "COMMIT"


def test_every_statement_is_oracle():
    sqlglot = pytest.importorskip("sqlglot", reason="sqlglot, which parses the statements, is not installed")
    for unit in statements():
        text = unit.text.replace("AS IDENTITY (ORDER)", "AS IDENTITY")  # sqlglot knows no identity_options
        assert len(sqlglot.parse(text, dialect="oracle")) == 1
