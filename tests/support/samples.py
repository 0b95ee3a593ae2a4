"""Real states from tests/samples, as `llama_state_seq_get_data` gives them: the file's body behind magic and sequence id."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from llama_ckpt.formats.kv import state as kv_state

SAMPLES = Path(__file__).parents[1] / "samples"
F16 = "ggsq-v3-f16.bin"
F16_FLASH = "ggsq-v3-f16-flash.bin"
Q8_FLASH = "ggsq-v3-q8-flash.bin"
V2 = "ggsq-v2-f16.bin"
V4_TWO_STREAMS = "ggsq-v4-llama-server-2streams.bin"
CONTEXT_V9 = "ggsn-v9-f16.bin"
CONTEXT_V10 = "ggsn-v10-f16.bin"
V4_ROTATED = "ggsq-v4-llama-server-q8-rotated.bin"  # the tokens of Q8_FLASH
CONTEXT_V11 = "ggsn-v11-llama-cli.bin"  # three tokens, two cells
# Of models with random weights (support/tiny_models.py), by the engine of llama-cpp-python 0.3.36.
RECURRENT = "ggsq-v3-tiny-recurrent.bin"
HYBRID = "ggsq-v3-tiny-hybrid.bin"
POSITIONS = "ggsq-v3-tiny-positions.bin"  # cells with 2-D positions
SWA = "ggsq-v3-tiny-swa.bin"  # the window has moved on
SWA_SHORT = "ggsq-v3-tiny-swa-short.bin"
THREE_STREAMS = "ggsn-v10-tiny-3streams.bin"  # sequence 0 in stream 0, 2 in stream 2
SHARED = "ggsn-v10-tiny-shared.bin"  # sequences 0 and 1 share four cells


def data(name: str) -> bytes:
    """All bytes of a sample."""
    return (SAMPLES / name).read_bytes()


def all_names() -> list[str]:
    """The file names of all samples."""
    return sorted(path.name for path in SAMPLES.glob("*.bin"))


def read(name: str) -> tuple[np.ndarray, bytes]:
    """Token ids, and the sequence state of them."""
    data = (SAMPLES / name).read_bytes()
    _magic, version, count = struct.unpack_from("<III", data)
    words = np.frombuffer(data, dtype="<i4", count=count, offset=12)
    if version >= 4:  # packed: -1, version 1, count, ids, media entries
        words = words[3 : 3 + int(words[2])]
    state = struct.pack("<Ii", 0xAF143CD8, 0) + data[12 + 4 * count :]
    return words.astype(np.int32), state


def longer(name: str, n_tokens: int) -> tuple[np.ndarray, bytes]:
    """Token ids and a state of `n_tokens` tokens, whose rows are those of a sample over and over. V is not transposed in it."""
    ids, state = read(name)
    parsed = kv_state.parse(memoryview(state))
    assert not parsed.v_transposed
    which = np.arange(n_tokens) % parsed.n_cells
    cells = np.stack([np.arange(n_tokens), np.ones(n_tokens), np.zeros(n_tokens)], axis=1).astype("<i4")
    made = [struct.pack("<IiII", kv_state.IO_MAGIC, 0, 1, n_tokens), cells.tobytes()]
    made.append(struct.pack("<II", 0, parsed.n_layer))
    if parsed.rotation_words:
        made.append(struct.pack("<II", *parsed.rotation_words))
    for rows in (*parsed.k, *parsed.v):
        made.append(struct.pack("<iQ", rows.ggml_type, rows.row_bytes))
        size = parsed.n_cells * rows.row_bytes
        of_sample = np.frombuffer(state, dtype=np.uint8, count=size, offset=rows.offset)
        made.append(of_sample.reshape(parsed.n_cells, rows.row_bytes)[which].tobytes())
    return ids[which], b"".join(made)
