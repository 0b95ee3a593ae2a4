"""Commands about checkpoints: warm, match, ls, show, pin, unpin, rm, flatten."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import size
from llama_ckpt_cli.inputs import ContextSize, FlashAttention, Gguf, KvType, Text, TextFile, Threads
from llama_ckpt_cli.output import span, when
from llama_ckpt_cli.session import MATCHING, Session, command

if TYPE_CHECKING:
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Checkpoint, MatchResult, WarmResult
    from llama_ckpt_cli.inputs import Asked
    from llama_ckpt_cli.output import Output

NO_MATCH_EXIT = 3

Label = Annotated[str | None, typer.Option("--label", help="A word of yours to find it by.")]
Ids = Annotated[list[str], typer.Argument(help="Checkpoint ids, or their first digits.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "warm")(warm)
    command(app, "match", policy=MATCHING)(match)
    command(app, "ls")(ls)
    command(app, "show")(show)
    command(app, "pin")(pin)
    command(app, "unpin")(unpin)
    command(app, "rm")(rm)
    command(app, "flatten")(flatten)


def warm(
    session: Session,
    model: Gguf,
    text_file: TextFile = None,
    text: Text = None,
    n_ctx: ContextSize = 8192,
    flash_attn: FlashAttention = False,
    kv_type: KvType = "f16",
    threads: Threads = None,
    label: Label = None,
    expires_in: Annotated[
        str | None, typer.Option("--expires-in", help="Offer it no longer than this, e.g. 7d.")
    ] = None,
) -> None:
    """Restore an input's checkpoint, or evaluate the input and save it. Saves each input once."""
    from llama_ckpt.config import seconds
    from llama_ckpt.values import Outcome
    from llama_ckpt_cli.inputs import input_text, load_engine

    given = input_text(text, text_file)
    expires_in_s = None if expires_in is None else seconds(expires_in, "--expires-in")
    with session.registry() as registry:
        engine = load_engine(session.out, model, n_ctx=n_ctx, flash_attn=flash_attn, kv_type=kv_type, threads=threads)
        with session.out.progress("evaluating") as progress:
            result = registry.warm(engine, given, label=label, expires_in_s=expires_in_s, progress=progress)
    restored = result.restore.checkpoint if result.restore.outcome is Outcome.HIT else None
    checkpoint = result.save.checkpoint if result.save else restored
    session.out.result(
        result, lambda: _tell_warm(session.out, result, checkpoint), [checkpoint.id] if checkpoint else []
    )
    if result.problem is not None:
        raise result.problem


def _outcome_of_warm(result: WarmResult) -> str:
    restored = result.restore.outcome == "hit"
    if restored and result.save is None and result.problem is None:
        return "restored"
    first = "restored in part" if restored else "evaluated"
    return f"{first}, {result.save.outcome if result.save else 'not saved'}"


def _tell_warm(out: Output, result: WarmResult, checkpoint: Checkpoint | None) -> None:
    save = result.save
    out.fields(
        {
            "outcome": _outcome_of_warm(result),
            "why": result.restore.reason,
            "tokens restored": result.n_restored,
            "tokens evaluated": result.n_evaluated,
            "took": span(result.elapsed_s),
            "checkpoint": checkpoint.id if checkpoint else None,
            "written": size(save.bytes_written) if save else "nothing",
        }
    )


def match(
    session: Session,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A registered model's name, or a GGUF file.")
    ] = None,
    text_file: TextFile = None,
    text: Text = None,
    hash_hex: Annotated[str | None, typer.Option("--hash", help="SHA-256 of the input, 64 hex digits.")] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="File with the input's token ids, decimal; - reads stdin.")
    ] = None,
) -> None:
    """Say which checkpoint matches an input, whole or by prefix. Exit code 3: none.

    Only prefixes of a text need llama-cpp-python, and a GGUF file as --model: its vocabulary, not its weights.
    """
    from llama_ckpt.values import MatchResult, Outcome
    from llama_ckpt_cli.inputs import asked_input, weights_of

    asked = asked_input(text, text_file, hash_hex, tokens)
    weights = None if model is None else weights_of(model, session.out)
    found = MatchResult(outcome=Outcome.NO_MATCH, reason="there is no registry yet", input_hash=asked.input_hash)
    with session.existing_registry() as registry:
        if registry is not None:
            found = _find(session.out, registry, asked, model, weights)
    bare = [found.checkpoint.id] if found.checkpoint else []
    session.out.result(found, lambda: _tell_match(session.out, found), bare)
    if found.error is not None:
        raise found.error
    if found.outcome is not Outcome.HIT:
        raise typer.Exit(NO_MATCH_EXIT)


def _find(out: Output, registry: Registry, asked: Asked, model: str | None, weights: bytes | None) -> MatchResult:
    """By hash where that is all there is or enough; a vocabulary is loaded only for a text that is not found whole."""
    from llama_ckpt.values import Outcome
    from llama_ckpt_cli.inputs import load_vocabulary

    name = model if weights is None else None
    if asked.given is not None and not isinstance(asked.given, str):
        return registry.match(asked.given, model=name, weights=weights)
    found = registry.match_hash(asked.input_hash, model=name, weights=weights)
    if found.outcome is not Outcome.NO_MATCH or asked.given is None or weights is None:
        return found
    vocabulary = load_vocabulary(str(model), out)
    return found if vocabulary is None else registry.match(asked.given, vocabulary=vocabulary, weights=weights)


