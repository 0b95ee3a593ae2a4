"""Who writes a temporary file: a tag in its name says so, and whether that process lives can be asked on its own machine."""

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
_TICK_S = 2  # a process's start is told to a tick, and some systems count from a boot time that they round


class Owner(StrEnum):
    """What is known of the process that a tag names."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def my_tag() -> str:
    """The tag of the process that asks: machine, process id, start in seconds since 1970."""
    return f"{_machine()}-{os.getpid()}-{int(psutil.Process().create_time())}"


def ask(tag: str) -> Owner:
    """What is known of the process that a tag names. Of another machine, or another container, nothing is."""
    match = _TAG.fullmatch(tag)
    if match is None or match["machine"] != _machine():
        return Owner.UNKNOWN
    try:
        started = psutil.Process(int(match["pid"])).create_time()
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return Owner.GONE
    except psutil.AccessDenied:
        return Owner.ALIVE  # there is one, and no more is told
    return Owner.ALIVE if abs(started - int(match["started"])) <= _TICK_S else Owner.GONE


@functools.cache
def _machine() -> str:
    """Eight digits that tell hosts, boots and containers apart: a process id means something within one of them."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(str(Path(path).readlink()) if path.endswith("pid") else Path(path).read_text(encoding="ascii"))
        except OSError:  # no Linux
            parts.append("")
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:8]
