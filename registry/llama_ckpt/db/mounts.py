"""Which file system holds a path, by Linux's list of mounts: SQLite needs a local one, and `doctor` reports the store's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")
# File systems of several machines, as the kernel names them: SQLite's write-ahead log needs the shared memory of one machine.
_REMOTE = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "wekafs",
        "ocfs2",
        "gfs2",
        "gfs",
        "orangefs",
        "pvfs2",
        "coda",
        "ncpfs",
    ]
)
# Programs that show local files through FUSE. Any other one may be a network file system (fuse.glusterfs, fuse.ceph-fuse,
# fuse.juicefs, fuse.rclone, fuse.s3fs, ...): new ones appear all the time, so the list has the local ones.
_LOCAL_FUSE = frozenset(
    [
        "bindfs",
        "cryfs",
        "encfs",
        "exfat",
        "ext2",
        "ext4",
        "fuse-overlayfs",
        "fuse2fs",
        "gocryptfs",
        "lxcfs",
        "mergerfs",
        "ntfs",
        "ntfs-3g",
        "securefs",
        "squashfuse",
        "unionfs",
        "veracrypt",
        "zfs",
    ]
)
# Folders that a host shares with its virtual machine: SQLite was reported to break in some of them.
_SHARED_FOLDERS = frozenset(
    ["virtiofs", "vboxsf", "prl_fs", "vmhgfs", "fuse.vmhgfs-fuse", "fuse.grpcfuse", "fakeowner"]
)


def is_shared_folder(kind: str) -> bool:
    """Whether a file system is a folder that a host shares with a virtual machine."""
    return kind in _SHARED_FOLDERS


def is_remote(kind: str) -> bool:
    """Whether several machines may use a file system of this kind. A FUSE program that is not known to be local counts as one."""
    program = kind.removeprefix("fuse.")
    is_unknown_fuse = program != kind and program not in _LOCAL_FUSE and not is_shared_folder(kind)
    return kind in _REMOTE or kind == "fuse" or is_unknown_fuse


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its mount point, type, source, and the options of mount and file system together."""

    point: Path
    kind: str
    source: str
    options: frozenset[str]


def read_mountinfo() -> str:
    """The text of /proc/self/mountinfo; "" on systems without it."""
    return _MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape") if _MOUNTINFO.exists() else ""


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that holds an absolute path, by the text of mountinfo (format: proc(5)); None if it is unknown."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, of_file_system = before.split(), after.split()
        if len(fields) < 6 or len(of_file_system) < 2:
            continue
        point = Path(_unescape(fields[4]))
        # Of two mounts on one point, the later one is visible.
        if path.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            options = ",".join([fields[5], *of_file_system[2:3]]).split(",")
            best = Mount(point, of_file_system[0], _unescape(of_file_system[1]), frozenset(options))
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), text)
