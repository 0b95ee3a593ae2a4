"""Files outside the store: whole or not there, and never over somebody else's."""

from __future__ import annotations

import os

import pytest

from llama_ckpt.errors import BadInput, StoreUnavailable
from llama_ckpt.store import disk


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_pieces_are_written_one_after_the_other_for_their_owner_alone(tmp_path):
    size = disk.write_file(tmp_path / "a", [b"head", memoryview(b"body")], replace=False)
    assert (size, (tmp_path / "a").read_bytes(), names(tmp_path)) == (8, b"headbody", ["a"])
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_failure_keeps_what_was_there_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")

    def failing(_fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        disk.write_file(tmp_path / "a", [b"new"], replace=True)
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_a_file_that_somebody_makes_meanwhile_stays_theirs(tmp_path, monkeypatch):
    real = os.fsync

    def slow(fd):
        (tmp_path / "a").write_bytes(b"theirs")
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(BadInput, match="--force"):
        disk.write_file(tmp_path / "a", [b"ours"], replace=False)
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"theirs", ["a"])


def test_a_dangling_symlink_counts_as_a_file_that_is_there(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="there already"):
        disk.write_file(tmp_path / "a", [b"x"], replace=False)
    disk.write_file(tmp_path / "a", [b"x"], replace=True)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("at_once", [1 << 20, 7], ids=["at once", "in parts"])
@pytest.mark.parametrize("skipped", [0, 5])
def test_the_rest_of_a_file_is_copied_by_the_system_in_as_many_steps_as_it_takes(
    tmp_path, monkeypatch, at_once, skipped
):
    data = os.urandom(100)
    (tmp_path / "a").write_bytes(data)
    if hasattr(os, "copy_file_range"):
        real = os.copy_file_range
        monkeypatch.setattr(os, "copy_file_range", lambda s, t, n, at: real(s, t, min(n, at_once), at))
    source, target = os.open(tmp_path / "a", os.O_RDONLY), os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
    disk.copy_rest(source, target, memoryview(data)[skipped:])
    os.close(source)
    os.close(target)
    assert (tmp_path / "b").read_bytes() == data[skipped:]


def test_an_error_that_is_not_about_copying_is_told(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "copy_file_range", broken, raising=False)
    (tmp_path / "a").write_bytes(b"data")
    with (tmp_path / "a").open("rb") as source, pytest.raises(OSError, match="Input/output"):
        disk.copy_rest(source.fileno(), source.fileno(), memoryview(b"data"))
