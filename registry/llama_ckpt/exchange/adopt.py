"""Adopting: checkpoint files that others wrote, or that lost their row, become checkpoints of this registry.

The order that keeps data safe is a save's: the file first (staged, durable, then under its name), the row last. The files of
others are read and stay as they are, but for a link, which shares its bytes.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.checkpoints import budget as admission
from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.orphans import FoundFile, active, after_their_parents, found_file, found_in_store, free_id
from llama_ckpt.checkpoints.register import SaveOptions, claim_store, register, register_orphan, usable_or_renewed
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import rows
from llama_ckpt.errors import (
    BadInput,
    Conflict,
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    Incompatible,
    LlamaCkptError,
    NotFound,
    StoreFull,
    StoreUnavailable,
    UnsafePath,
    Unsupported,
    without_frames,
)
from llama_ckpt.exchange import foreign
from llama_ckpt.exchange.convert import EngineMaker, convert, layout_of
from llama_ckpt.fingerprint import tokens_hash
from llama_ckpt.formats import engine_files, legacy
from llama_ckpt.store.disk import map_file
from llama_ckpt.store.layout import TEMPORARY_SUFFIX
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Checkpoint, MemoryKind, NewCheckpoint, SaveOutcome, Status

log = logging.getLogger("llama_ckpt")

_ID = re.compile(r"[0-9a-f]{32}")
_SQLITE_FILES = ("", "-wal", "-shm", "-journal")


class AdoptOutcome(StrEnum):
    """What became of a file. `LEFT`: it is no checkpoint, and lay in a folder that was named. `ADOPTABLE`: a dry run would adopt
    it.
    """

    ADOPTED = "adopted"
    ADOPTABLE = "adoptable"
    REGISTERED = "already registered"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """One file, or folder of another program, and what became of it. `error` is set where it is `REFUSED`."""

    path: Path
    outcome: AdoptOutcome
    reason: str = ""
    format: str | None = None
    n_tokens: int | None = None
    checkpoint: Checkpoint | None = None
    error: LlamaCkptError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """How files are adopted. `engine_for` makes the model's engine where a file names no model (ggsq, ggsn), and `n_ctx` says
    how many cells its context had; `link` shares bytes instead of copying them; `text` is what a single file's tokens are of.
    `dry_run` changes nothing.

    Raises:
        BadInput: a label that cannot be one.
    """

    engine_for: EngineMaker | None = None
    n_ctx: int | None = None
    link: bool = False
    label: str | None = None
    text: str | None = None
    dry_run: bool = False
    saved: SaveOptions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved", SaveOptions(label=self.label))


def adopt(context: RegistryContext, paths: Sequence[Path], options: AdoptOptions) -> Iterator[Adoption]:
    """Adopts files, and what is in folders and theirs, one after the other, and says what became of each. No symlink is
    followed. A refused one does not stop the rest. Interrupted, what was adopted is, and there is at most one file without a row.

    A LLAM file is taken as it is: it says which model it is of. Files of llama.cpp are proven to be of the model and rewritten.
    A file of our own store that no row names gets its row where it lies.

    Raises:
        BadInput: a text for anything but one file.
        DatabaseUnavailable, StoreUnavailable: they cannot be used, or the store is another registry's; nothing is known of
            the rest.
    """
    if options.text is not None and (len(paths) != 1 or paths[0].is_dir()):
        raise BadInput(what="text", value=f"{len(paths)} path(s)", reason="a text is of one file: name that file alone")
    if not options.dry_run:
        claim_store(context)
    for found in _Adopter(context, options).all_of(paths):
        if found.outcome is AdoptOutcome.ADOPTED:
            context.metrics.count("adopted")
        yield found


class _Adopter:
    """One run over some files."""

    def __init__(self, context: RegistryContext, options: AdoptOptions) -> None:
        self._context = context
        self._options = options
        self._root = context.store.root.resolve()
        url = context.database.url
        of_database = Path(url.database or "").resolve() if context.database.dialect == "sqlite" else None
        self._planned: dict[str, FoundFile] = {}  # by id, in a dry run
        self._never_opened = {Path(f"{of_database}{end}") for end in _SQLITE_FILES} if of_database else set()

    def all_of(self, paths: Sequence[Path]) -> Iterator[Adoption]:
        """Everything at and under some paths; deltas whose parents came behind them last."""
        return after_their_parents(
            (found for path in paths for found in self._at(path)),
            _lacks,
            self._is_there,
            lambda found: self.file(found.path),
        )

    def _at(self, path: Path) -> Iterable[Adoption]:
        return self.folder(path) if path.is_dir() and not path.is_symlink() else [self.file(path)]

    def _is_there(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._planned or active(self._context, checkpoint_id) is not None

    def folder(self, top: Path) -> Iterator[Adoption]:
        """Everything in a folder, in order of the names. A folder of diskcache is told as a whole and not entered."""
        unread: list[OSError] = []
        for name, folders, names in os.walk(top, onerror=unread.append):
            here = Path(name)
            try:
                found = foreign.recognise(here)
            except StoreUnavailable as error:
                yield _refused(here, error)
                found = None
            if found is not None:
                folders.clear()
                outcome = AdoptOutcome.REFUSED if found.of_llama else AdoptOutcome.LEFT
                why = Unsupported(what=f"adopting {found.what}", reason=found.why_not)
                yield Adoption(path=here, outcome=outcome, reason=str(why), error=why if found.of_llama else None)
                continue
            folders.sort()
            for one in sorted(names):
                yield self.file(here / one, named=False)
        for failed in unread:
            path = Path(failed.filename or top)
            yield _refused(path, StoreUnavailable(path=path, reason=failed.strerror or str(failed)))

    def file(self, path: Path, *, named: bool = True) -> Adoption:
        """One file. What is no checkpoint is refused where it was `named`, else left."""
        try:
            real = path.parent.resolve() / path.name
            if why := self._never_to_open(real) or (None if named else _no_file(path)):
                if named:
                    raise BadInput(what="file", value=str(path), reason=f"it is {why}")
                return Adoption(path=path, outcome=AdoptOutcome.LEFT, reason=why)
            if real.is_relative_to(self._root):
                place = real.relative_to(self._root).as_posix()
                if _ID.fullmatch(real.stem) and place == path_of(real.stem):
                    return self._own(path, place)
            with map_file(path) as view:
                return self._from_elsewhere(path, view, named=named)
        except DatabaseUnavailable:
            raise
        except LlamaCkptError as error:
            return _refused(path, error)

    def _never_to_open(self, real: Path) -> str | None:
        """What a file is that is not even opened."""
        # SQLite's locks on its files go when anybody in the process closes one of them.
        if real in self._never_opened:
            return "this registry's database"
        if real.is_relative_to(self._root) and real.name.endswith(TEMPORARY_SUFFIX):
            return "a write into this store that has not ended; gc sees to it"
        return None

    # -- our own store ---------------------------------------------------------------------------------------------------

    def _own(self, path: Path, place: str) -> Adoption:
        """A file under its own name in our store: a ghost, or one that has its row."""
        with self._context.database.read() as db:
            known = rows.by_path(db, place)
        if known is not None and known.status is Status.ACTIVE:
            return _registered(path, known)
        if known is not None:
            reason = f"its row is STALE ({known.stale_reason}); bring it back with: llama-ckpt unprune {known.id}"
            raise BadInput(what="file", value=str(path), reason=reason)
        orphan = found_in_store(self._context, place, self._planned)
        new = replace(orphan.new, label=self._options.label)
        if there := self._registered(new.fingerprint, new.input_hash, new.tokens_hash):
            return _registered(path, there)
        if self._options.dry_run:
            return self._would(path, orphan)
        return _adopted(path, new.n_tokens, register_orphan(self._context, orphan.model, new, orphan.token_ids), "LLAM")

    # -- files of others -------------------------------------------------------------------------------------------------

    def _from_elsewhere(self, path: Path, view: memoryview, *, named: bool) -> Adoption:
        found = formats.identify(view, str(path))
        if found.format == "unknown" and not named:
            return Adoption(path=path, outcome=AdoptOutcome.LEFT, reason=found.what)
        if found.why_not is not None and (found.whole or found.format not in ("LLAM", *engine_files.MAGICS)):
            raise Unsupported(what=f"adopting {path}", reason=found.why_not)
        if found.version == legacy.VERSION and found.format == "LLAM":
            raise Unsupported(what=f"adopting {path}", reason=found.why_not)
        if found.memory not in (None, MemoryKind.FULL.value):  # None: damaged, and its reader will say how
            reason = "; ".join(
                (f"it has {found.memory} memory, and full attention caches only are adopted", *found.notes)
            )
            raise Unsupported(what=f"adopting {path}", reason=reason)
        return self._llam(path, view) if found.format == "LLAM" else self._engine_file(path, view)

    def _would(self, path: Path, found: FoundFile) -> Adoption:
        """What a dry run says of a LLAM file that would be registered."""
        self._planned[found.new.id] = found
        return _adopted(path, found.new.n_tokens, None, "LLAM")

    def _count_padding(self, path: Path, padding: int) -> None:
        if padding and not self._options.dry_run:
            log.info("detected padding: %d byte(s) of zeros before the magic of %s", padding, path)
            self._context.metrics.count("padding_detected")

    def _llam(self, path: Path, view: memoryview) -> Adoption:
        if self._options.text is not None:
            raise BadInput(what="text", value=str(path), reason="a LLAM file has its input hash already")
        file = formats.open_checkpoint(view, str(path))
        checkpoint_id = free_id(self._context, file, path.stem) or uuid.uuid4().hex
        found = found_file(self._context, file, str(path), checkpoint_id, self._options.saved, self._planned)
        new = found.new
        if there := self._registered(new.fingerprint, new.input_hash, new.tokens_hash):
            return _registered(path, there)
        if self._options.link and file.contents.padding:
            reason = f"{file.contents.padding} zero bytes stand before its magic, which a copy takes off: omit --link"
            raise BadInput(what="file", value=str(path), reason=reason)
        if self._options.dry_run:
            return self._would(path, found)
        if self._context.store.size(new.file_path) is not None:
            if self._is_left_behind(new):
                row = register_orphan(self._context, found.model, new, found.token_ids)
                return _adopted(path, new.n_tokens, row, "LLAM")
            fresh = uuid.uuid4().hex
            new = replace(new, id=fresh, file_path=path_of(fresh))
        self._count_padding(path, file.contents.padding)
        with admission.admitted(self._context, new):
            try:
                if self._options.link:
                    self._context.store.link_in(new.id, path)
                else:
                    self._context.store.copy_in(new.id, path, view[file.contents.padding :])
            except Conflict:  # another process adopts the same file
                if there := self._registered(new.fingerprint, new.input_hash, new.tokens_hash):
                    return _registered(path, there)
                raise
            self._require_same(new, path)
            row = register(self._context, found.model, new, found.token_ids)
        if row.id != new.id:  # somebody was first
            return _registered(path, row)
        return _adopted(path, new.n_tokens, row, "LLAM")

    def _require_same(self, new: NewCheckpoint, source: Path) -> None:
        """What stands in the store now is what was checked: the source may have changed under the copy."""
        try:
            with self._context.store.map(new.file_path) as view:
                file = formats.open_checkpoint(view, new.file_path)
                same = (file.contents.header.payload_crc32, len(view)) == (new.payload_crc32, new.file_size)
        except CorruptFile:
            same = False
        if not same:
            self._context.store.remove(new.file_path)
            raise CorruptFile(path=source, check="Copy", reason="it changed while it was adopted; adopt it again")

    def _engine_file(self, path: Path, view: memoryview) -> Adoption:
        options = self._options
        if options.link:
            raise BadInput(what="file", value=str(path), reason="it is rewritten, and cannot be linked: omit --link")
        file = engine_files.read(view, str(path))
        if options.engine_for is None:
            raise BadInput(what="file", value=str(path), reason="it names no model: give the GGUF with --model")
        engine = options.engine_for(layout_of(file, options.n_ctx))
        captured = convert(file, str(path), engine, text=options.text, context_is_known=options.n_ctx is not None)
        kind, n_tokens = f"{file.format} {file.version}", len(captured.token_ids)
        if there := self._registered(engine.fingerprint.digest, captured.input_hash, tokens_hash(captured.token_ids)):
            return _registered(path, there)
        if options.dry_run:
            return _adopted(path, n_tokens, None, kind)
        self._count_padding(path, file.padding)
        saved = saving.write(self._context, captured, options.saved)
        if saved.checkpoint is None:
            raise StoreFull(needed=captured.payload.nbytes, path=self._context.store.root, reason=saved.reason)
        if saved.outcome is SaveOutcome.DEDUPLICATED:  # somebody was first
            return _registered(path, saved.checkpoint)
        return _adopted(path, n_tokens, saved.checkpoint, kind)

    def _registered(self, digest: bytes, input_hash: bytes, of_tokens: bytes) -> Checkpoint | None:
        """The ACTIVE row of the same input, if it is of the same tokens too."""
        if self._options.dry_run:  # which marks no row
            row = self._context.database.query(lambda db: rows.find_active(db, digest, input_hash))
        else:
            row = usable_or_renewed(self._context, digest, input_hash)
        if row is not None and row.tokens_hash != of_tokens:
            raise Incompatible(reason=f"checkpoint {row.id} is of the same input hash and has other tokens")
        return row

    def _is_left_behind(self, new: NewCheckpoint) -> bool:
        """Whether the file in the store that has this name is the one that is to be adopted: an adoption that was interrupted
        leaves it so.
        """
        try:
            there = found_in_store(self._context, new.file_path, self._planned).new
        except (CorruptFile, FileMissing, NotFound, UnsafePath):
            return False
        return (there.fingerprint, there.input_hash, there.payload_crc32) == (
            new.fingerprint,
            new.input_hash,
            new.payload_crc32,
        )


def _lacks(found: Adoption) -> str | None:
    """The id of the checkpoint that a delta was refused for."""
    return str(found.error.values["name"]) if isinstance(found.error, NotFound) else None


def _no_file(path: Path) -> str | None:
    """What lies in a folder and is no file that could be read."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISREG(mode):
        return None
    return "a symlink" if stat.S_ISLNK(mode) else "not a regular file"


def _adopted(path: Path, n_tokens: int, row: Checkpoint | None, kind: str) -> Adoption:
    """`row` is what was registered: nothing in a dry run."""
    outcome = AdoptOutcome.ADOPTABLE if row is None else AdoptOutcome.ADOPTED
    return Adoption(path=path, outcome=outcome, format=kind, n_tokens=n_tokens, checkpoint=row)


def _registered(path: Path, row: Checkpoint) -> Adoption:
    return Adoption(path=path, outcome=AdoptOutcome.REGISTERED, n_tokens=row.n_tokens, checkpoint=row)


def _refused(path: Path, error: LlamaCkptError) -> Adoption:
    return Adoption(path=path, outcome=AdoptOutcome.REFUSED, reason=str(error), error=without_frames(error))
