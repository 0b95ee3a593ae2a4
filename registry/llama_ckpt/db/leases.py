"""Who reads a checkpoint's file: the lease of its row meanwhile, and the hit that it counts as. Nothing here commits."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from llama_ckpt.db.rows import ACTIVE, clock_us
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import now_us
from llama_ckpt.values import Checkpoint

LEASE_S = 60.0


def lease(db: sa.Connection, row: Checkpoint, seconds: float = LEASE_S) -> int | None:
    """Claims an ACTIVE row for reading and gives the expiry by the database's clock; None when it is ACTIVE no more.

    A row has one expiry for all its readers, the latest. It shields a reader between match and open; who has the file
    open loses nothing by a delete, and whoever opens too late gets a miss.
    """
    # Readers tell their leases apart by the expiry, and SQLite's clock counts milliseconds.
    until = clock_us(db) + int(seconds * 1_000_000) + secrets.randbelow(1000)
    changed = db.execute(_LEASE, {"of_row": row.ckpt_no, "until_us": until})
    return until if changed.rowcount == 1 else None


def release(db: sa.Connection, row: Checkpoint, until: int, *, hit: bool = False) -> None:
    """Gives a lease back, unless a later reader has put the expiry off. With `hit` it counts one restore, too, which has read and
    checked every byte of the file.
    """
    db.execute(_RELEASE_AND_COUNT if hit else _RELEASE, {"of_row": row.ckpt_no, "until_us": until})


# What every restore writes: putting a statement together takes longer than SQLite takes to carry it out.
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
