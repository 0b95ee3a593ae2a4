"""An engine whose cells depend on all tokens up to theirs, as a model's do: a state put together wrongly is seen at once.
It counts what it evaluates.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from support.sample_engine import NOTHING

from llama_ckpt.engine import no_progress
from llama_ckpt.errors import EngineFailed, EngineStateMismatch
from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import MemoryKind, ModelDimensions

N_LAYER, ROW_BYTES, F16 = 2, 16, 1


def chain_of(token_ids) -> list[bytes]:
    """For each token 16 bytes that stand for it and all before it."""
    last, chain = b"", []
    for token in token_ids:
        last = hashlib.md5(last + struct.pack("<i", int(token))).digest()
        chain.append(last)
    return chain


def state_of(token_ids) -> bytes:
    """What the engine holds after a cold run of these tokens."""
    n, chain = len(token_ids), chain_of(token_ids)
    cells = np.stack([np.arange(n), np.ones(n), np.zeros(n)], axis=1).astype("<i4")
    made = [struct.pack("<IiII", kv_state.IO_MAGIC, 0, 1, n), cells.tobytes(), struct.pack("<II", 0, N_LAYER)]
    for layer in range(2 * N_LAYER):  # K of each, then V
        rows = [bytes((byte + layer) % 60 for byte in row) for row in chain]
        made.append(struct.pack("<iQ", F16, ROW_BYTES) + b"".join(rows))
    return b"".join(made)


class CausalEngine:
    """A text is its token ids, "1 2 3". `evaluated` has, for each token that was computed, what stands for it and all before it;
    tokens that are decoded again after a load, for their logits, are not among them. `evaluating` hears before each batch.
    """

    engine_name = "causal 1"
    memory_kind = MemoryKind.FULL
    n_ctx = 4096
    n_batch = 8

    def __init__(self, model_name: str = "causal"):
        self.model_name = model_name
        parsed = kv_state.parse(memoryview(state_of([1])))
        self.layout, self.rotation = parsed.layout, parsed.rotation_words
        self.dimensions = ModelDimensions(n_layer=N_LAYER, n_kv_head=1, kv_token_bytes=parsed.token_bytes)
        self.fingerprint = fingerprint(
            {"weights": "ca" * 32, "type_k": parsed.type_k, "type_v": parsed.type_v, "v_transposed": False}
        )
        self.held, self.state, self.n_loaded = NOTHING, b"", 0
        self.evaluated: list[bytes] = []
        self.evaluating = lambda: None
        self.n_loads = 0

    def token_ids(self, text):
        return np.array([int(word) for word in text.split()], dtype=np.int32)

    def text_of(self, token_ids):
        return " ".join(map(str, token_ids))

    def held_token_ids(self):
        return self.held

    def capture(self):
        return memoryview(self.state)

    def load(self, state, token_ids):
        self.n_loads += 1
        self.held, self.state, self.n_loaded = NOTHING, b"", 0
        if bytes(state) != state_of(token_ids):
            raise EngineFailed(reason="the state is not that of these tokens")
        self.held, self.state, self.n_loaded = np.array(token_ids), bytes(state), len(token_ids)

    def evaluate(self, token_ids, progress=no_progress, *, n_kept=0):
        token_ids = np.asarray(token_ids, dtype=np.int32)
        n = len(token_ids)
        if n_kept > min(len(self.held), n - 1) or (self.held[:n_kept] != token_ids[:n_kept]).any():
            raise EngineStateMismatch(reason=f"it does not hold the first {n_kept}")
        kept = bytes(kv_edit.truncate(memoryview(self.state), n_kept)) if n_kept else b""
        if kept and kept != state_of(token_ids[:n_kept]):
            raise EngineFailed(reason="what it keeps is not the state of these tokens")
        chain = chain_of(token_ids)
        for start in range(n_kept, n, self.n_batch):
            self.evaluating()
            self.evaluated += chain[max(start, self.n_loaded) : start + self.n_batch]
            progress(min(start + self.n_batch, n), n)
        self.held, self.state, self.n_loaded = token_ids, state_of(token_ids), 0

    def next_token(self):
        return int(self.held[-1]) + 1, 1.0

    def embedding(self):
        return None

    def forget(self):
        self.held, self.state, self.n_loaded = NOTHING, b"", 0
