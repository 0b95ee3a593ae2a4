"""The file format LLAM 2, against headers packed by hand: offsets are literals here, CRCs are zlib's."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from support import samples

from llama_ckpt.errors import CorruptFile, Unsupported
from llama_ckpt.formats import container

IDS = np.array([504, 7742, -1], dtype=np.int32)
PAYLOAD = bytes(range(256)) * 20
META = {"engine": "größe", "n": [1, 2.5, None]}
META_BYTES = '{"engine":"größe","n":[1,2.5,null]}'.encode()
FIELDS = {  # the table of DESIGN §5
    "magic": (0x00, "<4s"),
    "version": (0x04, "<I"),
    "flags": (0x08, "<I"),
    "header_crc32": (0x0C, "<I"),
    "seq_len": (0x10, "<I"),
    "start_token": (0x14, "<I"),
    "n_layer": (0x18, "<H"),
    "n_kv_head": (0x1A, "<H"),
    "metadata_size": (0x1C, "<I"),
    "fingerprint": (0x20, "<32s"),
    "input_hash": (0x40, "<32s"),
    "created_ns": (0x60, "<q"),
    "head_crc32": (0x68, "<I"),
    "payload_crc32": (0x6C, "<I"),
    "payload_offset": (0x70, "<Q"),
    "payload_size": (0x78, "<Q"),
}


def forge(data: bytes, **values) -> bytes:
    """`data` with other header fields, and a header CRC that agrees with them."""
    made = bytearray(data)
    for name, value in values.items():
        at, layout = FIELDS[name]
        struct.pack_into(layout, made, at, value)
    if "header_crc32" not in values:
        made[0x0C:0x10] = bytes(4)
        struct.pack_into("<I", made, 0x0C, zlib.crc32(made[:128]))
    return bytes(made)


def by_hand(meta: bytes = META_BYTES, ids: bytes | None = None, payload: bytes = PAYLOAD, **values) -> bytes:
    """A whole file without the writer's help."""
    ids = struct.pack("<3i", 504, 7742, -1) if ids is None else ids
    offset = (128 + len(meta) + len(ids) + 4095) // 4096 * 4096
    fields = {
        "magic": b"LLAM",
        "version": 2,
        "flags": 2,
        "seq_len": len(ids) // 4,
        "start_token": 0,
        "n_layer": 30,
        "n_kv_head": 3,
        "metadata_size": len(meta),
        "fingerprint": b"f" * 32,
        "input_hash": b"i" * 32,
        "created_ns": 1_700_000_000_123_456_789,
        "head_crc32": zlib.crc32(meta + ids),
        "payload_crc32": zlib.crc32(payload),
        "payload_offset": offset,
        "payload_size": len(payload),
    }
    head = forge(bytes(128), **{**fields, **values})
    return (head + meta + ids).ljust(offset, b"\0") + payload


def header(**values) -> container.Header:
    fields = {
        "flags": 2,
        "seq_len": 3,
        "start_token": 0,
        "n_layer": 30,
        "n_kv_head": 3,
        "metadata_size": 0,
        "fingerprint": b"f" * 32,
        "input_hash": b"i" * 32,
        "created_ns": 1_700_000_000_123_456_789,
    }
    return container.Header(**{**fields, **values})


def read(data: bytes) -> container.Contents:
    view = memoryview(data)
    found, padding = container.read_header(view, "the file")
    return container.read_contents(view, found, padding, "the file")


def refusal(data: bytes) -> CorruptFile:
    with pytest.raises(CorruptFile) as caught:
        read(data)
    assert caught.value.values["path"] == "the file"
    return caught.value


# -- where the bytes stand ------------------------------------------------------------------------------------------------


