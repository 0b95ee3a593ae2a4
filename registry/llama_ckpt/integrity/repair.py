"""Repair damaged files by path: write the repaired file beside the original, or in its place. `formats/repair.py` decides what
to change.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt import formats
from llama_ckpt.errors import BadInput, CorruptFile, FileMissing, StoreUnavailable
from llama_ckpt.store.disk import fsync_folder, map_file, put_in_place, store_errors, write_new
from llama_ckpt.store.store import StepHook, no_hook
from llama_ckpt.values import CheckName

REPAIRED_SUFFIX = ".repaired"
BACKUP_SUFFIX = ".bak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was done with one file. If `faults` is empty, the file is valid and nothing was written. `written` is the repaired
    file, `backup` the original if it was replaced and kept.
    """

    path: Path
    faults: tuple[str, ...]
    written: Path | None = None
    backup: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRepairer:
    """Repairs files. For `trust_payload` and `trust_tokens`, see `formats.plan_file_repair`. `in_place` replaces the original by
    the repaired file; `keep_backup` then keeps the original under its name and `.bak`.
    """

    in_place: bool = False
    keep_backup: bool = True
    trust_payload: bool = False
    trust_tokens: bool = False
    hook: StepHook = no_hook

    def repair(self, path: Path, output: Path | None = None) -> Repaired:
        """Repairs one file. The repaired file is `output`, by default `path` and `.repaired`. No existing file is overwritten.

        The repaired file is read back in full before it gets its name. If it is interrupted at any point, `path` is either the
        original or the repaired file, complete; at most a temporary file is left beside it, or the backup exists already.

        Raises:
            CorruptFile: the file cannot be repaired; nothing was written.
            BadInput: the output or the backup exists already.
            FileMissing, UnsafePath, StoreUnavailable: the file cannot be read, or another program changes it.
            StoreFull: there is no room beside the file.
        """
        target = path if self.in_place else output or path.with_name(path.name + REPAIRED_SUFFIX)
        temporary = target.with_name(f".llama-ckpt-repair-{uuid.uuid4().hex}.tmp")
        before = _state_of(path)
        try:
            with map_file(path) as view:
                faults = self._write(view, path, target, temporary, stat.S_IMODE(before.st_mode))
            if not faults:
                return Repaired(path=path, faults=())
            _require_valid(temporary)
            self.hook("written")
            if not self.in_place:
                _give_name(temporary, target)
                return Repaired(path=path, faults=faults, written=target)
            _require_unchanged(path, before)
            backup = self._back_up(path) if self.keep_backup else None
            self.hook("backed up")
            with store_errors(path):
                temporary.replace(path)
                fsync_folder(path.parent)
            self.hook("replaced")
            return Repaired(path=path, faults=faults, written=path, backup=backup)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _write(self, view: memoryview, path: Path, target: Path, temporary: Path, mode: int) -> tuple[str, ...]:
        """Writes the corrected bytes if the file has faults, and gives the faults. No slice of `view` outlives the call, so that
        a large file is not mapped twice at a time.
        """
        plan = formats.plan_file_repair(
            view, str(path), trust_payload=self.trust_payload, trust_tokens=self.trust_tokens
        )
        if plan.faults:
            self._require_free_names(path, target)
            write_new(temporary, plan.parts, mode)
        return plan.faults

    def _require_free_names(self, path: Path, target: Path) -> None:
        taken = [target] if not self.in_place else [_backup_of(path)] if self.keep_backup else []
        for name in taken:
            if os.path.lexists(name) and not (self.in_place and _is_second_name(name, path)):
                advice = "name another with -o" if not self.in_place else "move it away, or say --no-backup"
                raise BadInput(what="file", value=str(name), reason=f"it is there already and is kept; {advice}")

    def _back_up(self, path: Path) -> Path:
        """Gives the original a second name, or copies it if the file system has no hard links."""
        backup = _backup_of(path)
        with store_errors(path):
            try:
                backup.hardlink_to(path)
            except FileExistsError:
                self._require_free_names(path, path)
            except OSError:
                with map_file(path) as view:
                    write_new(backup, (view,), stat.S_IMODE(path.lstat().st_mode))
            fsync_folder(path.parent)
        return backup


def _is_second_name(backup: Path, path: Path) -> bool:
    """Whether a backup is the original itself: an earlier repair was killed before the repaired file got its name."""
    of_backup, of_path = backup.lstat(), path.lstat()
    return (of_backup.st_dev, of_backup.st_ino) == (of_path.st_dev, of_path.st_ino)


def _backup_of(path: Path) -> Path:
    return path.with_name(path.name + BACKUP_SUFFIX)


def _require_valid(written: Path) -> None:
    """Reads the written file back, with the reader that will open it later."""
    with map_file(written) as view:
        identified = formats.identify(view, str(written))
        if not identified.whole or identified.padding:
            reason = f"what was written does not read back: {identified.why_not}. Nothing was changed"
            raise CorruptFile(path=str(written), check=CheckName.REPAIR, reason=reason)


def _state_of(path: Path) -> os.stat_result:
    with store_errors(path):
        try:
            return path.lstat()
        except FileNotFoundError as error:
            raise FileMissing(path=path) from error


def _require_unchanged(path: Path, before: os.stat_result) -> None:
    now = _state_of(path)
    for field in ("st_dev", "st_ino", "st_size", "st_mtime_ns"):
        if getattr(now, field) != getattr(before, field):
            raise StoreUnavailable(path=path, reason="another program changed it meanwhile; nothing was changed")


def _give_name(temporary: Path, target: Path) -> None:
    with store_errors(target):
        try:
            put_in_place(temporary, target)
        except FileExistsError:
            raise BadInput(what="file", value=str(target), reason="it is there already and is kept") from None
        fsync_folder(target.parent)
