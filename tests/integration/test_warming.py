"""`warm` by prefix: what the engine or the registry has of an input is used, the rest is evaluated and saved."""

from __future__ import annotations

import pytest
from support.causal_engine import CausalEngine, chain_of, state_of
from support.links import wrong_links

from llama_ckpt.errors import BadInput, DatabaseUnavailable
from llama_ckpt.values import MemoryKind, Outcome, SaveOutcome, Status

PREFIX = list(range(1, 301))


@pytest.fixture
def engine():
    return CausalEngine()


def counts(warmed):
    return warmed.n_kept, warmed.n_restored, warmed.n_evaluated


def require_state(engine, token_ids):
    assert engine.held.tolist() == token_ids
    assert engine.state == state_of(token_ids)


def test_a_second_process_evaluates_only_what_the_longest_known_prefix_lacks(registry, engine):
    registry.warm(engine, [*PREFIX, 7, 7])
    second = CausalEngine()
    warmed = registry.warm(second, [*PREFIX, 8, 8, 8])
    assert counts(warmed) == (0, 300, 3)
    assert warmed.restore.outcome is Outcome.HIT
    assert warmed.save.outcome is SaveOutcome.SAVED
    assert second.evaluated == chain_of([*PREFIX, 8, 8, 8])[300:]
    require_state(second, [*PREFIX, 8, 8, 8])
    assert wrong_links(registry) == []


def test_what_the_engine_holds_is_kept_where_the_registry_offers_no_more(registry, engine):
    registry.warm(engine, [*PREFIX, 7, 7])
    warmed = registry.warm(engine, [*PREFIX, 8, 8, 8])
    assert counts(warmed) == (300, 0, 3)
    assert engine.n_loads == 0
    assert warmed.restore.reason == "the engine holds the first 300 tokens of the input already"
    require_state(engine, [*PREFIX, 8, 8, 8])


def test_what_the_registry_has_more_than_the_engine_is_restored(registry, engine):
    registry.warm(engine, PREFIX)
    second = CausalEngine()
    second.evaluate(PREFIX[:40])
    warmed = registry.warm(second, [*PREFIX, 9])
    assert counts(warmed) == (0, 300, 1)
    require_state(second, [*PREFIX, 9])


def test_an_input_that_is_there_as_a_whole_is_restored_whatever_the_engine_holds(registry, engine):
    registry.warm(engine, PREFIX)
    warmed = registry.warm(engine, PREFIX)
    assert counts(warmed) == (0, 299, 1)
    assert warmed.save is None
    assert registry.list()[0].hit_count == 1


def test_an_input_that_the_engine_holds_beyond_its_end_is_cut_and_saved(registry, engine):
    engine.evaluate([*PREFIX, 5, 5])
    engine.evaluated.clear()
    warmed = registry.warm(engine, PREFIX)
    assert counts(warmed) == (299, 0, 1)
    assert engine.evaluated == chain_of(PREFIX)[-1:]
    assert warmed.save.checkpoint.prefill_ms is None, "one token says nothing of the whole"
    require_state(engine, PREFIX)


def test_a_beginning_of_a_few_tokens_is_not_kept(registry, engine):
    engine.evaluate([*PREFIX[:15], 99])
    warmed = registry.warm(engine, PREFIX)
    assert counts(warmed) == (0, 0, 300)
    assert warmed.save.checkpoint.prefill_ms is not None


def engine_of_nothing(engine):
    engine.held = engine.held[:0]
    return engine


@pytest.mark.parametrize("beyond", [0, 1], ids=["held to its end", "held beyond"])
def test_memory_that_cannot_be_cut_is_kept_only_if_the_input_goes_on_from_all_of_it(registry, engine, beyond):
    engine.memory_kind = MemoryKind.RECURRENT
    engine.evaluate([*PREFIX[:100], *[99] * beyond])
    warmed = registry.warm(engine, PREFIX)
    assert counts(warmed) == ((0, 0, 300) if beyond else (100, 0, 200))
    assert (warmed.problem, warmed.save.checkpoint.n_tokens) == (None, 299)
    again = registry.warm(engine_of_nothing(engine), PREFIX)
    assert counts(again) == (0, 299, 1)


