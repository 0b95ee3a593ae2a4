"""Every revision, up and down, with rows in the tables."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
import sqlalchemy as sa

from llama_ckpt.db import migrate, rows
from llama_ckpt.db.comparing import differences
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import VERSION_TABLE, metadata
from llama_ckpt.errors import BadInput, SchemaTooOld
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome


@pytest.fixture
def empty(database_url):
    """A database without our tables; at the end the schema is at head again."""
    database = Database(database_url)
    if database.dialect != "sqlite":
        migrate.downgrade(database, "base")
    yield database
    migrate.upgrade(database)
    database.close()


def names_in(database):
    with database.read() as db:
        seen = sa.inspect(db)
        return {
            (table, kind, item["name"])
            for table in seen.get_table_names()
            if table != VERSION_TABLE
            for kind, items in (
                ("index", seen.get_indexes(table)),
                ("check", seen.get_check_constraints(table)),
                ("foreign key", seen.get_foreign_keys(table)),
            )
            for item in items
        }


def expected_names():
    names = set()
    for table in metadata.sorted_tables:
        names |= {(table.name, "index", i.name) for i in table.indexes}
        names |= {(table.name, "check", c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
        names |= {(table.name, "foreign key", f.name) for f in table.foreign_key_constraints}
    return names


def test_after_all_migrations_every_index_and_constraint_is_there_by_name(empty):
    migrate.upgrade(empty)
    assert names_in(empty) == expected_names()
    assert migrate.check(empty) == []


def test_rows_of_the_first_schema_live_on_in_the_second_and_back(empty, tmp_path, engine):
    migrate.upgrade(empty)
    url = empty.url.render_as_string(hide_password=False)
    with Registry.open(url, tmp_path / "store") as registry:
        kept = registry.save(engine, "one").checkpoint
        gone = registry.save(engine, "two").checkpoint
        registry.remove(gone.id)
    for revision in (*migrate.REVISIONS[-2::-1], *migrate.REVISIONS[1:]):
        before = migrate.current(empty)
        (migrate.downgrade if revision < before else migrate.upgrade)(empty, revision)
        assert migrate.current(empty) == revision
        with empty.read() as db:
            rows = db.exec_driver_sql("SELECT id, status FROM llama_checkpoint_meta ORDER BY ckpt_no").all()
            assert db.exec_driver_sql("SELECT count(*) FROM llama_checkpoint_v").scalar_one() == 2
        assert [tuple(r) for r in rows] == [(kept.id, "ACTIVE"), (gone.id, "STALE")]
    with Registry.open(url, tmp_path / "store") as registry:
        assert registry.get(kept.id) == kept
        assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert names_in(empty) == expected_names()


def test_a_delta_is_not_offered_by_a_program_that_does_not_know_deltas(empty, tmp_path, engine):
    migrate.upgrade(empty)
    url = empty.url.render_as_string(hide_password=False)
    with Registry.open(url, tmp_path / "store") as registry:
        registry.save(engine, "one")
        with registry.database.write() as db:
            db.exec_driver_sql("UPDATE llama_checkpoint_meta SET start_token = 256, parent_no = ckpt_no")
    migrate.downgrade(empty, "0001")
    with empty.read() as db:
        assert db.exec_driver_sql("SELECT status, stale_reason FROM llama_checkpoint_meta").one() == (
            "STALE",
            "incompatible",
        )


def test_an_older_schema_is_upgraded_by_itself_on_sqlite_and_only_when_told_on_a_server(empty, tmp_path):
    migrate.upgrade(empty, "0001")
    url = empty.url.render_as_string(hide_password=False)
    if empty.dialect == "sqlite":
        Registry.open(url, tmp_path / "store").close()
    else:
        with pytest.raises(SchemaTooOld, match="llama-ckpt db upgrade"):
            Registry.open(url, tmp_path / "store")
        assert migrate.current(empty) == "0001"
        Registry.open(url, tmp_path / "store", upgrade=True).close()
    assert migrate.current(empty) == migrate.HEAD


def test_a_revision_that_is_none_is_named(empty):
    for verb in (migrate.upgrade, migrate.downgrade):
        with pytest.raises(BadInput, match=r"'0099'.*known are 0001"):
            verb(empty, "0099")


def found_after(database, *statements):
    """What a comparison finds after statements, which are taken back."""
    with contextlib.suppress(ZeroDivisionError), database.write() as db:
        for statement in statements:
            db.exec_driver_sql(statement)
        found = differences(db)
        raise ZeroDivisionError
    return found


def test_check_names_in_words_what_was_changed_behind_its_back(registry):
    found = found_after(
        registry.database,
        "DROP INDEX ix_llama_ckpt_meta_used",
        "DROP VIEW llama_checkpoint_v",
        "DROP TABLE gc_schedule",
        "ALTER TABLE llama_model ADD COLUMN extra INTEGER",
    )
    assert sorted(found) == [
        "column extra of table llama_model is not of this version",
        "index ix_llama_ckpt_meta_used of table llama_checkpoint_meta is missing",
        "table gc_schedule is missing",
        "view llama_checkpoint_v is missing",
    ]
    assert migrate.check(registry.database) == []


def test_check_finds_types_and_constraints_that_are_others(registry):
    if registry.database.dialect != "postgresql":
        pytest.skip("SQLite changes no column and no constraint")
    found = found_after(
        registry.database,
        "DROP VIEW llama_checkpoint_v",
        "ALTER TABLE llama_model ALTER COLUMN n_layer TYPE BIGINT, ALTER COLUMN n_kv_head DROP NOT NULL",
        "ALTER TABLE llama_checkpoint_meta DROP CONSTRAINT fk_llama_ckpt_meta_model",
        "ALTER TABLE llama_checkpoint_meta DROP CONSTRAINT ck_llama_ckpt_meta_status",
    )
    assert sorted(found) == [
        "column llama_model.n_kv_head: nullable is True, expected is False",
        "column llama_model.n_layer: type is BIGINT, expected is INTEGER",
        "constraint ck_llama_ckpt_meta_status of table llama_checkpoint_meta is missing",
        "foreign key fk_llama_ckpt_meta_model of table llama_checkpoint_meta is missing",
        "view llama_checkpoint_v is missing",
    ]


def test_what_a_dba_comments_is_no_difference(registry):
    if registry.database.dialect != "postgresql":
        pytest.skip("SQLite has no comments")
    comments = "COMMENT ON TABLE llama_model IS 'x'", "COMMENT ON COLUMN llama_model.n_layer IS 'y'"
    assert found_after(registry.database, *comments) == []


def test_tables_of_others_in_the_same_database_are_none_of_its_business(registry):
    theirs = "CREATE TABLE of_somebody_else (id INTEGER PRIMARY KEY, name VARCHAR(10) UNIQUE)"
    assert found_after(registry.database, theirs) == []


def test_the_script_for_postgresql_makes_the_same_schema_as_the_program(postgresql_url, tmp_path):
    if shutil.which("psql") is None:
        pytest.skip("psql is not installed")
    database = Database(postgresql_url)
    migrate.downgrade(database, "base")
    try:
        with database.write() as db:
            db.exec_driver_sql(f"DROP TABLE IF EXISTS {VERSION_TABLE}")
        script = tmp_path / "schema.sql"
        script.write_text(migrate.script("postgresql"))
        url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        done = subprocess.run(["psql", "-q", "-f", str(script), url], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert migrate.current(database) == migrate.HEAD
        assert names_in(database) == expected_names()
        with database.read() as db:
            assert len(rows.registry_id(db)) == 32
    finally:
        migrate.upgrade(database)
        database.close()


def test_a_script_from_one_revision_to_the_next_has_only_what_is_new():
    text = migrate.script("oracle", "0001", "0002")
    assert "CREATE TABLE checkpoint_prefix" in text
    assert "CREATE TABLE gc_run" not in text
    assert text.startswith("WHENEVER SQLERROR EXIT FAILURE ROLLBACK\nSET DEFINE OFF\n")
    assert text.rstrip().endswith("COMMIT;")
    assert ":ret_0" not in text


@pytest.mark.parametrize(("dialect", "start", "words"), [("sqlite", "base", "'sqlite'"), ("oracle", "0099", "'0099'")])
def test_a_script_that_cannot_be_made_is_refused_by_name(dialect, start, words):
    with pytest.raises(BadInput, match=words):
        migrate.script(dialect, start)
