"""Samples, and the figures that are told of them. Every sample is a time of wall clock in seconds."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

Work = Callable[[], object]
FEWEST_FOR_P99 = 100  # fewer samples have no 99th percentile, only a largest one


@dataclass(kw_only=True)
class Case:
    """One situation of one question: the samples of each way to deal with it, and facts that are no times (bytes, counts).

    Sample *i* of every way was taken in the same round, unless a way has fewer samples than the others.
    """

    question: str
    name: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, int | str] = field(default_factory=dict)
    floor: str = ""

    def add(self, way: str, seconds: float) -> None:
        """Takes one more sample of a way."""
        self.samples.setdefault(way, []).append(round(seconds, 8))

    def median(self, way: str) -> float:
        """Seconds."""
        return median(self.samples[way])

    def ratio(self, way: str, to: str) -> float:
        """The median of the rounds' own ratios, so that a slow moment counts on both sides; of ways that were not sampled in the
        same rounds the ratio of the medians.
        """
        over, under = self.samples[way], self.samples[to]
        if len(over) != len(under):
            return median(over) / median(under)
        return median(a / b for a, b in zip(over, under, strict=True))

    def quartiles(self, way: str) -> tuple[float, float]:
        """Seconds below which a quarter and three quarters of the samples lie."""
        times = self.samples[way]
        if len(times) < 2:
            return times[0], times[0]
        low, _, high = quantiles(times, n=4, method="inclusive")
        return low, high

    def p99(self, way: str) -> float | None:
        """Seconds; None where there are too few samples to say."""
        times = sorted(self.samples[way])
        return times[int(len(times) * 0.99)] if len(times) >= FEWEST_FOR_P99 else None

    def as_json(self) -> dict[str, Any]:
        """As it stands in the results."""
        return asdict(self)


def timed(work: Work) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(
    case: Case, ways: Mapping[str, Work], rounds: int, before: Callable[[str], object] = lambda _: None
) -> None:
    """Takes `rounds` samples of each way into `case`. Every round runs all of them, each beginning with another one and going on
    in an order of its own, so that drift, neighbours, and what the way before left for the disk to do hit all alike; `before`
    hears whose turn it is, untimed. One round goes ahead uncounted.
    """
    names = list(ways)
    for number in range(-1, rounds):
        first = names[number % len(names)]
        others = [name for name in names if name != first]
        random.Random(number).shuffle(others)
        for name in (first, *others):
            before(name)
            seconds = timed(ways[name])
            if number >= 0:
                case.add(name, seconds)


def peak_above_idle(work: Work) -> int | None:
    """Bytes by which the resident memory of this process rose at most while `work` ran; None where Linux does not tell.

    Idle is what is resident after the allocator gave back what it holds in reserve: `work` would else fill that first, unseen.
    Writing 5 to clear_refs sets the peak (VmHWM) to what is resident now: proc_pid_clear_refs(5).
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def drop_from_page_cache(*paths: Path) -> None:
    """Takes files out of the system's page cache; a disk that is itself a file on a host may still be cached there."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
