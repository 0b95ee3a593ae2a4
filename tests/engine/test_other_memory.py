"""Sliding windows, recurrent and hybrid memory: a checkpoint serves what begins with all of it, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from support import tiny_models

from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.errors import BadInput
from llama_ckpt.integrity.verify import Verifier, all_ok
from llama_ckpt.registry import Registry
from llama_ckpt.values import MemoryKind, Outcome, SaveOutcome

IDS = np.random.default_rng(1).integers(3, 30, 60).astype(np.int32)
OTHER = IDS[::-1].copy()


@pytest.fixture(scope="module", params=["swa", "swa, window only", "recurrent", "hybrid"])
def engine(request, tmp_path_factory):
    """A tiny model of each kind; of sliding windows one whose cache holds no more than the window."""
    kind, _, windowed = request.param.partition(", ")
    path = tiny_models.write(tmp_path_factory.mktemp("models") / f"{kind}.gguf", kind)
    return LlamaCppEngine.from_path(path, n_ctx=256, logits_all=True, **({"swa_full": False} if windowed else {}))


@pytest.fixture
def registry(tmp_path):
    with Registry.open(store=tmp_path / "store") as opened:
        yield opened
        assert all(all_ok(checks) for _, checks in Verifier(opened.database, opened.store).everything())


def logits(engine):
    return np.array(engine.llama.scores[engine.llama.n_tokens - 1])


def goes_on_as(engine, cold):
    """To the bit; but in a window's cache the cells of a loaded state lie at other places, and sums are taken in another order:
    then as near as two ways of batching are to each other.
    """
    if engine.memory_kind is MemoryKind.SWA:
        warm = logits(engine)
        assert np.abs(warm - cold).max() <= 0.05 * (cold.max() - cold.min())
        assert warm.argmax() == cold.argmax()
    else:
        assert np.array_equal(logits(engine), cold)


def test_a_checkpoint_goes_on_with_the_cold_runs_logits(registry, engine):
    assert engine.memory_kind is not MemoryKind.FULL
    engine.evaluate(IDS[:50])
    row = registry.save(engine, IDS[:50]).checkpoint
    assert (row.memory_kind, row.parent_no) == (engine.memory_kind, None)
    engine.evaluate(IDS, n_kept=50)
    cold = logits(engine)
    engine.evaluate(OTHER)
    back = registry.restore(engine, IDS)
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, 50, 0)
    engine.evaluate(IDS, n_kept=50)
    goes_on_as(engine, cold)


@pytest.mark.parametrize(
    "asked", [IDS[:50], IDS[:40], np.append(IDS[:45], OTHER[:10])], ids=["equal", "shorter", "parts"]
)
def test_what_does_not_begin_with_all_of_it_and_go_on_is_no_match_and_leaves_the_engine_alone(registry, engine, asked):
    engine.evaluate(IDS[:50])
    registry.save(engine, IDS[:50])
    engine.evaluate(OTHER)
    back = registry.restore(engine, asked)
    assert back.outcome is Outcome.NO_MATCH
    assert "cannot be truncated" in back.reason
    assert np.array_equal(engine.held_token_ids(), OTHER)


def test_the_same_input_is_saved_once(registry, engine):
    engine.evaluate(IDS[:50])
    assert registry.save(engine, IDS[:50]).outcome is SaveOutcome.SAVED
    assert registry.save(engine, IDS[:50]).outcome is SaveOutcome.DEDUPLICATED


def test_longer_checkpoints_of_it_are_written_whole(registry, engine):
    for n in (30, 50):
        engine.evaluate(IDS[:n])
        assert registry.save(engine, IDS[:n]).checkpoint.parent_no is None


def test_a_warm_of_the_same_input_evaluates_one_token_and_gives_the_cold_runs_logits(registry, engine):
    engine.evaluate(OTHER)
    first = registry.warm(engine, IDS)
    assert (first.n_evaluated, first.save.outcome, first.save.checkpoint.n_tokens) == (60, SaveOutcome.SAVED, 59)
    cold = logits(engine)
    engine.evaluate(OTHER)
    again = registry.warm(engine, IDS)
    assert (again.restore.outcome, again.n_restored, again.n_evaluated) == (Outcome.HIT, 59, 1)
    goes_on_as(engine, cold)


def test_a_model_without_a_vocabulary_takes_token_ids_and_shows_them_and_refuses_a_text(engine):
    assert engine.text_of(IDS[:3]) == " ".join(map(str, IDS[:3]))
    with pytest.raises(BadInput, match="no vocabulary: give token ids"):
        engine.token_ids("some text")


def test_a_real_sliding_window_model_goes_on_from_its_checkpoint(registry, swa_gguf):
    engine = LlamaCppEngine.from_path(swa_gguf, n_ctx=2048, logits_all=True)
    ids = engine.token_ids("The weather station on the hill reports wind from the north-west, and rain. " * 60)[:1000]
    engine.evaluate(ids[:900])
    registry.save(engine, ids[:900])
    engine.evaluate(ids, n_kept=900)
    cold = logits(engine)
    engine.evaluate(ids[::-1].copy())
    assert registry.restore(engine, ids).n_restored == 900
    engine.evaluate(ids, n_kept=900)
    goes_on_as(engine, cold)