def test_a_damaged_checkpoint_is_passed_over_for_the_next_best_one(registry, engine):
    shorter = registry.warm(engine, PREFIX[:200]).save.checkpoint
    longer = registry.warm(engine, PREFIX).save.checkpoint
    path = registry.store.root / longer.file_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = CausalEngine()
    warmed = registry.warm(second, [*PREFIX, 9])
    assert counts(warmed) == (0, 200, 101)
    assert registry.get(longer.id).status is Status.STALE
    assert registry.get(shorter.id).hit_count == 1
    require_state(second, [*PREFIX, 9])


def test_without_a_database_what_the_engine_holds_is_kept_all_the_same(registry, engine, monkeypatch):
    engine.evaluate(PREFIX)

    def gone(*_, **__):
        raise DatabaseUnavailable(url="sqlite://", reason="it went away")

    monkeypatch.setattr(type(registry.database), "read", gone)
    monkeypatch.setattr(type(registry.database), "write", gone)
    warmed = registry.warm(engine, [*PREFIX, 9])
    monkeypatch.undo()
    assert counts(warmed) == (300, 0, 1)
    assert (warmed.restore.outcome, type(warmed.problem)) == (Outcome.FAILED, DatabaseUnavailable)
    require_state(engine, [*PREFIX, 9])


# -- a shared prefix -----------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_becomes_a_checkpoint_of_its_own_and_is_evaluated_once(registry, engine):
    first = registry.warm(engine, [*PREFIX, 7], shared_prefix=PREFIX)
    assert counts(first) == (0, 0, 301)
    assert sorted(row.n_tokens for row in registry.list()) == [300, 301]
    second = registry.warm(engine, [*PREFIX, 8, 8], shared_prefix=PREFIX)
    assert counts(second) == (300, 0, 2)
    other = CausalEngine()
    third = registry.warm(other, [*PREFIX, 9], shared_prefix=PREFIX)
    assert counts(third) == (0, 300, 1)
    assert other.evaluated == chain_of([*PREFIX, 9])[-1:]
    assert len(engine.evaluated) == 303
    assert len(registry.list()) == 4


def test_a_text_has_a_text_as_its_shared_prefix(registry, engine):
    shared = " ".join(map(str, PREFIX))
    warmed = registry.warm(engine, shared + " 7", shared_prefix=shared)
    assert warmed.n_evaluated == 301
    assert registry.match(shared).outcome is Outcome.HIT, "found by the hash of its text"


def test_a_tokenizer_may_cut_the_input_otherwise_at_the_prefixs_end(registry, engine):
    shared = " ".join(map(str, PREFIX))  # of the input "… 300" becomes "… 3005"
    warmed = registry.warm(engine, shared + "5 8", shared_prefix=shared)
    assert counts(warmed) == (0, 0, 302)
    require_state(engine, [*PREFIX[:299], 3005, 8])
    other = CausalEngine()
    again = registry.warm(other, shared + "6 8", shared_prefix=shared)
    assert counts(again) == (0, 299, 2)
    require_state(other, [*PREFIX[:299], 3006, 8])


def test_a_shared_prefix_below_the_floor_makes_no_checkpoint(registry, engine):
    registry.warm(engine, PREFIX, shared_prefix=PREFIX[:15])
    assert [row.n_tokens for row in registry.list()] == [300]


def test_an_input_that_is_its_own_shared_prefix_is_saved_once(registry, engine):
    warmed = registry.warm(engine, PREFIX, shared_prefix=PREFIX)
    assert len(registry.list()) == 1
    assert len(engine.evaluated) == 300
    assert warmed.restore.outcome is Outcome.HIT


@pytest.mark.parametrize(
    ("given", "prefix", "reason"),
    [
        ("1 2 3", "2", "the input does not begin with it"),
        ([1, 2, 3], [2], "the input does not begin with it"),
        ([1, 2, 3], [1, 2, 3, 4], "the input does not begin with it"),
        ("1 2 3", [1], "give both as text, or both as token ids"),
        ([1, 2], "1", "give both as text, or both as token ids"),
    ],
    ids=["text", "ids", "longer", "ids of text", "text of ids"],
)
def test_a_shared_prefix_that_is_none_is_refused_before_anything_is_done(registry, engine, given, prefix, reason):
    with pytest.raises(BadInput, match=f"shared_prefix: .* cannot be used: .*{reason}"):
        registry.warm(engine, given, shared_prefix=prefix)
    assert (len(engine.held), registry.list()) == (0, [])
