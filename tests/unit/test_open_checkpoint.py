"""What a checkpoint file is taken for as a whole: the order of the checks, and the agreement of file, row and engine."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib

import numpy as np
import pytest
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.fingerprint import tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import Checkpoint, MemoryKind, ModelDimensions, Status

INPUT_HASH = bytes(range(32))


def make(sample: str = samples.F16, *, state=None, ids=None, metadata=None, **header) -> bytes:
    """A whole checkpoint file of a recorded state; what is given replaces a part, and every CRC is right."""
    engine = SampleEngine(sample)
    state = engine.state if state is None else state
    ids = engine.ids if ids is None else ids
    fields = {
        "flags": container.FLAG_SLICEABLE,
        "seq_len": len(ids),
        "start_token": 0,
        "n_layer": 30,
        "n_kv_head": 3,
        "metadata_size": 0,
        "fingerprint": engine.fingerprint.digest,
        "input_hash": INPUT_HASH,
        "created_ns": 1,
    }
    if metadata is None:
        metadata = {"fingerprint": dict(engine.fingerprint.fields)}
    head, _ = container.encode_head(container.Header(**{**fields, **header}), metadata, ids, memoryview(state))
    return head + state


def with_metadata(meta: bytes) -> bytes:
    """A whole file with these bytes for metadata, JSON or not, and every CRC right."""
    ids, state = samples.read(samples.F16)
    body = meta + ids.astype("<i4").tobytes()
    offset = container.align_up(128 + len(body))
    head = bytearray(make()[:128])
    struct.pack_into("<I", head, 0x1C, len(meta))
    struct.pack_into("<I", head, 0x68, zlib.crc32(body))
    struct.pack_into("<Q", head, 0x70, offset)
    head[0x0C:0x10] = bytes(4)
    struct.pack_into("<I", head, 0x0C, zlib.crc32(head))
    return (head + body).ljust(offset, b"\0") + state


def opened(data: bytes) -> tuple[formats.CheckpointFile, list[str]]:
    passed: list[str] = []
    return formats.open_checkpoint(memoryview(data), "the file", passed.append), passed


def refused(data: bytes) -> tuple[CorruptFile, list[str]]:
    passed: list[str] = []
    with pytest.raises(CorruptFile) as caught:
        formats.open_checkpoint(memoryview(data), "the file", passed.append)
    assert caught.value.values["path"] == "the file"
    return caught.value, passed


# -- a whole file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "token_bytes"),
    [
        (samples.V2, 23040),
        (samples.F16, 23040),
        (samples.F16_FLASH, 23040),
        (samples.Q8_FLASH, 12240),
        (samples.V4_TWO_STREAMS, 23040),
    ],
)
def test_a_whole_file_passes_header_then_crcs_then_structure(sample, token_bytes):
    ids, state = samples.read(sample)
    file, passed = opened(make(sample))
    assert passed == ["Header", "CRC32", "Structure"]
    assert file.contents.payload == state
    assert file.contents.token_ids.tolist() == ids.tolist()
    assert file.fingerprint == SampleEngine(sample).fingerprint
    assert file.dimensions == ModelDimensions(n_layer=30, n_kv_head=3, kv_token_bytes=token_bytes)


def test_the_forged_metadata_of_these_tests_is_taken_where_it_is_right():
    fields = dict(SampleEngine().fingerprint.fields)
    assert opened(with_metadata(json.dumps({"fingerprint": fields}).encode()))[1] == ["Header", "CRC32", "Structure"]


def test_a_file_can_be_opened_without_anyone_listening():
    assert formats.open_checkpoint(memoryview(make()), "the file").state.n_cells == 3


@pytest.mark.parametrize("padding", [1, 8])
def test_a_file_shifted_by_zero_bytes_opens_like_the_whole_one(padding):
    file, passed = opened(bytes(padding) + make())
    assert (file.contents.padding, passed) == (padding, ["Header", "CRC32", "Structure"])
    assert file.contents.payload == samples.read(samples.F16)[1]


# -- the order of the checks ----------------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    made = bytearray(data)
    made[at] ^= 0x10
    return bytes(made)


@pytest.mark.parametrize(
    ("data", "check", "passed"),
    [
        pytest.param(b"", "Header", [], id="empty"),
        pytest.param(flipped(make(), 0x00), "Header", [], id="magic"),
        pytest.param(flipped(make(), 0x7F), "Header", [], id="header CRC"),
        pytest.param(make() + b"\0", "Header", [], id="longer"),
        pytest.param(make()[:-1], "Header", [], id="shorter"),
        pytest.param(flipped(make(), 0x80), "CRC32", ["Header"], id="metadata"),
        pytest.param(flipped(make(), 4095), "CRC32", ["Header"], id="filling"),
        pytest.param(flipped(make(), 4096), "CRC32", ["Header"], id="payload begin"),
        pytest.param(flipped(make(), len(make()) - 1), "CRC32", ["Header"], id="payload end"),
        pytest.param(
            make(state=samples.read(samples.F16)[1] + b"\0"), "Structure", ["Header", "CRC32"], id="state longer"
        ),
        pytest.param(
            make(state=samples.read(samples.F16)[1][:-1]), "Structure", ["Header", "CRC32"], id="state shorter"
        ),
        pytest.param(make(state=b"not a state"), "Structure", ["Header", "CRC32"], id="no state"),
        pytest.param(make(n_layer=29), "Structure", ["Header", "CRC32"], id="layers"),
        pytest.param(make(fingerprint=bytes(32)), "Structure", ["Header", "CRC32"], id="fingerprint"),
        pytest.param(make(metadata={}), "Structure", ["Header", "CRC32"], id="no fields"),
    ],
)
def test_the_first_check_that_fails_is_named_and_the_ones_before_it_were_told(data, check, passed):
    error, told = refused(data)
    assert (error.values["check"], told) == (check, passed)


def test_the_checks_are_made_in_order_when_everything_is_wrong_at_once():
    data = bytearray(make(state=b"not a state", n_layer=1, metadata={}))
    data[4096] ^= 1
    data[0x80] ^= 1
    data[0x10] ^= 1
    for at, reason in ((0x10, "CRC of the header"), (0x80, "CRC-32 of the metadata"), (4096, "CRC-32 of the payload")):
        error, _ = refused(bytes(data))
        assert reason in error.values["reason"]
        data[at] ^= 1  # repaired
    error, _ = refused(bytes(data))
    assert error.values["check"] == "Structure"


@pytest.mark.parametrize("meta", [b"no json", b"[1, 2]"])
def test_a_check_that_was_told_to_hold_is_not_the_one_that_fails(meta):
    error, told = refused(with_metadata(meta))
    assert "the metadata is no JSON" in error.values["reason"]
    assert error.values["check"] not in told


# -- structure ------------------------------------------------------------------------------------------------------------


def positioned(*positions: int) -> bytes:
    state = bytearray(samples.read(samples.F16)[1])
    for i, position in enumerate(positions):
        struct.pack_into("<i", state, 16 + 12 * i, position)
    return bytes(state)


def told_sixty_layers() -> bytes:
    state = bytearray(samples.read(samples.F16_FLASH)[1])
    struct.pack_into("<I", state, 56, 60)
    return bytes(state)


def without_v() -> bytes:
    """Cut where V begins: the bytes of a model that keeps none."""
    state = samples.read(samples.F16)[1]
    last_k = kv_state.parse(memoryview(state)).k[-1]
    return state[: last_k.offset + 3 * last_k.row_bytes]


def named(**fields) -> dict:
    """Metadata whose fingerprint says something else in these fields."""
    return {"fingerprint": {**SampleEngine().fingerprint.fields, **fields}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_layer": 29}, "the header says 29 layers, the payload has 30"),
        ({"sample": samples.F16_FLASH, "state": told_sixty_layers()}, "the header says 30 layers, the payload has 60"),
        ({"ids": np.array([504, 7742], dtype=np.int32)}, "it has 3 cells for 2 tokens"),
        ({"ids": np.array([504, 7742, 2004, 1], dtype=np.int32)}, "it has 3 cells for 4 tokens"),
        ({"state": positioned(0, 1, 3)}, "its positions are not 0 to 2, once each"),
        ({"state": positioned(5, 6, 7)}, "its positions are not 0 to 2, once each"),
        ({"fingerprint": bytes(32)}, "the metadata's fields do not give the header's fingerprint"),
        ({"metadata": named(weights="cd" * 32)}, "the metadata's fields do not give the header's fingerprint"),
        ({"metadata": named(type_k="q8_0")}, "the payload's type_k is f16, the fingerprint's q8_0"),
        ({"metadata": named(type_v="q8_0")}, "the payload's type_v is f16, the fingerprint's q8_0"),
        ({"metadata": named(v_transposed=False)}, "the payload's v_transposed is True, the fingerprint's False"),
        ({"metadata": {"fingerprint": {"weights": "ab" * 32}}}, "the payload's type_k is f16, the fingerprint's None"),
        ({"state": without_v()}, "the payload's type_v is none, the fingerprint's f16"),
        ({"metadata": {}}, "metadata field 'fingerprint': None cannot be used: it is no JSON object"),
        ({"metadata": {"fingerprint": "abab"}}, "it is no JSON object"),
        ({"metadata": {"fingerprint": ["weights"]}}, "it is no JSON object"),
        ({"metadata": {"fingerprint": {}}}, "the field 'weights' is not there"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_parts_that_disagree_are_refused_with_both_sides(changes, reason):
    changes = dict(changes)
    error, _ = refused(make(changes.pop("sample", samples.F16), **changes))
    assert error.values["check"] == "Structure"
    assert reason in error.values["reason"]


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_a_fingerprint_field_that_json_cannot_write_back_is_refused(number):
    error, _ = refused(with_metadata(b'{"fingerprint":{"rope":' + number + b',"weights":"ab"}}'))
    assert error.values["check"] == "Structure"
    assert "Out of range float values are not JSON compliant" in error.values["reason"]


def test_metadata_nested_to_any_depth_is_refused_and_never_ends_in_a_recursion_error():
    reasons = {}
    for depth in (1, 100, *range(850, 1010), 5000, 30000):  # Python's own limit is about 1000
        known = b'{"fingerprint":{"type_k":"f16","type_v":"f16","v_transposed":true,"weights":'
        nested = known + b"[" * depth + b"]" * depth + b"}}"
        reasons[depth] = refused(with_metadata(nested))[0].values["reason"]
    assert reasons[1] == reasons[100] == "the metadata's fields do not give the header's fingerprint"
    assert "the metadata is no JSON" in reasons[30000]


def test_a_field_of_the_payload_nested_to_any_depth_is_refused_and_never_ends_in_a_recursion_error():
    for depth in (1, 100, *range(850, 1010)):
        nested = b'{"fingerprint":{"weights":"ab","type_k":' + b"[" * depth + b"]" * depth + b"}}"
        assert refused(with_metadata(nested))[0].values["check"] == "Structure"


@pytest.mark.parametrize("ids", [np.array([1, 2, 3], dtype=np.int32), np.array([-1, -(2**31), 0], dtype=np.int32)])
def test_token_ids_are_not_this_readers_to_judge(ids):
    """A row knows them by their hash: see the agreement of file and row."""
    assert opened(make(ids=ids))[0].contents.token_ids.tolist() == ids.tolist()


# -- file and row ---------------------------------------------------------------------------------------------------------


def row_of(file: formats.CheckpointFile, **changes) -> Checkpoint:
    header = file.contents.header
    fields = {field.name: None for field in dataclasses.fields(Checkpoint)}
    fields |= {
        "status": Status.ACTIVE,
        "memory_kind": MemoryKind.FULL,
        "fingerprint": header.fingerprint,
        "input_hash": header.input_hash,
        "tokens_hash": tokens_hash(file.contents.token_ids),
        "n_tokens": header.seq_len,
        "start_token": header.start_token,
        "payload_crc32": header.payload_crc32,
    }
    return Checkpoint(**{**fields, **changes})


def test_a_file_agrees_with_its_row():
    file, _ = opened(make())
    formats.require_agreement(file, row_of(file), "the file")
    formats.require_agreement(file, row_of(file, label="x", pinned=True, model_name="renamed", hit_count=7), "the file")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": b"\xab" * 32}, r"fingerprint: the row says abababababababab…, the file [0-9a-f]{16}…$"),
        ({"input_hash": b"\xcd" * 32}, r"input hash: the row says cdcdcdcdcdcdcdcd…, the file 0001020304050607…$"),
        ({"tokens_hash": bytes(32)}, r"tokens hash: the row says 0000000000000000…, the file [0-9a-f]{16}…$"),
        ({"n_tokens": 4}, r"number of tokens: the row says 4, the file 3$"),
        ({"payload_crc32": 0}, r"payload CRC: the row says 0, the file \d+$"),
    ],
)
def test_a_file_that_is_not_its_rows_is_refused_with_both_sides(change, reason):
    file, _ = opened(make())
    with pytest.raises(CorruptFile, match=reason) as caught:
        formats.require_agreement(file, row_of(file, **change), "the file")
    assert caught.value.values["check"] == "Row"
    assert str(caught.value).startswith("the file: Row FAILED: ")


def test_the_whole_file_of_another_input_is_refused_by_its_row():
    mine, _ = opened(make())
    for other in (
        make(input_hash=bytes(32)),
        make(ids=np.array([504, 7742, 2005], dtype=np.int32)),
        make(samples.F16_FLASH),
    ):
        theirs, _ = opened(other)
        with pytest.raises(CorruptFile):
            formats.require_agreement(theirs, row_of(mine), "the file")


# -- file and engine ------------------------------------------------------------------------------------------------------

MODEL = ModelDimensions(n_layer=30, n_kv_head=3, kv_token_bytes=23040)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"n_layer": 32}, "n_layer is 32 in the file, 30 in the model"),
        ({"n_kv_head": 8}, "n_kv_head is 8 in the file, 3 in the model"),
        ({"kv_token_bytes": 12240}, "kv_token_bytes is 12240 in the file, 23040 in the model"),
        ({"n_layer": 32, "n_kv_head": 8}, "n_layer is 32 in the file, 30 in the model"),
        ({"n_kv_head": 0}, None),
        ({"kv_token_bytes": 0}, None),
        ({"n_kv_head": 0, "kv_token_bytes": 1}, "kv_token_bytes is 1 in the file, 23040 in the model"),
    ],
)
def test_a_shape_that_differs_is_told_by_field_and_what_is_unknown_counts_as_agreeing(change, words):
    found = dataclasses.replace(MODEL, **change)
    assert formats.dimension_mismatch(found, MODEL) == words
    assert (formats.dimension_mismatch(MODEL, found) is None) == (words is None)
