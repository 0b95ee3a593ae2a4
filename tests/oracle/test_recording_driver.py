"""The whole service layer as Oracle's driver would see it, on 19c and on 23ai: no server, but the real dialect.

Every test that takes `oracle` ends with the rules over all that was sent, and with a parse of each statement.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import os
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.sample_engine import SampleEngine, TokenEngine

pytest.importorskip("oracledb", reason="the recording driver borrows the constants of 'oracledb' (extra 'oracle')")

from sqlalchemy.dialects.oracle.oracledb import OracleDialect_oracledb
from support import oracle_rules
from support.recording_oracle import COMMIT, ROLLBACK, RecordingOracle, Statement

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import collecting, coordination, leases, marks, migrate, prefixes, rows, schedules, usage
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.db.tables import checkpoint_prefix, gc_run, llama_model, registry_lease, save_claim
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import BadInput, Busy, CommitOutcomeUnknown, Conflict, DatabaseUnavailable, StoreUnavailable
from llama_ckpt.fingerprint import hash_input
from llama_ckpt.gc_values import GcKind, GcOutcome, RowVersion
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import (
    Checkpoint,
    MemoryKind,
    NewCheckpoint,
    Outcome,
    PrefixLink,
    SaveOutcome,
    StaleReason,
    Status,
)

URL = "oracle+oracledb://someone:secret@db.example/?service_name=FREEPDB1"
VERSIONS = {"19c": "19.21.0.0.0", "23ai": "23.5.0.24.7"}
LAYER = (marks, rows, collecting, coordination, leases, prefixes, schedules, usage)
DRIVEN: dict[str, set[str]] = {version: set() for version in VERSIONS}


# -- how a registry comes to the recording driver -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> Path:
    """An SQLite file with the product's schema, made by its migrations."""
    path = tmp_path_factory.mktemp("schema") / "rows.sqlite3"
    database = Database(sqlite_url(path))
    migrate.upgrade(database)
    database.close()
    return path


@pytest.fixture(params=VERSIONS)
def oracle(request, tmp_path, monkeypatch, schema):
    """The driver that every Oracle engine of the test gets in place of oracledb. Ends with the rules over its log."""
    driver = RecordingOracle(VERSIONS[request.param], Path(shutil.copy(schema, tmp_path / "rows.sqlite3")))
    monkeypatch.setattr(OracleDialect_oracledb, "import_dbapi", classmethod(lambda cls: driver))
    note_calls(monkeypatch, DRIVEN[request.param])
    yield driver
    assert oracle_rules.findings(driver.log) == []
    assert [s.sql for s in driver.statements() if not parses(s.sql)] == []


@pytest.fixture
def database_url(oracle) -> str:
    """In place of conftest's: its `registry`, `engine` and `saved` are then those of the recording driver."""
    return URL


def functions_of(module):
    """The functions that other modules may call with a connection."""
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and "db" in inspect.signature(function).parameters
    }


def note_calls(monkeypatch, called):
    for module in LAYER:
        for name, function in functions_of(module).items():

            @functools.wraps(function)
            def noted(*args, _function=function, _name=f"{module.__name__}.{name}", **kw):
                called.add(_name)
                return _function(*args, **kw)

            monkeypatch.setattr(module, name, noted)


@functools.cache
def parses(sql: str) -> bool:
    """Whether sqlglot reads a statement as Oracle's. Without sqlglot nothing is said; a test of its own is skipped for that."""
    try:
        import sqlglot
    except ModuleNotFoundError:
        return True
    try:
        # A Command is what sqlglot makes of a text that it does not understand.
        return not isinstance(sqlglot.parse_one(sql, dialect="oracle"), sqlglot.exp.Command)
    except sqlglot.errors.SqlglotError:
        return False


def plain(version="19.21.0.0.0"):
    """An engine over a driver that has no rows: for statements that no SQLite would run."""
    driver = RecordingOracle(version)
    return driver, sa.create_engine(URL, module=driver)


def since(oracle, mark):
    """What the product sent since the log had `mark` entries: the first word of each statement."""
    return [s.sql.split()[0] for s in oracle.log[mark:] if not s.of_dialect and s.sql != ROLLBACK]


def change(registry, row, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no).values(**values))


def delta_of(registry, parent: Checkpoint, text: str) -> Checkpoint:
    """A planted row that needs `parent`."""
    input_hash = hash_input(text)
    new = NewCheckpoint(
        id=input_hash.hex()[:32],
        model_name=parent.model_name,
        fingerprint=parent.fingerprint,
        input_hash=input_hash,
        tokens_hash=input_hash,
        n_tokens=parent.n_tokens + 1,
        memory_kind=MemoryKind.FULL,
        file_path=f"{input_hash.hex()}.llam",
        file_size=10,
        payload_crc32=0,
        prefill_ms=None,
        expires_in_s=None,
        label=None,
        start_token=parent.n_tokens,
        parent_no=parent.ckpt_no,
    )
    with registry.database.write() as db:
        return rows.insert_checkpoint(db, new)


# -- opening ------------------------------------------------------------------------------------------------------------


