"""`llama.set_cache(LlamaCkptCache(registry, engine))`, and autosave, on the real model with llama-cpp-python's own calls."""

from __future__ import annotations

import json
import subprocess
import sys

import llama_cpp
import numpy as np
import pytest
from support import child

from llama_ckpt.engine.cache import LlamaCkptCache
from llama_ckpt.engine.held import n_reusable
from llama_ckpt.errors import DatabaseUnavailable, EngineFailed
from llama_ckpt.fingerprint import as_token_ids
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import MemoryKind, Outcome, SaveOutcome

pytestmark = pytest.mark.llama

DAYS = "\n".join(f"Day {i}: wind from the north-west, and rain since the early morning." for i in range(1, 9))
PROMPT = DAYS + "\nDay 9: wind from"
CHAT = [{"role": "system", "content": DAYS}, {"role": "user", "content": "How was the weather on day 3?"}]


@pytest.fixture
def llama(engine):
    """The real model with no cache, and no cells."""
    yield engine.llama
    engine.llama.set_cache(None)


@pytest.fixture
def cache(registry, engine, llama):
    made = LlamaCkptCache(registry, engine)
    llama.set_cache(made)
    return made


@pytest.fixture
def evaluated(llama, monkeypatch):
    """How many tokens each call of `Llama.eval` got."""
    counts, real = [], llama.eval
    monkeypatch.setattr(llama, "eval", lambda tokens: counts.append(len(tokens)) or real(tokens))
    return counts


@pytest.fixture(autouse=True)
def no_state_is_loaded_whole(monkeypatch):
    """Sequence state only: the whole context's state, with seed and scores, never goes back into a `Llama`."""
    monkeypatch.setattr(llama_cpp.Llama, "load_state", lambda *_: pytest.fail("Llama.load_state was called"))


def forget(engine):
    engine._forget(clear_data=True)


def complete(llama, prompt=PROMPT, **options):
    return llama(prompt, **{"max_tokens": 12, "temperature": 0.0, **options})["choices"][0]["text"]


def n_tokens(engine, prompt=PROMPT):
    return len(engine.token_ids(prompt))


def test_of_memory_that_cannot_be_cut_prompt_and_answer_are_saved_and_only_the_whole_of_what_is_held_counts(
    registry, engine, llama, cache, monkeypatch, caplog
):
    """The memory of this model can; the cache is told that it cannot."""
    monkeypatch.setattr(engine, "memory_kind", MemoryKind.RECURRENT)
    complete(llama)
    (row,) = registry.list()
    assert row.n_tokens == llama.n_tokens > n_tokens(engine)
    assert "not saved" not in caplog.text
    held = engine.held_token_ids().tolist()
    assert n_reusable(engine, as_token_ids([*held, 5]), 0) == len(held)
    assert n_reusable(engine, as_token_ids([*held[:-3], 5]), 0) == 0


def test_a_completion_is_the_same_without_with_and_from_the_cache(registry, engine, llama, evaluated, counters):
    expected = complete(llama)
    forget(engine)
    llama.set_cache(LlamaCkptCache(registry, engine))
    assert complete(llama) == expected
    forget(engine)
    evaluated.clear()
    assert complete(llama) == expected
    assert evaluated[0] == 1, "the last token of the prompt, for its logits"
    assert max(evaluated) == 1
    assert (counters["saved"], counters["deduplicated"]) == (1, 1)


def test_a_second_process_reuses_what_the_first_one_saved(registry, engine, cache, gguf, tmp_path):
    expected = complete(engine.llama)
    order = {
        "model": str(gguf),
        "store": str(registry.store.root),
        "prompt": PROMPT,
        "digests": str(tmp_path / "d.json"),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "support.completing", json.dumps(order)],
        env=child.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(ran.stdout)
    assert told["text"] == expected
    assert max(told["evaluated"]) == 1
    assert registry.list()[0].hit_count == 1


def test_another_prompt_with_the_same_beginning_evaluates_only_its_own_tokens(registry, engine, llama, evaluated):
    other = DAYS + "\nIn short, the week was"
    expected = complete(llama, other)
    forget(engine)
    llama.set_cache(LlamaCkptCache(registry, engine))
    complete(llama)
    forget(engine)
    evaluated.clear()
    assert complete(llama, other) == expected
    shared = int(
        (engine.token_ids(PROMPT)[: n_tokens(engine, DAYS)] == engine.token_ids(other)[: n_tokens(engine, DAYS)]).sum()
    )
    assert evaluated[0] <= n_tokens(engine, other) - shared + 1


