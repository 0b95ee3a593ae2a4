"""The decision which checkpoint serves an input, and what is said when none does."""

from __future__ import annotations

import dataclasses

import pytest

from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.matching import decide
from llama_ckpt.values import Checkpoint, ModelDimensions, Outcome, RegisteredModel

INPUT = b"\x11" * 32
WANTED = fingerprint({"weights": "ab" * 32, "type_k": "f16", "type_v": "f16", "v_transposed": True})


def row(name: str, n_tokens: int = 10) -> Checkpoint:
    fields = {field.name: None for field in dataclasses.fields(Checkpoint)}
    return Checkpoint(**{**fields, "id": name, "n_tokens": n_tokens})


def under(name: str, **fields) -> tuple[Checkpoint, RegisteredModel]:
    """A row of the same input whose model differs from the wanted one in these fields."""
    found = fingerprint({**WANTED.fields, **fields})
    shape = ModelDimensions(n_layer=1, n_kv_head=1, kv_token_bytes=1)
    return row(name), RegisteredModel(fingerprint=found, model_name=f"model of {name}", dimensions=shape)


def test_an_input_that_was_never_saved_is_no_match():
    found = decide(INPUT, [], [], WANTED)
    assert (found.outcome, found.reason) == (Outcome.NO_MATCH, "no checkpoint of this input is registered")
    assert (found.input_hash, found.checkpoint, found.nearest, found.n_reusable) == (INPUT, None, None, 0)
    assert (found.differences, found.error) == ((), None)


@pytest.mark.parametrize(("n_tokens", "n_reusable"), [(1, 0), (2, 1), (4000, 3999)])
def test_a_hit_spares_all_tokens_but_the_last_which_is_decoded_again(n_tokens, n_reusable):
    best = row("a", n_tokens)
    found = decide(INPUT, [best], [], WANTED)
    assert (found.outcome, found.checkpoint, found.n_reusable) == (Outcome.HIT, best, n_reusable)
    assert (found.input_hash, found.nearest, found.differences) == (INPUT, None, ())
    assert found.reason == "the same input, by SHA-256"


def test_a_row_without_tokens_spares_nothing_and_never_less():
    assert decide(INPUT, [row("a", 0)], [], WANTED).n_reusable == 0


def test_the_first_usable_row_is_taken_and_others_do_not_matter():
    first, second = row("a"), row("b")
    found = decide(INPUT, [first, second], [under("c", type_k="q8_0")], WANTED)
    assert (found.outcome, found.checkpoint, found.nearest) == (Outcome.HIT, first, None)
    assert decide(INPUT, [first], [], None).checkpoint is first


def test_an_input_saved_by_another_model_only_is_no_match_and_says_what_differs():
    found = decide(INPUT, [], [under("a", weights="cd" * 32)], WANTED)
    assert (found.outcome, found.checkpoint, found.nearest.id) == (Outcome.NO_MATCH, None, "a")
    assert found.reason == (
        "this input is registered, but its state does not fit this engine: "
        "weights: saved cdcdcdcdcdcd…, now abababababab…"
    )
    assert [d.field for d in found.differences] == ["weights"]
    assert found.n_reusable == 0


def test_every_field_that_differs_is_named():
    found = decide(INPUT, [], [under("a", type_k="q8_0", type_v="q4_0")], WANTED)
    assert found.reason.endswith("K type: saved q8_0, now f16; V type: saved q4_0, now f16")
    assert len(found.differences) == 2


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_row_with_the_fewest_differences_is_the_nearest_in_whatever_order_they_come(turn):
    others = [
        under("far", weights="cd" * 32, type_k="q8_0", type_v="q8_0"),
        under("near", v_transposed=False),
        under("middle", type_k="q8_0", type_v="q8_0"),
    ]
    found = decide(INPUT, [], others[turn:] + others[:turn], WANTED)
    assert found.nearest.id == "near"
    assert [str(d) for d in found.differences] == ["flash attention (V transposed): saved no, now yes"]


def test_of_rows_that_are_equally_far_the_first_is_the_nearest():
    others = [under("first", type_k="q8_0"), under("second", type_v="q8_0")]
    assert decide(INPUT, [], others, WANTED).nearest.id == "first"


def test_without_a_fingerprint_to_compare_a_model_that_has_the_input_is_named():
    found = decide(INPUT, [], [under("a", weights="cd" * 32), under("b")], None)
    assert (found.outcome, found.nearest.id, found.differences) == (Outcome.NO_MATCH, "a", ())
    assert found.reason == "this input is registered only for other models, such as model of a"
