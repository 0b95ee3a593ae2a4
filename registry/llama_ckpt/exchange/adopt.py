"""Adopt: files that other programs wrote, or that lost their row, become checkpoints of this registry.

The order that keeps data safe is that of a save: the file first (staged, durable, then under its name), the row last. Other
programs' files are only read; with `link` a file's bytes are shared with the store, and its mode becomes 0600.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.checkpoints.orphans import WaitingDeltas, active_row
from llama_ckpt.checkpoints.register import claim_store
from llama_ckpt.context import RegistryContext
from llama_ckpt.errors import BadInput, DatabaseUnavailable, LlamaCkptError, Unsupported
from llama_ckpt.exchange.adopt_engine_file import adopt_engine_file
from llama_ckpt.exchange.adopt_llam import LlamAdopter
from llama_ckpt.exchange.adoption import Adoption, AdoptOptions, AdoptOutcome, left, refused
from llama_ckpt.exchange.candidates import Candidate, UnreadFolder, candidates, why_not_a_file
from llama_ckpt.formats import FileFormat, OpenedFile
from llama_ckpt.formats.checkpoint import CheckpointFile
from llama_ckpt.formats.engine_files import EngineFile
from llama_ckpt.store.disk import map_file
from llama_ckpt.store.layout import TEMPORARY_SUFFIX, is_checkpoint_path
from llama_ckpt.values import MemoryKind

__all__ = ["AdoptOptions", "AdoptOutcome", "Adoption", "adopt"]

_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")


def adopt(context: RegistryContext, paths: Sequence[Path], options: AdoptOptions) -> Iterator[Adoption]:
    """Adopts files, and the files in folders and their subfolders, one after the other, and gives the result of each. A refused
    file does not stop the rest. No symlink is followed. A delta that comes before its parent is adopted after it.

    A LLAM file is adopted as it is: it says which model it belongs to. A file of llama.cpp is proven to belong to the model and
    rewritten. A file in this registry's store that has no row gets one. If it is interrupted, the files before stay adopted,
    and there is at most one file without a row.

    Raises:
        BadInput: `options.text` is set, and `paths` is not exactly one file.
        DatabaseUnavailable, StoreUnavailable: they cannot be used, or the store belongs to another registry; nothing is known
            of the remaining files.
    """
    if options.text is not None and (len(paths) != 1 or paths[0].is_dir()):
        raise BadInput(what="text", value=f"{len(paths)} path(s)", reason="a text is of one file: name that file alone")
    if not options.dry_run:
        claim_store(context)
    for adoption in _Adopter(context, options).all_of(paths):
        if adoption.outcome is AdoptOutcome.ADOPTED:
            context.metrics.count("adopted")
        yield adoption


class _Adopter:
    """One run over some paths: decides what each file is and who adopts it."""

    def __init__(self, context: RegistryContext, options: AdoptOptions) -> None:
        self._context = context
        self._options = options
        self._llam = LlamAdopter(context, options)
        self._root = context.store.root.resolve()
        self._database_files: set[Path] = set()
        if context.database.dialect == "sqlite":
            database = Path(context.database.url.database or "").resolve()
            self._database_files = {Path(f"{database}{suffix}") for suffix in _SQLITE_SUFFIXES}

    def all_of(self, paths: Sequence[Path]) -> Iterator[Adoption]:
        """The result of each candidate in order; deltas that came before their parents are last."""
        waiting: WaitingDeltas[Adoption] = WaitingDeltas()
        for candidate in candidates(paths):
            adoption = self._adopt(candidate)
            if adoption.missing_parent is None:
                yield adoption
            else:
                waiting.add(adoption.missing_parent, adoption)
        while ready := waiting.take_ready(self._is_registered):
            for delta in ready:
                yield self._adopt(Candidate(delta.path, is_named=True))
        yield from waiting.take_rest()

    def _is_registered(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._llam.planned or active_row(self._context, checkpoint_id) is not None

    def _adopt(self, candidate: Candidate | UnreadFolder) -> Adoption:
        if isinstance(candidate, UnreadFolder):
            if candidate.is_refused:
                return refused(candidate.path, candidate.error)
            return left(candidate.path, str(candidate.error))
        try:
            return self._adopt_file(candidate)
        except DatabaseUnavailable:
            raise
        except LlamaCkptError as error:
            return refused(candidate.path, error)

    def _adopt_file(self, candidate: Candidate) -> Adoption:
        """One file. A file that is no checkpoint is refused if it was named, else left."""
        path = candidate.path
        real = path.parent.resolve() / path.name
        if why := self._why_never_opened(real) or (None if candidate.is_named else why_not_a_file(path)):
            if candidate.is_named:
                raise BadInput(what="file", value=str(path), reason=f"it is {why}")
            return left(path, why)
        if real.is_relative_to(self._root):
            relative = real.relative_to(self._root).as_posix()
            if is_checkpoint_path(relative):
                return self._llam.orphan(path, relative)
        with map_file(path) as view:
            return self._from_elsewhere(candidate, view)

    def _why_never_opened(self, real: Path) -> str | None:
        """What a file is that must not be opened; None for all others."""
        # Closing any descriptor of an SQLite file drops all locks that the process has on it (POSIX).
        if real in self._database_files:
            return "this registry's database"
        if real.is_relative_to(self._root) and real.name.endswith(TEMPORARY_SUFFIX):
            return "a write into this store that has not ended; gc sees to it"
        return None

    def _from_elsewhere(self, candidate: Candidate, view: memoryview) -> Adoption:
        path, options = candidate.path, self._options
        opened = formats.open_file(view, str(path))
        identified = opened.identified
        match identified.format:
            case FileFormat.UNKNOWN if not candidate.is_named:
                return left(path, identified.what)
            case FileFormat.LLAM:
                _require_adoptable(opened, path)
                if options.text is not None:
                    raise BadInput(what="text", value=str(path), reason="a LLAM file has its input hash already")
            case FileFormat.GGSQ | FileFormat.GGSN:
                _require_adoptable(opened, path)
                if options.link:
                    reason = "it is rewritten, and cannot be linked: omit --link"
                    raise BadInput(what="file", value=str(path), reason=reason)
        match opened.content:
            case CheckpointFile() as checkpoint_file:
                return self._llam.file(path, view, checkpoint_file)
            case EngineFile() as engine_file:
                return adopt_engine_file(self._context, path, engine_file, options)
        raise opened.damage or Unsupported(what=f"adopting {path}", reason=identified.why_not)


def _require_adoptable(opened: OpenedFile, path: Path) -> None:
    """Refuses an undamaged file that cannot be restored, and memory other than full attention. A damaged file passes: its memory
    is not known, and its damage is the reason to refuse it later.
    """
    identified = opened.identified
    if identified.why_not is not None and opened.damage is None:
        raise Unsupported(what=f"adopting {path}", reason=identified.why_not)
    if identified.memory not in (None, MemoryKind.FULL.value):
        reason = f"it has {identified.memory} memory, and full attention caches only are adopted"
        raise Unsupported(what=f"adopting {path}", reason="; ".join((reason, *identified.notes)))
