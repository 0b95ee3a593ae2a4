"""The commands about single checkpoints: ls, show, pin, unpin, rm, flatten."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import bytes_, duration, number, timestamp
from llama_ckpt_cli.help_format import CLEAN, OPERATE, USE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import MAX_COUNT, CheckpointId, CheckpointIds
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Checkpoint

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="List only checkpoints of the model with this name.", metavar="NAME")
]
OfLabel = Annotated[str | None, typer.Option("--label", help="List only checkpoints with this label.", metavar="LABEL")]
AllRows = Annotated[bool, typer.Option("--all", "-a", help="List STALE checkpoints too.")]
Limit = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=MAX_COUNT, help="List at most this many, newest first.", metavar="N")
]

_CHECKPOINTS = (
    Column(name="id", shorten=Shorten.PREFIX, at_least=8, at_most=12),
    Column(name="model", shorten=Shorten.MIDDLE, at_least=16),
    Column(name="tokens", right=True),
    Column(name="size", right=True),
    Column(name="saved", right=True),
    Column(name="used", right=True, drop_rank=2),
    Column(name="hits", right=True, drop_rank=1),
    Column(name="status", shorten=Shorten.END, at_least=len("ACTIVE pinned")),
    Column(name="label", shorten=Shorten.MIDDLE, at_least=8, drop_rank=3),
)


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "ls", group=USE)(ls)
    command(app, "show", group=USE)(show)
    command(app, "rm", group=CLEAN)(rm)
    command(app, "pin", group=CLEAN)(pin)
    command(app, "unpin", group=CLEAN)(unpin)
    command(app, "flatten", group=OPERATE)(flatten)


def ls(
    invocation: Invocation,
    model: Model = None,
    label: OfLabel = None,
    all_rows: AllRows = False,
    limit: Limit = 50,
) -> None:
    """List checkpoints, newest first."""
    from llama_ckpt.values import Status

    status, out = None if all_rows else Status.ACTIVE, invocation.out
    with invocation.registry() as registry:
        rows = registry.list(status=status, model_name=model, label=label, at_most=limit + 1)
    listed = rows[:limit]

    def human() -> None:
        if listed:
            out.table(_CHECKPOINTS, [_row(c) for c in listed])

    out.result(listed, human, [c.id for c in listed])
    if not listed:
        out.note("no checkpoints" if all_rows else "no ACTIVE checkpoints; --all lists STALE ones too")
    elif len(rows) > limit:
        out.note(f"only the newest {limit} are listed; --limit lists more")


def _row(c: Checkpoint) -> list[str]:
    def ago(time_us: int) -> str:
        return duration(max(0.0, time.time() - time_us / 1_000_000)) + " ago"

    status = c.status.value + (" pinned" if c.pinned else "") + (f" ({c.stale_reason})" if c.stale_reason else "")
    times = [ago(c.created_us), ago(c.last_used_us)]
    return [
        *(c.id, c.model_name, number(c.n_tokens), bytes_(c.file_size)),
        *(*times, number(c.hit_count), status, c.label or ""),
    ]


def show(invocation: Invocation, checkpoint_id: CheckpointId) -> None:
    """Show everything the registry knows about one checkpoint."""
    with invocation.registry() as registry:
        c = registry.get(checkpoint_id)
        pairs = _identity(registry, c) | _history(c)
    invocation.out.result(c, lambda: invocation.out.fields(pairs), [c.file_path])


def _identity(registry: Registry, c: Checkpoint) -> dict[str, Any]:
    """What the checkpoint is: its model, input, tokens and file."""
    parent = None
    if c.parent_no is not None:
        parent = f"{registry.parent_of(c).id}, for the first {number(c.start_token)} tokens"
    file = f"{registry.store.root / c.file_path} ({bytes_(c.file_size)})"
    models = [m for m in registry.models() if m.fingerprint.digest == c.fingerprint]
    return {
        "id": c.id,
        "status": c.status.value + (f": {c.stale_reason}, {timestamp(c.stale_us)}" if c.stale_reason else ""),
        "model": c.model_name,
        "input SHA-256": c.input_hash.hex(),
        "tokens": f"{number(c.n_tokens)} ({c.memory_kind} memory)",
        "parent": parent,
        "file": "none: the parent has all of its cells" if c.is_covered else file,
        "payload CRC-32": f"{c.payload_crc32:08x}",
        "fingerprint": c.fingerprint.hex(),
        **{f"  {k}": v for m in models for k, v in m.fingerprint.fields.items()},
    }


def _history(c: Checkpoint) -> dict[str, Any]:
    """What has happened to the checkpoint, and what will."""
    return {
        "saved": timestamp(c.created_us),
        "last used": timestamp(c.last_used_us),
        "last verified": timestamp(c.verified_us),
        "expires": timestamp(c.expires_us),
        "hits": number(c.hit_count),
        "evaluation took": duration(c.prefill_ms / 1000) if c.prefill_ms is not None else None,
        "pinned": "yes" if c.pinned else "no",
        "label": c.label,
    }


def pin(invocation: Invocation, ids: CheckpointIds) -> None:
    """Protect checkpoints from prune, gc and rm until they are unpinned. `purge` deletes pinned checkpoints, too."""
    _each(invocation, ids, lambda registry, i: registry.pin(i), "pinned")


def unpin(invocation: Invocation, ids: CheckpointIds) -> None:
    """Remove the pins, so that prune, gc and rm apply to the checkpoints again."""
    _each(invocation, ids, lambda registry, i: registry.unpin(i), "unpinned")


def rm(invocation: Invocation, ids: CheckpointIds) -> None:
    """Remove checkpoints: mark them STALE, so that they are no longer offered and gc deletes their files later."""
    done = "STALE ({reason}); gc deletes its file after the grace period"
    _each(invocation, ids, lambda registry, i: registry.remove(i), done)


def flatten(invocation: Invocation, ids: CheckpointIds) -> None:
    """Rewrite delta checkpoints as complete files, so that the checkpoints they depend on can be removed."""
    _each(invocation, ids, lambda registry, i: registry.flatten(i), "complete: no longer depends on another checkpoint")


def _each(invocation: Invocation, ids: Sequence[str], change: Callable[[Registry, str], Checkpoint], done: str) -> None:
    """Changes one checkpoint after the other. A failure ends it, after what was changed before it is reported."""
    from llama_ckpt.errors import LlamaCkptError

    changed: list[Checkpoint] = []
    failure: LlamaCkptError | None = None
    with invocation.registry() as registry:
        for checkpoint_id in ids:
            try:
                changed.append(change(registry, checkpoint_id))
            except LlamaCkptError as error:
                failure = error
                break

    def human() -> None:
        for c in changed:
            invocation.out.line(f"{c.id} {done.format(reason=c.stale_reason)}")

    invocation.out.result(changed, human, [c.id for c in changed])
    if failure is not None:
        raise failure
