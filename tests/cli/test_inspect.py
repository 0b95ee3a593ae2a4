from __future__ import annotations

import dataclasses
import os
import random

import pytest
from support import samples, small
from support.checksums import counted_crc_bytes, crc_bytes_of_one_check

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


def test_a_file_is_checked_once(run, file, whole):
    with counted_crc_bytes() as sizes:
        run("inspect", file(whole)).succeeded()
    assert sum(sizes) == crc_bytes_of_one_check(whole)


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
    assert shown["size_bytes"].startswith(f"{len(whole):,} ")
    assert shown["payload_size"].startswith(f"{header.payload_size:,} ")
    assert shown["flags"].startswith("0x2")
    assert shown["created"].endswith(" UTC")
    assert (shown["format"], shown["magic"]) == ("LLAM", "at byte 0")
    assert shown["first 16 bytes"].startswith("4c 4c 41 4d 02 00 00 00 ")
    assert whole[:16].hex(" ") in shown["first 16 bytes"]
    assert shown["verdict"].startswith("complete")
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


STRANGERS = {
    "empty": (b"", "the file is empty"),
    "a model": (b"GGUF" + bytes(range(200)), "it is a GGUF model file"),
    "a pickle": (b"\x80\x04" + bytes(range(200)), "never unpickled"),
    "nine zero bytes before the magic": (bytes(9) + b"LLAM" + bytes(200), "begins with 00 00"),
    "text": (b"To whom it may concern", "begins with 54 6f 20 77"),
}


@pytest.mark.parametrize(("data", "words"), STRANGERS.values(), ids=STRANGERS)
def test_what_is_no_checkpoint_is_said_to_be_none(run, file, data_folder, data, words):
    shown = run("inspect", file(data))
    assert (shown.code, shown.err) == (CorruptFile.exit_code, "")
    assert shown.fields["verdict"].startswith("NO CHECKPOINT: ")
    assert words in shown.fields["verdict"]
    assert "fingerprint" not in shown.fields


def test_a_checkpoint_of_version_1_is_told_apart_and_why_it_is_never_restored(run, file, data_folder):
    shown = run("inspect", file(b"MALL\0\0\0\1" + bytes(500)))
    assert shown.code == CorruptFile.exit_code
    assert (shown.fields["format"], shown.fields["version"], shown.fields["byte_order"]) == ("LLAM", "1", "big")
    assert shown.fields["verdict"].startswith("NEVER RESTORED: ")
    assert "magic and version" not in shown.fields.get("notes", "")


@pytest.mark.parametrize("name", samples.all_names())
@pytest.mark.parametrize("zeros", [0, 5])
def test_every_file_of_an_engine_is_told_with_what_is_in_it(run, file, data_folder, name, zeros):
    path = file(bytes(zeros) + samples.data(name))
    shown = run("inspect", path, "--json").succeeded().json()
    kind, version = name.split("-")[:2]
    assert (shown["format"], f"v{shown['version']}", shown["padding"]) == (kind, version, zeros)
    assert (shown["whole"], shown["restorable"]) == (True, True)
    loads = [verdict["engine"] for verdict in shown["engines"] if verdict["loads"]]
    assert len(loads) == (0 if zeros else 1)
    people = run("inspect", path).succeeded().fields
    assert people["verdict"].startswith("complete: every byte is where it has to be")
    assert people["magic"] == f"at byte {zeros}"
    for verdict in shown["engines"]:
        assert people[verdict["engine"]] == f"{verdict['says']}; through llama-ckpt: {verdict['through_llama_ckpt']}"


def test_a_short_file_of_an_engine_is_damaged_and_its_own_engine_would_die_of_it(run, file, data_folder):
    shown = run("inspect", file(samples.data(samples.F16)[:-1]))
    assert shown.code == CorruptFile.exit_code
    assert shown.fields["verdict"].startswith("DAMAGED: Structure")
    assert "aborts the process" in shown.fields["llama-cpp-python 0.3.36, llama.cpp b11401 (ggsq 3, ggsn 10)"]


def test_any_content_is_shown_and_none_is_a_traceback(run, file, whole, data_folder):
    choice = random.Random(5)
    seeds = [whole[:5000], small.checkpoint(), *(samples.data(name) for name in samples.all_names() if "tiny" in name)]
    for _ in range(150):
        data = bytearray(choice.choice(seeds))
        for _ in range(choice.randrange(1, 6)):
            data[choice.randrange(min(len(data), 400))] = choice.choice((0, 1, 0x7F, 0xFF, choice.randrange(256)))
        del data[choice.randrange(1, len(data) + 1) :]
        shown = run("inspect", file(bytes(data)))
        assert (shown.code in (0, CorruptFile.exit_code), shown.err) == (True, ""), bytes(data[:40]).hex()


