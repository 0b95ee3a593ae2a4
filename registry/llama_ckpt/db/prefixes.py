"""`checkpoint_prefix`: the blocks of token ids that each checkpoint starts with. Nothing here commits.

A checkpoint links every block that its own file covers, in the transaction that makes its row ACTIVE; the transaction that marks
the row STALE deletes the links. So links are monotone: a link at block k of a chain implies one at every block before it, which
`deepest` needs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from llama_ckpt.db import rows
from llama_ckpt.db.rows import ACTIVE, MAY_BE_OFFERED, OFFERED, batches, rows_of
from llama_ckpt.db.tables import checkpoint_prefix as prefix
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_info
from llama_ckpt.db.types import Digest
from llama_ckpt.errors import BadInput
from llama_ckpt.values import Checkpoint, PrefixLink

DEFAULT_BLOCK_SIZE = 256
_AT_MOST = sa.bindparam("at_most", type_=sa.Integer())
_MOST_BINDS = 512  # Oracle takes 1,000 in a list


def block_size(db: sa.Connection) -> int:
    """The number of token ids in a block of the prefix hashes. It never changes: 256, unless the registry's row says otherwise.

    Raises:
        BadInput: the row has no such number.
    """
    stored = db.scalar(sa.select(registry_info.c.value).where(registry_info.c.name == "block_size"))
    if stored is None:
        return DEFAULT_BLOCK_SIZE
    if not stored.isdecimal() or not 0 < int(stored) <= 1 << 20:
        raise BadInput(what="block_size in registry_info", value=stored, reason="expected a whole number from 1 on")
    return int(stored)


def link(db: sa.Connection, links: Sequence[PrefixLink]) -> None:
    """Adds a checkpoint's links. Call it in the transaction that makes its row ACTIVE."""
    rows = [
        {"prefix_hash": x.prefix_hash, "file_tokens": x.file_tokens, "ckpt_no": x.ckpt_no, "n_tokens": x.n_tokens}
        for x in sorted(links, key=lambda x: x.prefix_hash)  # one order for all writers: no deadlocks
    ]
    if rows:
        db.execute(sa.insert(prefix), rows)


def link_later(db: sa.Connection, ckpt_no: int, links: Sequence[PrefixLink]) -> bool:
    """Adds the links of a row that has none; False when it is not ACTIVE any more, or has links by now."""
    query = sa.select(meta.c.ckpt_no).where(meta.c.ckpt_no == ckpt_no, meta.c.status == ACTIVE)
    if db.execute(query.with_for_update()).first() is None or linked(db, [ckpt_no]):
        return False
    link(db, links)
    return True


def linked(db: sa.Connection, ckpt_nos: Sequence[int]) -> set[int]:
    """Those of some rows that have links."""
    numbers: set[int] = set()
    for batch in batches(ckpt_nos):
        numbers.update(db.scalars(sa.select(prefix.c.ckpt_no).where(prefix.c.ckpt_no.in_(batch)).distinct()))
    return numbers


