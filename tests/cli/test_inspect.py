from __future__ import annotations

import dataclasses
import os

import pytest

from llama_ckpt.errors import CorruptFile, FileMissing, UnsafePath
from llama_ckpt.formats import container


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """Where a registry would be made that nobody named. There is none yet."""
    monkeypatch.delenv("LLAMA_CKPT_STORE", raising=False)
    return tmp_path / "xdg_data_home" / "llama-ckpt"


@pytest.fixture
def whole(template) -> bytes:
    return template.path("one").read_bytes()


@pytest.fixture
def file(tmp_path):
    """`file(data)`: a file with these bytes, outside any store."""

    def made(data: bytes):
        path = tmp_path / "a file.llam"
        path.write_bytes(data)
        return path

    return made


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_good_file_shows_every_field_of_its_header_and_its_first_bytes(run, file, whole, template, data_folder):
    path = file(whole)
    shown = run("inspect", path).succeeded().fields
    header = container.unpack_header(memoryview(whole), 0)
    expected = {
        "file": str(path),
        "version": str(header.version),
        "header_crc32": f"{header.header_crc32:08x}",
        "seq_len": "3",
        "start_token": "0",
        "n_layer": str(header.n_layer),
        "n_kv_head": str(header.n_kv_head),
        "metadata_size": str(header.metadata_size),
        "fingerprint": header.fingerprint.hex(),
        "input_hash": template.hash_of("one"),
        "head_crc32": f"{header.head_crc32:08x}",
        "payload_crc32": f"{header.payload_crc32:08x}",
        "payload_offset": str(header.payload_offset),
        "model": "sample",
        "type_k": "f16",
    }
    assert {name: shown.get(name) for name in expected} == expected
    assert shown["size_bytes"].startswith(f"{len(whole)} ")
    assert shown["payload_size"].startswith(f"{header.payload_size} ")
    assert shown["flags"].startswith("0x2")
    assert shown["created"].endswith(" UTC")
    assert shown["magic"].startswith("LLAM at byte 0")
    assert shown["first 16 bytes"].startswith("4c 4c 41 4d 02 00 00 00 ")
    assert whole[:16].hex(" ") in shown["first 16 bytes"]
    assert shown["verdict"].startswith("whole")
    assert not data_folder.exists()


def test_every_field_of_the_header_is_among_what_is_shown(run, file, whole, data_folder):
    """A field that is added to the header must be added to `inspect`: each one, changed alone, changes what is shown."""
    before = run("inspect", file(whole)).out
    for at in range(4, container.HEADER_SIZE, 2):
        shown = run("inspect", file(flipped(whole, at)))
        assert shown.code == CorruptFile.exit_code
        differing = set(shown.lines) - set(before.splitlines())
        names = {line.split("  ")[0] for line in differing} - {"verdict", "first 16 bytes"}
        assert names, f"the field at byte {at} is not shown"


DAMAGED = {
    "a flipped byte in the payload": (lambda d: flipped(d, len(d) - 1), ["CRC32", "payload"]),
    "a flipped byte in the token ids": (lambda d: flipped(d, 128 + 300), ["CRC32"]),
    "a flipped byte in the header": (lambda d: flipped(d, 0x20), ["Header", "CRC of the header"]),
    "the end cut off": (lambda d: d[:-1], ["Header", "bytes"]),
    "a byte too many": (lambda d: d + b"\0", ["Header", "bytes"]),
    "cut inside the header": (lambda d: d[:100], ["Header", "100 bytes"]),
    "empty": (lambda _: b"", ["Header", "empty"]),
    "a foreign file": (lambda _: b"GGUF" + bytes(range(200)), ["Header", "no LLAM magic", "47 47 55 46"]),
    "nine zero bytes before the magic": (lambda d: bytes(9) + d, ["Header", "no LLAM magic"]),
    "zeros": (lambda _: bytes(200), ["Header", "no LLAM magic"]),
    "another version": (lambda d: flipped(d, 4), ["Header", "version 3"]),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_shown_as_it_is_with_what_is_wrong(run, file, whole, data_folder, damage, words):
    damaged = damage(whole)
    shown = run("inspect", file(damaged))
    assert (shown.code, shown.err) == (CorruptFile.exit_code, "")
    assert shown.fields["verdict"].startswith("DAMAGED")
    for word in words:
        assert word in shown.fields["verdict"]
    assert damaged[:16].hex(" ") in shown.out
    assert ("fingerprint" in shown.fields) == (damaged[:4] == b"LLAM" and len(damaged) >= 128)
    assert run("inspect", file(damaged), "--json").json()["verdict"] == shown.fields["verdict"]
    assert not data_folder.exists()


@pytest.mark.parametrize("zeros", [1, 4, 8])
def test_a_shifted_file_is_whole_and_the_magics_place_is_told(run, file, whole, data_folder, zeros):
    shown = run("inspect", file(bytes(zeros) + whole)).succeeded().fields
    assert shown["magic"].startswith(f"LLAM at byte {zeros}")
    assert shown["verdict"].startswith("whole")
    assert shown["first 16 bytes"].startswith("00 " * zeros + "4c 4c 41 4d ")
    assert not data_folder.exists()


def test_quiet_prints_the_verdict_alone(run, file, whole, data_folder):
    (good,) = run("inspect", file(whole), "-q").succeeded().lines
    (bad,) = run("inspect", file(whole[:-1]), "-q").lines
    assert good.startswith("whole")
    assert bad.startswith("DAMAGED: Header")


def test_json_has_sizes_in_bytes_hashes_in_hex_and_numbers(run, file, whole, data_folder):
    shown = run("inspect", file(whole), "--json").succeeded().json()
    header = dataclasses.asdict(container.unpack_header(memoryview(whole), 0))
    expected = {name: value.hex() if isinstance(value, bytes) else value for name, value in header.items()}
    assert {name: shown.get(name) for name in expected} == expected
    assert (shown["size_bytes"], shown["padding"], shown["first_bytes"]) == (len(whole), 0, whole[:16].hex())


def test_a_file_that_is_not_there_is_told(run, tmp_path, data_folder):
    run("inspect", tmp_path / "nothing.llam").refused(FileMissing, "nothing.llam")


def test_a_symlink_is_refused_even_to_a_good_file(run, file, whole, tmp_path, data_folder):
    link = tmp_path / "link.llam"
    link.symlink_to(file(whole))
    run("inspect", link).refused(UnsafePath, "symlink")


def test_what_is_no_regular_file_is_refused_and_does_not_hang(run, tmp_path, data_folder):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        run("inspect", path).refused(UnsafePath, "not a regular file")


@pytest.mark.parametrize("name", ["日本語 file.llam", "\udcff.llam", "\x1b[31m.llam", "new\nline.llam"], ids=ascii)
def test_a_file_of_any_name_is_shown_with_its_name_spelt_out(run, whole, tmp_path, data_folder, name):
    path = tmp_path / name
    path.write_bytes(whole)
    shown = run("inspect", path).succeeded()
    assert "\x1b" not in shown.out
    assert shown.fields["file"].startswith(str(tmp_path))
    assert shown.fields["verdict"].startswith("whole")


def test_a_database_that_cannot_be_reached_does_not_matter(run, file, whole, data_folder):
    run("inspect", file(whole), "--database-url", "postgresql+psycopg://user@127.0.0.1:1/x").succeeded()