def test_every_header_field_is_written_little_endian_at_its_documented_offset():
    given = header(
        flags=0x00000003,
        seq_len=0x01020304,
        start_token=0x05060708,
        n_layer=0x090A,
        n_kv_head=0x0B0C,
        fingerprint=bytes(range(32)),
        input_hash=bytes(range(100, 132)),
        created_ns=-0x0102030405060708,
    )
    head, _ = container.encode_head(given, META, IDS, memoryview(PAYLOAD))
    assert head[0x00:0x04] == b"LLAM" == bytes([0x4C, 0x4C, 0x41, 0x4D])
    assert head[0x04:0x08] == b"\x02\0\0\0"
    assert head[0x08:0x0C] == b"\x03\0\0\0"
    assert head[0x0C:0x10] == zlib.crc32(head[:0x0C] + bytes(4) + head[0x10:0x80]).to_bytes(4, "little")
    assert head[0x10:0x14] == b"\x04\x03\x02\x01"
    assert head[0x14:0x18] == b"\x08\x07\x06\x05"
    assert head[0x18:0x1A] == b"\x0a\x09"
    assert head[0x1A:0x1C] == b"\x0c\x0b"
    assert head[0x1C:0x20] == len(META_BYTES).to_bytes(4, "little")
    assert head[0x20:0x40] == bytes(range(32))
    assert head[0x40:0x60] == bytes(range(100, 132))
    assert head[0x60:0x68] == (-0x0102030405060708).to_bytes(8, "little", signed=True)
    assert head[0x68:0x6C] == zlib.crc32(head[0x80 : 0x80 + len(META_BYTES) + 12]).to_bytes(4, "little")
    assert head[0x6C:0x70] == zlib.crc32(PAYLOAD).to_bytes(4, "little")
    assert head[0x70:0x78] == (4096).to_bytes(8, "little")
    assert head[0x78:0x80] == (5120).to_bytes(8, "little")
    assert head[0x80:] == (META_BYTES + struct.pack("<3i", 504, 7742, -1)).ljust(4096 - 128, b"\0")


def test_the_writer_gives_byte_for_byte_the_file_packed_by_hand():
    head, _ = container.encode_head(header(), META, IDS, memoryview(PAYLOAD))
    assert head + PAYLOAD == by_hand()


def test_a_file_packed_by_hand_is_read_value_for_value():
    data = by_hand(flags=3, start_token=5, seq_len=8, n_layer=0x0102, n_kv_head=0x0304, created_ns=-5)
    contents = read(data)
    found = contents.header
    assert (found.version, found.flags, found.seq_len, found.start_token, found.n_file_tokens) == (2, 3, 8, 5, 3)
    assert (found.n_layer, found.n_kv_head, found.created_ns) == (0x0102, 0x0304, -5)
    assert (found.fingerprint, found.input_hash) == (b"f" * 32, b"i" * 32)
    assert (found.payload_offset, found.payload_size, found.payload_crc32) == (4096, 5120, zlib.crc32(PAYLOAD))
    assert (contents.padding, contents.metadata) == (0, META)
    assert contents.token_ids.tolist() == [504, 7742, -1]
    assert contents.payload == PAYLOAD


def test_the_header_is_128_bytes_and_its_crc_is_the_common_one():
    assert container.HEADER_SIZE == 128
    assert container.crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    assert container.crc32(b"6789", container.crc32(b"12345")) == 0xCBF43926


def test_a_header_in_the_other_byte_order_is_refused_by_its_version():
    data = bytearray(by_hand())
    for at, layout in FIELDS.values():
        if layout[-1] != "s":
            size = struct.calcsize(layout)
            data[at : at + size] = data[at : at + size][::-1]
    assert "version 33554432" in refusal(bytes(data)).values["reason"]


# -- round trip -----------------------------------------------------------------------------------------------------------


def test_a_real_state_comes_back_without_a_copy():
    ids, state = samples.read(samples.F16)
    head, full = container.encode_head(header(), META, ids, memoryview(state))
    data = head + state
    contents = read(data)
    assert contents.header == full
    assert contents.payload == state
    assert contents.payload.obj is data
    assert contents.token_ids.tolist() == [504, 7742, 2004]
    assert contents.token_ids.dtype == np.int32


