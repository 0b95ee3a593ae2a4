"""What of a damaged file is put right, what only a user may say, and what never is. The bytes are of a recorded state."""

from __future__ import annotations

import struct
import zlib

import pytest
from support import samples, small

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import state as kv_state

WHOLE = small.checkpoint()
PAYLOAD_AT = 4096


def repaired(data: bytes, **trust) -> tuple[bytes, str]:
    """The repaired bytes, which must open, and what was said of them."""
    plan = formats.plan_file_repair(memoryview(data), "the file", **trust)
    made = b"".join(plan.parts)
    found = formats.identify(memoryview(made), "the file")
    assert (found.whole, found.padding) == (True, 0)
    return made, "; ".join(plan.faults)


def refused(data: bytes, **trust) -> str:
    with pytest.raises(CorruptFile) as caught:
        formats.plan_file_repair(memoryview(data), "the file", **trust)
    assert caught.value.values["check"] == "Repair"
    return str(caught.value.values["reason"])


def test_a_whole_file_needs_nothing():
    assert repaired(WHOLE) == (WHOLE, "")


@pytest.mark.parametrize("zeros", [1, 8])
@pytest.mark.parametrize("name", [None, samples.F16, samples.CONTEXT_V11, samples.HYBRID])
def test_padding_is_taken_off(name, zeros):
    data = WHOLE if name is None else samples.data(name)
    assert repaired(bytes(zeros) + data) == (data, f"{zeros} zero bytes before the magic: taken off")


def test_no_byte_of_the_payload_is_copied():
    data = bytearray(bytes(3) + small.changed(WHOLE, seq_len=5))
    plan = formats.plan_file_repair(memoryview(data), "the file")
    head, payload = plan.parts
    data[-1] ^= 1
    assert payload[-1] == data[-1], "the part is a view into what was given"
    assert len(head) == PAYLOAD_AT


# -- a header that disagrees with the payload -----------------------------------------------------------------------------

LIES = {
    "version": 3,
    "flags": 0xFF,
    "seq_len": 5,
    "start_token": 2,
    "n_layer": 7,
    "metadata_size": 11,
    "payload_offset": 8192,
    "payload_size": 12,
    "fingerprint": bytes(32),
    "head_crc32": 1,
    "payload_crc32": 0,
}


@pytest.mark.parametrize("name", LIES)
def test_a_field_changed_behind_the_headers_back_is_proven_by_its_crc(name):
    data = small.changed(WHOLE, **{name: LIES[name]})
    made, said = repaired(data)
    assert made == WHOLE
    assert "rebuilt" not in said
    assert said


def test_all_of_them_at_once_are_proven_by_the_same_crc():
    assert repaired(small.changed(WHOLE, **LIES))[0] == WHOLE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", 5),
        ("seq_len", 7),
        ("seq_len", 2**32 - 1),
        ("n_layer", 1),
        ("payload_size", 2**63),
        ("payload_offset", 0),
    ],
)
def test_a_header_that_was_written_wrong_is_corrected_from_the_payload(name, value):
    made, said = repaired(small.changed(WHOLE, seal=True, **{name: value}))
    assert made == WHOLE
    assert f"{name} was {value}: {small.field(WHOLE, name)}" in said


def test_a_fingerprint_that_was_written_wrong_is_not_corrected():
    """Nothing tells whether the header or the metadata is of the right weights."""
    assert "nothing tells which is right" in refused(small.changed(WHOLE, seal=True, fingerprint=bytes(32)))


def test_another_version_that_was_written_so_is_not_taken_for_damage():
    assert "version 3, this reader knows 2" in refused(small.changed(WHOLE, seal=True, version=3))


def test_a_header_crc_is_rebuilt_and_what_nothing_proves_is_named():
    made, said = repaired(small.changed(WHOLE, header_crc32=0))
    assert made == WHOLE
    assert "input hash, time and KV heads are left as they stand" in said


@pytest.mark.parametrize(("name", "value"), [("input_hash", b"\xab" * 32), ("created_ns", 5), ("n_kv_head", 9)])
def test_what_nothing_else_tells_is_kept_as_it_stands(name, value):
    made, said = repaired(small.changed(WHOLE, **{name: value}))
    assert made == small.changed(WHOLE, seal=True, **{name: value})
    assert "left as they stand" in said


def test_filling_that_is_not_zero_and_bytes_behind_the_end_are_taken_off():
    made, said = repaired(small.flipped(WHOLE, PAYLOAD_AT - 1) + b"behind")
    assert made == WHOLE
    assert "filling" in said
    assert "6 bytes behind the payload" in said


def test_a_payload_is_found_on_its_page_when_the_header_does_not_say_where():
    data = small.changed(WHOLE, seal=True, payload_offset=12288, payload_size=77, metadata_size=0)
    assert repaired(data)[0] == WHOLE


# -- CRCs that speak against their bytes ----------------------------------------------------------------------------------


