"""How numbers and times are written for people. Every message and table uses these functions and no other form.

- counts: digits with thousands separators (`number`), with their noun where there is one (`plural`);
- bytes: binary units with one decimal (`bytes_`);
- durations: one unit with one decimal (`duration`);
- times: UTC, to the second (`timestamp`).

JSON and `--quiet` print the plain values: counts and bytes as integers, seconds as floats, microseconds since 1970.
"""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime


def is_visible(character: str) -> bool:
    """Whether a character is printed as it is: no control character and no broken text. Spaces of every script are."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def number(n: int) -> str:
    """A count: 7, 1,234, 1,000,000."""
    return f"{n:,}"


def plural(n: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: 1 file, 2 files, 1,234 files. `nouns` is the plural if it is not the noun with an s."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def bytes_(n_bytes: float) -> str:
    """A size: 12 B, 3.4 KiB, 92.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.1f} TiB"


def duration(seconds: float) -> str:
    """A length of time: 3.2 ms, 4.5 s, 12.0 min, 3.4 h, 5.0 d."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for unit, length, limit in (("s", 1.0, 120), ("min", 60.0, 7200), ("h", 3600.0, 172800)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:,.1f} d"


def timestamp(time_us: int | None) -> str:
    """A time in microseconds since 1970 as 2026-05-01 14:30:00 UTC; None as "-"."""
    if time_us is None:
        return "-"
    return datetime.fromtimestamp(time_us / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def printable(text: str) -> str:
    """`text` as one line, with control characters escaped: a name or a message may contain some, and must not control the
    terminal.
    """
    return "".join(c if is_visible(c) else repr(c)[1:-1] for c in text)
