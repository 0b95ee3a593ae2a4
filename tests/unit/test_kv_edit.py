"""Cut, tail, join, translate, transpose, replace, look for NaN: on real recorded states."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from support import samples

from llama_ckpt.errors import BadInput, Incompatible, Unsupported
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import ALL_TYPES, GGML_TYPES
from llama_ckpt.formats.kv.values import BadValue, not_finite

SLICEABLE = [
    samples.V2,
    samples.F16,
    samples.F16_FLASH,
    samples.Q8_FLASH,
    samples.V4_TWO_STREAMS,
    samples.POSITIONS,
    samples.SWA_SHORT,
]


def state_of(name: str, seq_id: int = 0) -> memoryview:
    return engine_files.sequence_state(engine_files.read(memoryview(samples.data(name)), name), seq_id)


def n_cells(state: memoryview) -> int:
    return kv_state.parse(state).n_cells


def rows_of(state: memoryview, layer: int, part: str) -> np.ndarray:
    """K or V of a layer by cell, with numpy alone; for f16."""
    found = kv_state.parse(state)
    rows = getattr(found, part)[layer]
    values = np.frombuffer(state, "<f2", count=found.n_cells * rows.row_bytes // 2, offset=rows.offset)
    return values.reshape(-1, found.n_cells).T if rows.element_bytes else values.reshape(found.n_cells, -1)


def shuffled(state: memoryview, order: list[int]) -> memoryview:
    """The same cells in another order, built from the parts that cuts and tails give."""
    made = bytearray(state)
    found = kv_state.parse(state)
    for rows in (*found.k, *found.v):
        assert not rows.element_bytes
        size = rows.row_bytes
        old = bytes(made[rows.offset : rows.offset + found.n_cells * size])
        for to, source in enumerate(order):
            made[rows.offset + to * size : rows.offset + (to + 1) * size] = old[source * size : (source + 1) * size]
    for to, source in enumerate(order):
        struct.pack_into("<i", made, 16 + 12 * to, source)
    return memoryview(bytes(made))


# -- gather, equal_cells --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLICEABLE)
def test_a_chain_of_stretches_gives_the_whole_state_again(name):
    state = state_of(name)
    n = n_cells(state)
    a, b = n // 3 or 1, 2 * n // 3 or 2
    chain = [
        kv_edit.CellRange(state, 0, a),
        kv_edit.CellRange(kv_edit.tail(state, 0), a, b),
        kv_edit.CellRange(kv_edit.tail(state, b), b, n),
    ]
    assert kv_edit.gather([one for one in chain if one.start < one.end]) == state


def test_a_stretch_of_a_longer_state_is_taken_from_its_middle():
    state = state_of(samples.F16)
    n = n_cells(state)
    assert kv_edit.gather([kv_edit.CellRange(state, 0, 1), kv_edit.CellRange(state, 1, n - 1)]) == kv_edit.truncate(
        state, n - 1
    )


def test_a_stretch_that_a_state_does_not_hold_is_named():
    state = state_of(samples.F16)
    n = n_cells(state)
    with pytest.raises(Incompatible, match=f"positions 1 to {n} of a state that holds 0 to {n - 1}"):
        kv_edit.gather([kv_edit.CellRange(state, 0, 1), kv_edit.CellRange(state, 1, n + 1)])
    with pytest.raises(Incompatible, match="V transposed"):
        kv_edit.gather([kv_edit.CellRange(state, 0, 1), kv_edit.CellRange(state_of(samples.F16_FLASH), 1, n)])


@pytest.mark.parametrize("name", SLICEABLE)
def test_equal_cells_of_a_state_and_its_cut_are_all_of_the_cut(name):
    state = state_of(name)
    n = n_cells(state)
    assert kv_edit.equal_cells(state, memoryview(bytes(state))) == n
    assert kv_edit.equal_cells(state, kv_edit.truncate(state, n - 1)) == n - 1
    assert kv_edit.equal_cells(kv_edit.truncate(state, 1), state) == 1


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.Q8_FLASH])
@pytest.mark.parametrize("part", ["k", "v"])
def test_equal_cells_end_at_the_first_cell_of_which_any_layer_differs(name, part):
    state = state_of(name)
    found, n = kv_state.parse(state), n_cells(state)
    rows, other = getattr(found, part)[found.n_layer - 1], bytearray(state)
    # the last value of cell n-2: by cell at the end of its row, transposed in the last element's column
    at = rows.offset + (n - 1) * rows.row_bytes - 1
    if rows.element_bytes:
        at = rows.offset + n * rows.row_bytes - rows.element_bytes - 1
    other[at] ^= 1
    assert kv_edit.equal_cells(state, memoryview(bytes(other))) == n - 2


def test_states_of_other_positions_order_or_layout_have_no_equal_cells():
    state = state_of(samples.F16_FLASH)
    n = n_cells(state)
    assert kv_edit.equal_cells(state, kv_edit.tail(state, 1)) == 0
    assert kv_edit.equal_cells(state, shuffled(state, [1, 0, *range(2, n)])) == 0
    assert kv_edit.equal_cells(state, state_of(samples.F16)) == 0


# -- cut, tail, join ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLICEABLE)
def test_a_state_cut_in_two_anywhere_is_joined_to_the_same_bytes(name):
    state = state_of(name)
    for n in range(1, n_cells(state)):
        head, behind = kv_edit.truncate(state, n), kv_edit.tail(state, n)
        assert kv_state.parse(head).positions.tolist() == list(range(n))
        assert kv_state.parse(behind).positions.tolist() == list(range(n, n_cells(state)))
        assert bytes(kv_edit.join(head, behind)) == bytes(state)


@pytest.mark.parametrize("name", SLICEABLE)
def test_a_cut_at_the_end_and_a_tail_from_the_beginning_change_nothing(name):
    state = state_of(name)
    assert bytes(kv_edit.truncate(state, n_cells(state))) == bytes(state)
    assert bytes(kv_edit.tail(state, 0)) == bytes(state)


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.V4_TWO_STREAMS])
def test_a_cut_keeps_the_numbers_of_the_first_cells(name):
    state = state_of(name)
    short = kv_edit.truncate(state, 2)
    for layer in (0, 15, 29):
        for part in ("k", "v"):
            assert np.array_equal(rows_of(short, layer, part), rows_of(state, layer, part)[:2])


def test_cuts_of_cuts_and_tails_of_tails_are_one_cut_and_one_tail():
    state = state_of(samples.V4_TWO_STREAMS)
    assert bytes(kv_edit.truncate(kv_edit.truncate(state, 3), 2)) == bytes(kv_edit.truncate(state, 2))
    assert bytes(kv_edit.tail(kv_edit.tail(state, 1), 3)) == bytes(kv_edit.tail(state, 3))
    assert bytes(kv_edit.truncate(kv_edit.tail(state, 1), 3)) == bytes(kv_edit.tail(kv_edit.truncate(state, 3), 1))


def test_three_pieces_are_joined_in_either_order():
    state = state_of(samples.V4_TWO_STREAMS)
    a, b, c = kv_edit.truncate(state, 1), kv_edit.truncate(kv_edit.tail(state, 1), 3), kv_edit.tail(state, 3)
    assert bytes(kv_edit.join(kv_edit.join(a, b), c)) == bytes(state)
    assert bytes(kv_edit.join(a, kv_edit.join(b, c))) == bytes(state)


def test_cells_that_do_not_stand_in_order_are_chosen_by_their_position():
    state = state_of(samples.F16_FLASH)
    mixed = shuffled(state, [2, 0, 1])
    assert bytes(kv_edit.truncate(mixed, 2)) == bytes(kv_edit.truncate(state, 2))
    assert bytes(kv_edit.tail(mixed, 2)) == bytes(kv_edit.tail(state, 2))
    apart = shuffled(state, [1, 0, 2])
    assert kv_state.parse(kv_edit.truncate(shuffled(state, [1, 2, 0]), 2)).positions.tolist() == [1, 0]
    assert bytes(kv_edit.truncate(apart, 3)) == bytes(apart)


@pytest.mark.parametrize("n", [-1, 0, 4, 2**31])
def test_a_cut_outside_the_state_is_refused_with_what_it_holds(n):
    with pytest.raises(BadInput, match="positions 0 to 2"):
        kv_edit.truncate(state_of(samples.F16), n)


@pytest.mark.parametrize("start", [-1, 3, 2**31])
def test_a_tail_outside_the_state_is_refused(start):
    with pytest.raises(BadInput, match="positions 0 to 2"):
        kv_edit.tail(state_of(samples.F16), start)


def test_states_whose_positions_do_not_follow_one_another_are_not_joined():
    state = state_of(samples.F16)
    for head, behind in ((state, state), (kv_edit.truncate(state, 1), kv_edit.tail(state, 2))):
        with pytest.raises(Incompatible, match="ends with position"):
            kv_edit.join(head, behind)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (samples.F16_FLASH, "V transposed: True in one state, False in the other"),
        (samples.SWA_SHORT, "1 caches in one state, 2 in the other"),
        (samples.POSITIONS, "caches in one state"),
    ],
)
def test_states_of_different_shape_are_not_joined(other, words):
    with pytest.raises(Incompatible, match=words):
        kv_edit.join(kv_edit.truncate(state_of(samples.F16), 2), kv_edit.tail(state_of(other), 2))


def test_states_of_other_types_are_not_joined():
    with pytest.raises(Incompatible, match="K of layer 0: f16 rows of 384 bytes, in the other q8_0 rows of 204 bytes"):
        kv_edit.join(kv_edit.truncate(state_of(samples.F16_FLASH), 2), kv_edit.tail(state_of(samples.Q8_FLASH), 2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (samples.RECURRENT, "recurrent memory"),
        (samples.HYBRID, "hybrid memory"),
        (samples.SWA, "cache 1 holds 16 of 24 cells"),
    ],
)
@pytest.mark.parametrize(
    "operation",
    [
        lambda s: kv_edit.truncate(s, 2),
        lambda s: kv_edit.tail(s, 2),
        lambda s: kv_edit.join(s, s),
        lambda s: kv_edit.to_dialect(s, Dialect(2)),
        lambda s: kv_edit.transpose_v(s, transposed=True),
        lambda s: kv_edit.replace_layers(s, s, [0]),
    ],
    ids=["cut", "tail", "join", "to_dialect", "transpose_v", "replace_layers"],
)
def test_memory_that_has_not_one_cell_a_token_is_refused_with_the_reason(name, words, operation):
    with pytest.raises(Unsupported, match=words):
        operation(state_of(name))


def test_results_are_new_and_read_only_and_nothing_of_the_source_is_kept():
    source = bytearray(state_of(samples.F16))
    results = [
        kv_edit.truncate(memoryview(source), 2),
        kv_edit.tail(memoryview(source), 1),
        kv_edit.transpose_v(memoryview(source), transposed=False),
        kv_edit.to_dialect(memoryview(source), Dialect(2)),
        kv_edit.replace_layers(memoryview(source), memoryview(source), [1]),
    ]
    before = [bytes(r) for r in results]
    source[:] = bytes(len(source))
    source.clear()  # a bytearray that something looks into cannot be resized
    assert [bytes(r) for r in results] == before
    assert all(r.readonly for r in results)


def test_an_operation_costs_one_buffer_of_its_result():
    state = state_of(samples.F16)
    tracemalloc.start()
    try:
        kv_edit.truncate(state, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(state) + (1 << 18)


# -- dialects -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_stream", "words"), [(1, False), (1, True), (2, False), (16, True)])
@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.V4_TWO_STREAMS, samples.SWA_SHORT])
def test_a_state_goes_to_any_dialect_and_back(name, n_stream, words):
    state = state_of(name, seq_id=0)
    own = kv_edit.to_dialect(state, kv_state.parse(state).layout)
    there = kv_edit.to_dialect(state, Dialect(n_stream, words))
    found = kv_state.parse(there)
    assert found.layout == Dialect(n_stream, words)
    assert found.rotation_words == ((0, 0) if words else None)
    assert bytes(kv_edit.to_dialect(there, kv_state.parse(state).layout)) == bytes(own)


def before_streams(name: str) -> memoryview:
    """The real state as llama.cpp wrote it until July 2025: without the count of streams, and no sequence id in the cells."""
    state = state_of(name)
    found = kv_state.parse(state)
    out = bytes(state[:8]) + struct.pack("<I", found.n_cells)
    for position in found.positions:
        out += struct.pack("<iI", position, 0)
    return memoryview(out + bytes(state[found.first.cells_end :]))


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.Q8_FLASH])
def test_a_state_of_before_streams_is_read_and_written_as_today(name):
    old = before_streams(name)
    assert kv_state.parse(old).layout == Dialect(0)
    assert bytes(kv_edit.to_dialect(old, Dialect())) == bytes(state_of(name))
    assert bytes(kv_edit.to_dialect(kv_edit.truncate(old, 2), Dialect())) == bytes(kv_edit.truncate(state_of(name), 2))
    with pytest.raises(Unsupported, match="states of before streams are read, not written"):
        kv_edit.to_dialect(old, Dialect(0))


def test_a_state_is_written_for_the_sequence_that_is_to_take_it():
    real = state_of(samples.V4_TWO_STREAMS, seq_id=1)
    plain = kv_edit.to_dialect(real, Dialect())
    assert bytes(kv_edit.to_dialect(plain, Dialect(2, True), seq_id=1)) == bytes(real)
    first = kv_state.parse(kv_edit.to_dialect(plain, Dialect(2, True), seq_id=0)).first
    assert first.index == 0
    assert kv_state.parse(kv_edit.to_dialect(plain, Dialect(1), seq_id=7)).first.index == 0
    for seq_id in (2, -1):
        with pytest.raises(Incompatible, match=f"no sequence {seq_id} in an engine of 2 streams"):
            kv_edit.to_dialect(plain, Dialect(2), seq_id=seq_id)


def test_a_quantised_state_between_engines_that_do_not_tell_is_left_to_the_fingerprint():
    state = state_of(samples.Q8_FLASH)
    assert bytes(kv_edit.to_dialect(state, Dialect())) == bytes(state)
    assert kv_state.parse(kv_edit.to_dialect(state, Dialect(3))).n_stream == 3
    with pytest.raises(Incompatible, match=r"rotated by \(64, 64\) in the state, by \(0, 0\) in the engine"):
        kv_edit.to_dialect(state, Dialect(), rotation=(64, 64), now=(0, 0))


def test_rotation_that_is_in_use_and_differs_is_refused():
    state = state_of(samples.Q8_FLASH)
    with pytest.raises(Unsupported, match="does not say whether it is"):
        kv_edit.to_dialect(state, Dialect(1, True))
    rotated = kv_edit.to_dialect(state, Dialect(1, True), rotation=(64, 64))
    assert kv_state.parse(rotated).rotation_words == (64, 64)
    with pytest.raises(Unsupported, match="engine's dialect does not say"):
        kv_edit.to_dialect(rotated, Dialect(1, False))
    for now in ((0, 0), (64, 0), (128, 64)):
        for words in (False, True):
            with pytest.raises(Incompatible, match=r"rotated by \(64, 64\) in the state"):
                kv_edit.to_dialect(rotated, Dialect(1, words), now=now)
    assert bytes(kv_edit.to_dialect(rotated, Dialect(1, False), now=(64, 64))) == bytes(state)


def test_cells_with_another_extension_are_not_translated():
    with pytest.raises(Unsupported, match="12 bytes more, the engine's 0"):
        kv_edit.to_dialect(state_of(samples.POSITIONS), Dialect())
    state = state_of(samples.POSITIONS)
    assert bytes(kv_edit.to_dialect(state, Dialect(1, False, 12))) == bytes(state)


@pytest.mark.parametrize("dialect", [Dialect(), Dialect(0), Dialect(8, True, 12)])
def test_a_dialect_is_read_back_from_its_text(dialect):
    assert Dialect.from_text(str(dialect)) == dialect


@pytest.mark.parametrize(
    "text", ["", "swa memory", "streams=1", "streams=x rotation_words=0", "streams=1 rotation_words=7"]
)
def test_what_is_no_dialect_is_refused(text):
    with pytest.raises(BadInput, match="dialect"):
        Dialect.from_text(text)


# -- V by element and by cell ---------------------------------------------------------------------------------------------


def test_v_turned_keeps_every_number_and_turns_back_to_the_same_bytes():
    state = state_of(samples.F16)
    turned = kv_edit.transpose_v(state, transposed=False)
    assert (kv_state.parse(turned).v_transposed, len(turned)) == (False, len(state))
    for layer in (0, 29):
        assert np.array_equal(rows_of(turned, layer, "v"), rows_of(state, layer, "v"))
        assert np.array_equal(rows_of(turned, layer, "k"), rows_of(state, layer, "k"))
    assert bytes(kv_edit.transpose_v(turned, transposed=True)) == bytes(state)
    assert bytes(kv_edit.transpose_v(state, transposed=True)) == bytes(state)


def test_layer_0_turned_is_what_the_other_mode_computed():
    """Layer 0 depends on nothing but weights and tokens; the others differ by what the two modes compute differently."""
    turned, flash = kv_edit.transpose_v(state_of(samples.F16), transposed=False), state_of(samples.F16_FLASH)
    assert np.array_equal(rows_of(turned, 0, "v"), rows_of(flash, 0, "v"))
    assert not np.array_equal(rows_of(turned, 29, "v"), rows_of(flash, 29, "v"))


def test_quantised_v_is_not_turned():
    with pytest.raises(Unsupported, match="turning V of type q8_0"):
        kv_edit.transpose_v(state_of(samples.Q8_FLASH), transposed=True)


# -- layers ---------------------------------------------------------------------------------------------------------------


def test_replaced_layers_are_the_others_and_the_rest_stays():
    state = state_of(samples.F16_FLASH)
    other = bytearray(state)
    for rows in (*kv_state.parse(state).k, *kv_state.parse(state).v):
        other[rows.offset : rows.offset + 3 * rows.row_bytes] = bytes(3 * rows.row_bytes)
    made = kv_edit.replace_layers(state, memoryview(other), range(12))
    for layer in range(30):
        for part in ("k", "v"):
            assert rows_of(made, layer, part).any() == (layer >= 12)
            if layer >= 12:
                assert np.array_equal(rows_of(made, layer, part), rows_of(state, layer, part))
    assert bytes(kv_edit.replace_layers(state, memoryview(other), [])) == bytes(state)
    assert bytes(kv_edit.replace_layers(state, memoryview(other), range(30))) == bytes(other)
    assert bytes(kv_edit.replace_layers(made, state, range(12))) == bytes(state)


def test_layers_are_counted_over_all_caches():
    state = state_of(samples.SWA_SHORT)
    found = kv_state.parse(state)
    second = found.caches[1].streams[0].k[0]
    other = bytearray(state)
    other[second.offset] ^= 1
    assert bytes(kv_edit.replace_layers(state, memoryview(other), [0])) == bytes(state)
    assert bytes(kv_edit.replace_layers(state, memoryview(other), [1])) == bytes(other)


def test_layers_are_replaced_only_by_those_of_the_same_positions():
    state = state_of(samples.F16)
    with pytest.raises(Incompatible, match=r"positions 0 to 2 \(3 cells\) here, 0 to 1 \(2 cells\)"):
        kv_edit.replace_layers(state, kv_edit.truncate(state, 2), [0])
    with pytest.raises(BadInput, match="layers 0 to 29"):
        kv_edit.replace_layers(state, state, [0, 30, -1])
    with pytest.raises(Incompatible, match="V transposed"):
        kv_edit.replace_layers(state, state_of(samples.F16_FLASH), [0])


# -- NaN and infinity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", samples.all_names())
def test_real_states_hold_only_numbers(name):
    file = engine_files.read(memoryview(samples.data(name)), name)
    if not file.whole_context:
        assert not_finite(engine_files.sequence_state(file)) is None


@pytest.mark.parametrize("value", [0x7E00, 0x7C00, 0xFC00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH])
@pytest.mark.parametrize(("layer", "part", "cell"), [(0, "K", 0), (29, "K", 2), (0, "V", 1), (17, "V", 2)])
def test_a_value_that_is_no_number_is_found_where_it_stands(name, layer, part, cell, value):
    state = bytearray(state_of(name))
    found = kv_state.parse(memoryview(state))
    rows = (found.k if part == "K" else found.v)[layer]
    at = rows.offset + (2 * (100 * 3 + cell) if rows.element_bytes else cell * rows.row_bytes + 2 * 100)
    struct.pack_into("<H", state, at, value)
    assert not_finite(memoryview(state)) == BadValue(layer, part, cell)


def test_the_first_of_several_is_told_and_large_numbers_pass():
    state = bytearray(state_of(samples.F16_FLASH))
    found = kv_state.parse(memoryview(state))
    struct.pack_into("<H", state, found.k[3].offset, 0x7BFF)  # 65504, the largest f16
    assert not_finite(memoryview(state)) is None
    for rows in (found.v[3], found.k[4]):
        struct.pack_into("<H", state, rows.offset, 0x7C00)
    assert str(not_finite(memoryview(state))) == "V of layer 3, cell 0"


def test_a_scale_of_a_quantised_block_that_is_no_number_is_found():
    state = bytearray(state_of(samples.Q8_FLASH))
    rows = kv_state.parse(memoryview(state)).v[5]
    struct.pack_into("<H", state, rows.offset + rows.row_bytes + 2 * 34, 0x7E00)
    assert not_finite(memoryview(state)) == BadValue(5, "V", 1)
    state = bytearray(state_of(samples.Q8_FLASH))
    state[rows.offset + 2 : rows.offset + 34] = b"\xff" * 32  # the block's own bytes can be anything
    assert not_finite(memoryview(state)) is None


def test_recurrent_memory_is_looked_at_too():
    state = bytearray(state_of(samples.RECURRENT))
    rows = kv_state.parse(memoryview(state)).recurrent.rows[3]
    struct.pack_into("<f", state, rows.offset + 40, float("nan"))
    assert not_finite(memoryview(state)) == BadValue(1, "R/S", 0)


# -- types ----------------------------------------------------------------------------------------------------------------


def test_the_types_of_a_kv_cache_are_among_all_types_and_no_name_is_twice():
    assert set(GGML_TYPES) <= set(ALL_TYPES)
    assert len({known.name for known in ALL_TYPES.values()}) == len(ALL_TYPES)


@pytest.mark.parametrize("ggml_type", [0, 2, 3, 6, 7, 8, 20, 30, 12, 39, 77])
def test_a_state_of_any_type_is_cut_and_joined(ggml_type):
    """The real state's cells and head, with rows of another type and size, as the engine lays them out."""
    known = ALL_TYPES.get(ggml_type)
    row_bytes = (known.block_bytes * 2) if known else 13
    real = bytes(state_of(samples.F16_FLASH))[:52]
    row = np.random.default_rng(3).integers(0, 256, (4, 3 * row_bytes), dtype=np.uint8)
    state = real + struct.pack("<II", 0, 2)
    for i in range(4):
        state += struct.pack("<iQ", ggml_type, row_bytes) + row[i].tobytes()
    view = memoryview(state)
    assert kv_state.parse(view).k[0].row_bytes == row_bytes
    assert bytes(kv_edit.join(kv_edit.truncate(view, 1), kv_edit.tail(view, 1))) == state
