"""`CollectorSchedule`: repeats prune and gc inside a process. `statuses`: the state of all schedules of a registry.

The next run is stored in the database before a run begins. So a process that was killed is shown as overdue, and the next
process on its host makes up for the missed run. APScheduler keeps the time; the collector's lease keeps the runs of all hosts
apart.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

from apscheduler.events import EVENT_JOB_MAX_INSTANCES
from apscheduler.executors.base import BaseExecutor, run_job
from apscheduler.schedulers.background import BackgroundScheduler

from llama_ckpt.collector.collector import Collector, not_stopped
from llama_ckpt.collector.triggers import Trigger
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import schedules as rows
from llama_ckpt.db.coordination import this_host
from llama_ckpt.db.types import stored_text
from llama_ckpt.errors import Busy, Conflict, DatabaseUnavailable, LlamaCkptError
from llama_ckpt.gc_values import CollectionSummary, ScheduleState
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import US_PER_S

log = logging.getLogger("llama_ckpt")

BUSY = "another run was under way"
_HOLDER_CHARS = 120
_JOB = "collector"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """The result of one run. `result` is a sentence. `summary` is None if the run failed; then `problem` is the error, or None
    for a fault of the program, which is in the log with its traceback. `next_us` is the next run by this host's clock, in
    microseconds since 1970 UTC.
    """

    result: str
    summary: CollectionSummary | None = None
    problem: LlamaCkptError | None = None
    next_us: int | None = None

    @property
    def busy(self) -> bool:
        """Whether the run did nothing because another run was under way. This is no failure."""
        return isinstance(self.problem, Busy)


OnRun = Callable[[ScheduledRun], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatus:
    """A schedule, by its row. Times are microseconds since 1970 UTC, by the database's clock."""

    holder: str
    spec: str
    started_us: int
    last_us: int | None
    last_result: str | None
    next_us: int | None
    state: ScheduleState


