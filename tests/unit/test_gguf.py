"""The architecture of a GGUF is read from its head, whatever stands before it, and nothing else is believed."""

from __future__ import annotations

import struct

import pytest
from support import tiny_models

from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import gguf


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
BEFORE = [
    text(b"a.byte") + struct.pack("<IB", 0, 7),
    text(b"a.double") + struct.pack("<Id", 12, 7.5),
    text(b"a.text") + struct.pack("<I", 8) + text(b"general.architecture"),
    text(b"numbers") + struct.pack("<IIQ3I", 9, 4, 3, 1, 2, 3),
    text(b"words") + struct.pack("<IIQ", 9, 8, 2) + text(b"x") + text(b"yy"),
    text(b"nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 8, 1) + text(b"z"),
]


def test_it_is_read_from_real_files(tmp_path):
    for kind, name in (("full", "llama"), ("hybrid", "lfm2"), ("positions", "qwen2vl")):
        data = tiny_models.write(tmp_path / kind, kind).read_bytes()
        assert gguf.architecture(memoryview(data), "m") == name


def test_it_is_found_behind_values_of_every_kind():
    assert gguf.architecture(memoryview(head(*BEFORE, ARCHITECTURE)), "m") == "llama"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it begins with"),
        (b"GGML" + bytes(40), "it begins with 47 47 4d 4c"),
        (head(ARCHITECTURE, version=1), "version 1"),
        (head(*BEFORE), "names no architecture"),
        (head(text(b"x") + struct.pack("<I", 77), ARCHITECTURE), "type 77"),
        (head(struct.pack("<Q", 1 << 60)), "does not fit"),
        (head(text(b"x") + struct.pack("<IIQ", 9, 4, 1 << 60), ARCHITECTURE), "GGUF FAILED"),
        (head(text(b"x") + struct.pack("<IIQ", 9, 8, 1 << 60), ARCHITECTURE), "GGUF FAILED"),
        (head(text(b"general.architecture") + struct.pack("<I", 8) + text(b"\xff")), "GGUF FAILED"),
        (head(text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9999), "recursion"),
    ],
)
def test_a_file_that_lies_is_refused(data, words):
    with pytest.raises(CorruptFile, match=words):
        gguf.architecture(memoryview(data), "m")


def test_a_file_cut_anywhere_is_refused():
    data = head(*BEFORE, ARCHITECTURE)
    for n in range(len(data)):
        with pytest.raises(CorruptFile):
            gguf.architecture(memoryview(data[:n]), "m")
