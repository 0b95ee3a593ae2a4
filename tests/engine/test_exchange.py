"""Real files are proven against the real model, taken in, continue as a fresh evaluation, and go out again as they came."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from support import samples, tiny_models
from support.raw_engine import RawEngine

from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.errors import Incompatible
from llama_ckpt.exchange.adopt import AdoptOptions, AdoptOutcome, adopt
from llama_ckpt.exchange.export import ExportFormat, ExportOptions, export
from llama_ckpt.formats import container, engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import numbers as kv_numbers
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome
from llama_ckpt_cli.app import main

pytestmark = pytest.mark.llama

TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning."
OF_SMOLLM2 = [
    samples.V2,
    samples.F16,
    samples.F16_FLASH,
    samples.Q8_FLASH,
    samples.V4_TWO_STREAMS,
    samples.CONTEXT_V9,
    samples.CONTEXT_V10,
    samples.V4_ROTATED,
    samples.CONTEXT_V11,
]
TYPES = {kind.name: number for number, kind in kv_state.GGML_TYPES.items()}
TINY_IDS = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9]


def options_of(layout) -> dict:
    """How a `Llama` is made for a layout."""
    types = {"type_k": TYPES[layout.type_k], "type_v": TYPES[layout.type_v]} if layout.type_k != "f16" else {}
    return types | ({"flash_attn": True} if layout.flash_attn else {})


@pytest.fixture
def engine_for(load):
    return lambda layout: load(**options_of(layout))


@pytest.fixture
def tiny_engine(tmp_path, digests):
    """Makes engines around tiny models: `tiny_engine("full", seed=2)(layout)`."""

    def of(kind: str, seed: int = 1):
        path = tiny_models.write(tmp_path / f"{kind}-{seed}.gguf", kind, seed=seed)
        return lambda layout: LlamaCppEngine.from_path(
            path, digests=digests, **{"n_ctx": layout.n_ctx, "n_threads": 1, **options_of(layout)}
        )

    return of


def adopted(registry, path, engine_for, **options):
    (found,) = adopt(registry.context, [path], AdoptOptions(engine_for=engine_for, **options))
    assert found.outcome is AdoptOutcome.ADOPTED, found.reason
    return found.checkpoint


def contents_of(registry, row):
    data = memoryview((registry.store.root / row.file_path).read_bytes())
    return container.read_contents(data, *container.read_header(data, "x"), "x")


def next_logits(engine):
    pointer = llama_cpp.llama_get_logits_ith(engine.llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(engine.llama.n_vocab(),)).copy()


def cold(engine, ids):
    engine._forget(clear_data=True)
    engine.evaluate(ids)
    logits = next_logits(engine)
    engine._forget(clear_data=True)
    return logits


# -- the samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_SMOLLM2)
def test_a_real_file_is_adopted_and_continues_as_a_fresh_evaluation(registry, load, engine_for, name):
    row = adopted(registry, samples.SAMPLES / name, engine_for)
    file = engine_files.read(memoryview(samples.data(name)), name)
    quantised = file.state.type_k == "q8_0"
    engine = load(
        **({} if file.state.v_transposed else {"flash_attn": True}), **({"type_k": 8, "type_v": 8} if quantised else {})
    )
    contents = contents_of(registry, row)
    ids = contents.token_ids
    assert ids.tolist() == engine_files.held_token_ids(file).tolist()
    expected = cold(engine, ids)
    engine.evaluate(ids[::-1].copy())
    back = registry.restore(engine, ids)
    assert (back.outcome, back.checkpoint.id) == (Outcome.HIT, row.id), back.reason
    assert np.abs(next_logits(engine) - expected).max() <= tolerance(name)
    assert next_logits(engine).argmax() == expected.argmax()


def tolerance(name: str) -> float:
    """llama-server's build rounds a batch otherwise than this one; what llama-cpp-python wrote is reproduced bit for bit."""
    return 1.0 if name in (samples.V4_TWO_STREAMS, samples.CONTEXT_V11) else 0.0


