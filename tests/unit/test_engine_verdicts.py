"""What engines of other versions say of a file: the groups that the reader knows, and one that it will know."""

from __future__ import annotations

import pytest
from support import samples, small

from llama_ckpt import formats
from llama_ckpt.formats import engine_files

OLDEST, V2, V3, V4 = range(4)


def verdicts(data: bytes) -> tuple[formats.EngineVerdict, ...]:
    view = memoryview(data)
    return formats.engine_verdicts(view, formats.identify(view, "the file"))


def test_each_group_of_builds_is_named_with_its_versions():
    names = [verdict.engine for verdict in verdicts(b"")]
    assert names == [
        "llama.cpp until July 2025 (ggsq 2, ggsn 9)",
        "llama-cpp-python 0.3.26 (ggsq 2, ggsn 9)",
        "llama-cpp-python 0.3.36, llama.cpp b11401 (ggsq 3, ggsn 10)",
        "llama.cpp b11434 (ggsq 4, ggsn 11)",
    ]


def test_a_version_that_is_added_to_the_reader_has_its_line(monkeypatch):
    monkeypatch.setitem(engine_files.VERSIONS, "ggsq", {**engine_files.VERSIONS["ggsq"], 5: True})
    told = verdicts(samples.data(samples.V4_TWO_STREAMS))
    assert told[-1].engine == "llama.cpp with ggsq 5, ggsn 11"
    assert (told[-2].loads, told[-1].loads) == (True, False)


@pytest.mark.parametrize("name", samples.all_names())
def test_an_engine_loads_its_own_version_and_refuses_the_others_in_its_own_words(name):
    kind, version = name[:4], int(name.split("-")[1][1:])
    for verdict in verdicts(samples.data(name))[1:]:
        own = f"{kind} {version}" in verdict.engine
        assert verdict.loads == own
        if not own:
            what = "session file" if kind == "ggsn" else "sequence state file"
            magic = {"ggsq": "67677371", "ggsn": "6767736e"}[kind]
            assert verdict.says == f"refuses: unknown (magic, version) for {what}: {magic}, {version:08x}"


def test_the_needs_of_a_load_are_told():
    assert "K f16, V f16, no flash attention, one stream" in verdicts(samples.data(samples.F16))[V3].says
    assert "K q8_0, V q8_0, flash attention" in verdicts(samples.data(samples.Q8_FLASH))[V3].says
    assert (
        "2 streams; llama-server only: its token list is packed"
        in verdicts(samples.data(samples.V4_TWO_STREAMS))[V4].says
    )


def test_an_engine_of_before_streams_shares_a_version_with_one_that_has_them():
    told = verdicts(samples.data(samples.V2))
    assert (told[OLDEST].loads, told[V2].loads) == (False, True)
    assert "the body has streams" in told[OLDEST].says


def test_padding_makes_the_magic_unknown_to_every_engine_and_not_to_us():
    told = verdicts(bytes(1) + samples.data(samples.F16))
    assert [verdict.loads for verdict in told] == [False] * 4
    assert "unknown (magic, version) for sequence state file: 67737100, 00000367" in told[V3].says
    assert told[V3].through_llama_ckpt == "restores"


@pytest.mark.parametrize("cut", [1, 100, 3000])
def test_a_short_file_aborts_the_engine_of_its_version_and_is_refused_by_us(cut):
    told = verdicts(samples.data(samples.F16)[:-cut])
    assert "aborts the process" in told[V3].says
    assert "GGML_ASSERT(nread <= state_size)" in told[V3].says
    assert not told[V3].loads
    assert {verdict.through_llama_ckpt for verdict in told} == {"not restored: it is not whole"}


def test_our_own_file_is_loaded_by_none_and_brought_to_all_but_the_oldest():
    told = verdicts(small.checkpoint(samples.F16))
    assert [verdict.loads for verdict in told] == [False] * 4
    assert "unknown (magic, version) for sequence state file: 4d414c4c, 00000002" in told[V3].says
    assert [verdict.through_llama_ckpt for verdict in told] == [
        "not restored: states of before streams are read, not written",
        "restores",
        "restores",
        "translated, then restores",
    ]


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        (samples.Q8_FLASH, V4, "if both rotate K and V alike"),
        (samples.V4_ROTATED, V3, "if both rotate K and V alike"),
        (samples.V4_TWO_STREAMS, V3, "translated, then restores"),
        (samples.HYBRID, V3, "restores"),
        (samples.HYBRID, V4, "a state of hybrid memory is not translated"),
        (samples.SWA, V4, "a state of swa memory is not translated"),
        (samples.SWA_SHORT, V4, "translated, then restores"),
        (samples.POSITIONS, V2, "each cell has 12 bytes more"),
        (samples.RECURRENT, V4, "restores"),
    ],
)
def test_what_llama_ckpt_makes_of_it_for_another_engine_is_told(name, engine, words):
    assert words in verdicts(samples.data(name))[engine].through_llama_ckpt


@pytest.mark.parametrize("data", [b"", b"qsgg", b"\0" * 7])
def test_a_file_too_short_for_a_version_is_refused_by_all(data):
    assert {verdict.says for verdict in verdicts(data)} == {"refuses: the file ends before its version"}
