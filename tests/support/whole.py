"""The bytes of a whole checkpoint file, for files that are found without a row."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from support.sample_engine import SampleEngine

from llama_ckpt.registry import Registry


@functools.cache
def checkpoint_bytes(text: str = "found without a row") -> bytes:
    """A file that a save wrote."""
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with tempfile.TemporaryDirectory() as folder, Registry.open(store=Path(folder) / "store") as registry:
        saved = registry.save(engine, text).checkpoint
        return (registry.store.root / saved.file_path).read_bytes()
