"""Processes that work at random while some are killed; `make soak` does it for longer and with more of them."""

from __future__ import annotations

from support import soak


def test_processes_that_are_killed_at_random_serve_no_wrong_state_and_leave_every_invariant(database_url, tmp_path):
    done = soak.run(database_url, tmp_path / "store", processes=4, seconds=8, kill_every_s=1.5)
    assert not done.problems
    assert done.operations  # how many there are depends on the machine
    assert done.n_kills
