"""`checkpoint_prefix`: which checkpoint's file begins with which blocks of token ids. Nothing here commits.

A checkpoint links every block that its own file covers, in the transaction of its row, and the links leave with the STALE
mark. So links are monotone (a link at block k of a chain implies one at every block before it), which bisection needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from llama_ckpt.db.tables import checkpoint_prefix as prefix
from llama_ckpt.values import PrefixLink


def link(db: sa.Connection, links: Sequence[PrefixLink]) -> None:
    """Adds a checkpoint's links; in the transaction that adds its row."""
    rows = [
        {"prefix_hash": x.prefix_hash, "file_tokens": x.file_tokens, "ckpt_no": x.ckpt_no, "n_tokens": x.n_tokens}
        for x in sorted(links, key=lambda x: x.prefix_hash)  # one order for all writers: no deadlocks
    ]
    if rows:
        db.execute(sa.insert(prefix), rows)


def smallest_with(db: sa.Connection, prefix_hash: bytes) -> PrefixLink | None:
    """The link of the smallest file that begins with this prefix: one look-up by the primary key."""
    query = sa.select(prefix).where(prefix.c.prefix_hash == prefix_hash)
    row = db.execute(query.order_by(prefix.c.file_tokens, prefix.c.ckpt_no).limit(1)).one_or_none()
    return None if row is None else PrefixLink(**dict(row._mapping))


def deepest(db: sa.Connection, chain: Sequence[bytes]) -> tuple[int, PrefixLink] | None:
    """The deepest block of a chain of prefix hashes that any ACTIVE checkpoint's file begins with, and the smallest such file.

    Bisection: about log2(len(chain)) + 1 point look-ups, since links are monotone.
    """
    found: tuple[int, PrefixLink] | None = None
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        at = smallest_with(db, chain[middle])
        if at is None:
            high = middle
        else:
            found, low = (middle, at), middle + 1
    return found
