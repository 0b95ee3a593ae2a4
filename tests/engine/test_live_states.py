"""What the library makes of a state is what the engine itself makes: byte for byte, and logit for logit."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from support import samples

from llama_ckpt import formats
from llama_ckpt.errors import Incompatible
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import context as kv_context
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import Dialect

pytestmark = pytest.mark.llama

TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning. "
KINDS = [
    pytest.param({}, id="f16"),
    pytest.param({"flash_attn": True}, id="flash"),
    pytest.param({"flash_attn": True, "type_k": 8, "type_v": 8}, id="q8"),
    pytest.param({"flash_attn": True, "type_k": 0, "type_v": 30}, id="f32-bf16"),
]
TINY_IDS = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]


def input_of(engine, n_tokens):
    return engine.token_ids(TEXT * (n_tokens // 15 + 2))[:n_tokens]


def logits(engine):
    pointer = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(engine.llama.n_vocab(),)).copy()


def fresh(engine, ids):
    """State and next logits of a run from nothing."""
    engine._forget(clear_data=True)
    engine.evaluate(ids)
    return memoryview(bytes(engine.capture())), logits(engine)


def loaded(engine, state, ids):
    """The next logits after loading a state; all cells were zeroed before."""
    engine._forget(clear_data=True)
    engine.load(state, ids)
    engine.evaluate(ids, n_kept=len(ids) - 1)
    return logits(engine)


# -- a real model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
def test_a_cut_state_is_the_engines_own_state_of_fewer_tokens(load, options):
    engine = load(**options)
    ids = input_of(engine, 60)
    whole, _ = fresh(engine, ids)
    for n in (1, 2, 33, 59):
        engine.evaluate(ids)
        engine.llama.n_tokens = n  # capture() takes the cells behind away
        assert bytes(kv_edit.truncate(whole, n)) == bytes(engine.capture())


@pytest.mark.parametrize("options", KINDS)
def test_a_head_and_a_tail_joined_are_the_whole_and_continue_as_it(load, options):
    engine = load(**options)
    ids = input_of(engine, 60)
    whole, expected = fresh(engine, ids)
    for n in (1, 33):
        joined = kv_edit.join(kv_edit.truncate(whole, n), kv_edit.tail(whole, n))
        assert bytes(joined) == bytes(whole)
        assert np.array_equal(loaded(engine, joined, ids), expected)


@pytest.mark.parametrize("options", KINDS)
def test_a_cut_state_continues_as_a_fresh_run_of_those_tokens(load, options):
    engine = load(**options)
    ids = input_of(engine, 60)
    whole, _ = fresh(engine, ids)
    for n in (2, 33):
        _, expected = fresh(engine, ids[:n])
        assert np.array_equal(loaded(engine, kv_edit.truncate(whole, n), ids[:n]), expected)


def test_a_tail_computed_behind_a_loaded_head_is_joined_to_it(load):
    """What a delta is: its cells come from a run that went on from the head's state."""
    engine = load()
    ids = input_of(engine, 60)
    whole, _ = fresh(engine, ids)
    engine._forget(clear_data=True)
    engine.load(kv_edit.truncate(whole, 40), ids[:40])
    engine.llama.eval(ids[40:].tolist())
    grown = memoryview(bytes(engine.capture()))
    made = kv_edit.join(kv_edit.truncate(whole, 40), kv_edit.tail(grown, 40))
    assert bytes(kv_edit.truncate(made, 39)) == bytes(kv_edit.truncate(whole, 39))
    assert kv_state.parse(made).positions.tolist() == list(range(60))
    assert bytes(kv_edit.tail(made, 40)) == bytes(kv_edit.tail(grown, 40))
    assert np.isfinite(loaded(engine, made, ids)).all()


