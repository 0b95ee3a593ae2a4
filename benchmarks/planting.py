"""Registries of many rows, planted without a save for each: token ids like those of real traffic, their prefix links, and real
files for the few that a look-up will open.

A few system prompts are shared by many, some by very many; conversations of five turns share all but the last; some are long.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import sqlalchemy as sa

from llama_ckpt.db import rows
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import checkpoint_prefix
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.fingerprint import TokenIds, active_key, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.registry import Registry
from llama_ckpt.store.store import path_of

BLOCK = 256
SYSTEM_BLOCKS, TURNS, DEEP = 4, 5, 128
_SYSTEM, _OWN, NEW = 1, 2, 3
_BATCH = 5000
_PAYLOAD = bytes(4096)

Block = tuple[int, int, int]


def blocks_of(number: int) -> list[Block]:
    """A checkpoint's blocks: 4 of one of 50 system prompts, skewed to the first, then one for each turn of a conversation so far;
    of every thousandth 128 in all.
    """
    conversation, turn = divmod(number, TURNS)
    n_own = DEEP - SYSTEM_BLOCKS if number % 1000 == 0 else 1 + turn
    return [*system_blocks(_system_of(conversation)), *((_OWN, conversation, i) for i in range(n_own))]


def system_blocks(system: int) -> list[Block]:
    """The blocks of a system prompt."""
    return [(_SYSTEM, system, i) for i in range(SYSTEM_BLOCKS)]


@functools.lru_cache(maxsize=8)
def _system_of(conversation: int) -> int:
    return min(int(random.Random(conversation).paretovariate(0.7)) - 1, 49)


_PATTERN = np.arange(BLOCK, dtype=np.int32)


def ids_of(blocks: Iterable[Block], n_tokens: int | None = None) -> TokenIds:
    """The token ids of blocks, truncated to `n_tokens`, or filled up to it with ids that no checkpoint has."""
    parts = []
    for block in blocks:
        ids = _PATTERN.copy()
        ids[:3] = block
        parts.append(ids)
    known = np.concatenate(parts) if parts else _PATTERN[:0]
    if n_tokens is None:
        return known
    return np.concatenate([known, np.full(max(0, n_tokens - len(known)), 1 << 20, dtype=np.int32)])[:n_tokens]


def prefix_hashes(digest: bytes, ids: TokenIds) -> list[bytes]:
    """The chain of prefix hashes (docs/matching.md): hash i is the first 16 bytes of SHA-256(hash i-1 ‖ block i).

    The digest of the fingerprint takes the place of the hash before the first block.
    """
    data, hashes, last = ids.astype("<i4", copy=False).tobytes(), [], digest
    for start in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
        last = hashlib.sha256(last + data[start : start + 4 * BLOCK]).digest()[:16]
        hashes.append(last)
    return hashes


def plant(registry: Registry, digest: bytes, n_rows: int) -> None:
    """Insert rows 1 to `n_rows` with their links. The model must exist already, and no other row."""
    database = registry.database
    with database.read() as db:
        now = rows.clock_us(db)
    for first in range(1, n_rows + 1, _BATCH):
        values: list[dict[str, object]] = []
        links: list[dict[str, object]] = []
        for number in range(first, min(first + _BATCH, n_rows + 1)):
            ids = ids_of(blocks_of(number))
            values.append(_row(number, digest, ids, now))
            links += _links(number, digest, ids)
        with database.write() as db:
            db.execute(sa.insert(meta), values)
            db.execute(sa.insert(checkpoint_prefix), links)
    _settle(database, n_rows)


def _row(number: int, digest: bytes, ids: TokenIds, now: int) -> dict[str, object]:
    input_hash, checkpoint_id = tokens_hash(ids), id_of(number)
    return dict(
        ckpt_no=number, id=checkpoint_id, model_name="sample", input_hash=input_hash, status="ACTIVE", pinned=0,
        file_path=path_of(checkpoint_id), active_key=active_key(digest, input_hash), fingerprint=digest, tokens_hash=input_hash,
        n_tokens=len(ids), memory_kind="full", file_size=_head_size(len(ids)) + len(_PAYLOAD),
        payload_crc32=container.crc32(_PAYLOAD), created_us=now - number, last_used_us=now - number, hit_count=0, start_token=0,
    )  # fmt: skip


def id_of(number: int) -> str:
    """A checkpoint id, spread over the store's folders."""
    return f"{number * 7919 % 65536:04x}{number:028x}"


def _head_size(n_tokens: int) -> int:
    return container.align_up(container.HEADER_SIZE + len(b"{}") + 4 * n_tokens)


def _links(number: int, digest: bytes, ids: TokenIds) -> Iterator[dict[str, object]]:
    for i, found in enumerate(prefix_hashes(digest, ids)):
        yield dict(prefix_hash=found, file_tokens=len(ids), ckpt_no=number, n_tokens=BLOCK * (i + 1))


def _settle(database: Database, n_rows: int) -> None:
    """Advance the sequence past the planted numbers, and analyse the rows for the planner."""
    with database.write() as db:
        if database.dialect == "postgresql":
            sequence = "SELECT setval(pg_get_serial_sequence('llama_checkpoint_meta', 'ckpt_no'), %s)"
            db.exec_driver_sql(sequence, (max(n_rows, 1),))
        db.exec_driver_sql("ANALYZE")


def plant_files(registry: Registry, digest: bytes, asked: Iterable[TokenIds], n_rows: int, at_most: int = 32) -> None:
    """Write files with real heads for the checkpoints that look-ups for `asked` may open: those that share the deepest block,
    smallest first, and those that were saved last.
    """
    numbers = set(range(max(1, n_rows - at_most), n_rows + 1))
    with registry.database.read() as db:
        for ids in asked:
            for found in reversed(prefix_hashes(digest, ids)):
                query = sa.select(checkpoint_prefix.c.ckpt_no).where(checkpoint_prefix.c.prefix_hash == found)
                order = (checkpoint_prefix.c.file_tokens, checkpoint_prefix.c.ckpt_no)
                if shared := db.scalars(query.order_by(*order).limit(at_most)).all():
                    numbers.update(shared)
                    break
    for number in sorted(numbers):
        _plant_file(registry, digest, number)


def _plant_file(registry: Registry, digest: bytes, number: int) -> None:
    ids = ids_of(blocks_of(number))
    header = container.Header(
        flags=container.FLAG_SLICEABLE, seq_len=len(ids), start_token=0, n_layer=1, n_kv_head=1, metadata_size=0,
        fingerprint=digest, input_hash=tokens_hash(ids), created_ns=0,
    )  # fmt: skip
    payload = memoryview(_PAYLOAD)
    head, _ = container.encode_head(header, {}, ids, payload)
    path = registry.store.root / path_of(id_of(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + payload)
