"""Rows of models and checkpoints: find, list, insert. Nothing here commits.

Only portable SQL: each statement runs unchanged on every supported database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import llama_model, registry_info
from llama_ckpt.db.types import Digest, expiry_us, now_us
from llama_ckpt.errors import Conflict, FileMissing
from llama_ckpt.fingerprint import active_key, fingerprint
from llama_ckpt.values import (
    US_PER_S,
    Checkpoint,
    MemoryKind,
    ModelDimensions,
    NewCheckpoint,
    RegisteredModel,
    StaleReason,
    Status,
)

ACTIVE, STALE = Status.ACTIVE.value, Status.STALE.value
_BATCH_ROWS = 500
_PAGE_ROWS = 1000
T = TypeVar("T")
_COLUMNS = [c for c in meta.c if c.name != "active_key"]
_NAMES = [c.name for c in _COLUMNS]
_CLOCK = sa.select(now_us())
_UNEXPIRED = sa.or_(meta.c.expires_us.is_(None), meta.c.expires_us > now_us())
# An expression, so that no database takes the status's index and reads every ACTIVE row: another key is always better.
MAY_BE_OFFERED = sa.and_(sa.func.coalesce(meta.c.status, STALE) == ACTIVE, _UNEXPIRED)
OFFERED = sa.select(*_COLUMNS).where(MAY_BE_OFFERED)


def batches(values: Sequence[T]) -> Iterator[list[T]]:
    """Splits `values` into lists for IN, of at most 500 (Oracle refuses over 1,000). Repeats the last value so that few lengths
    occur: each length is a statement of its own that the database must parse.
    """
    for i in range(0, len(values), _BATCH_ROWS):
        batch = list(values[i : i + _BATCH_ROWS])
        length = next(n for n in (1, 16, 128, _BATCH_ROWS) if n >= len(batch))
        yield batch + [batch[-1]] * (length - len(batch))


def clock_us(db: sa.Connection) -> int:
    """The database's clock, in microseconds since 1970 UTC."""
    return int(db.execute(_CLOCK).scalar_one())


def registry_id(db: sa.Connection) -> str:
    """The registry's id, which was drawn at random when the schema was created."""
    return str(db.execute(sa.select(registry_info.c.value).where(registry_info.c.name == "registry_id")).scalar_one())


# -- models ----------------------------------------------------------------------------------------------------------