def test_what_the_llama_holds_already_is_not_loaded_again(registry, engine, cache, counters):
    complete(engine.llama)
    complete(engine.llama)
    assert counters["hit"] == 0


def test_reading_never_consumes(registry, engine, cache, counters):
    complete(engine.llama)
    for _ in range(3):
        forget(engine)
        assert engine.token_ids(PROMPT) in cache
        assert cache[engine.token_ids(PROMPT).tolist()].input_ids.tolist() == engine.held_token_ids().tolist()
    assert counters["hit"] == 3


def test_the_end_of_the_prompt_is_saved_and_the_live_cells_stay(registry, engine, cache):
    complete(engine.llama)
    assert [row.n_tokens for row in registry.list()] == [n_tokens(engine)]
    assert engine.llama.n_tokens == n_tokens(engine) + 11, "all but the last sampled token"
    live = bytes(engine.capture())
    forget(engine)
    assert registry.restore(engine, engine.token_ids(PROMPT)).outcome is Outcome.HIT
    assert len(engine.capture()) < len(live)


def test_with_answers_the_end_of_the_answer_is_saved(registry, engine, llama, evaluated):
    llama.set_cache(LlamaCkptCache(registry, engine, answers=True))
    text = complete(llama)
    assert [row.n_tokens for row in registry.list()] == [n_tokens(engine) + 11]
    forget(engine)
    evaluated.clear()
    complete(llama, PROMPT + text + " And then")
    assert evaluated[0] < 12


def test_a_prompt_that_nobody_asked_for_before_it_was_set_is_saved_as_it_is(registry, engine, cache):
    ids = engine.token_ids(PROMPT)
    engine.evaluate(ids)
    cache[ids.tolist()] = None
    assert [row.n_tokens for row in registry.list()] == [len(ids)]


def test_seed_and_sampler_are_those_of_a_run_without_a_cache(registry, engine, llama):
    def sampled():
        forget(engine)
        llama.set_seed(4)
        return complete(llama, temperature=0.9, seed=11), complete(llama, temperature=0.9), llama._seed

    without = sampled()
    llama.set_cache(LlamaCkptCache(registry, engine))
    assert sampled() == without
    assert sampled() == without


def test_a_stream_gives_the_same_text_and_saves_its_prompt(registry, engine, llama, evaluated):
    expected = complete(llama)

    def streamed():
        forget(engine)
        evaluated.clear()
        chunks = llama(PROMPT, max_tokens=12, temperature=0.0, stream=True)
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    llama.set_cache(LlamaCkptCache(registry, engine))
    assert streamed() == expected
    assert evaluated[0] == n_tokens(engine)
    assert streamed() == expected
    assert evaluated[0] == 1


def test_a_chat_gives_the_same_answer_and_goes_on_from_its_last_turn(registry, engine, llama, evaluated):
    def ask(messages):
        forget(engine)
        evaluated.clear()
        return llama.create_chat_completion(messages, max_tokens=12, temperature=0.0)["choices"][0]["message"][
            "content"
        ]

    answer = ask(CHAT)
    n_first = max(evaluated)
    more = [*CHAT, {"role": "assistant", "content": answer}, {"role": "user", "content": "And on day 4?"}]
    expected = ask(more)
    llama.set_cache(LlamaCkptCache(registry, engine))
    assert ask(CHAT) == answer
    assert ask(CHAT) == answer
    assert max(evaluated) == 1
    assert ask(more) == expected
    assert max(evaluated) < n_first, "the first turn came from the cache"


def test_a_prompt_below_the_floor_is_completed_as_without_a_cache(registry, engine, llama):
    expected = complete(llama, "Rain")
    forget(engine)
    cache = LlamaCkptCache(registry, engine)
    llama.set_cache(cache)
    complete(llama, PROMPT)
    forget(engine)
    assert complete(llama, "Rain") == expected
    assert [1, 2, 3] not in cache
    assert [] not in cache


