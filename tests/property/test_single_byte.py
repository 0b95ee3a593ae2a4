"""A file in which anything changed is refused, and what a forger makes of it is refused or read: never another error."""

from __future__ import annotations

import json
import struct
import zlib
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import container

ALL = [samples.F16, samples.F16_FLASH, samples.Q8_FLASH, samples.V4_TWO_STREAMS]


@cache
def parts(sample: str) -> tuple[bytes, bytes]:
    """The head and the payload of a real checkpoint file."""
    engine = SampleEngine(sample)
    header = container.Header(
        flags=container.FLAG_SLICEABLE,
        seq_len=len(engine.ids),
        start_token=0,
        n_layer=30,
        n_kv_head=3,
        metadata_size=0,
        fingerprint=engine.fingerprint.digest,
        input_hash=bytes(range(32)),
        created_ns=1_700_000_000_123_456_789,
    )
    metadata = {
        "dialect": str(engine.layout),
        "engine": engine.engine_name,
        "fingerprint": dict(engine.fingerprint.fields),
        "memory_kind": "full",
        "model_name": "sample",
    }
    head, _ = container.encode_head(header, metadata, engine.ids, memoryview(engine.state))
    return head, engine.state


def file_of(sample: str, padding: int = 0) -> bytes:
    head, state = parts(sample)
    return bytes(padding) + head + state


def refused(data: bytes | memoryview) -> bool:
    """Whether the reader refuses the bytes; any other exception than its own is the test's failure."""
    try:
        formats.open_checkpoint(memoryview(data), "the file")
    except CorruptFile:
        return True
    return False


def sealed(data: bytes) -> bytes:
    """`data` with the CRCs that a forger would write, wherever its header leaves room for that."""
    made = bytearray(data)
    n_meta, n_tokens = (struct.unpack_from("<I", made, at)[0] for at in (0x1C, 0x10))
    payload_at = struct.unpack_from("<Q", made, 0x70)[0]
    struct.pack_into("<I", made, 0x68, zlib.crc32(made[0x80 : 0x80 + n_meta + 4 * n_tokens]))
    struct.pack_into("<I", made, 0x6C, zlib.crc32(made[payload_at:]))
    made[0x0C:0x10] = bytes(4)
    struct.pack_into("<I", made, 0x0C, zlib.crc32(made[:0x80]))
    return bytes(made)


@pytest.mark.parametrize("sample", ALL)
def test_the_file_of_these_tests_is_read_where_nothing_changed(sample):
    assert not refused(file_of(sample))
    assert not refused(file_of(sample, padding=8))
    assert sealed(file_of(sample)) == file_of(sample)


# -- one byte -------------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 8), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_changed_byte_is_refused(sample, padding, where, xor):
    data = bytearray(file_of(sample, padding))
    data[int(where * len(data))] ^= xor
    assert refused(data)


def test_every_byte_of_header_metadata_ids_and_filling_counts():
    data = bytearray(file_of(samples.Q8_FLASH))
    head = len(parts(samples.Q8_FLASH)[0])
    assert head == 4096
    unseen = []
    for at in range(head):
        data[at] ^= 0xA5
        if not refused(data):
            unseen.append(at)
        data[at] ^= 0xA5
    assert unseen == []
    assert not refused(data)


@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_the_header_counts(bit):
    data = bytearray(file_of(samples.Q8_FLASH))
    unseen = []
    for at in range(128):
        data[at] ^= 1 << bit
        if not refused(data):
            unseen.append(at)
        data[at] ^= 1 << bit
    assert unseen == []


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(ALL), st.integers(2, 64))
def test_any_run_of_changed_bytes_is_refused(data, sample, length):
    changed = bytearray(file_of(sample))
    at = data.draw(st.integers(0, len(changed) - length))
    new = data.draw(st.binary(min_size=length, max_size=length).filter(lambda b: b != changed[at : at + length]))
    changed[at : at + length] = new
    assert refused(changed)


