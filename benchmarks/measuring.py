"""Samples, and the figures that are computed from them. Every sample is wall-clock time in seconds."""

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
    """One situation of one question: the samples of each way, and facts that are not times (bytes, counts).

    Sample *i* of every way is from the same round, unless a way has fewer samples than the others.
    """

    question: str
    name: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, int | str] = field(default_factory=dict)
    floor: str = ""

    def add(self, way: str, seconds: float) -> None:
        """Add one sample of a way."""
        self.samples.setdefault(way, []).append(round(seconds, 8))

    def median(self, way: str) -> float:
        """The seconds that a call takes."""
        return median(self.samples[way])

    def ratio(self, way: str, to: str) -> float:
        """The median of the ratios of each round, so that a slow moment counts on both sides. If the ways were not sampled in the
        same rounds, the ratio of the medians.
        """
        over, under = self.samples[way], self.samples[to]
        if len(over) != len(under):
            return median(over) / median(under)
        return median(a / b for a, b in zip(over, under, strict=True))

    def quartiles(self, way: str) -> tuple[float, float]:
        """The lower and the upper quartile, in seconds."""
        times = self.samples[way]
        if len(times) < 2:
            return times[0], times[0]
        low, _, high = quantiles(times, n=4, method="inclusive")
        return low, high

    def p99(self, way: str) -> float | None:
        """The 99th percentile in seconds; None if there are too few samples."""
        times = sorted(self.samples[way])
        return times[int(len(times) * 0.99)] if len(times) >= FEWEST_FOR_P99 else None

    def as_json(self) -> dict[str, Any]:
        """The case as it is written to the results."""
        return asdict(self)


def timed(work: Work) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(
    case: Case, ways: Mapping[str, Work], rounds: int, before: Callable[[str], object] = lambda _: None
) -> None:
    """Add `rounds` samples of each way to `case`. Every round runs all of them. Each round starts with another way and has an
    order of its own, so that drift, neighbours, and writes that the previous way left to the disk affect all alike. `before` is
    called with the name of the way, untimed. One extra round at the start is not counted.
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
    """The most bytes by which the resident memory of this process rose while `work` ran; None where Linux does not report it.

    Idle is the resident memory after the allocator has returned its reserve: `work` would fill the reserve first, unseen.
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
    """Remove files from the system's page cache. A disk that is itself a file on a host may still be cached there."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
