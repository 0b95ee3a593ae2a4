"""How the registry is used: totals of the rows, and `usage_day`, the counts of rare events per day over all processes.
Nothing here commits.

All writers of a day share one row of `usage_day` per event, so only rare events are counted here; hits are not.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE, STALE, clock_us
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import usage_day
from llama_ckpt.values import ModelStats, Stats

_DAY_US = 86_400_000_000


def count(db: sa.Connection, event_names: Iterable[str]) -> None:
    """Adds one to each event's count of today. The day is that of the database's clock in UTC.

    Raises:
        sqlalchemy IntegrityError: another process inserted an event's row of today at this moment; try again in a new
            transaction.
    """
    names = sorted(event_names)  # one order for all writers: no deadlocks
    day_no = clock_us(db) // _DAY_US if names else 0
    for name in names:
        today = [usage_day.c.day_no == day_no, usage_day.c.event_name == name]
        if db.execute(sa.update(usage_day).where(*today).values(n_times=usage_day.c.n_times + 1)).rowcount == 0:
            db.execute(sa.insert(usage_day).values(day_no=day_no, event_name=name, n_times=1))


def totals(db: sa.Connection) -> dict[str, int]:
    """The count of each event since the registry was created; without events that never occurred."""
    total = sa.func.sum(usage_day.c.n_times).label("n_times")
    query = sa.select(usage_day.c.event_name, total).group_by(usage_day.c.event_name).order_by(usage_day.c.event_name)
    return {str(row.event_name): int(row.n_times) for row in db.execute(query)}


def stats(db: sa.Connection) -> Stats:
    """Totals, counted from the rows, and the counts of rare events."""
    per_model = sa.select(
        meta.c.model_name,
        meta.c.fingerprint,
        meta.c.status,
        sa.func.count().label("n"),
        sa.func.sum(meta.c.file_size).label("n_bytes"),
        sa.func.sum(meta.c.n_tokens).label("n_tokens"),
        sa.func.sum(meta.c.hit_count).label("hits"),
        sa.func.sum(meta.c.hit_count * sa.func.coalesce(meta.c.prefill_ms, 0)).label("spared"),
    ).group_by(meta.c.model_name, meta.c.fingerprint, meta.c.status)
    rows = db.execute(per_model.order_by(meta.c.model_name)).all()
    active, stale = [r for r in rows if r.status == ACTIVE], [r for r in rows if r.status == STALE]
    return Stats(
        n_active=sum(int(r.n) for r in active),
        n_stale=sum(int(r.n) for r in stale),
        active_bytes=sum(int(r.n_bytes) for r in active),
        stale_bytes=sum(int(r.n_bytes) for r in stale),
        n_tokens=sum(int(r.n_tokens) for r in active),
        hit_count=sum(int(r.hits) for r in rows),
        spared_ms=sum(int(r.spared) for r in rows),
        models=tuple(
            ModelStats(
                model_name=r.model_name,
                fingerprint=r.fingerprint,
                n_active=int(r.n),
                active_bytes=int(r.n_bytes),
                n_tokens=int(r.n_tokens),
                hit_count=int(r.hits),
            )
            for r in active
        ),
        events=totals(db),
    )
