"""The schema and the connections: migrations, constraints, errors by code."""

from __future__ import annotations

import sqlite3
import threading

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from llama_ckpt.db import marks, migrate, rows
from llama_ckpt.db.connect import Database, hide_password, sqlite_url
from llama_ckpt.db.tables import VERSION_TABLE, metadata
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import BadInput, Conflict, DatabaseUnavailable, SchemaTooNew
from llama_ckpt.registry import Registry


def script_folder():
    from importlib.resources import files

    return str(files("llama_ckpt.migrations"))


def alembic_config(connection=None):
    config = Config()
    config.set_main_option("script_location", script_folder())
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


@pytest.fixture
def bare(request, database_url):
    """A database without our tables."""
    database = Database(database_url)
    if database.dialect == "postgresql":
        with database.migration() as db:
            command.downgrade(alembic_config(db), "base")
    yield database
    migrate.upgrade(database)
    database.close()


def test_the_revisions_the_code_knows_are_those_in_the_folder():
    scripts = ScriptDirectory(script_folder())
    assert [r.revision for r in scripts.walk_revisions()][::-1] == list(migrate.REVISIONS)
    assert scripts.get_current_head() == migrate.HEAD


def test_history_and_tables_are_in_step(bare):
    migrate.upgrade(bare)
    with bare.read() as db:
        context = MigrationContext.configure(db, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_every_revision_goes_up_and_down_and_up_again(bare):
    for _ in range(2):
        assert migrate.current(bare) is None
        migrate.upgrade(bare)
        assert migrate.current(bare) == migrate.HEAD
        with bare.migration() as db:
            command.downgrade(alembic_config(db), "base")
            assert set(sa.inspect(db).get_table_names()) <= {VERSION_TABLE}
            assert sa.inspect(db).get_view_names() == []


def test_upgrading_a_database_that_is_up_to_date_changes_nothing(registry, engine, saved):
    assert migrate.upgrade(registry.database) == migrate.HEAD
    assert registry.get(saved.id) == saved


def test_two_that_open_an_empty_registry_at_once_make_one_schema_and_one_id(bare, tmp_path):
    url = bare.url.render_as_string(hide_password=False)
    ids, errors, barrier = [], [], threading.Barrier(4)

    def opens():
        barrier.wait()
        try:
            with Registry.open(url, tmp_path / "store") as registry:
                ids.append(registry.registry_id)
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=opens) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(ids)) == 1


def test_a_database_newer_than_the_code_is_refused_and_left_alone(registry):
    with registry.database.write() as db:
        db.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    try:
        url = registry.database.url.render_as_string(hide_password=False)
        with pytest.raises(SchemaTooNew, match=f"schema 9999, but .* up to {migrate.HEAD}"):
            Registry.open(url, registry.store.root)
        assert migrate.current(registry.database) == "9999"
    finally:
        with registry.database.write() as db:
            db.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '{migrate.HEAD}'")


def test_the_view_shows_people_hex_and_times(registry, engine, saved):
    with registry.database.read() as db:
        row = db.exec_driver_sql(
            "SELECT id, input_sha256, status, file_mib, created_at_utc FROM llama_checkpoint_v"
        ).one()
    assert (row.id, row.input_sha256, row.status) == (saved.id, saved.input_hash.hex(), "ACTIVE")
    assert float(row.file_mib) == round(saved.file_size / 2**20, 2)
    assert str(row.created_at_utc).startswith("20")


@pytest.mark.parametrize(
    "values",
    [
        {"status": "STALE"},
        {"active_key": None},
        {"status": "STALE", "active_key": None},
        {"stale_reason": "removed"},
        {"status": "GONE", "active_key": None, "stale_reason": "removed"},
        {"pinned": 2},
        {"start_token": 1},
        {"parent_no": 1},
    ],
)
def test_the_database_itself_refuses_a_row_in_a_wrong_state(registry, engine, saved, values):
    with pytest.raises(DatabaseUnavailable, match="the schema refuses a row"), registry.database.write() as db:
        db.execute(sa.update(meta).values(**values))
    assert registry.get(saved.id) == saved


def test_a_key_that_is_taken_is_a_conflict_by_the_drivers_code(registry, engine, saved):
    other = registry.save(engine, "two").checkpoint
    with pytest.raises(Conflict), registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == other.id).values(id=saved.id))


def test_status_defaults_to_active(registry, engine, saved):
    assert str(meta.c.status.server_default.arg) == "ACTIVE"


def test_names_suit_every_database():
    names = [t.name for t in metadata.sorted_tables]
    for table in metadata.sorted_tables:
        names += [c.name for c in table.columns] + [i.name for i in table.indexes] + [c.name for c in table.constraints]
    assert all(n.islower() and len(n.encode()) <= 30 and n[0].isalpha() for n in names), sorted(names, key=len)[-3:]


def test_a_failed_transaction_keeps_nothing(registry, engine, saved):
    def pin_and_fail():
        with registry.database.write() as db:
            marks.set_pinned(db, saved.id, True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pin_and_fail()
    assert not registry.get(saved.id).pinned


def test_the_clock_is_the_databases_in_microseconds(registry):
    import time

    with registry.database.read() as db:
        assert abs(rows.clock_us(db) - time.time() * 1e6) < 5e6


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "expected e.g. sqlite"),
        ("mysql://u:secret@h/d", "llama-ckpt speaks"),
        ("sqlite://", "name a file"),
        ("sqlite:///:memory:", "name a file"),
        ("user:secret@host", "expected e.g. sqlite"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_without_its_password(url, words):
    with pytest.raises(BadInput, match=words) as told:
        Database(url)
    assert "secret" not in str(told.value)


def test_an_unreachable_server_is_told_without_its_password(tmp_path):
    url = "postgresql+psycopg://someone:secret@127.0.0.1:1/nowhere"
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1") as told:
        Registry.open(url, tmp_path / "store")
    assert "secret" not in str(told.value)
    assert "secret" not in hide_password(url)


def test_a_file_that_is_no_database_is_told(tmp_path):
    (tmp_path / "x.sqlite3").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(DatabaseUnavailable, match="the file is no SQLite database"):
        Registry.open(sqlite_url(tmp_path / "x.sqlite3"), tmp_path / "store")


def test_a_database_in_a_missing_folder_is_told(tmp_path):
    with pytest.raises(DatabaseUnavailable, match="is its folder there"):
        Registry.open(sqlite_url(tmp_path / "none" / "x.sqlite3"), tmp_path / "store")


def test_a_writer_that_waits_too_long_is_told_who_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr("llama_ckpt.db.connect._BUSY_TIMEOUT_S", 0)
    database = Database(sqlite_url(tmp_path / "x.sqlite3"))
    migrate.upgrade(database)
    other = sqlite3.connect(tmp_path / "x.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="write lock"), database.write():
        pass
    other.execute("ROLLBACK")
    other.close()
    database.close()


def test_reading_goes_on_while_another_writes(tmp_path):
    database = Database(sqlite_url(tmp_path / "x.sqlite3"))
    migrate.upgrade(database)
    with database.write() as db:
        db.exec_driver_sql("UPDATE registry_lease SET holder = 'me'")
        with database.read() as other:
            assert other.exec_driver_sql("SELECT holder FROM registry_lease").scalar_one() is None
    database.close()
