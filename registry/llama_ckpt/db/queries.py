"""Every statement, as functions: a connection and values in, values out. Nothing here commits.

Only portable SQL: what is written here runs unchanged on every supported database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from llama_ckpt.db.tables import checkpoint_prefix, llama_model, registry_info
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.types import Digest, now_us
from llama_ckpt.errors import Conflict, FileMissing
from llama_ckpt.fingerprint import active_key, fingerprint
from llama_ckpt.values import (
    Checkpoint,
    MemoryKind,
    ModelDimensions,
    NewCheckpoint,
    RegisteredModel,
    StaleReason,
    Status,
)

ACTIVE, STALE = Status.ACTIVE.value, Status.STALE.value
_BATCH = 500
T = TypeVar("T")
_COLUMNS = [c for c in meta.c if c.name != "active_key"]
_NAMES = [c.name for c in _COLUMNS]
_CLOCK = sa.select(now_us())
_UNEXPIRED = sa.or_(meta.c.expires_us.is_(None), meta.c.expires_us > now_us())
# An expression, so that no database takes the status's index and reads every ACTIVE row: another key is always better.
MAY_BE_OFFERED = sa.and_(sa.func.coalesce(meta.c.status, STALE) == ACTIVE, _UNEXPIRED)
OFFERED = sa.select(*_COLUMNS).where(MAY_BE_OFFERED)


def batches(values: Sequence[T]) -> Iterator[list[T]]:
    """`values` in lists for IN: at most 500 (Oracle refuses over 1,000), and of few lengths, by repeating the last value:
    each length is a statement of its own that the database must parse.
    """
    for i in range(0, len(values), _BATCH):
        some = list(values[i : i + _BATCH])
        length = next(n for n in (1, 16, 128, _BATCH) if n >= len(some))
        yield some + [some[-1]] * (length - len(some))


def clock_us(db: sa.Connection) -> int:
    """The database's clock."""
    return int(db.execute(_CLOCK).scalar_one())


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


def models(db: sa.Connection, digest: bytes | None = None) -> list[RegisteredModel]:
    """The registered models, all or the one with this fingerprint."""
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


def find_active(db: sa.Connection, digest: bytes, of_input: bytes) -> Checkpoint | None:
    """The ACTIVE, unexpired row of this fingerprint and input: one look-up by a unique key."""
    row = db.execute(_FIND_ACTIVE, {"active_key": active_key(digest, of_input)}).one_or_none()
    return None if row is None else _checkpoint(row)


def find_by_input(db: sa.Connection, of_input: bytes) -> list[Checkpoint]:
    """The ACTIVE, unexpired rows of this input under any fingerprint; last used first, at most 500."""
    return rows_of(db, _FIND_BY_INPUT, {"input_hash": of_input})


def by_number(db: sa.Connection, ckpt_no: int) -> Checkpoint | None:
    """One row by its number, whatever its status."""
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(meta.c.ckpt_no == ckpt_no))), None)


def by_path(db: sa.Connection, path: str) -> Checkpoint | None:
    """The row that names a file, whatever its status."""
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(meta.c.file_path == path))), None)


def rows_of(db: sa.Connection, query: sa.Select[Any], values: Mapping[str, object] | None = None) -> list[Checkpoint]:
    """What a statement made of `OFFERED` gives, for `values` of its parameters."""
    return [_checkpoint(row) for row in db.execute(query, values)]


def rows_or_none(db: sa.Connection, query: sa.Select[Any], values: Mapping[str, object]) -> list[Checkpoint | None]:
    """As `rows_of`, of a statement with an outer join: None for a row of NULLs."""
    return [None if row.ckpt_no is None else _checkpoint(row) for row in db.execute(query, values)]


# Asked by matches and saves: putting them together takes longer than the look-up.
_FIND_ACTIVE = sa.select(*_COLUMNS).where(meta.c.active_key == sa.bindparam("active_key", type_=Digest), _UNEXPIRED)
_FIND_BY_INPUT = (
    OFFERED.where(meta.c.input_hash == sa.bindparam("input_hash", type_=Digest))
    .order_by(meta.c.last_used_us.desc(), meta.c.ckpt_no.desc())
    .limit(_BATCH)
)


