"""llama.cpp's own files: each real one is read to its last byte, and what is written is what llama.cpp writes."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from support import samples

from llama_ckpt import formats
from llama_ckpt.errors import BadInput, CorruptFile, Incompatible, Unsupported
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import context as kv_context
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect

IDS = np.array([504, 7742, 2004], dtype=np.int32)
HUGE = 0xFFFFFFFF


def read(data: bytes) -> engine_files.EngineFile:
    return engine_files.read(memoryview(data), "the file")


def refusal(data: bytes) -> CorruptFile:
    with pytest.raises(CorruptFile) as caught:
        read(data)
    assert caught.value.values["path"] == "the file"
    return caught.value


def whole(context: tuple[bytes, memoryview]) -> bytes:
    return context[0] + bytes(context[1])


def patched(name: str, at: int, layout: str, *values: int) -> bytes:
    made = bytearray(samples.data(name))
    struct.pack_into(layout, made, at, *values)
    return bytes(made)


# -- real files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "version", "packed", "ids", "architecture"),
    [
        (samples.V2, "ggsq", 2, False, [504, 7742, 2004], None),
        (samples.F16, "ggsq", 3, False, [504, 7742, 2004], None),
        (samples.F16_FLASH, "ggsq", 3, False, [504, 7742, 2004], None),
        (samples.Q8_FLASH, "ggsq", 3, False, [504, 7742, 2004], None),
        (samples.V4_TWO_STREAMS, "ggsq", 4, True, [2705, 827, 1296, 1876], None),
        (samples.CONTEXT_V9, "ggsn", 9, False, [504, 7742, 2004], "llama"),
        (samples.CONTEXT_V10, "ggsn", 10, False, [504, 7742, 2004], "llama"),
        (samples.V4_ROTATED, "ggsq", 4, True, [504, 7742, 2004], None),
        (samples.CONTEXT_V11, "ggsn", 11, False, [36951, 284, 2251], "llama"),
        (samples.RECURRENT, "ggsq", 3, False, [3, 14, 15, 9, 26, 5], None),
        (samples.THREE_STREAMS, "ggsn", 10, False, [3, 14, 15, 9, 26, 5], "llama"),
    ],
)
def test_a_real_file_shows_what_it_is(name, kind, version, packed, ids, architecture):
    file = read(samples.data(name))
    assert (file.format, file.version, file.known, file.padding) == (kind, version, True, 0)
    assert (file.packed, file.token_ids.tolist(), file.n_media) == (packed, ids, 0)
    assert file.architecture == architecture


@pytest.mark.parametrize("name", samples.all_names())
@pytest.mark.parametrize("padding", [1, 4, 8])
def test_a_real_file_behind_up_to_eight_zeros_is_read_as_without_them(name, padding):
    data = samples.data(name)
    plain, padded = read(data), read(bytes(padding) + data)
    assert padded.padding == padding
    assert padded.token_ids.tolist() == plain.token_ids.tolist()
    assert bytes(padded.body) == bytes(plain.body)


def test_nine_zeros_before_a_file_are_too_many():
    assert refusal(bytes(9) + samples.data(samples.F16)).values["check"] == "Header"


@pytest.mark.parametrize("name", [samples.V2, samples.F16, samples.Q8_FLASH, samples.RECURRENT, samples.HYBRID])
def test_the_state_of_a_file_is_its_body_behind_what_the_engine_puts_before_it(name):
    file = read(samples.data(name))
    state = engine_files.sequence_state(file, seq_id=5)
    assert bytes(state[:8]) == struct.pack("<Ii", 0xAF143CD8, 5)
    assert bytes(state[8:]) == bytes(file.body)
    assert state.readonly


# -- written files --------------------------------------------------------------------------------------------------------


def state_of(name: str, seq_id: int = 0) -> memoryview:
    return engine_files.sequence_state(read(samples.data(name)), seq_id)


@pytest.mark.parametrize("source", [samples.V2, samples.F16, samples.CONTEXT_V9, samples.CONTEXT_V10])
def test_a_state_from_any_file_is_written_as_llama_cpp_wrote_it_in_every_version(source):
    state = state_of(source)
    assert whole(engine_files.encode_ggsq(2, IDS, state)) == samples.data(samples.V2)
    assert whole(engine_files.encode_ggsq(3, IDS, state)) == samples.data(samples.F16)
    assert whole(engine_files.encode_ggsn(9, IDS, state, "llama", for_llama_cli=False)) == samples.data(
        samples.CONTEXT_V9
    )
    assert whole(engine_files.encode_ggsn(10, IDS, state, "llama", for_llama_cli=False)) == samples.data(
        samples.CONTEXT_V10
    )


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n_stream", [1, 2, 5])
def test_a_written_sequence_file_is_read_back(version, packed, n_stream):
    state = state_of(samples.F16_FLASH)
    data = whole(engine_files.encode_ggsq(version, IDS, state, packed=packed, n_stream=n_stream))
    file = read(data)
    assert (file.version, file.packed, file.token_ids.tolist()) == (version, packed, IDS.tolist())
    assert file.state.layout == Dialect(n_stream, version == 4)
    back = kv_edit.to_dialect(engine_files.sequence_state(file), Dialect())
    assert bytes(back) == bytes(state)


def test_a_packed_token_list_is_written_as_llama_server_writes_it():
    real = samples.data(samples.V4_TWO_STREAMS)
    file = read(real)
    head, body = engine_files.encode_ggsq(4, file.token_ids, engine_files.sequence_state(file), packed=True)
    assert head == real[: len(head)]
    assert len(body) == len(file.body)


@pytest.mark.parametrize("version", [9, 10, 11])
def test_a_written_context_file_holds_the_sequence_as_its_first(version):
    state = state_of(samples.V4_TWO_STREAMS)
    ids = read(samples.data(samples.V4_TWO_STREAMS)).token_ids
    file = read(whole(engine_files.encode_ggsn(version, ids, state, "llama", n_stream=1, for_llama_cli=False)))
    assert (file.version, file.architecture, file.state.rotation_words) == (
        version,
        "llama",
        (0, 0) if version == 11 else None,
    )
    assert kv_context.sequences(file.body) == {0: 4}
    assert bytes(kv_edit.to_dialect(engine_files.sequence_state(file), Dialect(2, True))) == bytes(
        kv_edit.to_dialect(state, Dialect(2, True))
    )


def test_a_quantised_state_gets_rotation_words_only_where_the_rotation_is_known():
    state = state_of(samples.Q8_FLASH)
    with pytest.raises(Unsupported, match="q8_0 caches may be rotated"):
        engine_files.encode_ggsq(4, IDS, state)
    file = read(whole(engine_files.encode_ggsq(4, IDS, state, rotation=(64, 64))))
    assert file.state.rotation_words == (64, 64)
    with pytest.raises((Incompatible, Unsupported)):
        engine_files.encode_ggsq(3, IDS, engine_files.sequence_state(file))
    back = engine_files.encode_ggsq(3, IDS, engine_files.sequence_state(file), rotation=(64, 64))
    assert whole(back) == samples.data(samples.Q8_FLASH)


def test_a_quantised_state_written_as_version_four_is_laid_out_as_llama_servers_own():
    """The same tokens by two builds: the head is the same, and of the rows what no kernel rounds otherwise."""
    real = samples.data(samples.V4_ROTATED)
    made = whole(engine_files.encode_ggsq(4, IDS, state_of(samples.Q8_FLASH), packed=True, rotation=(64, 64)))
    first_layer = 12 + 28 + 8 + 36 + 16 + 12 + 3 * 204
    assert made[:first_layer] == real[:first_layer]
    assert len(made) == len(real)
    assert (
        whole(engine_files.encode_ggsq(3, IDS, state_of(samples.V4_ROTATED), rotation=(64, 64)))[:24]
        == (samples.data(samples.Q8_FLASH)[:24])
    )


def test_a_prompt_cache_lists_a_token_more_than_it_has_cells():
    file = read(samples.data(samples.CONTEXT_V11))
    assert engine_files.held_token_ids(file).tolist() == [36951, 284]
    assert [positions.tolist() for positions in engine_files.positions(file)] == [[0, 1]]
    found = answer(samples.data(samples.CONTEXT_V11))
    assert (found.restorable, found.n_tokens, found.n_cells) == (True, 3, 2)
    assert "no cell yet" in found.notes[0]


def test_a_file_for_llama_cli_leaves_the_last_cell_to_it():
    state, ids = state_of(samples.F16), IDS
    file = read(whole(engine_files.encode_ggsn(11, ids, state, "llama")))
    assert file.token_ids.tolist() == ids.tolist()
    assert engine_files.held_token_ids(file).tolist() == ids[:2].tolist()
    back = kv_edit.to_dialect(engine_files.sequence_state(file), Dialect())
    assert bytes(back) == bytes(kv_edit.truncate(state, 2))
    with pytest.raises(BadInput, match="two tokens"):
        engine_files.encode_ggsn(11, ids[:1], kv_edit.truncate(state, 1), "llama")


@pytest.mark.parametrize("version", [0, 1, 5, 9])
def test_a_version_whose_layout_is_not_known_is_not_written(version):
    with pytest.raises(BadInput, match="known are 2, 3, 4"):
        engine_files.encode_ggsq(version, IDS, state_of(samples.F16))


def test_a_file_is_written_only_with_one_token_id_for_each_cell():
    with pytest.raises(BadInput, match="3 cells"):
        engine_files.encode_ggsq(3, IDS[:2], state_of(samples.F16))
    with pytest.raises(BadInput, match="architecture"):
        engine_files.encode_ggsn(10, IDS, state_of(samples.F16), "")


def test_recurrent_memory_is_not_written():
    with pytest.raises((BadInput, Unsupported)):
        engine_files.encode_ggsq(3, IDS, state_of(samples.RECURRENT))


# -- whole contexts with several sequences --------------------------------------------------------------------------------


def test_each_sequence_of_a_context_with_a_stream_for_each_can_be_taken_out():
    file = read(samples.data(samples.THREE_STREAMS))
    assert kv_context.sequences(file.body) == {0: 6, 2: 4}
    for seq_id, n_cells in ((0, 6), (2, 4)):
        state = engine_files.sequence_state(file, seq_id)
        found = kv_state.parse(state)
        assert (found.n_stream, found.first.index, found.positions.tolist()) == (3, seq_id, list(range(n_cells)))
    with pytest.raises(Unsupported, match="cells of sequence 1 in 0 streams"):
        engine_files.sequence_state(file, 1)


def test_sequences_that_share_cells_are_taken_apart():
    file = read(samples.data(samples.SHARED))
    assert kv_context.sequences(file.body) == {0: 6, 1: 6}
    one, two = (engine_files.sequence_state(file, seq_id) for seq_id in (0, 1))
    assert bytes(kv_edit.truncate(one, 4))[8:] == bytes(kv_edit.truncate(kv_edit.to_dialect(two, Dialect()), 4))[8:]
    assert bytes(kv_edit.tail(one, 4)) != bytes(kv_edit.tail(kv_edit.to_dialect(two, Dialect()), 4))


def test_the_outputs_that_llama_cpp_once_wrote_before_the_memory_are_read_over():
    data = samples.data(samples.CONTEXT_V9)
    body_at = 12 + 4 * 3 + 4 + len("llama")
    outputs = struct.pack("<Ii", 1, 2) + struct.pack("<Q", 5) + bytes(20) + struct.pack("<Q", 0)
    file = read(data[:body_at] + outputs + data[body_at:])
    assert bytes(file.body) == data[body_at:]
    for wrong in (struct.pack("<I", HUGE), outputs[:-1], struct.pack("<Ii", 1, 2) + struct.pack("<Q", 2**62)):
        assert refusal(data[:body_at] + wrong + data[body_at:]).values["check"] == "Structure"


# -- media ----------------------------------------------------------------------------------------------------------------


def with_media(*chunks: bytes) -> bytes:
    """The real llama-server file, with a media table as `server_tokens::serialize` writes it."""
    real = samples.data(samples.V4_TWO_STREAMS)
    ids_end = 12 + 4 * (3 + 4)
    table = struct.pack(f"<I{len(chunks)}I", len(chunks), *range(len(chunks)))
    for chunk in chunks:
        table += struct.pack("<I", len(chunk)) + chunk
    table += bytes(-len(table) % 4)
    ids = real[12:ids_end] + table
    return real[:8] + struct.pack("<I", len(ids) // 4) + ids + real[ids_end + 4 :]


@pytest.mark.parametrize("chunks", [[b"image"], [b"x" * 7, b"sound" * 100]])
def test_a_file_with_media_is_identified_and_not_restored(chunks):
    data = with_media(*chunks)
    file = read(data)
    assert (file.n_media, file.token_ids.tolist()) == (len(chunks), [2705, 827, 1296, 1876])
    with pytest.raises(Unsupported, match="images or audio"):
        engine_files.sequence_state(file)
    found = formats.identify(memoryview(data), "the file")
    assert (found.format, found.whole, found.restorable, found.n_media) == ("ggsq", True, False, len(chunks))
    assert "images or audio" in found.why_not


def test_an_empty_media_table_is_the_real_file():
    assert with_media() == samples.data(samples.V4_TWO_STREAMS)


# -- versions that nobody knows yet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version"),
    [(samples.F16, 1), (samples.F16, 5), (samples.V4_TWO_STREAMS, 99), (samples.CONTEXT_V10, 12)],
)
def test_an_unknown_version_is_read_when_its_body_is_of_a_known_layout_to_the_last_byte(name, version):
    data = patched(name, 4, "<I", version)
    file = read(data)
    assert (file.version, file.known) == (version, False)
    assert bytes(file.body) == bytes(read(samples.data(name)).body)
    found = formats.identify(memoryview(data), "the file")
    assert found.restorable
    assert f"version {version} is not known here" in found.notes[0]
    assert not formats.identify(memoryview(data + b"\0"), "the file").restorable


# -- files that lie -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "layout", "value", "words"),
    [
        (samples.F16, 8, "<I", 17477, "the list of 17477 tokens at byte 12 needs 69908 bytes, the file has 69904 left"),
        (samples.F16, 8, "<I", HUGE, "needs 17179869180 bytes, the file has 69904 left"),
        (samples.F16, 8, "<I", 0, "layout of this state"),
        (samples.F16, 8, "<I", 2, "layout of this state"),
        (samples.F16, 12, "<i", -1, "packed token list of version 7742"),
        (samples.V4_TWO_STREAMS, 16, "<I", 2, "packed token list of version 2, this reader knows 1"),
        (samples.V4_TWO_STREAMS, 20, "<I", 6, "the packed list's 6 tokens at byte 12 needs 24 bytes, the file has 20"),
        (samples.V4_TWO_STREAMS, 20, "<I", HUGE, "packed list's 4294967295 tokens"),
        (samples.V4_TWO_STREAMS, 20, "<I", 3, "the places of 1876 media"),
        (samples.V4_TWO_STREAMS, 40, "<I", 1, "the places of 1 media"),
        (samples.V4_TWO_STREAMS, 40, "<I", HUGE, "the places of 4294967295 media"),
        (samples.CONTEXT_V10, 24, "<I", 0, "no architecture's name"),
        (samples.CONTEXT_V10, 24, "<I", 257, "architecture's name of 257 bytes, at most 256"),
        (samples.CONTEXT_V10, 24, "<I", HUGE, "architecture's name of 4294967295 bytes"),
        (samples.CONTEXT_V10, 28, "<B", 0, "no architecture's name"),
        (samples.CONTEXT_V10, 33, "<I", 2, "layout of this state"),
    ],
)
def test_a_count_that_the_file_has_no_room_for_is_refused_with_the_count(name, at, layout, value, words):
    data = patched(name, at, layout, value)
    tracemalloc.start()
    try:
        told = str(refusal(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert words in told
    assert peak < len(data) + (1 << 20)


def many_cells(kind: bytes, version: int, n: int, ids_of_last: int) -> bytes:
    """As much of a file as can be cells: one layer of one byte a cell, no V."""
    head = kind + struct.pack("<II", version, n) + np.arange(n, dtype="<i4").tobytes()
    head += struct.pack("<I", 1) + b"x" if kind == b"nsgg" else b""
    cells = np.stack([np.arange(n), np.ones(n), np.zeros(n)], axis=1).astype("<i4")
    cells[-1, 1] = ids_of_last
    body = cells.tobytes() + bytes(4 * (ids_of_last - 1))
    return head + struct.pack("<II", 1, n) + body + struct.pack("<II", 0, 1) + struct.pack("<iQ", 24, 1) + bytes(n)


@pytest.mark.parametrize(
    ("kind", "version", "ids_of_last"), [(b"qsgg", 3, 1), (b"nsgg", 10, 1), (b"nsgg", 10, 2), (b"qsgg", 3, 2)]
)
def test_a_file_of_nothing_but_cells_costs_no_more_than_itself(kind, version, ids_of_last):
    data = many_cells(kind, version, 40_000 if ids_of_last > 1 else 200_000, ids_of_last)
    tracemalloc.start()
    try:
        found = answer(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.restorable == (kind == b"nsgg" or ids_of_last == 1), found.why_not
    assert peak < len(data) + (1 << 20)


@pytest.mark.parametrize("data", [b"", b"qsgg", b"nsgg\x0a\0\0\0", b"\0" * 100, b"GGUF" * 10, b"sqgg" * 50], ids=len)
def test_what_is_no_engine_file_is_refused(data):
    assert refusal(data).values["check"] == "Header"


# -- every byte of small real files ---------------------------------------------------------------------------------------

SMALL = [samples.HYBRID, samples.POSITIONS, samples.SWA_SHORT, samples.THREE_STREAMS]


def answer(data: bytes) -> formats.Identified:
    return formats.identify(memoryview(data), "the file")


@pytest.mark.parametrize("name", [*SMALL, samples.SHARED])
def test_a_file_cut_anywhere_is_refused_or_told_to_be_another(name):
    """The format has no checksum and no length: a cut exactly behind a section gives a file of a smaller model."""
    data = samples.data(name)
    real = answer(data)
    unseen, others = [], []
    for n in range(len(data)):
        found = answer(data[:n])
        assert found.whole == (found.why_not is None), n
        if found.whole:
            others.append(n)
            if (found.memory, found.n_layer, found.n_layer_v) == (real.memory, real.n_layer, real.n_layer_v):
                unseen.append(n)
    assert unseen == []
    assert len(others) <= 3


def data_bytes(data: bytes) -> set[int]:
    """Bytes that hold numbers of the model or of the input, and nothing of the structure: ids and rows."""
    file = read(data)
    base = len(data) - len(file.body)
    free = set(range(12, 12 + 4 * len(file.token_ids)))
    for cache in file.state.caches:
        for stream in cache.streams:
            words = (stream.cells_end - stream.cells_at) // len(stream.positions)
            for cell in range(len(stream.positions)):
                at = base + stream.cells_at + cell * words
                free |= set(range(at + 8, at + words))  # extension and sequence id; the position is not free
            for rows in (*stream.k, *stream.v):
                n_bytes = len(stream.positions) * rows.row_bytes
                free |= set(range(base + rows.offset, base + rows.offset + n_bytes))
    for rows in file.state.recurrent.rows if file.state.recurrent else ():
        free |= set(range(base + rows.offset, base + rows.offset + rows.row_bytes))
    return free


def sequence_0(data: bytes) -> bytes:
    """What a restore of the file would hand to an engine."""
    return bytes(engine_files.sequence_state(read(data)))


@pytest.mark.parametrize("xor", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize("name", SMALL)
def test_a_changed_byte_of_the_structure_is_refused_or_told(name, xor):
    """Rows and ids have no checksum in these formats: what is adopted gets one. Nothing else changes unnoticed."""
    data = bytearray(samples.data(name))
    real = answer(bytes(data))
    free, sequence = data_bytes(bytes(data)), sequence_0(bytes(data))
    unseen = []
    for at in sorted(set(range(len(data))) - free):
        data[at] ^= xor
        found = answer(bytes(data))
        if found.restorable and found == real and sequence_0(bytes(data)) != sequence:
            unseen.append(at)
        data[at] ^= xor
    assert unseen == []
    assert len(data) - len(free) > 80


# -- one entry point ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", samples.all_names())
def test_every_real_file_is_identified_as_whole_and_restorable(name):
    found = answer(samples.data(name))
    assert (found.whole, found.restorable, found.why_not) == (True, True, None)
    assert found.format == name[:4]
    assert f"-v{found.version}-" in name
    assert found.byte_order == "little"


@pytest.mark.parametrize(
    ("name", "memory", "sliceable"),
    [
        (samples.F16, "full", True),
        (samples.SWA, "swa", False),
        (samples.SWA_SHORT, "caches", True),
        (samples.RECURRENT, "recurrent", False),
        (samples.HYBRID, "hybrid", False),
        (samples.POSITIONS, "full", True),
        (samples.THREE_STREAMS, "full", True),
        (samples.SHARED, "full", True),
    ],
)
def test_whether_a_file_can_be_truncated_at_a_token_is_told(name, memory, sliceable):
    found = answer(samples.data(name))
    assert (found.memory, found.sliceable) == (memory, sliceable)
    assert any("cannot be truncated" in note for note in found.notes) != sliceable


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"", "an empty file"),
        (b"GGUF\3\0\0\0", "a GGUF model file"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"\x80\x04\x95abc", "pickle"),
        (b"ggsq\0\0\0\2", "big-endian"),
        (bytes(40), "begins with zeros"),
        (b"hello", "no checkpoint format known here"),
    ],
)
def test_what_is_no_checkpoint_is_named_where_it_is_known(start, what):
    found = answer(start)
    assert (found.format, found.restorable) == ("unknown", False)
    assert what in found.what
    assert found.why_not


def test_a_bare_state_is_identified_and_not_restored_for_it_names_no_token():
    found = answer(samples.read(samples.F16)[1])
    assert (found.format, found.whole, found.restorable, found.n_cells) == ("state", True, False, 3)
    assert "which tokens" in found.why_not


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(12, -2, "token 0 is -2"), (44, 7, "ends at positions [7]"), (44, 0, "positions are not 0 to 2")],
)
def test_tokens_and_cells_that_do_not_fit_each_other_are_told(at, value, words):
    found = answer(patched(samples.F16, at, "<i", value))
    assert (found.whole, found.restorable) == (True, False)
    assert words in found.why_not


def test_a_token_more_than_there_are_cells_is_told():
    data = samples.data(samples.F16)
    found = answer(data[:8] + struct.pack("<I", 4) + data[12:24] + struct.pack("<i", 5) + data[24:])
    assert (found.restorable, found.n_cells, found.n_tokens) == (True, 3, 4)
    assert "its last token has no cell yet" in found.notes[0]
    found = answer(data[:8] + struct.pack("<I", 5) + data[12:24] + struct.pack("<2i", 5, 6) + data[24:])
    assert found.why_not == "it has 3 cells for 5 tokens"
    found = answer(data[:8] + struct.pack("<I", 2) + data[12:20] + data[24:])
    assert found.why_not == "it has 3 cells for 2 tokens"


def test_an_empty_slot_of_before_streams_is_told_as_empty():
    data = b"qsgg" + struct.pack("<II", 2, 0) + struct.pack("<III", 0, 0, 1) + struct.pack("<iQ", 1, 2) * 2
    found = formats.identify(memoryview(data), "slot.bin")
    assert (found.format, found.restorable) == ("ggsq", False)


@pytest.mark.parametrize("version", [2])
def test_cells_with_more_bytes_than_a_version_has_are_not_written_for_it(version):
    file = read(samples.data(samples.POSITIONS))
    state = engine_files.sequence_state(file)
    with pytest.raises(Unsupported, match="12 bytes more, which ggsq version 2 has not"):
        engine_files.encode_ggsq(version, file.token_ids, state)


def test_a_recurrent_file_with_a_tail_of_zeros_takes_no_memory_for_them():
    data = samples.data(samples.RECURRENT)
    damaged = memoryview(data[: len(data) - 6] + bytes(2_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile):
            engine_files.read(damaged, "the file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
