"""Models of a few kilobytes with random weights, one for each kind of memory that llama.cpp has: real engines write real states
from them, in milliseconds. The names of keys and tensors are llama.cpp's (src/llama-arch.cpp, b11401).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

N_VOCAB, N_EMBD, N_FF, N_LAYER = 32, 64, 64, 2
_U32, _F32, _STRING, _ARRAY, _I32, _BOOL = 4, 6, 8, 9, 5, 7


def write(path: Path, kind: str, *, seed: int = 1, **keys: object) -> Path:
    """Writes a GGUF of `kind`: "full", "swa", "recurrent", "hybrid" or "positions" (2-D positions); `keys` change metadata.
    Another `seed` gives other weights of the same shape.
    """
    arch, meta, tensors = {
        "full": _llama,
        "swa": _gemma2,
        "recurrent": _mamba,
        "hybrid": _lfm2,
        "positions": _qwen2vl,
    }[kind]()
    meta = {
        "context_length": 512,
        "embedding_length": N_EMBD,
        "block_count": N_LAYER,
        "feed_forward_length": N_FF,
        "vocab_size": N_VOCAB,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **meta,
        **keys,
    }
    named = {"general.architecture": arch, "tokenizer.ggml.model": "none"}
    named |= {f"{arch}.{key}": value for key, value in meta.items()}
    rng = np.random.default_rng(seed)
    tensors = {"token_embd.weight": (N_EMBD, N_VOCAB), **tensors}
    if arch != "lfm2":  # which calls it token_embd_norm
        tensors["output_norm.weight"] = (N_EMBD,)
    arrays = {
        name: (rng.standard_normal(shape[::-1]) * (0.2 if len(shape) > 1 else 0.05) + (len(shape) == 1)).astype("<f4")
        for name, shape in tensors.items()
    }
    path.write_bytes(_gguf(named, arrays))
    return path


def _blocks(shapes: dict[str, tuple[int, ...]], layers=range(N_LAYER)) -> dict[str, tuple[int, ...]]:
    return {f"blk.{i}.{name}": shape for i in layers for name, shape in shapes.items()}


_FFN = {
    "ffn_norm.weight": (N_EMBD,),
    "ffn_gate.weight": (N_EMBD, N_FF),
    "ffn_up.weight": (N_EMBD, N_FF),
    "ffn_down.weight": (N_FF, N_EMBD),
}
_NORM = {"attn_norm.weight": (N_EMBD,)}
_ATTENTION = {
    "attn_q.weight": (N_EMBD, N_EMBD),
    "attn_k.weight": (N_EMBD, N_EMBD // 2),
    "attn_v.weight": (N_EMBD, N_EMBD // 2),
    "attn_output.weight": (N_EMBD, N_EMBD),
}
_HEADS = {"attention.head_count": 2, "attention.head_count_kv": 1}


def _llama():
    return "llama", {**_HEADS, "rope.dimension_count": 32}, _blocks({**_NORM, **_ATTENTION, **_FFN})


def _gemma2():
    norms = {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)}
    meta = {
        **_HEADS,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 16,
    }
    return "gemma2", meta, _blocks({**_NORM, **_ATTENTION, **_FFN, **norms})


def _mamba():
    inner, state, rank, kernel = 2 * N_EMBD, 4, 4, 4
    meta = {
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "attention.head_count": 0,
        "feed_forward_length": 0,
    }
    shapes = {
        **_NORM,
        "ssm_in.weight": (N_EMBD, 2 * inner),
        "ssm_conv1d.weight": (kernel, inner),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (inner, rank + 2 * state),
        "ssm_dt.weight": (rank, inner),
        "ssm_dt.bias": (inner,),
        "ssm_a": (state, inner),
        "ssm_d": (inner,),
        "ssm_out.weight": (inner, N_EMBD),
    }
    return "mamba", meta, _blocks(shapes)


def _lfm2():
    meta = {"attention.head_count": 2, "attention.head_count_kv": [1, 0], "shortconv.l_cache": 3}
    conv = {
        "shortconv.conv.weight": (3, N_EMBD),
        "shortconv.in_proj.weight": (N_EMBD, 3 * N_EMBD),
        "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
    }
    norms = {"attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,)}
    tensors = {
        **_blocks({**_NORM, **_FFN}),
        **_blocks({**_ATTENTION, **norms}, [0]),
        **_blocks(conv, [1]),
        "token_embd_norm.weight": (N_EMBD,),
    }
    return "lfm2", meta, tensors


def _qwen2vl():
    meta = {**_HEADS, "rope.dimension_sections": [4, 6, 6, 0], "rope.dimension_count": 32}
    biases = {"attn_q.bias": (N_EMBD,), "attn_k.bias": (N_EMBD // 2,), "attn_v.bias": (N_EMBD // 2,)}
    return "qwen2vl", meta, _blocks({**_NORM, **_ATTENTION, **_FFN, **biases})


# -- GGUF, version 3 (docs of ggml: gguf.md) ------------------------------------------------------------------------------


def _gguf(meta: dict[str, object], arrays: dict[str, np.ndarray]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(meta))
    for key, value in meta.items():
        head += _text(key) + _value(value)
    offset, data = 0, b""
    for name, array in arrays.items():
        shape = array.shape[::-1]
        head += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", 0, offset)
        raw = array.tobytes()
        data += raw + bytes(-len(raw) % 32)
        offset = len(data)
    return head + bytes(-len(head) % 32) + data


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    return struct.pack("<IIQ", _ARRAY, _I32, len(value)) + struct.pack(f"<{len(value)}i", *value)
