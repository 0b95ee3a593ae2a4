"""`CollectorSchedule`: prune and gc again and again inside a process, and what all schedules of a registry are at.

The next run is in the database before a run begins. So a process that was killed shows as overdue, and the next one on its
host makes up for what was missed. APScheduler keeps the time; the collector's lease keeps runs of all hosts apart.
"""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import Any

from apscheduler.events import EVENT_JOB_MAX_INSTANCES
from apscheduler.executors.base import BaseExecutor, run_job
from apscheduler.schedulers.background import BackgroundScheduler

from llama_ckpt.collector.collector import Collector, never
from llama_ckpt.collector.triggers import Trigger
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import schedules as rows
from llama_ckpt.db.types import stored_text
from llama_ckpt.errors import Busy, Conflict, DatabaseUnavailable, LlamaCkptError
from llama_ckpt.gc_values import CollectionSummary
from llama_ckpt.retention.policy import Policy

log = logging.getLogger("llama_ckpt")

ONCE = "once, by another timer"
BUSY = "another run was under way"
_HOLDER_CHARS = 120
_JOB = "collector"
_OVERDUE_S = 60.0  # a process that is only slow is not gone
_S = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """What one run came to. `sweep` is None where it failed (`problem` says why; None for a fault of the program, which is in
    the log with its traceback). `next_us` is the next run by this host's clock, in microseconds since 1970 UTC.
    """

    result: str
    sweep: CollectionSummary | None = None
    problem: LlamaCkptError | None = None
    next_us: int | None = None

    @property
    def busy(self) -> bool:
        """Whether nothing was done since another run was under way, which is no failure."""
        return isinstance(self.problem, Busy)


OnRun = Callable[[ScheduledRun], None]


class ScheduleState(StrEnum):
    """What a schedule's row says of its process."""

    WAITING = "waiting"
    OVERDUE = "overdue: the process seems gone"
    STOPPED = "stopped"
    ONCE = "by another timer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatus:
    """A schedule as its row shows it. Times are microseconds since 1970 UTC, by the database's clock."""

    holder: str
    spec: str
    started_us: int
    last_us: int | None
    last_result: str | None
    next_us: int | None
    standing: ScheduleState


class CollectorSchedule:
    """Runs `Collector.sweep` by a trigger, in a daemon thread: it does not keep the interpreter alive. A run that is cut off
    by the end of the process is finished by the next one, as any run of prune and gc.

    A run is delayed by up to `jitter_s` seconds at random (None: a tenth of the interval, at most a minute). `on_run` hears
    what each run came to, in the schedule's thread. `name` stands in its row instead of host and store: where a host's name
    changes with each start, as in many containers. Use it as a context manager, or call `start` and `stop`.

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
        """Begins the schedule, and says so in the database. The first run is at once where an earlier process of this host
        missed one, or where none ever was (of an interval); else when that process would have run; else by the trigger.

        Raises:
            DatabaseUnavailable: the database cannot be read or written; nothing was begun.
        """
        if self._scheduler is not None:
            return
        now = datetime.now(UTC)
        try:
            first = self._announce(now)
        except Conflict:  # another process of this host made the same row at this moment: now it is there
            first = self._announce(now)
        scheduler = BackgroundScheduler(executors={"default": self._executor}, timezone=UTC)
        limits = {"max_instances": 1, "coalesce": True, "misfire_grace_time": None}  # late, however late, but once
        scheduler.add_job(self._run, self._timer, id=_JOB, name="llama-ckpt gc", next_run_time=first, **limits)
        scheduler.add_listener(self._put_off, EVENT_JOB_MAX_INSTANCES)
        self._scheduler = scheduler
        scheduler.start()
        log.info("schedule %s: next run %s", self.spec, _shown(first))

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the schedule: no run begins any more, the one in progress ends after the batch at hand, the row says "stopped".
        After `timeout_s` seconds a run is left to itself; it ends with the process. Not to be called from `on_run`.
        """
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        # APScheduler would wait for a run with its own lock held, which a run that just begins needs.
        scheduler.remove_all_jobs()
        self._executor.join(timeout_s)
        scheduler.shutdown(wait=False)
        self._keep(lambda db: rows.stopped(db, self.holder, self._started_us))

    def run_forever(self, stop: threading.Event) -> None:
        """Runs until `stop` is set, as a signal handler may do; then as `stop`.

        Raises:
            DatabaseUnavailable: as `start`.
        """
        if stop.is_set():
            return
        with self:
            while not stop.wait(1.0):  # Windows hears no Ctrl-C in a wait without end
                pass

    def __enter__(self) -> CollectorSchedule:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _announce(self, now: datetime) -> datetime:
        """Decides on the first run by what the row says, and stores it."""
        with self._context.database.write() as db:
            first = self._first(rows.get(db, self.holder), now)
            self._started_us = rows.put(db, self.holder, self.spec, (first - now).total_seconds())
        return first

    def _first(self, row: rows.ScheduleRow | None, now: datetime) -> datetime:
        if row is not None and row.next_us is not None:
            left_s = (row.next_us - row.now_us) / _S
            if left_s <= 0:
                return now
            if row.spec == self.spec:
                return now + timedelta(seconds=left_s)
        if self._trigger.every_s is not None:
            # By the last run and not by this start: processes that live shorter than the interval would never collect.
            ago_s = self._trigger.every_s if row is None or row.last_us is None else (row.now_us - row.last_us) / _S
            return now + timedelta(seconds=max(0.0, self._trigger.every_s - ago_s))
        first: datetime = self._timer.get_next_fire_time(None, now)
        return first

    def _run(self) -> None:
        """One run, in the executor's thread. It never raises: the schedule goes on."""
        scheduler = self._scheduler
        job = (
            None if scheduler is None else scheduler.get_job(_JOB)
        )  # waits until APScheduler has reckoned the next time
        if job is None:
            return  # stopped meanwhile
        self._store_next(job.next_run_time)
        run = _collect(self._context, self._policy, job.next_run_time, lambda: self._scheduler is None)
        self._keep(lambda db: rows.finished(db, self.holder, run.result))
        _tell(run)
        if self._on_run is not None:
            self._on_run(run)

    def _put_off(self, _event: object) -> None:
        """A run takes longer than the interval: the next time has moved, and the process is not gone."""
        scheduler = self._scheduler
        job = None if scheduler is None else scheduler.get_job(_JOB)
        if job is not None:
            self._store_next(job.next_run_time)

    def _store_next(self, at: datetime) -> None:
        in_s = (at - datetime.now(UTC)).total_seconds()
        self._keep(lambda db: rows.set_next(db, self.holder, self.spec, self._started_us, in_s))

    def _keep(self, write: Callable[[Any], None]) -> None:
        _keep(self._context, write)


