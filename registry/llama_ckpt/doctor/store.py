"""`doctor` on the store: is the folder private, does its file system do what a save relies on, is there enough room?"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from llama_ckpt.db.mounts import is_remote, is_shared_folder, mount_of, read_mountinfo
from llama_ckpt.doctor import probe
from llama_ckpt.doctor.diagnosis import Diagnosis, fail, guarded, not_checked, of_clocks, ok, warn
from llama_ckpt.doctor.probe import ProbeResult
from llama_ckpt.gc_values import Disk
from llama_ckpt.humanize import bytes_
from llama_ckpt.retention.policy import Policy

# A save waits for two fsyncs. Above this they take longer than the evaluation that a checkpoint of a short prompt saves.
_SLOW_FSYNC_S = 0.2
_LOW_SPACE_SHARE = 0.05  # below about this share, file systems slow down and only root may write
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# File systems over an object store: their rename copies and deletes, and other hosts see the unfinished copy.
_OBJECT_STORES = ("s3fs", "gcsfuse", "rclone", "goofys", "geesefs", "blobfuse2", "mount-s3", "mountpoint-s3")
_RISKY_OPTIONS = {
    "soft": "a request that times out gives EIO in the middle of a save or a restore",
    "softerr": "a request that times out gives an error in the middle of a save or a restore",
    "nocto": "without close-to-open consistency another host may not see what was saved",
    "nobarrier": "an fsync does not reach the disk through its write cache",
    "barrier=0": "an fsync does not reach the disk through its write cache",
}
NAMES = ("store", "store mode", "file system", "writable", "fsync", "rename", "free space", "store clock")


def examine_store(root: Path, policy: Policy) -> list[Diagnosis]:
    """One diagnosis per name in `NAMES`. Changes nothing: the probe removes its own files."""
    first = guarded("store", lambda: _folder(root))
    if not is_folder(root):
        return [first, *(not_checked(name, "there is no store folder") for name in NAMES[1:])]
    probed: list[ProbeResult] = []  # filled by the check "writable", which reports a fault of the probe itself
    checks: dict[str, Callable[[], Diagnosis]] = {
        "store mode": lambda: _mode(root),
        "file system": lambda: _file_system(root),
        "writable": lambda: _writable(_probe_once(probed, root)),
        "fsync": lambda: _fsync(probed[0]),
        "rename": lambda: _rename(probed[0], root),
        "free space": lambda: _room(root, policy),
        "store clock": lambda: _clock(probed[0]),
    }
    diagnoses = [first]
    for name, check in checks.items():
        needs_probe = name in ("fsync", "rename", "store clock")
        diagnoses.append(not_checked(name, "nothing was tried") if needs_probe and not probed else guarded(name, check))
    return diagnoses


def _probe_once(probed: list[ProbeResult], root: Path) -> ProbeResult:
    probed.append(probe.probe(root))
    return probed[0]


def is_folder(root: Path) -> bool:
    """Whether the store's folder exists and can be read."""
    try:
        return root.is_dir()
    except OSError:  # the diagnosis of the folder itself reports it
        return False


def _folder(root: Path) -> Diagnosis:
    try:
        status = root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _absent(root)
    if not stat.S_ISDIR(status.st_mode):
        return fail("store", f"{root} is no folder", "name another --store, or move the file away")
    return ok("store", str(root))


def _absent(root: Path) -> Diagnosis:
    above = next(path for path in root.parents if path.exists() or path == path.parent)
    if not above.is_dir():
        return fail("store", f"{root} cannot be made: {above} is no folder", "name another --store")
    if not os.access(above, os.W_OK | os.X_OK):
        return fail(
            "store", f"{root} is not there, and {above} is not ours to write in", "make it, or name another --store"
        )
    advice = "the first command that needs it makes it; if it is to be a mount, mount it first"
    return warn("store", f"{root} is not there yet", advice)


def _mode(root: Path) -> Diagnosis:
    if os.name == "nt":
        return ok("store mode", "Windows has access lists instead: the folder's own decide")
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & 0o077:
        return warn(
            "store mode", f"{mode:04o}: others reach into it, and a checkpoint is a transcript", f"chmod 700 {root}"
        )
    return ok("store mode", f"{mode:04o}")


