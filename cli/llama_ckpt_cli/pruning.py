"""Commands of the retention policy: prune, unprune, explain, purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.session import LIMITS, Session, command, confirm

if TYPE_CHECKING:
    from llama_ckpt.collector.purge import Purge
    from llama_ckpt.gc_values import Verdict
    from llama_ckpt.registry import Registry

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_SHOWN = 100


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "prune", policy=LIMITS)(prune)
    command(app, "unprune")(unprune)
    command(app, "explain", policy=LIMITS)(explain)
    command(app, "purge")(purge)


def prune(session: Session, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Mark checkpoints STALE by the policy, or by their own expiry. Frees no bytes: gc does, after the grace."""
    from llama_ckpt.collector.collector import Collector

    policy = session.policy()
    if dry_run:
        with session.existing_registry(upgrade=False) as there:
            planned = Collector(there.context).plan_prune(policy) if there else []
        return _tell_prune(session, planned, "would be marked STALE")
    with session.registry() as registry:
        collector = Collector(registry.context)
        verdicts = collector.plan_prune(policy)
        if verdicts:
            if session.out.human and not yes:
                _show_prune(session, verdicts)
            confirm(session.out, f"mark {count(len(verdicts), 'checkpoint')} STALE?", yes=yes)
            verdicts = collector.prune(verdicts)
    return _tell_prune(session, verdicts, "marked STALE")


def _show_prune(session: Session, verdicts: list[Verdict]) -> None:
    rows = [[v.row.id[:12], v.model_name, size(v.size_bytes), v.rule] for v in verdicts[:_SHOWN]]
    if rows:
        session.out.table(["id", "model", "size", "rule"], rows, right=["size"])
    if len(verdicts) > _SHOWN:
        session.out.line(f"and {len(verdicts) - _SHOWN} more (--json lists all)")


def _tell_prune(session: Session, verdicts: list[Verdict], done: str) -> None:
    total = size(sum(v.size_bytes for v in verdicts))

    def human() -> None:
        _show_prune(session, verdicts)
        session.out.line(f"{count(len(verdicts), 'checkpoint')} {done} ({total})")

    session.out.result(verdicts, human, [v.row.id for v in verdicts])


def unprune(
    session: Session,
    ids: Annotated[list[str] | None, typer.Argument(help="Checkpoints, by id.", metavar="ID")] = None,
    since: Annotated[
        str | None, typer.Option(help="All that prune marked since then: a duration such as 2h, or a time in UTC.")
    ] = None,
) -> None:
    """Bring STALE checkpoints back whose files are still whole. Exit code 12: one did not come back."""
    from llama_ckpt.errors import BadInput, VerifyFailed
    from llama_ckpt.integrity.reconcile import MendOutcome, Reconciler

    if bool(ids) == bool(since):
        raise BadInput(what="unprune", value=since or "nothing", reason="name ids, or --since")
    with session.registry() as registry:
        reconciler = Reconciler(registry.context)
        rows = (
            [registry.get(i) for i in ids or []] if ids else reconciler.pruned_since(_since_us(registry, since or ""))
        )
        results = reconciler.unprune(rows)
    back = [result.checkpoint.id for result in results if result.outcome is MendOutcome.REACTIVATED]

    def human() -> None:
        for result in results:
            session.out.line(f"{result.checkpoint.id[:12]}  {result}")
        session.out.line(f"{len(back)} of {count(len(results), 'checkpoint')} ACTIVE again")

    value = [{"id": result.checkpoint.id, "result": str(result)} for result in results]
    session.out.result(value, human, back)
    if len(back) < len(results):
        raise VerifyFailed(n_failed=len(results) - len(back), n_checked=len(results))


def _since_us(registry: Registry, text: str) -> int:
    """A time, or a duration before the database's now, in microseconds since 1970."""
    from datetime import UTC, datetime

    from llama_ckpt.config import seconds
    from llama_ckpt.errors import BadInput

    try:
        return registry.clock_us() - round(seconds(text, "--since") * 1_000_000)
    except BadInput:
        pass  # no duration: a time, then
    try:
        moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError as error:
        reason = "expected a duration such as 2h, or a time such as 2026-05-01 14:30 (UTC)"
        raise BadInput(what="--since", value=text, reason=reason) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000)


def explain(session: Session, checkpoint_id: Annotated[str, typer.Argument(metavar="ID", help="Its id.")]) -> None:
    """Say what each rule of the policy makes of one checkpoint, and whether prune would keep it."""
    from llama_ckpt.collector.collector import Collector

    with session.registry() as registry:
        row = registry.get(checkpoint_id)
        opinions = Collector(registry.context).explain(row, session.policy())

    def human() -> None:
        session.out.table(["rule", "", "why"], [[o.rule, o.effect.value, o.why] for o in opinions])

    rules = [{"rule": o.rule, "word": o.effect, "why": o.why} for o in opinions]
    session.out.result({"id": row.id, "rules": rules}, human, [opinions[-1].effect.value])


def purge(
    session: Session,
    input_hash: Annotated[str | None, typer.Option(help="SHA-256 of the input, 64 hex digits.")] = None,
    label: Annotated[str | None, typer.Option(help="All checkpoints with this label.")] = None,
    model: Annotated[str | None, typer.Option(help="All checkpoints of this model's name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint, and every file of ours.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete rows and files now, pinned ones and deltas that need them too, and prove them gone. Cannot be undone."""
    from llama_ckpt.collector.purge import Purger

    chosen = _purge_of(input_hash, label, model, everything)
    with session.registry() as registry:
        purger = Purger(registry.context)
        rows = [seen.id for seen, _ in purger.plan(chosen)]
        if dry_run:
            return session.out.result(rows, lambda: _tell_purge(session, rows, "would be purged"), rows)
        confirm(session.out, f"delete {count(len(rows), 'checkpoint')} for good?", yes=yes)
        report = purger.run(chosen)

    def human() -> None:
        _tell_purge(session, rows, "purged")
        session.out.line(
            f"{count(report.n_files, 'file')} and {count(report.n_ghosts, 'ghost')} deleted,"
            f" {size(report.freed_bytes)} freed; a second look found none of them"
        )

    return session.out.result(report, human, rows)


def _tell_purge(session: Session, ids: list[str], done: str) -> None:
    for checkpoint_id in ids[:_SHOWN]:
        session.out.line(checkpoint_id)
    session.out.line(f"{count(len(ids), 'checkpoint')} {done}")


def _purge_of(input_hash: str | None, label: str | None, model: str | None, everything: bool) -> Purge:
    from llama_ckpt.collector.purge import Purge
    from llama_ckpt.errors import BadInput

    given = [name for name, value in (("--input-hash", input_hash), ("--label", label), ("--model", model)) if value]
    if len(given) + everything != 1:
        raise BadInput(
            what="purge", value=" ".join(given) or "nothing", reason="say one: --input-hash, --label, --model, --all"
        )
    try:
        digest = bytes.fromhex(input_hash) if input_hash else None
    except ValueError as error:
        raise BadInput(what="--input-hash", value=input_hash, reason="expected 64 hex digits") from error
    if digest is not None and len(digest) != 32:
        raise BadInput(what="--input-hash", value=input_hash, reason="expected 64 hex digits")
    return Purge(input_hash=digest, label=label or None, model_name=model or None, everything=everything)
