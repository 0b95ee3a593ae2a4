from __future__ import annotations

import ctypes
import shutil
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from support import samples

from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.errors import BadInput, EngineFailed, Unsupported
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import MemoryKind, Outcome, SaveOutcome, StaleReason

pytestmark = pytest.mark.llama

TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning."


def greedy(engine, token_ids, n=12):
    """The next tokens by the Llama's own generation, which reuses what it holds."""
    return list(islice(engine.llama.generate([int(t) for t in token_ids], temp=0.0), n))


def next_logits(engine):
    n_vocab = engine.llama.n_vocab()
    pointer = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(n_vocab,)).copy()


def positions(engine):
    memory = llama_cpp.llama_get_memory(engine.llama.ctx)
    return llama_cpp.llama_memory_seq_pos_min(memory, 0), llama_cpp.llama_memory_seq_pos_max(memory, 0)


def cold_run(engine, token_ids):
    """Next logits and greedy tokens of a Llama that evaluates everything itself, as without this library."""
    engine._forget(clear_data=True)
    engine.llama.eval([int(t) for t in token_ids])
    logits = next_logits(engine)
    return logits, greedy(engine, token_ids)


def input_of(engine, n_tokens):
    """A text's first `n_tokens` token ids."""
    ids = engine.token_ids("\n".join(f"Day {i}: {TEXT}" for i in range(30)))
    return ids[:n_tokens]


@pytest.mark.parametrize(
    "options", [{}, {"flash_attn": True}, {"flash_attn": True, "type_k": 8, "type_v": 8}], ids=["f16", "flash", "q8"]
)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 300])
def test_a_restored_input_continues_greedily_as_the_cold_run(load, registry, options, n_tokens):
    engine = load(**options)
    ids = input_of(engine, n_tokens)
    _, expected = cold_run(engine, ids)
    engine._forget(clear_data=True)
    cold = registry.warm(engine, ids)
    assert (cold.n_evaluated, cold.save.outcome) == (n_tokens, SaveOutcome.SAVED)
    logits_of_warm = next_logits(engine)
    assert greedy(engine, ids) == expected
    engine._forget(clear_data=True)
    back = registry.restore(engine, ids)
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, n_tokens - 1, 1)
    assert engine.llama.n_tokens == n_tokens
    assert engine.llama.input_ids[:n_tokens].tolist() == ids.tolist()
    assert positions(engine) == (0, n_tokens - 1)
    assert np.array_equal(next_logits(engine), logits_of_warm), "cold and restored warm differ"
    assert greedy(engine, ids) == expected


def test_restoring_what_the_engine_already_holds_changes_nothing(engine, registry):
    ids = input_of(engine, 40)
    registry.warm(engine, ids)
    before = next_logits(engine)
    assert registry.restore(engine, ids).outcome is Outcome.HIT
    assert np.array_equal(next_logits(engine), before)


def test_what_is_saved_is_the_engines_own_state_byte_for_byte(engine, registry):
    ids = input_of(engine, 40)
    row = registry.warm(engine, ids).save.checkpoint
    with registry.store.map(row.file_path) as view:
        assert bytes(view[-len(engine.capture()) :]) == bytes(engine.capture())
    assert row.file_size <= len(engine.capture()) + 4096


def test_a_completion_reuses_the_restored_prefix_and_decodes_nothing_of_it_again(engine, registry, monkeypatch):
    registry.warm(engine, TEXT)
    engine._forget(clear_data=True)
    registry.restore(engine, TEXT)
    evaluated = []
    real = engine.llama.eval
    monkeypatch.setattr(engine.llama, "eval", lambda tokens: evaluated.append(len(tokens)) or real(tokens))
    engine.llama(TEXT, max_tokens=4, temperature=0)
    assert sum(evaluated) <= 4
    evaluated.clear()
    extended = TEXT + " Tomorrow it will be"
    engine.llama(extended, max_tokens=1, temperature=0)
    n_new = len(engine.token_ids(extended)) - len(engine.token_ids(TEXT))
    assert sum(evaluated) <= n_new + 1


