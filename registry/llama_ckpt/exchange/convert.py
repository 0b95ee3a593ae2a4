"""Convert files of llama.cpp's own programs (ggsq, ggsn): prove that they belong to a model, and rewrite them as `LLAM`.

Such a file names its tokens and no model. The state itself proves the model: K and V of its first tokens must be what the
model computes for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llama_ckpt import formats
from llama_ckpt.checkpoints.captured import CapturedState
from llama_ckpt.engine import Engine
from llama_ckpt.errors import BadInput, CorruptFile, Incompatible, Unsupported
from llama_ckpt.fingerprint import TokenIds, common_prefix, hash_input
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import numbers as kv_numbers
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv import values as kv_values
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.values import CheckName, MemoryKind, ModelDimensions

_N_PROOF_TOKENS = 8
_MIN_CONTEXT_CELLS = 512
# Distances of K and V (`kv_numbers.Distance`), measured on a model with 135 million weights of four bits. The same weights
# with other batch shapes and builds: up to 0.014 typical, 0.04 furthest. One byte in 100,000 changed in half of the weights:
# 0.11 and 0.73. Other weights: 1 and more.
_MAX_TYPICAL_DISTANCE = 0.05
_MAX_FURTHEST_DISTANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The settings of an engine whose states have the layout of a file: types by ggml's names, context size in cells."""

    type_k: str
    type_v: str
    flash_attn: bool
    n_ctx: int


EngineMaker = Callable[[EngineLayout], Engine]


def layout_of(file: engine_files.EngineFile, n_ctx: int | None = None) -> EngineLayout:
    """The engine that a file needs. Its context has `n_ctx` cells, by default enough for the file's tokens."""
    state = file.state
    room = max(
        _MIN_CONTEXT_CELLS, 1 << len(file.token_ids).bit_length()
    )  # powers of two, so that one engine serves many files
    return EngineLayout(
        type_k=state.type_k, type_v=state.type_v, flash_attn=not state.v_transposed, n_ctx=n_ctx or room
    )


def convert(
    file: engine_files.EngineFile,
    name: str,
    engine: Engine,
    *,
    text: str | None = None,
    context_is_known: bool = False,
) -> CapturedState:
    """A file's sequence 0 as a state of the engine's model. Afterwards the engine holds the first tokens.

    The state keeps the file's dialect, in one stream. The input hash is that of the token ids, or that of `text`, whose tokens
    must then be exactly these. `context_is_known` says that the engine's context size is that with which the file was written:
    models with long and short RoPE factors need that. `name` is the file's name in messages.

    Raises:
        Incompatible: types, dimensions, or K and V of the first tokens are not the model's; or the text has other tokens.
        Unsupported: the memory is not a full attention cache, or its layout cannot be rewritten.
        CorruptFile: K or V contain NaN or infinite values.
        BadInput: the context size is needed, or the model does not have a token id.
        EngineFailed: the engine cannot evaluate the first tokens.
    """
    _require_fit(engine, name, context_is_known)
    token_ids = engine_files.held_token_ids(file)
    dialect = Dialect(1, file.state.rotation_words is not None, file.state.cell_extension)
    payload = kv_edit.to_dialect(engine_files.sequence_state(file), dialect)
    if bad := kv_values.not_finite(payload):
        raise CorruptFile(path=name, check=CheckName.VALUES, reason=f"{bad} holds NaN or infinity")
    _require_shape(payload, engine)
    _prove(payload, token_ids, engine)
    input_hash = hash_input(token_ids if text is None else _text_of(text, token_ids, engine))
    written_by = {"engine": f"llama.cpp, {file.format} version {file.version}"}
    if file.architecture:
        written_by["architecture"] = file.architecture
    return CapturedState(
        engine=engine, input_hash=input_hash, token_ids=token_ids, payload=payload, written_by=written_by
    )


def _require_fit(engine: Engine, name: str, context_is_known: bool) -> None:
    if engine.memory_kind is not MemoryKind.FULL:
        raise Unsupported(what=f"adopting {engine.memory_kind} memory", reason="full attention caches only are adopted")
    if "rope_factors" in engine.fingerprint.fields and not context_is_known:
        reason = "the model's rope factors depend on the context's length: say with --n-ctx what the file's context had"
        raise BadInput(what="file", value=name, reason=reason)


def _require_shape(payload: memoryview, engine: Engine) -> None:
    state, fields = kv_state.parse(payload), engine.fingerprint.fields
    if engine.layout is not None and state.cell_extension != engine.layout.cell_extension:
        reason = f"each cell has {state.cell_extension} bytes more in the file, {engine.layout.cell_extension} in this engine"
        raise Incompatible(reason=reason)
    for field in ("type_k", "type_v", "v_transposed"):
        of_file, of_model = getattr(state, field), fields.get(field)
        if of_file != of_model:
            raise Incompatible(reason=f"{field} is {of_file} in the file, {of_model} in the model")
    shape = ModelDimensions(n_layer=state.n_layer, n_kv_head=0, kv_token_bytes=state.token_bytes)
    if mismatch := formats.dimension_mismatch(shape, engine.dimensions):
        raise Incompatible(reason=mismatch)


def _prove(payload: memoryview, token_ids: TokenIds, engine: Engine) -> None:
    """Lets the engine evaluate the first tokens, and compares the result with the file's cells."""
    n = min(_N_PROOF_TOKENS, len(token_ids))
    engine.evaluate(token_ids[:n])
    apart = kv_numbers.distance(kv_edit.truncate(payload, n), engine.capture())
    if not (
        apart.typical <= _MAX_TYPICAL_DISTANCE and apart.furthest <= _MAX_FURTHEST_DISTANCE
    ):  # so that NaN fails too
        raise Incompatible(
            reason=f"the file's K and V of the first {n} tokens are not what {engine.model_name} computes: they are "
            f"{apart.typical:.2g} apart (at most {_MAX_TYPICAL_DISTANCE}), furthest {apart.part} of layer {apart.layer} with "
            f"{apart.furthest:.2g} (at most {_MAX_FURTHEST_DISTANCE}); other weights, rope settings, an adapter, or for "
            "quantised caches another rotation"
        )


def _text_of(text: str, token_ids: TokenIds, engine: Engine) -> str:
    """The text, after its tokens were compared with those of the file."""
    text_ids = engine.token_ids(text)
    first = common_prefix(text_ids, token_ids)
    if not first == len(text_ids) == len(token_ids):
        reason = (
            f"the text has {len(text_ids)} tokens, the file holds {len(token_ids)}; they differ from token {first} on"
        )
        raise Incompatible(reason=reason)
    return text
