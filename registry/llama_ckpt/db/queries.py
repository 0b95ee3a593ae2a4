"""Every statement, as functions: a connection and values in, values out. Nothing here commits.

Only portable SQL: what is written here runs unchanged on every supported database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from llama_ckpt.db.tables import gc_run, gc_run_item, llama_model, registry_info, registry_lease
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import now_us
from llama_ckpt.fingerprint import active_key, fingerprint
from llama_ckpt.values import (
    Checkpoint,
    GcItem,
    GcRun,
    MemoryKind,
    ModelDimensions,
    ModelStats,
    NewCheckpoint,
    RegisteredModel,
    StaleReason,
    Stats,
    Status,
)

ACTIVE, STALE = Status.ACTIVE.value, Status.STALE.value
_BATCH = 500  # Oracle refuses IN lists over 1,000
_COLUMNS = [c for c in meta.c if c.name != "active_key"]


def clock_us(db: sa.Connection) -> int:
    """The database's clock."""
    return int(db.execute(sa.select(now_us())).scalar_one())


def registry_id(db: sa.Connection) -> str:
    """The id that was drawn when the schema was made."""
    return str(db.execute(sa.select(registry_info.c.value).where(registry_info.c.name == "registry_id")).scalar_one())


# -- models ----------------------------------------------------------------------------------------------------------


def put_model(db: sa.Connection, model: RegisteredModel) -> None:
    """Adds the model where it is not there.

    Raises:
        sqlalchemy IntegrityError: another process added it at this moment.
    """
    digest = model.fingerprint.digest
    if db.scalar(sa.select(llama_model.c.n_layer).where(llama_model.c.fingerprint == digest)) is not None:
        return
    db.execute(
        sa.insert(llama_model).values(
            fingerprint=digest,
            model_name=model.model_name,
            weights_sha256=model.fingerprint.weights_sha256,
            n_layer=model.dimensions.n_layer,
            n_kv_head=model.dimensions.n_kv_head,
            kv_token_bytes=model.dimensions.kv_token_bytes,
            fields_json=json.dumps(dict(model.fingerprint.fields), sort_keys=True),
            created_us=now_us(),
        )
    )


def models(
    db: sa.Connection, *, digest: bytes | None = None, weights: bytes | None = None, name: str | None = None
) -> list[RegisteredModel]:
    """The registered models, all or those with this fingerprint, these weights, this name."""
    query = sa.select(llama_model).order_by(llama_model.c.model_name, llama_model.c.created_us)
    if digest is not None:
        query = query.where(llama_model.c.fingerprint == digest)
    if weights is not None:
        query = query.where(llama_model.c.weights_sha256 == weights)
    if name is not None:
        query = query.where(llama_model.c.model_name == name)
    return [_model(row) for row in db.execute(query)]


def _model(row: sa.Row[Any]) -> RegisteredModel:
    return RegisteredModel(
        fingerprint=fingerprint(json.loads(row.fields_json)),
        model_name=row.model_name,
        dimensions=ModelDimensions(n_layer=row.n_layer, n_kv_head=row.n_kv_head, kv_token_bytes=row.kv_token_bytes),
    )


# -- checkpoints -----------------------------------------------------------------------------------------------------


def find_active(db: sa.Connection, digest: bytes, of_input: bytes) -> Checkpoint | None:
    """The ACTIVE, unexpired row of this fingerprint and input: one look-up by a unique key."""
    query = sa.select(*_COLUMNS).where(meta.c.active_key == active_key(digest, of_input), _unexpired())
    row = db.execute(query).one_or_none()
    return None if row is None else _checkpoint(row)


def find_by_input(db: sa.Connection, of_input: bytes, digests: Sequence[bytes] | None = None) -> list[Checkpoint]:
    """The ACTIVE, unexpired rows of this input under any fingerprint, or these; last used first, at most 500."""
    query = sa.select(*_COLUMNS).where(meta.c.input_hash == of_input, meta.c.status == ACTIVE, _unexpired())
    if digests is not None:
        query = query.where(meta.c.fingerprint.in_(digests[:_BATCH]))
    rows = db.execute(query.order_by(meta.c.last_used_us.desc(), meta.c.ckpt_no.desc()).limit(_BATCH))
    return [_checkpoint(row) for row in rows]


def _unexpired() -> sa.ColumnElement[bool]:
    return sa.or_(meta.c.expires_us.is_(None), meta.c.expires_us > now_us())


def expire_due(db: sa.Connection, digest: bytes, of_input: bytes) -> None:
    """Makes the ACTIVE row of this fingerprint and input STALE if its time is over, so that its key is free."""
    _mark(
        db,
        [meta.c.active_key == active_key(digest, of_input), meta.c.expires_us <= now_us()],
        StaleReason.EXPIRED,
    )


