"""Digests of large files: computed once, remembered by what the file is, never trusted further than that."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from llama_ckpt.engine import digests as module
from llama_ckpt.engine.digests import FileDigests, identity_of, shards_of, weights_digest_of
from llama_ckpt.errors import BadInput

A, B = b"first content", b"other content"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(A)
    return path


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def digests(memory):
    return FileDigests(memory)


def hashed(digests: FileDigests, path) -> tuple[bytes, bool]:
    """The digest, and whether the file was read for it."""
    heard: list[tuple[int, int]] = []
    digest = digests.sha256(path, lambda done, total: heard.append((done, total)))
    return digest, bool(heard)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# -- remembered -----------------------------------------------------------------------------------------------------------


def test_a_file_is_hashed_once_and_then_remembered(digests, memory, model):
    assert hashed(digests, model) == (sha(A), True)
    assert hashed(digests, model) == (sha(A), False)
    assert hashed(FileDigests(memory), model) == (sha(A), False)


def test_the_progress_of_hashing_is_told_up_to_the_last_byte(digests, model, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 1000)
    model.write_bytes(bytes(2500))
    heard: list[tuple[int, int]] = []
    assert digests.sha256(model, lambda done, total: heard.append((done, total))) == sha(bytes(2500))
    assert heard == [(1000, 2500), (2000, 2500), (2500, 2500)]


def test_a_file_of_another_size_is_hashed_again(digests, model):
    digests.sha256(model)
    before = model.stat()
    model.write_bytes(A + b"!")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashed(digests, model) == (sha(A + b"!"), True)


def test_a_file_changed_in_place_is_hashed_again_for_its_time(digests, model):
    digests.sha256(model)
    before = model.stat()
    model.write_bytes(B)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert model.stat().st_ino == before.st_ino
    assert hashed(digests, model) == (sha(B), True)


def test_a_file_put_in_anothers_place_with_its_size_and_time_is_hashed_again(digests, model, tmp_path):
    digests.sha256(model)
    before = model.stat()
    other = tmp_path / "downloaded"
    other.write_bytes(B)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(model)
    after = model.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert hashed(digests, model) == (sha(B), True)
    assert hashed(digests, model) == (sha(B), False)


def test_a_file_reached_over_a_link_is_the_same_file(digests, model, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    digests.sha256(model)
    assert hashed(digests, link) == (sha(A), False)


def test_a_link_turned_to_another_file_gives_that_files_digest(digests, model, tmp_path):
    other, link = tmp_path / "other.gguf", tmp_path / "link.gguf"
    other.write_bytes(B)
    link.symlink_to(model)
    assert digests.sha256(link) == sha(A)
    link.unlink()
    link.symlink_to(other)
    assert hashed(digests, link) == (sha(B), True)


def test_files_do_not_push_each_other_out_of_the_memory(digests, tmp_path):
    paths = [tmp_path / f"{i}.gguf" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes(i))
        digests.sha256(path)
    assert [hashed(digests, path) for path in paths] == [(sha(bytes(i)), False) for i in range(5)]


def test_nothing_but_the_memory_is_left_beside_it(digests, memory, model):
    digests.sha256(model)
    assert [p.name for p in memory.parent.iterdir()] == ["digests.json"]


# -- a memory that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"a": ',
        b"\xff\xfe\0",
        b"[]",
        b"null",
        b'"text"',
        b"7",
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_torn_memory_means_hashing_again_and_is_replaced(digests, memory, model, content):
    memory.parent.mkdir()
    memory.write_bytes(content)
    assert hashed(digests, model) == (sha(A), True)
    assert hashed(digests, model) == (sha(A), False)


@pytest.mark.parametrize(
    "entry", [None, 7, "text", [], {}, {"sha256": "00" * 32}, {"identity": None, "sha256": "00" * 32}]
)
def test_an_entry_that_names_no_file_means_hashing_again(digests, memory, model, entry):
    memory.parent.mkdir()
    memory.write_text(json.dumps({str(model.resolve()): entry}))
    assert hashed(digests, model) == (sha(A), True)


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"sha256": "no hex"},
        {"sha256": ""},
        {"sha256": "abab"},
        {"sha256": None},
        {"sha256": "AB" * 32},
        {"sha256": "ab" * 33},
    ],
    ids=str,
)
def test_an_entry_with_a_damaged_digest_means_hashing_again(digests, memory, model, damage):
    digests.sha256(model)
    entries = json.loads(memory.read_text())
    (entry,) = entries.values()
    del entry["sha256"]
    entry.update(damage)
    memory.write_text(json.dumps(entries))
    assert hashed(digests, model) == (sha(A), True)


def test_a_memory_that_cannot_be_written_costs_hashing_and_nothing_else(tmp_path, model):
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"x")
    digests = FileDigests(in_the_way / "sub" / "digests.json")  # below a file there can be no folder, not even for root
    assert hashed(digests, model) == (sha(A), True)
    assert hashed(digests, model) == (sha(A), True)
    assert in_the_way.read_bytes() == b"x"


def test_a_read_only_place_for_the_memory_costs_hashing_and_nothing_else(digests, memory, model, monkeypatch):
    def refuse(path, *_args, **_kw):
        raise PermissionError(13, "Permission denied", str(path))

    memory.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.engine.digests.Path.write_text", refuse)
        assert hashed(digests, model) == (sha(A), True)
        assert hashed(digests, model) == (sha(A), True)
    assert list(memory.parent.iterdir()) == []


def test_a_folder_in_the_memorys_place_costs_hashing_and_leaves_no_file(digests, memory, model):
    memory.mkdir(parents=True)
    assert hashed(digests, model) == (sha(A), True)
    assert hashed(digests, model) == (sha(A), True)
    assert [p.name for p in memory.parent.iterdir()] == ["digests.json"]


# -- a file that cannot be used -------------------------------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_hashed_is_refused_and_not_remembered(digests, memory, model):
    def append(_done, _total):
        with model.open("ab") as file:
            file.write(b"more")

    with pytest.raises(BadInput, match="it changed while it was hashed"):
        digests.sha256(model, lambda done, total: append(done, total) if done == len(A) else None)
    assert not memory.exists()
    assert hashed(digests, model) == (sha(A + b"more"), True)


def test_a_file_replaced_while_it_is_hashed_is_refused(digests, model, tmp_path):
    def replace(_done, _total):
        new = tmp_path / "new"
        new.write_bytes(A)
        new.replace(model)

    with pytest.raises(BadInput, match="it changed while it was hashed"):
        digests.sha256(model, replace)


def test_a_file_that_vanishes_while_it_is_hashed_is_refused(digests, model):
    with pytest.raises(BadInput, match="No such file"):
        digests.sha256(model, lambda _done, _total: model.unlink())


def test_a_file_that_is_not_there_is_refused_by_its_name(digests, tmp_path):
    with pytest.raises(BadInput, match=r"none.gguf.*No such file"):
        digests.sha256(tmp_path / "none.gguf")


def test_a_folder_is_no_model(digests, tmp_path):
    with pytest.raises(BadInput, match="Is a directory"):
        digests.sha256(tmp_path)


def test_a_file_that_cannot_be_read_any_more_is_refused_with_the_systems_words(digests, model, monkeypatch):
    def broken(*_args, **_kw):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.engine.digests.Path.open", broken)
        with pytest.raises(BadInput, match="Input/output error"):
            digests.sha256(model)


# -- shards ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    paths = [tmp_path / f"big-model-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 10)
    return paths


@pytest.mark.parametrize("named", [0, 1, 2])
def test_all_shards_of_a_split_model_count_whichever_is_named(digests, shards, named):
    assert shards_of(shards[named]) == shards
    each = b"".join(sha(bytes([i]) * 10) for i in range(3))
    assert weights_digest_of(shards[named], digests) == sha(each)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_change_in_any_shard_is_another_model(digests, shards, changed):
    before = weights_digest_of(shards[0], digests)
    shards[changed].write_bytes(b"changed!!!")
    assert weights_digest_of(shards[0], digests) != before


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_shard_that_is_missing_is_named(digests, shards, missing):
    shards[missing].unlink()
    with pytest.raises(BadInput, match=rf"{shards[missing].name}.*there is no such file"):
        weights_digest_of(shards[0], digests)


def test_a_model_in_one_file_is_named_by_that_file(digests, model):
    assert shards_of(model) == [model]
    assert weights_digest_of(model, digests) == sha(A)


@pytest.mark.parametrize(
    "name",
    [
        "m-1-of-3.gguf",
        "m-00001-of-00003.bin",
        "-00001-of-00003.gguf",
        "m-00001-of-00003.gguf.part",
        "m_00001_of_00003.gguf",
    ],
)
def test_a_name_that_only_looks_like_a_shards_is_one_file(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(A)
    assert shards_of(path) == [path]


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00000-of-00001.gguf", "m-00002-of-00001.gguf"])
def test_other_weights_never_have_the_same_digest_whatever_the_file_is_called(digests, tmp_path, name):
    path = tmp_path / name
    (tmp_path / "m-00001-of-00001.gguf").write_bytes(b"a shard that is not meant")
    path.write_bytes(A)
    before = weights_digest_of(path, digests)
    path.write_bytes(B + b"!")
    assert weights_digest_of(path, digests) != before


@pytest.mark.parametrize("name", ["none.gguf", "none-00001-of-00002.gguf"])
def test_a_model_that_is_not_there_is_refused_by_name(tmp_path, name):
    with pytest.raises(BadInput, match=f"{name}.*there is no such file"):
        shards_of(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=f"{name}.*there is no such file"):
        shards_of(tmp_path / name)


# -- telling a replaced model from the same one ---------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_model_of_which_any_shard_was_replaced_is_another_one(shards, changed):
    before = identity_of(shards[0])
    assert identity_of(shards[2]) == before
    was = shards[changed].stat()
    new = shards[changed].with_name("new")
    new.write_bytes(bytes(10))
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.replace(shards[changed])
    after = identity_of(shards[0])
    assert [i for i in range(3) if before[i] != after[i]] == [changed]


def test_a_model_that_was_only_read_is_the_same_one(digests, shards):
    before = identity_of(shards[0])
    weights_digest_of(shards[0], digests)
    assert identity_of(shards[0]) == before


def test_a_model_that_is_gone_has_no_identity(shards):
    shards[1].unlink()
    with pytest.raises(BadInput, match=shards[1].name):
        identity_of(shards[0])