def _file_system(root: Path) -> Diagnosis:
    mount = mount_of(root.resolve(), read_mountinfo())
    if mount is None:
        return ok("file system", "this system does not tell of which type it is")
    name, kind = "file system", mount.kind
    where = f"{kind} at {mount.point}"
    if kind in _MEMORY_FILE_SYSTEMS:
        return warn(name, f"{where} is in memory: no checkpoint outlives a restart", "name a --store on a disk")
    if kind.removeprefix("fuse.") in _OBJECT_STORES:
        reason = "is over an object store, whose rename is no single step: a reader may find half a file"
        return warn(name, f"{where} {reason}", "name a --store on a disk or on NFS")
    risks = [f"option {option}: {why}" for option, why in _RISKY_OPTIONS.items() if option in mount.options]
    if risks:
        return warn(name, f"{where}, {'; '.join(risks)}", "mount it without (hard, for NFS)")
    if is_shared_folder(kind):
        reason = "is a folder that a host shares with a virtual machine: SQLite was reported to lose data there"
        return warn(name, f"{where} {reason}", "name a --database-url on a local disk, or PostgreSQL")
    if is_remote(kind):
        relies = "rename is one step on the server, an fsync and a close reach it, an open asks it"
        if kind.startswith("nfs") and not any(option.startswith("lookupcache=") for option in mount.options):
            relies += "; with lookupcache=positive no host takes what another has just saved for absent"
        return ok(name, f"{where}, over the network: {relies}")
    return ok(name, where)


def _writable(probed: ProbeResult) -> Diagnosis:
    if probed.error is None or _of_fsync(probed) or _of_rename(probed):
        return ok(
            "writable", "created, written, read back and removed" if probed.error is None else "created and written"
        )
    reason = probed.error.reason
    return fail("writable", f"{probed.failed_at}: {reason}", _advice(reason))


def _advice(reason: str) -> str:
    if "ENOSPC" in reason or "EDQUOT" in reason:
        return "free some space (llama-ckpt prune, then llama-ckpt gc), or name another --store"
    if any(code in reason for code in ("EACCES", "EPERM", "EROFS")):
        return "the folder must belong to the user who runs llama-ckpt, on a file system that is mounted for writing"
    return "the file system fails; see the system's log"


def _of_fsync(probed: ProbeResult) -> bool:
    return probed.failed_at in ("fsync", "fsync of the folder")


def _of_rename(probed: ProbeResult) -> bool:
    return probed.failed_at in ("rename", "move to another folder")


def _fsync(probed: ProbeResult) -> Diagnosis:
    if _of_fsync(probed) and probed.error is not None:
        detail = f"{probed.failed_at}: {probed.error.reason}"
        return fail("fsync", detail, "no save can be made durable here; name another --store")
    if probed.fsync_s is None:
        return not_checked("fsync", f"{probed.failed_at} failed before")
    took = f"{probed.fsync_s * 1000:.1f} ms for 4 KiB"
    if not probed.syncs_folders:
        advice = "a checkpoint may be lost with the power, which costs its evaluation once more and nothing else"
        return warn("fsync", f"{took}; this file system syncs no folders", advice)
    if probed.fsync_s > _SLOW_FSYNC_S:
        return warn(
            "fsync",
            took,
            f"a save waits for two of them; over {_SLOW_FSYNC_S * 1000:.0f} ms short prompts gain nothing",
        )
    return ok("fsync", took)


def _rename(probed: ProbeResult, root: Path) -> Diagnosis:
    if _of_rename(probed) and probed.error is not None:
        detail = f"{probed.failed_at}: {probed.error.reason}"
        return fail("rename", detail, "name a --store that is one file system, whose rename is one step")
    if "move to another folder" not in probed.done:
        return not_checked("rename", f"{probed.failed_at} failed before")
    numbers = probe.devices(root)
    elsewhere = sorted(name for name, number in numbers.items() if number != numbers[""])
    if elsewhere:
        detail = (
            f"{', '.join(elsewhere[:3])} in the store {'is' if len(elsewhere) == 1 else 'are'} on another file system"
        )
        return fail("rename", detail, "the store must be one file system: gc could not put a file into quarantine")
    return ok("rename", "within a folder and between folders, on one file system")


def _room(root: Path, policy: Policy) -> Diagnosis:
    usage = shutil.disk_usage(root)
    share = usage.free / usage.total if usage.total else 0.0
    room = f"{bytes_(usage.free)} of {bytes_(usage.total)} ({share:.0%})"
    counted = probe.inodes(root)
    advice = "llama-ckpt prune, then llama-ckpt gc"
    floor = policy.floor_bytes(Disk(free=usage.free, total=usage.total, pending=0))
    if usage.free < floor:
        return warn("free space", f"{room}, min_free is {bytes_(floor)}", f"saves make room or are refused; {advice}")
    if share < _LOW_SPACE_SHARE:
        return warn("free space", room, advice)
    if counted is not None and counted[0] < _LOW_SPACE_SHARE * counted[1]:
        return warn("free space", f"{room}, but {counted[0]:,} of {counted[1]:,} inodes", f"many small files: {advice}")
    return ok("free space", room if counted is None else f"{room}, {counted[0]:,} inodes")


def _clock(probed: ProbeResult) -> Diagnosis:
    if probed.clock_ahead_s is None:
        return not_checked("store clock", f"{probed.failed_at} failed before")
    return of_clocks("store clock", "the file system's clock", probed.clock_ahead_s)
