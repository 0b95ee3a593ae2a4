"""What is written comes back as it was, whatever it was."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ckpt.fingerprint import canonical_json, fingerprint
from llama_ckpt.formats import container

TEXT = st.text(max_size=20)  # without surrogates, which UTF-8 cannot say
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXT, children, max_size=4),
    max_leaves=8,
)
METADATA = st.dictionaries(TEXT, JSON, max_size=4)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)
PAYLOADS = st.binary(min_size=1, max_size=200) | st.integers(1, 20_000).map(bytes)
DIGESTS = st.binary(min_size=32, max_size=32)


@st.composite
def headers(draw: st.DrawFn, n_tokens: int) -> container.Header:
    start = draw(st.just(0) | st.integers(0, 2**32 - 1 - n_tokens))
    return container.Header(
        flags=(1 if start else 0) | draw(st.sampled_from([0, 2])),
        seq_len=start + n_tokens,
        start_token=start,
        n_layer=draw(st.integers(0, 2**16 - 1)),
        n_kv_head=draw(st.integers(0, 2**16 - 1)),
        metadata_size=draw(st.integers(0, 2**32 - 1)),  # the writer fills it in
        fingerprint=draw(DIGESTS),
        input_hash=draw(DIGESTS),
        created_ns=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), METADATA, IDS, PAYLOADS, st.integers(0, 8))
def test_header_metadata_ids_and_payload_come_back_as_they_were(data, metadata, ids, payload, padding):
    given_header = data.draw(headers(len(ids)))
    head, full = container.encode_head(given_header, metadata, np.array(ids, dtype=np.int32), memoryview(payload))
    view = memoryview(bytes(padding) + head + payload)
    header, found_padding = container.read_header(view, "the file")
    contents = container.read_contents(view, header, found_padding, "the file")
    assert (found_padding, contents.padding) == (padding, padding)
    assert header == full == contents.header
    for name in ("flags", "seq_len", "start_token", "n_layer", "n_kv_head", "fingerprint", "input_hash", "created_ns"):
        assert getattr(header, name) == getattr(given_header, name)
    assert contents.metadata == metadata
    assert contents.token_ids.tolist() == ids
    assert contents.payload == payload


@settings(max_examples=50, deadline=None)
@given(st.data(), METADATA, IDS, PAYLOADS)
def test_the_payload_begins_on_a_page_and_nothing_but_zeros_stands_before_it(data, metadata, ids, payload):
    header = data.draw(headers(len(ids)))
    head, full = container.encode_head(header, metadata, np.array(ids, dtype=np.int32), memoryview(payload))
    end = 128 + full.metadata_size + 4 * len(ids)
    assert full.payload_offset == len(head)
    assert len(head) % 4096 == 0
    assert 0 <= len(head) - end < 4096
    assert not any(head[end:])
    assert head[end - 4 * len(ids) : end] == struct.pack(f"<{len(ids)}i", *ids)


@settings(max_examples=50, deadline=None)
@given(st.data(), METADATA, IDS, PAYLOADS)
def test_the_same_values_give_the_same_bytes_whatever_the_order_of_the_metadata(data, metadata, ids, payload):
    header = data.draw(headers(len(ids)))
    token_ids = np.array(ids, dtype=np.int32)
    shuffled = {key: metadata[key] for key in data.draw(st.permutations(list(metadata)))}
    first, _ = container.encode_head(header, metadata, token_ids, memoryview(payload))
    second, _ = container.encode_head(header, shuffled, token_ids, memoryview(payload))
    assert first == second


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63))
def test_a_page_boundary_is_the_first_at_or_behind_an_offset(offset):
    aligned = container.align_up(offset)
    assert aligned % 4096 == 0
    assert 0 <= aligned - offset < 4096


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.data())
def test_a_crc_of_parts_is_the_crc_of_the_whole(whole, data):
    at = data.draw(st.integers(0, len(whole)))
    assert container.crc32(whole[at:], container.crc32(whole[:at])) == container.crc32(whole)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4), st.data())
def test_a_fingerprint_does_not_depend_on_the_order_of_its_fields(fields, data):
    fields = {**fields, "weights": "ab" * 32}
    shuffled = {key: fields[key] for key in data.draw(st.permutations(list(fields)))}
    assert canonical_json(shuffled) == canonical_json(fields)
    assert fingerprint(shuffled).digest == fingerprint(fields).digest
