"""How SQLite finds what the statements ask for, without statistics, as in a database that was never analysed.

A statement for a few rows that walks a table, or a whole status, is quick in a test and takes seconds at a million rows.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace

import pytest
import sqlalchemy as sa

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import collecting
from llama_ckpt.db.connect import sqlite_url
from llama_ckpt.gc_values import RowVersion
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import StaleReason

LARGE = ("llama_checkpoint_meta", "checkpoint_prefix")
# Walks of a table, and of all entries of one status.
WALK = re.compile(rf"SCAN ({'|'.join(LARGE)})|SEARCH ({'|'.join(LARGE)}) .*\(status=\?\)")


class Statements:
    """Every statement that reaches SQLite, once, with values."""

    def __init__(self):
        self.seen = {}

    def note(self, _connection, _cursor, statement, parameters, _context, executemany):
        if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT)", statement):
            self.seen.setdefault(statement, parameters[0] if executemany else parameters)

    def walks(self, database):
        for statement, parameters in self.seen.items():
            if "WHERE" not in statement and "LIMIT" in statement:
                continue  # the first rows of a table
            for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters):
                if WALK.search(row[3]):
                    yield f"{row[3]}: {' '.join(statement.split())[:300]}"


@pytest.fixture
def statements():
    made = Statements()
    sa.event.listen(sa.Engine, "before_cursor_execute", made.note)
    yield made
    sa.event.remove(sa.Engine, "before_cursor_execute", made.note)


@pytest.fixture
def sqlite_registry(tmp_path):
    with Registry.open(sqlite_url(tmp_path / "r.sqlite3"), tmp_path / "store") as registry:
        yield registry


def a_day_of_work(registry, engine):
    ids = [registry.save(engine, f"input {n}", label="nightly").checkpoint.id for n in range(8)]
    registry.save(engine, "input 0")
    registry.match("input 1", fingerprint=engine.fingerprint)
    registry.match("never seen", fingerprint=engine.fingerprint)
    registry.restore(engine, "input 1")
    registry.pin(ids[1])
    registry.remove(ids[2])
    collector = Collector(registry.context)
    policy = Policy(max_count=5)
    marked = collector.prune(collector.plan_prune(policy))
    assert marked
    Reconciler(registry.context).unprune([registry.get(marked[0].row.id)])
    (registry.store.root / registry.get(ids[7]).file_path).unlink()
    collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
    Purger(registry.context).run(Purge(input_hash=registry.get(ids[1]).input_hash))


def test_the_statements_of_saves_restores_marks_and_gc_walk_no_table(sqlite_registry, engine, statements, tmp_path):
    a_day_of_work(sqlite_registry, engine)
    with sqlite3.connect(tmp_path / "r.sqlite3") as database:
        assert list(statements.walks(database)) == []


def test_a_save_under_a_budget_walks_an_index_of_the_sizes_and_no_table(sqlite_registry, engine, statements, tmp_path):
    size = sqlite_registry.save(engine, "input 0").checkpoint.file_size
    budget = replace(sqlite_registry.context, policy=Policy(max_bytes=3 * (size + 4096)))
    limited = Registry(budget)
    for n in range(1, 6):
        limited.save(engine, f"input {n}")
    assert limited.stats().n_active <= 3
    with sqlite3.connect(tmp_path / "r.sqlite3") as database:
        walks = list(statements.walks(database))
    in_order_of_use = [w for w in walks if "ix_llama_ckpt_meta_used" in w]  # and no further than the first thousand
    recounted = [
        w for w in walks if w.startswith("SCAN llama_checkpoint_meta: ")
    ]  # the one look at the statistics, above
    assert len(in_order_of_use) == len(recounted) == 1
    assert len(walks) == 2


def test_a_walk_would_be_noticed(sqlite_registry, engine, statements, tmp_path):
    rows = [RowVersion.of(sqlite_registry.save(engine, f"input {n}").checkpoint) for n in range(2)]
    with sqlite_registry.database.write() as db:
        db.exec_driver_sql("CREATE INDEX by_status ON llama_checkpoint_meta (status, last_used_us)")
        assert collecting.mark_untouched(db, dict.fromkeys(rows, StaleReason.EVICTED))
    with sqlite3.connect(tmp_path / "r.sqlite3") as database:
        assert any("by_status" in walk for walk in statements.walks(database))