def test_the_dialect_takes_the_server_for_what_it_is(registry, oracle):
    dialect = registry.database._engine.dialect
    assert ".".join(map(str, dialect.server_version_info)) == oracle.server_version
    assert dialect.supports_native_boolean == (dialect.server_version_info >= (23,))
    assert registry.database.dialect == "oracle"


def test_opening_a_registry_that_is_up_to_date_reads_and_changes_nothing(registry, oracle):
    assert set(since(oracle, 0)) == {"SELECT"}
    assert len(registry.registry_id) == 32


def test_a_registry_is_opened_by_its_url_alone(oracle, tmp_path):
    with Registry.open(URL, tmp_path / "store") as registry:
        assert registry.stats().n_active == 0


def test_the_driver_gets_its_service_and_no_argument_it_does_not_know(registry, oracle):
    (given,) = oracle.connect_arguments
    assert "(SERVICE_NAME=FREEPDB1)" in given["dsn"]
    assert (given["user"], given["password"]) == ("someone", "secret")


# -- save, match, restore -----------------------------------------------------------------------------------------------


def test_a_first_save_adds_model_row_and_links_in_one_transaction(registry, engine, oracle):
    mark = len(oracle.log)
    result = registry.save(engine, "one", label="x'); DROP TABLE llama_model --", prefill_ms=12)
    assert result.outcome is SaveOutcome.SAVED
    words = since(oracle, mark)
    assert words.count("INSERT") == 3
    assert words.count("COMMIT") == 1
    assert words[-1] == "COMMIT"
    assert registry.get(result.checkpoint.id).label == "x'); DROP TABLE llama_model --"
    assert not any("DROP" in s.sql for s in oracle.log), "a label is data"


def test_a_deduplicated_save_is_one_read(registry, engine, saved, oracle):
    mark = len(oracle.log)
    result = registry.save(engine, "one")
    assert (result.outcome, result.checkpoint) == (SaveOutcome.DEDUPLICATED, saved)
    assert since(oracle, mark) == ["SELECT"]


def test_what_was_saved_comes_back_with_whole_numbers_and_raw_hashes(registry, engine, saved):
    row = registry.get(saved.id)
    assert row == saved
    assert all(type(getattr(row, n)) is int for n in ("ckpt_no", "n_tokens", "file_size", "created_us", "hit_count"))
    assert row.input_hash == hash_input("one")
    (model,) = registry.models()
    assert (model.fingerprint, model.dimensions) == (engine.fingerprint, engine.dimensions)


def test_another_host_that_was_first_is_told_by_ora_00001(registry, engine, oracle):
    other, capture = SampleEngine(), engine.capture
    other.evaluate(other.ids)

    def late():
        registry.save(other, "one")
        return capture()

    engine.capture = late
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED
    assert [s.failed for s in oracle.statements() if s.failed] == [1]
    assert len(registry.list()) == 1


def test_a_refused_insert_is_tried_again_when_the_other_row_is_gone(registry, engine, oracle):
    oracle.fail("INSERT INTO llama_checkpoint_meta", 1)
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED
    assert len(registry.list()) == 1


def test_a_model_that_another_host_adds_at_this_moment_is_no_error(registry, engine, oracle):
    oracle.fail("INSERT INTO llama_model", 1)
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_a_commit_that_fails_leaves_neither_row_nor_file(registry, engine, oracle):
    oracle.fail("INSERT INTO llama_checkpoint_meta", 1653)  # unable to extend the tablespace
    with pytest.raises(DatabaseUnavailable, match="ORA-01653") as told:
        registry.save(engine, "one")
    assert "secret" not in str(told.value)
    assert registry.list() == []


def test_a_row_in_a_wrong_state_is_refused_as_such_and_not_taken_for_a_conflict(registry, engine, saved):
    with pytest.raises(DatabaseUnavailable, match="ORA-02290"):
        change(registry, saved, pinned=2)
    assert registry.get(saved.id) == saved


def test_an_expired_row_makes_room_for_a_new_one(registry, engine):
    old = registry.save(engine, "one", expires_in_s=60).checkpoint
    assert old.expires_us - old.created_us == 60_000_000
    change(registry, old, expires_us=1)
    assert registry.match("one", fingerprint=engine.fingerprint).outcome is Outcome.NO_MATCH
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED
    assert registry.get(old.id).stale_reason is StaleReason.EXPIRED


def test_a_match_by_engine_model_weights_or_hash_finds_the_row(registry, engine, saved):
    input_hash = hash_input("one")
    for asked in (
        {"fingerprint": engine.fingerprint},
        {"model": "sample"},
        {"weights": engine.fingerprint.weights_sha256},
        {},
    ):
        assert registry.match("one", **asked).checkpoint == saved
        assert registry.match_hash(input_hash, **asked).checkpoint == saved
    assert registry.match("one", model="another").outcome is Outcome.NO_MATCH
    assert registry.match("two", fingerprint=engine.fingerprint).outcome is Outcome.NO_MATCH


def test_a_miss_names_the_nearest_model(registry, engine, saved):
    other = SampleEngine(weights="cd" * 32)
    found = registry.match("one", fingerprint=other.fingerprint)
    assert (found.outcome, found.nearest) == (Outcome.NO_MATCH, saved)


