"""Restoring and merging on the real model: what is loaded continues as the cold run, and what is refused leaves no trace."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
import pytest
from support import samples
from support.planted import as_dialect, payload_of, replant

from llama_ckpt.checkpoints import search
from llama_ckpt.checkpoints.inputs import ResolvedInput
from llama_ckpt.checkpoints.restore import restore_found
from llama_ckpt.errors import BadInput, EngineFailed, EngineStateMismatch, Incompatible
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.values import MatchResult, Outcome, SaveOutcome, StaleReason, Status

pytestmark = pytest.mark.llama

TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning."
F16, FLASH, Q8 = {}, {"flash_attn": True}, {"flash_attn": True, "type_k": 8, "type_v": 8}
KINDS = [pytest.param(F16, id="f16"), pytest.param(FLASH, id="flash"), pytest.param(Q8, id="q8")]


def input_of(engine, n_tokens):
    return engine.token_ids("\n".join(f"Day {i}: {TEXT}" for i in range(10)))[:n_tokens]


def logits(engine):
    pointer = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(engine.llama.n_vocab(),)).copy()


def greedy(engine, token_ids, n=12):
    return list(islice(engine.llama.generate([int(t) for t in token_ids], temp=0.0), n))


def cold(engine, ids):
    """The next logits and tokens of a run from nothing."""
    engine._forget(clear_data=True)
    engine.evaluate(ids)
    return logits(engine), greedy(engine, ids)


def saved_of(registry, engine, ids):
    engine._forget(clear_data=True)
    engine.evaluate(ids)
    return registry.save(engine, ids).checkpoint


def held_and_next(engine):
    return engine.held_token_ids().tolist(), logits(engine).tolist()


def matched(row, n_matching):
    """The answer that names this row."""
    return MatchResult(outcome=Outcome.HIT, reason="planted", input_hash=b"", checkpoint=row, n_matching=n_matching)


@pytest.fixture
def find_always(monkeypatch):
    """Lets every search find the same."""
    return lambda match: monkeypatch.setattr(search, "find", lambda *_: match)


# -- a checkpoint that is longer, shorter, or goes on otherwise ------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 33, 60])
def test_the_beginning_of_a_longer_checkpoint_continues_as_the_cold_run(load, registry, options, n):
    engine = load(**options)
    ids = input_of(engine, 60)
    _, expected = cold(engine, ids[:n])
    row = saved_of(registry, engine, ids)
    engine._forget(clear_data=True)
    back = restore_found(registry.context, engine, ResolvedInput(ids[:n]), matched(row, n))
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, n - 1, 1)
    assert engine.held_token_ids().tolist() == ids[:n].tolist()
    assert greedy(engine, ids[:n]) == expected


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 33, 59])
def test_warm_evaluates_only_what_a_shorter_checkpoint_lacks_and_continues_as_the_cold_run(
    load, registry, options, n, find_always
):
    engine = load(**options)
    ids = input_of(engine, 60)
    _, expected = cold(engine, ids)
    row = saved_of(registry, engine, ids[:n])
    engine._forget(clear_data=True)
    find_always(matched(row, n))
    back = registry.restore(engine, ids)
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, n, 0)
    assert engine.held_token_ids().tolist() == ids[:n].tolist()
    engine._forget(clear_data=True)
    told = []
    warmed = registry.warm(engine, ids, progress=lambda done, total: told.append((done, total)))
    assert (warmed.n_restored, warmed.n_evaluated, warmed.save.outcome) == (n, 60 - n, SaveOutcome.SAVED)
    assert told[-1] == (60, 60)
    assert greedy(engine, ids) == expected
    assert registry.get(row.id).status is Status.ACTIVE


def test_a_checkpoint_that_goes_on_otherwise_gives_its_common_beginning(engine, registry, find_always):
    ids = input_of(engine, 60)
    other = ids.copy()
    other[20:] = ids[19:59]
    _, expected = cold(engine, ids)
    row = saved_of(registry, engine, other)
    engine._forget(clear_data=True)
    find_always(matched(row, 20))
    warmed = registry.warm(engine, ids)
    assert (warmed.n_restored, warmed.n_evaluated) == (20, 40)
    assert greedy(engine, ids) == expected


def test_a_match_of_more_tokens_than_are_alike_is_found_out_by_the_token_ids(engine, registry):
    ids = input_of(engine, 60)
    other = ids.copy()
    other[20:] = ids[19:59]
    row = saved_of(registry, engine, other)
    before = held_and_next(engine)
    back = restore_found(registry.context, engine, ResolvedInput(ids), matched(row, 21))
    assert back.outcome is Outcome.NO_MATCH
    assert "other tokens from token 20 on" in back.reason
    assert held_and_next(engine) == before
    assert registry.get(row.id).status is Status.ACTIVE


# -- load and evaluate -----------------------------------------------------------------------------------------------------


def test_a_loaded_state_has_no_logits_and_a_completion_evaluates_one_token(load, monkeypatch):
    engine = load(logits_all=True)
    ids = input_of(engine, 30)
    _, expected = cold(engine, ids)
    engine.llama.n_tokens = 30
    state = engine.capture()
    engine._forget(clear_data=True)
    engine.load(state, ids)
    assert engine.held_token_ids().tolist() == ids.tolist()
    assert np.isnan(engine.llama.scores[:30]).all()
    evaluated, real = [], engine.llama.eval
    monkeypatch.setattr(engine.llama, "eval", lambda tokens: evaluated.append(len(tokens)) or real(tokens))
    assert greedy(engine, ids) == expected
    assert evaluated[0] == 1


def test_what_is_kept_is_not_evaluated_again_and_the_rest_goes(engine, monkeypatch):
    ids = input_of(engine, 40)
    _, expected = cold(engine, ids)
    engine.evaluate(np.concatenate([ids[:25], ids[:10]]))
    evaluated, real = [], engine.llama.eval
    monkeypatch.setattr(engine.llama, "eval", lambda tokens: evaluated.extend(tokens) or real(tokens))
    engine.evaluate(ids, n_kept=25)
    assert evaluated == ids[25:].tolist()
    assert engine.held_token_ids().tolist() == ids.tolist()
    monkeypatch.undo()
    assert greedy(engine, ids) == expected


@pytest.mark.parametrize("n_kept", [-1, 21, 40])
def test_more_than_is_held_or_all_of_the_input_cannot_be_kept(engine, n_kept):
    ids = input_of(engine, 40)
    engine.evaluate(ids[:20])
    before = held_and_next(engine)
    with pytest.raises(EngineStateMismatch, match=f"{n_kept} tokens of 40 cannot be kept where it holds 20"):
        engine.evaluate(ids, n_kept=n_kept)
    assert held_and_next(engine) == before


def test_other_tokens_than_are_held_cannot_be_kept(engine):
    ids = input_of(engine, 40)
    engine.evaluate(ids[:20])
    before = held_and_next(engine)
    with pytest.raises(EngineStateMismatch, match="differ from token 0 on"):
        engine.evaluate(ids[::-1].copy(), n_kept=20)
    assert held_and_next(engine) == before


@pytest.mark.parametrize("n_kept", [0, 20])
def test_an_evaluation_that_fails_half_way_leaves_nothing(engine, n_kept, monkeypatch):
    ids = input_of(engine, 40)
    engine.evaluate(ids[:20])
    with monkeypatch.context() as patch:
        patch.setattr(engine.llama, "eval", lambda _: (_ for _ in ()).throw(RuntimeError("llama_decode returned -3")))
        with pytest.raises(EngineFailed, match="returned -3"):
            engine.evaluate(ids, n_kept=n_kept)
    assert engine.held_token_ids().tolist() == []
    assert llama_cpp.llama_memory_seq_pos_max(engine._memory, 0) == -1


def test_a_memory_that_cannot_be_cut_fails_and_leaves_nothing(engine, monkeypatch):
    ids = input_of(engine, 40)
    engine.evaluate(ids)
    real = llama_cpp.llama_memory_seq_rm
    monkeypatch.setattr(
        llama_cpp, "llama_memory_seq_rm", lambda m, s, start, end: start <= 0 and real(m, s, start, end)
    )
    with pytest.raises(EngineFailed, match="cannot be truncated after 39 tokens"):
        engine.evaluate(ids, n_kept=39)
    assert engine.held_token_ids().tolist() == []


def test_a_state_of_more_tokens_than_the_context_has_cells_is_refused_by_number(load):
    engine = load(n_ctx=256)
    with pytest.raises(BadInput, match=r"300 tokens.*the context has 256"):
        engine.load(memoryview(b""), np.zeros(300, dtype=np.int32))


# -- dialects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("dialect", [Dialect(0), Dialect(1, True), Dialect(3, True)], ids=str)
def test_a_checkpoint_of_another_llama_cpp_is_translated_and_continues_bit_for_bit(
    load, registry, counters, options, dialect
):
    engine = load(**options)
    ids = input_of(engine, 40)
    expected, following = cold(engine, ids)
    row = saved_of(registry, engine, ids)
    replant(registry, row, as_dialect(payload_of(registry, row), dialect, (64, 64) if options is Q8 else None))
    engine._forget(clear_data=True)
    back = registry.restore(engine, ids)
    assert (back.outcome, back.reason) == (Outcome.HIT, "restored")
    assert np.abs(logits(engine) - expected).max() == 0.0
    assert greedy(engine, ids) == following
    assert counters["state_translated"] == 1
    assert registry.stats().events == {"state_translated": 1}


def test_a_state_that_an_older_release_recorded_is_restored_with_the_logits_of_a_fresh_run(engine, registry):
    ids, state = samples.read(samples.V2)  # by llama-cpp-python 0.3.26
    expected, following = cold(engine, ids)
    row = saved_of(registry, engine, ids)
    replant(registry, row, state, engine="llama-cpp-python 0.3.26")
    engine._forget(clear_data=True)
    assert registry.restore(engine, ids).outcome is Outcome.HIT
    assert np.abs(logits(engine) - expected).max() == 0.0
    assert greedy(engine, ids) == following
    assert registry.stats().events == {"other_version_met": 1}


@pytest.mark.parametrize(
    ("options", "dialect", "rotation", "words"),
    [
        (Q8, Dialect(1, True), (0, 0), "rotated by (0, 0) in the state, by (64, 64) in the engine"),
        (F16, Dialect(1, False, 12), None, "its cells have 12 bytes more, the engine's 0"),
    ],
    ids=["rotation", "extension"],
)
def test_a_state_that_cannot_be_translated_is_no_match_and_leaves_engine_and_row(
    load, registry, options, dialect, rotation, words
):
    engine = load(**options)
    ids, live = input_of(engine, 40), input_of(engine, 12)
    _, baseline = cold(engine, live)
    row = saved_of(registry, engine, ids)
    replant(registry, row, as_dialect(payload_of(registry, row), dialect, rotation))
    engine.evaluate(live)
    before = held_and_next(engine)
    back = registry.restore(engine, ids)
    assert back.outcome is Outcome.NO_MATCH
    assert words in back.reason
    assert held_and_next(engine) == before
    assert registry.get(row.id).status is Status.ACTIVE
    assert cold(engine, live)[1] == baseline


def test_the_rotation_is_told_where_there_is_no_doubt(load, monkeypatch):
    assert load(**Q8).rotation == (64, 64), "heads of 64 leave one size"
    from llama_ckpt.engine import identity

    engine = load(**Q8)
    probe = kv_state.parse(memoryview(samples.read(samples.Q8_FLASH)[1]))
    metadata = {**engine.llama.metadata, "llama.attention.key_length": "128"}
    monkeypatch.setattr(engine.llama, "metadata", metadata)
    assert identity.rotation_of(engine.llama, probe, rotates=True) is None, "64 or 128"
    assert identity.rotation_of(engine.llama, probe, rotates=False) == (0, 0)
    metadata["llama.attention.key_length"] = "80"
    assert identity.rotation_of(engine.llama, probe, rotates=True) == (0, 64), "no matrix divides 80"
    told = kv_state.parse(memoryview(samples.read(samples.V4_ROTATED)[1]))
    assert identity.rotation_of(engine.llama, told, rotates=True) == (64, 64)


# -- layers ----------------------------------------------------------------------------------------------------------------


def rows_of(state, layers, n_cells):
    """K and V of layers as `[cell, byte]`, without the last cell; for states without transposed V."""
    found = kv_state.parse(state)
    rows = [part[layer] for layer in layers for part in (found.k, found.v)]
    return [
        np.frombuffer(state, np.uint8, n_cells * r.row_bytes, r.offset).reshape(n_cells, -1)[:-1].tobytes()
        for r in rows
    ]


def test_chosen_layers_are_loaded_into_the_live_state_and_the_rest_stays(load, registry):
    engine = load(**FLASH)
    ids = input_of(engine, 40)
    expected, following = cold(engine, ids)
    row = saved_of(registry, engine, ids)
    whole = memoryview(payload_of(registry, row))
    engine.evaluate(input_of(engine, 41)[1:])
    foreign = memoryview(bytes(engine.capture()))
    engine.load(kv_edit.replace_layers(whole, foreign, range(12)), ids)
    back = registry.restore(engine, ids, layers=range(12, 30))
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, 39, 1)
    mixed = engine.capture()
    assert rows_of(mixed, range(12), 40) == rows_of(foreign, range(12), 40)
    assert rows_of(mixed, range(12, 30), 40) == rows_of(whole, range(12, 30), 40)
    assert not np.array_equal(logits(engine), expected)
    assert registry.restore(engine, ids, layers=range(0, 12)).outcome is Outcome.HIT
    assert np.array_equal(logits(engine), expected)
    assert greedy(engine, ids) == following


def test_layers_are_not_put_into_the_state_of_other_tokens(engine, registry):
    ids = input_of(engine, 40)
    row = saved_of(registry, engine, ids)
    for live in (ids[:39], input_of(engine, 41)[1:]):
        engine.evaluate(live)
        before = held_and_next(engine)
        back = registry.restore(engine, ids, layers=range(12))
        assert back.outcome is Outcome.NO_MATCH
        assert "layers are put into a state of exactly the input's 40 tokens" in back.reason
        assert held_and_next(engine) == before
    assert registry.get(row.id).hit_count == 0


def test_layers_of_a_shorter_checkpoint_do_not_fit_a_longer_state(engine, registry, find_always):
    ids = input_of(engine, 40)
    row = saved_of(registry, engine, ids[:30])
    engine.evaluate(ids)
    before = held_and_next(engine)
    find_always(matched(row, 30))
    back = registry.restore(engine, ids, layers=[0])
    assert back.outcome is Outcome.NO_MATCH
    assert "positions 0 to 39 (40 cells) here, 0 to 29" in back.reason
    assert held_and_next(engine) == before


@pytest.mark.parametrize("layers", [range(28, 31), [-1], []], ids=["31 of 30", "negative", "none"])
def test_a_layer_that_is_not_there_is_refused_with_the_models_count(engine, registry, layers):
    with pytest.raises(BadInput, match="the model has 30: name some of 0 to 29"):
        registry.restore(engine, [1, 2, 3], layers=layers)


# -- values and modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [pytest.param(F16, id="f16"), pytest.param(FLASH, id="flash")])
def test_a_value_that_is_no_number_is_found_before_the_engine_when_asked_for(load, registry, options):
    engine = load(**options)
    ids, live = input_of(engine, 40), input_of(engine, 12)
    _, baseline = cold(engine, live)
    row = saved_of(registry, engine, ids)
    broken = bytearray(payload_of(registry, row))
    rows = kv_state.parse(memoryview(bytes(broken))).k[3]
    at = rows.offset + 7 * rows.row_bytes
    broken[at : at + 2] = b"\xff\xff"
    replant(registry, row, broken)
    engine.evaluate(live)
    before = held_and_next(engine)
    back = registry.restore(engine, ids, check_values=True)
    assert back.outcome is Outcome.NO_MATCH
    assert "Values FAILED: K of layer 3, cell 7 is no finite number" in back.reason
    assert registry.get(row.id).stale_reason is StaleReason.CORRUPT
    assert held_and_next(engine) == before
    assert cold(engine, live)[1] == baseline
    assert saved_of(registry, engine, ids).id != row.id
    assert registry.restore(engine, ids, check_values=True).outcome is Outcome.HIT


@pytest.mark.parametrize(("writer", "reader"), [(FLASH, F16), (F16, FLASH)], ids=["to plain", "to flash"])
def test_a_checkpoint_of_the_other_attention_mode_is_taken_when_asked_for(load, registry, writer, reader):
    ids = input_of(load(**writer), 60)
    row = saved_of(registry, load(**writer), ids)
    engine = load(**reader)
    expected, _ = cold(engine, ids)
    assert registry.restore(engine, ids).outcome is Outcome.NO_MATCH
    engine._forget(clear_data=True)
    back = registry.restore(engine, ids, transpose_v=True)
    assert (back.outcome, back.checkpoint.id, back.n_restored) == (Outcome.HIT, row.id, 59)
    assert logits(engine).argmax() == expected.argmax()
    assert not np.array_equal(logits(engine), expected), "the modes round alike here: then the warning is idle"
    assert len(greedy(engine, ids)) == 12
    own = saved_of(registry, engine, ids)
    assert registry.restore(engine, ids, transpose_v=True).checkpoint.id == own.id, "its own goes first"


def test_a_checkpoint_that_differs_in_more_than_the_attention_mode_is_not_turned(load, registry):
    engine = load(**F16)
    ids = input_of(engine, 20)
    saved_of(registry, load(**Q8), ids)
    back = registry.restore(engine, ids, transpose_v=True)
    assert back.outcome is Outcome.NO_MATCH
    assert "K type: saved q8_0, now f16" in back.reason


def test_an_engine_that_refuses_a_state_gives_the_next_prompt_its_tokens_all_the_same(engine, registry, monkeypatch):
    ids, live = input_of(engine, 40), input_of(engine, 12)
    _, baseline = cold(engine, live)
    saved_of(registry, engine, ids)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *_: 0)
        assert registry.restore(engine, ids).outcome is Outcome.FAILED
    assert engine.held_token_ids().tolist() == []
    engine.evaluate(live)
    assert greedy(engine, live) == baseline


# -- merge -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("n_held", [1, 25, 59])
def test_a_stored_continuation_is_appended_without_computing_it(load, registry, options, n_held, monkeypatch):
    engine = load(**options)
    ids = input_of(engine, 60)
    _, expected = cold(engine, ids)
    engine._forget(clear_data=True)
    engine.evaluate(ids[:n_held])
    engine.evaluate(ids, n_kept=n_held)
    as_it_went_on = logits(engine)
    row = registry.save(engine, ids).checkpoint
    engine._forget(clear_data=True)
    engine.evaluate(ids[:n_held])
    evaluated, real = [], engine.llama.eval
    with monkeypatch.context() as patch:
        patch.setattr(engine.llama, "eval", lambda tokens: evaluated.extend(tokens) or real(tokens))
        merged = registry.merge(engine, row.id)
    assert (merged.n_merged, merged.n_held, merged.checkpoint.id) == (60 - n_held, 60, row.id)
    assert evaluated == ids[59:].tolist(), "the last token again, for its logits"
    assert engine.held_token_ids().tolist() == ids.tolist()
    assert np.array_equal(logits(engine), as_it_went_on)
    assert greedy(engine, ids) == expected
    assert registry.get(row.id).hit_count == 1


def test_a_merge_that_does_not_fit_is_refused_with_the_reason_and_leaves_the_engine(engine, registry):
    ids = input_of(engine, 40)
    row = saved_of(registry, engine, ids)
    other = ids[:20].copy()
    other[7] += 1
    for live, kind, words in (
        (other, Incompatible, "other tokens from token 7 on"),
        (ids, Incompatible, "ends after 40 tokens, the engine holds 40: there is nothing to append"),
    ):
        engine.evaluate(live)
        before = held_and_next(engine)
        with pytest.raises(kind, match=words):
            registry.merge(engine, row)
        assert held_and_next(engine) == before
    engine._forget(clear_data=True)
    with pytest.raises(EngineStateMismatch, match="it holds nothing to append to"):
        registry.merge(engine, row)
    assert (registry.get(row.id).status, registry.get(row.id).hit_count) == (Status.ACTIVE, 0)


def test_a_merge_translates_what_another_llama_cpp_wrote(engine, registry):
    ids = input_of(engine, 40)
    row = saved_of(registry, engine, ids)
    expected = logits(engine)
    replant(registry, row, as_dialect(payload_of(registry, row), Dialect(2, True), None))
    engine.llama.n_tokens = 30
    assert registry.merge(engine, registry.get(row.id)).n_merged == 10
    assert np.array_equal(logits(engine), expected)
    assert registry.stats().events == {"state_translated": 1}
