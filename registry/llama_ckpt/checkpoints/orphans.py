"""LLAM files without a row: the row that each one gets, from its header and metadata. A delta needs its parent's row first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from llama_ckpt import formats
from llama_ckpt.checkpoints.inputs import SaveOptions, clean_name
from llama_ckpt.checkpoints.register import row_of
from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import CorruptFile, MissingParent
from llama_ckpt.fingerprint import TokenIds, tokens_hash
from llama_ckpt.values import CheckName, Checkpoint, MemoryKind, NewCheckpoint, RegisteredModel, Status

Item = TypeVar("Item")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrableFile:
    """A LLAM file of which every byte was checked: the row that it gets, its model, and all of its token ids, including those
    before a delta's `start_token`.
    """

    new: NewCheckpoint
    model: RegisteredModel
    token_ids: TokenIds


NONE_PLANNED: Mapping[str, RegistrableFile] = MappingProxyType({})


class WaitingDeltas(Generic[Item]):
    """Deltas whose parents have no ACTIVE row yet, in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Item]] = []

    def add(self, parent_id: str, item: Item) -> None:
        """Adds a delta that needs the checkpoint `parent_id`."""
        self._waiting.append((parent_id, item))

    def take_ready(self, has_row: Callable[[str], bool]) -> list[Item]:
        """Removes and returns the deltas whose parent has a row by now. Empty if no parent was registered since the last call."""
        ready = {parent_id for parent_id, _ in self._waiting if has_row(parent_id)}
        items = [item for parent_id, item in self._waiting if parent_id in ready]
        self._waiting = [(parent_id, item) for parent_id, item in self._waiting if parent_id not in ready]
        return items

    def take_rest(self) -> list[Item]:
        """Removes and returns all of them."""
        items = [item for _, item in self._waiting]
        self._waiting = []
        return items


def read_orphan(
    context: RegistryContext, path: str, planned: Mapping[str, RegistrableFile] = NONE_PLANNED
) -> RegistrableFile:
    """Reads a file in the store that has no row, at its relative path, and derives the row that it had. For `planned`, see
    `registrable`.

    Raises:
        CorruptFile, MissingParent: as `registrable`.
        FileMissing, UnsafePath, StoreUnavailable: the file cannot be read.
    """
    with context.store.map(path) as view:
        file = formats.open_checkpoint(view, path)
        stem = path.rpartition("/")[2].partition(".")[0]
        checkpoint_id = free_id(context, file, stem) or stem
        orphan = registrable(context, file, path, checkpoint_id=checkpoint_id, options=SaveOptions(), planned=planned)
    context.hook("checked")
    return replace(orphan, new=replace(orphan.new, file_path=path))


def registrable(
    context: RegistryContext,
    file: formats.CheckpointFile,
    name: str,
    *,
    checkpoint_id: str,
    options: SaveOptions,
    planned: Mapping[str, RegistrableFile] = NONE_PLANNED,
) -> RegistrableFile:
    """The row of a LLAM file under an id, derived from its header and metadata. A delta names its parent by id; ids are unique
    across registries. `planned` are files by id that count as registered: those of a dry run. `name` is the file's name in
    messages.

    Raises:
        CorruptFile: the kind of memory is unknown, or the file is a delta that does not fit the parent that it names.
        MissingParent: the file is a delta, and its parent is not ACTIVE here.
        FileMissing, UnsafePath, StoreUnavailable, DatabaseUnavailable: the parent cannot be read.
    """
    header = file.contents.header
    model_name = clean_name(str(file.contents.metadata.get("model_name") or "unnamed"))
    start, token_ids = header.start_token, file.contents.token_ids
    parent: Checkpoint | NewCheckpoint | None = None
    if start:
        parent, parent_ids = _parent(context, file, name, planned)
        token_ids = np.concatenate([_shared_prefix(file, name, parent, parent_ids), token_ids])
    new = row_of(
        header,
        checkpoint_id=checkpoint_id,
        model_name=model_name,
        memory_kind=_memory_kind(file, name),
        token_ids=token_ids,
        options=options,
    )
    if parent is not None:
        parent_no = parent.ckpt_no if isinstance(parent, Checkpoint) else None
        extends_no = parent_no if start == parent.n_tokens else None
        new = replace(new, start_token=start, parent_no=parent_no, extends_no=extends_no)
    model = RegisteredModel(fingerprint=file.fingerprint, model_name=model_name, dimensions=file.dimensions)
    return RegistrableFile(new=new, model=model, token_ids=token_ids)


