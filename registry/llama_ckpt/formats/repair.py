"""What is wrong with a file, and the bytes that are right: padding, header fields, CRCs. Pure.

A CRC that does not fit speaks against the bytes that it covers, not for another CRC. So nothing is put right but what the
rest of the file proves:

- What the header says of the payload (`seq_len`, layers, offset, size, …) is read from the payload itself, which has to be
  a state to its last byte.
- The header's CRC is the witness. Where it fits the header that is put right, every field is proven, the CRCs of the other
  parts among them: 1 in 2**32 would fit by chance.
- Without that witness, payload and token ids whose CRC does not fit may have changed. Only a person can know that they have
  not, and has to say so; numbers that are none (NaN, infinite) stand against it even then.

docs/formats.md tells it for people, field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from llama_ckpt.errors import BadInput, CorruptFile, Unsupported
from llama_ckpt.fingerprint import TokenIds, tokens_hash
from llama_ckpt.formats import checkpoint, container, engine_files, legacy
from llama_ckpt.formats.container import HEADER_SIZE, MAX_METADATA, PAGE, Contents, Header
from llama_ckpt.formats.identification import identify
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv import values as kv_values

_MAX_PLACES = 16  # pages looked at that begin like a state
_FROM_PAYLOAD = (
    "version",
    "flags",
    "seq_len",
    "start_token",
    "n_layer",
    "metadata_size",
    "payload_offset",
    "payload_size",
)
_UNPROVEN = "input hash, time and KV heads are left as they stand: nothing else in the file tells them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was wrong with a file, one sentence each, and its right bytes: parts to be written one after the other.

    A part is a view into the caller's buffer or a head of a few pages; no payload is copied. Without `faults` the file is whole,
    and the parts are the file.
    """

    faults: tuple[str, ...]
    parts: tuple[memoryview, ...]


def plan_repair(view: memoryview, name: str, *, trust_payload: bool = False, trust_tokens: bool = False) -> Repair:
    """How a file is put right. Reads it twice at most, copies nothing of its payload.

    `trust_payload` and `trust_tokens` say, for the payload and for metadata and token ids, that the bytes are right and their
    CRC is not, where the file proves neither.

    Raises:
        CorruptFile: it cannot be put right, and why. Its check is "Repair".
    """
    if legacy.read(view, name) is not None:
        _refuse(name, legacy.WHY_NEVER)
    if magic := engine_files.find_magic(view):
        return _engine_file(view, name, *magic)
    padding = container.padding_of(view)
    if padding is None:
        _refuse(name, identify(view, name).why_not or "it is no file of a format that is repaired")
    faults = [_padded(padding)] if padding else []
    file = view[padding:]
    try:
        checkpoint.open_checkpoint(view, name)
    except CorruptFile:
        head, payload, found = _Mend(file, name, trust_payload, trust_tokens).parts()
        return Repair(faults=(*faults, *found), parts=(memoryview(head), payload))
    return Repair(faults=tuple(faults), parts=(file,))


def _refuse(name: str, reason: str) -> NoReturn:
    raise CorruptFile(path=name, check="Repair", reason=reason)


def _padded(padding: int) -> str:
    return f"{padding} zero bytes before the magic: taken off"


def _engine_file(view: memoryview, name: str, kind: str, padding: int) -> Repair:
    try:
        engine_files.read(view, name)
    except CorruptFile as error:
        reason = f"{error.values['check']}: {error.values['reason']}"
        _refuse(name, f"{reason}. {kind} has no checksum and says nothing twice: there is nothing to put it right by")
    return Repair(faults=(_padded(padding),) if padding else (), parts=(view[padding:],))