class CollectorSchedule:
    """Calls `Collector.collect` by a trigger, in a daemon thread, which does not keep the interpreter alive. If the process ends
    during a run, the next run finishes it.

    Each run is delayed by a random time of up to `jitter_s` seconds (None: a tenth of the interval, at most a minute). `on_run`
    is called with each result, in the schedule's thread. `name` identifies the row instead of host and store: give one if the
    host's name changes with each start, as in many containers. Use it as a context manager, or call `start` and `stop`.

    Raises:
        BadInput: the jitter is longer than the interval, or the machine's time zone is not known.
    """

    def __init__(
        self,
        context: RegistryContext,
        policy: Policy,
        trigger: Trigger,
        *,
        jitter_s: float | None = None,
        name: str | None = None,
        on_run: OnRun | None = None,
    ) -> None:
        self.holder = holder_of(context, name)
        self.spec = stored_text(trigger.spec, rows.SPEC_CHARS)
        self._context = context
        self._policy = policy
        self._trigger = trigger
        self._timer = trigger.build(trigger.jitter_s(jitter_s))
        self._on_run = on_run
        self._started_us = 0
        self._executor = _OneThread()
        self._scheduler: Any = None

    def start(self) -> None:
        """Starts the schedule and stores its next run. The first run is now if an earlier process of this host missed one, or if
        an interval schedule never ran; else when that earlier process would have run; else by the trigger.

        Raises:
            DatabaseUnavailable: the database cannot be read or written; the schedule is not started.
        """
        if self._scheduler is not None:
            return
        now = datetime.now(UTC)
        try:
            first = self._announce(now)
        except Conflict:  # another process of this host inserted the row at this moment: read it
            first = self._announce(now)
        scheduler = BackgroundScheduler(executors={"default": self._executor}, timezone=UTC)
        limits = {
            "max_instances": 1,
            "coalesce": True,
            "misfire_grace_time": None,
        }  # a missed run is made up for once, however late
        scheduler.add_job(self._run, self._timer, id=_JOB, name="llama-ckpt gc", next_run_time=first, **limits)
        scheduler.add_listener(self._store_moved_next, EVENT_JOB_MAX_INSTANCES)
        self._scheduler = scheduler
        scheduler.start()
        log.info("schedule %s: next run %s", self.spec, _shown(first))

    def stop(self, timeout_s: float | None = None) -> None:
        """Stops the schedule: no run begins any more, a run in progress ends after its current batch, and the row says "stopped".
        Waits `timeout_s` seconds at most (None: without limit); a run that takes longer ends with the process. Do not call it
        from `on_run`.
        """
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        # APScheduler would wait for the run while it holds the lock that a beginning run needs.
        scheduler.remove_all_jobs()
        self._executor.join(timeout_s)
        scheduler.shutdown(wait=False)
        self._write_row(lambda db: rows.stopped(db, self.holder, self._started_us))

    def run_forever(self, stop: threading.Event) -> None:
        """Runs until the event `stop` is set, for example by a signal handler; then stops as `stop()` does.

        Raises:
            DatabaseUnavailable: as `start`.
        """
        if stop.is_set():
            return
        with self:
            while not stop.wait(1.0):  # Windows handles no Ctrl-C in a wait without a timeout
                pass

    def __enter__(self) -> CollectorSchedule:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _announce(self, now: datetime) -> datetime:
        """Decides on the first run by the row of the earlier process, and stores it."""
        with self._context.database.write() as db:
            first = self._first(rows.get(db, self.holder), now)
            self._started_us = rows.put(db, self.holder, self.spec, (first - now).total_seconds())
        return first

    def _first(self, row: rows.ScheduleRow | None, now: datetime) -> datetime:
        if row is not None and row.next_us is not None:
            left_s = (row.next_us - row.now_us) / US_PER_S
            if left_s <= 0:
                return now
            if row.spec == self.spec:
                return now + timedelta(seconds=left_s)
        if self._trigger.every_s is not None:
            # Counted from the last run, not from this start: processes that live shorter than the interval would never collect.
            if row is None or row.last_us is None:
                return now
            ago_s = (row.now_us - row.last_us) / US_PER_S
            return now + timedelta(seconds=max(0.0, self._trigger.every_s - ago_s))
        first: datetime = self._timer.get_next_fire_time(None, now)
        return first

    def _run(self) -> None:
        """One run, in the executor's thread. It never raises, so that the schedule continues."""
        scheduler = self._scheduler
        # `get_job` waits until APScheduler has computed the next time.
        job = None if scheduler is None else scheduler.get_job(_JOB)
        if job is None:
            return  # stopped in between
        self._store_next(job.next_run_time)
        run = _collect(self._context, self._policy, job.next_run_time, lambda: self._scheduler is None)
        self._write_row(lambda db: rows.finished(db, self.holder, run.result))
        _log(run)
        if self._on_run is not None:
            self._on_run(run)

    def _store_moved_next(self, _event: object) -> None:
        """A run takes longer than the interval, so the next run has moved: stores it, lest the schedule seem overdue."""
        scheduler = self._scheduler
        job = None if scheduler is None else scheduler.get_job(_JOB)
        if job is not None:
            self._store_next(job.next_run_time)

    def _store_next(self, at: datetime) -> None:
        in_s = (at - datetime.now(UTC)).total_seconds()
        self._write_row(lambda db: rows.set_next(db, self.holder, self.spec, self._started_us, in_s))

    def _write_row(self, write: Callable[[Any], None]) -> None:
        _write_row(self._context, write)