def test_models_and_rows_are_found_by_each_of_their_keys(registry, engine, saved):
    digest = engine.fingerprint.digest
    with registry.database.read() as db:
        assert len(rows.models(db, digest)) == len(rows.models(db)) == 1
        assert rows.models(db, bytes(32)) == []
        assert rows.find_by_input(db, saved.input_hash) == [saved]
        assert rows.find_by_input(db, digest) == []


def test_a_restore_leases_the_row_counts_the_hit_and_gives_the_lease_back(registry, engine, saved):
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    row = registry.get(saved.id)
    assert (row.hit_count, row.lease_until_us) == (1, None)
    assert row.verified_us >= saved.created_us


def test_a_restore_whose_file_is_gone_makes_the_row_stale(registry, engine, saved):
    os.unlink(registry.store.root / saved.file_path)
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    assert registry.get(saved.id).stale_reason is StaleReason.MISSING
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_warm_evaluates_and_saves_once_and_restores_from_then_on(registry, engine):
    first, second = registry.warm(engine, "one"), registry.warm(engine, "one")
    assert (first.n_restored, second.n_restored) == (0, len(engine.ids) - 1)
    assert first.problem is second.problem is None
    assert first.save.outcome is SaveOutcome.SAVED


def test_a_connection_that_is_lost_once_is_made_anew(registry, engine, saved, oracle):
    oracle.fail("active_key = :active_key", 3113)
    assert registry.match("one", fingerprint=engine.fingerprint).checkpoint == saved
    assert len(oracle.connect_arguments) == 2


def test_a_database_that_stays_away_is_a_failed_match_and_no_exception(registry, engine, saved, oracle):
    oracle.fail("active_key = :active_key", 3113, times=2)
    found = registry.match("one", fingerprint=engine.fingerprint)
    assert found.outcome is Outcome.FAILED
    assert "DPY-4011" in found.reason
    assert "secret" not in found.reason


def shift(registry, row):
    """Puts a zero byte before a file."""
    path = registry.store.root / row.file_path
    path.write_bytes(b"\0" + path.read_bytes())


def test_what_is_met_in_a_file_is_counted_in_the_transaction_of_the_hit(registry, engine, saved, oracle):
    shift(registry, saved)
    registry.restore(engine, "one")
    mark = len(oracle.log)
    registry.restore(engine, "one")
    last = since(oracle, mark)[-5:]
    assert last == ["COMMIT", "UPDATE", "SELECT", "UPDATE", "COMMIT"]
    assert registry.stats().events == {"padding_detected": 2}
    assert registry.get(saved.id).hit_count == 2


def test_two_hosts_that_count_the_first_of_a_day_at_once_both_count(registry, engine, saved, oracle):
    shift(registry, saved)
    oracle.fail("INSERT INTO usage_day", 1)
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    row = registry.get(saved.id)
    assert (row.hit_count, row.lease_until_us) == (1, None)
    assert registry.stats().events == {"padding_detected": 1}


def test_a_count_that_cannot_be_written_costs_no_restore(registry, engine, saved, oracle, caplog):
    shift(registry, saved)
    oracle.fail("INSERT INTO usage_day", 1, times=2)
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert f"what became of checkpoint {saved.id} was not recorded" in caplog.text
    assert registry.stats().events == {}


# -- care ---------------------------------------------------------------------------------------------------------------


def test_pin_and_unpin_are_numbers_to_the_database(registry, engine, saved, oracle):
    assert registry.pin(saved.id[:6]).pinned is True
    with pytest.raises(BadInput, match="pinned"):
        registry.remove(saved.id)
    assert registry.unpin(saved.id).pinned is False
    written = [s.rows[0]["pinned"] for s in oracle.statements() if "SET pinned" in s.sql]
    assert [(type(v), v) for v in written] == [(int, 1), (int, 0)]


def test_removed_and_reported_rows_are_offered_no_more(registry, engine):
    one, two = (registry.save(engine, text).checkpoint for text in ("one", "two"))
    assert registry.remove(one.id).stale_reason is StaleReason.REMOVED
    assert registry.report_bad(two.id).stale_reason is StaleReason.CORRUPT
    assert [registry.match(t, fingerprint=engine.fingerprint).outcome for t in ("one", "two")] == [Outcome.NO_MATCH] * 2


def test_invalidating_a_model_makes_all_its_rows_stale(registry, engine):
    for text in ("one", "two", "three"):
        registry.save(engine, text)
    assert registry.invalidate(engine.fingerprint) == 3
    assert {r.stale_reason for r in registry.list()} == {StaleReason.INCOMPATIBLE}


def test_a_list_is_cut_filtered_and_newest_first(registry, engine):
    one, two = (registry.save(engine, text, label=text).checkpoint for text in ("one", "two"))
    assert registry.list() == [two, one]
    assert registry.list(at_most=1) == [two]
    assert registry.list(label="one", status=Status.ACTIVE, model_name="sample") == [one]
    assert registry.list(status=Status.STALE) == []


