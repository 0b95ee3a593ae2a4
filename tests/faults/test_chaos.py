"""Processes that work at random while some are killed; `python -m support.chaos` does it for a minute with sixteen."""

from __future__ import annotations

from support import chaos


def test_processes_that_are_killed_at_random_leave_every_invariant_whole(database_url, tmp_path):
    store = tmp_path / "store"
    done = chaos.run(database_url, store, processes=4, seconds=8, n_operations=60, n_kills=3)
    assert done["errors"] == []
    assert sum(done["counts"].values()) >= 100
    assert not [name for name in done["counts"] if name.startswith("gc: failed") and name != "gc: failed 0"]
    assert chaos.broken_invariants(database_url, store) == []
