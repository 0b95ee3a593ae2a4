"""Our own checkpoint files, opened: everything in them, verified, in one call. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llama_ckpt.errors import BadInput, CorruptFile, Unsupported
from llama_ckpt.fingerprint import fingerprint, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import Checkpoint, Fingerprint, ModelDimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A checkpoint file of which every byte was checked. Its payload is a view into the caller's buffer."""

    contents: container.Contents
    state: kv_state.KvState
    fingerprint: Fingerprint

    @property
    def dimensions(self) -> ModelDimensions:
        """The shape that the payload itself shows."""
        return ModelDimensions(
            n_layer=self.state.n_layer,
            n_kv_head=self.contents.header.n_kv_head,
            kv_token_bytes=self.state.token_bytes,
        )


def _no_one(_check: str) -> None:
    return None


def open_checkpoint(view: memoryview, name: str, passed: Callable[[str], None] = _no_one) -> CheckpointFile:
    """Reads a checkpoint file from memory: header, CRCs, structure of the body, agreement of the parts, in this order.

    `passed` hears the name of each check that held: "Header", "CRC32", "Structure".

    Raises:
        CorruptFile: the first check that failed, with the values that disagree.
    """
    header, padding = container.read_header(view, name)
    passed("Header")
    contents = container.read_contents(view, header, padding, name)
    passed("CRC32")
    file = require_structure(contents, name)
    passed("Structure")
    return file


def require_structure(contents: container.Contents, name: str) -> CheckpointFile:
    """Holds a file's parts to one another: header, metadata, token ids and the payload, parsed to its last byte.

    Raises:
        CorruptFile: the first thing in which two of them disagree, with both values.
    """
    try:
        return _agreeing(contents, name)
    except RecursionError:  # what json could just read may be too deep to be written, or to be told
        raise CorruptFile(path=name, check="Structure", reason="the metadata is nested too deep") from None


def _agreeing(contents: container.Contents, name: str) -> CheckpointFile:
    header = contents.header
    try:
        state = kv_state.parse(contents.payload)
        if header.flags & container.FLAG_SLICEABLE:
            kv_state.require_plain_sequence(state, header.seq_len, header.start_token)
        else:
            kv_state.require_whole_sequence(state, header.seq_len)
        identity = fingerprint_of(contents)
    except (Unsupported, BadInput) as error:
        raise CorruptFile(path=name, check="Structure", reason=str(error)) from error
    if header.n_layer != state.n_layer:
        reason = f"the header says {header.n_layer} layers, the payload has {state.n_layer}"
        raise CorruptFile(path=name, check="Structure", reason=reason)
    shown = {"type_k": state.type_k, "type_v": state.type_v, "v_transposed": state.v_transposed}
    for field, value in shown.items():
        if identity.fields.get(field) != value:
            reason = f"the payload's {field} is {value}, the fingerprint's {identity.fields.get(field)}"
            raise CorruptFile(path=name, check="Structure", reason=reason)
    if identity.digest != header.fingerprint:
        raise CorruptFile(
            path=name, check="Structure", reason="the metadata's fields do not give the header's fingerprint"
        )
    return CheckpointFile(contents=contents, state=state, fingerprint=identity)


def fingerprint_of(contents: container.Contents) -> Fingerprint:
    """The fingerprint that the metadata's plain fields give.

    Raises:
        BadInput: the metadata has no such fields.
    """
    fields = contents.metadata.get("fingerprint")
    if not isinstance(fields, dict):
        raise BadInput(what="metadata field 'fingerprint'", value=fields, reason="it is no JSON object")
    return fingerprint(fields)


def require_agreement(file: CheckpointFile, row: Checkpoint, name: str) -> None:
    """Holds a file to its row; a delta's only as far as its own tokens go.

    Raises:
        CorruptFile: input hash, fingerprint, tokens or payload CRC are not those of the row.
    """
    header = file.contents.header
    pairs = {
        "fingerprint": (row.fingerprint, header.fingerprint),
        "input hash": (row.input_hash, header.input_hash),
        "number of tokens": (row.n_tokens, header.seq_len),
        "first token": (row.start_token, header.start_token),
        "payload CRC": (row.payload_crc32, header.payload_crc32),
    }
    if header.start_token == 0:  # a delta has the others in its parents' files
        pairs["tokens hash"] = (row.tokens_hash, tokens_hash(file.contents.token_ids))
    for what, (in_row, in_file) in pairs.items():
        if in_row != in_file:
            told = (x.hex()[:16] + "…" if isinstance(x, bytes) else str(x) for x in (in_row, in_file))
            raise CorruptFile(path=name, check="Row", reason="{}: the row says {}, the file {}".format(what, *told))


def dimension_mismatch(found: ModelDimensions, expected: ModelDimensions) -> str | None:
    """What differs between a file's shape and the model's, in words; None when they agree."""
    for field in ("n_layer", "n_kv_head", "kv_token_bytes"):
        here, there = getattr(found, field), getattr(expected, field)
        if here != there and 0 not in (here, there):
            return f"{field} is {here} in the file, {there} in the model"
    return None