def test_totals_are_recounted_from_the_rows(registry, engine):
    one, two = (registry.save(engine, text, prefill_ms=7).checkpoint for text in ("one", "two"))
    registry.restore(engine, "one")
    registry.remove(two.id)
    stats = registry.stats()
    assert (stats.n_active, stats.n_stale, stats.active_bytes) == (1, 1, one.file_size)
    assert (stats.hit_count, stats.spared_ms) == (1, 7)
    with registry.database.read() as db:
        assert not rows.is_empty(db)


def test_thousands_of_rows_are_read_and_marked_in_pieces_that_oracle_takes(registry, engine, saved, oracle):
    copied = {c.name: getattr(saved, c.name) for c in meta.c if c.name not in ("ckpt_no", "id", "active_key")}
    copied |= {"pinned": 0, "memory_kind": "full", "status": "ACTIVE"}
    deltas = [
        {
            **copied,
            "id": f"{i:032x}",
            "file_path": f"{i}.llam",
            "active_key": i.to_bytes(32, "big"),
            "parent_no": saved.ckpt_no,
            "start_token": 3,
        }
        for i in range(1, 1201)
    ]
    with registry.database.write() as db:
        db.execute(sa.insert(meta).return_defaults(), deltas[:1])
        db.execute(sa.insert(meta), deltas[1:])
    with registry.database.read() as db:
        assert len(collecting.known_paths(db, [d["file_path"] for d in deltas] + ["none"])) == 1200
        assert sum(1 for _ in rows.scan(db)) == 1201
    assert registry.report_bad(saved.id).status is Status.STALE
    assert registry.list(status=Status.ACTIVE) == []
    os.unlink(registry.store.root / saved.file_path)


# -- prune, gc, verify --------------------------------------------------------------------------------------------------


def test_prune_marks_and_gc_frees_and_both_are_on_record(registry, engine, saved, oracle):
    collector = Collector(registry.context)
    kept = registry.save(engine, "kept").checkpoint
    registry.pin(kept.id)
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(created_us=1))
    verdicts = collector.plan_prune(Policy(max_age_s=3600, max_idle_s=3600))
    assert [v.row.id for v in collector.prune(verdicts)] == [saved.id]
    report = collector.run(collector.plan(Policy(stale_grace_s=0)))
    assert [(result.item.kind, str(result)) for result in report.done] == [(GcKind.STALE, "deleted")]
    assert report.freed_bytes == saved.file_size
    assert not (registry.store.root / saved.file_path).exists()
    assert [(r.kind, r.n_items, r.run_no) for r in collector.runs(2)] == [("gc", 1, 2), ("prune", 1, 1)]


def test_a_prune_whose_rows_were_all_used_since_the_plan_records_no_item(registry, engine, saved, oracle):
    collector = Collector(registry.context)
    registry.save(engine, "the newest stays")
    change(registry, saved, created_us=1)
    verdicts = collector.plan_prune(Policy(max_age_s=3600))
    assert len(verdicts) == 1
    registry.restore(engine, "one")
    assert collector.prune(verdicts) == []
    assert collector.runs(1)[0].n_items == 0
    assert not any("INSERT INTO gc_run_item" in s.sql for s in oracle.log)


def test_gc_collects_a_file_without_a_row_and_marks_a_row_without_a_file(registry, engine, saved):
    gone = registry.save(engine, "gone").checkpoint
    ghost = registry.store.root / saved.file_path.replace(saved.id[4:], "f" * 28)
    shutil.copy(registry.store.root / saved.file_path, ghost)
    os.unlink(registry.store.root / gone.file_path)
    collector = Collector(registry.context)
    report = collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True))
    assert {(result.item.kind, str(result)) for result in report.done} == {
        (GcKind.MISSING, "marked"),
        (GcKind.ORPHAN, "deleted"),
    }
    assert registry.get(gone.id).stale_reason is StaleReason.MISSING


def test_gc_spares_what_was_used_since_the_plan(registry, engine, saved):
    collector = Collector(registry.context)
    registry.remove(saved.id)
    plan = collector.plan(Policy(stale_grace_s=0))
    change(registry, saved, hit_count=5)
    (result,) = collector.run(plan).done
    assert result.outcome is GcOutcome.SKIPPED
    assert registry.get(saved.id).status is Status.STALE


def test_ghosts_that_a_run_saw_are_collected_by_the_next(registry, engine, saved):
    ghost = registry.store.root / saved.file_path.replace(saved.id[4:], "f" * 28)
    shutil.copy(registry.store.root / saved.file_path, ghost)
    collector = Collector(registry.context)
    assert collector.run(collector.plan(Policy(ghost_grace_s=0))).done == ()
    assert [str(result) for result in collector.run(collector.plan(Policy(ghost_grace_s=0))).done] == ["deleted"]


