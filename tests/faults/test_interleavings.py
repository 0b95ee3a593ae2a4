"""Two programs at the same rows and files at once, each halted at the step where the other could do harm."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.databases import waits_for_a_lock
from support.sample_engine import TokenEngine
from support.steps import once
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import collecting, marks
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import DatabaseUnavailable, LlamaCkptError
from llama_ckpt.exchange.adopt import AdoptOptions, AdoptOutcome, adopt
from llama_ckpt.gc_values import RowVersion
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import Store, path_of
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status

STORY = list(range(100, 140))


def adopted(context, *paths, **options):
    return [found.outcome for found in adopt(context, paths, AdoptOptions(**options))]


# -- whose file it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_two_programs_that_adopt_one_file_leave_it_to_the_row_of_the_first(registry, engine, tmp_path, link):
    theirs = tmp_path / f"{'ab' * 16}.llam"
    theirs.write_bytes(checkpoint_bytes())
    first = []

    def meanwhile():
        first.extend(adopted(registry.context, theirs))

    # It has looked whether the id is free, and then the other one is quicker.
    store = Store(registry.store.root)
    step = "link_in" if link else "free_bytes"
    real = getattr(store, step)
    setattr(store, step, lambda *given: (meanwhile(), real(*given))[1])
    second = adopted(replace(registry.context, store=store), theirs, link=link)
    assert (first, second) == ([AdoptOutcome.ADOPTED], [AdoptOutcome.REGISTERED])
    assert registry.restore(engine, "found without a row").outcome is Outcome.HIT


def test_a_file_that_is_registered_again_while_its_save_goes_on_stays(registry, engine):
    mended = []

    def repair():
        findings = Verifier(registry.database, registry.store).findings()
        mended.extend(str(result) for result in Reconciler(registry.context).apply(findings))

    store = Store(registry.store.root, hook=once("renamed", repair))
    saver = Registry(replace(registry.context, store=store))
    registry.save(engine, "zero")
    assert saver.save(engine, "one").outcome is SaveOutcome.SAVED
    assert mended == ["registered again"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_file_that_is_registered_again_while_its_save_fails_stays(registry, engine, monkeypatch):
    registry.save(engine, "zero")
    real = Database.write

    def fail_once(self):
        monkeypatch.setattr(Database, "write", real)
        raise DatabaseUnavailable(url="", reason="another process has held the write lock")

    def repair():
        Reconciler(registry.context).apply(Verifier(registry.database, registry.store).findings())
        monkeypatch.setattr(Database, "write", fail_once)

    saver = Registry(replace(registry.context, store=Store(registry.store.root, hook=once("renamed", repair))))
    with pytest.raises(DatabaseUnavailable):
        saver.save(engine, "one")
    assert registry.restore(engine, "one").outcome is Outcome.HIT


@pytest.mark.parametrize("how", ["adopt", "repair"])
def test_a_file_that_gets_its_row_back_after_gc_deleted_the_old_one_stays(registry, engine, saved, how):
    registry.remove(saved.id)

    def again():
        if how == "adopt":
            assert adopted(registry.context, registry.store.root / saved.file_path) == [AdoptOutcome.ADOPTED]
        else:
            Reconciler(registry.context).apply(Verifier(registry.database, registry.store).findings())

    collector = Collector(replace(registry.context, hook=once("rows deleted", again)))
    report = collector.run(collector.plan(Policy(stale_grace_s=0)))
    assert [str(result) for result in report.done] == ["skipped: it changed since the plan"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_file_that_changed_when_its_row_was_gone_already_is_a_ghost_that_was_seen(registry, saved):
    registry.remove(saved.id)
    collector = Collector(
        replace(registry.context, hook=once("rows deleted", lambda: registry.store.touch(saved.file_path)))
    )
    collector.run(collector.plan(Policy(stale_grace_s=0)))
    with registry.database.read() as db:
        assert collecting.used_bytes(db) == saved.file_size
        assert list(collecting.ghosts_seen(db)) == [saved.file_path]
    collector.run(collector.plan(Policy(ghost_grace_s=0)))
    assert not (registry.store.root / saved.file_path).exists()


def test_a_file_that_takes_the_name_of_one_that_had_gone_already_stays(registry, engine, saved, tmp_path):
    theirs = tmp_path / f"{saved.id}.llam"
    (registry.store.root / saved.file_path).rename(theirs)
    registry.remove(saved.id)

    def again():
        assert adopted(registry.context, theirs) == [AdoptOutcome.ADOPTED]

    collector = Collector(replace(registry.context, hook=once("rows deleted", again)))
    collector.run(collector.plan(Policy(stale_grace_s=0)))
    assert registry.get(saved.id).file_path == path_of(saved.id)
    assert registry.restore(engine, "one").outcome is Outcome.HIT


# -- rows that go while they are read -------------------------------------------------------------------------------------------


@pytest.fixture
def delta(registry):
    """An engine, the token ids of a delta, and its row."""
    engine, ids = TokenEngine(), [*STORY, 7, 8, 9]
    for one in (STORY, ids):
        engine.evaluate(one)
        row = registry.save(engine, one).checkpoint
    assert row.parent_no is not None
    return engine, ids, row


def test_a_delta_that_is_purged_while_it_is_restored_is_no_match(registry, delta):
    engine, ids, _ = delta
    purge = once("leased", lambda: Purger(registry.context).run(Purge(everything=True)))
    back = Registry(replace(registry.context, hook=purge)).restore(engine, ids)
    assert back.outcome is Outcome.NO_MATCH
    assert registry.list() == []


def test_an_input_whose_delta_is_purged_while_it_is_saved_again_is_saved_anew(registry, delta, monkeypatch):
    engine, ids, row = delta
    real = type(registry.context).chain

    def purged(context, of):
        with monkeypatch.context() as patch:
            patch.setattr(type(context), "chain", real)
            Purger(registry.context).run(Purge(everything=True))
        monkeypatch.setattr(type(context), "chain", real)
        return real(context, of)

    monkeypatch.setattr(type(registry.context), "chain", purged)
    engine.evaluate(ids)
    again = registry.save(engine, ids)
    assert (again.outcome, again.checkpoint.id != row.id) == (SaveOutcome.SAVED, True)


# -- locks ------------------------------------------------------------------------------------------------


def test_rows_that_go_for_several_reasons_are_locked_in_one_order(registry, engine, monkeypatch):
    if registry.database.dialect != "postgresql":
        pytest.skip("SQLite's writers are alone")
    rows = [RowVersion.of(registry.save(engine, text).checkpoint) for text in ("one", "two")]
    reasons = dict(zip(rows, (StaleReason.EXPIRED, StaleReason.EVICTED), strict=True))
    failed, real, other = [], collecting.mark, Database(registry.database.url.render_as_string(hide_password=False))

    def evict_both():
        try:
            with other.write() as db:
                collecting.mark_untouched(db, dict.fromkeys(rows, StaleReason.EVICTED))
        except LlamaCkptError as error:
            failed.append(error)

    thread = threading.Thread(target=evict_both)

    def mark_slowly(db, which, reason):
        if threading.current_thread() is not thread and not thread.is_alive():
            monkeypatch.setattr(collecting, "mark", real)
            thread.start()
            while not waits_for_a_lock(registry.database):
                assert thread.is_alive()
        return real(db, which, reason)

    monkeypatch.setattr(collecting, "mark", mark_slowly)
    with registry.database.write() as db:
        assert collecting.mark_untouched(db, reasons) == {row.ckpt_no for row in rows}
    thread.join()
    other.close()
    assert failed == []
    assert {row.status for row in registry.list()} == {Status.STALE}


def test_an_invalidation_that_another_overtakes_goes_on_to_the_end(registry, engine, monkeypatch):
    if registry.database.dialect != "postgresql":
        pytest.skip("SQLite's writers are alone")
    for number in range(5):
        registry.save(engine, f"input {number}")
    other = Database(registry.database.url.render_as_string(hide_password=False))
    monkeypatch.setattr("llama_ckpt.catalogue._MARKED_AT_ONCE", 2)
    real, overtaken = marks.active_of_model, []

    def overtake(db, *given):
        rows = real(db, *given)
        if not overtaken:
            overtaken.append(rows)
            with other.write() as first:
                marks.mark_all_stale(first, rows, StaleReason.REMOVED)
        return rows

    monkeypatch.setattr(marks, "active_of_model", overtake)
    assert registry.invalidate(engine.fingerprint) == 3
    assert {row.status for row in registry.list()} == {Status.STALE}
    other.close()


def test_whoever_waits_too_long_for_anothers_lock_is_told(registry, engine, saved, monkeypatch):
    if registry.database.dialect != "postgresql":
        pytest.skip("SQLite has its busy timeout")
    monkeypatch.setattr("llama_ckpt.db.connect._BUSY_TIMEOUT_S", 0.05)
    url = registry.database.url.render_as_string(hide_password=False)
    with Registry.open(url, registry.store.root) as impatient, registry.database.write() as db:
        db.execute(sa.select(meta.c.ckpt_no).with_for_update())
        back = impatient.restore(engine, "one")
        assert (back.outcome, "lock timeout" in back.reason) == (Outcome.FAILED, True)
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_row_is_needed_by_a_delta_whose_number_is_below_its_own(registry, delta):
    """As where several instances of a server count, each from its own range."""
    if registry.database.dialect != "sqlite":
        pytest.skip("a row that others name keeps its number there")
    engine, ids, child = delta
    engine.evaluate([*ids, *range(1000, 1010)])
    living = registry.save(engine, [*ids, *range(1000, 1010)]).checkpoint
    assert living.parent_no == child.ckpt_no
    with registry.database.migration() as db:  # without foreign keys
        for table, column in (("llama_checkpoint_meta", "ckpt_no"), ("checkpoint_prefix", "ckpt_no")):
            db.exec_driver_sql(f"UPDATE {table} SET {column} = 0 WHERE {column} = {child.ckpt_no}")
        db.exec_driver_sql(f"UPDATE llama_checkpoint_meta SET parent_no = 0 WHERE parent_no = {child.ckpt_no}")
    rows = [RowVersion.of(row) for row in registry.list() if row.id != living.id]
    with registry.database.write() as db:
        assert collecting.mark_untouched(db, dict.fromkeys(rows, StaleReason.EVICTED)) == set()
        db.execute(sa.update(meta).values(status="STALE", active_key=None, stale_us=1, stale_reason="evicted"))
        assert collecting.delete_untouched(db, rows) == set()
        db.rollback()