def first_row_at() -> int:
    """Where the numbers of the first layer's K begin in the file."""
    return PAYLOAD_AT + kv_state.parse(memoryview(WHOLE)[PAYLOAD_AT:]).k[0].offset


def test_a_changed_number_is_not_sealed_unless_the_user_says_that_it_did_not_change():
    data = small.flipped(WHOLE, first_row_at())
    reason = refused(data)
    for word in ("CRC-32 of the payload", "nothing in the file tells which is wrong", "--trust-payload"):
        assert word in reason
    assert refused(data, trust_tokens=True) == reason
    made, said = repaired(data, trust_payload=True)
    assert made[PAYLOAD_AT:] == data[PAYLOAD_AT:]
    assert "CRC-32 of the payload was" in said


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_payload_with_a_number_that_is_none_is_not_trusted_whatever_is_said(bits):
    data = bytearray(WHOLE)
    struct.pack_into("<H", data, first_row_at(), bits)
    reason = refused(bytes(data), trust_payload=True)
    assert "K of layer 0, cell 0, position 0 is no finite number" in reason


def test_changed_token_ids_are_not_sealed_unless_the_user_says_that_they_did_not_change():
    size = small.field(WHOLE, "metadata_size")
    data = small.flipped(WHOLE, 128 + size)
    reason = refused(data)
    assert "CRC-32 of the metadata and token ids" in reason
    assert "--trust-tokens" in reason
    assert refused(data, trust_payload=True) == reason
    assert repaired(data, trust_tokens=True)[0][128 : 128 + size + 24] == data[128 : 128 + size + 24]


def test_token_ids_whose_sha256_is_the_input_hash_are_proven_by_it():
    whole = small.checkpoint(of_ids=True)
    assert repaired(small.changed(whole, seal=True, head_crc32=5))[0] == whole
    assert "--trust-tokens" in refused(small.changed(WHOLE, seal=True, head_crc32=5))


@pytest.mark.parametrize("cut", [1, 2, 100, 700])
def test_a_payload_that_is_not_whole_is_never_repaired(cut):
    reason = refused(WHOLE[:-cut], trust_payload=True, trust_tokens=True)
    assert "the payload's structure does not prove whole" in reason


def test_a_payload_that_ends_where_v_would_begin_is_no_state_of_a_model_without_v():
    state = samples.read(samples.F16_FLASH)[1]
    last_k = kv_state.parse(memoryview(state)).k[-1]
    data = small.checkpoint(samples.F16_FLASH)[: PAYLOAD_AT + last_k.offset + 3 * last_k.row_bytes]
    assert "type_v is none" in refused(data, trust_payload=True, trust_tokens=True)


@pytest.mark.parametrize("positions", [(0, 1, 2, 3, 4, 4), (1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 9)])
def test_cells_that_are_not_one_at_each_position_are_never_repaired(positions):
    data = bytearray(WHOLE)
    for i, position in enumerate(positions):
        struct.pack_into("<i", data, PAYLOAD_AT + 16 + 12 * i, position)
    refused(bytes(data), trust_payload=True, trust_tokens=True)


def test_metadata_that_is_no_json_is_never_repaired():
    reason = refused(small.flipped(WHOLE, 128, 0xFF), trust_payload=True, trust_tokens=True)
    assert "there is no metadata that leaves room for the ids of its 6 tokens" in reason


@pytest.mark.parametrize("depth", [100, *range(850, 1010, 3), 20000])
def test_metadata_nested_to_any_depth_is_refused_and_never_another_error(depth):
    meta = b'{"fingerprint":{"weights":"ab","type_k":' + b"[" * depth + b"]" * depth + b"}}"
    ids = samples.read(samples.SWA_SHORT)[0].astype("<i4").tobytes()
    offset = container.align_up(128 + len(meta) + len(ids))
    data = (WHOLE[:128] + meta + ids).ljust(offset, b"\0") + WHOLE[PAYLOAD_AT:]
    sealed = small.changed(
        data, seal=True, metadata_size=len(meta), payload_offset=offset, head_crc32=zlib.crc32(meta + ids)
    )
    refused(sealed, trust_payload=True, trust_tokens=True)


# -- what is no checkpoint of ours ----------------------------------------------------------------------------------------


def test_an_engine_file_that_is_damaged_cannot_be_put_right():
    data = samples.data(samples.F16)
    assert "there is nothing to put it right by" in refused(data[:-1])
    assert "there is nothing to put it right by" in refused(bytes(2) + data[:-1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"LLAM", "ends inside the header"),
        (WHOLE[:100], "ends inside the header"),
        (b"LLAM\1\0\0\0" + bytes(500), "never restored"),
        (b"GGUF" + bytes(500), "a GGUF model file"),
        (bytes(9) + WHOLE, "begins with"),
        (b"\x80\x04" + bytes(50), "never unpickled"),
        (samples.read(samples.F16)[1], "it does not say which tokens it is of"),
    ],
)
def test_what_cannot_be_repaired_says_why(data, words):
    assert words in refused(data, trust_payload=True, trust_tokens=True)
