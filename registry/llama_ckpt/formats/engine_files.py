"""llama.cpp's own files: `ggsq` (one sequence) and `ggsn` (a whole context). bytes ↔ values. Pure.

Sources: `llama_context::state_seq_save_file` and `state_save_file` (llama.cpp b11434, src/llama-context.cpp);
`server_tokens::serialize` (tools/server/server-common.cpp) for llama-server's packed token list; the real files in
tests/samples. docs/formats.md has the byte tables, and explains how to add the next version of llama.cpp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from llama_ckpt.errors import BadInput, CorruptFile, LlamaCkptError, Unsupported
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.formats.kv import context as kv_context
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect, KvState, Positions
from llama_ckpt.formats.magic import FileFormat, padded_magic
from llama_ckpt.values import CheckName

MAGICS = {FileFormat.GGSQ: b"qsgg", FileFormat.GGSN: b"nsgg"}  # u32 0x67677371 and 0x6767736e, little-endian
_FORMATS = {magic: kind for kind, magic in MAGICS.items()}

# Version -> whether its body has the two rotation words. The next version of llama.cpp needs one entry here and one sample.
VERSIONS = {FileFormat.GGSQ: {2: False, 3: False, 4: True}, FileFormat.GGSN: {9: False, 10: False, 11: True}}

_PACKED_MARKER = -1  # LLAMA_TOKEN_NULL
_PACKED_VERSION = 1
_MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """A ggsq or ggsn file, read to its last byte. `body` is a view into the caller's buffer; `state` has the offsets in it.

    `token_ids` has shape `[n_tokens]` and is -1 at the places of media. `known` says whether the version is one of
    `VERSIONS`; a file of another version is read only if its body has a known layout to the last byte.
    """

    format: FileFormat
    version: int
    known: bool
    padding: int
    packed: bool
    token_ids: TokenIds
    n_media: int
    architecture: str | None
    body: memoryview
    state: KvState

    @property
    def whole_context(self) -> bool:
        """Whether the body holds all sequences of a context, not one."""
        return self.format is FileFormat.GGSN


def find_magic(view: memoryview) -> tuple[FileFormat, int] | None:
    """The format and the number of zero bytes before its magic, 0 to 8; None if the file has neither magic."""
    start = padded_magic(view, _FORMATS)
    return None if start is None else (_FORMATS[start[0]], start[1])


def read(view: memoryview, name: str) -> EngineFile:
    """Reads a ggsq or ggsn file from memory: magic, version, tokens, body, each bounded by the size of the file.

    Raises:
        CorruptFile: no ggsq or ggsn magic, a count that exceeds the file, or a body that does not end at the last byte.
    """
    magic = find_magic(view)
    if magic is None:
        _refuse(name, CheckName.HEADER, f"no ggsq or ggsn magic: the file begins with {bytes(view[:16]).hex(' ')}")
    kind, padding = magic
    try:
        return _Reader(view, padding, name).file(kind)
    except Unsupported as error:
        raise CorruptFile(path=name, check=CheckName.STRUCTURE, reason=str(error)) from None


def sequence_state(file: EngineFile, seq_id: int = 0) -> memoryview:
    """The state of the file's sequence as `llama_state_seq_set_data` takes it: a copy of the body after eight more bytes.

    For a whole context, it is the state of sequence `seq_id`.

    Raises:
        Unsupported: the file has media; or it is a whole context without that sequence, or with recurrent memory.
    """
    if file.n_media:
        raise Unsupported(what="restoring a file with media", reason=MEDIA_REASON)
    if file.whole_context:
        return kv_context.sequence_state(file.body, seq_id)
    out = np.empty(kv_state.PREFIX_BYTES + len(file.body), dtype=np.uint8)
    out[: kv_state.PREFIX_BYTES] = np.frombuffer(kv_state.prefix(seq_id), dtype=np.uint8)
    out[kv_state.PREFIX_BYTES :] = np.frombuffer(file.body, dtype=np.uint8)
    return out.data.toreadonly()


def positions(file: EngineFile) -> list[Positions]:
    """The positions of the file's sequence in each cache and in recurrent memory; each of shape `[n_cells]`.

    Raises:
        Unsupported: a whole context without sequence 0.
    """
    of_recurrent = [file.state.recurrent.positions] if file.state.recurrent is not None else []
    if file.whole_context:
        return kv_context.positions_of(file.body, file.state) + of_recurrent
    return [stream.positions for cache in file.state.caches for stream in cache.streams] + of_recurrent


def held_token_ids(file: EngineFile) -> TokenIds:
    """The token ids whose state the file holds; shape `[n_cells]`. llama-cli lists one more token, which has no cell yet.

    Raises:
        Unsupported: a whole context without sequence 0.
    """
    return file.token_ids[: n_held(file, positions(file))]


def n_held(file: EngineFile, of_caches: list[Positions]) -> int:
    """The number of tokens whose state the file holds. `of_caches` is the result of `positions`."""
    if file.state.caches:
        return len(of_caches[0])
    return int(of_caches[0].max(initial=-1)) + 1 if of_caches else 0


MEDIA_REASON = "its tokens include images or audio, which token ids do not identify"


def _refuse(name: str, check: CheckName, reason: str) -> NoReturn:
    raise CorruptFile(path=name, check=check, reason=reason)


class _Reader:
    """A cursor over one file. It raises `CorruptFile` instead of leaving it."""

    def __init__(self, view: memoryview, at: int, name: str) -> None:
        self.view = view
        self.at = at
        self.padding = at
        self.name = name

    def take(self, size: int, what: str) -> int:
        """Steps over `size` bytes and gives the offset of the first."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.view):
            left = len(self.view) - start
            _refuse(self.name, CheckName.HEADER, f"{what} at byte {start} needs {size} bytes, the file has {left} left")
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.view, self.take(8, what))[0])

    def file(self, kind: FileFormat) -> EngineFile:
        self.take(4, "the magic")
        version = self.u32("the version")
        raw, words = self.token_words()
        packed = len(words) > 0 and int(words[0]) == _PACKED_MARKER
        token_ids, n_media = self.unpacked(raw) if packed else (words.astype(np.int32), 0)
        architecture = self.architecture() if kind is FileFormat.GGSN else None
        body, state = self.body(whole_context=kind is FileFormat.GGSN)
        return EngineFile(
            format=kind,
            version=version,
            known=version in VERSIONS[kind],
            padding=self.padding,
            packed=packed,
            token_ids=token_ids,
            n_media=n_media,
            architecture=architecture,
            body=body,
            state=state,
        )

    def token_words(self) -> tuple[memoryview, TokenIds]:
        count = self.u32("the number of tokens")
        start = self.take(4 * count, f"the list of {count} tokens")
        raw = self.view[start : self.at]
        return raw, np.frombuffer(raw, dtype="<i4")

    def unpacked(self, raw: memoryview) -> tuple[TokenIds, int]:
        """The ids of llama-server's packed list and its number of media. The list is: marker, version, ids, keys, chunks."""
        inner = _Reader(raw, 4, self.name)
        version = inner.u32("the packed list's version")
        if version != _PACKED_VERSION:
            _refuse(
                self.name,
                CheckName.HEADER,
                f"a packed token list of version {version}, this reader knows {_PACKED_VERSION}",
            )
        n_ids = inner.u32("the packed list's number of tokens")
        start = inner.take(4 * n_ids, f"the packed list's {n_ids} tokens")
        token_ids = np.frombuffer(raw[start : inner.at], dtype="<i4").astype(np.int32)
        n_media = inner.u32("the number of media")
        inner.take(4 * n_media, f"the places of {n_media} media")
        for number in range(n_media):
            inner.take(inner.u32(f"the size of media {number}"), f"media {number}")
        filling = bytes(inner.view[inner.at :])
        if len(filling) >= 4 or any(filling):
            _refuse(self.name, CheckName.HEADER, f"{len(filling)} bytes stand behind the packed token list")
        return token_ids, n_media

    def architecture(self) -> str:
        size = self.u32("the length of the architecture's name")
        if size > _MAX_NAME_BYTES:
            _refuse(self.name, CheckName.HEADER, f"an architecture's name of {size} bytes, at most {_MAX_NAME_BYTES}")
        start = self.take(size, "the architecture's name")
        raw = bytes(self.view[start : self.at])
        if not raw or not all(0x20 < byte < 0x7F for byte in raw):
            _refuse(self.name, CheckName.HEADER, f"{raw[:32]!r} is no architecture's name")
        return raw.decode("ascii")

    def body(self, *, whole_context: bool) -> tuple[memoryview, KvState]:
        """The rest of the file, parsed to its last byte. Older builds wrote logits and embeddings before the memory."""
        start = self.at
        body = self.view[start:]
        try:
            return body, kv_state.parse_body(body, whole_context=whole_context)
        except Unsupported as error:
            if not whole_context:
                raise
            likelier = error  # of the layout without outputs
        try:
            self.outputs()
            behind = self.view[self.at :]
            return behind, kv_state.parse_body(behind, whole_context=True)
        except LlamaCkptError:
            raise Unsupported(**likelier.values) from None

    def outputs(self) -> None:
        """Steps over the outputs that older llama.cpp builds wrote before the memory: ids, logits, embeddings."""
        n_outputs = self.u32("the number of outputs")
        self.take(4 * n_outputs, "the outputs' ids")
        for what in ("logits", "embeddings"):
            count = self.u64(f"the number of {what}")
            self.take(4 * count, f"{count} {what}")


