"""What processes and hosts agree on: leases, claims, and the records of runs. Times are by the database's clock.

Nothing here commits.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

import sqlalchemy as sa

from llama_ckpt.db.tables import gc_run, gc_run_item, registry_lease, save_claim
from llama_ckpt.db.types import now_us, stored_text
from llama_ckpt.gc_values import GcResult, GcRun
from llama_ckpt.values import US_PER_S

_RUNS_KEPT_US = 90 * 86_400 * US_PER_S
_CLAIMS_KEPT_US = 3_600 * US_PER_S
_UNLINK_CLAIM_S = 600.0  # by then the files are unlinked, or the process is gone
_HOST_CHARS = 60  # a holder's column takes 120


def this_host() -> str:
    """The name of this host, at most 60 characters."""
    return socket.gethostname()[:_HOST_CHARS]


def holder(purpose: str) -> str:
    """The text that names a claim's holder, such as "save on host1"."""
    return f"{purpose} on {this_host()}"


# -- leases: one run at a time -------------------------------------------------------------------------------------------


def take_lease(db: sa.Connection, name: str, holder: str, seconds: float) -> int | None:
    """Takes a named lease, or renews one's own, and gives its fence: a number that grows each time the lease changes hands.
    None: another holder has it.
    """
    free = sa.or_(
        registry_lease.c.holder == holder,
        registry_lease.c.holder.is_(None),
        registry_lease.c.expires_us < now_us(),
    )
    changed = db.execute(
        sa.update(registry_lease)
        .where(registry_lease.c.name == name, free)
        .values(holder=holder, fence=registry_lease.c.fence + 1, expires_us=now_us() + int(seconds * US_PER_S))
    )
    if changed.rowcount != 1:
        return None
    return int(db.execute(sa.select(registry_lease.c.fence).where(registry_lease.c.name == name)).scalar_one())


def renew_lease(db: sa.Connection, name: str, fence: int, seconds: float) -> bool:
    """Extends a lease that is still held under this fence; False when another holder took it."""
    held = [registry_lease.c.name == name, registry_lease.c.fence == fence]
    until = now_us() + int(seconds * US_PER_S)
    return db.execute(sa.update(registry_lease).where(*held).values(expires_us=until)).rowcount == 1


def drop_lease(db: sa.Connection, name: str, fence: int) -> None:
    """Gives a lease back, if it is still held under this fence."""
    held = [registry_lease.c.name == name, registry_lease.c.fence == fence]
    db.execute(sa.update(registry_lease).where(*held).values(holder=None, expires_us=0))


def lease_holder(db: sa.Connection, name: str) -> tuple[str, int]:
    """The holder of a lease, and the seconds until it expires."""
    left = (registry_lease.c.expires_us - now_us()).label("left_us")
    row = db.execute(sa.select(registry_lease.c.holder, left).where(registry_lease.c.name == name)).one()
    return str(row.holder), max(0, int(row.left_us) // US_PER_S + 1)


# -- records of runs -----------------------------------------------------------------------------------------------------


def start_run(db: sa.Connection, kind: str, host: str) -> int:
    """Opens the record of a run and gives its number. Deletes records older than 90 days, with their items."""
    db.execute(sa.delete(gc_run).where(gc_run.c.started_us < now_us() - _RUNS_KEPT_US))
    made = db.execute(
        sa.insert(gc_run).values(kind=kind, host=host, started_us=now_us(), n_items=0, n_failed=0, freed_bytes=0)
    )
    assert made.inserted_primary_key is not None  # noqa: S101 - narrows the type
    return int(made.inserted_primary_key[0])


def add_run_items(db: sa.Connection, run_no: int, first: int, done: Sequence[GcResult]) -> None:
    """Records the results of items; `first` is the number of the first one in the run."""
    rows = [
        {
            "run_no": run_no,
            "item_no": first + i,
            "kind": result.item.kind.value,
            "file_path": stored_text(result.item.path, 400),
            "reason": stored_text(result.item.reason, 400),
            "result": stored_text(str(result), 400),
            "size_bytes": result.item.size_bytes,
        }
        for i, result in enumerate(done)
    ]
    if rows:
        db.execute(sa.insert(gc_run_item), rows)


def end_run(db: sa.Connection, run_no: int, *, n_items: int, n_failed: int, freed_bytes: int) -> None:
    """Closes the record of a run."""
    values = {"ended_us": now_us(), "n_items": n_items, "n_failed": n_failed, "freed_bytes": freed_bytes}
    db.execute(sa.update(gc_run).where(gc_run.c.run_no == run_no).values(**values))


def runs(db: sa.Connection, at_most: int) -> list[GcRun]:
    """The last runs, newest first."""
    rows = db.execute(sa.select(gc_run).order_by(gc_run.c.run_no.desc()).limit(at_most))
    return [GcRun(**dict(row._mapping)) for row in rows]


# -- claims: one process computes a key, or has bytes reserved --------------------------------------------------------------


def take_claim(db: sa.Connection, key: bytes, holder: str, reserved_bytes: int, seconds: float) -> bool:
    """Claims a key, or renews one's own claim; False when another holder has it. A key names what is computed
    (`fingerprint.flight_key`), or is random and only reserves bytes of the budget.

    Raises:
        sqlalchemy IntegrityError: another process claimed it at this moment.
    """
    until = now_us() + int(seconds * US_PER_S)
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
    """Gives a claim back, if this holder still has it."""
    db.execute(sa.delete(save_claim).where(save_claim.c.claim_key == key, save_claim.c.holder == holder))


def claim_of(db: sa.Connection, key: bytes) -> tuple[str, float] | None:
    """The holder of a key's claim, and the seconds until it expires (0 or less: it has expired). None: there is no claim."""
    left = (save_claim.c.expires_us - now_us()).label("left_us")
    row = db.execute(sa.select(save_claim.c.holder, left).where(save_claim.c.claim_key == key)).first()
    return None if row is None else (str(row.holder), int(row.left_us) / US_PER_S)


def forget_claims(db: sa.Connection) -> None:
    """Deletes the claims of killed processes: those that expired over an hour ago. Keeps the row at which saves queue."""
    old = save_claim.c.expires_us < now_us() - _CLAIMS_KEPT_US
    db.execute(sa.delete(save_claim).where(old, save_claim.c.holder != "budget"))


def claimed_bytes(db: sa.Connection) -> int:
    """The bytes that unexpired claims reserve."""
    total = sa.func.coalesce(sa.func.sum(save_claim.c.reserved_bytes), 0)
    return int(db.execute(sa.select(total).where(save_claim.c.expires_us >= now_us())).scalar_one())


class UnlinkClaim:
    """Counts the bytes of files that are about to be unlinked, so that no save is granted them too early. Three steps:

    1. One transaction deletes the rows of the files, or marks them as rows without a file, and calls `take`.
    2. The files are unlinked.
    3. A transaction that records the result calls `drop`.

    If the process is killed after step 1, no row counts or offers the files, the claim counts their bytes until it expires
    10 minutes later, and gc deletes the files.
    """

    def __init__(self, purpose: str) -> None:
        self._key, self._holder = secrets.token_bytes(32), holder(purpose)

    def take(self, db: sa.Connection, n_bytes: int) -> None:
        """Claims the bytes; a later call replaces their number and extends the claim."""
        take_claim(db, self._key, self._holder, n_bytes, _UNLINK_CLAIM_S)

    def drop(self, db: sa.Connection) -> None:
        """Ends the claim: the files are gone, or their rows count them again."""
        drop_claim(db, self._key, self._holder)
