"""Counters of what happened, and where they go."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from typing import Protocol


class Event(StrEnum):
    """What is met in a file now and then. Beside the counters of a process the database keeps how often, over all processes:
    `Stats.events`.
    """

    PADDING_DETECTED = "padding_detected"
    BYTE_ORDER_MET = "byte_order_met"
    LEGACY_REFUSED = "legacy_refused"
    OTHER_VERSION_MET = "other_version_met"
    STATE_TRANSLATED = "state_translated"


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

    The registry counts `saved`, `deduplicated`, `refused`, `hit`, `no_match`, `failed`, `merged`, `adopted`, `marked_stale` and
    `evicted`;
    and of the files that a restore or a merge opens, as `Event`: `padding_detected` (zeros before the header, read all the same),
    `byte_order_met` (written with the bytes turned), `legacy_refused` (LLAM version 1), `other_version_met` (saved under another
    version of the engine) and `state_translated` (the state was rewritten in the layout that this engine reads).
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
