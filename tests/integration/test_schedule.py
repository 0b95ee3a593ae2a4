"""Prune and gc by the clock, inside a process."""

from __future__ import annotations

import dataclasses
import logging
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from llama_ckpt.collector import schedule as module
from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.schedule import CollectorSchedule, holder_of, run_once, statuses
from llama_ckpt.collector.triggers import Trigger
from llama_ckpt.db import coordination
from llama_ckpt.db import schedules as rows
from llama_ckpt.db.tables import gc_schedule
from llama_ckpt.errors import BadInput, DatabaseUnavailable, StoreMismatch, StoreUnavailable
from llama_ckpt.gc_values import CollectionSummary, ScheduleState
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.marker import MARKER
from llama_ckpt.values import Status

PATIENCE_S = 20
HOUR = 3600
EACH_HOUR = Trigger.of(every="1h")
AGAIN_AND_AGAIN = Trigger(spec="every 1s", every_s=0.05)  # a hurried second
NOTHING = CollectionSummary(n_marked=0, n_items=0, n_failed=0, freed_bytes=0)


class Runs:
    """What a schedule's runs came to, as they end."""

    def __init__(self):
        self.seen = []
        self._more = threading.Condition()

    def __call__(self, run):
        with self._more:
            self.seen.append(run)
            self._more.notify_all()

    def wait(self, n=1):
        """The runs so far, when there are `n` of them."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.seen) >= n, PATIENCE_S), self.seen
            return self.seen[:]


@pytest.fixture
def runs():
    return Runs()


def with_hook(registry, hook):
    return dataclasses.replace(registry.context, hook=hook)


def only_status(registry):
    (found,) = statuses(registry.context)
    return found


def due_in_s(registry):
    """Seconds until the stored next run, by the database's clock."""
    with registry.database.read() as db:
        row = rows.get(db, holder_of(registry.context))
    return (row.next_us - row.now_us) / 1e6


def killed(registry, runs, trigger=EACH_HOUR):
    """A schedule ran once, and its process was killed: nobody told the row. (What is left of it here is stopped.)"""
    made = CollectorSchedule(registry.context, Policy(), trigger, jitter_s=0, on_run=runs)
    made._write_row = lambda write, store=made._write_row: store(write) if runs.seen == [] else None
    made.start()
    runs.wait()
    made.stop()


# -- a run ---------------------------------------------------------------------------------------------------------------


def test_the_first_run_is_at_once_and_prunes_and_frees_by_the_policy(registry, engine, runs):
    old = registry.save(engine, "old").checkpoint
    registry.save(engine, "new")
    policy = Policy(max_count=1, order="oldest", stale_grace_s=0)
    with CollectorSchedule(registry.context, policy, EACH_HOUR, jitter_s=0, on_run=runs):
        (run,) = runs.wait()
    assert (run.summary.n_marked, run.summary.n_items, run.summary.n_failed) == (1, 1, 0)
    assert run.summary.freed_bytes == old.file_size
    assert [row.status for row in registry.list()] == [Status.ACTIVE]
    assert f"{old.file_size} bytes freed" in only_status(registry).last_result


def test_the_next_run_is_stored_before_the_work_begins(registry, runs):
    seen = []
    parts = with_hook(registry, lambda step: seen.append(only_status(registry)) if step == "walked" else None)
    with CollectorSchedule(parts, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
    (at_work,) = seen
    assert at_work.last_us is None
    assert HOUR - 60 < (at_work.next_us - at_work.started_us) / 1e6 < HOUR + 60


def test_status_tells_who_runs_what_and_when(registry, runs):
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        (run,) = runs.wait()
        found = only_status(registry)
    assert found.holder == f"{socket.gethostname()[:60]}:{registry.store.root}"[: len(found.holder)]
    assert (found.spec, found.state) == ("every 1h", ScheduleState.WAITING)
    assert found.last_result == run.result
    assert abs(found.next_us - run.next_us) < 60e6
    assert found.started_us <= found.last_us < found.next_us


def test_a_schedule_by_cron_waits_for_its_time(registry, runs):
    at = (datetime.now().astimezone() + timedelta(hours=2)).replace(second=0, microsecond=0)
    with registry.start_collector(Policy(), cron=f"{at.minute} {at.hour} * * *", jitter_s=0) as started:
        found = only_status(registry)
    assert found.spec == started.spec == f"{at.minute} {at.hour} * * *"
    assert abs(datetime.fromtimestamp(found.next_us / 1e6, UTC) - at) < timedelta(seconds=5)
    assert found.last_us is None


def test_each_run_is_delayed_at_random_within_the_jitter(registry, runs):
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=600, on_run=runs):
        (run,) = runs.wait()
    delays = {round(EACH_HOUR.build(600).get_next_fire_time(None, datetime.now(UTC)).timestamp(), 3) for _ in range(20)}
    assert len(delays) > 10
    assert HOUR - 5 < run.next_us / 1e6 - datetime.now(UTC).timestamp() < HOUR + 600


