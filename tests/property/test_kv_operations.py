"""What holds of states of any shape: built by the format's own rules here, and taken apart by the library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import samples

from llama_ckpt import formats
from llama_ckpt.errors import BadInput, CorruptFile, Incompatible, LlamaCkptError, Unsupported
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.formats.kv.types import GGML_TYPES

FLOATS = {0: 4, 1: 2, 30: 2}


@dataclass
class Shape:
    """One cache of a state: everything that decides its bytes but the numbers."""

    type_k: int
    type_v: int | None
    blocks: list[int]  # of each layer's row
    transposed: bool


@dataclass
class Made:
    shapes: list[Shape]
    dialect: Dialect
    index: int
    order: list[int]
    start: int
    seed: int

    @property
    def n_cells(self) -> int:
        return len(self.order)

    def state(self, cells: list[int] | None = None, dialect: Dialect | None = None, index: int | None = None) -> bytes:
        """The bytes of the state that holds only `cells` (indexes of `order`), as llama.cpp would write them."""
        kept = range(self.n_cells) if cells is None else cells
        dialect, index = dialect or self.dialect, self.index if index is None else index
        out = struct.pack("<Ii", 0xAF143CD8, 0)
        rng = np.random.default_rng(self.seed)
        for shape in self.shapes:
            out += self.cache(shape, rng, list(kept), dialect, index)
        return out

    def cache(self, shape: Shape, rng, kept: list[int], dialect: Dialect, index: int) -> bytes:
        out = struct.pack("<I", dialect.n_stream) + bytes(4 * index) if dialect.n_stream else b""
        out += struct.pack("<I", len(kept))
        for i in kept:
            out += struct.pack("<iI", self.start + self.order[i], 1 if dialect.n_stream else 0)
            out += struct.pack("<3i", i, -i, 7 * i)[: dialect.cell_extension]
            out += struct.pack("<i", 0) if dialect.n_stream else b""
        out += struct.pack("<II", shape.transposed, len(shape.blocks))
        out += struct.pack("<II", 0, 0) if dialect.rotation_words else b""
        for part, ggml_type in (("k", shape.type_k), ("v", shape.type_v)):
            for blocks in shape.blocks if ggml_type is not None else ():
                size = GGML_TYPES[ggml_type].block_bytes
                rows = rng.integers(0, 256, (self.n_cells, blocks, size), dtype=np.uint8)[kept]
                if part == "v" and shape.transposed:
                    out += struct.pack("<iII", ggml_type, size, blocks) + rows.transpose(1, 0, 2).tobytes()
                else:
                    out += struct.pack("<iQ", ggml_type, blocks * size) + rows.tobytes()
        return out + bytes(4 * (dialect.n_stream - index - 1) if dialect.n_stream else 0)

    def expected(self, wanted) -> list[int]:
        return [i for i, position in enumerate(self.order) if wanted(self.start + position)]


TYPES = st.sampled_from(sorted(GGML_TYPES))


@st.composite
def made_states(draw, types=TYPES) -> Made:
    n_stream = draw(st.sampled_from([1, 1, 1, 2, 5]))
    dialect = draw(
        st.sampled_from(
            [Dialect(n_stream), Dialect(n_stream, True), Dialect(n_stream, False, 8), Dialect(n_stream, True, 12)]
        )
    )
    turned = draw(st.booleans())
    type_k = draw(types)
    type_v = draw(st.none() | types) if not turned else draw(st.sampled_from(sorted(FLOATS)))
    shapes = [
        Shape(type_k, type_v, draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)), turned)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3] if type_v is not None else [1])))
    ]
    n_cells = draw(st.integers(1, 9))
    order = draw(st.just(list(range(n_cells))) | st.permutations(range(n_cells)))
    index = draw(st.integers(0, max(dialect.n_stream - 1, 0)))
    return Made(shapes, dialect, index, list(order), draw(st.sampled_from([0, 0, 0, 40])), draw(st.integers(0, 2**32)))


def view(data: bytes) -> memoryview:
    return memoryview(data)


@settings(max_examples=100, deadline=None)
@given(made_states())
def test_a_state_of_any_shape_is_parsed_to_its_last_byte(made):
    data = made.state()
    found = kv_state.parse(view(data))
    assert found.positions.tolist() == [made.start + p for p in made.order]
    assert (found.layout, found.first.index) == (made.dialect, made.index)
    assert [len(cache.streams[0].k) for cache in found.caches] == [len(shape.blocks) for shape in made.shapes]
    last = found.caches[-1].streams[-1]
    end = (*last.k, *last.v)[-1]
    trailing = 4 * (made.dialect.n_stream - made.index - 1)
    assert end.offset + found.n_cells * end.row_bytes + trailing == len(data)
    kv_values.not_finite(view(data))


@settings(max_examples=100, deadline=None)
@given(made_states(), st.data())
def test_cut_and_tail_are_the_states_that_hold_just_those_cells(made, data):
    state = view(made.state())
    at = made.start + data.draw(st.integers(1, made.n_cells))
    assert bytes(kv_edit.truncate(state, at)) == made.state(made.expected(lambda p: p < at))
    if at < made.start + made.n_cells:
        assert bytes(kv_edit.tail(state, at)) == made.state(made.expected(lambda p: p >= at))


@settings(max_examples=100, deadline=None)
@given(made_states(), st.data())
def test_join_is_the_inverse_of_cutting_in_two(made, data):
    assume(made.n_cells > 1)
    made.order = sorted(made.order)
    state = view(made.state())
    at = made.start + data.draw(st.integers(1, made.n_cells - 1))
    assert bytes(kv_edit.join(kv_edit.truncate(state, at), kv_edit.tail(state, at))) == bytes(state)


@settings(max_examples=100, deadline=None)
@given(made_states(types=st.sampled_from(sorted(FLOATS))), st.integers(1, 6), st.booleans(), st.data())
def test_translated_to_any_dialect_a_state_is_what_that_engine_would_have_written(made, n_stream, words, data):
    assume(all(shape.type_v is not None for shape in made.shapes))
    dialect = Dialect(n_stream, words, made.dialect.cell_extension)
    assume(not (words and made.dialect.cell_extension == 8))
    seq_id = data.draw(st.integers(0, n_stream - 1))
    there = kv_edit.to_dialect(view(made.state()), dialect, seq_id=seq_id)
    index = seq_id if n_stream > 1 else 0
    found = kv_state.parse(there)
    assert (found.layout, found.first.index) == (dialect, index)
    if seq_id == 0:
        assert bytes(there) == made.state(dialect=dialect, index=index)


@settings(max_examples=150, deadline=None)
@given(made_states(types=st.sampled_from(sorted(FLOATS))))
def test_v_turned_twice_is_the_same(made):
    state = view(made.state())
    turned = kv_edit.transpose_v(state, transposed=not made.shapes[0].transposed)
    for shape in made.shapes:
        shape.transposed = not shape.transposed
    assert bytes(turned) == made.state()
    assert bytes(kv_edit.transpose_v(turned, transposed=not made.shapes[0].transposed)) == bytes(state)


@settings(max_examples=150, deadline=None)
@given(made_states(), st.sets(st.integers(0, 11)))
def test_layers_replaced_and_put_back_give_the_first_state(made, layers):
    state = view(made.state())
    layers = {layer for layer in layers if layer < kv_state.parse(state).n_layer}
    made.seed += 1
    other = view(made.state())
    mixed = kv_edit.replace_layers(state, other, layers)
    assert bytes(kv_edit.replace_layers(mixed, state, layers)) == bytes(state)
    rest = set(range(kv_state.parse(state).n_layer)) - layers
    assert bytes(kv_edit.replace_layers(mixed, other, rest)) == bytes(other)


# -- hostile bytes --------------------------------------------------------------------------------------------------------

OPERATIONS = [
    lambda s: kv_edit.truncate(s, 1),
    lambda s: kv_edit.tail(s, 1),
    lambda s: kv_edit.join(s, s),
    lambda s: kv_edit.to_dialect(s, Dialect(2, True)),
    lambda s: kv_edit.transpose_v(s, transposed=True),
    lambda s: kv_edit.replace_layers(s, s, [0]),
    kv_values.not_finite,
]
U32 = st.integers(0, 2**32 - 1) | st.integers(0, 40)


@settings(max_examples=150, deadline=None)
@given(made_states(), st.lists(st.tuples(st.integers(0, 60), U32), min_size=1, max_size=4), st.integers(0, 40))
def test_a_state_that_lies_is_refused_by_every_operation_or_operated_on(made, lies, cut):
    data = bytearray(made.state())
    for word, value in lies:
        if 4 * word + 4 <= len(data):
            struct.pack_into("<I", data, 4 * word, value)
    state = view(bytes(data[: len(data) - cut]))
    for operation in OPERATIONS:
        try:
            result = operation(state)
        except (Unsupported, Incompatible, BadInput):
            continue
        if isinstance(result, memoryview):
            kv_state.parse(result)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(samples.all_names()),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_any_damage_to_a_real_file_is_answered_and_never_an_error(name, changes, kept, padding):
    data = bytearray(samples.data(name))
    for where, xor in changes:
        data[int(where * min(len(data), 400))] ^= xor
    damaged = view(bytes(padding) + bytes(data[: max(1, int(kept * len(data)))]))
    found = formats.identify(damaged, "the file")
    assert found.restorable == (found.why_not is None)
    assert not found.restorable or found.whole
    try:
        file = engine_files.read(damaged, "the file")
    except CorruptFile:
        return
    try:
        kv_state.parse(engine_files.sequence_state(file))
    except LlamaCkptError:
        assert not found.restorable


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([b"", b"qsgg", b"nsgg", b"LLAM", b"MALL", b"\xd8\x3c\x14\xaf"]), st.binary(max_size=400))
def test_random_bytes_are_answered(start, data):
    found = formats.identify(view(start + data), "the file")
    assert not found.restorable
    assert found.why_not
