"""`LLAM` version 1: recognised and never restored. Pure.

Tools that are older than this program wrote files with that name and version, some with the bytes of the magic reversed
("MALL") and some with the version in the other byte order. Only magic and version are known of their layout. No field says
which weights or tokens the bytes belong to or where the payload ends, so a reader has nothing to verify them against.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats.container import MAGIC
from llama_ckpt.formats.magic import MAGIC_BYTES, padded_magic
from llama_ckpt.values import CheckName

MAGICS = {MAGIC: "little", MAGIC[::-1]: "big"}
VERSION = 1
_VERSION_BYTES = 4
_BYTE_ORDERS = {VERSION.to_bytes(_VERSION_BYTES, "little"): "little", VERSION.to_bytes(_VERSION_BYTES, "big"): "big"}

WHY_NEVER = (
    "LLAM version 1 says neither of which weights nor of which tokens its bytes are, and has no checksum: "
    "nothing can be verified, so it is never restored. Save the input again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyFile:
    """A LLAM version 1 file. The orders are "little" or "big": that of the magic's bytes and that of the version's."""

    padding: int
    magic_order: str
    version_order: str
    n_bytes_behind: int


def read(view: memoryview, name: str) -> LegacyFile | None:
    """What is known of a LLAM version 1 file; None for a file with another magic or another version.

    Raises:
        CorruptFile: the magic is reversed and the version is not 1, or nothing follows the version.
    """
    start = padded_magic(view, MAGICS)
    if start is None:
        return None
    magic, padding = start
    version_at = padding + MAGIC_BYTES
    raw = bytes(view[version_at : version_at + _VERSION_BYTES])
    order = _BYTE_ORDERS.get(raw)
    if order is None:
        if magic == MAGIC:  # version 2 or later, or damage: container.py says which
            return None
        reason = f"magic MALL with version bytes {raw.hex(' ')}: only version 1 was written so"
        raise CorruptFile(path=name, check=CheckName.HEADER, reason=reason)
    behind = len(view) - version_at - _VERSION_BYTES
    if behind == 0:
        reason = "LLAM version 1 with nothing behind magic and version"
        raise CorruptFile(path=name, check=CheckName.HEADER, reason=reason)
    return LegacyFile(padding=padding, magic_order=MAGICS[magic], version_order=order, n_bytes_behind=behind)