def test_v_turned_is_taken_by_a_context_of_the_other_mode(load):
    plain, flash = load(), load(flash_attn=True)
    ids = input_of(plain, 60)
    state, expected = fresh(plain, ids)
    of_flash, expected_of_flash = fresh(flash, ids)
    turned = kv_edit.transpose_v(of_flash, transposed=True)
    shape = kv_state.parse(turned)
    assert (shape.dialect, shape.v_transposed, len(turned)) == (kv_state.parse(state).dialect, True, len(state))
    first = kv_state.parse(state).v[0]
    assert bytes(turned[first.offset : first.offset + 60 * 384]) == bytes(state[first.offset : first.offset + 60 * 384])
    for engine, made, own, other in (
        (plain, turned, expected, expected_of_flash),
        (flash, kv_edit.transpose_v(state, transposed=False), expected_of_flash, expected),
    ):
        got = loaded(engine, made, ids)
        assert got.argmax() == own.argmax()
        # As far from the fresh run as the two modes are from each other, not farther.
        assert np.abs(got - own).max() <= 2 * np.abs(own - other).max()


def test_layers_of_another_run_of_the_same_input_change_nothing_and_of_another_input_do(load):
    engine = load()
    ids = input_of(engine, 40)
    state, expected = fresh(engine, ids)
    foreign, _ = fresh(engine, input_of(engine, 41)[1:])
    mixed = kv_edit.replace_layers(state, foreign, range(12))
    changed = loaded(engine, mixed, ids)
    assert not np.array_equal(changed, expected)
    assert bytes(engine.capture()) != bytes(state)
    back = kv_edit.replace_layers(mixed, state, range(12))
    assert bytes(back) == bytes(state)
    assert np.array_equal(loaded(engine, back, ids), expected)


@pytest.mark.parametrize("name", [samples.V2, samples.CONTEXT_V9])
def test_a_file_of_an_older_llama_cpp_restores_with_the_logits_of_a_fresh_run(load, name):
    """Written by llama-cpp-python 0.3.26 (ggsq 2, ggsn 9), which this engine's own loader refuses for its version."""
    engine = load()
    file = engine_files.read(memoryview(samples.data(name)), name)
    _, expected = fresh(engine, file.token_ids)
    state = kv_edit.to_dialect(engine_files.sequence_state(file), engine.layout)
    assert np.abs(loaded(engine, state, file.token_ids) - expected).max() == 0.0


def test_a_slot_of_a_newer_llama_server_restores_in_this_engine(load):
    """Two streams, rotation words, packed tokens. Another build computed it, whose later layers are rounded otherwise."""
    engine = load(flash_attn=True)
    name = samples.V4_TWO_STREAMS
    file = engine_files.read(memoryview(samples.data(name)), name)
    own, expected = fresh(engine, file.token_ids)
    state = kv_edit.to_dialect(engine_files.sequence_state(file), engine.layout)
    assert len(state) == len(own)
    for rows in (kv_state.parse(own).k[0], kv_state.parse(own).v[0]):
        assert bytes(state[rows.offset : rows.offset + 4 * 384]) == bytes(own[rows.offset : rows.offset + 4 * 384])
    got = loaded(engine, state, file.token_ids)
    assert got.argmax() == expected.argmax()
    assert got @ expected > 0.999 * np.linalg.norm(got) * np.linalg.norm(expected)


def test_a_rotated_slot_of_a_newer_llama_server_restores_where_the_engine_rotates_alike(load):
    engine = load(flash_attn=True, type_k=8, type_v=8)
    assert engine.fingerprint.fields["kv_rotation"] == "hadamard"
    name = samples.V4_ROTATED
    file = engine_files.read(memoryview(samples.data(name)), name)
    _, expected = fresh(engine, file.token_ids)
    dialect = engine.layout
    with pytest.raises(Incompatible, match=r"rotated by \(64, 64\) in the state, by \(0, 0\) in the engine"):
        kv_edit.to_dialect(engine_files.sequence_state(file), dialect, now=(0, 0))
    state = kv_edit.to_dialect(engine_files.sequence_state(file), dialect, now=(64, 64))
    got = loaded(engine, state, file.token_ids)
    assert got.argmax() == expected.argmax()
    assert got @ expected > 0.999 * np.linalg.norm(got) * np.linalg.norm(expected)