class _Mend:
    """One damaged checkpoint file, from its magic on."""

    def __init__(self, file: memoryview, name: str, trust_payload: bool, trust_tokens: bool) -> None:
        self.file = file
        self.name = name
        self.trust_payload = trust_payload
        self.trust_tokens = trust_tokens
        if len(file) < HEADER_SIZE:
            _refuse(name, f"the file ends inside the header, after {len(file)} bytes")
        self.said = container.unpack_header(file, 0)

    def parts(self) -> tuple[bytes, memoryview, list[str]]:
        """The right head, the payload, and what was wrong."""
        contents, head_bytes = self.contents()
        right, said = contents.header, self.said
        witnessed = right.header_crc32 == said.header_crc32
        faults = [
            f"{field} was {getattr(said, field)}: {getattr(right, field)}"
            for field in _FROM_PAYLOAD
            if getattr(said, field) != getattr(right, field)
        ]
        if not witnessed:
            self.require_proof(contents)
        for field, what in (("head_crc32", "metadata and token ids"), ("payload_crc32", "payload")):
            if getattr(said, field) != getattr(right, field):
                faults.append(f"CRC-32 of the {what} was {getattr(said, field):08x}: {getattr(right, field):08x}")
        if witnessed and right.fingerprint != said.fingerprint:
            faults.append("the fingerprint was not that of the metadata's fields")
        if any(self.file[HEADER_SIZE + len(head_bytes) : right.payload_offset]):
            faults.append("the filling before the payload was not zero")
        behind = len(self.file) - right.payload_offset - right.payload_size
        if behind:
            faults.append(f"{behind} bytes behind the payload: taken off")
        if not witnessed and container.sealed(said) != said:
            faults.append(f"CRC of the header was {said.header_crc32:08x}: rebuilt. {_UNPROVEN}")
        head = (container.pack_header(right) + head_bytes).ljust(right.payload_offset, b"\0")
        return head, contents.payload, faults

    def contents(self) -> tuple[Contents, memoryview]:
        """What the file's parts say of one another, the header that agrees with them, and metadata and ids as bytes."""
        start, end, state = self.payload()
        if why := kv_state.not_sliceable(state):
            _refuse(self.name, f"the payload's structure does not prove whole: {why}")
        first, seq_len = int(state.positions.min()), int(state.positions.max()) + 1
        if first not in (0, self.said.start_token):
            _refuse(self.name, f"the payload's cells begin at position {first}, which no header field says")
        n_tokens = seq_len - first
        size, metadata = self.metadata(n_tokens, start)
        ids_at = HEADER_SIZE + size
        token_ids = np.frombuffer(self.file[ids_at : ids_at + 4 * n_tokens], dtype="<i4").astype(np.int32)
        payload, head_bytes = self.file[start:end], self.file[HEADER_SIZE : ids_at + 4 * n_tokens]
        right = replace(
            self.said,
            version=container.VERSION,
            seq_len=seq_len,
            start_token=first,
            n_layer=state.n_layer,
            metadata_size=size,
            head_crc32=container.crc32(head_bytes),
            payload_crc32=container.crc32(payload),
            payload_offset=start,
            payload_size=end - start,
        )
        return self.agreeing(right, metadata, token_ids, payload), head_bytes

    def payload(self) -> tuple[int, int, kv_state.KvState]:
        """Where the state begins and ends: where the header says, else where its bytes do."""
        told = self.said.payload_offset
        reason = ""
        for start in islice((told, *_pages_like_a_state(self.file, told)), _MAX_PLACES):
            if not HEADER_SIZE < start < len(self.file) or start % PAGE:
                continue
            for end in dict.fromkeys((len(self.file), told + self.said.payload_size)):
                if start < end <= len(self.file):
                    try:
                        return start, end, kv_state.parse(self.file[start:end])
                    except Unsupported as error:
                        reason = reason or str(error.values["reason"])
        _refuse(self.name, f"the payload's structure does not prove whole: {reason or 'no page begins like a state'}")

    def metadata(self, n_tokens: int, payload_offset: int) -> tuple[int, dict[str, Any]]:
        """The metadata and its size: what leaves room for the token ids, and best what the CRC is of."""
        readings = []
        for size in dict.fromkeys((_json_size(self.file), self.said.metadata_size)):
            end = HEADER_SIZE + size + 4 * n_tokens
            value = _json_object(self.file[HEADER_SIZE : HEADER_SIZE + size]) if size <= MAX_METADATA else None
            if value is not None and container.align_up(end) == payload_offset:
                fits = container.crc32(self.file[HEADER_SIZE:end]) == self.said.head_crc32
                readings.append((not fits, size, value))
        if not readings:
            reason = f"there is no metadata that leaves room for the ids of its {n_tokens} tokens"
            _refuse(self.name, f"{reason} before the payload at {payload_offset}")
        _, size, metadata = min(readings, key=lambda reading: reading[0])
        return size, metadata

    def agreeing(self, right: Header, metadata: dict[str, Any], token_ids: TokenIds, payload: memoryview) -> Contents:
        """The parts under a sealed header, after they were held to one another."""
        contents = Contents(header=right, padding=0, metadata=metadata, token_ids=token_ids, payload=payload)
        try:
            digest = checkpoint.fingerprint_of(contents).digest
            delta = container.FLAG_DELTA if right.start_token else 0
            choices = [right.flags & container.FLAG_SLICEABLE | delta, container.FLAG_SLICEABLE | delta]
            headers = [container.sealed(replace(right, flags=flags, fingerprint=digest)) for flags in choices]
            witnessed = [header for header in headers if header.header_crc32 == right.header_crc32]
            contents = replace(contents, header=(witnessed or headers)[0])
            checkpoint.require_structure(contents, self.name)
        except (BadInput, CorruptFile) as error:
            _refuse(self.name, f"its parts do not agree: {error.values['reason']}")
        except RecursionError:
            _refuse(self.name, "its metadata is nested too deep")
        return contents

    def require_proof(self, contents: Contents) -> None:
        """What the header's CRC does not witness has to be proven otherwise, or said by the user."""
        right, said = contents.header, self.said
        if said.version != right.version:
            _refuse(self.name, f"version {said.version}, this reader knows {right.version}")
        if said.fingerprint != right.fingerprint:
            _refuse(
                self.name,
                "the metadata's fields do not give the header's fingerprint, and nothing tells which is right",
            )
        ids_proven = tokens_hash(contents.token_ids) == said.input_hash  # an input of ids is named by their SHA-256
        if said.head_crc32 != right.head_crc32 and not (ids_proven or self.trust_tokens):
            self.refuse_unproven("metadata and token ids", said.head_crc32, right.head_crc32, "--trust-tokens")
        if said.payload_crc32 != right.payload_crc32:
            if not self.trust_payload:
                self.refuse_unproven("payload", said.payload_crc32, right.payload_crc32, "--trust-payload")
            for field in ("payload_size", "n_layer", "seq_len"):
                if getattr(said, field) != getattr(right, field):
                    there = f"the header says {field} {getattr(said, field)}, the payload has {getattr(right, field)}"
                    _refuse(self.name, f"the payload is not to be trusted: {there}, and its CRC does not fit")
            if bad := kv_values.not_finite(contents.payload):
                where = kv_values.told(kv_state.parse(contents.payload), bad)
                _refuse(self.name, f"the payload is not to be trusted: {where} is no finite number")

    def refuse_unproven(self, what: str, said: int, actual: int, option: str) -> NoReturn:
        reason = f"CRC-32 of the {what} is {actual:08x}, the header says {said:08x}, and nothing in the file tells which is wrong"
        _refuse(self.name, f"{reason}. If you know that the {what} did not change, say {option}")


def _pages_like_a_state(file: memoryview, but: int) -> Iterator[int]:
    """Where the magic of a state stands on a page's first byte."""
    magic = kv_state.prefix()[:4]
    return (at for at in range(PAGE, len(file), PAGE) if at != but and file[at : at + 4] == magic)


def _json_size(file: memoryview) -> int:
    """How many bytes the JSON behind the header takes; 0 where there is none."""
    text = bytes(file[HEADER_SIZE : HEADER_SIZE + MAX_METADATA]).decode("latin-1")  # a character a byte
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def _json_object(data: memoryview) -> dict[str, Any] | None:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
