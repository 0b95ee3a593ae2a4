"""`usage_day`: how often rare events were met, per day, over all processes. Nothing here commits.

A row is one for all writers of a day, so only what is rare is counted here: a hit is not.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from llama_ckpt.db.tables import usage_day
from llama_ckpt.db.types import now_us

_DAY_US = 86_400_000_000


def count(db: sa.Connection, event_names: Iterable[str]) -> None:
    """Adds one to each event's count of today, the day by the database's clock in UTC.

    Raises:
        sqlalchemy IntegrityError: another process counted the first of an event's day at this moment; in a new transaction it
            goes well.
    """
    names = sorted(event_names)  # one order for all writers: no deadlocks
    day_no = int(db.execute(sa.select(now_us())).scalar_one()) // _DAY_US if names else 0
    for name in names:
        today = [usage_day.c.day_no == day_no, usage_day.c.event_name == name]
        if db.execute(sa.update(usage_day).where(*today).values(n_times=usage_day.c.n_times + 1)).rowcount == 0:
            db.execute(sa.insert(usage_day).values(day_no=day_no, event_name=name, n_times=1))


def totals(db: sa.Connection) -> dict[str, int]:
    """How often each event was met since the registry was made; without those that never were."""
    total = sa.func.sum(usage_day.c.n_times).label("n_times")
    query = sa.select(usage_day.c.event_name, total).group_by(usage_day.c.event_name).order_by(usage_day.c.event_name)
    return {str(row.event_name): int(row.n_times) for row in db.execute(query)}
