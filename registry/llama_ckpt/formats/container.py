"""The checkpoint file `LLAM` version 2: bytes ↔ values. Pure; docs/file-format.md has the byte table.

Nothing in a file is trusted: every count is bounded by the file's size before anything is allocated for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from isal import isal_zlib

from llama_ckpt.errors import CorruptFile, Unsupported
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.formats.magic import MAX_PADDING, padded_magic
from llama_ckpt.values import CheckName

MAGIC = b"LLAM"
VERSION = 2
FLAG_DELTA = 1
FLAG_SLICEABLE = 2
MAX_METADATA = 1 << 16
PAGE = 4096

_LAYOUT = struct.Struct("<4sIIIIIHHI32s32sqIIQQ")
HEADER_SIZE = _LAYOUT.size
_HEADER_CRC_AT = 0x0C


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The 128 bytes of the header as values, in file order. The payload's offset counts from the magic."""

    version: int = VERSION
    flags: int
    header_crc32: int = 0
    seq_len: int
    start_token: int
    n_layer: int
    n_kv_head: int
    metadata_size: int
    fingerprint: bytes
    input_hash: bytes
    created_ns: int
    head_crc32: int = 0
    payload_crc32: int = 0
    payload_offset: int = 0
    payload_size: int = 0

    @property
    def n_file_tokens(self) -> int:
        """Number of token ids in this file: a delta does not contain those before `start_token`."""
        return self.seq_len - self.start_token


