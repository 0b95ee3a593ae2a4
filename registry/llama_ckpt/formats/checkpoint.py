"""Open a `LLAM` checkpoint file: everything in it, verified, in one call. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llama_ckpt.errors import BadInput, CorruptFile, Unsupported
from llama_ckpt.fingerprint import fingerprint, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import CheckName, Checkpoint, Fingerprint, ModelDimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A checkpoint file of which every byte was checked. Its payload is a view into the caller's buffer."""

    contents: container.Contents
    state: kv_state.KvState
    fingerprint: Fingerprint

    @property
    def dimensions(self) -> ModelDimensions:
        """The dimensions that the payload itself has."""
        return ModelDimensions(
            n_layer=self.state.n_layer,
            n_kv_head=self.contents.header.n_kv_head,
            kv_token_bytes=self.state.token_bytes,
        )


def _ignore(_check: CheckName) -> None:
    return None


def open_checkpoint(view: memoryview, name: str, on_passed: Callable[[CheckName], None] = _ignore) -> CheckpointFile:
    """Reads a checkpoint file from memory: header, CRCs, structure of the body, agreement of the parts, in this order.

    Calls `on_passed` after each check that passed, with `HEADER`, `CRC32` and `STRUCTURE`. `name` is the file's name in
    messages.

    Raises:
        CorruptFile: the first check that failed, with the values that disagree.
    """
    header, padding = container.read_header(view, name)
    on_passed(CheckName.HEADER)
    contents = container.read_contents(view, header, padding, name)
    on_passed(CheckName.CRC32)
    file = require_structure(contents, name)
    on_passed(CheckName.STRUCTURE)
    return file


def require_structure(contents: container.Contents, name: str) -> CheckpointFile:
    """Checks that the parts of a file agree: header, metadata, token ids and the payload, which is parsed to its last byte.

    Raises:
        CorruptFile: the first contradiction, with both values.
    """
    try:
        return _checked_structure(contents, name)
    except RecursionError:  # metadata that json can still read may be too deep to be written or formatted
        raise _corrupt(name, "the metadata is nested too deep") from None


def _checked_structure(contents: container.Contents, name: str) -> CheckpointFile:
    header = contents.header
    try:
        state = kv_state.parse(contents.payload)
        if header.flags & container.FLAG_SLICEABLE:
            kv_state.require_plain_sequence(state, header.seq_len, header.start_token)
        else:
            kv_state.require_whole_sequence(state, header.seq_len)
        identity = fingerprint_of(contents)
    except (Unsupported, BadInput) as error:
        raise _corrupt(name, str(error)) from error
    if header.n_layer != state.n_layer:
        raise _corrupt(name, f"the header says {header.n_layer} layers, the payload has {state.n_layer}")
    of_payload = {"type_k": state.type_k, "type_v": state.type_v, "v_transposed": state.v_transposed}
    for field, value in of_payload.items():
        if identity.fields.get(field) != value:
            raise _corrupt(name, f"the payload's {field} is {value}, the fingerprint's {identity.fields.get(field)}")
    if identity.digest != header.fingerprint:
        raise _corrupt(name, "the metadata's fields do not give the header's fingerprint")
    return CheckpointFile(contents=contents, state=state, fingerprint=identity)


def _corrupt(name: str, reason: str) -> CorruptFile:
    return CorruptFile(path=name, check=CheckName.STRUCTURE, reason=reason)


def fingerprint_of(contents: container.Contents) -> Fingerprint:
    """The fingerprint that the metadata's fields give.

    Raises:
        BadInput: the metadata has no fingerprint fields.
    """
    fields = contents.metadata.get("fingerprint")
    if not isinstance(fields, dict):
        raise BadInput(what="metadata field 'fingerprint'", value=fields, reason="it is no JSON object")
    return fingerprint(fields)


def require_agreement(file: CheckpointFile, row: Checkpoint, name: str) -> None:
    """Checks that a file belongs to its row. The tokens hash of a delta is not compared: its file has only its own tokens.

    Raises:
        CorruptFile: fingerprint, input hash, tokens or payload CRC differ from the row's.
    """
    header = file.contents.header
    pairs = {
        "fingerprint": (row.fingerprint, header.fingerprint),
        "input hash": (row.input_hash, header.input_hash),
        "number of tokens": (row.n_tokens, header.seq_len),
        "first token": (row.start_token, header.start_token),
        "payload CRC": (row.payload_crc32, header.payload_crc32),
    }
    if header.start_token == 0:  # the first tokens of a delta are in its parents' files
        pairs["tokens hash"] = (row.tokens_hash, tokens_hash(file.contents.token_ids))
    for what, (in_row, in_file) in pairs.items():
        if in_row != in_file:
            shown_row, shown_file = (x.hex()[:16] + "…" if isinstance(x, bytes) else str(x) for x in (in_row, in_file))
            reason = f"{what}: the row says {shown_row}, the file {shown_file}"
            raise CorruptFile(path=name, check=CheckName.ROW, reason=reason)


def dimension_mismatch(actual: ModelDimensions, expected: ModelDimensions) -> str | None:
    """The first dimension in which a file differs from the model, as text; None if they agree. 0 means unknown and matches."""
    for field in ("n_layer", "n_kv_head", "kv_token_bytes"):
        here, there = getattr(actual, field), getattr(expected, field)
        if here != there and 0 not in (here, there):
            return f"{field} is {here} in the file, {there} in the model"
    return None
