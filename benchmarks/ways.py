"""What people use today, and the floor: the least that a machine must do. All of them work on the engine that llama-ckpt uses."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
from pathlib import Path

import llama_cpp
import numpy as np
from isal import isal_zlib
from llama_cpp.llama_cache import LlamaDiskCache

from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt_cli.demo_model import prompt_of, smollm2


def engine_for(n_tokens: int) -> LlamaCppEngine:
    """SmolLM2-135M with a context of `n_tokens`. It was trained for 8,192; beyond that only the speed is right."""
    return LlamaCppEngine.from_path(smollm2(), n_ctx=n_tokens + 256)


def ids_of(engine: LlamaCppEngine, n_tokens: int) -> TokenIds:
    """Exactly `n_tokens` token ids of a made-up document."""
    return engine.token_ids(prompt_of(engine, n_tokens))[:n_tokens]


def decode_last(engine: LlamaCppEngine, ids: TokenIds) -> None:
    """Evaluate the last token again: a state has no logits, so the next token cannot be sampled before that."""
    llama, n_before = engine.llama, len(ids) - 1
    llama.input_ids[:n_before] = ids[:n_before]
    llama.n_tokens = n_before
    llama.eval(ids[n_before:].tolist())


def set_state(engine: LlamaCppEngine, data: np.ndarray) -> None:
    """Pass a state to the engine as it is."""
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_set_data(engine.llama.ctx, pointer, data.nbytes, 0) == data.nbytes


# -- the floor ------------------------------------------------------------------------------------------------------------


def floor_save(engine: LlamaCppEngine, path: Path) -> None:
    """get_data, write, fsync: no checksum, no rename, nothing that finds it again."""
    size = llama_cpp.llama_state_seq_get_size(engine.llama.ctx, 0)
    state = np.empty(size, dtype=np.uint8)
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(engine.llama.ctx, pointer, size, 0) == size
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert os.write(fd, state.data) == size
    os.fsync(fd)
    os.close(fd)


def floor_restore(engine: LlamaCppEngine, ids: TokenIds, path: Path) -> None:
    """Map, CRC, set_data, decode: this proves only that the file is as it was written."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, dtype=np.uint8)
        isal_zlib.crc32(data)
        set_state(engine, data)
        del data
    decode_last(engine, ids)


def read_restore(engine: LlamaCppEngine, ids: TokenIds, path: Path) -> None:
    """One bare read of the file, set_data, decode: the least time for a state that comes from a disk."""
    data = np.empty(path.stat().st_size, dtype=np.uint8)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(data.data) == data.nbytes
    set_state(engine, data)
    decode_last(engine, ids)


# -- llama.cpp's own files --------------------------------------------------------------------------------------------------


def native_save(engine: LlamaCppEngine, ids: TokenIds, path: Path, *, durable: bool = False) -> None:
    """llama_state_seq_save_file; not durable by itself."""
    c_ids = (llama_cpp.llama_token * len(ids))(*ids.tolist())
    assert llama_cpp.llama_state_seq_save_file(engine.llama.ctx, str(path).encode(), 0, c_ids, len(ids)) > 0
    if durable:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def native_restore(engine: LlamaCppEngine, ids: TokenIds, path: Path) -> None:
    """llama_state_seq_load_file, decode; nothing is verified."""
    room, count = (llama_cpp.llama_token * (len(ids) + 8))(), ctypes.c_size_t()
    name = str(path).encode()
    assert llama_cpp.llama_state_seq_load_file(engine.llama.ctx, name, 0, room, len(ids) + 8, ctypes.byref(count)) > 0
    decode_last(engine, ids)


# -- llama-cpp-python's cache on disk ---------------------------------------------------------------------------------------


class DiskCache:
    """LlamaDiskCache as `Llama` uses it: `save_state` into it after an evaluation, `load_state` from it before one. It is not
    durable, and a read removes the entry.
    """

    def __init__(self, folder: Path) -> None:
        self.cache = LlamaDiskCache(str(folder), capacity_bytes=1 << 40)

    def save(self, engine: LlamaCppEngine, ids: TokenIds) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # it prints at every entry
            self.cache[ids.tolist()] = engine.llama.save_state()

    def restore(self, engine: LlamaCppEngine, ids: TokenIds) -> None:
        engine.llama.load_state(self.cache[ids.tolist()])
        decode_last(engine, ids)

    def bytes_on_disk(self) -> int:
        return int(self.cache.cache_size)

    def close(self) -> None:
        self.cache.cache.close()
