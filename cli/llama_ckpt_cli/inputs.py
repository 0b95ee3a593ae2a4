"""What the commands read: texts, token ids, hashes, and models by name or file."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.engine.vocabulary import LlamaCppVocabulary
    from llama_ckpt.fingerprint import TokenIds
    from llama_ckpt_cli.output import Output

_GGUF_HEAD = 1 << 24  # bytes; the architecture comes before the vocabulary


def input_bytes(text: str | None, text_file: str | None) -> bytes:
    """The exact bytes of the input.

    Raises:
        BadInput: neither or both are given, or the file cannot be read.
    """
    from llama_ckpt.errors import BadInput

    if (text is None) == (text_file is None):
        given = "neither" if text is None else "both"
        raise BadInput(what="input", value=given, reason="give either --text or --text-file")
    if text is not None:
        return text.encode(errors="surrogateescape")
    return _read(str(text_file))


def _read(file: str) -> bytes:
    from llama_ckpt.errors import BadInput

    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BadInput(what="input file", value=file, reason=error.strerror or str(error)) from error


def input_text(text: str | None, text_file: str | None) -> str:
    """The input as text, newlines untouched.

    Raises:
        BadInput: as `input_bytes`, or the bytes are not valid UTF-8.
    """
    from llama_ckpt.errors import BadInput

    data = input_bytes(text, text_file)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(what="input", value=text_file or "--text", reason=f"it is not valid UTF-8: {error}") from error


@dataclass(frozen=True, slots=True)
class InputQuery:
    """An input to match: its hash, and the input itself (a text or token ids) if it is known. Bytes that are not valid UTF-8 have
    only a hash.
    """

    input_hash: bytes
    given: str | TokenIds | None = None


def input_query(
    *, text: str | None, text_file: str | None, hash_hex: str | None, tokens_file: str | None
) -> InputQuery:
    """The input that the user gave, in exactly one of four ways.

    Raises:
        BadInput: none or several are given; as `input_bytes`; the input is empty; the hash is not a SHA-256 in hex; the token ids
            are not numbers.
    """
    from llama_ckpt.errors import BadInput
    from llama_ckpt.fingerprint import as_token_ids, tokens_hash

    ways = {"--text": text, "--text-file": text_file, "--tokens": tokens_file, "--hash": hash_hex}
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        reason = "give exactly one of --text, --text-file, --tokens and --hash"
        raise BadInput(what="input", value=" and ".join(given) or "none", reason=reason)
    if tokens_file is not None:
        ids = as_token_ids(_numbers(_read(tokens_file), tokens_file))
        return InputQuery(tokens_hash(ids), ids)
    if hash_hex is not None:
        return InputQuery(_sha256(hash_hex))
    return _query_of_bytes(input_bytes(text, text_file), text_file or text)


def _query_of_bytes(data: bytes, name: str | None) -> InputQuery:
    from llama_ckpt.errors import BadInput

    if not data:
        raise BadInput(what="input", value=name, reason="the input is empty")
    with contextlib.suppress(UnicodeDecodeError):  # other bytes have only a hash
        return InputQuery(hashlib.sha256(data).digest(), data.decode())
    return InputQuery(hashlib.sha256(data).digest())


def _sha256(hash_hex: str) -> bytes:
    from llama_ckpt.errors import BadInput

    try:
        return bytes.fromhex(hash_hex)
    except ValueError as error:
        raise BadInput(what="input hash", value=hash_hex, reason="a SHA-256 has 64 hex digits") from error


_DIGITS = 20  # more than any token id has; Python does not parse numbers of thousands of digits


def _numbers(data: bytes, name: str) -> list[int]:
    """Integers separated by blanks, commas or brackets, as people and JSON write lists."""
    from llama_ckpt.errors import BadInput

    words = data.translate(bytes.maketrans(b",[]", b"   ")).split()
    if wrong := next((word for word in words if not word.isdigit() or len(word) > _DIGITS), None):
        shown = wrong[:20].decode(errors="replace")
        raise BadInput(
            what="token ids", value=name, reason=f"{shown!r} is not a non-negative integer of at most {_DIGITS} digits"
        )
    return [int(word) for word in words]


def load_vocabulary(model: str, out: Output) -> LlamaCppVocabulary | None:
    """The vocabulary of a GGUF file; None with a note if it cannot be loaded, since complete matches do not need it."""
    from llama_ckpt.errors import BadInput, EngineMissing

    try:
        from llama_ckpt.engine.vocabulary import LlamaCppVocabulary

        return LlamaCppVocabulary(model)
    except (BadInput, EngineMissing) as error:
        out.note(f"only a complete match is searched for, no prefix match: {error}")
        return None


def weights_of(model: str, out: Output) -> bytes | None:
    """The weights' SHA-256 if `model` is a GGUF file; None if it is a registered name. Needs no llama-cpp-python.

    Raises:
        BadInput: the name is that of a GGUF file, which does not exist.
    """
    from llama_ckpt.errors import BadInput

    path = Path(model)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        is_file = False
    if not is_file:
        if path.suffix.lower() == ".gguf":
            raise BadInput(what="model", value=model, reason="there is no such file")
        return None
    import platformdirs

    from llama_ckpt.engine.digests import FileDigests, weights_digest_of

    with out.progress(f"SHA-256 of {path.name}") as progress:
        return weights_digest_of(
            path, FileDigests(platformdirs.user_cache_path("llama-ckpt") / "digests.json"), progress
        )


def architecture_of(model: Path) -> str:
    """The architecture's name in a GGUF. Needs no llama-cpp-python.

    Raises:
        BadInput: the file cannot be read.
        CorruptFile: it is not a GGUF.
    """
    from llama_ckpt.errors import BadInput
    from llama_ckpt.formats import gguf

    try:
        with model.open("rb") as file:
            head = file.read(_GGUF_HEAD)
    except OSError as error:
        raise BadInput(what="model file", value=str(model), reason=error.strerror or str(error)) from error
    return gguf.architecture(memoryview(head), str(model))


def load_engine(
    out: Output,
    model: Path,
    *,
    n_ctx: int,
    flash_attn: bool,
    kv_type: str,
    type_v: str | None = None,
    threads: int | None = None,
    embedding: bool = False,
) -> LlamaCppEngine:
    """The model as an engine; give `type_v` if V has another type than K.

    Raises:
        EngineMissing: llama-cpp-python is not installed.
        BadInput: the model cannot be loaded, or the KV type does not exist.
    """
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.errors import BadInput
    from llama_ckpt.formats.kv.state import GGML_TYPES

    types = {name: number for number, (name, _, _) in GGML_TYPES.items()}
    of_v = type_v or kv_type
    for name in (kv_type, of_v):
        if name not in types:
            raise BadInput(what="KV type", value=name, reason=f"the types are {', '.join(types)}")
    if of_v not in ("f16", "f32", "bf16") and not flash_attn:
        raise BadInput(what="KV type", value=of_v, reason="a quantised V needs --flash-attn")
    options: dict[str, Any] = {
        "n_ctx": n_ctx,
        "flash_attn": flash_attn,
        "type_k": types[kv_type],
        "type_v": types[of_v],
        "embedding": embedding,
    }
    if threads is not None:
        options |= {"n_threads": threads, "n_threads_batch": threads}
    with out.progress(f"SHA-256 of {model.name}") as progress:
        return LlamaCppEngine.from_path(model, progress=progress, **options)
