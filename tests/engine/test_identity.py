"""What of a `Llama` reaches the fingerprint."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.llama


@pytest.fixture
def fingerprint_with(load, digests, monkeypatch):
    """The fields of a fingerprint when the Llama was made with other settings."""
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

    def fields(**attributes):
        llama = load().llama
        with monkeypatch.context() as patch:
            for name, value in attributes.items():
                patch.setattr(llama, name, value)
            return dict(LlamaCppEngine(llama, digests=digests).fingerprint.fields)

    return fields


def test_a_plain_llama_has_no_field_that_is_not_set(fingerprint_with):
    assert set(fingerprint_with()) == {"schema", "weights", "type_k", "type_v", "v_transposed"}


def test_an_adapter_counts_by_its_bytes_and_its_scale_and_not_by_its_name(fingerprint_with, tmp_path):
    one, same, other = tmp_path / "one.gguf", tmp_path / "same.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"adapter 1")
    same.write_bytes(b"adapter 1")
    other.write_bytes(b"adapter 2")
    seen = [
        fingerprint_with(lora_path=str(path), lora_scale=scale)["lora"]
        for path, scale in ((one, 1.0), (same, 1.0), (other, 1.0), (one, 0.5))
    ]
    assert seen[0] == seen[1]
    assert len({tuple(s) for s in seen}) == 3


def test_an_adapter_reloaded_under_the_same_name_counts_as_another(fingerprint_with, tmp_path):
    path = tmp_path / "adapter.gguf"
    path.write_bytes(b"before")
    before = fingerprint_with(lora_path=str(path), lora_scale=1.0)
    path.write_bytes(b"after it was trained again")
    assert fingerprint_with(lora_path=str(path), lora_scale=1.0) != before


def test_metadata_overrides_count(fingerprint_with):
    fields = fingerprint_with(kv_overrides={"llama.rope.freq_base": 5000.0, "tokenizer.ggml.add_bos_token": False})
    assert fields["kv_overrides"] == {"llama.rope.freq_base": "5000.0", "tokenizer.ggml.add_bos_token": "False"}


@pytest.mark.parametrize(("trained", "expected"), [(256, "long"), (512, "short"), (4096, "short")])
def test_models_with_long_and_short_rope_factors_are_told_apart_by_the_context_length(
    fingerprint_with, load, trained, expected
):
    metadata = {
        **load().llama.metadata,
        "general.architecture": "phi3",
        "phi3.rope.scaling.original_context_length": str(trained),
    }
    assert fingerprint_with(metadata=metadata)["rope_factors"] == expected


def test_a_yarn_model_does_not_depend_on_the_context_length(fingerprint_with, load):
    yarn = {
        "general.architecture": "qwen2",
        "qwen2.rope.scaling.original_context_length": "256",
        "qwen2.rope.scaling.type": "yarn",
    }
    assert "rope_factors" not in fingerprint_with(metadata={**load().llama.metadata, **yarn})


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), ("0", 0), ("", 0), ("yes", 0), ("  2x", 2), ("-1", -1), ("+3", 3)]
)
def test_the_rotation_switch_is_read_as_llama_cpp_reads_it(text, number):
    from llama_ckpt.engine.identity import _atoi

    assert _atoi(text) == number
