"""LLAM version 1: told apart in every byte order, and never restored."""

from __future__ import annotations

import itertools

import pytest

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import legacy

BEHIND = bytes(range(200))


def read(data: bytes) -> legacy.LegacyFile | None:
    return legacy.read(memoryview(data), "the file")


@pytest.mark.parametrize("padding", range(9))
@pytest.mark.parametrize(
    ("magic", "version", "orders"),
    [
        (b"LLAM", b"\1\0\0\0", ("little", "little")),
        (b"LLAM", b"\0\0\0\1", ("little", "big")),
        (b"MALL", b"\1\0\0\0", ("big", "little")),
        (b"MALL", b"\0\0\0\1", ("big", "big")),
    ],
)
def test_a_file_of_version_one_is_known_in_either_order_of_magic_and_version(magic, version, orders, padding):
    data = bytes(padding) + magic + version + BEHIND
    found = read(data)
    assert (found.magic_order, found.version_order) == orders
    assert (found.padding, found.n_bytes_behind) == (padding, len(BEHIND))
    told = formats.identify(memoryview(data), "the file")
    assert (told.format, told.version, told.byte_order, told.padding) == ("LLAM", 1, orders[1], padding)
    assert (told.whole, told.restorable) == (False, False)
    assert "never restored" in told.why_not
    assert ("different byte orders" in " ".join(told.notes)) == (orders[0] != orders[1])


def test_a_file_of_version_one_is_refused_by_the_reader_of_checkpoints():
    for magic, version in itertools.product((b"LLAM", b"MALL"), (b"\1\0\0\0", b"\0\0\0\1")):
        with pytest.raises(CorruptFile):
            formats.open_checkpoint(memoryview(magic + version + BEHIND), "the file")


def test_nine_zeros_are_too_many():
    assert read(bytes(9) + b"LLAM\1\0\0\0" + BEHIND) is None


@pytest.mark.parametrize("version", [b"\2\0\0\0", b"\0\0\0\2", b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_another_version_under_the_turned_magic_is_refused_with_its_bytes(version):
    with pytest.raises(CorruptFile, match=f"MALL with version bytes {version.hex(' ')}"):
        read(b"MALL" + version + BEHIND)
    told = formats.identify(memoryview(b"MALL" + version + BEHIND), "the file")
    assert (told.format, told.restorable) == ("LLAM", False)


@pytest.mark.parametrize("data", [b"LLAM\1\0\0\0", b"\0\0\0MALL\0\0\0\1"])
def test_magic_and_version_with_nothing_behind_are_no_file(data):
    with pytest.raises(CorruptFile, match="nothing behind"):
        read(data)


@pytest.mark.parametrize("data", [b"", b"LLA", b"LLAM\2\0\0\0" + BEHIND, b"LLAM", b"qsgg\1\0\0\0" + BEHIND])
def test_what_is_not_version_one_is_left_to_the_other_readers(data):
    assert read(data) is None


@pytest.mark.parametrize("data", [b"MALL", b"MALL\0\0\0"])
def test_a_turned_magic_that_ends_early_is_refused(data):
    with pytest.raises(CorruptFile, match="MALL"):
        read(data)
