"""What is wrong with a file, and its corrected bytes: padding, header fields, CRCs. Pure.

A CRC mismatch means that the covered bytes are suspect; it does not mean that the CRC is wrong. Repair changes only what the
rest of the file proves:

- What the header says about the payload (`seq_len`, layers, offset, size, …) is read from the payload itself, which must
  parse as a state to its last byte.
- The header's CRC is the witness. If it matches the corrected header, every field is proven, including the CRCs of the other
  parts: the chance of a false match is 1 in 2**32.
- Without that witness, a payload or token ids whose CRC does not match may have changed. Only the user can know that they did
  not, and has to say so. Values that are not finite (NaN, infinite) are refused even then.

docs/formats.md has the same for users, field by field.
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
from llama_ckpt.formats.magic import FileFormat
from llama_ckpt.values import CheckName

_MAX_PAYLOAD_PAGES = 16  # pages that start like a state and are tried as the payload's first page
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
class FileRepair:
    """What is wrong with a file, one sentence each, and its corrected bytes in parts, to be written one after the other.

    A part is a view into the caller's buffer or a head of a few pages; the payload is not copied. If `faults` is empty, the
    file is valid and the parts are its bytes.
    """

    faults: tuple[str, ...]
    parts: tuple[memoryview, ...]


def plan_file_repair(
    view: memoryview, name: str, *, trust_payload: bool = False, trust_tokens: bool = False
) -> FileRepair:
    """The repair of a file of any format. Reads the file at most twice and copies nothing of its payload.

    If the file proves neither, `trust_payload` assumes that the payload is valid and its CRC is wrong; `trust_tokens` assumes
    the same of metadata and token ids.

    Raises:
        CorruptFile: the file cannot be repaired. Its check is `REPAIR`.
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
        damaged = _DamagedCheckpoint(file, name, trust_payload=trust_payload, trust_tokens=trust_tokens)
        head, payload, more_faults = damaged.corrected()
        return FileRepair(faults=(*faults, *more_faults), parts=(memoryview(head), payload))
    return FileRepair(faults=tuple(faults), parts=(file,))


def _refuse(name: str, reason: str) -> NoReturn:
    raise CorruptFile(path=name, check=CheckName.REPAIR, reason=reason)


def _padded(padding: int) -> str:
    return f"{padding} zero bytes before the magic: taken off"


def _engine_file(view: memoryview, name: str, kind: FileFormat, padding: int) -> FileRepair:
    try:
        engine_files.read(view, name)
    except CorruptFile as error:
        _refuse(
            name,
            f"{error.check}: {error.reason}. {kind} has no checksum and says nothing twice: there is nothing to put it right by",
        )
    return FileRepair(faults=(_padded(padding),) if padding else (), parts=(view[padding:],))


class _DamagedCheckpoint:
    """One damaged LLAM file, from its magic on. `said` is its header, unchecked."""

    def __init__(self, file: memoryview, name: str, *, trust_payload: bool, trust_tokens: bool) -> None:
        self.file = file
        self.name = name
        self.trust_payload = trust_payload
        self.trust_tokens = trust_tokens
        if len(file) < HEADER_SIZE:
            _refuse(name, f"the file ends inside the header, after {len(file)} bytes")
        self.said = container.unpack_header(file, 0)

    def corrected(self) -> tuple[bytes, memoryview, list[str]]:
        """The corrected head, the payload, and the faults."""
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
        """The file's parts under the header that agrees with them; and metadata and token ids as bytes."""
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
        """Offsets of the state's first byte and of its end: as the header says, else as the bytes show; and the parsed state."""
        stored = self.said.payload_offset
        reason = ""
        for start in islice((stored, *_pages_like_a_state(self.file, stored)), _MAX_PAYLOAD_PAGES):
            if not HEADER_SIZE < start < len(self.file) or start % PAGE:
                continue
            for end in dict.fromkeys((len(self.file), stored + self.said.payload_size)):
                if start < end <= len(self.file):
                    try:
                        return start, end, kv_state.parse(self.file[start:end])
                    except Unsupported as error:
                        reason = reason or error.reason
        _refuse(self.name, f"the payload's structure does not prove whole: {reason or 'no page begins like a state'}")

    def metadata(self, n_tokens: int, payload_offset: int) -> tuple[int, dict[str, Any]]:
        """The metadata and its size in bytes: a reading that leaves room for the token ids; best, one that matches the CRC."""
        readings = []
        for size in dict.fromkeys((_json_size(self.file), self.said.metadata_size)):
            end = HEADER_SIZE + size + 4 * n_tokens
            value = _json_object(self.file[HEADER_SIZE : HEADER_SIZE + size]) if size <= MAX_METADATA else None
            if value is not None and container.align_up(end) == payload_offset:
                matches = container.crc32(self.file[HEADER_SIZE:end]) == self.said.head_crc32
                readings.append((not matches, size, value))
        if not readings:
            reason = f"there is no metadata that leaves room for the ids of its {n_tokens} tokens"
            _refuse(self.name, f"{reason} before the payload at {payload_offset}")
        _, size, metadata = min(readings, key=lambda reading: reading[0])
        return size, metadata

    def agreeing(self, right: Header, metadata: dict[str, Any], token_ids: TokenIds, payload: memoryview) -> Contents:
        """The parts under a sealed header, after it was checked that they agree."""
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
            _refuse(self.name, f"its parts do not agree: {error.reason}")
        except RecursionError:
            _refuse(self.name, "its metadata is nested too deep")
        return contents

    def require_proof(self, contents: Contents) -> None:
        """Refuses what the header's CRC does not witness, unless the file proves it otherwise or the user trusts it."""
        right, said = contents.header, self.said
        if said.version != right.version:
            _refuse(self.name, f"version {said.version}, this reader knows {right.version}")
        if said.fingerprint != right.fingerprint:
            _refuse(
                self.name,
                "the metadata's fields do not give the header's fingerprint, and nothing tells which is right",
            )
        ids_proven = (
            tokens_hash(contents.token_ids) == said.input_hash
        )  # the hash of an input given as ids is their SHA-256
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
                where = kv_values.describe(kv_state.parse(contents.payload), bad)
                _refuse(self.name, f"the payload is not to be trusted: {where} is no finite number")

    def refuse_unproven(self, what: str, said: int, actual: int, option: str) -> NoReturn:
        reason = f"CRC-32 of the {what} is {actual:08x}, the header says {said:08x}, and nothing in the file tells which is wrong"
        _refuse(self.name, f"{reason}. If you know that the {what} did not change, say {option}")


def _pages_like_a_state(file: memoryview, but: int) -> Iterator[int]:
    """Offsets of the pages, except `but`, that start with the magic of a state."""
    magic = kv_state.prefix()[:4]
    return (at for at in range(PAGE, len(file), PAGE) if at != but and file[at : at + 4] == magic)


def _json_size(file: memoryview) -> int:
    """The size of the JSON behind the header in bytes; 0 if there is none."""
    text = bytes(file[HEADER_SIZE : HEADER_SIZE + MAX_METADATA]).decode("latin-1")  # one character per byte
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