def insert_checkpoint(db: sa.Connection, new: NewCheckpoint) -> Checkpoint:
    """Adds an ACTIVE row and gives it back, with its number and times.

    Raises:
        sqlalchemy IntegrityError: there is one for this fingerprint and input.
    """
    expires = None if new.expires_in_s is None else now_us() + int(new.expires_in_s * 1_000_000)
    db.execute(
        sa.insert(meta).values(
            id=new.id,
            model_name=new.model_name,
            input_hash=new.input_hash,
            file_path=new.file_path,
            status=ACTIVE,
            active_key=active_key(new.fingerprint, new.input_hash),
            fingerprint=new.fingerprint,
            tokens_hash=new.tokens_hash,
            n_tokens=new.n_tokens,
            memory_kind=new.memory_kind.value,
            file_size=new.file_size,
            payload_crc32=new.payload_crc32,
            created_us=now_us(),
            last_used_us=now_us(),
            hit_count=0,
            prefill_ms=new.prefill_ms,
            expires_us=expires,
            pinned=0,
            label=new.label,
        )
    )
    return _checkpoint(db.execute(sa.select(*_COLUMNS).where(meta.c.id == new.id)).one())


def get(db: sa.Connection, checkpoint_id: str) -> Checkpoint | None:
    """One row by its id."""
    row = db.execute(sa.select(*_COLUMNS).where(meta.c.id == checkpoint_id)).one_or_none()
    return None if row is None else _checkpoint(row)


def ids_like(db: sa.Connection, prefix: str, at_most: int) -> list[str]:
    """The ids that begin with `prefix` (hex digits)."""
    query = sa.select(meta.c.id).where(meta.c.id >= prefix, meta.c.id < prefix + "g").order_by(meta.c.id).limit(at_most)
    return list(db.scalars(query))


def list_checkpoints(
    db: sa.Connection,
    *,
    status: Status | None = None,
    model_name: str | None = None,
    label: str | None = None,
    at_most: int | None = None,
) -> list[Checkpoint]:
    """Rows, newest first."""
    query = sa.select(*_COLUMNS).order_by(meta.c.ckpt_no.desc())
    for column, wanted in ((meta.c.status, status), (meta.c.model_name, model_name), (meta.c.label, label)):
        if wanted is not None:
            query = query.where(column == str(wanted))
    if at_most is not None:
        query = query.limit(at_most)
    return [_checkpoint(row) for row in db.execute(query)]


def scan(db: sa.Connection, status: Status | None = None) -> Iterator[Checkpoint]:
    """All rows in order of their number, a thousand at a time, so that a large registry is never held whole."""
    last = 0
    while True:
        query = sa.select(*_COLUMNS).where(meta.c.ckpt_no > last).order_by(meta.c.ckpt_no).limit(1000)
        if status is not None:
            query = query.where(meta.c.status == status.value)
        rows = db.execute(query).all()
        yield from map(_checkpoint, rows)
        if len(rows) < 1000:
            return
        last = rows[-1].ckpt_no


def known_paths(db: sa.Connection, paths: Sequence[str]) -> set[str]:
    """Those of `paths` that a row names."""
    known: set[str] = set()
    for i in range(0, len(paths), _BATCH):
        known.update(db.scalars(sa.select(meta.c.file_path).where(meta.c.file_path.in_(paths[i : i + _BATCH]))))
    return known


def lease(db: sa.Connection, row: Checkpoint, seconds: float) -> int | None:
    """Claims an ACTIVE row for reading and gives the expiry by the database's clock; None when it is ACTIVE no more.

    A row has one expiry for all its readers, the latest. It shields a reader between match and open; who has the file
    open loses nothing by a delete, and whoever opens too late gets a miss.
    """
    until = clock_us(db) + int(seconds * 1_000_000)
    longer = sa.case((sa.func.coalesce(meta.c.lease_until_us, 0) > until, meta.c.lease_until_us), else_=until)
    changed = db.execute(
        sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE).values(lease_until_us=longer)
    )
    return until if changed.rowcount == 1 else None


def release(db: sa.Connection, row: Checkpoint, until: int) -> None:
    """Gives a lease back, unless a later reader has put the expiry off."""
    held = [meta.c.ckpt_no == row.ckpt_no, meta.c.lease_until_us == until]
    db.execute(sa.update(meta).where(*held).values(lease_until_us=None))


def record_hit(db: sa.Connection, row: Checkpoint) -> None:
    """Counts one restore, which has read and checked every byte of the file."""
    values = {"hit_count": meta.c.hit_count + 1, "last_used_us": now_us(), "verified_us": now_us()}
    db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no).values(**values))


