"""The architecture's name from the header of a model file (GGUF). Pure.

Source: ggml's docs/gguf.md. A file is: magic, u32 version, u64 number of tensors, u64 number of pairs, the pairs. A pair is a
string, a u32 type and a value.
"""

from __future__ import annotations

import struct

from llama_ckpt.errors import CorruptFile
from llama_ckpt.values import CheckName

_MAGIC = b"GGUF"
_ARCHITECTURE = b"general.architecture"
_STRING, _ARRAY = 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def architecture(view: memoryview, name: str) -> str:
    """The model's architecture, such as "llama". A ggsn file contains it.

    Raises:
        CorruptFile: the file is no GGUF, has a version before 2, is truncated, or names no architecture.
    """
    try:
        if bytes(view[:4]) != _MAGIC:
            raise ValueError(f"it begins with {bytes(view[:4]).hex(' ')}")
        version, _n_tensors, n_pairs = struct.unpack_from("<IQQ", view, 4)
        if version < 2:
            raise ValueError(f"it is of version {version}")
        at = 24
        for _ in range(n_pairs):
            key, at = _text(view, at)
            (kind,) = struct.unpack_from("<I", view, at)
            if key == _ARCHITECTURE and kind == _STRING:
                return _text(view, at + 4)[0].decode("ascii")
            at = _behind(view, at + 4, kind)
    except (struct.error, ValueError, OverflowError, RecursionError) as error:
        raise CorruptFile(path=name, check=CheckName.GGUF, reason=str(error)) from error
    raise CorruptFile(path=name, check=CheckName.GGUF, reason="it names no architecture")


def _text(view: memoryview, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", view, at)
    end = at + 8 + size
    if end > len(view):
        raise ValueError(f"a text of {size} bytes at byte {at} does not fit")
    return bytes(view[at + 8 : end]), end


def _behind(view: memoryview, at: int, kind: int) -> int:
    """The offset of the byte behind a value of type `kind` at byte `at`."""
    if kind == _STRING:
        return _text(view, at)[1]
    if kind != _ARRAY:
        return at + _size(kind)
    item, count = struct.unpack_from("<IQ", view, at)
    at += 12
    if item not in (_STRING, _ARRAY):
        return at + int(count) * _size(item)
    for _ in range(count):
        at = _behind(view, at, item)
    return at


def _size(kind: int) -> int:
    if kind not in _VALUE_BYTES:
        raise ValueError(f"a value of type {kind}, which GGUF has not")
    return _VALUE_BYTES[kind]
