"""A file that is opened once gives what it is, and its content or the error of the check that failed."""

from __future__ import annotations

from support import samples
from support.whole import checkpoint_bytes

from llama_ckpt import formats
from llama_ckpt.errors import CorruptFile
from llama_ckpt.formats import FileFormat
from llama_ckpt.formats.engine_files import EngineFile

BEHIND = bytes(range(200))


def test_an_opened_file_gives_its_content_or_the_error_of_the_check_that_failed():
    whole = checkpoint_bytes()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    engine_file = samples.data(samples.F16)
    kinds = {
        whole: (FileFormat.LLAM, formats.CheckpointFile),
        damaged: (FileFormat.LLAM, CorruptFile),
        engine_file: (FileFormat.GGSQ, EngineFile),
        engine_file[:-1]: (FileFormat.GGSQ, CorruptFile),
        b"LLAM" + bytes([1, 0, 0, 0]) + BEHIND: (FileFormat.LLAM, type(None)),
        b"GGUF" + BEHIND: (FileFormat.UNKNOWN, type(None)),
    }
    for data, (kind, content) in kinds.items():
        opened = formats.open_file(memoryview(data), "the file")
        assert (opened.identified.format, type(opened.content or opened.damage)) == (kind, content)
        assert opened.identified == formats.identify(memoryview(data), "the file")


def test_the_error_of_a_damaged_file_does_not_keep_its_bytes():
    data = bytearray(checkpoint_bytes())
    data[-1] ^= 1
    opened = formats.open_file(memoryview(data), "the file")
    assert opened.damage is not None
    data.clear()  # a view of it that is still alive forbids this
