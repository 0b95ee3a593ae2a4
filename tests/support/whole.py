"""The bytes of a whole checkpoint file, for files that are found without a row."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.registry import Registry


@functools.cache
def checkpoint_bytes(text: str = "found without a row", n_tokens: int | None = None) -> bytes:
    """A file that a save wrote: of as many tokens as the sample, or `n_tokens`."""
    engine = SampleEngine() if n_tokens is None else SampleEngine(samples.F16_FLASH, n_tokens=n_tokens)
    engine.evaluate(engine.ids)
    with tempfile.TemporaryDirectory() as folder, Registry.open(store=Path(folder) / "store") as registry:
        saved = registry.save(engine, text).checkpoint
        return (registry.store.root / saved.file_path).read_bytes()