def test_seed_and_sampler_are_untouched(engine, registry):
    engine.llama.set_seed(1234)
    sampler = engine.llama._sampler
    registry.warm(engine, TEXT)
    registry.restore(engine, TEXT)
    assert engine.llama._seed == 1234
    assert engine.llama._sampler is sampler


def test_two_states_restored_in_turn_each_continue_as_fresh(engine, registry):
    a, b = input_of(engine, 50), engine.token_ids(TEXT)
    expected = {len(ids): cold_run(engine, ids)[1] for ids in (a, b)}
    registry.warm(engine, a)
    registry.warm(engine, b)
    for ids in (a, a, b, a):
        assert registry.restore(engine, ids).outcome is Outcome.HIT
        assert greedy(engine, ids) == expected[len(ids)]


def test_another_context_size_batch_and_thread_count_hit(load, registry):
    registry.warm(load(), TEXT)
    other = load(n_ctx=1024, n_batch=64, n_threads=1)
    assert other.fingerprint == load().fingerprint
    assert registry.restore(other, TEXT).outcome is Outcome.HIT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flash_attn": True}, "flash attention (V transposed): saved yes, now no"),
        ({"type_k": 8}, "K type: saved f16, now q8_0"),
        ({"rope_freq_base": 20000.0}, "rope_freq_base: saved not set, now 20000.0"),
        ({"rope_freq_scale": 0.5}, "rope_freq_scale: saved not set, now 0.5"),
        ({"yarn_orig_ctx": 256}, "yarn_orig_ctx: saved not set, now 256"),
    ],
)
def test_a_setting_that_changes_kv_bytes_gives_no_match_and_is_named(load, registry, options, words):
    registry.warm(load(), TEXT)
    other = load(**options)
    held = positions(other)
    back = registry.restore(other, TEXT)
    assert back.outcome is Outcome.NO_MATCH
    assert words in back.reason
    assert positions(other) == held


def test_other_weights_of_the_same_shape_give_no_match_and_the_same_under_another_name_hit(
    load, registry, gguf, tmp_path
):
    registry.warm(load(), TEXT)
    renamed, changed = tmp_path / "renamed.gguf", tmp_path / "changed.gguf"
    shutil.copyfile(gguf, renamed)
    assert registry.restore(load(renamed), TEXT).outcome is Outcome.HIT
    data = bytearray(gguf.read_bytes())
    data[-1000] ^= 0x01
    changed.write_bytes(data)
    back = registry.restore(load(changed), TEXT)
    assert back.outcome is Outcome.NO_MATCH
    assert "weights: saved b179c9523d0e…, now" in back.reason


def test_rotation_of_a_quantised_cache_is_part_of_the_identity(load, gguf, digests, monkeypatch):
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    rotated = load(flash_attn=True, type_k=8, type_v=8)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    plain = LlamaCppEngine.from_path(gguf, digests=digests, n_ctx=512, flash_attn=True, type_k=8, type_v=8)
    f16 = LlamaCppEngine.from_path(gguf, digests=digests, n_ctx=512)
    assert rotated.fingerprint.fields["kv_rotation"] == "hadamard"
    assert "kv_rotation" not in plain.fingerprint.fields
    assert f16.fingerprint == load().fingerprint
    different = [bytes(e.capture()) for e in (rotated, plain) if e.evaluate(input_of(e, 3)) is None]
    assert different[0] != different[1], "the engine rotates nothing: then the field is idle"


def test_wrapping_a_llama_that_holds_a_conversation_leaves_it_alone(load, digests):
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    engine = load()
    ids = input_of(engine, 20)
    engine.evaluate(ids)
    before = next_logits(engine)
    wrapped = LlamaCppEngine(engine.llama, digests=digests)
    assert wrapped.fingerprint == engine.fingerprint
    assert wrapped.held_token_ids().tolist() == ids.tolist()
    assert positions(engine) == (0, 19)
    assert np.array_equal(next_logits(engine), before)


