"""Real states from tests/samples, as `llama_state_seq_get_data` gives them: the file's body behind magic and sequence id."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SAMPLES = Path(__file__).parents[1] / "samples"
F16 = "ggsq-v3-f16.bin"
F16_FLASH = "ggsq-v3-f16-flash.bin"
Q8_FLASH = "ggsq-v3-q8-flash.bin"
V2 = "ggsq-v2-f16.bin"
V4_TWO_STREAMS = "ggsq-v4-llama-server-2streams.bin"


def read(name: str) -> tuple[np.ndarray, bytes]:
    """Token ids, and the sequence state of them."""
    data = (SAMPLES / name).read_bytes()
    _magic, version, count = struct.unpack_from("<III", data)
    words = np.frombuffer(data, dtype="<i4", count=count, offset=12)
    if version >= 4:  # packed: -1, version 1, count, ids, media entries
        words = words[3 : 3 + int(words[2])]
    state = struct.pack("<Ii", 0xAF143CD8, 0) + data[12 + 4 * count :]
    return words.astype(np.int32), state