_FIELDS = tuple(field.name for field in fields(Header))  # computed once: a match reads many headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A file of which every byte was checked. `payload` is a view into the caller's buffer, never a copy."""

    header: Header
    padding: int
    metadata: Mapping[str, Any]
    token_ids: TokenIds
    payload: memoryview


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 (IEEE 802.3, as in zlib), by isal."""
    return int(isal_zlib.crc32(data, value))


def align_up(offset: int) -> int:
    """`offset` rounded up to a page of 4096 bytes."""
    return -(-offset // PAGE) * PAGE


def encode_head(
    header: Header, metadata: Mapping[str, Any], token_ids: TokenIds, payload: memoryview
) -> tuple[bytes, Header]:
    """All bytes of the file before the payload, and the header with its sizes, offset and CRCs filled in.

    Raises:
        Unsupported: metadata of more than 64 KiB.
    """
    meta = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if len(meta) > MAX_METADATA:
        raise Unsupported(what="this model", reason=f"its metadata takes {len(meta)} bytes, at most {MAX_METADATA} fit")
    ids = token_ids.astype("<i4", copy=False).tobytes()
    full = replace(
        header,
        metadata_size=len(meta),
        head_crc32=crc32(ids, crc32(meta)),
        payload_crc32=crc32(payload),
        payload_offset=align_up(HEADER_SIZE + len(meta) + len(ids)),
        payload_size=payload.nbytes,
    )
    full = sealed(full)
    return (pack_header(full) + meta + ids).ljust(full.payload_offset, b"\0"), full


def sealed(header: Header) -> Header:
    """The header with the CRC of its own bytes."""
    return replace(header, header_crc32=crc32(pack_header(replace(header, header_crc32=0))))


def padding_of(view: memoryview) -> int | None:
    """The number of zero bytes before the magic, 0 to 8; None if no LLAM magic follows them."""
    start = padded_magic(view, (MAGIC,))
    return None if start is None else start[1]


def find_magic(view: memoryview, name: str) -> int:
    """The number of zero bytes before the magic, 0 to 8.

    Raises:
        CorruptFile: the file is shorter than a header, or does not start with 0 to 8 zero bytes and `LLAM`.
    """
    if len(view) < HEADER_SIZE:
        what = "the file is empty" if len(view) == 0 else f"{len(view)} bytes are fewer than a header's {HEADER_SIZE}"
        raise _corrupt(name, what)
    padding = padding_of(view)
    if padding is None:
        start = bytes(view[: MAX_PADDING + len(MAGIC)]).hex(" ")
        raise _corrupt(name, f"no LLAM magic: the file begins with {start}")
    return padding


def unpack_header(view: memoryview, padding: int) -> Header:
    """The header's fields, unchecked: for the display and the repair of damaged files.

    Raises:
        struct.error: fewer than 128 bytes after the padding.
    """
    _magic, *values = _LAYOUT.unpack_from(view, padding)
    return Header(**dict(zip(_FIELDS, values, strict=True)))


def read_header(view: memoryview, name: str, size: int | None = None) -> tuple[Header, int]:
    """The header and the padding before it, after magic, version, header CRC and all counts were checked. `view` may be the
    first part of a file of `size` bytes.

    Raises:
        CorruptFile: the first check that failed, with the values that disagree.
    """
    padding = find_magic(view, name)
    if len(view) - padding < HEADER_SIZE:
        raise _corrupt(name, f"the file ends inside the header, after {len(view)} bytes")
    header = unpack_header(view, padding)
    if header.version != VERSION:
        raise _corrupt(name, f"version {header.version}, this reader knows {VERSION}")
    raw = bytearray(view[padding : padding + HEADER_SIZE])
    raw[_HEADER_CRC_AT : _HEADER_CRC_AT + 4] = bytes(4)
    if (actual := crc32(raw)) != header.header_crc32:
        raise _corrupt(name, f"CRC of the header is {actual:08x}, it says {header.header_crc32:08x}")
    if (wrong := _wrong_count(header, (len(view) if size is None else size) - padding)) is not None:
        raise _corrupt(name, wrong)
    return header, padding


def _wrong_count(header: Header, size: int) -> str | None:
    """Which numbers of a header contradict each other or the size of the file; None if they agree."""
    ends = header.payload_offset + header.payload_size
    delta = bool(header.flags & FLAG_DELTA)
    head = HEADER_SIZE + header.metadata_size + 4 * header.n_file_tokens
    if header.flags & ~(FLAG_DELTA | FLAG_SLICEABLE):
        return f"unknown flags {header.flags:#x}"
    if delta != (header.start_token > 0):
        return f"delta flag {delta} with start_token {header.start_token}"
    if header.seq_len <= header.start_token:
        return f"seq_len {header.seq_len}, start_token {header.start_token}: no token"
    if header.payload_size == 0:
        return "the payload is empty"
    if header.metadata_size > MAX_METADATA:
        return f"metadata of {header.metadata_size} bytes, at most {MAX_METADATA}"
    if header.payload_offset != align_up(head):
        return f"payload at {header.payload_offset}, the head ends at {head}"
    return f"the file has {size} bytes, the header says {ends}" if ends != size else None


def read_contents(view: memoryview, header: Header, padding: int, name: str) -> Contents:
    """Metadata, token ids and payload, after the CRCs of both parts and the zero bytes between them were checked.

    Raises:
        CorruptFile: a CRC does not match, the bytes between head and payload are not zero, or the metadata is not a JSON
            object.
    """
    token_ids = read_token_ids(view, header, padding, name)
    meta_at = padding + HEADER_SIZE
    payload_at = padding + header.payload_offset
    ids_end = meta_at + header.metadata_size + token_ids.nbytes
    if any(view[ids_end:payload_at]):
        raise _corrupt(name, "the filling before the payload is not zero", check=CheckName.CRC32)
    payload = view[payload_at : payload_at + header.payload_size]
    _require_crc(name, "payload", header.payload_crc32, crc32(payload))
    return Contents(
        header=header,
        padding=padding,
        metadata=_metadata(view[meta_at : meta_at + header.metadata_size], name),
        token_ids=token_ids,
        payload=payload,
    )


def read_token_ids(view: memoryview, header: Header, padding: int, name: str) -> TokenIds:
    """The token ids of `[start_token, seq_len)`, after the CRC of metadata and token ids was checked. `view` may be the
    first part of a file, up to the payload.

    Raises:
        CorruptFile: the CRC does not match.
    """
    meta_at = padding + HEADER_SIZE
    ids_at = meta_at + header.metadata_size
    ids_end = ids_at + 4 * header.n_file_tokens
    _require_crc(name, "metadata and token ids", header.head_crc32, crc32(view[meta_at:ids_end]))
    return np.frombuffer(view[ids_at:ids_end], dtype="<i4").astype(np.int32)


def _metadata(view: memoryview, name: str) -> Mapping[str, Any]:
    try:
        metadata = json.loads(bytes(view))
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, f"the metadata is no JSON: {error}", check=CheckName.STRUCTURE) from error
    if not isinstance(metadata, dict):
        raise _corrupt(name, "the metadata is no JSON object", check=CheckName.STRUCTURE)
    return metadata


def pack_header(header: Header) -> bytes:
    """The 128 bytes of a header, with the CRCs that it contains."""
    return _LAYOUT.pack(MAGIC, *(getattr(header, name) for name in _FIELDS))


def _corrupt(name: str, reason: str, check: CheckName = CheckName.HEADER) -> CorruptFile:
    return CorruptFile(path=name, check=check, reason=reason)


def _require_crc(name: str, what: str, stored: int, actual: int) -> None:
    if stored != actual:
        reason = f"CRC-32 of the {what} is {actual:08x}, the header says {stored:08x}"
        raise _corrupt(name, reason, check=CheckName.CRC32)
