"""Counters of events, and the sinks that take them."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from typing import Protocol


class Event(StrEnum):
    """Rare properties of files that a registry opens. Besides the counters of a process, the database counts them over all
    processes: `Stats.events`.
    """

    PADDING_DETECTED = "padding_detected"
    BYTE_ORDER_MET = "byte_order_met"
    LEGACY_REFUSED = "legacy_refused"
    OTHER_VERSION_MET = "other_version_met"
    STATE_TRANSLATED = "state_translated"


class MetricsSink(Protocol):
    """Takes counts. It must be safe to call from several threads."""

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` to the counter `name`."""


class NullSink:
    """Takes counts and keeps none."""

    def count(self, name: str, n: int = 1) -> None:
        """Does nothing."""


class Counters:
    """Keeps counts in memory, for tests and for programs that publish them.

    The registry counts `saved`, `deduplicated`, `refused`, `hit`, `no_match`, `failed`, `merged`, `adopted`, `marked_stale` and
    `evicted`. Of the files that a restore or a merge opens it counts these, as `Event`: `padding_detected` (zeros before the
    header; the file is read), `byte_order_met` (written with the other byte order), `legacy_refused` (LLAM version 1),
    `other_version_met` (saved by another version of the engine) and `state_translated` (the state was rewritten in the layout
    that this engine reads).
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` to the counter `name`."""
        with self._lock:
            self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        """The counter's value; 0 if it was never counted."""
        with self._lock:
            return self._counts[name]
