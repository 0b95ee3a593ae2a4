"""What a store's files take, measured from outside, also while processes save and collect."""

from __future__ import annotations

import contextlib


def length(status):
    """The size of a file in bytes."""
    return status.st_size


def occupied(status):
    """The bytes that a file takes on the disk, without its holes."""
    return status.st_blocks * 512


def files_in_shards(root, size_of=length):
    """The store's files with their sizes, by their checkpoints' ids: a temporary gets its name while one looks."""
    found = {}
    for path in root.glob("??/??/*"):
        with contextlib.suppress(FileNotFoundError):  # it went or got its name since it was listed
            found[path.name.partition(".")[0]] = size_of(path.stat())
    return found


def bytes_in_shards(root):
    """What the store's files take when nobody is at work, by their sizes."""
    return sum(files_in_shards(root).values())


def bytes_seen_at_once(root, size_of=length):
    """What files took that were all there at one moment: those that two looks found. One look alone would add up a file that
    went while it looked and the one that took its room.
    """
    before, after = files_in_shards(root, size_of), files_in_shards(root, size_of)
    return sum(min(before[one], after[one]) for one in before.keys() & after.keys())
