"""Flattening: a delta gets a file with all of its cells, and stands on nothing any more."""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import replace

from llama_ckpt import admission, formats
from llama_ckpt.db import prefixes, queries
from llama_ckpt.errors import Conflict, LlamaCkptError, StoreFull, StoreUnavailable, UnsafePath
from llama_ckpt.files import path_of
from llama_ckpt.fingerprint import TokenIds, links_of
from llama_ckpt.formats import container
from llama_ckpt.parts import Parts
from llama_ckpt.payloads import Cells, Reading, stored_cells
from llama_ckpt.values import Checkpoint, NewCheckpoint

log = logging.getLogger("llama_ckpt")


def flatten(parts: Parts, row: Checkpoint) -> None:
    """As `Registry.flatten`, for a row. The new file is written and durable first, then the row names it, then the old file goes:
    interrupted, the row is as it was or whole, and at most a file without a row is left for gc.
    """
    parts.require_store()
    with stored_cells(parts, row, Reading(row)) as (cells, file):
        new, head = _whole(row, cells, file)
        granted = admission.admit(parts, new)
        if granted.refused is not None:
            raise StoreFull(needed=new.file_size, path=parts.store.root, reason=granted.refused)
        try:
            parts.store.write(new.id, head, cells.state)
            _name(parts, row, new, cells.token_ids)
        except LlamaCkptError:
            with contextlib.suppress(StoreUnavailable):
                parts.store.remove(new.file_path)
            raise
        finally:
            admission.release(parts, granted)
    parts.hook("flattened")
    try:
        parts.store.remove(row.file_path)  # nothing, for a row that had no file
    except (StoreUnavailable, UnsafePath) as error:
        log.warning("a file that no row names is left for gc to collect: %s", error)


def _whole(row: Checkpoint, cells: Cells, file: formats.CheckpointFile) -> tuple[NewCheckpoint, bytes]:
    """What the row is to be, and the bytes of its file before the payload."""
    header = replace(
        file.contents.header,
        flags=file.contents.header.flags & ~container.FLAG_DELTA,
        seq_len=row.n_tokens,
        start_token=0,
        input_hash=row.input_hash,
    )
    metadata = {key: value for key, value in file.contents.metadata.items() if key != "parent"}
    head, full = container.encode_head(header, metadata, cells.token_ids, cells.state)
    file_id = uuid.uuid4().hex
    new = NewCheckpoint(
        id=file_id,
        model_name=row.model_name,
        fingerprint=row.fingerprint,
        input_hash=row.input_hash,
        tokens_hash=row.tokens_hash,
        n_tokens=row.n_tokens,
        memory_kind=row.memory_kind,
        file_path=path_of(file_id),
        file_size=full.payload_offset + full.payload_size,
        payload_crc32=full.payload_crc32,
        prefill_ms=row.prefill_ms,
        expires_in_s=None,
        label=row.label,
    )
    return new, head


def _name(parts: Parts, row: Checkpoint, new: NewCheckpoint, token_ids: TokenIds) -> None:
    """The row names the new file, and links the blocks that were its parent's until now."""
    links = links_of(replace(row, start_token=0), token_ids, parts.block_size)
    parts.store.touch(new.file_path)
    with parts.database.write() as db:
        if not queries.make_whole(db, row, new):
            raise Conflict(what=f"checkpoint {row.id} went STALE or was flattened meanwhile")
        prefixes.link(db, [link for link in links if link.n_tokens <= row.start_token])
        parts.hook("named")
        if parts.store.size(new.file_path) != new.file_size:
            raise StoreUnavailable(path=new.file_path, reason="it was collected while it was written; flatten again")
