"""`python -m benchmarks.scale --url URL --rows 1000000`: the registry's statements on a planted registry of many rows.

Chains of prefixes as real traffic has them: a few system prompts shared by many, conversations that share a document, some
long ones. Medians and 99th percentiles of single calls, warm, by one client. The database must be empty; it is left as it is.
`match` is the whole public call for 4,000 token ids: look-up, and the heads of up to 16 files compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from llama_ckpt.collector import Collector
from llama_ckpt.db import prefixes, queries
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import checkpoint_prefix
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.files import path_of
from llama_ckpt.finding import MOST_HEADS
from llama_ckpt.fingerprint import TokenIds, active_key, prefix_hashes, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.registry import Registry
from llama_ckpt.retention import Policy

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.sample_engine import SampleEngine  # a state without a model

BLOCK = 256
DEEP = 128
N_ASKED = 4000


def ids_of(blocks: Sequence[object]) -> TokenIds:
    """The token ids of named blocks: the same name, the same 256 ids."""
    data = b"".join(hashlib.shake_128(repr(block).encode()).digest(4 * BLOCK) for block in blocks)
    return np.frombuffer(data, dtype="<i4") & 0xFFFF


def blocks_of(number: int) -> list[object]:
    """A checkpoint's blocks: 4 of one of 50 system prompts, some skewed to the first; a conversation of 5; some of 128 blocks."""
    conversation, turn = divmod(number, 5)
    system = min(int(random.Random(conversation).paretovariate(0.7)) - 1, 49)
    own: list[object] = [("system", system, i) for i in range(4)]
    if number % 1000 == 0:
        return [*own, *((number, "deep", i) for i in range(DEEP - 4))]
    return [*own, *((conversation, i) for i in range(1 + turn))]


def plant(database: Database, engine: SampleEngine, n_rows: int) -> None:
    choice, digest, batch = random.Random(1), engine.fingerprint.digest, 5000
    with database.read() as db:
        now = queries.clock_us(db)
    for first in range(1, n_rows + 1, batch):
        rows, links = [], []
        for number in range(first, min(first + batch, n_rows + 1)):
            checkpoint_id, of_input = f"{number:032x}", number.to_bytes(32, "big")
            ids = ids_of(blocks_of(number))
            hashes = prefix_hashes(digest, ids, BLOCK)
            rows.append(
                dict(ckpt_no=number, id=checkpoint_id, model_name="sample", input_hash=of_input, status="ACTIVE", pinned=0,
                     file_path=path_of(checkpoint_id), active_key=active_key(digest, of_input), fingerprint=digest,
                     tokens_hash=tokens_hash(ids), n_tokens=len(ids), memory_kind="full", file_size=4096, payload_crc32=0,
                     created_us=now - choice.randrange(10**12), last_used_us=now - choice.randrange(10**12), hit_count=0,
                     start_token=0)
            )  # fmt: skip
            links += [
                dict(prefix_hash=h, file_tokens=len(ids), ckpt_no=number, n_tokens=BLOCK * (i + 1))
                for i, h in enumerate(hashes)
            ]
        with database.write() as db:
            db.execute(sa.insert(meta), rows)
            db.execute(sa.insert(checkpoint_prefix), links)
    if database.dialect == "postgresql":
        with database.write() as db:
            db.exec_driver_sql(
                "SELECT setval(pg_get_serial_sequence('llama_checkpoint_meta', 'ckpt_no'), %s)", (n_rows,)
            )
            db.exec_driver_sql("ANALYZE")


def plant_heads(registry: Registry, engine: SampleEngine, asked: TokenIds) -> None:
    """Writes the heads of the files that a match of these token ids looks into; the rows alone were planted."""
    digest = engine.fingerprint.digest
    hashes = prefix_hashes(digest, asked, BLOCK)
    with registry.database.read() as db:
        depth = prefixes.deepest(db, hashes)
        rows = prefixes.sharing(db, hashes[depth - 1], MOST_HEADS) if depth else prefixes.newest(db, digest, MOST_HEADS)
    for row in rows:
        path = registry.store.root / row.file_path
        if not path.exists():
            header = container.Header(flags=0, seq_len=row.n_tokens, start_token=0, n_layer=1, n_kv_head=1, metadata_size=0,
                                      fingerprint=digest, input_hash=row.input_hash, created_ns=0)  # fmt: skip
            fields = {"fingerprint": dict(engine.fingerprint.fields)}
            head, _ = container.encode_head(header, fields, ids_of(blocks_of(row.ckpt_no)), memoryview(b"x"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(head + b"x")


def measured(calls: Iterator[Callable[[], object]]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile, and how many."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    times.sort()
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)], "n": len(times)}


def run(url: str, n_rows: int, n_calls: int) -> dict[str, object]:
    engine, choice = SampleEngine(), random.Random(2)
    engine.evaluate(engine.ids)
    with tempfile.TemporaryDirectory() as folder, Registry.open(url, Path(folder) / "store") as registry:
        registry.save(engine, "the first brings the model")
        with registry.database.write() as db:
            db.execute(sa.delete(meta))
        started = time.perf_counter()
        plant(registry.database, engine, n_rows)
        planted_s = time.perf_counter() - started

        def look_up(blocks: list[object]) -> Callable[[], object]:
            asked = prefix_hashes(engine.fingerprint.digest, ids_of(blocks), BLOCK)
            return lambda: registry.database.query(lambda db: prefixes.deepest(db, asked))

        def padded(blocks: list[object]) -> list[object]:
            return [*blocks, *(("new", i) for i in range(DEEP - len(blocks)))]

        def match(blocks: list[object]) -> Callable[[], object]:
            asked = np.append(ids_of(blocks), np.arange(N_ASKED, dtype=np.int32))[:N_ASKED]
            plant_heads(registry, engine, asked)
            return lambda: registry.match(asked, fingerprint=engine.fingerprint)

        some = [choice.randrange(1, n_rows + 1) for _ in range(n_calls)]
        system = blocks_of(1)[:4]
        result: dict[str, object] = {
            "exact match": measured(
                (lambda n=n: registry.match_hash(n.to_bytes(32, "big"), fingerprint=engine.fingerprint)) for n in some
            ),
            "prefix, conversation": measured(look_up(padded(blocks_of(n)[:DEEP])) for n in some),
            "prefix, hot system prompt": measured(look_up(padded(system)) for _ in some),
            "prefix, miss": measured(look_up(padded([("x", 0)])) for _ in some),
            "match, conversation": measured(match(blocks_of(n)[:9]) for n in some),
            "match, hot system prompt": measured(match(system) for _ in some),
            "match, miss": measured(match([("x", 0)]) for _ in some),
            "save": measured((lambda i=i: registry.save(engine, f"new {i}")) for i in range(n_calls)),
            "deduplicated save": measured((lambda i=i: registry.save(engine, f"new {i}")) for i in range(n_calls)),
        }
        collector = Collector(registry.parts)
        started = time.perf_counter()
        verdicts = collector.plan_prune(Policy(max_age_s=10**6 * 0.99))
        planned = time.perf_counter()
        marked = len(collector.prune(verdicts))
        seconds = time.perf_counter() - planned
        result["mark stale"] = {
            "rows": marked,
            "plan_s": planned - started,
            "rows_per_s": marked / seconds if marked else 0,
        }
    return {"database": registry.database.dialect, "rows": n_rows, "planted_s": planted_s, **result}


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--calls", type=int, default=300)
    chosen = arguments.parse_args()
    print(json.dumps(run(chosen.url, chosen.rows, chosen.calls), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
