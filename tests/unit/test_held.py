"""Which held cells are kept for an input, and what is known of an input before anything is asked."""

from __future__ import annotations

import numpy as np
import pytest
from support.causal_engine import CausalEngine, state_of

from llama_ckpt.checkpoints.inputs import ResolvedInput
from llama_ckpt.engine.held import PrefixView, n_reusable
from llama_ckpt.errors import BadInput, Unsupported
from llama_ckpt.fingerprint import common_prefix, hash_input, tokens_hash
from llama_ckpt.values import MemoryKind


def ids(*values):
    return np.array(values, dtype=np.int32)


def holding(*values, kind=MemoryKind.FULL):
    engine = CausalEngine()
    engine.memory_kind = kind
    if values:
        engine.evaluate(ids(*values))
    return engine


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ((), (1, 2, 3, 4), 0),
        ((1, 2, 3), (1, 2, 3, 4), 3),
        ((1, 2, 3, 9), (1, 2, 3, 4), 3),
        ((1, 2, 3, 4), (1, 2, 3, 4), 3),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), 3),
        ((1, 2, 9), (1, 2, 3, 4), 0),
        ((1, 2), (1, 2), 1),
        ((1,), (1,), 0),
        ((9,), (1, 2, 3, 4), 0),
    ],
    ids=["nothing", "prefix", "other end", "same", "longer", "too few", "same but short", "one token", "other"],
)
def test_held_cells_are_kept_up_to_the_last_but_one_token_if_they_are_enough_or_exactly_the_input(
    held, wanted, expected
):
    assert n_reusable(holding(*held), ids(*wanted), min_tokens=3) == expected


@pytest.mark.parametrize("kind", [MemoryKind.SWA, MemoryKind.RECURRENT, MemoryKind.HYBRID])
def test_memory_that_cannot_be_cut_is_kept_only_if_the_input_continues_it(kind):
    engine = holding(1, 2, 3, kind=kind)
    assert n_reusable(engine, ids(1, 2, 3, 4), min_tokens=3) == 3
    assert n_reusable(engine, ids(1, 2, 3), min_tokens=3) == 0
    assert n_reusable(engine, ids(1, 2, 9, 4), min_tokens=2) == 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((), (), 0), ((1,), (), 0), ((1, 2), (1, 2), 2), ((1, 2), (1, 3), 1), ((1, 2, 3), (1, 2), 2), ((5,), (6,), 0)],
)
def test_the_common_prefix_ends_at_the_first_token_that_differs(one, other, expected):
    assert common_prefix(ids(*one), ids(*other)) == expected


# -- a prefix of what an engine holds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("n_tokens", [2, 3])
def test_a_prefix_has_the_state_that_the_engine_would_give_if_it_held_no_more(copy, n_tokens):
    engine = holding(1, 2, 3)
    view = PrefixView(engine, n_tokens, copy=copy)
    assert view.held_token_ids().tolist() == [1, 2, 3][:n_tokens]
    assert bytes(view.capture()) == state_of([1, 2, 3][:n_tokens])
    assert engine.held.tolist() == [1, 2, 3]


def test_a_copy_stays_when_the_engine_goes_on():
    engine = holding(1, 2, 3)
    copied = PrefixView(engine, 3, copy=True)
    engine.evaluate(ids(7, 8))
    assert copied.held_token_ids().tolist() == [1, 2, 3]
    assert bytes(copied.capture()) == state_of([1, 2, 3])


def test_memory_that_cannot_be_cut_has_no_prefix():
    engine = holding(1, 2, 3, kind=MemoryKind.RECURRENT)
    assert bytes(PrefixView(engine, 3).capture()) == state_of([1, 2, 3])
    with pytest.raises(Unsupported, match="it cannot be truncated"):
        PrefixView(engine, 2).capture()
    with pytest.raises(Unsupported, match="it cannot be truncated"):
        PrefixView(engine, 2, copy=True)


# -- an input ---------------------------------------------------------------------------------------------------------------


def test_a_text_is_not_tokenised_before_its_token_ids_are_asked_for():
    asked = []

    class Tokenizer(CausalEngine):
        def token_ids(self, text):
            asked.append(text)
            return super().token_ids(text)

    prompt = ResolvedInput("1 2 3", Tokenizer())
    assert (prompt.input_hash, prompt.required_tokens_hash, asked) == (hash_input("1 2 3"), None, [])
    assert (prompt.has_token_ids, prompt.is_tokenized) == (True, False)
    assert prompt.token_ids.tolist() == prompt.token_ids.tolist() == [1, 2, 3]
    assert (prompt.tokens_hash, prompt.is_tokenized, asked) == (tokens_hash(ids(1, 2, 3)), True, ["1 2 3"])


def test_the_hash_of_token_ids_is_also_that_of_the_input_and_has_to_be_proved():
    prompt = ResolvedInput([1, 2, 3])
    assert prompt.input_hash == prompt.tokens_hash == prompt.required_tokens_hash == hash_input([1, 2, 3])


def test_a_text_whose_bytes_may_be_token_ids_has_to_be_proved_if_it_can_be_tokenised():
    class Tokenizer(CausalEngine):
        def token_ids(self, text):
            return ids(5, 6)

    assert ResolvedInput("a\0b", Tokenizer()).required_tokens_hash == tokens_hash(ids(5, 6))
    assert ResolvedInput("a\0b").required_tokens_hash is None


def test_token_ids_that_are_given_with_a_text_are_taken():
    prompt = ResolvedInput("1 2 3", token_ids=[7, 8])
    assert prompt.token_ids.tolist() == [7, 8]
    assert prompt.required_tokens_hash == tokens_hash(ids(7, 8))
    assert prompt.input_hash == hash_input("1 2 3")


@pytest.mark.parametrize("bad", ["", [], [-1], None, b"bytes", [[1]]], ids=repr)
def test_a_bad_input_is_refused_when_it_is_resolved_and_not_before(bad):
    prompt = ResolvedInput(bad, CausalEngine())
    with pytest.raises(BadInput):
        prompt.resolve()


def test_a_text_without_a_tokenizer_has_no_token_ids():
    prompt = ResolvedInput("1 2")
    assert not prompt.has_token_ids
    with pytest.raises(BadInput, match="it needs a tokenizer"):
        _ = prompt.token_ids