@pytest.mark.parametrize(("spare", "offset"), [(1, 4096), (0, 4096), (-1, 8192)])
def test_the_payload_begins_at_the_first_page_after_the_token_ids(spare, offset):
    filler = 4096 - 128 - 12 - len(b'{"x":""}') - spare
    head, full = container.encode_head(header(), {"x": "a" * filler}, IDS, memoryview(PAYLOAD))
    assert (full.payload_offset, len(head)) == (offset, offset)
    assert read(head + PAYLOAD).metadata == {"x": "a" * filler}


def test_the_largest_metadata_is_read_and_one_byte_more_is_not_written():
    largest = {"x": "a" * (65536 - len(b'{"x":""}'))}
    head, full = container.encode_head(header(), largest, IDS, memoryview(PAYLOAD))
    assert full.metadata_size == 65536
    assert read(head + PAYLOAD).metadata == largest
    with pytest.raises(Unsupported, match="its metadata takes 65537 bytes, at most 65536 fit"):
        container.encode_head(header(), {"x": largest["x"] + "a"}, IDS, memoryview(PAYLOAD))


def test_metadata_that_json_cannot_say_is_not_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        container.encode_head(header(), {"x": float("nan")}, IDS, memoryview(PAYLOAD))


def test_token_ids_of_a_big_endian_array_are_written_little_endian():
    head, _ = container.encode_head(header(), META, IDS.astype(">i4"), memoryview(PAYLOAD))
    assert read(head + PAYLOAD).token_ids.tolist() == IDS.tolist()


# -- the patched reader: zeros before the magic ---------------------------------------------------------------------------


@pytest.mark.parametrize("padding", range(9))
def test_a_file_shifted_by_up_to_eight_zero_bytes_is_read(padding):
    contents = read(bytes(padding) + by_hand())
    assert (contents.padding, contents.metadata, bytes(contents.payload)) == (padding, META, PAYLOAD)


@pytest.mark.parametrize("padding", [9, 10, 12, 4096])
def test_a_file_shifted_by_nine_or_more_zero_bytes_is_refused(padding):
    error = refusal(bytes(padding) + by_hand())
    assert error.values["check"] == "Header"
    assert "no LLAM magic" in error.values["reason"]


@pytest.mark.parametrize("before", [b"\1", b"\0\0\1", b"L", b"\0L", b"\xff" * 8])
def test_a_file_shifted_by_other_bytes_than_zero_is_refused(before):
    assert "no LLAM magic" in refusal(before + by_hand()).values["reason"]


def test_a_file_that_lost_the_zeros_it_counts_on_is_refused_by_its_size():
    shifted = bytes(4) + by_hand()
    assert "the header says" in refusal(shifted[:-4]).values["reason"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"L", "1 bytes are fewer than a header's 128"),
        (by_hand()[:127], "127 bytes are fewer than a header's 128"),
        (bytes(8) + by_hand()[:127], "the file ends inside the header, after 135 bytes"),
        (bytes(500), "no LLAM magic: the file begins with 00 00"),
        (b"MALL" + by_hand()[4:], "no LLAM magic: the file begins with 4d 41 4c 4c"),
        (b"GGUF" + by_hand()[4:], "no LLAM magic: the file begins with 47 47 55 46"),
        (b"ggsq" + by_hand()[4:], "no LLAM magic"),
    ],
    ids=lambda v: f"{len(v)} bytes" if isinstance(v, bytes) else v,
)
def test_what_is_no_checkpoint_file_is_refused_with_what_was_seen(data, reason):
    error = refusal(data)
    assert error.values["check"] == "Header"
    assert reason in error.values["reason"]


# -- a header that lies, with a CRC that is right -------------------------------------------------------------------------

