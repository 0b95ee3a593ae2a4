"""What processes and hosts agree on: leases, claims, and the record of runs. By the database's clock; nothing here commits."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from llama_ckpt.db.tables import gc_run, gc_run_item, registry_lease, save_claim
from llama_ckpt.db.types import now_us, stored_text
from llama_ckpt.gc_values import GcItem, GcRun

_KEPT_US = 90 * 86_400 * 1_000_000
_FORGOTTEN_US = 3_600 * 1_000_000


def take_lease(db: sa.Connection, name: str, holder: str, seconds: float) -> int | None:
    """Takes or renews a named lease and gives its fence, a number that grows with every change of hands; None: held."""
    mine = sa.or_(
        registry_lease.c.holder == holder,
        registry_lease.c.holder.is_(None),
        registry_lease.c.expires_us < now_us(),
    )
    changed = db.execute(
        sa.update(registry_lease)
        .where(registry_lease.c.name == name, mine)
        .values(holder=holder, fence=registry_lease.c.fence + 1, expires_us=now_us() + int(seconds * 1_000_000))
    )
    if changed.rowcount != 1:
        return None
    return int(db.execute(sa.select(registry_lease.c.fence).where(registry_lease.c.name == name)).scalar_one())


def renew_lease(db: sa.Connection, name: str, fence: int, seconds: float) -> bool:
    """Puts off the expiry of a lease that is still ours; False when someone took it."""
    held = [registry_lease.c.name == name, registry_lease.c.fence == fence]
    until = now_us() + int(seconds * 1_000_000)
    return db.execute(sa.update(registry_lease).where(*held).values(expires_us=until)).rowcount == 1


def drop_lease(db: sa.Connection, name: str, fence: int) -> None:
    """Gives a lease back, if it is still ours."""
    held = [registry_lease.c.name == name, registry_lease.c.fence == fence]
    db.execute(sa.update(registry_lease).where(*held).values(holder=None, expires_us=0))


def lease_holder(db: sa.Connection, name: str) -> tuple[str, int]:
    """Who holds a lease, and for how many seconds yet."""
    left = (registry_lease.c.expires_us - now_us()).label("left_us")
    row = db.execute(sa.select(registry_lease.c.holder, left).where(registry_lease.c.name == name)).one()
    return str(row.holder), max(0, int(row.left_us) // 1_000_000 + 1)


def start_run(db: sa.Connection, kind: str, host: str) -> int:
    """Opens a run's record and gives its number; records older than 90 days go, with their items."""
    db.execute(sa.delete(gc_run).where(gc_run.c.started_us < now_us() - _KEPT_US))
    made = db.execute(
        sa.insert(gc_run).values(kind=kind, host=host, started_us=now_us(), n_items=0, n_failed=0, freed_bytes=0)
    )
    assert made.inserted_primary_key is not None  # noqa: S101 - narrows the type
    return int(made.inserted_primary_key[0])


def add_run_items(db: sa.Connection, run_no: int, first: int, done: Sequence[tuple[GcItem, str]]) -> None:
    """Records what was done with each item."""
    rows = [
        {
            "run_no": run_no,
            "item_no": first + i,
            "kind": item.kind.value,
            "file_path": stored_text(item.path, 400),
            "reason": stored_text(item.reason, 400),
            "result": stored_text(result, 400),
            "size_bytes": item.size_bytes,
        }
        for i, (item, result) in enumerate(done)
    ]
    if rows:
        db.execute(sa.insert(gc_run_item), rows)


def end_run(db: sa.Connection, run_no: int, *, n_items: int, n_failed: int, freed_bytes: int) -> None:
    """Closes a run's record."""
    values = {"ended_us": now_us(), "n_items": n_items, "n_failed": n_failed, "freed_bytes": freed_bytes}
    db.execute(sa.update(gc_run).where(gc_run.c.run_no == run_no).values(**values))


def runs(db: sa.Connection, at_most: int) -> list[GcRun]:
    """The last runs, newest first."""
    rows = db.execute(sa.select(gc_run).order_by(gc_run.c.run_no.desc()).limit(at_most))
    return [GcRun(**dict(row._mapping)) for row in rows]


# -- claims: who computes what ---------------------------------------------------------------------------------------


def take_claim(db: sa.Connection, key: bytes, holder: str, reserved_bytes: int, seconds: float) -> bool:
    """Claims a key, or renews a claim of one's own; False when another has it. A key stands for what is computed
    (`fingerprint.flight_key`), or for room that is reserved.

    Raises:
        sqlalchemy IntegrityError: another claimed it at this moment.
    """
    until = now_us() + int(seconds * 1_000_000)
    values = {"holder": holder, "reserved_bytes": reserved_bytes, "expires_us": until}
    free = sa.or_(save_claim.c.holder == holder, save_claim.c.expires_us < now_us())
    taken = db.execute(sa.update(save_claim).where(save_claim.c.claim_key == key, free).values(**values))
    if taken.rowcount == 1:
        return True
    if db.execute(sa.select(save_claim.c.holder).where(save_claim.c.claim_key == key)).first() is not None:
        return False
    db.execute(sa.insert(save_claim).values(claim_key=key, **values))
    return True


def drop_claim(db: sa.Connection, key: bytes, holder: str) -> None:
    """Gives a claim back, if it is still ours."""
    db.execute(sa.delete(save_claim).where(save_claim.c.claim_key == key, save_claim.c.holder == holder))


def claim_of(db: sa.Connection, key: bytes) -> tuple[str, float] | None:
    """Who claims a key, and for how many seconds yet: none or fewer when the claim has expired. None where nobody does."""
    left = (save_claim.c.expires_us - now_us()).label("left_us")
    row = db.execute(sa.select(save_claim.c.holder, left).where(save_claim.c.claim_key == key)).first()
    return None if row is None else (str(row.holder), int(row.left_us) / 1_000_000)


def forget_claims(db: sa.Connection) -> None:
    """Deletes what killed holders left: claims that expired over an hour ago. Not the row that savers queue at."""
    old = save_claim.c.expires_us < now_us() - _FORGOTTEN_US
    db.execute(sa.delete(save_claim).where(old, save_claim.c.holder != "budget"))


def claimed_bytes(db: sa.Connection) -> int:
    """Bytes that claims reserve which have not expired."""
    total = sa.func.coalesce(sa.func.sum(save_claim.c.reserved_bytes), 0)
    return int(db.execute(sa.select(total).where(save_claim.c.expires_us >= now_us())).scalar_one())