def deepest(db: sa.Connection, chain: Sequence[bytes], width: int = 1) -> int:
    """The number of blocks, from the start of a chain of prefix hashes, that at least one ACTIVE checkpoint starts with.

    Each statement looks up `width` points of the chain. A width of 1 is bisection: about log2(len(chain)) + 1 look-ups, the
    least work. A larger width takes fewer round trips. Only the first link of each point is read, even if many checkpoints
    share it.
    """
    low, high = 0, len(chain)  # blocks below `low` have links, blocks from `high` on have none
    while low < high:
        n = min(width, high - low)
        points = [low + (high - low) * (i + 1) // (n + 1) for i in range(n)]
        asked = [chain[p] for p in points] + [chain[points[-1]]] * (width - n)  # one statement for all lengths
        linked_points = set(db.scalars(_which_have_links(width), {f"hash_{i}": x for i, x in enumerate(asked)}))
        last = max((i for i in range(n) if i in linked_points), default=-1)
        low = points[last] + 1 if last >= 0 else low
        high = points[last + 1] if last + 1 < n else high
    return low


@functools.cache
def _which_have_links(n: int) -> sa.CompoundSelect[Any]:
    """A statement that gives the indexes of those of `n` hashes (`hash_0` and so on) that have a link."""
    one_each: list[sa.Select[Any]] = []
    for i in range(n):
        its = sa.exists().where(prefix.c.prefix_hash == sa.bindparam(f"hash_{i}", type_=prefix.c.prefix_hash.type))
        one_each.append(sa.select(sa.literal_column(str(i))).where(its))
    return sa.union_all(*one_each)


def sharing(db: sa.Connection, prefix_hash: bytes, at_most: int) -> tuple[list[Checkpoint], bool]:
    """The usable rows among the first `at_most` that start with this prefix, smallest file first (a range of the primary key),
    and whether these are all that start with it.
    """
    links = rows.rows_or_none(db, _sharing(), {"prefix_hash": prefix_hash, "at_most": at_most})
    return [row for row in links if row is not None], len(links) < at_most


@functools.cache
def _sharing() -> sa.Select[Any]:
    its = sa.bindparam("prefix_hash", type_=prefix.c.prefix_hash.type)
    # The few links are selected first: PostgreSQL would join and sort all links of a prefix that very many rows share.
    first = sa.select(prefix.c.ckpt_no, prefix.c.file_tokens).where(prefix.c.prefix_hash == its)
    few = first.order_by(prefix.c.file_tokens, prefix.c.ckpt_no).limit(_AT_MOST).subquery("few")
    its_row = sa.and_(meta.c.ckpt_no == few.c.ckpt_no, MAY_BE_OFFERED)
    query = sa.select(*OFFERED.selected_columns).select_from(few.outerjoin(meta, its_row))
    return query.order_by(few.c.file_tokens, few.c.ckpt_no)


def ending_at(db: sa.Connection, hashes: Sequence[bytes], at_most: int) -> list[Checkpoint]:
    """The usable rows that have one of these prefixes, longest row first. Meant for hashes of ends inside a block, which few rows
    share. Takes one statement for up to 512 hashes, and one more for the rows.
    """
    numbers: list[int] = []
    for i in range(0, len(hashes), _MOST_BINDS):
        batch = hashes[i : i + _MOST_BINDS]
        n = 1 << (len(batch) - 1).bit_length()  # of few lengths: each is a statement that the database must parse
        asked = [*batch, *[batch[-1]] * (n - len(batch))]
        numbers += db.scalars(
            _which_begin_with(n), {f"hash_{j}": x for j, x in enumerate(asked)} | {"at_most": at_most}
        )
    return sorted(_numbered(db, numbers), key=lambda row: (-row.n_tokens, row.ckpt_no))[:at_most]


def _numbered(db: sa.Connection, ckpt_nos: Sequence[int]) -> list[Checkpoint]:
    """The usable rows among some numbers."""
    usable: list[Checkpoint] = []
    for batch in batches(ckpt_nos):
        usable += rows_of(db, _with_numbers(len(batch)), {f"no_{i}": number for i, number in enumerate(batch)})
    return usable


@functools.cache
def _with_numbers(n: int) -> sa.Select[Any]:
    return OFFERED.where(meta.c.ckpt_no.in_([sa.bindparam(f"no_{i}", type_=sa.BigInteger) for i in range(n)]))


@functools.cache
def _which_begin_with(n: int) -> sa.Select[Any]:
    """A statement that gives the numbers of the rows with one of `n` hashes (`hash_0` and so on), longest prefix first."""
    # Cached: building it again, or expanding an IN list, would take longer than the look-up.
    hashes = [sa.bindparam(f"hash_{i}", type_=prefix.c.prefix_hash.type) for i in range(n)]
    query = sa.select(prefix.c.ckpt_no).where(prefix.c.prefix_hash.in_(hashes))
    return query.order_by(prefix.c.n_tokens.desc(), prefix.c.ckpt_no).limit(_AT_MOST)


def newest(db: sa.Connection, digest: bytes, at_most: int) -> list[Checkpoint]:
    """The usable rows of a fingerprint, newest first. Only its last 64 rows are read, so that many STALE rows cost nothing."""
    return rows_of(db, _newest(), {"fingerprint": digest, "at_most": at_most})


@functools.cache
def _newest() -> sa.Select[Any]:
    last = sa.select(meta.c.ckpt_no).where(meta.c.fingerprint == sa.bindparam("fingerprint", type_=Digest))
    few = last.order_by(meta.c.ckpt_no.desc()).limit(64).subquery("few")
    query = OFFERED.join(few, few.c.ckpt_no == meta.c.ckpt_no)
    return query.order_by(few.c.ckpt_no.desc()).limit(_AT_MOST)