HUGE = 0xFFFFFFFF
ALIGNED_BEHIND_HUGE_IDS = (128 + len(META_BYTES) + 4 * HUGE + 4095) // 4096 * 4096
LIES = [
    ({"version": 0}, "version 0, this reader knows 2"),
    ({"version": 1}, "version 1, this reader knows 2"),
    ({"version": 3}, "version 3, this reader knows 2"),
    ({"version": HUGE}, "version 4294967295, this reader knows 2"),
    ({"flags": 4}, "unknown flags 0x4"),
    ({"flags": 0x80000002}, "unknown flags 0x80000002"),
    ({"flags": 3}, "delta flag True with start_token 0"),
    ({"start_token": 1}, "delta flag False with start_token 1"),
    ({"seq_len": 0}, "seq_len 0, start_token 0: no token"),
    ({"flags": 3, "start_token": 3}, "seq_len 3, start_token 3: no token"),
    ({"flags": 3, "start_token": 4}, "seq_len 3, start_token 4: no token"),
    ({"flags": 3, "start_token": HUGE}, "seq_len 3, start_token 4294967295: no token"),
    ({"payload_size": 0}, "the payload is empty"),
    ({"metadata_size": 65537}, "metadata of 65537 bytes, at most 65536"),
    ({"metadata_size": HUGE}, "metadata of 4294967295 bytes, at most 65536"),
    ({"metadata_size": 65536}, "payload at 4096, the head ends at 65676"),
    ({"metadata_size": 65536, "payload_offset": 69632}, "the file has 9216 bytes, the header says 74752"),
    ({"seq_len": HUGE}, "payload at 4096, the head ends at"),
    ({"seq_len": HUGE, "payload_offset": ALIGNED_BEHIND_HUGE_IDS}, "the file has 9216 bytes, the header says"),
    ({"payload_offset": 0}, "payload at 0, the head ends at"),
    ({"payload_offset": 176}, "payload at 176, the head ends at"),
    ({"payload_offset": 4095}, "payload at 4095, the head ends at"),
    ({"payload_offset": 4097}, "payload at 4097, the head ends at"),
    ({"payload_offset": 8192, "payload_size": 1024}, "payload at 8192, the head ends at"),
    ({"payload_offset": 2**64 - 1}, "payload at 18446744073709551615, the head ends at"),
    ({"payload_size": 5119}, "the file has 9216 bytes, the header says 9215"),
    ({"payload_size": 5121}, "the file has 9216 bytes, the header says 9217"),
    ({"payload_size": 2**64 - 1}, "the file has 9216 bytes, the header says 18446744073709555711"),
    # offset and size add up to the file's size in 64 bits: arithmetic that wraps would take them
    ({"payload_offset": 2**64 - 4096, "payload_size": 4096 + 9216}, "payload at 18446744073709547520"),
]


def lie_name(lie):
    return " ".join(f"{k}={v:#x}" for k, v in lie.items()) if isinstance(lie, dict) else None


@pytest.mark.parametrize(("lie", "reason"), LIES, ids=lie_name)
@pytest.mark.parametrize("padding", [0, 8])
def test_a_header_that_lies_under_a_valid_crc_is_refused_by_the_count_that_is_wrong(lie, reason, padding):
    error = refusal(bytes(padding) + forge(by_hand(), **lie))
    assert error.values["check"] == "Header"
    assert reason in error.values["reason"]
    assert "CRC" not in error.values["reason"]


def test_the_forged_headers_differ_from_a_good_one_in_nothing_but_the_lie():
    assert forge(by_hand()) == by_hand()
    assert read(forge(by_hand(), flags=3, start_token=2, seq_len=5)).header.start_token == 2


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 8, b"x" * 4096], ids=len)
def test_a_file_longer_than_its_header_says_is_refused(extra):
    error = refusal(by_hand() + extra)
    assert error.values["check"] == "Header"
    assert f"the file has {9216 + len(extra)} bytes, the header says 9216" in error.values["reason"]


@pytest.mark.parametrize("missing", [1, 4, 4096, 5120, 9216 - 128])
def test_a_file_shorter_than_its_header_says_is_refused(missing):
    error = refusal(by_hand()[:-missing])
    assert error.values["check"] == "Header"
    assert f"the file has {9216 - missing} bytes, the header says 9216" in error.values["reason"]


@pytest.mark.parametrize("name", [n for n in FIELDS if n not in ("magic", "version")])
def test_a_header_field_changed_under_the_old_crc_is_refused_by_the_crc(name):
    data = bytearray(by_hand())
    data[FIELDS[name][0]] ^= 0x01
    error = refusal(bytes(data))
    assert error.values["check"] == "Header"
    assert "CRC of the header is" in error.values["reason"]