def make_way(
    db: sa.Connection, digest: bytes, of_input: bytes, parent_no: int | None, old: Checkpoint | None = None
) -> None:
    """Frees the key of an input for a row that is to stand on `parent_no`: its ACTIVE row goes STALE if its time is over, and
    `old` as superseded, with the deltas on it.

    Raises:
        Conflict: deltas stand on the one whose time is over: it is to be renewed (`renew`).
    """
    going: dict[int, tuple[Checkpoint, StaleReason]] = {}
    if (expired := _due(db, digest, of_input)) is not None:
        if has_active_child(db, expired):
            raise Conflict(what="the checkpoint of this input has expired, and deltas stand on it")
        going[expired.ckpt_no] = (expired, StaleReason.EXPIRED)
    if old is not None:
        going[old.ckpt_no] = (old, StaleReason.SUPERSEDED)
    if not going:
        return
    lock(db, {*going, *_descendants(db, going), *([] if parent_no is None else [parent_no])})
    for row, reason in going.values():
        mark_stale(db, row, reason)


def find_expired(db: sa.Connection, digest: bytes, of_input: bytes) -> Checkpoint | None:
    """The ACTIVE row of this fingerprint and input whose time is over, if ACTIVE deltas need it."""
    row = _due(db, digest, of_input)
    return row if row is not None and has_active_child(db, row) else None


def _due(db: sa.Connection, digest: bytes, of_input: bytes) -> Checkpoint | None:
    """The ACTIVE row of this fingerprint and input whose time is over."""
    due = [meta.c.active_key == active_key(digest, of_input), meta.c.expires_us <= now_us()]
    return next(iter(rows_of(db, sa.select(*_COLUMNS).where(*due))), None)


def renew(db: sa.Connection, row: Checkpoint, expires_in_s: float | None) -> bool:
    """Gives an ACTIVE row whose time is over a new one, or none; False when it is STALE by now."""
    due = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.expires_us <= now_us()]
    values = {"expires_us": _expiry(expires_in_s), "last_used_us": now_us()}
    return db.execute(sa.update(meta).where(*due).values(**values)).rowcount == 1


def _expiry(expires_in_s: float | None) -> sa.ColumnElement[int] | None:
    return None if expires_in_s is None else now_us() + int(expires_in_s * 1_000_000)


def insert_checkpoint(db: sa.Connection, new: NewCheckpoint) -> Checkpoint:
    """Adds an ACTIVE row and gives it back, with its number and times. A delta's parent is touched by it, so that whoever
    is about to mark the parent sees that it is needed. A longer row that goes on from what this one goes on from, goes on from
    this one now.

    Raises:
        sqlalchemy IntegrityError: there is one for this fingerprint and input.
        Conflict: the parent is not ACTIVE any more.
    """
    if new.parent_no is not None and not _touch_active(db, new.parent_no):
        raise Conflict(what=f"the parent of checkpoint {new.id} went STALE")
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
            expires_us=_expiry(new.expires_in_s),
            pinned=0,
            label=new.label,
            start_token=new.start_token,
            parent_no=new.parent_no,
            extends_no=new.extends_no,
        )
    )
    row = _checkpoint(db.execute(sa.select(*_COLUMNS).where(meta.c.id == new.id)).one())
    if new.extended_by_no is not None:
        longer = [meta.c.ckpt_no == new.extended_by_no, sa.func.coalesce(meta.c.extends_no, 0) == (new.extends_no or 0)]
        # Who holds that row may want one of ours: it is passed over then, and only prune knows less.
        free = db.scalar(sa.select(meta.c.ckpt_no).where(*longer).with_for_update(skip_locked=True))
        if free is not None:
            db.execute(sa.update(meta).where(meta.c.ckpt_no == free).values(extends_no=row.ckpt_no))
    return row


def _touch_active(db: sa.Connection, ckpt_no: int) -> bool:
    """Locks an ACTIVE row by changing its time of last use, always by at least 1; False when it is STALE."""
    later = sa.case((meta.c.last_used_us < now_us(), now_us()), else_=meta.c.last_used_us + 1)
    active = [meta.c.ckpt_no == ckpt_no, meta.c.status == ACTIVE]
    return db.execute(sa.update(meta).where(*active).values(last_used_us=later)).rowcount == 1


