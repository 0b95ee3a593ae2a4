"""A whole checkpoint file of few bytes: the recorded state of a model of two layers, one page of head before it."""

from __future__ import annotations

import functools
import struct

from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.formats import container

INPUT_HASH = bytes(range(32))
HEADER = {
    name: (offset, code)
    for name, offset, code in (
        ("version", 0x04, "<I"),
        ("flags", 0x08, "<I"),
        ("header_crc32", 0x0C, "<I"),
        ("seq_len", 0x10, "<I"),
        ("start_token", 0x14, "<I"),
        ("n_layer", 0x18, "<H"),
        ("n_kv_head", 0x1A, "<H"),
        ("metadata_size", 0x1C, "<I"),
        ("fingerprint", 0x20, "32s"),
        ("input_hash", 0x40, "32s"),
        ("created_ns", 0x60, "<q"),
        ("head_crc32", 0x68, "<I"),
        ("payload_crc32", 0x6C, "<I"),
        ("payload_offset", 0x70, "<Q"),
        ("payload_size", 0x78, "<Q"),
    )
}


@functools.cache
def checkpoint(sample: str = samples.SWA_SHORT, *, of_ids: bool = False) -> bytes:
    """A file as a save writes it; with `of_ids` of an input that was given as token ids."""
    from llama_ckpt.fingerprint import tokens_hash

    engine = SampleEngine(sample)
    header = container.Header(
        flags=container.FLAG_SLICEABLE,
        seq_len=len(engine.ids),
        start_token=0,
        n_layer=engine.dimensions.n_layer,
        n_kv_head=1,
        metadata_size=0,
        fingerprint=engine.fingerprint.digest,
        input_hash=tokens_hash(engine.ids) if of_ids else INPUT_HASH,
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
    return head + engine.state


def changed(data: bytes, *, seal: bool = False, **fields) -> bytes:
    """`data` with these header fields; with `seal` under a header CRC that fits them."""
    made = bytearray(data)
    for name, value in fields.items():
        offset, code = HEADER[name]
        struct.pack_into(code, made, offset, value)
    if seal:
        header = container.unpack_header(memoryview(bytes(made)), 0)
        made[:128] = container.pack_header(container.sealed(header))
    return bytes(made)


def field(data: bytes, name: str):
    """A header field as it stands."""
    offset, code = HEADER[name]
    return struct.unpack_from(code, data, offset)[0]


def flipped(data: bytes, at: int, xor: int = 1) -> bytes:
    made = bytearray(data)
    made[at] ^= xor
    return bytes(made)
