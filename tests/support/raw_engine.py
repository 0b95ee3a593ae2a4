"""llama.cpp's C functions around one context of any kind: several sequences, states, whole contexts, logits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp._logger import set_verbose


class RawEngine:
    """A context of a model, driven without `Llama`, so that any kind of memory and any number of streams can be had."""

    def __init__(self, path: Path, *, n_seq: int = 1, unified: bool = False, flash: bool = False, **params):
        set_verbose(False)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path.name}"
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = 256 * n_seq, n_seq, unified
        settings.n_batch = settings.n_ubatch = 256
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = 1 if flash else 0
        for name, value in params.items():
            setattr(settings, name, value)
        self.ctx = llama_cpp.llama_init_from_model(self.model, settings)
        assert self.ctx
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self) -> None:
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def decode(self, ids, seq_id: int = 0, start: int = 0) -> np.ndarray:
        """Evaluates tokens of a sequence from a position on; gives the logits after the last."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i] = int(token), start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
                batch.logits[i] = i == len(ids) - 1
            assert llama_cpp.llama_decode(self.ctx, batch) == 0
        finally:
            llama_cpp.llama_batch_free(batch)
        pointer = llama_cpp.llama_get_logits_ith(self.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy()

    def state(self, seq_id: int = 0) -> bytes:
        size = llama_cpp.llama_state_seq_get_size(self.ctx, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(self.ctx, buffer, size, seq_id) == size
        return bytes(buffer)

    def load(self, state, seq_id: int = 0) -> bool:
        raw = bytes(state)
        buffer = (ctypes.c_uint8 * len(raw)).from_buffer_copy(raw)
        return llama_cpp.llama_state_seq_set_data(self.ctx, buffer, len(raw), seq_id) == len(raw)

    def file_of_sequence(self, path: Path, ids, seq_id: int = 0) -> bytes:
        tokens = (llama_cpp.llama_token * len(ids))(*map(int, ids))
        assert llama_cpp.llama_state_seq_save_file(self.ctx, str(path).encode(), seq_id, tokens, len(ids))
        return path.read_bytes()

    def file_of_context(self, path: Path, ids) -> bytes:
        tokens = (llama_cpp.llama_token * len(ids))(*map(int, ids))
        assert llama_cpp.llama_state_save_file(self.ctx, str(path).encode(), tokens, len(ids))
        return path.read_bytes()

    def load_file_of_sequence(self, path: Path, capacity: int = 256, seq_id: int = 0) -> list[int]:
        """The tokens that llama.cpp's own loader gives; only ever called with a file that is whole: a short one aborts."""
        tokens, count = (llama_cpp.llama_token * capacity)(), ctypes.c_size_t()
        got = llama_cpp.llama_state_seq_load_file(
            self.ctx, str(path).encode(), seq_id, tokens, capacity, ctypes.byref(count)
        )
        return list(tokens[: count.value]) if got else []

    def load_file_of_context(self, path: Path, capacity: int = 256) -> list[int]:
        tokens, count = (llama_cpp.llama_token * capacity)(), ctypes.c_size_t()
        got = llama_cpp.llama_state_load_file(self.ctx, str(path).encode(), tokens, capacity, ctypes.byref(count))
        return list(tokens[: count.value]) if got else []