def _tell_match(out: Output, found: MatchResult) -> None:
    pairs = {"outcome": found.outcome.value, "reason": found.reason, "input SHA-256": found.input_hash.hex()}
    row = found.checkpoint or found.nearest
    if found.checkpoint is not None:
        c = found.checkpoint
        pairs |= {
            "checkpoint": c.id,
            "model": c.model_name,
            "tokens matching": f"{found.n_matching} of {found.n_tokens}; the checkpoint has {c.n_tokens}",
            "tokens reusable": f"{found.n_reusable} of {found.n_tokens}",
            "file": f"{c.file_path} ({size(c.file_size)})",
            "saved": when(c.created_us),
            "hits": str(c.hit_count),
        }
    elif row is not None:
        pairs["nearest"] = f"{row.id} ({row.model_name})"
    if found.divergence is not None:
        d = found.divergence
        texts = {"after": d.before, "input goes on": d.in_input, "checkpoint goes on": d.in_checkpoint}
        pairs["diverges at token"] = str(d.at)
        pairs |= {name: repr(text) for name, text in texts.items() if text is not None}
    out.fields(pairs)


def ls(
    session: Session,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only this model's, by name.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Only with this label.")] = None,
    all_rows: Annotated[bool, typer.Option("--all", "-a", help="STALE ones too.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest first.")] = 50,
) -> None:
    """List checkpoints, newest first."""
    from llama_ckpt.values import Status

    status = None if all_rows else Status.ACTIVE
    with session.registry() as registry:
        rows = registry.list(status=status, model_name=model, label=label, at_most=limit + 1)

    more, rows = len(rows) > limit, rows[:limit]

    def human() -> None:
        columns = ["id", "model", "tokens", "size", "saved", "used", "hits", "status", "label"]
        session.out.table(columns, [_row(c) for c in rows], right=["tokens", "size", "hits"])

    session.out.result(rows, human if rows else lambda: None, [c.id for c in rows])
    if not rows:
        session.out.note("no checkpoints" + ("" if all_rows else " that are ACTIVE; --all shows STALE ones too"))
    elif more:
        session.out.note(f"the newest {limit}; --limit shows more")


def _row(c: Checkpoint) -> list[str]:
    def ago(time_us: int) -> str:
        return span(max(0.0, time.time() - time_us / 1_000_000)) + " ago"

    status = c.status.value + (f" ({c.stale_reason})" if c.stale_reason else "") + (" pinned" if c.pinned else "")
    return [c.id[:12], c.model_name, str(c.n_tokens), size(c.file_size), ago(c.created_us), ago(c.last_used_us),
            str(c.hit_count), status, c.label or ""]  # fmt: skip


def show(session: Session, checkpoint_id: Annotated[str, typer.Argument(help="An id, or its first digits.")]) -> None:
    """Show everything that is known of one checkpoint."""
    with session.registry() as registry:
        c = registry.get(checkpoint_id)
        path = registry.store.root / c.file_path
        models = [m for m in registry.models() if m.fingerprint.digest == c.fingerprint]
        parent = "" if c.parent_no is None else registry.parent_of(c).id
    pairs = {
        "id": c.id,
        "status": c.status.value + (f": {c.stale_reason}, {when(c.stale_us)}" if c.stale_reason else ""),
        "model": c.model_name,
        "input SHA-256": c.input_hash.hex(),
        "tokens": f"{c.n_tokens} ({c.memory_kind} memory)",
        "stands on": None if c.parent_no is None else f"{parent} for its first {c.start_token} tokens",
        "file": "none: all of its cells are in what it stands on" if c.is_covered else f"{path} ({size(c.file_size)})",
        "payload CRC-32": f"{c.payload_crc32:08x}",
        "fingerprint": c.fingerprint.hex(),
        **{f"  {k}": v for m in models for k, v in m.fingerprint.fields.items()},
        "saved": when(c.created_us),
        "last used": when(c.last_used_us),
        "last verified": when(c.verified_us),
        "expires": when(c.expires_us),
        "hits": c.hit_count,
        "evaluation took": span(c.prefill_ms / 1000) if c.prefill_ms is not None else None,
        "pinned": "yes" if c.pinned else "no",
        "label": c.label,
    }
    session.out.result(c, lambda: session.out.fields(pairs), [c.file_path])


def pin(session: Session, ids: Ids) -> None:
    """Shield checkpoints from prune, gc and rm."""
    _each(session, ids, "pin", "pinned")


def unpin(session: Session, ids: Ids) -> None:
    """Take pins away."""
    _each(session, ids, "unpin", "unpinned")


def rm(session: Session, ids: Ids) -> None:
    """Offer checkpoints no more: they become STALE, and gc frees their files after the grace."""
    _each(session, ids, "remove", "STALE ({reason}); gc frees it after the grace")


def flatten(session: Session, ids: Ids) -> None:
    """Make deltas whole: each gets a file with all of its cells, so that what it stood on can be removed."""
    _each(session, ids, "flatten", "whole")


def _each(session: Session, ids: list[str], verb: str, done: str) -> None:
    """One after the other; what was done before a failure is told before the failure."""
    from llama_ckpt.errors import LlamaCkptError

    changed: list[Checkpoint] = []
    failure: LlamaCkptError | None = None
    with session.registry() as registry:
        for one in ids:
            try:
                changed.append(getattr(registry, verb)(one))
            except LlamaCkptError as error:
                failure = error
                break

    def human() -> None:
        for c in changed:
            session.out.line(f"{c.id} {done.format(reason=c.stale_reason)}")

    session.out.result(changed, human if changed else lambda: None, [c.id for c in changed])
    if failure is not None:
        raise failure
