"""Which process writes a temporary file, by a tag in its name; and whether that process is alive, on its own machine."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from enum import StrEnum
from pathlib import Path

import psutil

TAG = r"[0-9a-f]{8}-[0-9]{1,10}-[0-9]{1,12}"
_TAG = re.compile(r"(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-(?P<started>[0-9]{1,12})")
_START_TOLERANCE_S = 2  # a start time is exact to a clock tick, and some systems add it to a rounded boot time


class Owner(StrEnum):
    """What is known of the process that a tag names."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def my_tag() -> str:
    """The tag of this process: machine, process id, start in seconds since 1970."""
    return f"{_machine()}-{os.getpid()}-{int(psutil.Process().create_time())}"


def ask(tag: str) -> Owner:
    """Whether the process that a tag names is alive. `UNKNOWN` for one on another machine or in another container."""
    match = _TAG.fullmatch(tag)
    if match is None or match["machine"] != _machine():
        return Owner.UNKNOWN
    try:
        started = psutil.Process(int(match["pid"])).create_time()
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return Owner.GONE
    except psutil.AccessDenied:
        return Owner.ALIVE  # the process exists; the system says no more
    return Owner.ALIVE if abs(started - int(match["started"])) <= _START_TOLERANCE_S else Owner.GONE


@functools.cache
def _machine() -> str:
    """Eight hex digits that identify host, boot and container: a process id is valid only within one of them."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(str(Path(path).readlink()) if path.endswith("pid") else Path(path).read_text(encoding="ascii"))
        except OSError:  # not on Linux
            parts.append("")
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:8]
