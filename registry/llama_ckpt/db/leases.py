"""The lease of a row while a process reads its file, and the hit that is counted after it. Nothing here commits."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE, clock_us
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import now_us
from llama_ckpt.values import US_PER_S, Checkpoint

LEASE_S = 60.0


def lease(db: sa.Connection, row: Checkpoint, seconds: float = LEASE_S) -> int | None:
    """Leases an ACTIVE row for reading. Gives the expiry by the database's clock, in microseconds; None when the row is not
    ACTIVE any more.

    A row has one expiry for all its readers, the latest. It protects a reader between match and open. A reader that has the
    file open can read it to the end after a delete; a reader that opens it too late gets a miss.
    """
    # The expiry identifies the lease, and SQLite's clock counts milliseconds: a random part tells readers apart.
    until = clock_us(db) + int(seconds * US_PER_S) + secrets.randbelow(1000)
    changed = db.execute(_LEASE, {"of_row": row.ckpt_no, "until_us": until})
    return until if changed.rowcount == 1 else None


def release(db: sa.Connection, row: Checkpoint, until: int, *, hit: bool = False) -> None:
    """Gives a lease back, unless a later reader has extended it. With `hit` it also counts one restore, which read and verified
    every byte of the file.
    """
    db.execute(_RELEASE_AND_COUNT if hit else _RELEASE, {"of_row": row.ckpt_no, "until_us": until})


# Every restore runs these. Built once: building a statement takes longer than SQLite takes to run it.
_OF_ROW = meta.c.ckpt_no == sa.bindparam("of_row", type_=sa.BigInteger)
_UNTIL = sa.bindparam("until_us", type_=sa.BigInteger)
_LEASE = (
    sa.update(meta)
    .where(_OF_ROW, meta.c.status == ACTIVE)
    .values(
        lease_until_us=sa.case(
            (sa.func.coalesce(meta.c.lease_until_us, 0) > _UNTIL, meta.c.lease_until_us), else_=_UNTIL
        )
    )
)
_OURS = meta.c.lease_until_us == _UNTIL
_RELEASE = sa.update(meta).where(_OF_ROW, _OURS).values(lease_until_us=None)
_RELEASE_AND_COUNT = (
    sa.update(meta)
    .where(_OF_ROW)
    .values(
        lease_until_us=sa.case((_OURS, sa.null()), else_=meta.c.lease_until_us),
        hit_count=meta.c.hit_count + 1,
        last_used_us=now_us(),
        verified_us=now_us(),
    )
)
