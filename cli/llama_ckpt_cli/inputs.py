"""What the commands read: a text, a hash, a model by name or file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt_cli.output import Output

TextFile = Annotated[
    str | None, typer.Option("--text-file", "-f", help="File with the input's exact bytes (UTF-8); - reads stdin.")
]
Text = Annotated[str | None, typer.Option("--text", "-t", help="The input itself.")]
Gguf = Annotated[Path, typer.Option("--model", "-m", help="The model, a GGUF file.")]
ContextSize = Annotated[int, typer.Option("--n-ctx", min=1, help="Cells of the context; must hold the whole input.")]
FlashAttention = Annotated[bool, typer.Option("--flash-attn", help="Use flash attention (V is not transposed).")]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of K and V: f16, f32, bf16, q8_0, q4_0, …")]
_GGUF_HEAD = 1 << 24  # the architecture stands before the vocabulary
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to evaluate with.")]


def input_bytes(text: str | None, text_file: str | None) -> bytes:
    """The exact bytes of the input.

    Raises:
        BadInput: neither or both are given, or the file cannot be read.
    """
    from llama_ckpt.errors import BadInput

    if (text is None) == (text_file is None):
        given = "neither" if text is None else "both"
        raise BadInput(what="input", value=given, reason="give one of --text and --text-file")
    if text is not None:
        return text.encode(errors="surrogateescape")
    if text_file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(str(text_file)).read_bytes()
    except OSError as error:
        raise BadInput(what="input file", value=text_file, reason=error.strerror or str(error)) from error


def input_text(text: str | None, text_file: str | None) -> str:
    """The input as text, newlines untouched.

    Raises:
        BadInput: as `input_bytes`, or the bytes are no UTF-8.
    """
    from llama_ckpt.errors import BadInput

    data = input_bytes(text, text_file)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(what="input", value=text_file or "--text", reason=f"it is no UTF-8: {error}") from error


def input_sha256(text: str | None, text_file: str | None, hash_hex: str | None) -> bytes:
    """The input hash: given, or of the input's bytes.

    Raises:
        BadInput: as `input_bytes`; an empty input; a hash that is no SHA-256 in hex.
    """
    import hashlib

    from llama_ckpt.errors import BadInput

    if hash_hex is None:
        if text is None and text_file is None:
            raise BadInput(what="input", value="none", reason="give one of --text, --text-file and --hash")
        data = input_bytes(text, text_file)
        if not data:
            raise BadInput(what="input", value=text_file or text, reason="it is empty")
        return hashlib.sha256(data).digest()
    if text is not None or text_file is not None:
        raise BadInput(what="input", value=hash_hex, reason="give one of --hash, --text and --text-file")
    try:
        return bytes.fromhex(hash_hex)
    except ValueError as error:
        raise BadInput(what="input hash", value=hash_hex, reason="a SHA-256 has 64 hex digits") from error


def weights_of(model: str, out: Output) -> bytes | None:
    """The weights' SHA-256 where `model` is a GGUF file; None where it is a registered name. Needs no llama-cpp-python.

    Raises:
        BadInput: it looks like a file that is not there.
    """
    from llama_ckpt.errors import BadInput

    path = Path(model)
    if path.suffix != ".gguf" and path.name == model:
        return None
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        is_file = False
    if not is_file:
        raise BadInput(what="model", value=model, reason="there is no such file")
    import platformdirs

    from llama_ckpt.digests import FileDigests, weights_digest_of

    with out.progress(f"SHA-256 of {path.name}") as progress:
        return weights_digest_of(
            path, FileDigests(platformdirs.user_cache_path("llama-ckpt") / "digests.json"), progress
        )


def architecture_of(model: Path) -> str:
    """The architecture's name in a GGUF. Needs no llama-cpp-python.

    Raises:
        BadInput: the file cannot be read.
        CorruptFile: it is no GGUF.
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
) -> LlamaCppEngine:
    """The model as an engine; `type_v` where V is of another type than K.

    Raises:
        EngineMissing: llama-cpp-python is not installed.
        BadInput: the model cannot be loaded, or there is no such KV type.
    """
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.errors import BadInput
    from llama_ckpt.formats.kv_state import GGML_TYPES

    types = {name: number for number, (name, _, _) in GGML_TYPES.items()}
    of_v = type_v or kv_type
    for one in (kv_type, of_v):
        if one not in types:
            raise BadInput(what="KV type", value=one, reason=f"known are {', '.join(types)}")
    if of_v not in ("f16", "f32", "bf16") and not flash_attn:
        raise BadInput(what="KV type", value=of_v, reason="a quantised V needs --flash-attn")
    options: dict[str, Any] = {
        "n_ctx": n_ctx,
        "flash_attn": flash_attn,
        "type_k": types[kv_type],
        "type_v": types[of_v],
    }
    if threads is not None:
        options |= {"n_threads": threads, "n_threads_batch": threads}
    with out.progress(f"SHA-256 of {model.name}") as progress:
        return LlamaCppEngine.from_path(model, progress=progress, **options)
