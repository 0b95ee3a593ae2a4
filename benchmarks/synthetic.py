"""Engines without a model, from tests/support: recorded rows, repeated, for measurements that do not depend on the model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import samples
from support.sample_engine import SampleEngine, TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt.engine import Progress, no_progress
from llama_ckpt.fingerprint import TokenIds

__all__ = ["SampleEngine", "SyntheticEngine", "TokenEngine", "checkpoint_bytes", "ids_number"]


def ids_number(number: int, n_tokens: int = 3) -> TokenIds:
    """Token ids that no other number has; for the registry their state is that of the sample."""
    return np.array([number >> 15, number & 0x7FFF, *range(n_tokens - 2)], dtype=np.int32)


class SyntheticEngine(SampleEngine):
    """An engine with a state of about `n_bytes` bytes. It loads a state by a copy, as llama.cpp does on a processor."""

    def __init__(self, n_bytes: int) -> None:
        ids, state = samples.read(samples.F16_FLASH)
        n_tokens = max(len(ids), n_bytes // (len(state) // len(ids)))
        super().__init__(samples.F16_FLASH, n_tokens=n_tokens, n_ctx=n_tokens + 1)
        self.state = np.frombuffer(self.state, dtype=np.uint8)
        self.cells = self.state.copy()

    def take(self, state: np.ndarray) -> None:
        """Copy the state."""
        np.copyto(self.cells, state)

    def capture(self) -> memoryview:
        return self.cells.copy().data.toreadonly()

    def load(self, state: memoryview, token_ids: TokenIds) -> None:
        self.take(np.frombuffer(state, dtype=np.uint8))
        self.held = token_ids

    def evaluate(self, token_ids: TokenIds, progress: Progress = no_progress, **_: int) -> None:
        self.held = token_ids
