"""`LLAM` version 1: what can be known of it. Pure.

Files of that name and version were written by tools before this one, some with the magic's bytes turned ("MALL") and some
with a version in the other byte order. Nothing but magic and version is known of the layout behind them: no field says whose
weights, which tokens or where the payload ends, so there is nothing that a reader could hold the bytes to. They are told
apart from all else, and never restored.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats.container import MAX_PADDING

MAGICS = {b"LLAM": "little", b"MALL": "big"}
VERSION = 1
_HEAD = 8

WHY_NEVER = (
    "LLAM version 1 says neither of which weights nor of which tokens its bytes are, and has no checksum: "
    "nothing can be verified, so it is never restored. Save the input again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyFile:
    """A LLAM version 1 file: "little" or "big" for the order of the magic's and of the version's bytes."""

    padding: int
    magic_order: str
    version_order: str
    n_bytes_behind: int


def read(view: memoryview, name: str) -> LegacyFile | None:
    """What is known of a LLAM version 1 file; None for what is not one (other magic, or another version).

    Raises:
        CorruptFile: the magic in turned order with another version than 1, or nothing behind the head.
    """
    start = bytes(view[: MAX_PADDING + _HEAD])
    padding = len(start) - len(start.lstrip(b"\0"))
    magic = start[padding : padding + 4]
    if magic not in MAGICS or padding > MAX_PADDING:
        return None
    raw = start[padding + 4 : padding + _HEAD]
    order = {VERSION.to_bytes(4, "little"): "little", VERSION.to_bytes(4, "big"): "big"}.get(raw)
    if order is None:
        if magic == b"LLAM":  # version 2 or later, or damage: container.py says which
            return None
        reason = f"magic MALL with version bytes {raw.hex(' ')}: only version 1 was written so"
        raise CorruptFile(path=name, check="Header", reason=reason)
    behind = len(view) - padding - _HEAD
    if behind == 0:
        raise CorruptFile(path=name, check="Header", reason="LLAM version 1 with nothing behind magic and version")
    return LegacyFile(padding=padding, magic_order=MAGICS[magic], version_order=order, n_bytes_behind=behind)
