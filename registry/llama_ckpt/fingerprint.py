"""Identity: what an input is called, and what decides whether KV bytes may be reused (DESIGN: identity). Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.errors import BadInput
from llama_ckpt.values import Checkpoint, Difference, FieldValue, Fingerprint, PrefixLink

SCHEMA = 1
PREFIX_HASH_SIZE = 16  # bytes: a million checkpoints have some ten million of them
_ID_SIZE = 4
TokenIds = NDArray[np.int32]
Input = str | Sequence[int] | NDArray[np.integer]

_MEANING = {
    "weights": "weights",
    "type_k": "K type",
    "type_v": "V type",
    "v_transposed": "flash attention (V transposed)",
}


def fingerprint(fields: Mapping[str, FieldValue]) -> Fingerprint:
    """The fingerprint of `fields`: SHA-256 of their canonical JSON (sorted keys, no spaces, UTF-8) with a schema number.

    A field stands in `fields` only when it is set, so that a field added later leaves old fingerprints as they were.

    Raises:
        BadInput: `fields` has no "weights", or a value that JSON cannot say (NaN, bytes).
    """
    named: dict[str, FieldValue] = {"schema": SCHEMA, **fields}
    if "weights" not in named:
        raise BadInput(what="fingerprint fields", value=sorted(named), reason="the field 'weights' is not there")
    return Fingerprint(digest=hashlib.sha256(canonical_json(named)).digest(), fields=named)


def canonical_json(fields: Mapping[str, FieldValue]) -> bytes:
    """The one spelling of `fields` that is hashed.

    Raises:
        BadInput: a value that JSON cannot say (NaN, bytes).
    """
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise BadInput(what="fingerprint fields", value=dict(fields), reason=str(error)) from error


def weights_digest(shard_digests: Sequence[bytes]) -> bytes:
    """One SHA-256 for a model: that of its file, or of the concatenated digests of its shards in order."""
    if len(shard_digests) == 1:
        return shard_digests[0]
    return hashlib.sha256(b"".join(shard_digests)).digest()


def differences(saved: Mapping[str, FieldValue], now: Mapping[str, FieldValue]) -> tuple[Difference, ...]:
    """The fields that keep two fingerprints apart, in the order a person would ask for them."""
    keys = [k for k in (*_MEANING, *sorted(saved.keys() | now.keys())) if _spelt(saved.get(k)) != _spelt(now.get(k))]
    return tuple(
        Difference(field=_MEANING.get(k, k), saved=_say(saved.get(k)), now=_say(now.get(k)))
        for k in dict.fromkeys(keys)
    )


def _spelt(value: FieldValue | None) -> str:
    """As it is hashed: to Python true is 1, to a digest it is not."""
    return json.dumps(value, sort_keys=True)


def _say(value: FieldValue | None) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return "yes" if value else "no"
        case str() if len(value) == 64:
            return value[:12] + "…"
        case _:
            return str(value)


def hash_input(given: Input) -> bytes:
    """The input hash: SHA-256 of a text's exact UTF-8 bytes, or of token ids as little-endian int32.

    For a text it equals `sha256sum` of a file with the same bytes.

    Raises:
        BadInput: an empty input, a text that UTF-8 cannot hold, or an id outside int32.
    """
    if isinstance(given, str):
        return hashlib.sha256(text_bytes(given)).digest()
    return tokens_hash(as_token_ids(given))


def text_bytes(text: str) -> bytes:
    """The UTF-8 bytes of an input text. What is wrong with one is told without quoting it.

    Raises:
        BadInput: it is empty, or UTF-8 cannot hold it.
    """
    if not text:
        raise BadInput(what="input text", value=text, reason="it is empty")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        told = f"{len(text)} characters"
        reason = f"character {error.start} is a lone surrogate, which UTF-8 cannot say"
        raise BadInput(what="input text", value=told, reason=reason) from None


def as_token_ids(given: Sequence[int] | NDArray[np.integer]) -> TokenIds:
    """`given` as a one-dimensional int32 array, shape `[n_tokens]`.

    Raises:
        BadInput: no ids, not whole numbers, or an id outside 0 .. 2**31-1.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        raise BadInput(what="input", value=f"{len(given)} bytes", reason="give a str or token ids; decode bytes first")
    try:
        wide = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise BadInput(what="token ids", value=_shape(given), reason=str(error)) from error
    if wide.ndim != 1 or wide.size == 0:
        raise BadInput(what="token ids", value=_shape(given), reason="need a flat sequence of at least one id")
    if wide.dtype.kind not in "iu":
        raise BadInput(what="token ids", value=_shape(given), reason="ids are whole numbers")
    if int(wide.min()) < 0 or int(wide.max()) > 0x7FFFFFFF:
        raise BadInput(what="token ids", value=_shape(given), reason="an id is outside 0 .. 2147483647")
    return np.ascontiguousarray(wide, dtype=np.int32)