def test_what_a_model_is_is_known_after_wrapping(engine):
    assert (engine.dimensions.n_layer, engine.dimensions.n_kv_head, engine.dimensions.kv_token_bytes) == (30, 3, 23040)
    assert engine.memory_kind is MemoryKind.FULL
    assert engine.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert str(engine.layout) == "streams=1 rotation_words=0"
    assert engine.rotation == (0, 0)


def test_a_state_recorded_by_an_older_engine_continues_as_a_fresh_one(engine):
    ids, state = samples.read(samples.V2)  # llama-cpp-python 0.3.26
    logits, expected = cold_run(engine, ids)
    engine.load(memoryview(state), ids)
    engine.evaluate(ids, n_kept=len(ids) - 1)
    assert np.abs(next_logits(engine) - logits).max() < 1e-3
    assert greedy(engine, ids) == expected


def test_a_damaged_file_leaves_the_live_sequence_as_it_was(engine, registry):
    row = registry.warm(engine, TEXT).save.checkpoint
    live = input_of(engine, 25)
    engine.evaluate(live)
    before = next_logits(engine)
    path = registry.store.root / row.file_path
    path.write_bytes(path.read_bytes()[:-1])
    back = registry.restore(engine, TEXT)
    assert back.outcome is Outcome.NO_MATCH
    assert registry.get(row.id).stale_reason is StaleReason.CORRUPT
    assert engine.held_token_ids().tolist() == live.tolist()
    assert positions(engine) == (0, 24)
    assert np.array_equal(next_logits(engine), before)


def test_a_checkpoint_longer_than_the_context_leaves_the_live_sequence_as_it_was(load, registry):
    big, small = load(), load(n_ctx=256)
    ids = input_of(big, 300)
    registry.warm(big, ids)
    small.evaluate(input_of(small, 10))
    back = registry.restore(small, ids)
    assert back.outcome is Outcome.NO_MATCH
    assert "300 cells, the context 256" in back.reason
    assert positions(small) == (0, 9)
    with pytest.raises(BadInput, match="300 tokens"):
        registry.warm(small, ids)
    assert positions(small) == (0, 9)


def test_a_context_that_llama_cpp_rounds_up_holds_no_more_than_the_wrapper_has_room_for(load, registry):
    big, small = load(), load(n_ctx=100)
    ids = input_of(big, 151)
    registry.warm(big, ids)
    small.evaluate(input_of(small, 3))
    back = registry.restore(small, ids)
    assert back.outcome is Outcome.NO_MATCH
    assert "151 cells, the context 100" in back.reason
    assert positions(small) == (0, 2)
    with pytest.raises(BadInput, match="the context has 100"):
        registry.warm(small, ids)


def test_a_model_file_that_is_replaced_while_it_is_loaded_is_refused(gguf, digests, tmp_path, monkeypatch):
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    path = tmp_path / "model.gguf"
    shutil.copyfile(gguf, path)
    real = llama_cpp.Llama

    def slow(*args, **options):
        made = real(*args, **options)
        other = tmp_path / "other.gguf"
        shutil.copyfile(gguf, other)
        other.replace(path)
        return made

    monkeypatch.setattr(llama_cpp, "Llama", slow)
    with pytest.raises(BadInput, match="changed while it was loaded"):
        LlamaCppEngine.from_path(path, digests=digests, n_ctx=64)