@pytest.mark.parametrize("options", KINDS[:3])
def test_a_live_state_goes_to_a_newer_dialect_and_back(load, options):
    engine = load(**options)
    ids = input_of(engine, 20)
    state, expected = fresh(engine, ids)
    rotation = (64, 64) if "type_k" in options else None
    there = kv_edit.to_dialect(state, Dialect(4, True), seq_id=3, rotation=rotation, now=rotation)
    back = kv_edit.to_dialect(there, engine.layout, now=rotation)
    assert bytes(back) == bytes(state)
    assert np.array_equal(loaded(engine, back, ids), expected)


def test_nan_put_into_a_live_state_is_found_before_the_engine_sees_it(load):
    engine = load()
    state, _ = fresh(engine, input_of(engine, 20))
    assert kv_values.not_finite(state) is None
    broken = bytearray(state)
    rows = kv_state.parse(state).v[11]
    broken[rows.offset + 2 * (5 * 20 + 7) : rows.offset + 2 * (5 * 20 + 7) + 2] = b"\xff\xff"
    assert kv_values.not_finite(memoryview(broken)) == kv_values.BadValue(11, "V", 7)


# -- every kind of memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n_tokens", "memory", "sliceable"),
    [
        ("full", 12, "full", True),
        ("positions", 12, "full", True),
        ("swa", 12, "caches", True),
        ("swa", 24, "swa", False),
        ("recurrent", 12, "recurrent", False),
        ("hybrid", 12, "hybrid", False),
    ],
)
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_every_kind_of_memory_is_recognised(tiny, tmp_path, kind, n_tokens, memory, sliceable, flash, n_seq):
    engine = tiny(kind, flash=flash, n_seq=n_seq, swa_full=False)
    engine.decode(TINY_IDS[:n_tokens], seq_id=n_seq - 1)
    state = memoryview(engine.state(n_seq - 1))
    found = kv_state.parse(state)
    assert found.memory == memory
    assert (kv_state.not_sliceable(found) is None) == sliceable
    assert kv_values.not_finite(state) is None
    data = engine.file_of_sequence(tmp_path / "file", TINY_IDS[:n_tokens], n_seq - 1)
    told = formats.identify(memoryview(data), "the file")
    assert (told.format, told.memory, told.restorable, told.sliceable) == ("ggsq", memory, True, sliceable)
    assert bytes(engine_files.sequence_state(engine_files.read(memoryview(data), "the file"), n_seq - 1)) == bytes(
        state
    )


@pytest.mark.parametrize("kind", ["full", "positions", "swa"])
@pytest.mark.parametrize("flash", [False, True])
def test_cut_and_joined_states_of_every_sliceable_kind_are_the_engines_own(tiny, kind, flash):
    engine = tiny(kind, flash=flash, swa_full=False)
    engine.decode(TINY_IDS[:12])
    whole = memoryview(engine.state())
    for n in (1, 7, 11):
        engine.clear()
        engine.decode(TINY_IDS[:12])
        llama_cpp.llama_memory_seq_rm(engine.memory, 0, n, -1)
        assert bytes(kv_edit.truncate(whole, n)) == engine.state()
        joined = kv_edit.join(kv_edit.truncate(whole, n), kv_edit.tail(whole, n))
        engine.clear()
        assert engine.load(joined)
        assert engine.state() == bytes(whole)