def test_a_schedule_runs_again_and_again_without_drifting_apart(registry, runs):
    with CollectorSchedule(registry.context, Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=runs):
        first, second, *_ = runs.wait(2)
    beats = (second.next_us - first.next_us) / 50_000
    assert abs(beats - round(beats)) < 0.01  # however long a run takes


# -- what does not stop it -------------------------------------------------------------------------------------------------


def test_a_run_that_meets_another_one_says_so_and_is_no_failure(registry, runs, caplog):
    with registry.database.write() as db:
        assert coordination.take_lease(db, "gc", "another host", 300) is not None
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        (run,) = runs.wait()
    assert run.busy
    assert only_status(registry).last_result.startswith("another run was under way")
    assert "another host" in only_status(registry).last_result
    assert [r for r in caplog.records if r.name == "llama_ckpt" and r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "error",
    [
        StoreMismatch(evidence="the store is empty", registry_id="ab"),
        StoreUnavailable(path="/store", reason="it is not mounted"),
        DatabaseUnavailable(url="postgresql://host", reason="the server is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_run_that_fails_is_logged_and_recorded_and_the_schedule_goes_on(registry, runs, caplog, monkeypatch, error):
    outcomes = iter([error])

    def collect(_self, _policy, _stopped):
        if (failure := next(outcomes, None)) is not None:
            raise failure
        return NOTHING

    monkeypatch.setattr(Collector, "collect", collect)
    results = []

    def on_run(run):
        results.append(only_status(registry).last_result)
        runs(run)

    with CollectorSchedule(registry.context, Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=on_run):
        failed, went_on, *_ = runs.wait(2)
    assert (failed.problem, failed.summary) == (error, None)
    assert (went_on.problem, went_on.summary) == (None, NOTHING)
    assert results[0] == f"failed: {error}"
    assert any(r.levelno == logging.WARNING and str(error) in r.message for r in caplog.records)


def test_a_store_that_is_not_there_is_no_reason_to_free_anything(registry, saved, runs):
    marker = registry.store.root / MARKER
    kept = marker.read_bytes()
    marker.unlink()
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        (run,) = runs.wait()
    marker.write_bytes(kept)
    assert isinstance(run.problem, StoreMismatch)
    assert "is it mounted" in only_status(registry).last_result
    assert registry.get(saved.id).status is Status.ACTIVE


def test_a_fault_of_the_program_is_logged_with_its_traceback_and_the_schedule_goes_on(
    registry, runs, caplog, monkeypatch
):
    outcomes = iter([ZeroDivisionError("no such luck")])

    def collect(_self, _policy, _stopped):
        if (failure := next(outcomes, None)) is not None:
            raise failure
        return NOTHING

    monkeypatch.setattr(Collector, "collect", collect)
    with CollectorSchedule(registry.context, Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=runs):
        failed, went_on, *_ = runs.wait(2)
    assert failed.result == "failed: internal error: ZeroDivisionError: no such luck"
    assert went_on.summary == NOTHING
    assert "Traceback" in caplog.text


def test_a_database_that_goes_away_in_the_night_is_waited_for(registry, runs, caplog, monkeypatch):
    """What a run writes to its row fails twice, then works again."""
    refusals = iter([True, True])
    real = rows.set_next

    def set_next(*arguments):
        if next(refusals, False):
            raise DatabaseUnavailable(url="x", reason="the server is gone")
        real(*arguments)

    monkeypatch.setattr(rows, "set_next", set_next)
    with CollectorSchedule(registry.context, Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=runs):
        runs.wait(3)
        assert only_status(registry).state is ScheduleState.WAITING
    assert caplog.text.count("the schedule's row was not written") == 2


def test_a_run_that_takes_longer_than_the_interval_is_not_joined_by_a_second_one_and_not_taken_for_gone(registry, runs):
    put_off, go_on = threading.Event(), threading.Event()
    at_work = []

    class Told(CollectorSchedule):
        def _store_moved_next(self, event):
            super()._store_moved_next(event)
            put_off.set()

    def hook(step):
        if step == "walked":
            at_work.append(threading.current_thread())
            assert go_on.wait(PATIENCE_S)

    with Told(with_hook(registry, hook), Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=runs):
        assert put_off.wait(PATIENCE_S)
        assert len(at_work) <= 1  # a slow machine may not have come so far yet
        assert only_status(registry).state is ScheduleState.WAITING
        go_on.set()
        runs.wait(1)


def test_an_error_of_whoever_listens_does_not_stop_the_schedule(registry, runs, caplog):
    def on_run(run):
        runs(run)
        raise RuntimeError("the listener's own")

    with CollectorSchedule(registry.context, Policy(), AGAIN_AND_AGAIN, jitter_s=0, on_run=on_run):
        runs.wait(2)
    assert "the listener's own" in caplog.text


# -- stop and start again --------------------------------------------------------------------------------------------------


def test_stop_waits_for_the_run_in_progress_and_the_row_says_stopped(registry, runs):
    working, go_on = threading.Event(), threading.Event()

    def hook(step):
        if step == "walked":
            working.set()
            assert go_on.wait(PATIENCE_S)

    started = CollectorSchedule(with_hook(registry, hook), Policy(), EACH_HOUR, jitter_s=0, on_run=runs)
    started.start()
    assert working.wait(PATIENCE_S)
    stopping = threading.Thread(target=started.stop)
    stopping.start()
    assert runs.seen == []
    go_on.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert len(runs.seen) == 1
    found = only_status(registry)
    assert (found.state, found.next_us) == (ScheduleState.STOPPED, None)
    assert found.last_result == runs.seen[0].result
    started.stop()  # once more is nothing


def test_stop_with_a_timeout_leaves_a_run_to_itself(registry, runs):
    working, go_on = threading.Event(), threading.Event()

    def hook(step):
        if step == "walked":
            working.set()
            assert go_on.wait(PATIENCE_S)

    started = CollectorSchedule(with_hook(registry, hook), Policy(), EACH_HOUR, jitter_s=0, on_run=runs)
    started.start()
    assert working.wait(PATIENCE_S)
    started.stop(timeout_s=0.01)
    assert only_status(registry).state is ScheduleState.STOPPED
    go_on.set()
    runs.wait()


def test_a_stopped_schedule_can_be_started_again(registry, runs):
    made = CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs)
    for _ in range(2):
        with made:
            runs.wait(1)
            assert only_status(registry).state is ScheduleState.WAITING
    assert len(runs.seen) == 1  # the hour is not over


def test_the_process_after_a_killed_one_waits_until_that_one_would_have_run(registry, runs):
    killed(registry, runs)
    before = only_status(registry)
    assert before.state is ScheduleState.WAITING
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        assert abs(only_status(registry).next_us - before.next_us) < 5e6
    assert len(runs.seen) == 1


def test_a_killed_process_shows_as_gone_and_the_next_one_makes_up_for_its_run(registry, runs):
    with registry.database.write() as db:
        rows.put(db, holder_of(registry.context), "every 1h", -120)
    assert only_status(registry).state is ScheduleState.OVERDUE
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
        assert only_status(registry).state is ScheduleState.WAITING


def test_a_missed_run_by_cron_is_made_up_for_as_well(registry, runs):
    with registry.database.write() as db:
        rows.put(db, holder_of(registry.context), "0 0 1 1 *", -7200)
    with CollectorSchedule(registry.context, Policy(), Trigger.of(cron="0 0 1 1 *"), jitter_s=0, on_run=runs):
        runs.wait()


def test_a_new_interval_counts_from_the_last_run(registry, runs):
    killed(registry, runs)
    with CollectorSchedule(registry.context, Policy(), Trigger.of(every="30m"), jitter_s=0, on_run=runs):
        assert HOUR / 2 - 60 < due_in_s(registry) <= HOUR / 2
        assert only_status(registry).spec == "every 30m"


def test_processes_that_live_shorter_than_the_interval_collect_all_the_same(registry, runs):
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
    with registry.database.write() as db:  # the last run was 50 minutes ago
        earlier = gc_schedule.c.last_us - 50 * 60 * 1_000_000
        db.execute(sa.update(gc_schedule).values(last_us=earlier))
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        assert 9 * 60 < due_in_s(registry) <= 10 * 60


def test_a_second_process_of_the_host_takes_the_row_over_and_the_first_ones_end_does_not_stop_it(registry, runs):
    first = CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs)
    first.start()
    runs.wait()
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        first.stop()
        assert only_status(registry).state is ScheduleState.WAITING
    assert only_status(registry).state is ScheduleState.STOPPED


def test_a_second_process_that_makes_the_row_at_the_same_moment_is_no_error(registry, runs, monkeypatch):
    real = rows.get

    def get(db, holder):  # the other one comes in between
        monkeypatch.setattr(rows, "get", real)
        raise module.Conflict(what="gc_schedule")

    monkeypatch.setattr(rows, "get", get)
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()


def test_a_schedule_that_cannot_be_stored_does_not_begin(registry, runs, monkeypatch):
    def get(*_):
        raise DatabaseUnavailable(url="x", reason="the server is gone")

    monkeypatch.setattr(rows, "get", get)
    made = CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs)
    with pytest.raises(DatabaseUnavailable):
        made.start()
    made.stop()
    assert (runs.seen, statuses(registry.context)) == ([], [])


