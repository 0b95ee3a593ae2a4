"""doctor's check of a model, on the real one; and on the same one made to lie in the ways that models do."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest

from llama_ckpt.doctor import model as model_check
from llama_ckpt.doctor.examine import Level, examine
from llama_ckpt.errors import EngineFailed
from llama_ckpt.values import MemoryKind

pytestmark = pytest.mark.llama
PRETENDS = "this model only pretends"


@pytest.fixture
def engine(load):
    """The real model as doctor makes it, holding nothing."""
    made = load(n_ctx=128, logits_all=True)
    made._forget(clear_data=True)
    return made


def forget_all(engine):
    llama_cpp.llama_memory_seq_rm(engine._memory, 0, -1, -1)
    engine.llama.reset()


@pytest.mark.parametrize(
    "options", [{}, {"flash_attn": True}, {"flash_attn": True, "type_k": 8, "type_v": 8}], ids=["f16", "flash", "q8"]
)
def test_a_real_model_continues_from_its_state_bit_for_bit(load, options):
    line = model_check.check_state_reuse(load(n_ctx=128, logits_all=True, **options))
    assert (line.level, line.advice) == (Level.OK, "")
    assert "bit for bit" in line.detail


def test_a_load_that_does_nothing_fails(engine, monkeypatch):
    monkeypatch.setattr(engine, "load", lambda *_: None)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "it holds other tokens" in line.detail
    assert PRETENDS in line.advice


def test_a_state_that_is_taken_and_thrown_away_fails(engine, monkeypatch):
    """The wrapper says that the tokens are there, the last one is decoded at its place, and before it there is nothing."""
    monkeypatch.setattr(engine, "_set_state", lambda *_: forget_all(engine))
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "its logits are off by" in line.detail
    assert PRETENDS in line.advice


def test_a_load_that_leaves_what_was_there_before_fails(engine, monkeypatch):
    """What a load over a live sequence does that is ignored: the other text's cells stay, under the names of ours."""
    monkeypatch.setattr(engine, "_set_state", lambda *_: None)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "its logits are off by" in line.detail


def test_a_last_token_that_is_counted_twice_fails(engine, monkeypatch):
    """As recurrent memory does, which cannot take the last token back before it is decoded again."""

    real = engine.evaluate

    def evaluate(token_ids, *_, n_kept=0):
        if n_kept == 0:
            real(token_ids)
        else:
            engine.llama.eval([int(token_ids[-1])])

    monkeypatch.setattr(engine, "evaluate", evaluate)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "its logits are off by" in line.detail


def test_a_state_that_is_right_for_one_token_only_fails_two_tokens_on(engine, monkeypatch):
    real = engine.evaluate

    def evaluate(token_ids, *_, n_kept=0):
        real(token_ids, n_kept=n_kept)
        if n_kept:
            llama_cpp.llama_memory_seq_rm(engine._memory, 0, 0, 2)  # the first tokens' cells go, the logits stay

    monkeypatch.setattr(engine, "evaluate", evaluate)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "two tokens on" in line.detail


def test_an_engine_that_refuses_its_own_state_fails_with_the_reason(engine, monkeypatch):
    def refuses(*_):
        raise EngineFailed(reason="it took 0 of 100 bytes of state")

    monkeypatch.setattr(engine, "_set_state", refuses)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.FAIL
    assert "it took 0 of 100 bytes" in line.detail
    assert PRETENDS in line.advice


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_logits_that_say_nothing_fail(engine, monkeypatch, value):
    monkeypatch.setattr(model_check, "_next", lambda e: np.full(8, value))
    assert model_check.check_state_reuse(engine).level is Level.FAIL


def test_a_model_whose_states_have_a_layout_not_known_here_is_a_warning(engine, monkeypatch):
    monkeypatch.setattr(engine, "memory_kind", MemoryKind.HYBRID)
    monkeypatch.setattr(engine, "layout", None)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.WARN
    assert "hybrid memory has a layout that is not known here" in line.detail


def test_a_tokenizer_that_makes_too_few_tokens_is_told(engine, monkeypatch):
    monkeypatch.setattr(engine, "token_ids", lambda _: np.arange(3, dtype=np.int32))
    line = model_check.check_state_reuse(engine)
    assert (line.level, "not checked" in line.detail) == (Level.WARN, True)


def test_differences_of_rounding_are_no_failure(engine, monkeypatch):
    real, turns = model_check._next, iter(range(100))

    def rounded(wrapping):
        return real(wrapping) + 1e-3 * (next(turns) % 2)

    monkeypatch.setattr(model_check, "_next", rounded)
    line = model_check.check_state_reuse(engine)
    assert line.level is Level.OK
    assert "within 0.001" in line.detail


def test_examine_loads_tries_and_closes_the_model(gguf, digests, tmp_path):
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    made = []

    def make():
        made.append(LlamaCppEngine.from_path(gguf, digests=digests, n_ctx=64, logits_all=True))
        assert made[0].llama.ctx is not None
        return made[0]

    url = f"sqlite:///{tmp_path}/store/registry.sqlite3"
    found = examine(root=tmp_path / "store", database_url=url, model=make)
    assert found[-1].name == "model reuse"
    assert found[-1].level is Level.OK
    assert found[-1].detail.startswith("SmolLM2-135M-Instruct.Q4_1: ")
    assert made[0].llama.ctx is None