def test_a_state_moves_between_engines_with_other_numbers_of_streams(tiny):
    many, one = tiny("full", flash=True, n_seq=3), tiny("full", flash=True)
    expected = many.decode(TINY_IDS[:8], seq_id=2)
    state = memoryview(many.state(2))
    assert not one.load(state)
    one.clear()
    moved = kv_edit.to_dialect(state, Dialect(1))
    assert one.load(moved)
    assert one.state() == bytes(moved)
    after_one = one.decode(TINY_IDS[8:9], start=8)
    after_many = many.decode(TINY_IDS[8:9], seq_id=2, start=8)
    assert np.array_equal(after_one, after_many)
    assert np.isfinite(expected).all()
    many.clear()
    back = kv_edit.to_dialect(moved, Dialect(3), seq_id=2)
    assert bytes(back) == bytes(state)
    assert many.load(back, 2)
    assert many.state(2) == bytes(state)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("kind", ["full", "positions", "swa"])
def test_each_sequence_of_a_context_is_taken_out_as_the_engine_gives_it(tiny, tmp_path, kind, unified):
    engine = tiny(kind, n_seq=3, unified=unified, flash=True, swa_full=False)
    engine.decode(TINY_IDS[:9])
    engine.decode(TINY_IDS[9:14], seq_id=2)
    if unified:
        llama_cpp.llama_memory_seq_cp(engine.memory, 0, 1, 0, 4)
    data = engine.file_of_context(tmp_path / "file", TINY_IDS[:9])
    file = engine_files.read(memoryview(data), "the file")
    expected = {0: 9, 2: 5, 1: 4} if unified else {0: 9, 2: 5}
    assert kv_context.sequences(file.body) == expected
    for seq_id in expected:
        assert bytes(engine_files.sequence_state(file, seq_id)) == engine.state(seq_id)


# -- llama.cpp's own loaders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "positions", "swa"])
@pytest.mark.parametrize("source", ["sequence", "context"])
def test_files_that_are_written_here_are_loaded_by_llama_cpp(tiny, tmp_path, kind, source):
    engine = tiny(kind, flash=True, swa_full=False)
    ids = np.array(TINY_IDS[:10], dtype=np.int32)
    engine.decode(ids)
    state = memoryview(engine.state())
    expected = engine.decode([1], start=10)
    path = tmp_path / "file"
    if source == "sequence":
        head, body = engine_files.encode_ggsq(3, ids[:9], kv_edit.truncate(state, 9))
    else:
        arch = {"full": "llama", "positions": "qwen2vl", "swa": "gemma2"}[kind]
        head, body = engine_files.encode_ggsn(10, ids[:9], kv_edit.truncate(state, 9), arch, for_llama_cli=False)
    path.write_bytes(head + bytes(body))
    engine.clear()
    read = engine.load_file_of_sequence(path) if source == "sequence" else engine.load_file_of_context(path)
    assert read == ids[:9].tolist()
    assert engine.state() == bytes(kv_edit.truncate(state, 9))
    engine.decode(ids[9:], start=9)
    assert np.array_equal(engine.decode([1], start=10), expected)


# -- a real model with a sliding window -----------------------------------------------------------------------------------


def test_a_real_sliding_window_model_is_cut_while_all_cells_are_there(load, swa_gguf):
    engine = load(swa_gguf, n_ctx=1024)
    ids = input_of(engine, 700)
    short, _ = fresh(engine, ids[:60])
    found = kv_state.parse(short)
    assert [cache.n_cells for cache in found.caches] == [60, 60]
    for n in (1, 33):
        _, expected = fresh(engine, ids[:n])
        assert bytes(kv_edit.truncate(short, n)) == bytes(engine.capture())
        assert np.array_equal(loaded(engine, kv_edit.truncate(short, n), ids[:n]), expected)
    assert bytes(kv_edit.join(kv_edit.truncate(short, 33), kv_edit.tail(short, 33))) == bytes(short)
    long, _ = fresh(engine, ids)
    assert kv_state.parse(long).memory == "swa"
    assert "its window has moved on" in kv_state.not_sliceable(kv_state.parse(long))
