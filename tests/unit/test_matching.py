"""The decision which checkpoint serves an input, and what is said when none does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llama_ckpt.checkpoints.match import CandidateTokens, by_prefix, decide, why_not_same_input
from llama_ckpt.fingerprint import common_prefix, fingerprint, tokens_hash
from llama_ckpt.values import Checkpoint, Divergence, MemoryKind, ModelDimensions, Outcome, RegisteredModel

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


# -- by token ids -------------------------------------------------------------------------------------------------------


def head(name, *ids, ckpt_no=1, kind=MemoryKind.FULL):
    """A row with its token ids."""
    found = dataclasses.replace(row(name, len(ids)), ckpt_no=ckpt_no, memory_kind=kind)
    return found, np.array(ids, dtype=np.int32)


def asked(*ids, among, min_tokens=2, text_of=None):
    given = np.array(ids, dtype=np.int32)
    heads = [CandidateTokens(found, its, common_prefix(given, its)) for found, its in among]
    return by_prefix(INPUT, given, heads, min_tokens, text_of)


def told(found):
    return (found.outcome.value, found.checkpoint and found.checkpoint.id, found.n_matching, found.n_reusable)


@pytest.mark.parametrize(
    ("stored", "n_matching", "n_reusable", "reason"),
    [
        ([1, 2, 3, 4, 5, 6], 4, 3, "a longer checkpoint starts with the complete input"),
        ([1, 2, 3, 4], 4, 3, "the same token ids"),
        ([1, 2, 3], 3, 3, "the input starts with the complete checkpoint"),
        ([1, 2, 3, 9, 9], 3, 3, "input and checkpoint begin with the same 3 tokens"),
    ],
    ids=["longer", "equal", "shorter", "diverging"],
)
def test_a_prefix_spares_what_both_have_and_never_the_last_token(stored, n_matching, n_reusable, reason):
    found = asked(1, 2, 3, 4, among=[head("a", *stored)])
    assert told(found) == ("hit", "a", n_matching, n_reusable)
    assert (found.reason, found.n_tokens, found.nearest) == (reason, 4, None)


def test_the_longest_common_prefix_wins_whatever_the_order():
    heads = [head("short", 1, 2), head("long", 1, 2, 3, 9), head("far", 7, 7, 7)]
    for turn in range(3):
        assert told(asked(1, 2, 3, 4, among=heads[turn:] + heads[:turn]))[:3] == ("hit", "long", 3)


def test_of_equal_prefixes_the_shortest_checkpoint_wins_and_then_the_first_saved():
    heads = [head("late", 1, 2, 3, ckpt_no=9), head("early", 1, 2, 3, ckpt_no=4), head("longer", 1, 2, 3, 8, ckpt_no=1)]
    for turn in range(3):
        assert asked(1, 2, 3, 4, among=heads[turn:] + heads[:turn]).checkpoint.id == "early"


@pytest.mark.parametrize("kind", [MemoryKind.SWA, MemoryKind.RECURRENT, MemoryKind.HYBRID])
def test_memory_that_cannot_be_cut_serves_only_inputs_that_go_on_after_all_of_it(kind):
    assert told(asked(1, 2, 3, 4, among=[head("a", 1, 2, 3, kind=kind)])) == ("hit", "a", 3, 3)
    for stored in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 9]):
        found = asked(1, 2, 3, 4, among=[head("a", *stored, kind=kind)])
        assert (found.outcome, found.nearest.id) == (Outcome.NO_MATCH, "a")
        assert f"of {kind} memory, which cannot be truncated" in found.reason
    both = [head("a", 1, 2, 3, 9, kind=kind), head("b", 1, 2, kind=kind, ckpt_no=2)]
    assert told(asked(1, 2, 3, 4, among=both))[:3] == ("hit", "b", 2), "what cannot be used does not hide what can"


def test_fewer_tokens_than_the_floor_are_no_match_and_the_nearest_is_named():
    found = asked(1, 2, 3, 4, 5, among=[head("near", 1, 2, 3, 9), head("far", 1, 8)], min_tokens=4)
    assert (found.outcome, found.checkpoint, found.nearest.id) == (Outcome.NO_MATCH, None, "near")
    assert (found.n_matching, found.n_reusable) == (3, 0)
    assert found.reason == "the nearest checkpoint begins with 3 tokens of the input; fewer than 4 are no match"
    assert told(asked(1, 2, 3, 4, 5, among=[head("near", 1, 2, 3, 4, 9)], min_tokens=4))[:3] == ("hit", "near", 4)


def test_the_very_same_few_tokens_are_a_match_below_the_floor_and_one_token_never_is():
    assert told(asked(1, 2, 3, among=[head("a", 1, 2, 3)], min_tokens=16)) == ("hit", "a", 3, 2)
    assert asked(1, 2, 3, among=[head("a", 1, 2, 3, 4)], min_tokens=16).outcome is Outcome.NO_MATCH
    for stored in ([1], [1, 2], [1, 9, 9]):
        found = asked(1, among=[head("a", *stored)])
        assert (found.outcome, found.reason[:57]) == (
            Outcome.NO_MATCH,
            "the nearest checkpoint begins with 1 token of the input; ",
        )


def test_nothing_to_compare_with_is_no_match():
    for heads in ([], [head("a", 7, 8, 9)]):
        found = asked(1, 2, among=heads)
        assert (found.outcome, found.reason) == (Outcome.NO_MATCH, "no checkpoint begins like this input")
        assert (found.nearest, found.divergence, found.n_tokens) == (None, None, 2)


def test_a_divergence_is_told_by_its_index_with_the_text_on_both_sides():
    stored = [*range(20), 99, 98]
    found = asked(*range(25), among=[head("a", *stored)], text_of=lambda ids: " ".join(map(str, ids)))
    assert found.divergence == Divergence(
        at=20, before="12 13 14 15 16 17 18 19", in_input="20 21 22 23 24", in_checkpoint="99 98"
    )
    assert asked(*range(25), among=[head("a", *stored)]).divergence == Divergence(at=20), "no tokenizer, no text"
    assert asked(*range(25), among=[head("a", *range(20))]).divergence is None, "the checkpoint ends, it does not part"


@pytest.mark.parametrize("kind", [MemoryKind.SWA, MemoryKind.RECURRENT, MemoryKind.HYBRID])
def test_the_row_of_the_whole_input_serves_it_only_if_it_can_be_truncated_and_is_of_its_tokens(kind):
    ids = np.array([1, 2, 3], dtype=np.int32)
    mine = dataclasses.replace(row("a", 3), memory_kind=MemoryKind.FULL, tokens_hash=tokens_hash(ids))
    assert why_not_same_input(mine, tokens_hash(ids)) is None
    assert why_not_same_input(mine, None) is None
    assert "other token ids" in why_not_same_input(mine, tokens_hash(ids[:2]))
    assert "cannot be truncated" in why_not_same_input(dataclasses.replace(mine, memory_kind=kind), None)
