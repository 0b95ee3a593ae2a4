"""Every byte and every end of a small real file, through verify and repair: never sealed in silence, never another error."""

from __future__ import annotations

import pytest
from support import samples, small

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import engine_files
from llama_ckpt.integrity.verify import all_ok, file_checks

WHOLE = small.checkpoint()
HEAD = 4096
ENGINE_FILES = [samples.SWA_SHORT, samples.HYBRID, samples.SHARED]
# Fields of the header that no other part of the file tells: kept as they stand, and said to be so.
UNPROVEN = {*range(0x1A, 0x1C), *range(0x40, 0x60), *range(0x60, 0x68)}


def mended(data: bytes, **trust) -> bytes | None:
    """The repaired bytes, None where the repair is refused; any other error is the test's failure."""
    try:
        plan = formats.plan_file_repair(memoryview(data), "the file", **trust)
    except CorruptFile:
        return None
    made = b"".join(plan.parts)
    opened = formats.identify(memoryview(made), "the file")
    assert (opened.whole, opened.padding) == (True, 0)
    return made


def places() -> list[int]:
    """Every byte of header, metadata, ids and payload, and one in thirty of the filling."""
    ids_end = 128 + small.field(WHOLE, "metadata_size") + 24
    return [*range(ids_end), *range(ids_end, HEAD, 30), *range(HEAD, len(WHOLE))]


def test_a_changed_byte_anywhere_is_put_right_or_refused_and_no_changed_payload_is_sealed():
    ids_at, wrong = 128 + small.field(WHOLE, "metadata_size"), []
    for at in places():
        made = mended(small.flipped(WHOLE, at, 0xA5))
        if at in UNPROVEN:
            right = made is not None and made[HEAD:] == WHOLE[HEAD:] and made[128:HEAD] == WHOLE[128:HEAD]
        elif at < 4 or 128 <= at < ids_at + 24 or at >= HEAD:  # magic, metadata and ids, payload: nothing proves them
            right = made is None
        else:
            right = made == WHOLE
        if not right:
            wrong.append(at)
    assert wrong == []


@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_the_header_is_put_right_or_named(bit):
    data_of = {at: mended(small.flipped(WHOLE, at, 1 << bit)) for at in range(4, 128)}
    assert [at for at, made in data_of.items() if at not in UNPROVEN and made != WHOLE] == []
    assert [at for at, made in data_of.items() if made is None or made[HEAD:] != WHOLE[HEAD:]] == []


def test_a_payload_that_the_user_vouches_for_is_kept_byte_for_byte_or_refused():
    for at in range(HEAD, len(WHOLE), 3):
        data = small.flipped(WHOLE, at, 0x81)
        made = mended(data, trust_payload=True, trust_tokens=True)
        assert made is None or made[HEAD:] == data[HEAD:], at


def test_a_file_cut_anywhere_is_refused_by_verify_and_repair(tmp_path):
    path, kept = tmp_path / "cut.llam", []
    for n in [*range(300), *range(300, HEAD, 50), *range(HEAD, len(WHOLE))]:
        if mended(WHOLE[:n], trust_payload=True, trust_tokens=True) is not None:
            kept.append(n)
        if n % 5 == 0:
            path.write_bytes(WHOLE[:n])
            if all_ok(file_checks(path, None, deep=True)):
                kept.append(n)
    assert kept == []


@pytest.mark.parametrize("name", ENGINE_FILES)
def test_an_engine_file_cut_anywhere_is_refused_or_told_to_be_of_another_model(name, tmp_path):
    """No length either: cut exactly between two parts it is the file of a smaller model, and verify says so."""
    data, path = samples.data(name), tmp_path / "cut.bin"
    structure, others = str(file_checks_of(path, data)["Structure"]), []
    for n in range(len(data)):
        checks = file_checks_of(path, data[:n])
        assert mended(data[:n]) in (None, data[:n])
        if all_ok(list(checks.values())):
            others.append(n)
            assert "an end between two parts of the memory, cannot be seen" in checks["CRC32"].detail
            assert str(checks["Structure"]) != structure
    assert len(others) <= 3


@pytest.mark.parametrize("name", ENGINE_FILES)
def test_a_changed_byte_of_an_engine_file_is_refused_or_stands_where_nothing_could_tell(name, tmp_path):
    """What passes is a number, a token id, or a word without a second one to hold it to. Verify says that it cannot see."""
    data, path = samples.data(name), tmp_path / "changed.bin"
    silent, unseen = [], 0
    for at in range(len(data)):
        changed = small.flipped(data, at, 0xA5)
        checks = file_checks_of(path, changed)
        assert mended(changed) in (None, changed), at
        if all_ok(list(checks.values())):
            unseen += 1
            doubted = checks["Structure"].ok is None
            if checks["CRC32"].ok is not None or not (doubted or _is_number_or_id(data, at)):
                silent.append(at)
    assert silent == []
    assert unseen > 0


def file_checks_of(path, data):
    path.write_bytes(data)
    return {check.name: check for check in file_checks(path, None, deep=True)}


def _is_number_or_id(data: bytes, at: int) -> bool:
    """Whether a byte is of the version, a token id, the architecture's name, a cell's words, or a row's numbers; or of the number
    of a model's layers before its recurrent rows, of which not all need have any.
    """
    file = engine_files.read(memoryview(data), "the file")
    body_at = len(data) - len(file.body)
    if 4 <= at < 8 or 12 <= at < body_at:
        return True
    rows = [
        (row, len(stream.positions))
        for cache in file.state.caches
        for stream in cache.streams
        for row in (*stream.k, *stream.v)
    ]
    if file.state.recurrent:
        n_layer_at = file.state.recurrent.rows[0].offset - 16
        if n_layer_at <= at - body_at < n_layer_at + 4:
            return True
        rows += [(row, len(file.state.recurrent.positions)) for row in file.state.recurrent.rows]
    inside = at - body_at
    if any(row.offset <= inside < row.offset + n_cells * row.row_bytes for row, n_cells in rows):
        return True
    cells = [(stream.cells_at, stream.cells_end) for cache in file.state.caches for stream in cache.streams]
    return any(start <= inside < end for start, end in cells)
