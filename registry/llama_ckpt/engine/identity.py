"""The identity of a `Llama`: its fingerprint, kind of memory and rotation. Everything that changes K and V is part of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from llama_ckpt.engine import Progress, no_progress
from llama_ckpt.engine._llama import llama_cpp
from llama_ckpt.engine.digests import FileDigests, weights_digest_of
from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.edit import Rotation
from llama_ckpt.formats.kv.types import is_quantised
from llama_ckpt.values import FieldValue, Fingerprint, MemoryKind

# The values that `Llama` passes if the caller overrides nothing. Any other value changes K, and so is part of the identity.
_NO_OVERRIDE: dict[str, FieldValue] = {
    "rope_scaling_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_orig_ctx": 0,
    "attention_type": -1,
}


def fingerprint_of(
    llama: llama_cpp.Llama,
    probe: kv_state.KvState | None,
    *,
    memory_kind: MemoryKind,
    digests: FileDigests,
    progress: Progress = no_progress,
) -> Fingerprint:
    """The fingerprint of a `Llama`: the content of its weights, K/V types and layout of its own state (`probe`), and all other
    parameters that change K and V.

    Raises:
        BadInput: the model or the adapter cannot be read.
    """
    params = llama.context_params
    fields: dict[str, FieldValue] = {
        "weights": weights_digest_of(Path(llama.model_path), digests, progress).hex(),
        "type_k": probe.type_k if probe else kv_state.type_name(params.type_k),
        "type_v": probe.type_v if probe else kv_state.type_name(params.type_v),
        "v_transposed": probe.v_transposed if probe else params.flash_attn_type == 0,
    }
    for name, neutral in _NO_OVERRIDE.items():
        if (value := getattr(params, name)) != neutral:
            fields[name] = value
    if llama.kv_overrides:
        fields["kv_overrides"] = {str(k): repr(v) for k, v in llama.kv_overrides.items()}
    if llama.lora_path:
        adapter = digests.sha256(Path(llama.lora_path), progress)
        fields["lora"] = [f"{adapter.hex()}*{float(llama.lora_scale)!r}"]
    if _rotates(fields):
        fields["kv_rotation"] = "hadamard"
    if memory_kind is MemoryKind.SWA:
        fields["swa_full"] = bool(params.swa_full)
    if factors := _context_dependent_rope(llama):
        fields["rope_factors"] = factors
    return fingerprint(fields)


def memory_kind_of(llama: llama_cpp.Llama) -> MemoryKind:
    """The kind of memory that a model keeps, as llama.cpp reports it."""
    if llama_cpp.llama_model_is_recurrent(llama.model):
        return MemoryKind.RECURRENT
    if llama_cpp.llama_model_is_hybrid(llama.model):
        return MemoryKind.HYBRID
    return MemoryKind.SWA if llama_cpp.llama_model_n_swa(llama.model) > 0 else MemoryKind.FULL


def rotation_of(llama: llama_cpp.Llama, probe: kv_state.KvState, *, rotates: bool) -> Rotation | None:
    """The sizes of the rotations of K and V, 0 for none: from the engine's own state if it contains them, else derived. None
    if they cannot be derived for certain.

    llama.cpp rotates quantised rows by a Hadamard matrix of 64 values, or of a larger power of two that divides the head
    (llama_kv_cache's constructor, src/llama-kv-cache.cpp, b11434). Builds whose states do not contain the size may differ in it.
    """
    if probe.rotation_words is not None:
        return probe.rotation_words
    arch = llama.metadata.get("general.architecture", "")
    head = llama_cpp.llama_model_n_embd(llama.model) // max(llama_cpp.llama_model_n_head(llama.model), 1)
    sizes = []
    for part, rows in (("key", probe.k), ("value", probe.v)):
        n_values = int(llama.metadata.get(f"{arch}.attention.{part}_length", head))
        rotated = rotates and bool(rows) and is_quantised(rows[0].ggml_type) and n_values % 64 == 0
        if rotated and n_values % 128 == 0:
            return None
        sizes.append(64 if rotated else 0)
    return sizes[0], sizes[1]


def _rotates(fields: dict[str, FieldValue]) -> bool:
    """Whether K or V are stored rotated: in quantised caches, by builds that can rotate, unless it is switched off.

    llama.cpp reads LLAMA_ATTN_ROT_DISABLE when it makes a context (llama-kv-cache.cpp). No call says whether a build can rotate,
    but only a build that can contains the name of the switch.
    """
    quantised = any(str(fields[k]) not in ("f32", "f16", "bf16", "none") for k in ("type_k", "type_v"))
    switch = "LLAMA_ATTN_ROT_DISABLE"
    return quantised and _atoi(os.environ.get(switch, "0")) == 0 and _library_contains(switch.encode())


def _atoi(text: str) -> int:
    digits = text.strip()
    sign = digits[:1] if digits[:1] in "+-" else ""
    number = digits[len(sign) :]
    leading = number[: len(number) - len(number.lstrip("0123456789"))]
    return int(sign + leading) if leading else 0


def _library_contains(needle: bytes) -> bool:
    path = getattr(getattr(llama_cpp.llama_cpp, "_lib", None), "_name", None)
    if path is None:
        return True  # unknown build: better a needless miss than a wrong hit
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(needle) >= 0


def _context_dependent_rope(llama: llama_cpp.Llama) -> str | None:
    """Which RoPE factors a model with long and short ones uses; None for other models. The length of the context decides
    (llama_model::get_rope_factors).
    """
    arch = llama.metadata.get("general.architecture", "")
    trained = llama.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if trained is None or llama.metadata.get(f"{arch}.rope.scaling.type") in ("yarn", "linear", "none"):
        return None
    return "long" if llama.n_ctx() > int(trained) else "short"