def test_room_is_made_and_claimed_for_a_save_under_a_budget(registry, engine, saved, monkeypatch):
    small = Registry(dataclasses.replace(registry.context, policy=Policy(max_bytes=saved.file_size + 5000, min_free=1)))
    assert small.save(engine, "two").outcome is SaveOutcome.SAVED
    assert registry.get(saved.id).stale_reason is StaleReason.EVICTED
    newest = small.list(status=Status.ACTIVE)[0]
    with registry.database.read() as db:
        assert collecting.newest(db, "model_name", "sample", 1) == {newest.ckpt_no}
    registry.pin(newest.id)

    def stuck(_path, **_options):
        raise StoreUnavailable(path="x", reason="busy")

    with registry.database.write() as db:  # the files of STALE rows go first; one that cannot go keeps its bytes
        db.execute(sa.update(meta).where(meta.c.id == saved.id).values(file_size=saved.file_size))
    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "remove", stuck)
        assert small.save(engine, "three").outcome is SaveOutcome.REFUSED
    assert registry.get(saved.id).file_size == saved.file_size


def test_the_floor_of_free_space_counts_what_gc_will_free(registry, engine, saved):
    registry.remove(registry.save(engine, "two").checkpoint.id)
    assert Collector(registry.context).plan_prune(Policy(min_free=1)) == []


def test_what_prune_marked_comes_back_and_what_is_purged_does_not(registry, engine, saved):
    change(registry, saved, created_us=1)
    registry.save(engine, "the newest stays")
    collector = Collector(registry.context)
    collector.prune(collector.plan_prune(Policy(max_age_s=3600)))
    assert [str(result) for result in Reconciler(registry.context).unprune([registry.get(saved.id)])] == ["ACTIVE"]
    delta_of(registry, saved, "child")
    assert Purger(registry.context).run(Purge(model_name="sample")).n_rows == 3
    assert registry.list() == []


def test_a_schedule_stores_its_next_run_and_what_became_of_the_last(registry):
    with registry.database.write() as db:
        started_us = schedules.put(db, "host", "every 15m", 900.0)
        schedules.set_next(db, "host", "every 15m", started_us, 900.0)
        schedules.finished(db, "host", "x" * 500)
        assert schedules.get(db, "host").last_result.startswith("xxx")
        schedules.stopped(db, "host", started_us)
        assert schedules.stored_text("", 10)
        assert [row.next_us for row in schedules.schedules(db)] == [None]


def test_a_second_collector_is_told_who_is_at_work(registry, engine, saved):
    with registry.database.write() as db:
        assert coordination.take_lease(db, "gc", "other-host:1", 60) == 1
    with pytest.raises(Busy, match="other-host"):
        Collector(registry.context).run(Collector(registry.context).plan())


