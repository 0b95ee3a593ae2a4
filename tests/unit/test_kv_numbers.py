"""K and V as numbers, and what tells two states apart."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from support import samples

from llama_ckpt.errors import Incompatible, Unsupported
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import numbers as kv_numbers
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.pieces import Block


def half(value: float) -> bytes:
    return struct.pack("<e", value)


NIBBLES = bytes(range(0xF0, 0xEF, -1)) * 16  # low half 0, high half 15
FIFTH = struct.pack("<I", 0x0000FFFF)  # set for the first 16 numbers
BLOCKS = {
    "f32": (0, struct.pack("<2f", 1.5, -2), [1.5, -2]),
    "f16": (1, half(1.5) + half(-2), [1.5, -2]),
    "bf16": (30, bytes([0xC0, 0x3F, 0x00, 0xC0]), [1.5, -2]),
    "q8_0": (8, half(0.5) + bytes([2, 0xFE] * 16), [1, -1] * 16),
    "q4_0": (2, half(0.5) + NIBBLES, [-4] * 16 + [3.5] * 16),
    "q4_1": (3, half(0.5) + half(1) + NIBBLES, [1] * 16 + [8.5] * 16),
    "q5_0": (6, half(0.5) + FIFTH + NIBBLES, [0] * 16 + [-0.5] * 16),
    "q5_1": (7, half(0.5) + half(1) + FIFTH + NIBBLES, [9] * 16 + [8.5] * 16),
    "iq4_nl": (20, half(0.5) + NIBBLES, [-63.5] * 16 + [56.5] * 16),
}


@pytest.mark.parametrize(("kind", "data", "values"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_of_each_type_is_read_as_llama_cpp_reads_it(kind, data, values):
    rows = np.frombuffer(data * 4, dtype=np.uint8).reshape(2, -1)  # two cells of two blocks
    read = kv_numbers.numbers(Block(ggml_type=kind, parts=((rows, slice(None)),)))
    assert read.dtype == np.float32
    assert read.tolist() == [values * 2] * 2


def test_a_type_that_no_cache_has_is_not_guessed():
    with pytest.raises(Unsupported, match="q6_K"):
        kv_numbers.numbers(Block(ggml_type=14, parts=((np.zeros((1, 210), dtype=np.uint8), slice(None)),)))


def state_of(name):
    return engine_files.sequence_state(engine_files.read(memoryview(samples.data(name)), name))


@pytest.mark.parametrize("name", [samples.F16, samples.F16_FLASH, samples.Q8_FLASH, samples.V4_TWO_STREAMS])
def test_a_state_is_at_no_distance_from_itself(name):
    assert kv_numbers.distance(state_of(name), state_of(name)) == (0, 0, "K", 0)


def test_how_a_state_stands_is_no_matter():
    state = state_of(samples.F16_FLASH)
    other = kv_edit.to_dialect(state, Dialect(3, rotation_words=True))
    assert kv_numbers.distance(other, state).furthest == 0


def test_two_builds_of_llama_cpp_agree_on_the_same_tokens():
    assert kv_numbers.distance(state_of(samples.V4_ROTATED), state_of(samples.Q8_FLASH)).furthest < 0.04


def test_one_layer_of_other_numbers_is_found():
    state = bytearray(state_of(samples.F16_FLASH))
    rows = kv_state.parse(memoryview(bytes(state))).v[17]
    state[rows.offset : rows.offset + 3 * rows.row_bytes] = bytes(3 * rows.row_bytes)
    found = kv_numbers.distance(memoryview(bytes(state)), state_of(samples.F16_FLASH))
    assert found == (0, 1, "V", 17)


def test_what_is_no_number_is_further_than_everything():
    state = bytearray(state_of(samples.F16_FLASH))
    rows = kv_state.parse(memoryview(bytes(state))).k[5]
    state[rows.offset : rows.offset + 3 * rows.row_bytes] = struct.pack("<H", 0x7E00) * (3 * rows.row_bytes // 2)
    found = kv_numbers.distance(memoryview(bytes(state)), state_of(samples.F16_FLASH))
    assert np.isnan(found.furthest)
    assert (found.part, found.layer) == ("K", 5)


@pytest.mark.parametrize("other", [samples.Q8_FLASH, samples.V4_TWO_STREAMS])
def test_states_of_other_shapes_are_not_compared(other):
    with pytest.raises(Incompatible, match="other layers, types, row sizes or numbers of cells"):
        kv_numbers.distance(state_of(samples.F16_FLASH), state_of(other))