# -- rows ----------------------------------------------------------------------------------------------------------------


def test_schedules_of_other_hosts_have_rows_of_their_own_and_those_long_gone_go(registry, runs, monkeypatch):
    month = 31 * 24 * HOUR
    with registry.database.write() as db:
        rows.put(db, "gone:/store", "every 1h", -month)
        rows.put(db, "other:/store", "every 1h", 60)
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
    assert {s.holder for s in statuses(registry.context)} == {"other:/store", holder_of(registry.context)}


def test_a_run_by_another_timer_has_a_row_of_its_own(registry, runs):
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
        ran = run_once(registry.context, Policy())
        found = {s.state: s for s in statuses(registry.context)}
    assert set(found) == {ScheduleState.WAITING, ScheduleState.ONCE}
    assert found[ScheduleState.ONCE].last_result == ran.result
    assert found[ScheduleState.ONCE].holder.startswith("timer of ")


def test_a_schedule_with_a_name_finds_its_row_again_on_a_host_with_another_name(registry, runs, monkeypatch):
    for host in ("pod-1", "pod-2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, name="collector", on_run=runs):
            runs.wait()
        run_once(registry.context, Policy(), name="collector")
    assert [s.holder for s in statuses(registry.context)] == ["collector", "timer of collector"]
    assert len(runs.seen) == 1


def test_a_long_name_of_host_and_store_is_cut_and_stays_one_name(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 250)
    names = []
    for last in ("a", "b"):
        store = tmp_path / ("long" * 20) / last
        with Registry.open(store=store) as opened:
            names += [holder_of(opened.context), holder_of(opened.context)]
    assert names[0] == names[1] != names[2] == names[3]
    assert {len(name) for name in names} == {120}


def test_any_text_of_an_error_fits_into_the_row(registry, runs, monkeypatch):
    def collect(_self, _policy, _stopped):
        raise StoreUnavailable(path="/store/\udcff\0" + "long" * 300, reason="it is broken")

    monkeypatch.setattr(Collector, "collect", collect)
    with CollectorSchedule(registry.context, Policy(), EACH_HOUR, jitter_s=0, on_run=runs):
        runs.wait()
    result = only_status(registry).last_result
    assert len(result) == 400
    assert "\\udcff\\0long" in result


# -- the process that has it -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, threading
from llama_ckpt import Policy, Registry
working = threading.Event()
def hook(step):
    if step == "walked":
        working.set()
        threading.Event().wait()
registry = Registry.open(store=sys.argv[1], hook=hook)
schedule = registry.start_collector(Policy(), every="1h")
assert working.wait(20)
"""


def test_a_schedule_does_not_keep_the_interpreter_alive_not_even_in_the_middle_of_a_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "store"], timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Registry.open(store=tmp_path / "store") as registry:
        assert only_status(registry).state is ScheduleState.WAITING  # overdue, in an hour


@pytest.mark.parametrize(
    "times",
    [
        {},
        {"every": "15m", "cron": "* * * * *"},
        {"every": "0s"},
        {"every": "400d"},
        {"every": "soon"},
        {"cron": "@daily"},
    ],
    ids=str,
)
def test_times_that_cannot_be_meant_are_refused_before_anything_begins(registry, times):
    with pytest.raises(BadInput):
        registry.start_collector(Policy(), **times)
    assert statuses(registry.context) == []


def test_a_jitter_longer_than_the_interval_is_refused(registry):
    with pytest.raises(BadInput, match="--jitter"):
        registry.start_collector(Policy(), every="1m", jitter_s=61)
