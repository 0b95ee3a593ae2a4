"""A batch on the real model: each result is that of a cold run, whatever was kept, restored and saved on the way."""

from __future__ import annotations

import tracemalloc

import llama_cpp
import numpy as np
import pytest

from llama_ckpt.errors import EngineFailed, Unsupported

pytestmark = pytest.mark.llama

SHARED = "You are told of the weather at a station on a hill: wind from the north-west, rain since the early morning. "
QUESTIONS = [
    "Is it wet?",
    "Is it calm?",
    "Where does the wind come from?",
    "Since when does it rain?",
    "Is it wet?",
    "Why?",
]
INPUTS = [f"{SHARED}Question: {question} Answer:" for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(load):
    """Next token and confidence of each input, in a run from nothing."""
    engine, answers = load(), []
    for text in INPUTS:
        engine._forget(clear_data=True)
        engine.evaluate(engine.token_ids(text))
        answers.append(engine.next_token())
    engine._forget(clear_data=True)
    return answers


def assert_as_cold(records, expected):
    assert [r.next_token for r in records] == [token for token, _ in expected]
    assert [r.confidence for r in records] == pytest.approx([confidence for _, confidence in expected], abs=5e-3)


@pytest.mark.parametrize("save", ["prefix", "full", "none"])
def test_every_record_is_that_of_the_cold_run_at_first_and_from_checkpoints(engine, registry, expected, save):
    records = list(registry.batch(engine, INPUTS, save=save))
    assert_as_cold(records, expected)
    assert [r.problem for r in records] == [None] * len(INPUTS)
    assert records[0].outcome == "miss"
    ids = [engine.token_ids(text).tolist() for text in INPUTS]
    distinct = len({tuple(one[:n]) for one in ids for n in range(1, len(one) + 1)})
    again = 1 if save == "none" else 0  # the fifth is the first once more, and nobody has it
    n_again = len(ids[0]) - records[4].n_kept - records[4].n_restored if again else 1
    assert sum(r.n_evaluated for r in records) <= 1.02 * (distinct + n_again)
    engine._forget(clear_data=True)
    from_checkpoints = list(registry.batch(engine, INPUTS, save=save))
    assert_as_cold(from_checkpoints, expected)
    assert (from_checkpoints[0].outcome == "miss") == (save == "none")


def test_a_given_prefix_and_checkpoints_of_longer_inputs_give_the_same_answers(engine, registry, expected):
    records = list(registry.batch(engine, INPUTS, shared_prefix=SHARED))
    assert_as_cold(records, expected)
    (row,) = registry.list()
    assert row.n_tokens <= len(engine.token_ids(SHARED))
    engine._forget(clear_data=True)
    assert_as_cold(list(registry.batch(engine, INPUTS[::-1])), expected[::-1])


def test_three_hundred_shared_tokens_are_computed_once(engine, registry):
    shared = engine.token_ids(SHARED * 20)[:300]
    inputs = [np.append(shared, [n, n + 1, n + 2]).astype(np.int32) for n in range(1000, 1008)]
    records = list(registry.batch(engine, inputs))
    assert sum(r.n_evaluated for r in records) == 300 + 3 * 8
    assert [row.n_tokens for row in registry.list()] == [300]


def test_a_batch_needs_the_engine_and_two_states(engine, registry):
    ids = [engine.token_ids(f"{n} {SHARED * 20}")[:350] for n in range(3)]
    engine.evaluate(ids[0])
    state = engine.capture().nbytes
    engine._forget(clear_data=True)
    list(registry.batch(engine, [[1, 2, 3]], save="full"))  # what is loaded at first use is no state
    tracemalloc.start()
    try:
        records = list(registry.batch(engine, ids, save="full"))
        records += list(registry.batch(engine, [one[:349] for one in ids], save="full"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [r.outcome.value for r in records] == ["miss"] * 3 + ["hit"] * 3
    assert state > 7_000_000
    assert peak <= 2 * state + 4_000_000


# -- what the engine says of what comes next -------------------------------------------------------------------------------


def test_the_next_token_is_the_greedy_one_with_its_probability(engine):
    ids = engine.token_ids(INPUTS[0])
    engine.evaluate(ids)
    token, confidence = engine.next_token()
    assert engine.embedding() is None
    assert token == next(engine.llama.generate(ids.tolist(), temp=0.0))
    engine.evaluate(ids)
    logits = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)[: engine.llama.n_vocab()]
    weights = np.exp(np.array(logits) - max(logits))
    assert confidence == pytest.approx(weights[token] / weights.sum(), rel=1e-9)


@pytest.mark.parametrize(
    ("function", "asked"), [("llama_get_logits_ith", "next_token"), ("llama_get_embeddings_seq", "embedding")]
)
def test_an_engine_without_an_answer_says_so(tiny_llama, monkeypatch, function, asked):
    """llama.cpp gives a null pointer where nothing was evaluated."""
    engine = tiny_llama(embedding=True)
    monkeypatch.setattr(llama_cpp, function, lambda *_: None)
    with pytest.raises(EngineFailed, match="evaluate something first"):
        getattr(engine, asked)()


# -- embedding models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, digests):
    """Engines of a tiny causal embedding model, which pools the last token unless it is told otherwise."""
    from support import tiny_models

    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    path = tiny_models.write(tmp_path_factory.mktemp("embedding") / "tiny.gguf", "full", pooling_type=3)
    return lambda **options: LlamaCppEngine.from_path(path, digests=digests, n_ctx=256, **options)


INSTRUCTION = [1 + n % 30 for n in range(64)]
TEXTS = [[*INSTRUCTION, *(n * k % 31 for k in range(1, 9))] for n in (3, 5, 7, 11)]


def cosine_distance(one, other):
    return 1 - float(one @ other) / float(np.linalg.norm(one) * np.linalg.norm(other))


@pytest.mark.parametrize("options", [{}, {"flash_attn": True}], ids=["f16", "flash"])
def test_a_shared_instruction_that_is_restored_gives_the_vectors_of_the_cold_run(tiny_llama, registry, options):
    engine = tiny_llama(embedding=True, **options)
    cold = []
    for ids in TEXTS:
        engine._forget(clear_data=True)
        engine.evaluate(np.array(ids, dtype=np.int32))
        cold.append(engine.embedding())
    engine._forget(clear_data=True)
    list(registry.batch(engine, TEXTS, shared_prefix=INSTRUCTION))
    other = tiny_llama(embedding=True, **options)
    records = []
    for ids in TEXTS:  # each from the checkpoint alone
        other._forget(clear_data=True)
        records += registry.batch(other, [ids], save="none")
    assert [(r.n_restored, r.n_evaluated, r.next_token) for r in records] == [(64, 8, None)] * 4
    distances = [cosine_distance(one, r.embedding) for one, r in zip(cold, records, strict=True)]
    assert max(distances) < 1e-5
    assert cosine_distance(cold[0], cold[1]) > 1e-3, "other texts have other vectors"


def test_the_embedding_is_the_one_that_llama_cpp_python_gives(tiny_llama):
    engine = tiny_llama(embedding=True)
    ids = np.array(TEXTS[0], dtype=np.int32)
    engine.evaluate(ids)
    got = engine.embedding()
    assert (got.shape, got.dtype) == ((64,), np.float32)
    engine.llama.tokenize = lambda _: ids.tolist()
    assert cosine_distance(got, np.array(engine.llama.embed("the same"))) < 1e-5


def test_without_embedding_mode_the_same_model_gives_tokens(tiny_llama, registry):
    (record,) = registry.batch(tiny_llama(), TEXTS[:1])
    assert record.embedding is None
    assert 0 <= record.next_token < 32


@pytest.mark.parametrize("pooling", [1, 2], ids=["mean", "first token"])
def test_a_pooling_that_needs_every_token_is_refused(tiny_llama, registry, pooling):
    (record,) = registry.batch(tiny_llama(embedding=True, pooling_type=pooling), TEXTS[:1])
    assert record.outcome == "failed"
    assert isinstance(record.error, Unsupported)
    assert "last-token pooling" in str(record.error)
    assert registry.list() == []