class _OneThread(BaseExecutor):  # type: ignore[misc] # APScheduler has no types
    """Runs the job in a daemon thread. For threads of APScheduler's own pools the interpreter would wait at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None

    def _do_submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        self._thread = threading.Thread(target=self._work, args=(job, run_times), name="llama-ckpt gc", daemon=True)
        self._thread.start()

    def _work(self, job: Any, run_times: Sequence[datetime]) -> None:
        try:
            events = run_job(job, job._jobstore_alias, run_times, self._logger.name)
        except BaseException:  # noqa: BLE001 - handed on
            self._run_job_error(job.id, *sys.exc_info()[1:])
        else:
            self._run_job_success(job.id, events)

    def join(self, timeout_s: float | None) -> None:
        """Waits for the run in progress, `timeout_s` seconds at most."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def run_once(context: RegistryContext, policy: Policy, *, name: str | None = None) -> ScheduledRun:
    """One run now, for a timer of the system. Its result is stored in a row of its own, beside that of a schedule.

    A failure is in the result, not raised. Only a fault of the program is logged.
    """
    run = _collect(context, policy, None, not_stopped)
    holder = holder_of(context, name, "timer of ")

    def write(db: Any) -> None:
        rows.put(db, holder, rows.ONCE, None)
        rows.finished(db, holder, run.result)

    _write_row(context, write)
    return run


def statuses(context: RegistryContext) -> list[ScheduleStatus]:
    """All schedules that ran over this registry in the last 30 days, on any host.

    Raises:
        DatabaseUnavailable: the database cannot be read.
    """
    return [
        ScheduleStatus(
            holder=row.holder,
            spec=row.spec,
            started_us=row.started_us,
            last_us=row.last_us,
            last_result=row.last_result,
            next_us=row.next_us,
            state=row.state,
        )
        for row in context.database.query(rows.schedules)
    ]


def holder_of(context: RegistryContext, name: str | None = None, prefix: str = "") -> str:
    """The key of a schedule's row, the same after a restart: its name, else host and store. A key of over 120 characters is
    truncated and ends with a hash of the complete one.
    """
    holder = stored_text(prefix + (name or f"{this_host()}:{context.store.root}"), 10_000)
    if len(holder) <= _HOLDER_CHARS:
        return holder
    digest = hashlib.sha256(holder.encode()).hexdigest()[:12]
    return f"{holder[: _HOLDER_CHARS - 13]}~{digest}"


def random_delay_s(jitter_s: float) -> float:
    """A random time of up to `jitter_s` seconds."""
    return random.uniform(0, jitter_s)  # noqa: S311 - no secret


def _collect(
    context: RegistryContext, policy: Policy, next_at: datetime | None, stopped: Callable[[], bool]
) -> ScheduledRun:
    next_us = None if next_at is None else round(next_at.timestamp() * US_PER_S)
    try:
        summary = Collector(context).collect(policy, stopped)
    except Busy as busy:
        return ScheduledRun(result=f"{BUSY}: {busy}", problem=busy, next_us=next_us)
    except LlamaCkptError as error:
        return ScheduledRun(result=f"failed: {error}", problem=error, next_us=next_us)
    except Exception as error:
        # One fault of the program must not end a schedule that runs for months.
        log.exception("a scheduled run failed by a fault of the program")
        return ScheduledRun(result=f"failed: internal error: {type(error).__name__}: {error}", next_us=next_us)
    result = f"{summary.n_marked} marked STALE, {summary.n_items} collected, {summary.freed_bytes} bytes freed"
    if summary.n_failed:
        result += f", {summary.n_failed} could not be deleted"
    return ScheduledRun(result=result, summary=summary, next_us=next_us)


def _log(run: ScheduledRun) -> None:
    then = "" if run.next_us is None else f"; next run {_shown(datetime.fromtimestamp(run.next_us / US_PER_S, UTC))}"
    failed = not run.busy and (run.summary is None or run.summary.n_failed)
    result = stored_text(run.result, 10_000)  # a path may contain characters that a log cannot encode
    log.log(logging.WARNING if failed else logging.INFO, "collector: %s%s", result, then)


def _write_row(context: RegistryContext, write: Callable[[Any], None]) -> None:
    """Writes to the schedule's row. A failure of the database is logged: it does not end the schedule."""
    try:
        with context.database.write() as db:
            write(db)
    except (DatabaseUnavailable, Conflict) as error:
        log.warning("the schedule's row was not written: %s", error)


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
