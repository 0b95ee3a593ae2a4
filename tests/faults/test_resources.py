"""Disk full, database gone, engine at odds: what fails is told, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.sample_engine import SampleEngine, TokenEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import CommitOutcomeUnknown, Conflict, DatabaseUnavailable, StoreFull, StoreUnavailable
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status


def failing_hook(step, error):
    def hook(now):
        if now == step:
            raise error

    return hook


def files_in(registry):
    return [p for p in registry.store.root.rglob("*") if p.suffix in (".llam", ".tmp")]


@pytest.mark.parametrize("step", ["created", "head", "written", "staged", "renamed"])
@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreUnavailable)]
)
def test_a_save_that_fails_while_writing_leaves_neither_file_nor_row(
    registry, engine, step, number, expected, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "_hook", failing_hook(step, OSError(number, "told by the system")))
        with pytest.raises(expected, match="told by the system"):
            registry.save(engine, "one")
    assert (registry.list(), files_in(registry)) == ([], [])
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_a_warm_that_cannot_save_has_evaluated_all_the_same_and_says_what_failed(registry, monkeypatch):
    engine = SampleEngine()
    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "free_bytes", lambda: 1000)
        warmed = registry.warm(engine, "one")
    assert (len(engine.held), warmed.n_evaluated, warmed.save) == (3, 3, None)
    assert isinstance(warmed.problem, StoreFull)
    assert "1000 bytes are free" in str(warmed.problem)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_read_error_of_the_moment_gives_failed_and_the_same_row_hits_later(
    registry, engine, saved, number, monkeypatch
):
    def broken(*_args, **_kw):
        raise OSError(number, "told by the system")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.open", broken)
        back = registry.restore(engine, "one")
    assert (back.outcome, back.n_restored) == (Outcome.FAILED, 0)
    assert isinstance(back.error, StoreUnavailable)
    now = registry.get(saved.id)
    assert (now.status, now.lease_until_us) == (Status.ACTIVE, None)
    assert registry.restore(engine, "one").outcome is Outcome.HIT


@pytest.mark.parametrize("fault", ["disk", "database"])
def test_a_warm_that_meets_a_fault_of_the_moment_leaves_the_checkpoint_and_what_stands_on_it(
    registry, monkeypatch, fault
):
    engine, story = TokenEngine(), list(range(100, 140))
    rows = []
    for ids in (story, [*story, 7, 8]):
        engine.evaluate(ids)
        rows.append(registry.save(engine, ids).checkpoint)

    def broken(*_args, **_kw):
        raise (
            OSError(errno.EIO, "told by the system")
            if fault == "disk"
            else sa.exc.OperationalError("", {}, Exception())
        )

    engine.evaluate([1])
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.os.open" if fault == "disk" else "llama_ckpt.db.leases.lease", broken)
        warmed = registry.warm(engine, story)
    assert warmed.restore.outcome is Outcome.FAILED
    assert warmed.n_evaluated == len(story)
    assert [registry.get(row.id).status for row in rows] == [Status.ACTIVE] * 2
    assert registry.restore(engine, story).checkpoint.id == rows[0].id


def test_a_head_of_which_a_part_cannot_be_read_at_this_moment_is_not_taken_for_damaged(registry, monkeypatch):
    engine, story = TokenEngine(), list(range(100, 140))
    engine.evaluate(story)
    row = registry.save(engine, story).checkpoint
    real, reads = os.read, []

    def first_page_only(fd, n_bytes):
        reads.append(n_bytes)
        if len(reads) > 1:
            raise OSError(errno.EIO, "told by the system")
        return real(fd, 100)

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.disk.os.read", first_page_only)
        found = registry.match([*story[:30], 1, 2], fingerprint=engine.fingerprint)
    assert found.outcome is Outcome.FAILED
    assert registry.get(row.id).status is Status.ACTIVE
    assert registry.match([*story[:30], 1, 2], fingerprint=engine.fingerprint).outcome is Outcome.HIT


@pytest.fixture
def broken_database(monkeypatch):
    """Makes every transaction of a kind fail as a lost connection does."""

    def broken(*kinds):
        def fail(self):
            raise DatabaseUnavailable(url=self.shown_url, reason="the connection was lost")

        for kind in kinds:
            monkeypatch.setattr(Database, kind, fail)

    yield broken
    monkeypatch.undo()


def test_a_match_without_a_database_is_failed_and_no_exception(registry, engine, saved, broken_database, monkeypatch):
    broken_database("read")
    found = registry.match("one", fingerprint=engine.fingerprint)
    assert found.outcome is Outcome.FAILED
    assert isinstance(found.error, DatabaseUnavailable)
    monkeypatch.undo()


def test_a_warm_without_a_database_evaluates_and_says_so(registry, broken_database, monkeypatch):
    engine = SampleEngine()
    broken_database("read", "write")
    warmed = registry.warm(engine, "one")
    assert (len(engine.held), warmed.n_evaluated) == (3, 3)
    assert isinstance(warmed.problem, DatabaseUnavailable)
    monkeypatch.undo()
    assert (registry.list(), files_in(registry)) == ([], [])


def test_a_restore_whose_hit_cannot_be_recorded_is_a_hit(registry, engine, saved, monkeypatch, caplog):
    real = Database.write

    def after_lease(self):
        monkeypatch.setattr(
            Database, "write", lambda self: (_ for _ in ()).throw(DatabaseUnavailable(url="", reason="lost"))
        )
        return real(self)

    monkeypatch.setattr(Database, "write", after_lease)
    back = registry.restore(engine, "one")
    monkeypatch.undo()
    assert back.outcome is Outcome.HIT
    assert "was not recorded" in caplog.text


def test_a_row_that_cannot_be_written_takes_its_file_along(registry, engine, monkeypatch):
    """The database answers again when it is asked whether the row is there: it is not."""

    def refuse(_db, _new):
        raise sa.exc.OperationalError("INSERT", {}, Exception("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.db.rows.insert_checkpoint", refuse)
        with pytest.raises(DatabaseUnavailable):
            registry.save(engine, "one")
    assert (registry.list(), files_in(registry)) == ([], [])


def test_a_commit_that_is_refused_takes_the_file_along(registry, engine):
    """As of a full disk: SQLite says so at the commit. A server whose connection lives has answered, too."""
    registry.save(engine, "zero")

    def refuse(_connection):
        raise sa.exc.OperationalError("COMMIT", {}, Exception("database or disk is full"))

    def in_time(step):
        if step == "inserted":
            sa.event.listen(registry.database._engine, "commit", refuse)

    saver = Registry(replace(registry.context, hook=in_time))
    with pytest.raises(DatabaseUnavailable, match="disk is full"):
        saver.save(engine, "one")
    sa.event.remove(registry.database._engine, "commit", refuse)
    assert len(registry.list()) == len(files_in(registry)) == 1


def test_a_commit_whose_answer_was_lost_counts_as_saved(database_url, tmp_path, engine):
    lost = CommitOutcomeUnknown(url="x", reason="the connection was lost after the commit")
    with Registry.open(database_url, tmp_path / "store", hook=failing_hook("committed", lost)) as registry:
        result = registry.save(engine, "one")
        assert result.outcome is SaveOutcome.SAVED
        assert registry.restore(engine, "one").outcome is Outcome.HIT


def lost_connection(monkeypatch):
    def fail(self, *_args):
        raise DatabaseUnavailable(url="", reason="lost")

    for name in ("read", "write", "query"):
        monkeypatch.setattr(Database, name, fail)


def test_a_database_lost_before_the_row_takes_the_file_along(registry, engine, monkeypatch):
    def lose(step):
        if step == "renamed":
            lost_connection(monkeypatch)

    registry.save(engine, "zero")
    monkeypatch.setattr(registry.store, "_hook", lose)
    with pytest.raises(DatabaseUnavailable):
        registry.save(engine, "one")
    monkeypatch.undo()
    assert len(registry.list()) == len(files_in(registry)) == 1


def test_a_commit_without_an_answer_keeps_its_file_whatever_became_of_the_row(
    database_url, tmp_path, engine, monkeypatch, caplog
):
    def lose(step):
        if step == "committed":
            lost_connection(monkeypatch)
            raise CommitOutcomeUnknown(url="", reason="lost while it was committed")

    with Registry.open(database_url, tmp_path / "store", hook=lose) as registry:
        with pytest.raises(DatabaseUnavailable, match="lost while it was committed"):
            registry.save(engine, "one")
        monkeypatch.undo()
        assert "left for gc to collect" in caplog.text
        assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_saver_that_slept_until_gc_took_its_file_adds_no_row(registry, engine, monkeypatch):
    registry.save(engine, "zero")
    collector = Collector(registry.context)

    def sleep_long(step):
        if step == "renamed":
            collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True))

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "_hook", sleep_long)
        with pytest.raises(StoreUnavailable):
            registry.save(engine, "one")
    assert len(registry.list()) == 1
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_a_gc_that_planned_while_a_saver_slept_spares_the_file_when_it_wakes(database_url, tmp_path, engine):
    plans = []

    def wake_up(step):
        if step == "inserted" and plans:
            report = collector.run(plans.pop())
            assert [str(result) for result in report.done] == ["skipped: it changed since the plan"]

    with Registry.open(database_url, tmp_path / "store") as other:
        collector = Collector(other.context)
        other.save(engine, "zero")
        if other.database.dialect == "sqlite":
            pytest.skip("on SQLite gc waits for the saver's transaction")
        with Registry.open(database_url, tmp_path / "store", hook=wake_up) as registry:
            registry.store._hook = lambda step: (
                plans.append(collector.plan(Policy(ghost_grace_s=0), skip_grace=True)) if step == "renamed" else None
            )
            assert registry.save(engine, "one").outcome is SaveOutcome.SAVED
            assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_save_that_loses_every_race_gives_up_without_leaving_a_file(registry, engine, monkeypatch):
    def conflict(_db, _new):
        raise Conflict(what="UNIQUE constraint failed")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.db.rows.insert_checkpoint", conflict)
        with pytest.raises(Conflict):
            registry.save(engine, "one")
    assert files_in(registry) == []


def test_a_saver_that_comes_second_takes_the_firsts_row_and_removes_its_own_file(registry, engine, monkeypatch):
    first = []

    def meanwhile(step):
        if step == "renamed" and not first:
            first.append(None)
            first[0] = registry.save(engine, "one").checkpoint

    monkeypatch.setattr(registry.store, "_hook", meanwhile)
    second = registry.save(engine, "one")
    assert (second.outcome, second.bytes_written, second.checkpoint) == (SaveOutcome.DEDUPLICATED, 0, first[0])
    assert len(files_in(registry)) == 1


def test_a_checkpoint_that_goes_stale_between_match_and_lease_is_no_match(registry, engine, saved, monkeypatch):
    from llama_ckpt.db import leases, marks

    real = leases.lease

    def too_late(db, row):
        marks.mark_stale(db, row, StaleReason.REMOVED)
        return real(db, row)

    monkeypatch.setattr("llama_ckpt.db.leases.lease", too_late)
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "went STALE at this moment" in back.reason


class BadDisk:
    """`os.unlink` that fails with EIO at its nth call for a checkpoint file."""

    def __init__(self, monkeypatch, nth):
        self.calls, self.nth, self.unlink = itertools.count(1), nth, os.unlink  # gc calls from several threads
        monkeypatch.setattr("os.unlink", self)

    def __call__(self, path, **kw):
        if os.fspath(path).endswith(".llam") and next(self.calls) == self.nth:
            raise OSError(errno.EIO, "told by the system", path)
        self.unlink(path, **kw)


@pytest.fixture
def four_files(registry, engine):
    """Three checkpoints of one label that were removed, and a file that lost its row."""
    for number in range(4):
        registry.remove(registry.save(engine, f"input {number}", label="going").checkpoint.id)
    with registry.database.write() as db:
        last = sa.select(sa.func.max(meta.c.ckpt_no)).scalar_subquery()
        db.execute(sa.delete(meta).where(meta.c.ckpt_no == last))


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_gc_that_cannot_unlink_one_file_frees_the_others_and_the_next_run_frees_it(
    registry, four_files, nth, monkeypatch
):
    collector = Collector(registry.context)

    def collect():
        return collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))

    with monkeypatch.context() as patch:
        BadDisk(patch, nth)
        report = collect()
    *others, failed = sorted(str(result) for result in report.done)
    assert "told by the system" in failed
    assert others == ["deleted"] * 3
    assert (report.n_failed, len(files_in(registry))) == (1, 1)
    again = collect()
    assert (again.n_failed, len(again.done), files_in(registry)) == (0, 1, [])


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_purge_that_cannot_unlink_one_file_says_so_and_the_next_one_frees_what_is_left(
    registry, four_files, nth, monkeypatch
):
    purger = Purger(registry.context)
    with monkeypatch.context() as patch:
        BadDisk(patch, nth)
        with pytest.raises(StoreUnavailable, match=r"1 file\(s\) could not be deleted.*told by the system"):
            purger.run(Purge(everything=True))
    assert 1 <= len(files_in(registry)) <= 2  # where a row's file stays, the files without rows are not gone for yet
    report = purger.run(Purge(everything=True))
    assert (report.freed_bytes > 0, files_in(registry), registry.list()) == (True, [], [])
