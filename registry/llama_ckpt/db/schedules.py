"""The rows of the schedules, and what they say of the schedules' processes. Due times are given in seconds from now.

Nothing here commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from llama_ckpt.db.tables import gc_schedule
from llama_ckpt.db.types import now_us, stored_text
from llama_ckpt.gc_values import ScheduleState
from llama_ckpt.values import US_PER_S

ONCE = "once, by another timer"  # the spec of runs that a timer of the system starts: their next run is not known
SPEC_CHARS = 200
_RESULT_CHARS = 400
_KEPT_US = 30 * 86_400 * US_PER_S
# A schedule stores its next run before it begins one, and again when a run takes longer than the interval. So a live process is
# late by no more than that write takes, which waits 30 s for the lock of another writer and 10 s for a connection. A run itself
# may take hours: it does not make the schedule late.
_OVERDUE_US = 60 * US_PER_S
_TIMER_ALIVE_US = 2 * 86_400 * US_PER_S  # for a daily timer that missed one run


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """A row, and the database's time when it was read (`now_us`). Times are microseconds since 1970 UTC."""

    holder: str
    spec: str
    started_us: int
    next_us: int | None
    last_us: int | None
    last_result: str | None
    now_us: int

    @property
    def state(self) -> ScheduleState:
        """The state of the schedule's process when the row was read."""
        if self.next_us is None:
            return ScheduleState.ONCE if self.spec == ONCE else ScheduleState.STOPPED
        return ScheduleState.OVERDUE if self.now_us > self.next_us + _OVERDUE_US else ScheduleState.WAITING

    @property
    def is_alive(self) -> bool:
        """Whether the schedule will run again. A timer of the system is taken to be alive for two days after its last run."""
        if self.state is ScheduleState.ONCE:
            return self.last_us is not None and self.now_us - self.last_us < _TIMER_ALIVE_US
        return self.state is ScheduleState.WAITING


def get(db: sa.Connection, holder: str) -> ScheduleRow | None:
    """A holder's row."""
    row = db.execute(_rows().where(gc_schedule.c.holder == holder)).one_or_none()
    return None if row is None else ScheduleRow(**dict(row._mapping))


def schedules(db: sa.Connection) -> list[ScheduleRow]:
    """All rows, in order of their holders."""
    return [ScheduleRow(**dict(row._mapping)) for row in db.execute(_rows().order_by(gc_schedule.c.holder))]


def put(db: sa.Connection, holder: str, spec: str, next_in_s: float | None) -> int:
    """Writes that a process starts a schedule, and when it runs next (None: not known). Keeps the result of the last run. Gives
    the time of the start, by which the process recognises its row later. Deletes rows that no process wrote for 30 days.

    Raises:
        sqlalchemy IntegrityError: another process of this host started the schedule at this moment.
    """
    last_sign_us = sa.func.coalesce(gc_schedule.c.next_us, gc_schedule.c.last_us, gc_schedule.c.started_us)
    db.execute(sa.delete(gc_schedule).where(gc_schedule.c.holder != holder, last_sign_us < now_us() - _KEPT_US))
    own = gc_schedule.c.holder == holder
    values = {"spec": stored_text(spec, SPEC_CHARS), "started_us": now_us(), "next_us": _in(next_in_s)}
    if db.execute(sa.update(gc_schedule).where(own).values(**values)).rowcount == 0:
        db.execute(sa.insert(gc_schedule).values(holder=holder, **values))
    return int(db.execute(sa.select(gc_schedule.c.started_us).where(own)).scalar_one())


def set_next(db: sa.Connection, holder: str, spec: str, started_us: int, next_in_s: float) -> None:
    """Writes when a process runs next. If several processes of a host share the row, it belongs to this one from now on."""
    values = {"spec": stored_text(spec, SPEC_CHARS), "started_us": started_us, "next_us": _in(next_in_s)}
    if db.execute(sa.update(gc_schedule).where(gc_schedule.c.holder == holder).values(**values)).rowcount == 0:
        db.execute(sa.insert(gc_schedule).values(holder=holder, **values))  # the row was deleted in between


def finished(db: sa.Connection, holder: str, result: str) -> None:
    """Writes the result of a run that ended now."""
    values = {"last_us": now_us(), "last_result": stored_text(result, _RESULT_CHARS)}
    db.execute(sa.update(gc_schedule).where(gc_schedule.c.holder == holder).values(**values))


def stopped(db: sa.Connection, holder: str, started_us: int) -> None:
    """Writes that no run follows, unless another process of the host has taken the row over."""
    own = [gc_schedule.c.holder == holder, gc_schedule.c.started_us == started_us]
    db.execute(sa.update(gc_schedule).where(*own).values(next_us=None))


def _rows() -> sa.Select[tuple[object, ...]]:
    return sa.select(gc_schedule, now_us().label("now_us"))


def _in(seconds: float | None) -> sa.ColumnElement[int] | None:
    return None if seconds is None else now_us() + round(seconds * US_PER_S)
