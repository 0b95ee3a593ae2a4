"""Counts the bytes that the program checks with CRC-32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llama_ckpt.formats import container


@contextmanager
def counted_crc_bytes() -> Iterator[list[int]]:
    """The size of each buffer whose CRC-32 is computed meanwhile, in bytes."""
    sizes: list[int] = []
    real = container.crc32

    def counting(data, value=0):
        sizes.append(memoryview(data).nbytes)
        return real(data, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "crc32", counting)
        yield sizes


def crc_bytes_of_one_check(data: bytes) -> int:
    """The bytes that one verified opening of a LLAM file checks."""
    from llama_ckpt import formats

    with counted_crc_bytes() as sizes:
        formats.open_checkpoint(memoryview(data), "the file")
    return sum(sizes)
