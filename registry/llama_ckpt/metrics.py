"""Counters of what happened, and where they go."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol


class MetricsSink(Protocol):
    """Takes counts; must be safe to call from several threads."""

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` to the counter `name`."""


class NullSink:
    """Takes counts and forgets them."""

    def count(self, name: str, n: int = 1) -> None:
        """Does nothing."""


class Counters:
    """Keeps counts in memory, for tests and for whoever publishes them.

    The registry counts `saved`, `deduplicated`, `refused`, `hit`, `no_match`, `failed`, `padding_detected`, `marked_stale`,
    `evicted` and `adopted`.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` to the counter `name`."""
        with self._lock:
            self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        """The counter's value; 0 for one that was never counted."""
        with self._lock:
            return self._counts[name]