@pytest.mark.parametrize("name", [samples.V2, samples.CONTEXT_V9])
def test_a_file_of_an_older_llama_cpp_is_restored_by_its_tokens(registry, engine, engine_for, name):
    adopted(registry, samples.SAMPLES / name, engine_for)
    ids = [504, 7742, 2004]
    expected = cold(engine, np.array(ids, dtype=np.int32))
    assert registry.restore(engine, ids).outcome is Outcome.HIT
    assert np.array_equal(next_logits(engine), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (samples.V2, {"version": 2}),
        (samples.F16, {"version": 3}),
        (samples.F16_FLASH, {"version": 3}),
        (samples.Q8_FLASH, {"version": 3}),
        (samples.V4_ROTATED, {"version": 4, "packed": True}),
    ],
)
def test_what_was_adopted_is_exported_as_it_came(registry, engine_for, tmp_path, name, options):
    row = adopted(registry, samples.SAMPLES / name, engine_for)
    export(registry.context, row, tmp_path / "out", ExportOptions(format=ExportFormat.GGSQ, **options))
    assert (tmp_path / "out").read_bytes() == samples.data(name)


@pytest.mark.parametrize("name", OF_SMOLLM2)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_what_was_adopted_is_exported_in_every_version_with_the_same_cells(
    registry, engine_for, tmp_path, name, version
):
    row = adopted(registry, samples.SAMPLES / name, engine_for)
    export(registry.context, row, tmp_path / "out", ExportOptions(format=ExportFormat.GGSQ, version=version))
    made = engine_files.read(memoryview((tmp_path / "out").read_bytes()), "out")
    real = engine_files.read(memoryview(samples.data(name)), name)
    assert made.token_ids.tolist() == engine_files.held_token_ids(real).tolist()
    states = [engine_files.sequence_state(file) for file in (made, real)]
    assert kv_numbers.distance(*states).furthest == 0
    for n in range(1, len(made.token_ids) + 1):
        cut = [kv_edit.truncate(state, n) for state in states]
        assert kv_numbers.distance(*cut).furthest == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [(samples.THREE_STREAMS, "full"), (samples.SHARED, "full"), (samples.POSITIONS, "positions")],
)
def test_sequence_0_of_a_context_and_cells_with_places_are_adopted(registry, tiny_engine, name, kind):
    engines = tiny_engine(kind)
    row = adopted(registry, samples.SAMPLES / name, engines)
    contents = contents_of(registry, row)
    assert contents.token_ids.tolist() == [3, 14, 15, 9, 26, 5]
    assert kv_state.parse(contents.payload).n_stream == 1


@pytest.mark.parametrize("name", [samples.SWA, samples.SWA_SHORT, samples.RECURRENT, samples.HYBRID])
def test_files_of_other_memory_are_refused(registry, engine_for, name):
    (found,) = adopt(registry.context, [samples.SAMPLES / name], AdoptOptions(engine_for=engine_for))
    assert found.outcome is AdoptOutcome.REFUSED
    assert "full attention caches only are adopted" in found.reason


# -- whose state it is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash"),
    [
        ("f16", "f16", False),
        ("f32", "f32", False),
        ("bf16", "f16", True),
        ("q8_0", "q8_0", True),
        ("q5_1", "q5_0", True),
        ("q4_0", "q4_1", True),
        ("iq4_nl", "iq4_nl", True),
    ],
)
def test_weights_of_the_same_shape_are_told_apart_whatever_the_type(
    registry, tiny_engine, tmp_path, type_k, type_v, flash
):
    model = tiny_models.write(tmp_path / "written.gguf", "full")
    raw = RawEngine(model, flash=flash, type_k=TYPES[type_k], type_v=TYPES[type_v])
    try:
        raw.decode(TINY_IDS)  # in one batch; the proof evaluates eight, the last by itself
        path = tmp_path / "slot.bin"
        raw.file_of_sequence(path, TINY_IDS)
    finally:
        raw.close()
    (found,) = adopt(registry.context, [path], AdoptOptions(engine_for=tiny_engine("full", seed=2)))
    assert isinstance(found.error, Incompatible)
    assert "are not what full-2 computes" in found.reason
    assert adopted(registry, path, tiny_engine("full")).n_tokens == len(TINY_IDS)