def put_model(db: sa.Connection, model: RegisteredModel) -> None:
    """Adds the model if there is no row of it.

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


def models(db: sa.Connection, digest: bytes | None = None) -> list[RegisteredModel]:
    """The registered models, or the one with this fingerprint."""
    query = sa.select(llama_model).order_by(llama_model.c.model_name, llama_model.c.created_us)
    if digest is not None:
        query = query.where(llama_model.c.fingerprint == digest)
    return [_model(row) for row in db.execute(query)]


def _model(row: sa.Row[Any]) -> RegisteredModel:
    return RegisteredModel(
        fingerprint=fingerprint(json.loads(row.fields_json)),
        model_name=row.model_name,
        dimensions=ModelDimensions(n_layer=row.n_layer, n_kv_head=row.n_kv_head, kv_token_bytes=row.kv_token_bytes),
    )


# -- checkpoints -----------------------------------------------------------------------------------------------------


def find_active(db: sa.Connection, digest: bytes, input_hash: bytes) -> Checkpoint | None:
    """The ACTIVE, unexpired row of this fingerprint and input: one look-up by a unique key."""
    row = db.execute(_FIND_ACTIVE, {"active_key": active_key(digest, input_hash)}).one_or_none()
    return None if row is None else _checkpoint(row)


def find_by_input(db: sa.Connection, input_hash: bytes) -> list[Checkpoint]:
    """The ACTIVE, unexpired rows of this input under any fingerprint; most recently used first, at most 500."""
    return rows_of(db, _FIND_BY_INPUT, {"input_hash": input_hash})


def by_number(db: sa.Connection, ckpt_no: int) -> Checkpoint | None:
    """One row by its number, ACTIVE or STALE."""
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(meta.c.ckpt_no == ckpt_no))), None)


def by_path(db: sa.Connection, path: str) -> Checkpoint | None:
    """The row that names a file, ACTIVE or STALE."""
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(meta.c.file_path == path))), None)


def rows_of(db: sa.Connection, query: sa.Select[Any], values: Mapping[str, object] | None = None) -> list[Checkpoint]:
    """The rows of a statement that selects the columns of `OFFERED`, with `values` for its parameters."""
    return [_checkpoint(row) for row in db.execute(query, values)]


def rows_or_none(db: sa.Connection, query: sa.Select[Any], values: Mapping[str, object]) -> list[Checkpoint | None]:
    """As `rows_of`, for a statement with an outer join: None for a row of NULLs."""
    return [None if row.ckpt_no is None else _checkpoint(row) for row in db.execute(query, values)]


# Asked by matches and saves: putting them together takes longer than the look-up.
_FIND_ACTIVE = sa.select(*_COLUMNS).where(meta.c.active_key == sa.bindparam("active_key", type_=Digest), _UNEXPIRED)
_FIND_BY_INPUT = (
    OFFERED.where(meta.c.input_hash == sa.bindparam("input_hash", type_=Digest))
    .order_by(meta.c.last_used_us.desc(), meta.c.ckpt_no.desc())
    .limit(_BATCH_ROWS)
)


def find_expired(db: sa.Connection, digest: bytes, input_hash: bytes) -> Checkpoint | None:
    """The expired ACTIVE row of this fingerprint and input, if ACTIVE deltas need it."""
    row = due(db, digest, input_hash)
    return row if row is not None and has_active_child(db, row) else None


def due(db: sa.Connection, digest: bytes, input_hash: bytes) -> Checkpoint | None:
    """The expired ACTIVE row of this fingerprint and input."""
    due = [meta.c.active_key == active_key(digest, input_hash), meta.c.expires_us <= now_us()]
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(*due))), None)


def insert_checkpoint(db: sa.Connection, new: NewCheckpoint) -> Checkpoint:
    """Inserts an ACTIVE row and gives it, with its number and times. A delta's parent is changed, so that a transaction that is
    about to mark the parent STALE sees that it is needed. If `extended_by_no` is given, that row extends the new one from now
    on, instead of the row that both extend.

    Raises:
        sqlalchemy IntegrityError: there is an ACTIVE row of this fingerprint and input.
        Conflict: the parent is not ACTIVE any more.
    """
    if new.parent_no is not None and not touch_active(db, new.parent_no):
        raise Conflict(what=f"the parent of checkpoint {new.id} went STALE")
    db.execute(sa.insert(meta).values(**_columns_of(new)))
    row = _checkpoint(db.execute(sa.select(*_COLUMNS).where(meta.c.id == new.id)).one())
    if new.extended_by_no is not None:
        longer = [meta.c.ckpt_no == new.extended_by_no, sa.func.coalesce(meta.c.extends_no, 0) == (new.extends_no or 0)]
        # A transaction that holds the longer row may wait for one of ours. Then it is skipped: only prune knows less.
        free = db.scalar(sa.select(meta.c.ckpt_no).where(*longer).with_for_update(skip_locked=True))
        if free is not None:
            db.execute(sa.update(meta).where(meta.c.ckpt_no == free).values(extends_no=row.ckpt_no))
    return row


def _columns_of(new: NewCheckpoint) -> dict[str, Any]:
    return {
        "id": new.id,
        "model_name": new.model_name,
        "input_hash": new.input_hash,
        "file_path": new.file_path,
        "status": ACTIVE,
        "active_key": active_key(new.fingerprint, new.input_hash),
        "fingerprint": new.fingerprint,
        "tokens_hash": new.tokens_hash,
        "n_tokens": new.n_tokens,
        "memory_kind": new.memory_kind.value,
        "file_size": new.file_size,
        "payload_crc32": new.payload_crc32,
        "created_us": now_us(),
        "last_used_us": now_us(),
        "hit_count": 0,
        "prefill_ms": new.prefill_ms,
        "expires_us": expiry_us(new.expires_in_s),
        "pinned": 0,
        "label": new.label,
        "start_token": new.start_token,
        "parent_no": new.parent_no,
        "extends_no": new.extends_no,
    }


def touch_active(db: sa.Connection, ckpt_no: int) -> bool:
    """Locks an ACTIVE row by increasing its time of last use, by 1 at least; False when it is STALE."""
    later = sa.case((meta.c.last_used_us < now_us(), now_us()), else_=meta.c.last_used_us + 1)
    active = [meta.c.ckpt_no == ckpt_no, meta.c.status == ACTIVE]
    return db.execute(sa.update(meta).where(*active).values(last_used_us=later)).rowcount == 1


def get(db: sa.Connection, checkpoint_id: str) -> Checkpoint | None:
    """One row by its id."""
    row = db.execute(sa.select(*_COLUMNS).where(meta.c.id == checkpoint_id)).one_or_none()
    return None if row is None else _checkpoint(row)


def ancestors(db: sa.Connection, row: Checkpoint) -> list[Checkpoint]:
    """The checkpoints that a delta needs, ACTIVE or STALE: the full one first, its parent last. Empty for a full checkpoint.

    Raises:
        FileMissing: a purge deleted them after `row` was read.
    """
    chain: list[Checkpoint] = []
    while (parent_no := (chain[-1] if chain else row).parent_no) is not None:
        parent = by_number(db, parent_no)
        if parent is None:
            raise FileMissing(path=f"{row.file_path} (the checkpoint that it is a delta of)")
        chain.append(parent)
    return chain[::-1]


def deltas_of(
    db: sa.Connection,
    parents: Iterable[int],
    columns: Sequence[sa.ColumnElement[Any]],
    *conditions: sa.ColumnElement[bool],
) -> dict[int, sa.Row[Any]]:
    """The deltas that need any of `parents`, directly or not, and are not among them, by number. `columns` are read, `ckpt_no`
    first. With conditions: only deltas that meet them, and the deltas of those.
    """
    level = set(parents)
    seen, deltas = set(level), dict[int, sa.Row[Any]]()
    while level:
        children: dict[int, sa.Row[Any]] = {}
        for numbers in batches(sorted(level)):
            query = sa.select(*columns).where(meta.c.parent_no.in_(numbers), *conditions)
            children.update((int(row[0]), row) for row in db.execute(query))
        level = children.keys() - seen
        seen |= level
        deltas.update((number, children[number]) for number in level)
    return deltas


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
    """All rows, or those of a status, in order of their number. Read in pages, so that a large registry need not be in memory."""
    for row in in_pages(db, _COLUMNS, _PAGE_ROWS):
        if status is None or row.status == status.value:
            yield _checkpoint(row)


def in_pages(db: sa.Connection, columns: Sequence[sa.ColumnElement[Any]], n_rows: int) -> Iterator[sa.Row[Any]]:
    """These columns, `ckpt_no` among them, of all rows, in order of their number; `n_rows` rows are read at a time."""
    last = 0
    while True:
        # The key alone decides the order. With a condition on the status SQLite would take the status's index, and sort all
        # rows for each page.
        query = sa.select(*columns).where(meta.c.ckpt_no > last).order_by(meta.c.ckpt_no).limit(n_rows)
        page = db.execute(query).all()
        yield from page
        if len(page) < n_rows:
            return
        last = page[-1].ckpt_no


def least_recently_verified(db: sa.Connection, older_than_s: float) -> list[str]:
    """The ids of the ACTIVE rows with a file that were not verified for so many seconds, never verified ones first."""
    due = sa.or_(meta.c.verified_us.is_(None), meta.c.verified_us <= now_us() - int(older_than_s * US_PER_S))
    query = sa.select(meta.c.id).where(meta.c.status == ACTIVE, meta.c.file_size > 0, due)
    return list(db.scalars(query.order_by(sa.func.coalesce(meta.c.verified_us, 0), meta.c.ckpt_no)))


def has_active_child(db: sa.Connection, row: Checkpoint) -> bool:
    """Whether an ACTIVE delta needs this row."""
    needing = sa.select(meta.c.ckpt_no).where(meta.c.parent_no == row.ckpt_no, meta.c.status == ACTIVE)
    return db.execute(needing.limit(1)).first() is not None


def _checkpoint(row: sa.Row[Any]) -> Checkpoint:
    values = dict(zip(_NAMES, row, strict=True))
    values["memory_kind"] = MemoryKind(values["memory_kind"])
    values["status"] = Status(values["status"])
    values["stale_reason"] = None if values["stale_reason"] is None else StaleReason(values["stale_reason"])
    values["pinned"] = bool(values["pinned"])
    return Checkpoint(**values)


def is_empty(db: sa.Connection) -> bool:
    """Whether there is no row, ACTIVE or STALE."""
    return db.execute(sa.select(meta.c.ckpt_no).limit(1)).first() is None
