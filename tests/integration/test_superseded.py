"""Prefixes that a longer checkpoint has superseded go first; roots that several share do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sample_engine import TokenEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import MemoryKind, Outcome, Status

STORY = list(range(100, 220))
TURNS = [STORY[:n] for n in (40, 60, 80, 100, 120)]


@pytest.fixture
def engine():
    return TokenEngine()


@pytest.fixture
def full(registry):
    """The registry, writing every checkpoint in full, so that none is needed by another."""
    return Registry(replace(registry.context, delta_depth=0))


def save(registry, engine, ids):
    engine.evaluate(ids)
    return registry.save(engine, list(ids)).checkpoint


def pruned(registry, **policy):
    collector = Collector(registry.context)
    collector.prune(collector.plan_prune(Policy(**policy)))
    return sorted(row.n_tokens for row in registry.list(status=Status.STALE))


def restored(registry, engine, ids):
    engine.held = engine.held[:0]
    result = registry.restore(engine, list(ids))
    return result.outcome, result.n_restored


@pytest.mark.parametrize("turns", [TURNS, TURNS[::-1]], ids=["growing", "shrinking"])
def test_the_longest_of_nested_checkpoints_stays_and_serves_all(full, engine, turns):
    rows = [save(full, engine, ids) for ids in turns]
    assert all(row.parent_no is None for row in rows)
    save(full, engine, [7, 8, 9])
    for ids in TURNS[:4]:  # much used, and all the same superseded
        assert restored(full, engine, ids)[0] is Outcome.HIT
    assert pruned(full, max_count=2) == [40, 60, 80, 100]
    assert [restored(full, engine, ids) for ids in TURNS] == [(Outcome.HIT, len(ids) - 1) for ids in TURNS]


def test_a_root_that_two_conversations_share_stays_where_a_superseded_turn_goes(full, engine):
    root = save(full, engine, STORY[:40])
    one = save(full, engine, STORY[:60])
    save(full, engine, STORY[:80])
    other = save(full, engine, [*STORY[:45], *range(900, 930)])
    assert (one.extends_no, other.extends_no) == (root.ckpt_no, root.ckpt_no)
    assert pruned(full, max_count=3) == [60]


def test_an_input_goes_on_from_the_longest_checkpoint_that_it_begins_with(full, engine):
    first, second = (save(full, engine, ids) for ids in TURNS[:2])
    assert (first.extends_no, second.extends_no) == (None, first.ckpt_no)
    # Nothing ends where these part: the one that is nearest is longer, and what it goes on from is looked at.
    assert save(full, engine, [*STORY[:50], 901, 902]).extends_no == first.ckpt_no
    full.remove(first.id)
    assert save(full, engine, [*STORY[:50], 903, 904]).extends_no is None
    assert save(full, engine, STORY[:120]).extends_no == second.ckpt_no


def test_a_short_beginning_of_a_much_longer_input_is_superseded_too(registry, engine):
    short = save(registry, engine, STORY[:20])
    long = save(registry, engine, STORY[:120])
    assert (long.parent_no, long.extends_no) == (None, short.ckpt_no)
    save(registry, engine, [7, 8, 9])
    assert pruned(registry, max_count=2) == [20]


def test_memory_that_cannot_be_cut_is_superseded_by_nothing(registry, engine):
    engine.memory_kind = MemoryKind.SWA
    rows = [save(registry, engine, ids) for ids in TURNS]
    assert {row.extends_no for row in rows} == {None}