def get(db: sa.Connection, checkpoint_id: str) -> Checkpoint | None:
    """One row by its id."""
    row = db.execute(sa.select(*_COLUMNS).where(meta.c.id == checkpoint_id)).one_or_none()
    return None if row is None else _checkpoint(row)


def ancestors(db: sa.Connection, row: Checkpoint) -> list[Checkpoint]:
    """What a delta stands on, the full checkpoint first and its parent last; nothing for a full one. Whatever their status.

    Raises:
        FileMissing: a purge deleted them after `row` was read.
    """
    found: list[Checkpoint] = []
    while (parent_no := (found[-1] if found else row).parent_no) is not None:
        parent = by_number(db, parent_no)
        if parent is None:
            raise FileMissing(path=f"{row.file_path} (the checkpoint that it is a delta of)")
        found.append(parent)
    return found[::-1]


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
    """All rows, or those of a status, in order of their number; a thousand at a time, so that a large registry need not be
    held whole.
    """
    last = 0
    while True:
        # Only the key decides the order of the look-up: with the status in it SQLite takes the status's index and sorts all
        # rows for each thousand.
        rows = db.execute(sa.select(*_COLUMNS).where(meta.c.ckpt_no > last).order_by(meta.c.ckpt_no).limit(1000)).all()
        yield from (_checkpoint(row) for row in rows if status is None or row.status == status.value)
        if len(rows) < 1000:
            return
        last = rows[-1].ckpt_no


def record_verified(db: sa.Connection, row: Checkpoint) -> None:
    """Notes that every byte of a checkpoint's file was checked just now."""
    db.execute(sa.update(meta).where(meta.c.ckpt_no == row.ckpt_no).values(verified_us=now_us()))


def least_recently_verified(db: sa.Connection, older_than_s: float) -> list[str]:
    """The ids of the ACTIVE rows with a file that were not checked for so long, never checked ones first."""
    due = sa.or_(meta.c.verified_us.is_(None), meta.c.verified_us <= now_us() - int(older_than_s * 1_000_000))
    query = sa.select(meta.c.id).where(meta.c.status == ACTIVE, meta.c.file_size > 0, due)
    return list(db.scalars(query.order_by(sa.func.coalesce(meta.c.verified_us, 0), meta.c.ckpt_no)))


def mark_stale(db: sa.Connection, row: Checkpoint, reason: StaleReason) -> bool:
    """Makes an ACTIVE row STALE, and with it every delta that needs it; False when it is STALE already, or has another file by
    now.
    """
    return bool(mark_all_stale(db, {row.ckpt_no: row.file_path}, reason))


def mark_all_stale(db: sa.Connection, paths: Mapping[int, str], reason: StaleReason) -> set[int]:
    """Makes ACTIVE rows STALE, each number given with the path of its file, and with them every delta that needs them. A row
    that has another file by now is left: what was found out about the old one says nothing of it. Gives the numbers of those
    of `paths` that it marked.
    """
    files = lock(db, {*paths, *_descendants(db, paths)})
    found = {number for number, path in paths.items() if files.get(number) == path}
    # Now that what they stand on is locked nobody adds a delta to it; one that was added before is locked late.
    needing = _descendants(db, found)
    lock(db, needing - files.keys())
    for some in batches(sorted(found | needing)):
        mark(db, [meta.c.ckpt_no.in_(some)], reason)
    unlink(db, sorted(found | needing))
    return found


def lock(db: sa.Connection, numbers: Iterable[int]) -> dict[int, str]:
    """Locks those of some rows that are ACTIVE, in order of the number, as everybody does: no deadlocks. Gives their paths by
    number. SQLite's writers are alone and lock nothing here.
    """
    found: dict[int, str] = {}
    for some in batches(sorted(numbers)):
        query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(meta.c.ckpt_no.in_(some), meta.c.status == ACTIVE)
        found |= {row.ckpt_no: row.file_path for row in db.execute(query.order_by(meta.c.ckpt_no).with_for_update())}
    return found


