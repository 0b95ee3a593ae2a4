"""The scripts for an Oracle DBA, without Oracle: terminated, their names known, their grammar right. No server has run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import oracle
from support import oracle_names, plsql
from support.required import missing

from llama_ckpt.db.tables import VERSION_TABLE, metadata
from llama_ckpt.db.tables import llama_checkpoint_meta as meta

NODE_MODULES = os.environ.get("LLAMA_CKPT_TEST_NODE_MODULES", "")  # read before a fixture takes it away
SQL = files("llama_ckpt.sql")
NAMES = sorted(p.name for p in (SQL / "oracle").iterdir() if p.name.endswith(".sql"))
VIEWS = [n for n in NAMES if n.startswith("llama_checkpoint_v_")]
SCRIPTS = [n for n in NAMES if n not in VIEWS]
PACKAGE = "llama_checkpoint_pkg.sql"
OUR_TABLES = {t.name for t in metadata.sorted_tables} | {VERSION_TABLE}


def read(name, dialect="oracle"):
    text = (SQL / dialect / name).read_text(encoding="utf-8")
    return text + ";" if name in VIEWS else text  # a migration executes a view without a terminator


def faults(name, text=None):
    pytest.importorskip("sqlglot", reason="sqlglot, which reads the statements, is not installed")
    return plsql.faults(read(name) if text is None else text, package="" if name == PACKAGE else read(PACKAGE))


# -- the scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_of_a_script_is_terminated(name):
    kinds = [u.kind for u in plsql.split(read(name))]
    assert set(kinds) <= {"sqlplus", "sql", "plsql"}
    assert {"sql", "plsql"} & set(kinds)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_a_script_is_known(name):
    assert faults(name) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_stops_at_the_first_error_and_takes_an_ampersand_for_data(name):
    first = [u.text for u in plsql.split(read(name))][:2]
    assert first == ["WHENEVER SQLERROR EXIT FAILURE ROLLBACK", "SET DEFINE OFF"]


def test_a_view_is_one_statement_without_terminator_with_the_columns_of_its_sisters():
    sqlglot = pytest.importorskip("sqlglot", reason="sqlglot, which reads the statements, is not installed")
    assert len(VIEWS) == 2
    for name in VIEWS:
        text = (SQL / "oracle" / name).read_text(encoding="utf-8")
        assert not plsql.without_comments(text).rstrip().endswith((";", "/"))
        assert "%" not in text  # sa.DDL would take it for a placeholder
        columns = {}
        for dialect, spoken in (("oracle", "oracle"), ("sqlite", "sqlite"), ("postgresql", "postgres")):
            view = sqlglot.parse_one(read(name, dialect), dialect=spoken)
            columns[dialect] = view.find(sqlglot.exp.Select).named_selects
        assert columns["oracle"] == columns["sqlite"] == columns["postgresql"]


def test_the_save_procedure_fills_what_the_program_fills_and_no_more():
    inserted = re.search(r"INSERT INTO llama_checkpoint_meta\s*\(([^)]*)\)", read(PACKAGE))[1]
    left = {"ckpt_no", "stale_reason", "stale_us", "lease_until_us", "verified_us"}
    assert set(re.findall(r"\w+", inserted)) == set(meta.columns.keys()) - left
    assert (
        inserted.split()
        == re.search(r"INSERT INTO llama_checkpoint_meta\s*\(([^)]*)\)", read(PACKAGE, "postgresql"))[1].split()
    )


def test_the_save_procedure_has_the_parameters_of_its_sister_in_postgresql():
    ours = re.search(r"PROCEDURE save_checkpoint\((.*?)\);", read(PACKAGE), re.DOTALL)[1]
    theirs = re.search(r"FUNCTION llama_save_checkpoint\((.*?)\n\)", read(PACKAGE, "postgresql"), re.DOTALL)[1]
    assert re.findall(r"\bp_\w+", ours) == re.findall(r"\bp_\w+", theirs)


def test_the_save_procedure_neither_commits_nor_sets_a_savepoint():
    body = re.search(r"PROCEDURE save_checkpoint\((?:(?!PROCEDURE).)*?END save_checkpoint;", read(PACKAGE), re.DOTALL)[
        0
    ]
    assert not re.search(r"\b(COMMIT|ROLLBACK|SAVEPOINT)\b", plsql.without_comments(body))


def test_drop_names_every_table_on_each_database():
    assert set(re.findall(r"'TABLE (\w+) PURGE'", read("drop.sql"))) == OUR_TABLES
    assert set(re.findall(r"DROP TABLE IF EXISTS (\w+);", read("drop.sql", "postgresql"))) == OUR_TABLES


def grants(dialect):
    """(role, table) -> rights."""
    found = {}
    text = plsql.without_comments(read("roles.sql", dialect))
    for rights, tables, role in re.findall(r"^GRANT ([A-Z, ]+?) ON ([\w,\s]+?)\s+TO (\w+);", text, re.MULTILINE):
        for table in re.findall(r"\w+", tables):
            found[role, table] = set(re.findall(r"\w+", rights.replace("READ", "SELECT")))
    return found


def test_the_roles_have_the_same_rights_on_each_database():
    ours = grants("oracle")
    assert ours == grants("postgresql")
    roles = {"llama_ckpt_reader", "llama_ckpt_writer", "llama_ckpt_collector"}
    assert set(ours) == {(role, table) for role in roles for table in OUR_TABLES | {"llama_checkpoint_v"}}
    assert all("SELECT" in rights for rights in ours.values())


# -- each rule, by a planted fault ------------------------------------------------------------------------------------

PLANTED = {
    'no "/" between two units': (PACKAGE, "END llama_checkpoint;\n/\n\nCREATE", "END llama_checkpoint;\n\nCREATE", 'missing "/"'),
    'no "/" before a command': (PACKAGE, "/\n\nSHOW", "\n\nSHOW", 'missing "/"'),
    'no "/" at the end': ("job_drop.sql", "END;\n/\n", "END;\n", "missing terminator"),
    'no ";" at the end': ("job_status.sql", "FETCH FIRST 10 ROWS ONLY;\n\nSELECT run_no", "SELECT run_no", "no SQL"),
    "a column of no table": (PACKAGE, "last_used_us + 1", "last_use_us + 1", "unknown column last_use_us"),
    "a column of another table": (PACKAGE, "m.pinned = 0", "m.holder = 0", "unknown column holder"),
    "a column of no table in INSERT": (PACKAGE, "(kind, host,", "(kind, hostname,", "unknown column hostname"),
    "a column of no table in SET": (PACKAGE, "n_items = l_marked", "n_marked = l_marked", "unknown column n_marked"),
    "a table that is not there": (PACKAGE, "FROM checkpoint_prefix", "FROM prefixes", "unknown table prefixes"),
    "an alias that is not there": (PACKAGE, "d.status = 'ACTIVE'", "e.status = 'ACTIVE'", "unknown table e"),
    "a grant on no table": ("roles.sql", "READ ON gc_run TO", "READ ON gc_runs TO", "unknown table gc_runs"),
    "a drop of no table": ("drop.sql", "TABLE gc_run PURGE", "TABLE gc_runs PURGE", "unknown table gc_runs"),
    "a variable that is not declared": (PACKAGE, "    l_taken       PLS_INTEGER;\n", "", "undeclared name l_taken"),
    "a variable of another procedure": (PACKAGE, "n_items = l_marked", "n_items = l_taken", "undeclared name l_taken"),
    "a parameter of nobody": (PACKAGE, "p_batch => p_batch", "p_size => p_batch", "undeclared name p_size"),
    "a parameter of nobody in a job": ("job_create.sql", "p_max_age_s =>", "p_max_age =>", "undeclared name p_max_age"),
    "VARCHAR2 without length": (PACKAGE, "VARCHAR2(120 CHAR)", "VARCHAR2", "without a length"),
    "an OUT parameter with a default": (PACKAGE, "OUT NUMBER,", "OUT NUMBER DEFAULT 0,", "OUT parameter with a default"),
    "a parameter with a size": (PACKAGE, "IN  VARCHAR2,", "IN  VARCHAR2(32),", "parameter with a size"),
    "FETCH FIRST with FOR UPDATE": (PACKAGE, "FOR UPDATE OF", "FETCH FIRST 9 ROWS ONLY FOR UPDATE OF", "ORA-02014"),
    "RETURNING without INTO": (PACKAGE, "RETURNING run_no INTO l_run_no", "RETURNING run_no", "RETURNING without INTO"),
    "an unknown function": (PACKAGE, "TRUNC(", "TRUNCATED(", "unknown function TRUNCATED"),
    "an unknown function of ours": ("job_create.sql", "llama_checkpoint.sweep", "llama_checkpoint.purge", "unknown function"),
    "a missing END IF": (PACKAGE, "END IF;", "", "missing END"),
    "a missing END LOOP": (PACKAGE, "END LOOP;\n    COMMIT", "COMMIT", "missing END"),
    "a missing END of a procedure": (PACKAGE, "  END hold_parent;\n", "", "missing END"),
    "a statement that is none": (PACKAGE, "WHERE id = p_id", "WHERE id = = p_id", "no SQL"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(case):
    name, good, bad, words = PLANTED[case]
    text = read(name)
    assert good in text
    assert words in "\n".join(faults(name, text.replace(good, bad)))


# -- by a grammar -----------------------------------------------------------------------------------------------------


def parsed(units):
    """The errors that a grammar of PL/SQL finds in each unit."""
    node = shutil.which("node")
    if node is None or not (Path(NODE_MODULES) / "antlr4ts-sql").is_dir():
        missing(
            "plsql",
            "node, or antlr4ts-sql@1.1.0 and antlr4ts@0.5.0-alpha.4 in $LLAMA_CKPT_TEST_NODE_MODULES, is not there",
        )
    script = Path(__file__).with_name("parse.cjs")
    given = json.dumps([u.text + ("" if u.kind == "plsql" else ";") for u in units])
    done = subprocess.run([node, script, NODE_MODULES], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_grammar_of_oracle_takes_every_unit_and_refuses_broken_ones():
    units = [u for name in NAMES for u in plsql.split(read(name)) if u.kind != "sqlplus"]
    block = next(u for u in units if "DROP_JOB" in u.text).text
    broken = [
        plsql.Unit(0, "plsql", block.replace(good, bad, 1))
        for good, bad in (
            ("END IF;", ""),
            ("WHEN OTHERS THEN", "WHEN OTHERS"),
            ("job_name =>", "job_name :="),
            ("RAISE;", "RAISE"),
        )
    ]
    assert all(unit.text != block for unit in broken)
    errors = parsed([*units, *broken])
    assert {u.text: e for u, e in zip(units, errors[: len(units)], strict=True) if e} == {}
    assert all(errors[len(units) :])


# -- names ------------------------------------------------------------------------------------------------------------


def names_of_metadata():
    for table in metadata.sorted_tables:
        yield table.name
        yield from table.columns.keys()
        yield from (i.name for i in table.indexes)
        yield from (c.name for c in table.constraints)
    yield VERSION_TABLE


def test_no_name_is_reserved_needs_quoting_or_is_too_long():
    assert {n: oracle_names.faults_of(n) for n in names_of_metadata() if oracle_names.faults_of(n)} == {}


def test_the_dialect_itself_quotes_no_name_of_ours():
    quote = oracle.dialect().identifier_preparer.quote
    assert [n for n in names_of_metadata() if quote(n) != str(n)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("access", "reserved"), ("file", "reserved"), ("session", "reserved"), ("size", "reserved"), ("level", "reserved"),
        ("mode", "reserved"), ("rowid", "reserved"), ("type", "reserved"), ("Label", "quoting"), ("_hidden", "quoting"),
        ("two words", "quoting"), ("1st", "quoting"), ("n" * 31, "longer"), ("größe", "quoting"), ("ü" * 16, "longer"),
    ],
)  # fmt: skip
def test_a_planted_name_is_found(name, words):
    assert words in " ".join(oracle_names.faults_of(name))


def test_names_of_columns_in_metadata_with_a_planted_one_are_linted():
    planted = sa.Table("session", sa.MetaData(), sa.Column("comment", sa.Integer))
    assert [oracle_names.faults_of(n) for n in (planted.name, *planted.columns.keys())] == [["reserved on Oracle"]] * 2
