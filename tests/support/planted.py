"""A checkpoint's file with another payload in it: what other versions of llama.cpp wrote, or what was damaged before the save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import sqlalchemy as sa

from llama_ckpt import formats
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.formats import container
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import pieces as kv_pieces


def replant(registry, row, payload, **metadata):
    """Writes `payload` into the file of `row`, with all sums right, in file and row; `metadata` changes the file's."""
    path = registry.store.root / row.file_path
    file = formats.open_checkpoint(memoryview(path.read_bytes()), row.file_path)
    contents = file.contents
    told = {**contents.metadata, **metadata}
    head, full = container.encode_head(contents.header, told, contents.token_ids, memoryview(payload))
    path.write_bytes(head + bytes(payload))
    values = {"file_size": path.stat().st_size, "payload_crc32": full.payload_crc32}
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def payload_of(registry, row) -> bytes:
    """The payload of a row's file."""
    data = memoryview((registry.store.root / row.file_path).read_bytes())
    return bytes(formats.open_checkpoint(data, row.file_path).contents.payload)


def as_dialect(state, dialect, rotation):
    """A state as an engine of that dialect writes it, also one of before streams, and with an extension of its cells."""
    if dialect.n_stream and not dialect.cell_extension:
        return kv_edit.to_dialect(memoryview(state), dialect, rotation=rotation, now=rotation)
    _, pieces = kv_pieces.take_apart(memoryview(state))
    room = np.zeros((len(pieces.caches[0].positions), dialect.cell_extension // 4), dtype=np.int32)
    caches = [replace(c, n_stream=dialect.n_stream, cells=np.hstack([c.cells, room])) for c in pieces.caches]
    return kv_pieces.assemble(replace(pieces, extension=dialect.cell_extension, caches=tuple(caches)))