def active_of_model(db: sa.Connection, digest: bytes, at_most: int) -> dict[int, str]:
    """The newest ACTIVE rows of a fingerprint: the paths of their files by number."""
    active = [meta.c.fingerprint == digest, meta.c.status == ACTIVE]
    query = sa.select(meta.c.ckpt_no, meta.c.file_path).where(*active).order_by(meta.c.ckpt_no.desc()).limit(at_most)
    return {row.ckpt_no: row.file_path for row in db.execute(query)}


def has_active_child(db: sa.Connection, row: Checkpoint) -> bool:
    """Whether an ACTIVE delta needs this row."""
    needing = sa.select(meta.c.ckpt_no).where(meta.c.parent_no == row.ckpt_no, meta.c.status == ACTIVE)
    return db.execute(needing.limit(1)).first() is not None


def _descendants(db: sa.Connection, parents: Iterable[int]) -> set[int]:
    """The ACTIVE deltas that need some rows, directly or not."""
    found: set[int] = set()
    level = set(parents)
    while level:
        below: set[int] = set()
        for some in batches(sorted(level)):
            below.update(
                db.scalars(sa.select(meta.c.ckpt_no).where(meta.c.parent_no.in_(some), meta.c.status == ACTIVE))
            )
        level = below - found
        found |= below
    return found


def mark(db: sa.Connection, which: Sequence[sa.ColumnElement[bool]], reason: StaleReason) -> int:
    """Makes the ACTIVE rows that fit all conditions STALE, and says how many. Links and deltas are the caller's to see to."""
    values = {"status": STALE, "active_key": None, "stale_reason": reason.value, "stale_us": now_us()}
    return db.execute(sa.update(meta).where(meta.c.status == ACTIVE, *which).values(**values)).rowcount


def unlink(db: sa.Connection, ckpt_nos: Sequence[int]) -> None:
    """Takes the prefix links of rows that went STALE; in the transaction of the mark, so that a link always leads to an
    ACTIVE row.
    """
    for some in batches(ckpt_nos):
        db.execute(sa.delete(checkpoint_prefix).where(checkpoint_prefix.c.ckpt_no.in_(some)))


def reactivate(db: sa.Connection, row: Checkpoint) -> bool:
    """Makes a STALE row ACTIVE again, without its expiry; False when it is gone, ACTIVE, or a delta of what is not ACTIVE.

    Raises:
        sqlalchemy IntegrityError: another row of this fingerprint and input is ACTIVE.
    """
    if row.parent_no is not None and not _touch_active(db, row.parent_no):
        return False
    # A row of size 0 has lost its file, or is about to; or it never had one, since its parent has all of its cells.
    whole = sa.or_(meta.c.file_size > 0, meta.c.start_token == meta.c.n_tokens)
    stale = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == STALE, meta.c.file_size == row.file_size]
    values = {
        "status": ACTIVE,
        "active_key": active_key(row.fingerprint, row.input_hash),
        "stale_reason": None,
        "stale_us": None,
        "expires_us": None,
        "last_used_us": now_us(),
    }
    return db.execute(sa.update(meta).where(*stale, whole).values(**values)).rowcount == 1


def make_whole(db: sa.Connection, row: Checkpoint, whole: NewCheckpoint) -> bool:
    """Gives an ACTIVE delta a file that has all of its cells, so that it stands on nothing; False when it went STALE, or somebody
    did so already.
    """
    seen = [meta.c.ckpt_no == row.ckpt_no, meta.c.status == ACTIVE, meta.c.file_path == row.file_path]
    values = {
        "file_path": whole.file_path,
        "file_size": whole.file_size,
        "payload_crc32": whole.payload_crc32,
        "start_token": 0,
        "parent_no": None,
    }
    return db.execute(sa.update(meta).where(*seen).values(**values)).rowcount == 1


def set_pinned(db: sa.Connection, checkpoint_id: str, pinned: bool) -> None:
    """Pins or unpins a row."""
    db.execute(sa.update(meta).where(meta.c.id == checkpoint_id).values(pinned=int(pinned)))


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