# -- folders --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, whole):
    """Five files: two whole checkpoints, a damaged one, and two that are no checkpoints. A symlink beside them."""
    root = tmp_path / "found"
    (root / "slots").mkdir(parents=True)
    (root / "a.llam").write_bytes(whole)
    (root / "slots" / "slot0.bin").write_bytes(samples.data(samples.V4_TWO_STREAMS))
    (root / "slots" / "slot1.bin").write_bytes(samples.data(samples.V4_TWO_STREAMS)[:-1])
    (root / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    (root / "notes.txt").write_bytes(b"notes")
    (root / "link.llam").symlink_to(root / "a.llam")
    return root


def test_a_folder_has_a_line_for_each_file_and_totals(run, folder, data_folder):
    shown = run("inspect", folder)
    assert (shown.code, shown.err) == (CorruptFile.exit_code, "")
    lines = {line.split()[0]: line.split() for line in shown.lines if line.strip()}
    assert lines["a.llam"][1:5] == ["LLAM", "2", "3", "3"]
    assert lines["slots/slot0.bin"][1:5] == ["ggsq", "4", "4", "4"]
    assert "DAMAGED:" in lines["slots/slot1.bin"]
    assert "symlink," in lines["link.llam"]
    assert shown.lines[-1].endswith(": 2 complete, 1 damaged or incomplete, 3 not checkpoints")
    assert run("inspect", folder, "-q").lines == [str(folder / "slots" / "slot1.bin")]


def test_a_folder_without_a_damaged_checkpoint_is_no_failure(run, folder, data_folder):
    (folder / "slots" / "slot1.bin").unlink()
    shown = run("inspect", folder, "--json").succeeded().json()
    assert shown["totals"]["whole"] == 2
    assert shown["totals"]["size_bytes"] == sum(p.stat().st_size for p in folder.rglob("*.*") if not p.is_symlink())
    formats_of = {entry["file"]: entry.get("format") for entry in shown["files"]}
    assert formats_of["a.llam"] == "LLAM"
    assert formats_of["notes.txt"] == "unknown"


@pytest.mark.parametrize("content", [b"", bytes(300), b"anything"])
def test_a_file_that_is_called_a_checkpoint_and_is_none_is_a_failure(run, tmp_path, data_folder, content):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "lost.llam").write_bytes(content)
    assert run("inspect", tmp_path / "x").code == CorruptFile.exit_code


def test_a_store_is_a_folder_whose_database_is_not_opened(run, populated):
    before = populated.snapshot()
    shown = run("inspect", populated.root, "--json").succeeded().json()
    assert shown["totals"]["whole"] == 4
    assert "not opened" in next(e["verdict"] for e in shown["files"] if e["file"].endswith(".sqlite3"))
    assert populated.snapshot() == before


def test_a_folder_of_a_disk_cache_is_reported_and_nothing_in_it_is_opened(run, tmp_path, data_folder):
    diskcache = pytest.importorskip("diskcache", reason="the package diskcache is not installed (extra 'llama')")
    with diskcache.Cache(str(tmp_path / "all" / "cache")) as cache:
        cache["one"] = "x" * 100_000
    for path in (tmp_path / "all" / "cache", tmp_path / "all"):
        (entry,) = run("inspect", path, "--json").succeeded().json()["files"]
        assert "diskcache: 1 entry" in entry["verdict"]
        assert "never opened" in entry["verdict"]
        assert entry["other_program"]["n_entries"] == 1


def test_several_paths_are_shown_one_after_the_other(run, folder, data_folder):
    bad, good = folder / "slots" / "slot1.bin", folder / "a.llam"
    shown = run("inspect", good, bad, "--json")
    assert shown.code == CorruptFile.exit_code
    assert [value["whole"] for value in shown.json()] == [True, False]
    assert run("inspect", good, bad).out.count("verdict") == 2
    assert [line.split(":")[0] for line in run("inspect", good, bad, "-q").lines] == ["whole", "DAMAGED"]


@pytest.mark.parametrize("zeros", [1, 4, 8])
def test_a_shifted_file_is_whole_and_the_magics_place_is_told(run, file, whole, data_folder, zeros):
    shown = run("inspect", file(bytes(zeros) + whole)).succeeded().fields
    assert shown["magic"] == f"at byte {zeros}"
    assert shown["verdict"].startswith("complete")
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
    for path in (tmp_path / "pipe", "/dev/zero"):
        run("inspect", path).refused(UnsafePath, "not a regular file")


@pytest.mark.parametrize("name", ["日本語 file.llam", "\udcff.llam", "\x1b[31m.llam", "new\nline.llam"], ids=ascii)
def test_a_file_of_any_name_is_shown_with_its_name_spelt_out(run, whole, tmp_path, data_folder, name):
    path = tmp_path / name
    path.write_bytes(whole)
    shown = run("inspect", path).succeeded()
    assert "\x1b" not in shown.out
    assert shown.fields["file"].startswith(str(tmp_path))
    assert shown.fields["verdict"].startswith("complete")


def test_a_database_that_cannot_be_reached_does_not_matter(run, file, whole, data_folder):
    run("inspect", file(whole), "--database-url", "postgresql+psycopg://user@127.0.0.1:1/x").succeeded()
