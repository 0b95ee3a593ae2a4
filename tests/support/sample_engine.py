"""An engine that holds real recorded states, for tests of everything around an engine. Tests of the engine use the real one.

Every text has as many tokens as the sample, or `n_tokens`, and the first one is its own.
"""

from __future__ import annotations

import zlib

import numpy as np
from support import samples

from llama_ckpt.engine import no_progress
from llama_ckpt.errors import BadInput, EngineFailed, EngineStateMismatch
from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import MemoryKind, ModelDimensions

NOTHING = np.empty(0, dtype=np.int32)


class SampleEngine:
    engine_name = "recorded llama-cpp-python 0.3.36"
    memory_kind = MemoryKind.FULL

    def __init__(
        self,
        sample: str = samples.F16,
        *,
        weights: str = "ab" * 32,
        model_name: str = "sample",
        n_ctx: int = 512,
        n_tokens: int | None = None,
    ):
        self.ids, self.state = samples.read(sample) if n_tokens is None else samples.longer(sample, n_tokens)
        self.model_name = model_name
        self.n_ctx = n_ctx
        parsed = kv_state.parse(memoryview(self.state))
        self.layout, self.rotation = parsed.layout, parsed.rotation_words
        self.dimensions = ModelDimensions(n_layer=parsed.n_layer, n_kv_head=3, kv_token_bytes=parsed.token_bytes)
        fields = {
            "weights": weights,
            "type_k": parsed.type_k,
            "type_v": parsed.type_v,
            "v_transposed": parsed.v_transposed,
        }
        self.fingerprint = fingerprint(fields)
        self.held = NOTHING
        self.n_loads = self.n_evaluations = 0
        self.refuses = False

    def token_ids(self, text):
        if not text:
            raise BadInput(what="input text", value=text, reason="no token")
        ids = self.ids.copy()
        ids[0] = zlib.crc32(text.encode(errors="replace")) >> 1  # so that no text begins like another
        if np.array_equal(self.held[1:], ids[1:]):
            self.held = ids  # a state of so many tokens is every text's
        return ids

    def text_of(self, token_ids):
        return " ".join(map(str, token_ids))

    def held_token_ids(self):
        return self.held

    def capture(self):
        n, whole = len(self.held), memoryview(bytearray(self.state)).toreadonly()
        return kv_edit.truncate(whole, n) if 0 < n < len(self.ids) else whole

    def load(self, state, token_ids):
        self.n_loads += 1
        n, whole = len(token_ids), memoryview(self.state)
        expected = kv_edit.truncate(whole, n) if n < len(self.ids) else whole
        if self.refuses or state != expected:
            self.held = NOTHING
            raise EngineFailed(reason="it took 0 bytes of state")
        self.held = token_ids

    def evaluate(self, token_ids, progress=no_progress, *, n_kept=0):
        if n_kept > min(len(self.held), len(token_ids) - 1) or (self.held[:n_kept] != token_ids[:n_kept]).any():
            raise EngineStateMismatch(reason=f"it does not hold the first {n_kept}")
        self.n_evaluations += n_kept == 0  # from nothing
        self.held = token_ids
        progress(len(token_ids), len(token_ids))

    def next_token(self):
        """Depends on every token that is held, and on nothing else."""
        seen = zlib.crc32(self.held.tobytes())
        return seen % 1000, (seen % 89 + 1) / 90

    def embedding(self):
        return None


class TokenEngine(SampleEngine):
    """Holds a whole state of any token ids; a text is its ids, "1 2 3", and other words have ids, too. `evaluated` has the ids
    that were computed.
    """

    def __init__(self, **options):
        super().__init__(samples.F16_FLASH, n_tokens=1, **options)
        self.evaluated = []

    def token_ids(self, text):
        numbers = [int(word) if word.isdecimal() else zlib.crc32(word.encode()) % 1000 for word in text.split()]
        return np.array(numbers, dtype=np.int32)

    def load(self, state, token_ids):
        self.ids = token_ids
        _, self.state = samples.longer(samples.F16_FLASH, len(token_ids))
        super().load(state, token_ids)

    def evaluate(self, token_ids, progress=no_progress, *, n_kept=0):
        token_ids = np.asarray(token_ids, dtype=np.int32)
        if len(token_ids) > self.n_ctx:
            raise BadInput(what="input", value=f"{len(token_ids)} tokens", reason=f"the context has {self.n_ctx}")
        self.ids = token_ids
        super().evaluate(token_ids, progress, n_kept=n_kept)
        self.evaluated += token_ids[n_kept:].tolist()
        _, self.state = samples.longer(samples.F16_FLASH, len(token_ids))
