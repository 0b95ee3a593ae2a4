"""Deltas that came before their parents wait, and keep their order."""

from __future__ import annotations

from llama_ckpt.checkpoints.orphans import WaitingDeltas


def test_deltas_are_ready_in_the_order_in_which_they_came_once_their_parent_has_a_row():
    waiting = WaitingDeltas()
    for parent_id, delta in (("a", "a1"), ("b", "b1"), ("a", "a2"), ("c", "c1")):
        waiting.add(parent_id, delta)
    registered = {"a", "b"}
    assert waiting.take_ready(registered.__contains__) == ["a1", "b1", "a2"]
    assert waiting.take_ready(registered.__contains__) == []
    assert waiting.take_rest() == ["c1"]
    assert waiting.take_rest() == []
