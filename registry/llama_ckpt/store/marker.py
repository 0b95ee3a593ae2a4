"""The marker: a small file in the store's folder that names the registry whose files the store contains.

A store without this registry's marker is not mounted, or is the wrong folder: a file that is missing in it proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

from llama_ckpt.errors import StoreUnavailable
from llama_ckpt.store.disk import fsync_folder, put_in_place, store_errors, write_all

MARKER = "llama-ckpt-store.json"


def claim(root: Path, registry_id: str) -> None:
    """Marks the store as this registry's. A store that has a readable marker stays as it is.

    Raises:
        StoreUnavailable: the marker cannot be written.
    """
    if owner(root) is not None:
        return
    with store_errors(root), contextlib.suppress(FileExistsError):
        data = json.dumps({"registry_id": registry_id, "made_by": "llama-ckpt"}).encode()
        temporary = root / f".{MARKER}.{uuid.uuid4().hex}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                write_all(fd, memoryview(data))
                os.fsync(fd)
            finally:
                os.close(fd)
            put_in_place(temporary, root / MARKER)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(root)


def owner(root: Path) -> str | None:
    """The id of the registry that the store is marked for; None if it has no readable marker."""
    try:
        marker = json.loads((root / MARKER).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    registry_id = marker.get("registry_id") if isinstance(marker, dict) else None
    return registry_id if isinstance(registry_id, str) else None


def require_owner(root: Path, registry_id: str, *, unmarked: bool) -> None:
    """Checks that the store is marked for this registry. With `unmarked`, a store without a marker passes too.

    Raises:
        StoreUnavailable: the marker names another registry, or there is none.
    """
    owner_id = owner(root)
    if owner_id is None and not unmarked:
        hint = f"is it mounted? If the files are really gone, say so with: llama-ckpt gc --force {registry_id}"
        reason = f"it contains no marker of this registry, whose rows name files in it: {hint}"
        raise StoreUnavailable(path=root, reason=reason)
    if owner_id not in (None, registry_id):
        hint = f"name the right database or store (to give this store to this database, delete {MARKER} in it)"
        reason = f"it belongs to registry {owner_id}, this database is registry {registry_id}: {hint}"
        raise StoreUnavailable(path=root, reason=reason)
