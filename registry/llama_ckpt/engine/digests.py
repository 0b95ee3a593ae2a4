"""SHA-256 of large files, each computed once and remembered by path, size, mtime_ns and inode.

They are remembered in a JSON file in the user's cache folder. If that is lost or damaged, the files are hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from llama_ckpt.engine import Progress, no_progress
from llama_ckpt.errors import BadInput
from llama_ckpt.fingerprint import weights_digest

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 24


def shards_of(path: Path) -> list[Path]:
    """All files of a model in order: `path` itself, or every shard of a split GGUF (`name-00001-of-00003.gguf`).

    Raises:
        BadInput: a shard does not exist, or `path` is not a file.
    """
    match = _SHARD.fullmatch(path.name)
    names = [path.name]
    if match and 1 <= int(match["index"]) <= int(match["count"]):
        count = int(match["count"])
        names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    files = [path.with_name(name) for name in names]
    for file in files:
        if not file.is_file():
            raise BadInput(what="model file", value=str(file), reason="there is no such file")
    return files


def weights_digest_of(path: Path, digests: FileDigests, progress: Progress = no_progress) -> bytes:
    """The SHA-256 that names a model's weights: of its file, or over the digests of all its shards.

    Raises:
        BadInput: a file does not exist, cannot be read, or changed while it was hashed.
    """
    return weights_digest([digests.sha256(shard, progress) for shard in shards_of(path)])


class FileDigests:
    """SHA-256 digests of files, remembered in the JSON file `memory`."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def sha256(self, path: Path, progress: Progress = no_progress) -> bytes:
        """SHA-256 of the file's bytes, 32 raw bytes. `progress` is called with the number of bytes done and the total.

        Raises:
            BadInput: the file cannot be read, or changed while it was hashed.
        """
        try:
            key, before = str(path.resolve()), _identity(path)
            known = _remembered(self._load().get(key), before)
            if known is not None:
                return known
            digest = _hash(path, progress)
            if _identity(path) != before:
                raise BadInput(what="model file", value=str(path), reason="it changed while it was hashed")
        except OSError as error:
            raise BadInput(what="model file", value=str(path), reason=error.strerror or str(error)) from error
        self._remember(key, {"identity": before, "sha256": digest.hex()})
        return digest

    def _load(self) -> dict[str, object]:
        try:
            loaded = json.loads(self._memory.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def _remember(self, key: str, entry: dict[str, object]) -> None:
        temporary = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.tmp")
        try:
            self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self._load(), key: entry}))
            temporary.replace(self._memory)
        except OSError:  # nothing can be remembered on this host: the next process hashes again
            pass
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _remembered(entry: object, identity: list[int]) -> bytes | None:
    """The digest of an entry, if it is valid and belongs to a file with this identity; else None."""
    if not isinstance(entry, dict) or entry.get("identity") != identity:
        return None
    text = entry.get("sha256")
    return bytes.fromhex(text) if isinstance(text, str) and _DIGEST.fullmatch(text) else None


def identity_of(path: Path) -> list[list[int]]:
    """Size, mtime_ns and inode of each shard: they differ if a model file was replaced.

    Raises:
        BadInput: a file does not exist or cannot be read.
    """
    try:
        return [_identity(shard) for shard in shards_of(path)]
    except OSError as error:
        raise BadInput(what="model file", value=str(path), reason=error.strerror or str(error)) from error


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _hash(path: Path, progress: Progress) -> bytes:
    sha, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            done += len(chunk)
            progress(done, total)
    return sha.digest()