def test_weights_that_differ_in_few_bytes_only_are_told_apart(registry, engine_for, gguf, digests, tmp_path):
    """One byte of 100,000, in the second half of the file: less than another fine-tuning or rounding changes."""
    data = np.frombuffer(gguf.read_bytes(), dtype=np.uint8).copy()
    places = np.random.default_rng(0).choice(np.arange(len(data) // 2, len(data)), len(data) // 100_000, replace=False)
    data[places] ^= 0x11
    other = tmp_path / "other.gguf"
    other.write_bytes(data.tobytes())

    def of_other(layout):
        return LlamaCppEngine.from_path(other, digests=digests, n_ctx=layout.n_ctx, **options_of(layout))

    path = samples.SAMPLES / samples.V2
    (found,) = adopt(registry.context, [path], AdoptOptions(engine_for=of_other))
    assert isinstance(found.error, Incompatible)
    assert "are not what other computes" in found.reason


@pytest.mark.parametrize("options", [{}, {"flash_attn": True}], ids=["f16", "flash"])
def test_a_long_prompt_evaluated_in_large_batches_is_accepted(registry, load, engine_for, tmp_path, options):
    engine = load(**options)
    ids = engine.token_ids(TEXT * 6)[:100]
    engine._forget(clear_data=True)
    engine.llama.eval([int(token) for token in ids])
    head, body = engine_files.encode_ggsq(3, ids, engine.capture())
    (tmp_path / "slot.bin").write_bytes(head + bytes(body))
    assert adopted(registry, tmp_path / "slot.bin", engine_for).n_tokens == 100


def test_a_state_of_other_tokens_than_it_lists_is_refused(registry, engine_for, tmp_path):
    data = bytearray(samples.data(samples.F16))
    data[12:16] = (505).to_bytes(4, "little")
    (tmp_path / "slot.bin").write_bytes(data)
    (found,) = adopt(registry.context, [tmp_path / "slot.bin"], AdoptOptions(engine_for=engine_for))
    assert isinstance(found.error, Incompatible)


# -- to and fro -----------------------------------------------------------------------------------------------------------


def test_a_text_goes_out_as_a_slot_and_is_found_again_by_its_text_in_another_registry(
    registry, engine, engine_for, tmp_path
):
    row = registry.warm(engine, TEXT).save.checkpoint
    export(registry.context, row, tmp_path / "slot.bin", ExportOptions(format=ExportFormat.GGSQ, version=3))
    with Registry.open(store=tmp_path / "other") as other:
        assert adopted(other, tmp_path / "slot.bin", engine_for, text=TEXT).input_hash == row.input_hash
        assert other.restore(engine, TEXT).outcome is Outcome.HIT


def test_the_command_takes_a_folder_of_files_and_hands_one_out(gguf, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "store"))
    folder = tmp_path / "slots"
    folder.mkdir()
    for name in (samples.V2, samples.F16_FLASH, samples.CONTEXT_V11, samples.RECURRENT):
        (folder / name).write_bytes(samples.data(name))
    assert main(["adopt", str(folder), "--model", str(gguf)]) == 0
    shown = capsys.readouterr().out
    assert "4 files: 3 adopted, 1 refused" in shown
    assert main(["ls", "-q"]) == 0
    ids = capsys.readouterr().out.split()
    assert len(ids) == 3
    out = tmp_path / "cache.bin"
    assert main(["export", ids[0], "--format", "ggsn", "-o", str(out), "--model", str(gguf)]) == 0
    assert engine_files.read(memoryview(out.read_bytes()), "out").architecture == "llama"