@pytest.mark.parametrize("fault", ["short", "foreign magic", "other layer count", "another length"])
def test_a_state_that_the_engine_refuses_leaves_engine_and_wrapper_empty_and_sound(engine, fault):
    ids = input_of(engine, 30)
    _, expected = cold_run(engine, input_of(engine, 12))
    engine.evaluate(ids)
    state = bytearray(engine.capture())
    layers_at = 8 + 4 + 4 + 12 * 30 + 4
    changed = {
        "short": state[:-1],
        "foreign magic": b"\0\0\0\0" + state[4:],
        "other layer count": state[:layers_at] + b"\x02" + state[layers_at + 1 :],
        "another length": state,
    }[fault]
    claimed = ids[:29] if fault == "another length" else ids
    with pytest.raises(EngineFailed):
        engine.load(memoryview(bytes(changed)), claimed)
    assert engine.llama.n_tokens == 0
    assert positions(engine) == (-1, -1)
    assert greedy(engine, input_of(engine, 12)) == expected


def test_nan_left_by_a_refused_state_does_not_reach_later_prompts(engine):
    ids = input_of(engine, 30)
    _, expected = cold_run(engine, input_of(engine, 12))
    engine.evaluate(ids)
    state = bytearray(engine.capture())
    first = kv_state.parse(memoryview(state)).k[0]
    state[first.offset : first.offset + 30 * first.row_bytes] = b"\xff" * (30 * first.row_bytes)
    with pytest.raises(EngineFailed):
        engine.load(memoryview(bytes(state[:-1])), ids)
    assert greedy(engine, input_of(engine, 12)) == expected
    assert np.isfinite(next_logits(engine)).all()


def test_a_decode_that_fails_half_way_leaves_engine_and_wrapper_empty(engine, monkeypatch):
    ids = input_of(engine, 30)
    engine.evaluate(ids)
    state = bytes(engine.capture())

    def broken(_tokens):
        raise RuntimeError("llama_decode returned -3")

    with monkeypatch.context() as patch:
        patch.setattr(engine.llama, "eval", broken)
        engine.load(memoryview(state), ids)
        with pytest.raises(EngineFailed, match="llama_decode returned -3"):
            engine.evaluate(ids, n_kept=29)
    assert (engine.llama.n_tokens, positions(engine)) == (0, (-1, -1))
    engine.load(memoryview(state), ids)
    assert positions(engine) == (0, 29)


def test_a_failed_restore_is_followed_by_a_warm_that_evaluates_and_saves_anew(engine, registry, monkeypatch):
    first = registry.warm(engine, TEXT).save.checkpoint
    real = llama_cpp.llama_state_seq_set_data
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_seq_set_data", lambda *_args: 0)
        assert registry.restore(engine, TEXT).outcome is Outcome.FAILED
    assert llama_cpp.llama_state_seq_set_data is real
    assert (engine.llama.n_tokens, positions(engine)) == (0, (-1, -1))
    again = registry.warm(engine, TEXT)
    assert again.save.outcome is SaveOutcome.SAVED
    assert registry.get(first.id).stale_reason is StaleReason.INCOMPATIBLE
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT


def test_an_engine_that_gives_a_short_state_saves_nothing(engine, registry, monkeypatch):
    engine.evaluate(engine.token_ids(TEXT))
    monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data", lambda *_args: 17)
    with pytest.raises(EngineFailed, match="17 of"):
        registry.save(engine, TEXT)
    assert registry.list() == []


def test_a_wrapper_that_disagrees_with_the_engine_saves_nothing(engine, registry):
    engine.evaluate(engine.token_ids(TEXT))
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(engine.llama.ctx), False)
    with pytest.raises(EngineFailed, match="the engine's last position is -1"):
        registry.save(engine, TEXT)
    engine.llama.reset()


def test_a_token_outside_the_vocabulary_is_refused_by_number(engine, registry):
    with pytest.raises(BadInput, match="vocabulary"):
        registry.warm(engine, [1, 2, 999_999])


def test_a_state_is_saved_after_the_wrapper_went_back_some_tokens(engine, registry):
    ids = input_of(engine, 40)
    engine.evaluate(ids)
    engine.llama.n_tokens = 30
    saved = registry.save(engine, ids[:30])
    assert saved.checkpoint.n_tokens == 30
    _, expected = cold_run(engine, ids[:30])
    assert registry.restore(engine, ids[:30]).outcome is Outcome.HIT
    assert greedy(engine, ids[:30]) == expected