ABSURD = [
    *({name: HUGE} for name in ("version", "flags", "seq_len", "start_token", "metadata_size")),
    {"payload_size": 2**64 - 1},
    {"payload_offset": 2**64 - 1},
    {"seq_len": HUGE, "payload_offset": ALIGNED_BEHIND_HUGE_IDS},
    {"seq_len": HUGE, "payload_offset": ALIGNED_BEHIND_HUGE_IDS, "payload_size": 2**64 - 1 - ALIGNED_BEHIND_HUGE_IDS},
    {"flags": 3, "start_token": 1, "seq_len": HUGE},
]


@pytest.mark.parametrize("lie", ABSURD, ids=lie_name)
def test_an_absurd_count_costs_no_memory(lie):
    data = forge(by_hand(), **lie)
    tracemalloc.start()
    try:
        refusal(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# -- the parts after the header -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first of metadata", "last of metadata", "first id", "last id"])
def test_a_changed_byte_of_metadata_or_ids_is_refused_by_their_crc(where):
    ids_at = 128 + len(META_BYTES)
    at = {"first of metadata": 128, "last of metadata": ids_at - 1, "first id": ids_at, "last id": ids_at + 11}[where]
    data = bytearray(by_hand())
    data[at] ^= 0x80
    error = refusal(bytes(data))
    assert error.values["check"] == "CRC32"
    assert "CRC-32 of the metadata and token ids is" in error.values["reason"]


@pytest.mark.parametrize("at", [128 + len(META_BYTES) + 12, 4095])
def test_a_filling_that_is_not_zero_is_refused(at):
    data = bytearray(by_hand())
    data[at] = 1
    error = refusal(bytes(data))
    assert error.values["check"] == "CRC32"
    assert error.values["reason"] == "the filling before the payload is not zero"


@pytest.mark.parametrize("at", [4096, 9215])
def test_a_changed_byte_of_the_payload_is_refused_with_both_crcs(at):
    data = bytearray(by_hand())
    data[at] ^= 1
    error = refusal(bytes(data))
    assert error.values["check"] == "CRC32"
    actual, stored = zlib.crc32(data[4096:]), zlib.crc32(PAYLOAD)
    assert error.values["reason"] == f"CRC-32 of the payload is {actual:08x}, the header says {stored:08x}"


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"{",
        b"not json",
        b"{'engine': 1}",
        b'{"a": 1} trailing',
        b"\xff\xfe\xfd",
        b'{"a": "\xc3"}',
        b"[" * 60000,
        b"[" * 30000 + b"]" * 30000,
        b'{"a":' * 10000 + b"1" + b"}" * 10000,
        b'{"n": ' + b"9" * 60000 + b"}",
    ],
    ids=lambda m: f"{m[:12]!r} {len(m)}",
)
def test_metadata_that_is_no_json_is_refused_and_not_a_python_error(meta):
    error = refusal(by_hand(meta=meta))
    assert error.values["check"] == "Structure"
    assert "the metadata is no JSON" in error.values["reason"]


@pytest.mark.parametrize("meta", [b"[]", b'["a"]', b'"text"', b"1", b"null", b"true", b"1e5"])
def test_metadata_that_is_json_but_no_object_is_refused(meta):
    error = refusal(by_hand(meta=meta))
    assert (error.values["check"], error.values["reason"]) == ("Structure", "the metadata is no JSON object")


def test_metadata_with_keys_that_a_later_version_added_is_read():
    later = {"engine": "x", "new_in_2031": {"deep": [[[[1]]]]}}
    assert read(by_hand(meta=json.dumps(later).encode())).metadata == later


# -- for whoever must look at a damaged file ------------------------------------------------------------------------------


def test_the_fields_of_a_damaged_header_can_still_be_looked_at():
    data = forge(by_hand(), version=9, seq_len=HUGE, header_crc32=1)
    found = container.unpack_header(memoryview(bytes(3) + data), 3)
    assert (found.version, found.seq_len, found.header_crc32, found.n_layer) == (9, HUGE, 1, 30)
    with pytest.raises(struct.error):
        container.unpack_header(memoryview(data)[:127], 0)
