"""Numbers as people read them."""

from __future__ import annotations

import unicodedata


def is_visible(character: str) -> bool:
    """Whether it is printed as it is: no control character and no broken text. Blanks of every script are."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def size(n_bytes: float) -> str:
    """Bytes for people: 12 B, 3.4 KiB, 92.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def count(n: int, noun: str) -> str:
    """How many of something: 1 file, 2 files."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
