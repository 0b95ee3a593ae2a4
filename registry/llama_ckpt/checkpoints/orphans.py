"""LLAM files without a row: the row that each is to have, by its own header and metadata; a delta after what it stands on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from llama_ckpt import formats
from llama_ckpt.checkpoints.register import SaveOptions, clean_name, row_of
from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import CorruptFile, NotFound
from llama_ckpt.fingerprint import TokenIds, tokens_hash
from llama_ckpt.values import Checkpoint, MemoryKind, NewCheckpoint, RegisteredModel, Status

Result = TypeVar("Result")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A LLAM file of which every byte was checked: the row that it is to have, its model, and all of its token ids."""

    new: NewCheckpoint
    model: RegisteredModel
    token_ids: TokenIds


NONE: Mapping[str, FoundFile] = MappingProxyType({})


def found_in_store(context: RegistryContext, path: str, planned: Mapping[str, FoundFile] = NONE) -> FoundFile:
    """The row that a file of our own store had, after every byte of it was checked. `planned` as `found_file`.

    Raises:
        CorruptFile, NotFound: as `found_file`.
        FileMissing, UnsafePath, StoreUnavailable: it cannot be read.
    """
    with context.store.map(path) as view:
        file = formats.open_checkpoint(view, path)
        stem = path.rpartition("/")[2].partition(".")[0]
        found = found_file(context, file, path, free_id(context, file, stem) or stem, SaveOptions(), planned)
    context.hook("checked")
    return replace(found, new=replace(found.new, file_path=path))


def found_file(
    context: RegistryContext,
    file: formats.CheckpointFile,
    name: str,
    checkpoint_id: str,
    options: SaveOptions,
    planned: Mapping[str, FoundFile] = NONE,
) -> FoundFile:
    """The row that a LLAM file is to have under an id, by its header and metadata. A delta names its parent by its id, which no
    other checkpoint ever has, in any registry. `planned` are files by id that would be registered before it, in a dry run.

    Raises:
        CorruptFile: it is of a kind of memory not known here, or a delta that does not go on from what it names.
        NotFound: it is a delta, and what it stands on is not ACTIVE here.
        FileMissing, UnsafePath, StoreUnavailable, DatabaseUnavailable: what it stands on cannot be read.
    """
    header, metadata = file.contents.header, file.contents.metadata
    model_name = clean_name(str(metadata.get("model_name") or "unnamed"))
    kind = str(metadata.get("memory_kind", "full"))
    if kind not in list(MemoryKind):
        raise CorruptFile(path=name, check="Structure", reason=f"it is of no kind of memory known here: {kind[:40]}")
    token_ids = file.contents.token_ids
    place: dict[str, Any] = {}
    if start := header.start_token:
        parent, before = _parent(context, file, name, planned)
        noted = metadata.get("tokens_before")  # nothing by versions that did not note it
        if noted is not None and noted != tokens_hash(before[:start]).hex():
            reason = f"its first {start} tokens are others than those of checkpoint {parent.id}"
            raise CorruptFile(path=name, check="Structure", reason=reason)
        token_ids = np.concatenate([before[:start], token_ids])
        number = parent.ckpt_no if isinstance(parent, Checkpoint) else None
        place = {"start_token": start, "parent_no": number, "extends_no": number if start == parent.n_tokens else None}
    new = replace(row_of(header, checkpoint_id, model_name, MemoryKind(kind), token_ids, options), **place)
    model = RegisteredModel(fingerprint=file.fingerprint, model_name=model_name, dimensions=file.dimensions)
    return FoundFile(new=new, model=model, token_ids=token_ids)


def _parent(
    context: RegistryContext, file: formats.CheckpointFile, name: str, planned: Mapping[str, FoundFile]
) -> tuple[Checkpoint | NewCheckpoint, TokenIds]:
    """What a delta stands on, with its token ids."""
    header, parent_id = file.contents.header, _id_in(file, "parent")
    if parent_id is None:
        raise CorruptFile(path=name, check="Structure", reason="it is a delta, and its metadata names no parent")
    parent: Checkpoint | NewCheckpoint
    if (row := active(context, parent_id)) is not None:
        parent, token_ids = row, token_ids_of(context, row)
    elif parent_id in planned:
        parent, token_ids = planned[parent_id].new, planned[parent_id].token_ids
    else:
        hint = f"{name} is a delta and stands on it: bring that back first, or adopt what export --format llam writes."
        raise NotFound(what="ACTIVE checkpoint", name=parent_id, hint=hint)
    if parent.fingerprint != header.fingerprint or not parent.start_token < header.start_token <= parent.n_tokens:
        reason = f"it begins at token {header.start_token}, and does not go on from checkpoint {parent.id}"
        raise CorruptFile(path=name, check="Structure", reason=reason)
    return parent, token_ids


def _id_in(file: formats.CheckpointFile, field: str) -> str | None:
    """A checkpoint's id that stands in the metadata."""
    found = file.contents.metadata.get(field)
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def free_id(context: RegistryContext, file: formats.CheckpointFile, name: str) -> str | None:
    """The id that a file has by its metadata, if it was flattened or exported under one, else by its name (without suffixes);
    None where it has none, or a row has it.
    """
    found = _id_in(file, "checkpoint") or name
    if not _ID.fullmatch(found) or context.database.query(lambda db: rows.get(db, found)) is not None:
        return None
    return found


def active(context: RegistryContext, checkpoint_id: str) -> Checkpoint | None:
    """The ACTIVE row of an id."""
    row = context.database.query(lambda db: rows.get(db, checkpoint_id))
    return row if row is not None and row.status is Status.ACTIVE else None


def after_their_parents(
    first: Iterable[Result],
    waits_for: Callable[[Result], str | None],
    is_there: Callable[[str], bool],
    again: Callable[[Result], Result],
) -> Iterator[Result]:
    """Results of work on files in any order, in which some deltas may have come before what they stand on. `waits_for` says the
    id that a result lacks, or None; those come last, each done `again` as soon as it `is_there`.
    """
    waiting: list[tuple[str, Result]] = []
    for result in first:
        if (needed := waits_for(result)) is None:
            yield result
        else:
            waiting.append((needed, result))
    while ready := {needed for needed, _ in waiting if is_there(needed)}:
        for needed, result in waiting:
            if needed in ready:
                yield again(result)
        waiting = [pair for pair in waiting if pair[0] not in ready]
    yield from (result for _, result in waiting)