def encode_ggsq(
    version: int,
    token_ids: TokenIds,
    state: memoryview,
    *,
    n_stream: int | None = None,
    packed: bool = False,
    rotation: kv_edit.Rotation | None = None,
) -> tuple[bytes, memoryview]:
    """A ggsq file of that version in two pieces, to be written one after the other: head and body.

    llama-server reads both plain and packed token lists, and writes packed ones. `n_stream` is its number of slots (-np)
    unless they share one cache; None keeps the state's number of streams. `rotation` is the rotation of K and V, for a
    quantised state that does not contain it.

    Raises:
        BadInput: an unknown version, or the number of token ids is not the number of cells.
        Incompatible, Unsupported: the version's dialect cannot express the state, see `kv_edit.to_dialect`.
    """
    target = _dialect_of(FileFormat.GGSQ, version, token_ids, state, n_stream)
    # The rotation words are written as the state is; an engine that rotates otherwise refuses the file.
    translated = kv_edit.to_dialect(state, target, rotation=rotation, now=rotation)
    ids = _packed(token_ids) if packed else token_ids.astype("<i4").tobytes()
    head = MAGICS[FileFormat.GGSQ] + struct.pack("<II", version, len(ids) // 4) + ids
    return head, translated[kv_state.PREFIX_BYTES :]


def encode_ggsn(
    version: int,
    token_ids: TokenIds,
    state: memoryview,
    architecture: str,
    *,
    n_stream: int | None = None,
    rotation: kv_edit.Rotation | None = None,
    for_llama_cli: bool = True,
) -> tuple[bytes, memoryview]:
    """A ggsn file of that version, in two pieces: a context whose sequence 0 is this one, and which has no other.

    llama-cli (--prompt-cache) evaluates the last listed token itself and fails if that token has a cell: `for_llama_cli`
    leaves the last cell out. `architecture` is the value of general.architecture in the model's GGUF. All else as in
    `encode_ggsq`.

    Raises:
        BadInput, Incompatible, Unsupported: as `encode_ggsq`; or the architecture is empty, too long or not ASCII.
    """
    if not architecture or len(architecture) > _MAX_NAME_BYTES or not architecture.isascii():
        raise BadInput(what="architecture", value=architecture, reason="it is no name of one")
    target = _dialect_of(FileFormat.GGSN, version, token_ids, state, n_stream)
    translated = kv_edit.to_dialect(state, target, rotation=rotation, now=rotation)
    if for_llama_cli:
        if len(token_ids) < 2:
            raise BadInput(what="token ids", value=len(token_ids), reason="llama-cli's prompt cache needs two tokens")
        translated = kv_edit.truncate(translated, len(token_ids) - 1)
    ids = token_ids.astype("<i4").tobytes()
    name = architecture.encode()
    head = (
        MAGICS[FileFormat.GGSN]
        + struct.pack("<II", version, len(token_ids))
        + ids
        + struct.pack("<I", len(name))
        + name
    )
    return head, translated[kv_state.PREFIX_BYTES :]


def _packed(token_ids: TokenIds) -> bytes:
    head = struct.pack("<iII", _PACKED_MARKER, _PACKED_VERSION, len(token_ids))
    return head + token_ids.astype("<i4").tobytes() + struct.pack("<I", 0)


def _dialect_of(
    kind: FileFormat, version: int, token_ids: TokenIds, state: memoryview, n_stream: int | None
) -> Dialect:
    """The dialect in which a state is written to a file of that version, after state and token ids were checked."""
    if version not in VERSIONS[kind]:
        known = ", ".join(map(str, VERSIONS[kind]))
        raise BadInput(what=f"{kind} version", value=version, reason=f"known are {known}")
    parsed = kv_state.parse(state)
    if parsed.n_cells != len(token_ids):
        reason = f"the state has {parsed.n_cells} cells"
        raise BadInput(what="token ids", value=f"{len(token_ids)} of them", reason=reason)
    # Positions of more than one number: 8 bytes a cell in the oldest version, 12 since then.
    if parsed.cell_extension not in (0, 8 if version == min(VERSIONS[kind]) else 12):
        reason = f"each cell has {parsed.cell_extension} bytes more, which {kind} version {version} has not"
        raise Unsupported(what="writing this state", reason=reason)
    streams = max(parsed.n_stream, 1) if n_stream is None else n_stream
    return Dialect(streams, VERSIONS[kind][version], parsed.cell_extension)