def mark_stale(db: sa.Connection, row: Checkpoint, reason: StaleReason) -> bool:
    """Makes an ACTIVE row STALE; False when it is STALE already."""
    return _mark(db, [meta.c.ckpt_no == row.ckpt_no], reason) == 1


def mark_stale_untouched(db: sa.Connection, row: Checkpoint, reason: StaleReason) -> bool:
    """Makes a row STALE only if nothing happened to it since it was read: no use, no pin, no lease."""
    return _mark(db, _untouched(row), reason) == 1


def mark_model_stale(db: sa.Connection, digest: bytes, reason: StaleReason) -> int:
    """Makes all ACTIVE rows of a fingerprint STALE."""
    return _mark(db, [meta.c.fingerprint == digest], reason)


def _mark(db: sa.Connection, which: Sequence[sa.ColumnElement[bool]], reason: StaleReason) -> int:
    values = {"status": STALE, "active_key": None, "stale_reason": reason.value, "stale_us": now_us()}
    return db.execute(sa.update(meta).where(meta.c.status == ACTIVE, *which).values(**values)).rowcount


def delete_untouched(db: sa.Connection, row: Checkpoint) -> bool:
    """Deletes a STALE row only if nothing happened to it since it was read."""
    return db.execute(sa.delete(meta).where(meta.c.status == STALE, *_untouched(row))).rowcount == 1


def _untouched(row: Checkpoint) -> list[sa.ColumnElement[bool]]:
    free = sa.or_(meta.c.lease_until_us.is_(None), meta.c.lease_until_us <= now_us())
    return [
        meta.c.ckpt_no == row.ckpt_no,
        meta.c.last_used_us == row.last_used_us,
        meta.c.hit_count == row.hit_count,
        meta.c.pinned == 0,
        free,
    ]


def set_pinned(db: sa.Connection, checkpoint_id: str, pinned: bool) -> None:
    """Pins or unpins a row."""
    db.execute(sa.update(meta).where(meta.c.id == checkpoint_id).values(pinned=int(pinned)))


def _checkpoint(row: sa.Row[Any]) -> Checkpoint:
    values = dict(row._mapping)
    values["memory_kind"] = MemoryKind(row.memory_kind)
    values["status"] = Status(row.status)
    values["stale_reason"] = None if row.stale_reason is None else StaleReason(row.stale_reason)
    values["pinned"] = bool(row.pinned)
    return Checkpoint(**values)


# -- totals ----------------------------------------------------------------------------------------------------------


def stats(db: sa.Connection) -> Stats:
    """Totals, recounted from the rows."""
    per_model = sa.select(
        meta.c.model_name,
        meta.c.fingerprint,
        meta.c.status,
        sa.func.count().label("n"),
        sa.func.sum(meta.c.file_size).label("size"),
        sa.func.sum(meta.c.n_tokens).label("n_tokens"),
        sa.func.sum(meta.c.hit_count).label("hits"),
        sa.func.sum(meta.c.hit_count * sa.func.coalesce(meta.c.prefill_ms, 0)).label("spared"),
    ).group_by(meta.c.model_name, meta.c.fingerprint, meta.c.status)
    rows = db.execute(per_model.order_by(meta.c.model_name)).all()
    active, stale = [r for r in rows if r.status == ACTIVE], [r for r in rows if r.status == STALE]
    return Stats(
        n_active=sum(int(r.n) for r in active),
        n_stale=sum(int(r.n) for r in stale),
        active_bytes=sum(int(r.size) for r in active),
        stale_bytes=sum(int(r.size) for r in stale),
        n_tokens=sum(int(r.n_tokens) for r in active),
        hit_count=sum(int(r.hits) for r in rows),
        spared_ms=sum(int(r.spared) for r in rows),
        models=tuple(
            ModelStats(
                model_name=r.model_name,
                fingerprint=r.fingerprint,
                n_active=int(r.n),
                active_bytes=int(r.size),
                n_tokens=int(r.n_tokens),
                hit_count=int(r.hits),
            )
            for r in active
        ),
    )


# -- the collector's own ---------------------------------------------------------------------------------------------


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
    left = (registry_lease.c.expires_us - now_us()).label("left")
    row = db.execute(sa.select(registry_lease.c.holder, left).where(registry_lease.c.name == name)).one()
    return str(row.holder), max(0, int(row.left) // 1_000_000 + 1)


def start_run(db: sa.Connection, kind: str, host: str) -> int:
    """Opens a run's record and gives its number."""
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
            "file_path": item.path[:400],
            "reason": item.reason[:400],
            "result": result[:400],
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


def count_rows(db: sa.Connection) -> int:
    """All rows, ACTIVE and STALE."""
    return int(db.execute(sa.select(sa.func.count()).select_from(meta)).scalar_one())
