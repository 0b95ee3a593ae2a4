"""The longest known prefix against a naive look at every checkpoint, over random registries."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.databases import empty
from support.links import wrong_links
from support.sample_engine import TokenEngine

from llama_ckpt.checkpoints.search import MOST_HEADS
from llama_ckpt.db.connect import sqlite_url
from llama_ckpt.db.tables import registry_info
from llama_ckpt.errors import BadInput
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.values import Status

BLOCK, FLOOR = 4, 3
IDS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14)
# A shared beginning makes long common prefixes likely; without one most of them would end at once.
STEMS = st.sampled_from([[], [1] * 5, [1, 2, 2, 1, 1, 2, 1], [2] * 12])
SEQUENCES = st.tuples(STEMS, IDS).map(lambda parts: parts[0] + parts[1])
SLOW_TO_START = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def common(one, other):
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def promise_holds(registry, engine, stored, asked):
    """`stored`: id to token ids of the ACTIVE checkpoints."""
    found = registry.match(asked, fingerprint=engine.fingerprint)
    longest = max((common(ids, asked) for ids in stored.values()), default=0)
    n = found.n_matching if found.checkpoint else 0
    if found.checkpoint is None:
        assert longest < FLOOR or longest % BLOCK, "a whole block in common was missed"
    else:
        ids = stored[found.checkpoint.id]
        assert n == common(ids, asked), "it says what is so"
        assert found.n_reusable == min(n, len(asked) - 1)
        assert n >= FLOOR or ids == asked
    deepest = longest // BLOCK * BLOCK
    assert n >= deepest or deepest < FLOOR, "never shorter than the longest common prefix rounded down to a block"
    ends_there = any(ids == asked[:longest] for ids in stored.values())
    sharing = [ids for ids in stored.values() if ids[:deepest] == asked[:deepest]]
    if longest >= FLOOR and (ends_there or len(sharing) <= MOST_HEADS):
        assert n == longest, "exact where it ends at a checkpoint's end, or where few share the deepest block"
        best = min(len(ids) for ids in stored.values() if common(ids, asked) == longest)
        # Deltas leave the links of their beginnings to what they stand on.
        assert (
            registry.context.delta_depth
            or len(stored[found.checkpoint.id]) == best
            or stored[found.checkpoint.id] == asked
        )


def run(url, store, saves, removals, questions, delta_depth):
    with Registry.open(url, store) as registry, registry.database.write() as db:
        db.execute(sa.insert(registry_info).values(name="block_size", value=str(BLOCK)))
    engine = TokenEngine()
    with Registry.open(url, store, min_match_tokens=FLOOR, delta_depth=delta_depth) as registry:
        for ids in saves:
            engine.evaluate(ids)
            registry.save(engine, ids)
        rows = registry.list(status=Status.ACTIVE)
        for number in removals:
            if not rows:
                break
            row = rows[number % len(rows)]
            try:
                registry.remove(row.id)
            except BadInput:  # a delta needs it
                registry.flatten(next(r.id for r in registry.list(status=Status.ACTIVE) if r.parent_no == row.ckpt_no))
                continue
            rows.remove(row)
        stored = {row.id: _ids(saves, row) for row in rows}
        for asked in questions:
            promise_holds(registry, engine, stored, asked)
        assert wrong_links(registry) == []
        assert Verifier(registry.database, registry.store).findings() == []


def _ids(saves, row):
    from llama_ckpt.fingerprint import hash_input

    return next(ids for ids in saves if hash_input(ids) == row.input_hash)


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW_TO_START)
@given(
    saves=st.lists(SEQUENCES, max_size=24),
    removals=st.lists(st.integers(0, 99), max_size=6),
    questions=st.lists(SEQUENCES, min_size=1, max_size=8),
    delta_depth=st.sampled_from([0, 8]),
)
def test_a_match_keeps_its_promise_over_random_registries(tmp_path_factory, saves, removals, questions, delta_depth):
    folder = tmp_path_factory.mktemp("promise")
    run(sqlite_url(folder / "registry.sqlite3"), folder / "store", saves, removals, questions, delta_depth)


@settings(max_examples=5, deadline=None, suppress_health_check=SLOW_TO_START)
@given(
    saves=st.lists(SEQUENCES, min_size=4, max_size=12),
    removals=st.lists(st.integers(0, 99), max_size=3),
    questions=st.lists(SEQUENCES, min_size=4, max_size=8),
    delta_depth=st.sampled_from([0, 8]),
)
def test_a_match_keeps_its_promise_on_postgresql_too(
    postgresql_url, tmp_path_factory, saves, removals, questions, delta_depth
):
    empty(postgresql_url)
    run(postgresql_url, tmp_path_factory.mktemp("promise") / "store", saves, removals, questions, delta_depth)


@pytest.mark.parametrize("n_sharing", [MOST_HEADS, MOST_HEADS + 8])
def test_with_many_that_share_the_deepest_block_an_end_is_still_found_exactly(tmp_path, n_sharing):
    stem = [1] * 8
    saves = [[*stem, 2, *([1] * (i % 3)), 5, 7 + i] for i in range(n_sharing)] + [[*stem, 2, 1, 1]]
    questions = [[*stem, 2, 1, 1, 9], [*stem, 2, 1, 9, 9], [*stem, 9], stem, [*stem, 2, 5, 7]]
    run(sqlite_url(tmp_path / "registry.sqlite3"), tmp_path / "store", saves, [], questions, 0)