@pytest.mark.parametrize("verb", ["match", "restore", "save"])
def test_a_registry_that_fails_never_fails_a_completion(registry, engine, llama, cache, monkeypatch, caplog, verb):
    expected = complete(llama)
    forget(engine)

    def fails(*_, **__):
        raise DatabaseUnavailable(url="sqlite://", reason="it went away")

    monkeypatch.setattr(registry, verb, fails)
    assert complete(llama) == expected
    assert "it went away" in caplog.text
    if verb == "match":
        assert engine.token_ids(PROMPT) not in cache


def test_a_database_that_is_away_never_fails_a_completion(registry, engine, llama, cache, monkeypatch, caplog):
    expected = complete(llama)
    forget(engine)

    def gone(*_, **__):
        raise DatabaseUnavailable(url="sqlite://", reason="it went away")

    monkeypatch.setattr(registry.database, "read", gone)
    monkeypatch.setattr(registry.database, "write", gone)
    assert complete(llama) == expected
    monkeypatch.undo()
    assert "it went away" in caplog.text


def test_an_engine_that_refuses_the_state_completes_from_nothing(
    registry, engine, llama, cache, monkeypatch, left_in_store
):
    expected = complete(llama)
    forget(engine)

    def refuses(*_):
        raise EngineFailed(reason="it took 0 bytes of state")

    monkeypatch.setattr(engine, "_set_state", refuses)
    assert complete(llama) == expected
    assert np.isfinite(llama.scores).all()


def test_its_capacity_is_the_registrys_byte_budget_and_its_size_the_registrys_bytes(registry, engine, cache, tmp_path):
    assert cache.capacity_bytes == sys.maxsize
    complete(engine.llama)
    assert cache.cache_size == registry.list()[0].file_size
    from llama_ckpt.registry import Registry

    with Registry.open(store=tmp_path / "small", policy=Policy(max_bytes=10**6)) as small:
        bounded = LlamaCkptCache(small, engine)
        assert bounded.capacity_bytes == 10**6
        engine.llama.set_cache(bounded)
        complete(engine.llama)
        assert small.list() == [], "it would not fit"


# -- autosave ------------------------------------------------------------------------------------------------------------------


def test_a_completion_is_saved_while_it_runs_and_is_the_same_as_without(registry, engine, llama):
    expected = complete(llama, max_tokens=20)
    n_prompt = n_tokens(engine)
    forget(engine)
    with registry.autosave(engine, every=8) as autosave:
        assert complete(llama, max_tokens=20, stopping_criteria=autosave) == expected
    assert sorted(row.n_tokens for row in registry.list()) == [n_prompt + 8, n_prompt + 16, n_prompt + 19]
    assert autosave.saved.outcome is SaveOutcome.SAVED
    held = engine.held_token_ids()
    forget(engine)
    assert registry.restore(engine, held).outcome is Outcome.HIT


def test_generate_and_the_stream_of_a_chat_are_saved_as_they_go(registry, engine, llama):
    ids = engine.token_ids(PROMPT).tolist()
    with registry.autosave(engine, every=4) as autosave:
        for i, _ in enumerate(llama.generate(ids, temp=0.0, stopping_criteria=autosave)):
            if i == 9:
                break
    assert sorted(row.n_tokens for row in registry.list()) == [len(ids) + 4, len(ids) + 8, len(ids) + 9]
    forget(engine)
    with registry.autosave(engine, every=4) as autosave:
        chunks = list(autosave.along(llama.create_chat_completion(CHAT, max_tokens=10, temperature=0.0, stream=True)))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(registry.list()) >= 5


def test_an_interrupted_completion_gives_the_text_so_far(registry, engine, llama):
    expected = complete(llama, max_tokens=20)
    forget(engine)
    with registry.autosave(engine, every=100) as autosave:
        seen = []

        def third(token_ids, logits):
            seen.append(len(token_ids))
            autosave.interrupted = len(seen) > 3
            return autosave(token_ids, logits)

        text = complete(llama, max_tokens=20, stopping_criteria=third)
        assert autosave.interrupted
        autosave.interrupted = False  # no signal is to follow here
    assert text
    assert expected.startswith(text)
    assert registry.list()[0].n_tokens == engine.llama.n_tokens
