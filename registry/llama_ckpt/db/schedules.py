"""The rows of the schedules, by the database's clock: due times are said in seconds from now. Nothing here commits."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from llama_ckpt.db.tables import gc_schedule
from llama_ckpt.db.types import now_us, stored_text

_S = 1_000_000
_KEPT_US = 30 * 86_400 * _S
SPEC_CHARS = 200
_RESULT_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """One row, and the database's time when it was read (`now_us`). Times are microseconds since 1970 UTC."""

    holder: str
    spec: str
    started_us: int
    next_us: int | None
    last_us: int | None
    last_result: str | None
    now_us: int


def get(db: sa.Connection, holder: str) -> ScheduleRow | None:
    """A holder's row."""
    found = db.execute(_rows().where(gc_schedule.c.holder == holder)).one_or_none()
    return None if found is None else ScheduleRow(**dict(found._mapping))


def schedules(db: sa.Connection) -> list[ScheduleRow]:
    """All rows, in order of their holders."""
    return [ScheduleRow(**dict(row._mapping)) for row in db.execute(_rows().order_by(gc_schedule.c.holder))]


def put(db: sa.Connection, holder: str, spec: str, next_in_s: float | None) -> int:
    """Says that a process begins a schedule, and when it runs next; what the last run came to stays. Gives the time at which
    it began: with it the process names its own row. Rows without a sign of life for 30 days go.

    Raises:
        sqlalchemy IntegrityError: another process of this host began it at this moment.
    """
    sign = sa.func.coalesce(gc_schedule.c.next_us, gc_schedule.c.last_us, gc_schedule.c.started_us)
    db.execute(sa.delete(gc_schedule).where(gc_schedule.c.holder != holder, sign < now_us() - _KEPT_US))
    mine = gc_schedule.c.holder == holder
    values = {"spec": stored_text(spec, SPEC_CHARS), "started_us": now_us(), "next_us": _in(next_in_s)}
    if db.execute(sa.update(gc_schedule).where(mine).values(**values)).rowcount == 0:
        db.execute(sa.insert(gc_schedule).values(holder=holder, **values))
    return int(db.execute(sa.select(gc_schedule.c.started_us).where(mine)).scalar_one())


def set_next(db: sa.Connection, holder: str, spec: str, started_us: int, next_in_s: float) -> None:
    """Says when a process runs next. If several processes of a host share the row, it is now this one's."""
    values = {"spec": stored_text(spec, SPEC_CHARS), "started_us": started_us, "next_us": _in(next_in_s)}
    if db.execute(sa.update(gc_schedule).where(gc_schedule.c.holder == holder).values(**values)).rowcount == 0:
        db.execute(sa.insert(gc_schedule).values(holder=holder, **values))  # someone took the row away meanwhile


def finished(db: sa.Connection, holder: str, result: str) -> None:
    """Says what a run came to, and that it ended now."""
    values = {"last_us": now_us(), "last_result": stored_text(result, _RESULT_CHARS)}
    db.execute(sa.update(gc_schedule).where(gc_schedule.c.holder == holder).values(**values))


def stopped(db: sa.Connection, holder: str, started_us: int) -> None:
    """Says that nothing runs next, unless another process of the host has taken the row over."""
    own = [gc_schedule.c.holder == holder, gc_schedule.c.started_us == started_us]
    db.execute(sa.update(gc_schedule).where(*own).values(next_us=None))


def _rows() -> sa.Select[tuple[object, ...]]:
    return sa.select(gc_schedule, now_us().label("now_us"))


def _in(seconds: float | None) -> sa.ColumnElement[int] | None:
    return None if seconds is None else now_us() + round(seconds * _S)