def _shape(given: object) -> str:
    """What was given, without its content: an input may be confidential."""
    length = f" of {len(given)}" if hasattr(given, "__len__") else ""
    return f"{type(given).__name__}{length}"


def tokens_hash(token_ids: TokenIds) -> bytes:
    """SHA-256 of the token ids as little-endian int32, 32 raw bytes."""
    return hashlib.sha256(_id_bytes(token_ids)).digest()


def tokens_hashes(token_ids: TokenIds, lengths: Iterable[int]) -> dict[int, bytes]:
    """`tokens_hash` of the beginnings of these lengths, in one pass."""
    data, so_far, at, found = _id_bytes(token_ids), hashlib.sha256(), 0, {}
    for n in sorted(lengths):
        so_far.update(data[_ID_SIZE * at : _ID_SIZE * n])
        found[n], at = so_far.copy().digest(), n
    return found


def active_key(fingerprint_digest: bytes, input_hash: bytes) -> bytes:
    """The key that at most one ACTIVE row may hold: SHA-256(fingerprint ‖ input hash)."""
    return hashlib.sha256(fingerprint_digest + input_hash).digest()


def prefix_hashes(fingerprint_digest: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """The chained hashes of the full blocks of `block_size` token ids, 16 raw bytes each: hash i is the beginning of
    SHA-256(hash i-1 ‖ ids of block i as little-endian int32), and the fingerprint's digest stands before the first. So a hash
    says which tokens a state begins with, and of which model (docs/matching.md).
    """
    data, step = _id_bytes(token_ids), _ID_SIZE * block_size
    hashes, last = [], fingerprint_digest
    for start in range(0, len(data) - step + 1, step):
        last = hashlib.sha256(last + data[start : start + step]).digest()[:PREFIX_HASH_SIZE]
        hashes.append(last)
    return hashes


def end_hashes(before: bytes, token_ids: TokenIds) -> list[bytes]:
    """The hashes that checkpoints have which end inside a block: after its first token, its second and so on. `before` is the
    prefix hash of the blocks before it, or the fingerprint's digest; `token_ids` are the block's.
    """
    data, so_far, hashes = _id_bytes(token_ids), hashlib.sha256(before), []
    for start in range(0, len(data), _ID_SIZE):
        so_far.update(data[start : start + _ID_SIZE])
        hashes.append(so_far.copy().digest()[:PREFIX_HASH_SIZE])
    return hashes


def flight_key(fingerprint_digest: bytes, token_ids: TokenIds, n_known: int, block_size: int) -> bytes:
    """What stands for the evaluation of an input of which a registry has the first `n_known` tokens, fewer than all: SHA-256 of
    the prefix hash of the first block that it has not in full, or of the input's end if that comes first; 32 raw bytes. So all
    inputs that go on with the same block have the same key (docs/single-flight.md).
    """
    end = (n_known // block_size + 1) * block_size
    hashes = prefix_hashes(fingerprint_digest, token_ids[:end], block_size)
    if rest := len(token_ids[:end]) % block_size:
        hashes += end_hashes(hashes[-1] if hashes else fingerprint_digest, token_ids[-rest:])
    return hashlib.sha256(hashes[-1]).digest()


def links_of(row: Checkpoint, token_ids: TokenIds, block_size: int) -> list[PrefixLink]:
    """The links of a checkpoint: its full blocks and its end, as far as its own file covers them. A delta also links the last
    block's edge at or before its `start_token`, so that it is found among those that share what is before; the blocks below
    are its parent's. `token_ids` are all of the checkpoint's, from position 0 on; shape `[n_tokens]`.
    """
    hashes = prefix_hashes(row.fingerprint, token_ids, block_size)
    ends = [(block_size * (i + 1), found) for i, found in enumerate(hashes)]
    if tail := len(token_ids) % block_size:
        before = hashes[-1] if hashes else row.fingerprint
        ends.append((len(token_ids), end_hashes(before, token_ids[-tail:])[-1]))
    return [
        PrefixLink(prefix_hash=found, n_tokens=end, file_tokens=row.n_tokens, ckpt_no=row.ckpt_no)
        for end, found in ends
        if end >= row.start_token // block_size * block_size
    ]


def _id_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()
