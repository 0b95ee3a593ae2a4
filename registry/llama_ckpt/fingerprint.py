"""Identity: the hashes of inputs and token ids, and the fingerprint that decides whether KV bytes may be reused. Pure."""

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

    `fields` contains only fields that are set, so a field that is added later does not change old fingerprints.

    Raises:
        BadInput: `fields` has no "weights", or a value that JSON cannot represent (NaN, bytes).
    """
    named: dict[str, FieldValue] = {"schema": SCHEMA, **fields}
    if "weights" not in named:
        raise BadInput(what="fingerprint fields", value=sorted(named), reason="the field 'weights' is not there")
    return Fingerprint(digest=hashlib.sha256(canonical_json(named)).digest(), fields=named)


def canonical_json(fields: Mapping[str, FieldValue]) -> bytes:
    """The JSON text of `fields` that is hashed: sorted keys, no spaces, UTF-8.

    Raises:
        BadInput: a value that JSON cannot represent (NaN, bytes).
    """
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise BadInput(what="fingerprint fields", value=dict(fields), reason=str(error)) from error


def weights_digest(shard_digests: Sequence[bytes]) -> bytes:
    """One SHA-256 for a model, 32 raw bytes: that of its file, or of the concatenated digests of its shards in order."""
    if len(shard_digests) == 1:
        return shard_digests[0]
    return hashlib.sha256(b"".join(shard_digests)).digest()


def differences(saved: Mapping[str, FieldValue], now: Mapping[str, FieldValue]) -> tuple[Difference, ...]:
    """The fields in which two fingerprints differ, the most telling first."""
    keys = [
        k for k in (*_MEANING, *sorted(saved.keys() | now.keys())) if _canonical(saved.get(k)) != _canonical(now.get(k))
    ]
    return tuple(
        Difference(field=_MEANING.get(k, k), saved=_shown(saved.get(k)), now=_shown(now.get(k)))
        for k in dict.fromkeys(keys)
    )


def _canonical(value: FieldValue | None) -> str:
    """The value as it is hashed. Python takes True for 1; the hash does not."""
    return json.dumps(value, sort_keys=True)


def _shown(value: FieldValue | None) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return "yes" if value else "no"
        case str() if len(value) == 64:
            return value[:12] + "…"
        case _:
            return str(value)


def hash_input(prompt: Input) -> bytes:
    """The input hash, 32 raw bytes: SHA-256 of a text's exact UTF-8 bytes, or of token ids as little-endian int32.

    For a text it equals `sha256sum` of a file with the same bytes.

    Raises:
        BadInput: an empty input, a text that UTF-8 cannot encode, or a token id outside int32.
    """
    if isinstance(prompt, str):
        return hashlib.sha256(text_bytes(prompt)).digest()
    return tokens_hash(as_token_ids(prompt))


def text_bytes(text: str) -> bytes:
    """The UTF-8 bytes of an input text. An error does not quote the text, which may be confidential.

    Raises:
        BadInput: it is empty, or UTF-8 cannot encode it.
    """
    if not text:
        raise BadInput(what="input text", value=text, reason="it is empty")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        value = f"{len(text)} characters"
        reason = f"character {error.start} is a lone surrogate, which UTF-8 cannot encode"
        raise BadInput(what="input text", value=value, reason=reason) from None


def as_token_ids(values: Sequence[int] | NDArray[np.integer]) -> TokenIds:
    """`values` as a one-dimensional int32 array, shape `[n_tokens]`.

    Raises:
        BadInput: no ids, not whole numbers, or an id outside 0 .. 2**31-1.
    """
    if isinstance(values, bytes | bytearray | memoryview):
        raise BadInput(what="input", value=f"{len(values)} bytes", reason="give a str or token ids; decode bytes first")
    try:
        wide = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise BadInput(what="token ids", value=_shape(values), reason=str(error)) from error
    if wide.ndim != 1 or wide.size == 0:
        raise BadInput(what="token ids", value=_shape(values), reason="need a flat sequence of at least one id")
    if wide.dtype.kind not in "iu":
        raise BadInput(what="token ids", value=_shape(values), reason="ids are whole numbers")
    if int(wide.min()) < 0 or int(wide.max()) > 0x7FFFFFFF:
        raise BadInput(what="token ids", value=_shape(values), reason="an id is outside 0 .. 2147483647")
    return np.ascontiguousarray(wide, dtype=np.int32)


def _shape(value: object) -> str:
    """Type and length of a value. Its content is left out, because an input may be confidential."""
    length = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{length}"


def common_prefix(one: TokenIds, other: TokenIds) -> int:
    """The number of token ids that two sequences share at their start, which is also the index of the first that differs."""
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def tokens_hash(token_ids: TokenIds) -> bytes:
    """SHA-256 of the token ids as little-endian int32, 32 raw bytes."""
    return hashlib.sha256(_id_bytes(token_ids)).digest()


def tokens_hashes(token_ids: TokenIds, lengths: Iterable[int]) -> dict[int, bytes]:
    """`tokens_hash` of the prefixes of these lengths, in one pass."""
    data, so_far, at = _id_bytes(token_ids), hashlib.sha256(), 0
    hashes: dict[int, bytes] = {}
    for n in sorted(lengths):
        so_far.update(data[_ID_SIZE * at : _ID_SIZE * n])
        hashes[n], at = so_far.copy().digest(), n
    return hashes


def active_key(fingerprint_digest: bytes, input_hash: bytes) -> bytes:
    """The key that at most one ACTIVE row may hold: SHA-256(fingerprint ‖ input hash)."""
    return hashlib.sha256(fingerprint_digest + input_hash).digest()


def prefix_hashes(fingerprint_digest: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """The chained hashes of the full blocks of `block_size` token ids, 16 raw bytes each: hash i is the first 16 bytes of
    SHA-256(hash i-1 ‖ ids of block i as little-endian int32). The fingerprint's digest takes the place of hash -1. So a hash
    identifies all tokens up to the end of its block, and the model (docs/matching.md).
    """
    data, step = _id_bytes(token_ids), _ID_SIZE * block_size
    hashes, last = [], fingerprint_digest
    for start in range(0, len(data) - step + 1, step):
        last = hashlib.sha256(last + data[start : start + step]).digest()[:PREFIX_HASH_SIZE]
        hashes.append(last)
    return hashes


def end_hashes(before: bytes, token_ids: TokenIds) -> list[bytes]:
    """The end hashes of checkpoints that end inside a block: after its first token, after its second and so on. `before` is the
    prefix hash of the block before, or the fingerprint's digest for the first block; `token_ids` are those of the block.
    """
    data, so_far, hashes = _id_bytes(token_ids), hashlib.sha256(before), []
    for start in range(0, len(data), _ID_SIZE):
        so_far.update(data[start : start + _ID_SIZE])
        hashes.append(so_far.copy().digest()[:PREFIX_HASH_SIZE])
    return hashes


def flight_key(fingerprint_digest: bytes, token_ids: TokenIds, n_known: int, block_size: int) -> bytes:
    """The claim key for the evaluation of an input of which a registry has the first `n_known` tokens (fewer than all): SHA-256
    of the prefix hash of the first block that the registry does not have in full, or of the end hash if the input ends
    before that; 32 raw bytes. So all inputs that continue with the same block have the same key (docs/single-flight.md).
    """
    end = (n_known // block_size + 1) * block_size
    hashes = prefix_hashes(fingerprint_digest, token_ids[:end], block_size)
    if rest := len(token_ids[:end]) % block_size:
        hashes += end_hashes(hashes[-1] if hashes else fingerprint_digest, token_ids[-rest:])
    return hashlib.sha256(hashes[-1]).digest()


def links_of(row: Checkpoint, token_ids: TokenIds, block_size: int) -> list[PrefixLink]:
    """The links of a checkpoint: the full blocks that its own file covers, and its end. A delta also links the block boundary at
    or just below its `start_token`, so that a prefix search that stops there finds it; its parent links the lower blocks.
    `token_ids` are all of the checkpoint's, from position 0 on; shape `[n_tokens]`.
    """
    hashes = prefix_hashes(row.fingerprint, token_ids, block_size)
    ends = [(block_size * (i + 1), prefix_hash) for i, prefix_hash in enumerate(hashes)]
    if tail := len(token_ids) % block_size:
        before = hashes[-1] if hashes else row.fingerprint
        ends.append((len(token_ids), end_hashes(before, token_ids[-tail:])[-1]))
    return [
        PrefixLink(prefix_hash=prefix_hash, n_tokens=end, file_tokens=row.n_tokens, ckpt_no=row.ckpt_no)
        for end, prefix_hash in ends
        if end >= row.start_token // block_size * block_size
    ]


def _id_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()
