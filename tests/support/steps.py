"""Hooks: what happens at a named step of a save, a restore or a collection."""

from __future__ import annotations


def once(step, action):
    """A hook that does something at the first time of a step."""
    waiting = [action]

    def hook(now):
        if now == step and waiting:
            waiting.pop()()

    return hook