class _OneThread(BaseExecutor):  # type: ignore[misc] # APScheduler has no types
    """Runs the job in a daemon thread. Python waits for the threads of APScheduler's own pools when the interpreter ends."""

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
        """Waits for the run in progress."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def run_once(context: RegistryContext, policy: Policy, *, name: str | None = None) -> ScheduledRun:
    """One run now, for a timer of the system; its result is kept in a row of its own, beside that of a schedule.

    A failure is in the answer, not raised, and nothing of it is logged but a fault of the program.
    """
    run = _collect(context, policy, None, never)
    holder = holder_of(context, name, "timer of ")

    def write(db: Any) -> None:
        rows.put(db, holder, ONCE, None)
        rows.finished(db, holder, run.result)

    _keep(context, write)
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
            standing=_standing(row),
        )
        for row in context.database.query(rows.schedules)
    ]


def _standing(row: rows.ScheduleRow) -> ScheduleState:
    if row.next_us is None:
        return ScheduleState.ONCE if row.spec == ONCE else ScheduleState.STOPPED
    return ScheduleState.OVERDUE if row.now_us > row.next_us + _OVERDUE_S * _S else ScheduleState.WAITING


def holder_of(context: RegistryContext, name: str | None = None, prefix: str = "") -> str:
    """What a schedule's row is found by after a restart: its name, else host and store. A long one is cut, with a hash of the
    whole.
    """
    whole = stored_text(prefix + (name or f"{socket.gethostname()[:60]}:{context.store.root}"), 10_000)
    if len(whole) <= _HOLDER_CHARS:
        return whole
    mark = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{whole[: _HOLDER_CHARS - 13]}~{mark}"


def random_delay_s(jitter_s: float) -> float:
    """A random time up to `jitter_s` seconds."""
    return random.uniform(0, jitter_s)  # noqa: S311 - no secret


def _collect(
    context: RegistryContext, policy: Policy, next_at: datetime | None, stopped: Callable[[], bool]
) -> ScheduledRun:
    next_us = None if next_at is None else round(next_at.timestamp() * _S)
    try:
        sweep = Collector(context).sweep(policy, stopped)
    except Busy as busy:
        return ScheduledRun(result=f"{BUSY}: {busy}", problem=busy, next_us=next_us)
    except LlamaCkptError as error:
        return ScheduledRun(result=f"failed: {error}", problem=error, next_us=next_us)
    except Exception as error:
        # One fault must not end a schedule that is to run for months.
        log.exception("a scheduled run failed by a fault of the program")
        return ScheduledRun(result=f"failed: internal error: {type(error).__name__}: {error}", next_us=next_us)
    result = f"{sweep.n_marked} marked STALE, {sweep.n_items} collected, {sweep.freed_bytes} bytes freed"
    if sweep.n_failed:
        result += f", {sweep.n_failed} could not be deleted"
    return ScheduledRun(result=result, sweep=sweep, next_us=next_us)


def _tell(run: ScheduledRun) -> None:
    then = "" if run.next_us is None else f"; next run {_shown(datetime.fromtimestamp(run.next_us / _S, UTC))}"
    failed = not run.busy and (run.sweep is None or run.sweep.n_failed)
    told = stored_text(run.result, 10_000)  # a path may be no text that a log can take
    log.log(logging.WARNING if failed else logging.INFO, "collector: %s%s", told, then)


def _keep(context: RegistryContext, write: Callable[[Any], None]) -> None:
    """Writes to the schedule's row, if the database answers: a schedule outlives its failures."""
    try:
        with context.database.write() as db:
            write(db)
    except (DatabaseUnavailable, Conflict) as error:
        log.warning("the schedule's row was not written: %s", error)


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
