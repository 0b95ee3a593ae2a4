"""How a file begins: the formats that are known by their magic, and the zero bytes that may precede it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

MAGIC_BYTES = 4
MAX_PADDING = 8


class FileFormat(StrEnum):
    """The format of a file. `STATE` is the bare result of `llama_state_seq_get_data`, without the head of a file."""

    LLAM = "LLAM"
    GGSQ = "ggsq"
    GGSN = "ggsn"
    STATE = "state"
    UNKNOWN = "unknown"


def padded_magic(view: memoryview, magics: Collection[bytes]) -> tuple[bytes, int] | None:
    """The magic, one of `magics`, and the number of zero bytes before it (0 to 8); None if none of them follows the zeros."""
    start = bytes(view[: MAX_PADDING + MAGIC_BYTES])
    padding = len(start) - len(start.lstrip(b"\0"))
    magic = start[padding : padding + MAGIC_BYTES]
    return (magic, padding) if magic in magics else None