# -- cut, longer, moved ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 8), st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_refused(sample, padding, kept):
    data = memoryview(file_of(sample, padding))
    assert refused(data[: int(kept * len(data))])


def test_a_file_cut_at_each_of_its_first_and_last_bytes_is_refused():
    data = memoryview(file_of(samples.Q8_FLASH))
    kept = [*range(300), *range(4090, 4200), *range(len(data) - 100, len(data))]
    assert [n for n in kept if not refused(data[:n])] == []


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(ALL), st.binary(min_size=1, max_size=5000))
def test_any_bytes_behind_the_end_are_refused(sample, extra):
    assert refused(file_of(sample) + extra)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=20))
def test_only_up_to_eight_zeros_may_stand_before_the_file(before):
    harmless = len(before) <= 8 and not any(before)
    assert refused(before + file_of(samples.Q8_FLASH)) != harmless


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(ALL), st.sampled_from(ALL))
def test_the_head_of_one_file_on_the_payload_of_another_is_refused(one, other):
    assert refused(parts(one)[0] + parts(other)[1]) == (one != other)


# -- what was never a file, and what a forger made of one -----------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes_are_refused(data):
    assert refused(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 8), st.binary(min_size=124, max_size=600))
def test_random_bytes_behind_the_magic_are_refused(padding, data):
    assert refused(bytes(padding) + b"LLAM" + data)


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NEAR = st.integers(0, 70_000)
LIES = st.one_of(  # offset, layout, value
    st.tuples(st.sampled_from([0x04, 0x08, 0x10, 0x14, 0x1C, 0x68, 0x6C]), st.just("<I"), NEAR | U32),
    st.tuples(st.sampled_from([0x18, 0x1A]), st.just("<H"), st.integers(0, 2**16 - 1)),
    st.tuples(st.sampled_from([0x70, 0x78]), st.just("<Q"), NEAR | U64),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(LIES, min_size=1, max_size=6))
def test_a_header_of_any_numbers_under_a_valid_crc_is_refused_or_the_true_one(lies):
    whole = file_of(samples.Q8_FLASH)
    data = bytearray(whole)
    for at, layout, value in lies:
        struct.pack_into(layout, data, at, value)
    data[0x0C:0x10] = bytes(4)
    struct.pack_into("<I", data, 0x0C, zlib.crc32(data[:0x80]))
    harmless = bytearray(data)  # what no check of the file alone can know
    harmless[0x08:0x10], harmless[0x1A:0x1C] = whole[0x08:0x10], whole[0x1A:0x1C]
    assert refused(data) or harmless == whole


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(ALL))
def test_a_forged_payload_is_refused_or_read_and_never_another_error(data, sample):
    made = bytearray(file_of(sample))
    words = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4) | NEAR | U32), min_size=1, max_size=5))
    for word, value in words:
        struct.pack_into("<I", made, 4096 + 4 * word, value)
    cut = data.draw(st.just(0) | st.integers(0, len(made) - 4097))
    del made[len(made) - cut :]
    struct.pack_into("<Q", made, 0x78, len(made) - 4096)
    if not refused(forged := sealed(made)):
        state = formats.open_checkpoint(memoryview(forged), "the file").state
        assert sorted(state.positions.tolist()) == list(range(len(samples.read(sample)[0])))
        last = (*state.k, *state.v)[-1]
        assert last.offset + state.n_cells * last.row_bytes == len(forged) - 4096


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.one_of(JSON, st.fixed_dictionaries({"fingerprint": JSON})))
def test_metadata_that_says_anything_but_the_fingerprint_is_refused(metadata):
    meta = json.dumps(metadata).encode()
    head, state = parts(samples.Q8_FLASH)
    ids = samples.read(samples.Q8_FLASH)[0].astype("<i4").tobytes()
    made = bytearray(head[:0x80] + meta + ids)
    made += bytes(-len(made) % 4096)
    struct.pack_into("<I", made, 0x1C, len(meta))
    struct.pack_into("<Q", made, 0x70, len(made))
    assert refused(sealed(made + state))
