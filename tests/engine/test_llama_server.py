"""A checkpoint handed to a real llama-server and taken back from one. LLAMA_CKPT_TEST_LLAMA_SERVER names the binary."""

from __future__ import annotations

import numpy as np
import pytest
from support.llama_server import running

from llama_ckpt.exchange.adopt import AdoptOptions, AdoptOutcome, adopt
from llama_ckpt.exchange.export import ExportFormat, ExportOptions, export
from llama_ckpt.formats import engine_files
from llama_ckpt.values import Outcome

pytestmark = [pytest.mark.llama, pytest.mark.server]

TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning. "
LAYOUTS = {
    "f16": ({}, ["-fa", "off"]),
    "flash": ({"flash_attn": True}, ["-fa", "on"]),
    "q8": ({"flash_attn": True, "type_k": 8, "type_v": 8}, ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"]),
}


@pytest.fixture(params=LAYOUTS)
def pair(request, load, gguf, tmp_path, llama_server):
    """An engine and a server with the same layout."""
    options, flags = LAYOUTS[request.param]
    engine = load(**options)
    with running(llama_server, gguf, tmp_path / "slots", "-np", "1", *flags) as server:
        yield engine, server


def ids_of(engine, n=64):
    return engine.token_ids(TEXT * 6)[:n]


def spoken_version(server) -> int:
    """The ggsq version of what the server itself writes."""
    server.complete([1, 2, 3], 1)
    server.slot("save", "probe.bin")
    version = engine_files.read(memoryview((server.slots / "probe.bin").read_bytes()), "probe").version
    server.slot("erase")
    return version


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_an_exported_checkpoint_is_restored_and_its_tokens_are_reused(pair, registry, packed, record_property):
    engine, server = pair
    version, ids = spoken_version(server), ids_of(engine)
    cold = server.complete(ids)
    assert cold["timings"]["cache_n"] == 0
    server.slot("erase")
    row = registry.warm(engine, ids).save.checkpoint
    options = ExportOptions(format=ExportFormat.GGSQ, version=version, packed=packed)
    export(registry.context, row, server.slots / "handed.bin", options)
    assert server.slot("restore", "handed.bin")["n_restored"] == len(ids)
    warm = server.complete(ids)
    record_property("cache_n", warm["timings"]["cache_n"])
    assert warm["timings"]["cache_n"] == len(ids) - 1
    assert warm["content"] == cold["content"]


def test_a_server_whose_slots_have_caches_of_their_own_restores_a_file_of_as_many_streams(
    load, gguf, tmp_path, llama_server, registry
):
    engine = load()
    ids = ids_of(engine)
    row = registry.warm(engine, ids).save.checkpoint
    with running(llama_server, gguf, tmp_path / "slots", "-np", "2", "-no-kvu", "-fa", "off") as server:
        options = ExportOptions(format=ExportFormat.GGSQ, version=spoken_version(server), n_stream=2)
        export(registry.context, row, server.slots / "handed.bin", options)
        assert server.slot("restore", "handed.bin")["n_restored"] == len(ids)
        assert server.complete(ids)["timings"]["cache_n"] == len(ids) - 1


def test_a_slot_of_the_server_is_adopted_and_continues_as_the_cold_run(pair, registry, record_property):
    engine, server = pair
    ids = ids_of(engine)
    told = server.complete(ids, 1)
    server.slot("save", "taken.bin")
    made = AdoptOptions(engine_for=lambda _layout: engine)
    (found,) = adopt(registry.context, [server.slots / "taken.bin"], made)
    assert found.outcome is AdoptOutcome.ADOPTED, found.reason
    assert found.checkpoint.n_tokens == len(ids)
    cold = cold_logits(engine, ids)
    back = registry.restore(engine, ids)
    assert back.outcome is Outcome.HIT, back.reason
    warm = next_logits(engine)
    record_property("difference", float(np.abs(warm - cold).max()))
    assert int(warm.argmax()) == int(cold.argmax()) == told["completion_probabilities"][0]["id"]
    # The builds compute with other kernels: what is left is far below what separates two tokens.
    assert np.abs(warm - cold).max() < 0.05 * np.ptp(cold)


def cold_logits(engine, ids):
    engine._forget(clear_data=True)
    engine.evaluate(ids)
    return next_logits(engine)


def next_logits(engine):
    import llama_cpp

    pointer = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(engine.llama.n_vocab(),)).copy()