def test_an_input_is_tokenised_as_a_completion_tokenises_it(engine, monkeypatch):
    seen = []
    real = engine.llama.generate
    monkeypatch.setattr(engine.llama, "generate", lambda tokens, **kw: seen.append(list(tokens)) or real(tokens, **kw))
    for text in (TEXT, "<|im_start|>user\nHello<|im_end|>\n", " leading space", "日本語 ☺"):
        engine.llama(text, max_tokens=1, temperature=0)
        assert seen[-1] == engine.token_ids(text).tolist()


def test_scores_of_restored_positions_are_nan_where_the_llama_keeps_scores(load, registry):
    engine = load(logits_all=True)
    ids = input_of(engine, 20)
    registry.warm(engine, ids)
    engine._forget(clear_data=True)
    registry.restore(engine, ids)
    assert np.isnan(engine.llama.scores[:19]).all()
    assert np.isfinite(engine.llama.scores[19]).all()


def test_evaluation_is_told_as_it_goes(load):
    engine = load(n_batch=64)
    told = []
    engine.evaluate(input_of(engine, 150), lambda done, total: told.append((done, total)))
    assert told == [(64, 150), (128, 150), (149, 150), (150, 150)]


def test_an_interrupted_evaluation_leaves_nothing_half_done(load):
    engine = load(n_batch=64)

    def interrupt(done, _total):
        if done >= 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.evaluate(input_of(engine, 150), interrupt)
    assert (engine.llama.n_tokens, positions(engine)) == (0, (-1, -1))


def test_a_file_that_is_no_model_is_named(tmp_path, digests):
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    bad = tmp_path / "bad.gguf"
    with pytest.raises(BadInput, match="no such file"):
        LlamaCppEngine.from_path(bad, digests=digests)
    bad.write_bytes(b"GGUF nonsense")
    with pytest.raises(BadInput, match=r"bad\.gguf.*llama\.cpp cannot load it"):
        LlamaCppEngine.from_path(bad, digests=digests)


def test_the_state_size_in_the_library_is_the_state_size_on_disk(engine, registry):
    ids = input_of(engine, 300)
    row = registry.warm(engine, ids).save.checkpoint
    native = llama_cpp.llama_state_seq_get_size(engine.llama.ctx, 0)
    assert row.file_size <= 1.01 * native
    assert ctypes.sizeof(ctypes.c_uint8) * native < row.file_size


def test_positions_of_an_image_are_not_taken_for_the_tokens_of_an_earlier_prompt(load, registry):
    """As a handler for images does: it resets the `Llama`, and for the image only counts on."""
    engine = load()
    earlier = input_of(engine, 60)
    engine.evaluate(earlier)
    llama = engine.llama
    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.eval(earlier[:20].tolist())
    llama._batch.set_batch(batch=[7] * 30, n_past=20, logits_all=False)
    llama._ctx.decode(llama._batch)
    llama.n_tokens = 50
    with pytest.raises(Unsupported, match="image or sound"):
        registry.save(engine, engine.held_token_ids())
    again = LlamaCppEngine(llama, digests=engine._digests)
    assert (again.layout, len(again.held_token_ids())) == (engine.layout, 20)
    assert llama.input_ids[:50].max() < llama.n_vocab()
    warmed = registry.warm(again, earlier)
    assert (warmed.n_kept, warmed.n_evaluated) == (20, 40)
    assert registry.restore(engine, earlier).outcome is Outcome.HIT


def test_an_engine_is_printed_in_one_line_with_its_model_and_what_it_holds(engine):
    engine.evaluate(np.arange(1, 8, dtype=np.int32))
    name, n_ctx = engine.model_name, engine.n_ctx
    assert str(engine) == f"LlamaCppEngine({name!r}, full memory, holds 7 of {n_ctx} tokens)"
