"""Flattens a delta: it gets a file with all of its cells, and has no parent any more."""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import replace

from llama_ckpt import formats
from llama_ckpt.checkpoints import budget as admission
from llama_ckpt.checkpoints.inputs import SaveOptions
from llama_ckpt.checkpoints.read import Cells, stored_cells
from llama_ckpt.checkpoints.register import discard_unregistered, row_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import marks, prefixes, rows
from llama_ckpt.errors import (
    CommitOutcomeUnknown,
    Conflict,
    DatabaseUnavailable,
    LlamaCkptError,
    StoreUnavailable,
    UnsafePath,
)
from llama_ckpt.fingerprint import TokenIds, links_of
from llama_ckpt.formats import container
from llama_ckpt.values import Checkpoint, NewCheckpoint

log = logging.getLogger("llama_ckpt")


def flatten(context: RegistryContext, row: Checkpoint) -> None:
    """As `Registry.flatten`, for a row. The new file is written and durable first, then the row names it, then the old file is
    removed. Interrupted, the row is as it was or flattened, and at most a file without a row is left for gc.
    """
    context.require_store()
    with stored_cells(context, row) as (cells, file):
        head, header = whole_file(row, cells, file)
        options = SaveOptions(label=row.label, prefill_ms=row.prefill_ms)
        new = row_of(
            header,
            checkpoint_id=uuid.uuid4().hex,
            model_name=row.model_name,
            memory_kind=row.memory_kind,
            token_ids=cells.token_ids,
            options=options,
        )
        with admission.admitted(context, new):
            try:
                context.store.write(new.id, head, cells.state)
                _name(context, row, new, cells.token_ids)
            except CommitOutcomeUnknown:  # the row may name either file; the other one is left for gc
                if _path_now(context, row) != new.file_path:
                    raise
            except LlamaCkptError:
                with contextlib.suppress(StoreUnavailable):
                    context.store.remove(new.file_path)
                raise
            except BaseException:  # Ctrl-C, which may have come after the commit
                discard_unregistered(context, new)
                raise
    context.hook("flattened")
    try:
        context.store.remove(row.file_path)  # nothing, for a row that had no file
    except (StoreUnavailable, UnsafePath) as error:
        log.warning("a file that no row names is left for gc to collect: %s", error)


def _path_now(context: RegistryContext, row: Checkpoint) -> str | None:
    """The file that a row names; None if the database cannot be read."""
    with contextlib.suppress(DatabaseUnavailable):  # the caller raises the failure that led here
        now = context.database.query(lambda db: rows.by_number(db, row.ckpt_no))
        return None if now is None else now.file_path
    return None


def whole_file(row: Checkpoint, cells: Cells, file: formats.CheckpointFile) -> tuple[bytes, container.Header]:
    """The bytes before the payload of a file with all cells of a checkpoint, and its header. `file` is the last of the files that
    contain them now.
    """
    header = replace(
        file.contents.header,
        flags=file.contents.header.flags & ~container.FLAG_DELTA,
        seq_len=row.n_tokens,
        start_token=0,
        input_hash=row.input_hash,
    )
    metadata = {k: v for k, v in file.contents.metadata.items() if k not in ("parent", "tokens_before")}
    if row.parent_no is not None:
        metadata["checkpoint"] = row.id  # deltas name it by this id, and the new file has another name
    return container.encode_head(header, metadata, cells.token_ids, cells.state)


def _name(context: RegistryContext, row: Checkpoint, new: NewCheckpoint, token_ids: TokenIds) -> None:
    """Lets the row name the new file, and links the blocks that its parent linked until now."""
    linked = links_of(row, token_ids, context.block_size)
    links = links_of(replace(row, start_token=0), token_ids, context.block_size)
    context.store.touch(new.file_path)
    with context.database.write() as db:
        if not marks.replace_file(db, row, new):
            raise Conflict(what=f"checkpoint {row.id} went STALE or was flattened meanwhile")
        prefixes.link(db, [link for link in links if link not in linked])
        context.hook("named")
        if context.store.size(new.file_path) != new.file_size:
            raise StoreUnavailable(path=new.file_path, reason="it was collected while it was written; flatten again")
