"""Folders of other programs: recognised, counted, and left as they were. Real ones, made by the packages themselves."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from llama_ckpt.errors import StoreUnavailable
from llama_ckpt.exchange.foreign import recognise

diskcache = pytest.importorskip("diskcache", reason="the package diskcache is not installed (extra 'llama')")


class Trap:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file's name, times and bytes."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def llama_cache(tmp_path):
    """A LlamaDiskCache with three states, the last one in a file of its own; still open, so that its log is there."""
    llama = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'llama')")
    from llama_cpp.llama_cache import LlamaDiskCache

    folder = tmp_path / "llama_cache"
    cache = LlamaDiskCache(str(folder))
    for n in (3, 5, 400):
        state = llama.LlamaState(
            input_ids=np.arange(n, dtype=np.intc),
            scores=np.zeros((n, 10), np.single),
            n_tokens=n,
            llama_state=bytes(1000 * n),
            llama_state_size=1000 * n,
            seed=1,
        )
        with contextlib.redirect_stderr(io.StringIO()):  # it prints
            cache[tuple(range(n))] = state
    yield folder, cache.cache
    cache.cache.close()


def test_a_llama_disk_cache_is_reported_while_it_is_open_and_after(llama_cache):
    folder, cache = llama_cache
    assert (folder / "cache.db-wal").stat().st_size > 0
    for _ in range(2):
        before = contents(folder)
        found = recognise(folder)
        assert contents(folder) == before
        assert found.what == "a LlamaDiskCache of llama-cpp-python"
        assert (found.of_llama, found.n_entries, found.n_missing, found.n_orphans) == (True, 3, 0, 0)
        assert found.entry_bytes > 408_000
        assert found.disk_bytes >= found.entry_bytes
        assert found.limit_bytes == 1 << 30
        assert "never opened" in found.why_not
        cache.close()


def test_entries_without_a_file_and_files_without_an_entry_are_counted(llama_cache):
    folder, cache = llama_cache
    cache.close()
    (value,) = folder.rglob("*.val")
    value.rename(value.with_name("0" * 28 + ".val"))
    found = recognise(folder)
    assert (found.n_entries, found.n_missing, found.n_orphans) == (3, 1, 1)


def test_nothing_in_the_folder_is_ever_unpickled(tmp_path):
    folder = tmp_path / "cache"
    with diskcache.Cache(str(folder)) as cache:
        cache[(1, 2)] = Trap(tmp_path / "sprung")
        cache["big"] = [Trap(tmp_path / "sprung"), "x" * 100_000]
    found = recognise(folder)
    assert (found.what, found.of_llama) == ("a folder of the Python package diskcache", False)
    assert found.n_entries == 2
    assert not (tmp_path / "sprung").exists()


def test_an_empty_cache_is_recognised(tmp_path):
    diskcache.Cache(str(tmp_path / "cache")).close()
    found = recognise(tmp_path / "cache")
    assert (found.n_entries, found.entry_bytes, found.of_llama) == (0, 0, False)


def test_a_name_in_the_database_that_leads_out_of_the_folder_is_not_opened(tmp_path):
    folder = tmp_path / "cache"
    diskcache.Cache(str(folder)).close()
    (tmp_path / "secret").write_bytes(b"llama_cpp.llama LlamaState")
    (folder / "link.val").symlink_to(tmp_path / "secret")
    with contextlib.closing(sqlite3.connect(folder / "cache.db")) as db:
        for name in ("../secret", str(tmp_path / "secret"), "link.val"):
            db.execute("INSERT INTO Cache (key, raw, size, mode, filename) VALUES (?, 1, 5, 4, ?)", (name, name))
        db.commit()
    found = recognise(folder)
    assert (found.n_entries, found.n_missing, found.of_llama) == (3, 3, False)


def test_other_folders_are_not_known(tmp_path):
    assert recognise(tmp_path) is None
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as db:
        db.execute("CREATE TABLE Cache (something)")
    assert recognise(tmp_path) is None
    (tmp_path / "cache.db").unlink()
    (tmp_path / "cache.db").symlink_to("/etc/passwd")
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "nowhere") is None


def test_a_database_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "cache.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(StoreUnavailable, match=r"cache\.db"):
        recognise(tmp_path)
