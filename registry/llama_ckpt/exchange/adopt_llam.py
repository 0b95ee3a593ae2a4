"""Adopt LLAM files: copies and links into the store, and files of this store that have no row."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.checkpoints.budget import admitted
from llama_ckpt.checkpoints.orphans import RegistrableFile, free_id, read_orphan, registrable
from llama_ckpt.checkpoints.register import discard_unregistered, register, register_orphan
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import BadInput, Conflict, CorruptFile, FileMissing, MissingParent, UnsafePath
from llama_ckpt.exchange.adoption import Adoption, AdoptOptions, adoptable, adopted, already_registered
from llama_ckpt.exchange.duplicates import count_padding, find_registered
from llama_ckpt.formats import CheckpointFile, FileFormat
from llama_ckpt.store.store import path_of
from llama_ckpt.values import CheckName, Checkpoint, NewCheckpoint, Status


class LlamAdopter:
    """Adopts LLAM files as they are: each says which model and tokens it belongs to.

    `planned` has the files that a dry run would have registered, by id: the parents of later deltas may be among them.
    """

    def __init__(self, context: RegistryContext, options: AdoptOptions) -> None:
        self._context = context
        self._options = options
        self.planned: dict[str, RegistrableFile] = {}

    def orphan(self, path: Path, relative: str) -> Adoption:
        """A file under its own name in the store: a ghost gets its row, and stays where it is.

        Raises:
            BadInput: its row is STALE.
            CorruptFile, MissingParent, Incompatible, Conflict: it cannot get a row.
        """
        with self._context.database.read() as db:
            row = rows.by_path(db, relative)
        if row is not None and row.status is Status.ACTIVE:
            return already_registered(path, row)
        if row is not None:
            reason = f"its row is STALE ({row.stale_reason}); bring it back with: llama-ckpt unprune {row.id}"
            raise BadInput(what="file", value=str(path), reason=reason)
        orphan = read_orphan(self._context, relative, self.planned)
        new = replace(orphan.new, label=self._options.label)
        if duplicate := self._find_registered(new):
            return already_registered(path, duplicate)
        if self._options.dry_run:
            return self._plan(path, orphan)
        row = register_orphan(self._context, orphan.model, new, orphan.token_ids)
        return adopted(path, row, FileFormat.LLAM)

    def file(self, path: Path, view: memoryview, file: CheckpointFile) -> Adoption:
        """A file from elsewhere, mapped as `view` and verified: it is copied or linked into the store and gets a row. If it is
        interrupted, there is at most a file without a row in the store; the source is unchanged.

        Raises:
            BadInput: it is to be linked, and has padding or is on another file system.
            CorruptFile, MissingParent, Incompatible, Conflict: it cannot get a row; or it changed during the adoption.
            StoreFull, StoreUnavailable: it cannot be copied.
        """
        checkpoint_id = free_id(self._context, file, path.stem) or uuid.uuid4().hex
        options = self._options.save_options
        source = registrable(
            self._context, file, str(path), checkpoint_id=checkpoint_id, options=options, planned=self.planned
        )
        if duplicate := self._find_registered(source.new):
            return already_registered(path, duplicate)
        padding = file.contents.padding
        if self._options.link and padding:
            reason = f"{padding} zero bytes stand before its magic, which a copy takes off: omit --link"
            raise BadInput(what="file", value=str(path), reason=reason)
        if self._options.dry_run:
            return self._plan(path, source)
        if self._context.store.size(source.new.file_path) is not None:
            if self._is_left_behind(source.new):
                row = register_orphan(self._context, source.model, source.new, source.token_ids)
                return adopted(path, row, FileFormat.LLAM)
            fresh = uuid.uuid4().hex
            source = replace(source, new=replace(source.new, id=fresh, file_path=path_of(fresh)))
        count_padding(self._context, path, padding)
        return self._take_in(path, view[padding:], source)

    def _take_in(self, path: Path, content: memoryview, source: RegistrableFile) -> Adoption:
        """Copies or links the file into the store, checks the stored file, and registers it."""
        new = source.new
        with admitted(self._context, new):
            try:
                if self._options.link:
                    self._context.store.link_in(new.id, path)
                else:
                    self._context.store.copy_in(new.id, path, content)
            except Conflict:  # another process adopts the same file
                if duplicate := self._find_registered(new):
                    return already_registered(path, duplicate)
                raise
            try:
                self._require_same(new, path)
            except BaseException:
                discard_unregistered(self._context, new)
                raise
            row = register(self._context, source.model, new, source.token_ids)
        if row.id != new.id:  # another process registered the same input first
            return already_registered(path, row)
        return adopted(path, row, FileFormat.LLAM)

    def _require_same(self, new: NewCheckpoint, source: Path) -> None:
        """Checks that the stored file is the one that was verified: the source may have changed during the copy."""
        is_same = False
        with suppress(CorruptFile), self._context.store.map(new.file_path) as view:
            header = formats.open_checkpoint(view, new.file_path).contents.header
            is_same = (header.payload_crc32, len(view)) == (new.payload_crc32, new.file_size)
        if not is_same:
            reason = "it changed while it was adopted; adopt it again"
            raise CorruptFile(path=source, check=CheckName.COPY, reason=reason)

    def _plan(self, path: Path, file: RegistrableFile) -> Adoption:
        """Records that a dry run would register the file."""
        self.planned[file.new.id] = file
        return adoptable(path, file.new.n_tokens, FileFormat.LLAM)

    def _find_registered(self, new: NewCheckpoint) -> Checkpoint | None:
        return find_registered(
            self._context, new.fingerprint, new.input_hash, new.tokens_hash, dry_run=self._options.dry_run
        )

    def _is_left_behind(self, new: NewCheckpoint) -> bool:
        """Whether the file that has this path in the store is the file to be adopted: an interrupted adoption leaves it."""
        try:
            stored = read_orphan(self._context, new.file_path, self.planned).new
        except (CorruptFile, FileMissing, MissingParent, UnsafePath):
            return False
        return (stored.fingerprint, stored.input_hash, stored.payload_crc32) == (
            new.fingerprint,
            new.input_hash,
            new.payload_crc32,
        )
