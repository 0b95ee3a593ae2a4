"""Commands that keep the disk clean: prune, gc, stats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.output import count, size, span, when
from llama_ckpt_cli.session import Session, command, confirm

if TYPE_CHECKING:
    from llama_ckpt.values import GcPlan, GcReport, Verdict

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "prune")(prune)
    command(app, "gc")(gc)
    command(app, "stats")(stats)


def prune(
    session: Session,
    max_age: Annotated[str | None, typer.Option(help="Mark what was saved longer ago, e.g. 30d.")] = None,
    max_idle: Annotated[str | None, typer.Option(help="Mark what was not used for longer, e.g. 7d.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Mark checkpoints STALE by age, or by their own expiry. Frees no bytes: gc does, after the grace."""
    from llama_ckpt.collector import Collector
    from llama_ckpt.config import seconds
    from llama_ckpt.retention import Policy

    age, idle = session.value("max_age", max_age), session.value("max_idle", max_idle)
    policy = Policy(
        max_age_s=seconds(age, "--max-age") if age else None, max_idle_s=seconds(idle, "--max-idle") if idle else None
    )
    if dry_run:
        with session.existing_registry(upgrade=False) as there:
            planned = Collector(there.parts).plan_prune(policy) if there else []
        return _tell_prune(session, planned, "would be marked STALE")
    with session.registry() as registry:
        collector = Collector(registry.parts)
        verdicts = collector.plan_prune(policy)
        if verdicts:
            if session.out.human and not yes:
                _show_prune(session, verdicts)
            confirm(session.out, f"mark {count(len(verdicts), 'checkpoint')} STALE?", yes=yes)
            verdicts = collector.prune(verdicts)
    return _tell_prune(session, verdicts, "marked STALE")


def _show_prune(session: Session, verdicts: list[Verdict]) -> None:
    rows = [[v.checkpoint.id[:12], v.checkpoint.model_name, size(v.checkpoint.file_size), v.rule] for v in verdicts]
    if rows:
        session.out.table(["id", "model", "size", "rule"], rows, right=["size"])


def _tell_prune(session: Session, verdicts: list[Verdict], done: str) -> None:
    total = size(sum(v.checkpoint.file_size for v in verdicts))

    def human() -> None:
        _show_prune(session, verdicts)
        session.out.line(f"{count(len(verdicts), 'checkpoint')} {done} ({total})")

    session.out.result(verdicts, human, [v.checkpoint.id for v in verdicts])


def gc(
    session: Session,
    dry_run: DryRun = False,
    yes: Yes = False,
    stale_grace: Annotated[str | None, typer.Option(help="Leave rows alone that went STALE less long ago.")] = None,
    ghost_grace: Annotated[str | None, typer.Option(help="Leave files without a row alone that are younger.")] = None,
    force: Annotated[str | None, typer.Option(metavar="REGISTRY-ID", help="Run against the evidence.")] = None,
) -> None:
    """Free the bytes of STALE checkpoints, of files without a row and of interrupted writes."""
    from llama_ckpt.collector import NOTHING, Collector
    from llama_ckpt.config import seconds
    from llama_ckpt.errors import StoreUnavailable

    graces = {
        "stale_grace_s": seconds(session.value("stale_grace", stale_grace), "--stale-grace"),
        "ghost_grace_s": seconds(session.value("ghost_grace", ghost_grace), "--ghost-grace"),
    }
    if dry_run:
        with session.existing_registry(upgrade=False) as there:
            plan = Collector(there.parts).plan(**graces, force=force) if there else NOTHING
        _note_foreign(session, plan)
        return session.out.result(plan, lambda: _tell_plan(session, plan), [item.path for item in plan.items])
    with session.registry() as registry:
        collector = Collector(registry.parts)
        plan = collector.plan(**graces, force=force)
        _note_foreign(session, plan)
        if plan.items and not yes:
            if session.out.human:
                _tell_plan(session, plan)
            confirm(session.out, f"free {size(plan.size_bytes)}?", yes=False)
        report = collector.run(plan)
    session.out.result(report, lambda: _tell_report(session, report), [str(report.freed_bytes)])
    if report.n_failed:  # cron must notice
        reason = f"{count(report.n_failed, 'file')} could not be deleted; the next run tries again"
        raise StoreUnavailable(path=registry.store.root, reason=reason)
    return None


def _note_foreign(session: Session, plan: GcPlan) -> None:
    for finding in plan.findings:
        session.out.note(f"left alone: {finding.path}: {finding.detail}")


def _tell_plan(session: Session, plan: GcPlan) -> None:
    if plan.items:
        rows = [[i.kind.value, i.path, size(i.size_bytes), span(i.age_s), i.reason] for i in plan.items]
        session.out.table(["kind", "file", "size", "age", "reason"], rows, right=["size", "age"])
    seen = f"{count(plan.n_rows, 'row')} and {count(plan.n_files, 'file')} seen"
    session.out.line(f"{count(len(plan.items), 'item')}, {size(plan.size_bytes)} to free; {seen}")


def _tell_report(session: Session, report: GcReport) -> None:
    for item, result in report.done:
        session.out.line(f"{item.kind:<9} {item.path}  {result}")
    words = f"run {report.run_no}: freed {size(report.freed_bytes)}"
    session.out.line(
        words + (f"; {report.n_failed} could not be deleted, the next run tries again" if report.n_failed else "")
    )


def stats(session: Session) -> None:
    """Show totals: checkpoints, bytes, hits, time spared; per model; the last runs of prune and gc."""
    from llama_ckpt.collector import Collector

    with session.registry() as registry:
        totals = registry.stats()
        runs = Collector(registry.parts).runs(5)
        free = registry.store.free_bytes()
        store, database = registry.store.root, registry.database.shown_url

    def human() -> None:
        session.out.fields(
            {
                "database": database,
                "store": f"{store} ({size(free)} free)",
                "ACTIVE": f"{count(totals.n_active, 'checkpoint')}, {totals.n_tokens} tokens, {size(totals.active_bytes)}",
                "STALE": f"{count(totals.n_stale, 'checkpoint')}, {size(totals.stale_bytes)} that gc can free",
                "hits": totals.hit_count,
                "evaluation spared": span(totals.spared_ms / 1000),
            }
        )
        if totals.models:
            rows = [
                [
                    m.model_name,
                    m.fingerprint.hex()[:12],
                    str(m.n_active),
                    size(m.active_bytes),
                    size(m.bytes_per_token),
                    str(m.hit_count),
                ]
                for m in totals.models
            ]
            columns = ["model", "fingerprint", "checkpoints", "size", "per token", "hits"]
            session.out.table(columns, rows, right=columns[2:])
        for run in runs:
            did = f"{count(run.n_items, 'item')}, {size(run.freed_bytes)} freed, {run.n_failed} failed"
            session.out.line(f"run {run.run_no} {run.kind} {when(run.started_us)}: {did}")

    value = {"totals": totals, "runs": runs, "free_bytes": free, "store": store, "database": database}
    session.out.result(value, human, [str(totals.n_active)])