def test_the_verifier_finds_a_damaged_file_and_one_without_a_row(registry, engine, saved, left_in_store):
    left_in_store |= {"corrupt", "orphan"}
    path = registry.store.root / saved.file_path
    shutil.copy(path, path.with_name(saved.id[:4] + "f" * 28 + ".llam"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    found = Verifier(registry.database, registry.store).findings()
    assert {f.kind.value for f in found} == left_in_store


# -- leases, claims, prefixes, deltas -----------------------------------------------------------------------------------


def test_a_lease_changes_hands_with_a_new_fence_once_it_has_expired(registry):
    with registry.database.write() as db:
        first = coordination.take_lease(db, "gc", "a", 60)
        assert coordination.take_lease(db, "gc", "b", 60) is None
        assert coordination.renew_lease(db, "gc", first, 60)
        holder, left = coordination.lease_holder(db, "gc")
        assert (holder, 58 <= left <= 61) == ("a", True)
        db.execute(sa.update(registry_lease).values(expires_us=1))
        second = coordination.take_lease(db, "gc", "b", 60)
        assert second == first + 1
        assert not coordination.renew_lease(db, "gc", first, 60)
        coordination.drop_lease(db, "gc", first)
        assert coordination.lease_holder(db, "gc")[0] == "b", "a lease that is ours no more is left alone"
        coordination.drop_lease(db, "gc", second)
        assert coordination.take_lease(db, "gc", "c", 60) == second + 1


def test_a_claim_is_held_by_one_and_counts_the_bytes_it_reserves(registry, oracle):
    key = b"k" * 32
    with registry.database.write() as db:
        assert coordination.take_claim(db, key, "a", 100, 60)
        assert coordination.take_claim(db, key, "a", 200, 60), "renewed"
        assert not coordination.take_claim(db, key, "b", 999, 60)
        assert coordination.claimed_bytes(db) == 200
        coordination.drop_claim(db, key, "b")
        db.execute(sa.update(save_claim).values(expires_us=1))
        assert coordination.claimed_bytes(db) == 0
        assert coordination.take_claim(db, key, "b", 7, 60), "an expired claim is free"
        coordination.drop_claim(db, key, "b")
        assert coordination.take_claim(db, key, "c", 7, 60)
    oracle.fail("INSERT INTO save_claim", 1)
    with pytest.raises(Conflict, match="ORA-00001"), registry.database.write() as db:
        coordination.take_claim(db, b"n" * 32, "a", 1, 60)


def test_the_deepest_prefix_is_found_by_bisection_and_leaves_with_the_mark(registry, engine, saved, oracle):
    chain = [bytes([i]) * 16 for i in range(10)]
    links = [
        PrefixLink(prefix_hash=h, n_tokens=i + 1, file_tokens=3, ckpt_no=saved.ckpt_no) for i, h in enumerate(chain)
    ]
    with registry.database.write() as db:
        prefixes.link(db, links[:7])
        prefixes.link(db, [])
    mark = len(oracle.log)
    with registry.database.read() as db:
        assert prefixes.deepest(db, chain) == 7
    assert since(oracle, mark).count("SELECT") <= 4
    mark = len(oracle.log)
    with registry.database.read() as db:
        assert prefixes.deepest(db, chain, 16) == 7
    assert since(oracle, mark).count("SELECT") == 1, "all points in one round trip"
    with registry.database.read() as db:
        assert prefixes.sharing(db, chain[6], 16) == ([saved], True)
        assert prefixes.sharing(db, chain[7], 16) == ([], True)
        assert prefixes.ending_at(db, chain, 16)[0] == saved
    registry.remove(saved.id)
    with registry.database.read() as db:
        assert prefixes.deepest(db, chain) == 0


def test_a_match_by_prefix_and_a_later_link_speak_oracles_sql(registry, engine, saved):
    asked = [*engine.token_ids("one").tolist(), 7]
    registry = Registry(dataclasses.replace(registry.context, min_match_tokens=2))
    found = registry.match(asked, fingerprint=engine.fingerprint)
    assert (found.outcome, found.n_matching) == (Outcome.HIT, len(engine.ids))
    with registry.database.write() as db:
        db.execute(sa.delete(checkpoint_prefix))
        assert rows.by_number(db, saved.ckpt_no) == rows.by_path(db, saved.file_path) == saved
    assert Reconciler(registry.context).link() == 1
    assert registry.match(asked, fingerprint=engine.fingerprint).n_matching == len(engine.ids)


def test_a_delta_is_saved_restored_and_flattened(registry):
    engine, story = TokenEngine(), list(range(100, 140))
    rows = []
    for ids in (story, [*story, 7, 8], story[:30]):
        engine.evaluate(ids)
        rows.append(registry.save(engine, ids).checkpoint)
    assert [row.start_token for row in rows] == [0, 40, 30]
    engine.evaluate([1])
    assert registry.restore(engine, [*story, 7, 8]).n_restored == 41
    for row in rows[1:]:
        assert registry.flatten(row.id).parent_no is None


def test_an_input_whose_time_is_over_is_renewed_where_a_delta_stands_on_it_and_marked_where_its_file_is_gone(registry):
    engine, story = TokenEngine(), list(range(100, 140))
    engine.evaluate(story)
    row = registry.save(engine, story, expires_in_s=60).checkpoint
    engine.evaluate([*story, 7, 8])
    delta = registry.save(engine, [*story, 7, 8]).checkpoint
    for expires_in_s in (60, None):
        with registry.database.write() as db:
            db.execute(sa.update(meta).where(meta.c.id == row.id).values(expires_us=1))
        engine.evaluate(story)
        assert registry.save(engine, story, expires_in_s=expires_in_s).outcome is SaveOutcome.DEDUPLICATED
    assert registry.get(row.id).expires_us is None
    (registry.store.root / row.file_path).unlink()
    collector = Collector(registry.context)
    assert [str(result) for result in collector.run(collector.plan()).done] == ["marked"]
    assert registry.get(delta.id).stale_reason is StaleReason.MISSING


def test_a_commit_that_fails_is_taken_for_unanswered_and_keeps_its_file(registry, engine, oracle, left_in_store):
    registry.save(engine, "zero")

    def refuse(step):
        if step == "inserted":
            oracle.fail("COMMIT", 3113)

    with pytest.raises(CommitOutcomeUnknown):
        Registry(dataclasses.replace(registry.context, hook=refuse)).save(engine, "one")
    assert len(list(registry.store.root.rglob("*.llam"))) == 2
    left_in_store.add("orphan")


def test_who_holds_a_claim_is_told(registry):
    key = bytes(32)[:-1] + b"\x01"
    with registry.database.write() as db:
        assert coordination.claim_of(db, key) is None
        assert coordination.take_claim(db, key, "host:1", 0, 60)
        assert coordination.claim_of(db, key) is not None


def test_a_parent_stays_while_a_delta_needs_it_and_takes_its_deltas_along(registry, engine, saved):
    child = delta_of(registry, saved, "child")
    grandchild = delta_of(registry, child, "grandchild")
    with pytest.raises(BadInput, match="a delta needs it"):
        registry.remove(saved.id)
    with registry.database.write() as db:
        assert rows.has_active_child(db, saved)
        assert collecting.mark_untouched(db, {RowVersion.of(rows.get(db, saved.id)): StaleReason.EVICTED}) == set()
        leaf = RowVersion.of(rows.get(db, grandchild.id))
        assert collecting.mark_untouched(db, {leaf: StaleReason.EVICTED}) == {grandchild.ckpt_no}
    registry.report_bad(saved.id)
    assert [registry.get(r.id).stale_reason for r in (saved, child, grandchild)] == [
        StaleReason.CORRUPT,
        StaleReason.CORRUPT,
        StaleReason.EVICTED,
    ]
    os.unlink(registry.store.root / saved.file_path)


def test_the_clock_is_a_whole_number_of_microseconds(registry):
    with registry.database.read() as db:
        now = rows.clock_us(db)
    assert type(now) is int
    assert now > 1_700_000_000_000_000


# -- the rules themselves: each is proven by a planted fault ------------------------------------------------------------


class BytesAsText(sa.types.TypeDecorator):
    """A type that lets bytes through to a bind of characters."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value, dialect):
        return value


# Rule -> a statement of SQLAlchemy that breaks it, and no other.
FAULTS = {
    "locked rows cut off": sa.select(meta.c.id).limit(1).with_for_update(skip_locked=True),
    "long IN list": sa.select(meta.c.id).where(meta.c.ckpt_no.in_(range(1001))),
    "LOB compared": sa.select(llama_model.c.n_layer).where(llama_model.c.fields_json == "{}"),
    "reserved name": sa.select(sa.table("t", sa.column("access")).c.access),
    "quoted name": sa.select(sa.table("Run", sa.column("level")).c.level),
    "empty string": sa.update(meta).values(label=""),
    "bool": sa.update(meta).values(pinned=sa.literal(True)),
    "datetime": sa.select(meta.c.id).where(
        meta.c.created_us > sa.literal(datetime.datetime.now(datetime.UTC), sa.DateTime(timezone=True))
    ),
    "long string": sa.update(meta).values(label="ä" * 2001),  # 4002 bytes
    "wide int": sa.update(meta).values(file_size=10**19),
    "bytes not RAW": sa.update(meta).values(label=sa.literal(b"x" * 32, BytesAsText())),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_found(rule):
    driver, engine = plain("23.5.0.24.7")
    with engine.begin() as db:
        db.execute(FAULTS[rule])
    engine.dispose()
    assert {f.rule for f in oracle_rules.findings(driver.log)} == {rule}


@pytest.mark.parametrize(
    ("rule", "sql"),
    [
        ("not Oracle's SQL", "SELECT id FROM llama_checkpoint_meta LIMIT 1"),
        ("not Oracle's SQL", "SELECT id::text FROM llama_checkpoint_meta"),
        ("not Oracle's SQL", "INSERT INTO save_claim (holder) VALUES ('a') ON CONFLICT DO NOTHING"),
        ("not Oracle's SQL", "SELECT id FROM llama_checkpoint_meta WHERE label ILIKE 'a%'"),
        ("not Oracle's SQL", "UPDATE llama_checkpoint_meta SET pinned = TRUE"),
        ("not Oracle's SQL", "UPDATE llama_checkpoint_meta SET pinned = FALSE"),
        ("not Oracle's SQL", "SELECT c.id FROM llama_checkpoint_meta AS c"),
        ("not Oracle's SQL", "INSERT INTO save_claim (holder) VALUES ('a') RETURNING holder"),
        ("not Oracle's SQL", "INSERT INTO save_claim (holder) VALUES ('a'), ('b')"),
        ("not Oracle's SQL", "SELECT EXTRACT(DAY FROM SYSTIMESTAMP)"),
        ("locked rows cut off", "SELECT DISTINCT id FROM llama_checkpoint_meta FOR UPDATE"),
        ("LOB compared", "SELECT n_layer FROM llama_model ORDER BY fields_json"),
        ("LOB compared", "SELECT DISTINCT fields_json FROM llama_model"),
        ("reserved name", "INSERT INTO t (id, size) VALUES (:a, :b)"),
        ("reserved name", "UPDATE t SET comment = :a WHERE id = :b"),
        ("reserved name", "SELECT x.id FROM session x"),
        ("reserved name", "SELECT id FROM t WHERE id = :level"),
        ("reserved name", "SELECT id AS uid FROM t"),
        ("quoted name", 'UPDATE t SET "level" = 1'),
    ],
)
def test_a_fault_written_by_hand_is_found(rule, sql):
    log = [Statement(sql, 1), Statement(COMMIT, 1)]
    assert {f.rule for f in oracle_rules.findings(log)} == {rule}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM t WHERE label = 'LIMIT :: TRUE \"x\" :level'",
        "SELECT n_layer FROM llama_model WHERE fields_json IS NOT NULL AND fields_json LIKE :a",
        "SELECT CAST(a AS DATE) AS b FROM t ORDER BY b DESC FETCH FIRST :param_1 ROWS ONLY",
        'SELECT sum(a) AS "size" FROM t WHERE a = :"size"',
        "SELECT id FROM t FOR UPDATE SKIP LOCKED",
    ],
)
def test_what_oracle_takes_is_not_a_fault(sql):
    assert oracle_rules.findings([Statement(sql, 1)]) == []


def test_an_empty_list_for_executemany_is_found():
    driver, engine = plain()
    connection = engine.raw_connection()
    connection.cursor().executemany("DELETE FROM save_claim WHERE holder = :holder", [])
    connection.commit()
    connection.close()
    engine.dispose()
    assert {f.rule for f in oracle_rules.findings(driver.log)} == {"nothing to execute"}


def test_a_naive_datetime_and_bytes_too_many_for_raw_are_found():
    binds = {"a": datetime.datetime(2025, 1, 1), "b": b"x" * 2001}
    log = [Statement("DELETE FROM t WHERE a = :a AND b = :b", 1, [binds]), Statement(COMMIT, 1)]
    assert {f.rule for f in oracle_rules.findings(log)} == {"datetime", "bytes not RAW"}


def test_a_write_that_is_given_back_to_the_pool_without_a_commit_is_found():
    driver, engine = plain()
    with engine.connect() as db:
        db.execute(sa.delete(checkpoint_prefix))
    engine.dispose()
    assert {f.rule for f in oracle_rules.findings(driver.log)} == {"no COMMIT"}


def test_a_write_that_is_still_open_at_the_end_is_found_and_one_that_failed_is_not():
    write, failed = Statement("DELETE FROM t", 1), Statement("DELETE FROM t", 2, failed=2292)
    assert {f.rule for f in oracle_rules.findings([write, failed, Statement(ROLLBACK, 2)])} == {"no COMMIT"}


def test_more_binds_than_the_protocol_counts_are_found():
    log = [Statement("SELECT id FROM t", 1, [dict.fromkeys(map(str, range(65536)), 1)])]
    assert {f.rule for f in oracle_rules.findings(log)} == {"many binds"}


def test_every_rule_is_proven_by_a_fault():
    elsewhere = {"not Oracle's SQL", "nothing to execute", "many binds"}
    assert set(FAULTS) | elsewhere == set(oracle_rules.RULES)


# -- the stand-in itself ------------------------------------------------------------------------------------------------


def test_an_argument_that_the_driver_does_not_know_is_refused_as_by_the_driver():
    with pytest.raises(TypeError, match="connect_timeout"):
        RecordingOracle("19.21.0.0.0").connect(connect_timeout=10)


def test_a_statement_that_the_stand_in_cannot_run_is_never_taken_for_a_failing_database(registry, oracle):
    with pytest.raises(AssertionError, match="the stand-in cannot run this"), registry.database.write() as db:
        db.exec_driver_sql("DELETE FROM gc_run WHERE run_no = NVL2(1, 2, 3)")
    oracle.log.clear()


def test_an_empty_string_is_null_as_on_oracle(registry, engine, saved, oracle):
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(label=""))
    assert registry.get(saved.id).label is None
    with pytest.raises(DatabaseUnavailable, match="ORA-01400"), registry.database.write() as db:
        db.execute(sa.update(meta).values(model_name=""))
    oracle.log.clear()


def test_constraints_are_told_by_oracles_codes(registry, engine, saved):
    child = delta_of(registry, saved, "child")
    refused = {
        "ORA-02292": sa.delete(meta).where(meta.c.ckpt_no == saved.ckpt_no),
        "ORA-02291": sa.update(meta).where(meta.c.ckpt_no == child.ckpt_no).values(parent_no=999),
        "ORA-02290": sa.update(meta).where(meta.c.ckpt_no == child.ckpt_no).values(status="STALE"),
        "ORA-01400": sa.update(meta).where(meta.c.ckpt_no == child.ckpt_no).values(model_name=None),
    }
    for code, statement in refused.items():
        with pytest.raises(DatabaseUnavailable, match=code), registry.database.write() as db:
            db.execute(statement)
    registry.report_bad(child.id)


def test_the_deltas_of_a_row_are_read_level_by_level(registry, saved):
    child = delta_of(registry, saved, "child")
    grandchild = delta_of(registry, child, "grandchild")
    with registry.database.read() as db:
        deltas = rows.deltas_of(db, [saved.ckpt_no], [meta.c.ckpt_no, meta.c.id])
    assert {number: row.id for number, row in deltas.items()} == {
        child.ckpt_no: child.id,
        grandchild.ckpt_no: grandchild.id,
    }
    registry.report_bad(child.id)


def test_what_another_connection_has_not_committed_is_not_seen(registry):
    with registry.database.write() as one:
        run_no = coordination.start_run(one, "gc", "here")
        with registry.database.read() as other:
            assert other.execute(sa.select(gc_run.c.run_no)).all() == []
        coordination.end_run(one, run_no, n_items=0, n_failed=0, freed_bytes=0)
    with registry.database.read() as other:
        assert other.execute(sa.select(gc_run.c.run_no)).scalars().all() == [run_no]


def test_a_planned_answer_goes_before_the_rows(registry, oracle):
    oracle.answer(r"SELECT llama_checkpoint_meta.ckpt_no\s+FROM", ["CKPT_NO"], [(41,)])
    with registry.database.read() as db:
        assert not rows.is_empty(db)


def test_the_statements_were_parsed_and_not_only_recorded():
    pytest.importorskip("sqlglot", reason="statements are not parsed without 'sqlglot'")
    assert parses("SELECT 1 FROM DUAL")
    assert not parses("SELECT FROM WHERE")
    assert not parses("FROBNICATE THE TABLE")


@pytest.mark.parametrize("version", VERSIONS)
def test_no_function_that_speaks_to_the_database_was_left_out(request, version):
    ours = {item.originalname for item in request.session.items if item.path == request.path}
    if ours != {name for name in globals() if name.startswith("test_")}:
        pytest.skip("only part of this file was run")
    expected = {f"{module.__name__}.{name}" for module in LAYER for name in functions_of(module)}
    assert expected - DRIVEN[version] == set()