def _memory_kind(file: formats.CheckpointFile, name: str) -> MemoryKind:
    kind = str(file.contents.metadata.get("memory_kind", "full"))
    if kind not in list(MemoryKind):
        raise _corrupt(name, f"it is of no kind of memory known here: {kind[:40]}")
    return MemoryKind(kind)


def _parent(
    context: RegistryContext, file: formats.CheckpointFile, name: str, planned: Mapping[str, RegistrableFile]
) -> tuple[Checkpoint | NewCheckpoint, TokenIds]:
    """The parent of a delta, with its token ids."""
    header, parent_id = file.contents.header, _id_in(file, "parent")
    if parent_id is None:
        raise _corrupt(name, "it is a delta, and its metadata names no parent")
    parent: Checkpoint | NewCheckpoint
    if (row := active_row(context, parent_id)) is not None:
        parent, token_ids = row, token_ids_of(context, row)
    elif parent_id in planned:
        parent, token_ids = planned[parent_id].new, planned[parent_id].token_ids
    else:
        parent_first = f"{name} is a delta, and that is its parent: bring the parent back first"
        hint = f"{parent_first}, or adopt what export --format llam writes."
        raise MissingParent(what="ACTIVE checkpoint", name=parent_id, hint=hint)
    if parent.fingerprint != header.fingerprint or not parent.start_token < header.start_token <= parent.n_tokens:
        raise _corrupt(name, f"it begins at token {header.start_token}, and does not extend checkpoint {parent.id}")
    return parent, token_ids


def _shared_prefix(
    file: formats.CheckpointFile, name: str, parent: Checkpoint | NewCheckpoint, parent_ids: TokenIds
) -> TokenIds:
    """The parent's tokens before a delta's `start_token`, after they were compared with the hash in the delta's metadata."""
    start = file.contents.header.start_token
    recorded = file.contents.metadata.get("tokens_before")  # None in files of versions that did not record it
    if recorded is not None and recorded != tokens_hash(parent_ids[:start]).hex():
        raise _corrupt(name, f"its first {start} tokens are others than those of checkpoint {parent.id}")
    return parent_ids[:start]


def _corrupt(name: str, reason: str) -> CorruptFile:
    return CorruptFile(path=name, check=CheckName.STRUCTURE, reason=reason)


def _id_in(file: formats.CheckpointFile, field: str) -> str | None:
    """A checkpoint's id in a field of the metadata."""
    value = file.contents.metadata.get(field)
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


def free_id(context: RegistryContext, file: formats.CheckpointFile, stem: str) -> str | None:
    """The id that a file brings along: that in its metadata, which flattened and exported files have, else its name without
    suffixes (`stem`). None if that is no id, or a row has it already.
    """
    checkpoint_id = _id_in(file, "checkpoint") or stem
    if not _ID.fullmatch(checkpoint_id) or context.database.query(lambda db: rows.get(db, checkpoint_id)) is not None:
        return None
    return checkpoint_id


def active_row(context: RegistryContext, checkpoint_id: str) -> Checkpoint | None:
    """The row of an id if it is ACTIVE."""
    row = context.database.query(lambda db: rows.get(db, checkpoint_id))
    return row if row is not None and row.status is Status.ACTIVE else None
