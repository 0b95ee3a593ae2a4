"""The machine and the versions that were measured; they are part of the results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
from pathlib import Path

import psutil

import llama_ckpt


def machine(folder: Path) -> dict[str, str | int]:
    """Processor, cores, memory, system, and the file system under `folder`."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(folder),
    }


def versions() -> dict[str, str]:
    """The versions of everything that takes part; a package that is not installed is left out."""
    found = {
        "llama_ckpt": llama_ckpt.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    for package in ("llama-cpp-python", "diskcache", "isal", "numpy", "SQLAlchemy", "psycopg"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """The file system of the mount with the longest path above the folder."""
    where = folder.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if where.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"
