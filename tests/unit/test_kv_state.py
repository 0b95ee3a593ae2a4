"""The engine's sequence state, on real recorded ones and on ones that lie."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import numpy as np
import pytest
from support import samples

from llama_ckpt.errors import Unsupported
from llama_ckpt.formats.kv import state as kv_state

ALL = [samples.V2, samples.F16, samples.F16_FLASH, samples.Q8_FLASH, samples.V4_TWO_STREAMS]
# Where things stand in a state of one stream and three cells without rotation words.
N_STREAM, N_CELLS, CELLS, V_TRANSPOSED, N_LAYER, TYPE_K, ROW_BYTES = 8, 12, 16, 52, 56, 60, 64


def parse(state: bytes) -> kv_state.KvState:
    return kv_state.parse(memoryview(state))


def state_of(name: str) -> bytes:
    return samples.read(name)[1]


def patched(name: str, at: int, layout: str, *values: int) -> bytes:
    state = bytearray(state_of(name))
    struct.pack_into(layout, state, at, *values)
    return bytes(state)


def refusal(state: bytes) -> str:
    with pytest.raises(Unsupported) as caught:
        parse(state)
    assert caught.value.values["what"] == "the layout of this state"
    return caught.value.values["reason"]


# -- real states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n_cells", "ggml_type", "row_bytes", "transposed", "n_stream", "rotation"),
    [
        (samples.V2, 3, "f16", 384, True, 1, None),
        (samples.F16, 3, "f16", 384, True, 1, None),
        (samples.F16_FLASH, 3, "f16", 384, False, 1, None),
        (samples.Q8_FLASH, 3, "q8_0", 204, False, 1, None),
        (samples.V4_TWO_STREAMS, 4, "f16", 384, False, 2, (0, 0)),
    ],
)
def test_a_real_state_shows_its_shape(name, n_cells, ggml_type, row_bytes, transposed, n_stream, rotation):
    ids, state = samples.read(name)
    found = parse(state)
    assert (found.n_layer, found.n_cells, len(ids)) == (30, n_cells, n_cells)
    assert found.positions.tolist() == list(range(n_cells))
    assert (found.type_k, found.type_v, found.v_transposed) == (ggml_type, ggml_type, transposed)
    assert {rows.row_bytes for rows in (*found.k, *found.v)} == {row_bytes}
    assert (len(found.k), len(found.v), found.token_bytes) == (30, 30, 60 * row_bytes)
    assert (found.n_stream, found.rotation_words) == (n_stream, rotation)
    kv_state.require_plain_sequence(found, n_cells)


@pytest.mark.parametrize("name", ALL)
def test_the_rows_of_a_real_state_stand_behind_one_another_to_its_last_byte(name):
    state = state_of(name)
    found = parse(state)
    rows = (*found.k, *found.v)
    for before, after in itertools.pairwise(rows):
        assert after.offset == before.offset + found.n_cells * before.row_bytes + 12
    assert rows[-1].offset + found.n_cells * rows[-1].row_bytes == len(state)


def test_the_dialect_tells_engines_apart_that_cannot_read_each_others_states():
    dialects = {name: parse(state_of(name)).dialect for name in ALL}
    assert dialects[samples.V4_TWO_STREAMS] == "streams=2 rotation_words=1"
    assert {dialects[name] for name in ALL[:4]} == {"streams=1 rotation_words=0"}


def test_the_bodies_of_file_versions_two_and_three_are_the_same_bytes():
    assert state_of(samples.V2) == state_of(samples.F16)


def test_the_offsets_of_two_layouts_lead_to_the_same_numbers():
    """Layer 0 depends on nothing but weights and tokens, so with and without flash attention its K and V are equal."""
    plain, flash = state_of(samples.F16), state_of(samples.F16_FLASH)
    a, b = parse(plain), parse(flash)
    k = [s[p.k[0].offset : p.k[0].offset + 3 * 384] for s, p in ((plain, a), (flash, b))]
    assert k[0] == k[1]
    by_element = np.frombuffer(plain, dtype="<f2", count=3 * 192, offset=a.v[0].offset).reshape(192, 3)
    by_cell = np.frombuffer(flash, dtype="<f2", count=3 * 192, offset=b.v[0].offset).reshape(3, 192)
    assert np.array_equal(by_element.T, by_cell)
    assert np.isfinite(by_cell).all()
    assert by_cell.any()


def test_parsing_keeps_nothing_of_the_buffer():
    state = bytearray(state_of(samples.F16))
    found = parse(state)
    state[:] = bytes(len(state))
    state.clear()  # a bytearray that something looks into cannot be resized
    assert found.positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("known", "name"), [(0, "f32"), (1, "f16"), (8, "q8_0"), (30, "bf16"), (99, "ggml type 99")])
def test_a_type_is_called_as_ggml_calls_it(known, name):
    assert kv_state.type_name(known) == name


def test_a_state_of_a_type_not_known_here_is_read_and_the_type_named_by_its_number():
    state = bytearray(state_of(samples.F16_FLASH))
    for rows in parse(state).k:
        struct.pack_into("<i", state, rows.offset - 12, 99)
    found = parse(state)
    assert (found.type_k, found.type_v) == ("ggml type 99", "f16")


# -- states that are cut or longer ----------------------------------------------------------------------------------------


def end_of_k(found: kv_state.KvState) -> int:
    return found.k[-1].offset + found.n_cells * found.k[-1].row_bytes


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.Q8_FLASH, samples.V4_TWO_STREAMS])
def test_a_state_cut_anywhere_is_refused(name):
    state = memoryview(state_of(name))
    found = kv_state.parse(state)
    edges = {rows.offset + d for rows in (*found.k, *found.v) for d in (-13, -12, -11, -8, -4, -1, 0, 1)}
    cuts = {*range(400), *range(400, len(state), 89), *edges, len(state) - 1}
    cuts -= {end_of_k(found)}  # the next test's
    accepted = []
    for cut in sorted(cuts):
        try:
            kv_state.parse(state[:cut])
        except Unsupported:
            continue
        accepted.append(cut)
    assert accepted == []
    assert len(cuts) > 900


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.Q8_FLASH, samples.V4_TWO_STREAMS])
def test_a_state_cut_between_k_and_v_shows_itself_as_one_of_a_model_without_v(name):
    """The format has such models, so the bytes alone cannot tell; types and bytes a token can."""
    state = state_of(name)
    whole = parse(state)
    found = parse(state[: end_of_k(whole)])
    assert (found.v, found.type_v, found.type_k) == ((), "none", whole.type_k)
    assert found.token_bytes == whole.token_bytes // 2


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("extra", [b"\0", b"\xff", bytes(12), bytes(4096)], ids=len)
def test_a_state_with_bytes_behind_its_last_row_is_refused(name, extra):
    assert f"{len(extra)} bytes are left after the last row" in refusal(state_of(name) + extra)


@pytest.mark.parametrize("state", [b"", b"\0", bytes(8), bytes(70000), b"\xff" * 70000, b"ggsq" * 1000], ids=len)
def test_what_is_no_state_is_refused(state):
    assert refusal(state)


# -- states that lie ------------------------------------------------------------------------------------------------------

HUGE = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("at", "layout", "values", "reason"),
    [
        (0, "<I", [0xAF143CD7], "begins with 0xaf143cd7, not 0xaf143cd8"),
        (0, ">I", [0xAF143CD8], "begins with 0xd83c14af, not 0xaf143cd8"),
        (N_STREAM, "<I", [0], "0 streams"),
        (N_STREAM, "<I", [257], "257 streams"),
        (N_STREAM, "<I", [HUGE], "4294967295 streams"),
        (N_STREAM, "<I", [2], "lies beyond the end"),
        (N_CELLS, "<I", [0], "no cells"),
        (N_CELLS, "<I", [5823], "does not belong to exactly one sequence"),
        (N_CELLS, "<I", [5824], "byte 16 + 69888 lies beyond the end at 69900"),
        (N_CELLS, "<I", [0x7FFFFFFF], "lies beyond the end at 69900"),
        (N_CELLS, "<I", [HUGE], "byte 16 + 51539607540 lies beyond the end at 69900"),
        (CELLS + 4, "<I", [0], "does not belong to exactly one sequence"),
        (CELLS + 4, "<I", [2], "does not belong to exactly one sequence"),
        (CELLS + 28, "<I", [HUGE], "does not belong to exactly one sequence"),
        (V_TRANSPOSED, "<I", [2], "v_transposed 2, 30 layers"),
        (V_TRANSPOSED, "<I", [HUGE], "v_transposed 4294967295, 30 layers"),
        (N_LAYER, "<I", [0], ", 0 layers"),
        (N_LAYER, "<I", [1025], ", 1025 layers"),
        (N_LAYER, "<I", [HUGE], ", 4294967295 layers"),
        (N_LAYER, "<I", [31], "lies beyond the end"),
        (TYPE_K, "<i", [8], "rows of 384 bytes of q8_0"),
        (ROW_BYTES, "<Q", [0], "rows of 0 bytes of f16"),
        (ROW_BYTES, "<Q", [383], "rows of 383 bytes of f16"),
        (ROW_BYTES, "<Q", [2**32 + 384], "lies beyond the end"),
        (ROW_BYTES, "<Q", [2**63], "lies beyond the end"),
        (ROW_BYTES, "<Q", [2**64 - 2], "lies beyond the end"),
    ],
)
@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH])
def test_a_state_that_lies_is_refused_with_the_value_that_cannot_be(name, at, layout, values, reason):
    assert reason in refusal(patched(name, at, layout, *values))


@pytest.mark.parametrize("n_cells", [1, 2, 4, 100])
@pytest.mark.parametrize("name", ALL[1:4])
def test_a_state_with_another_number_of_cells_than_it_has_is_refused(name, n_cells):
    assert refusal(patched(name, N_CELLS, "<I", n_cells))


@pytest.mark.parametrize("n_layer", [1, 15, 29])
@pytest.mark.parametrize("name", ALL[1:4])
def test_a_state_with_fewer_layers_than_it_has_is_refused(name, n_layer):
    assert refusal(patched(name, N_LAYER, "<I", n_layer))


def test_a_state_whose_v_is_told_to_stand_the_other_way_is_refused():
    assert "transposed V of 0 rows of 384 bytes" in refusal(patched(samples.F16_FLASH, V_TRANSPOSED, "<I", 1))
    assert "lies beyond the end" in refusal(patched(samples.F16, V_TRANSPOSED, "<I", 0))


@pytest.mark.parametrize(("element", "n_embd"), [(0, 192), (2, 0), (0, 0), (HUGE, HUGE), (2, 193), (3, 192)])
def test_transposed_rows_that_lie_are_refused(element, n_embd):
    first_v = parse(state_of(samples.F16)).v[0].offset
    assert refusal(patched(samples.F16, first_v - 8, "<II", element, n_embd))


def test_cells_in_two_streams_are_refused():
    one = state_of(samples.F16_FLASH)
    both = one[:8] + struct.pack("<I", 2) + one[12:] + one[12:]
    assert "cells in more than one stream" in refusal(both)


@pytest.mark.parametrize("empty_before", [0, 1, 3, 255])
def test_empty_streams_before_the_sequences_own_are_read_over(empty_before):
    one = state_of(samples.F16_FLASH)
    found = parse(one[:8] + struct.pack("<I", empty_before + 1) + bytes(4 * empty_before) + one[12:])
    assert (found.n_stream, found.n_cells, found.n_layer) == (empty_before + 1, 3, 30)


@pytest.mark.parametrize(
    ("at", "layout", "value"),
    [
        (N_CELLS, "<I", HUGE),
        (N_LAYER, "<I", 1024),
        (N_LAYER, "<I", HUGE),
        (N_STREAM, "<I", HUGE),
        (ROW_BYTES, "<Q", 2**64 - 2),
    ],
)
def test_an_absurd_count_in_a_state_costs_no_memory(at, layout, value):
    state = patched(samples.F16, at, layout, value)
    tracemalloc.start()
    try:
        refusal(state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# -- positions ------------------------------------------------------------------------------------------------------------


def with_positions(*positions: int) -> kv_state.KvState:
    state = bytearray(state_of(samples.F16))
    for i, position in enumerate(positions):
        struct.pack_into("<i", state, CELLS + 12 * i, position)
    return parse(state)


@pytest.mark.parametrize("positions", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_cells_may_stand_in_any_order(positions):
    found = with_positions(*positions)
    assert found.positions.tolist() == list(positions)
    kv_state.require_plain_sequence(found, 3)


@pytest.mark.parametrize(
    "positions", [(1, 2, 3), (0, 1, 1), (0, 0, 0), (0, 1, 3), (-1, 0, 1), (0, 1, 2**31 - 1), (-(2**31), 0, 1)]
)
def test_positions_that_are_not_each_of_0_to_n_minus_1_once_are_refused(positions):
    with pytest.raises(Unsupported, match="its positions are not 0 to 2, once each"):
        kv_state.require_plain_sequence(with_positions(*positions), 3)


@pytest.mark.parametrize("n_tokens", [0, 2, 4, 2**32 - 1])
def test_a_state_of_another_number_of_tokens_is_refused(n_tokens):
    with pytest.raises(Unsupported, match=f"it has 3 cells for {n_tokens} tokens"):
        kv_state.require_plain_sequence(with_positions(0, 1, 2), n_tokens)
