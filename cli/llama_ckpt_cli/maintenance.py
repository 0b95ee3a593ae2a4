"""Commands that keep the disk clean: gc, gc runs, stats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.output import span, when
from llama_ckpt_cli.session import GRACES, Session, command, confirm

if TYPE_CHECKING:
    from llama_ckpt.gc_values import GcKind, GcPlan, GcReport, GcRun

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_SHOWN = 100


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(rich_markup_mode=None)
    command(group, None, policy=GRACES)(gc)
    command(group, "runs")(runs)
    app.add_typer(group, name="gc")
    command(app, "stats")(stats)


def gc(
    session: Session,
    context: typer.Context,
    dry_run: DryRun = False,
    yes: Yes = False,
    now: Annotated[
        bool, typer.Option("--now", help="Take ghosts that no earlier run saw, and the quarantine.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="Kinds, with commas: stale,orphan,unreadable,temporary,missing.")
    ] = None,
    max_duration: Annotated[str | None, typer.Option(help="Begin no more work after this time, e.g. 5m.")] = None,
    max_delete: Annotated[int | None, typer.Option(min=0, help="Work on this many items at most.")] = None,
    force: Annotated[str | None, typer.Option(metavar="REGISTRY-ID", help="Run against the evidence.")] = None,
) -> None:
    """Free the bytes of STALE checkpoints, of files without a row and of interrupted writes. `gc runs`: what was done."""
    if (subcommand := context.invoked_subcommand) is not None:
        _require_no_options(context, subcommand)
        return None
    from llama_ckpt.collector.collector import NOTHING, Collector
    from llama_ckpt.config import seconds

    policy = session.policy()
    kinds = _kinds(only)

    def planned(collector: Collector) -> GcPlan:
        return collector.plan(policy, skip_grace=now, only=kinds, force=force)

    longest = None if max_duration is None else seconds(max_duration, "--max-duration")
    if dry_run:
        with session.existing_registry(upgrade=False) as there:
            plan = planned(Collector(there.context)) if there else NOTHING
        _note_left_alone(session, plan)
        return session.out.result(plan, lambda: _tell_plan(session, plan), [item.path for item in plan.items])
    with session.registry() as registry:
        collector = Collector(registry.context)
        plan = planned(collector)
        _note_left_alone(session, plan)
        if plan.items and not yes:
            if session.out.human:
                _tell_plan(session, plan)
            confirm(session.out, f"free {size(plan.size_bytes)}?", yes=False)
        report = collector.run(plan, max_duration_s=longest, max_delete=max_delete)
    value = {
        "run_no": report.run_no,
        "done": [(done.item, str(done)) for done in report.done],
        "freed_bytes": report.freed_bytes,
        "n_failed": report.n_failed,
        "n_left": report.n_left,
    }
    session.out.result(value, lambda: _tell_report(session, report), [str(report.freed_bytes)])
    return _require_all_deleted(session, report)


def _kinds(only: str | None) -> list[GcKind] | None:
    from llama_ckpt.errors import BadInput
    from llama_ckpt.gc_values import GcKind

    if only is None:
        return None
    words = [word.strip().lower() for word in only.split(",")]
    for word in words:
        if word not in list(GcKind):
            raise BadInput(what="--only", value=word, reason=f"kinds are {', '.join(GcKind)}")
    return [GcKind(word) for word in words]


def _require_all_deleted(session: Session, report: GcReport) -> None:
    from llama_ckpt.errors import StoreUnavailable

    if report.n_failed:  # cron must notice
        reason = f"{count(report.n_failed, 'file')} could not be deleted; the next run tries again"
        raise StoreUnavailable(path=session.root, reason=reason)


def _require_no_options(context: typer.Context, subcommand: str) -> None:
    """Options before a subcommand would be read and lost.

    Raises:
        BadInput: there are some.
    """
    from llama_ckpt.errors import BadInput

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            reason = f"say it behind {subcommand}: llama-ckpt {context.info_name} {subcommand} {parameter.opts[0]} …"
            raise BadInput(what="option", value=parameter.opts[0], reason=reason)


def _note_left_alone(session: Session, plan: GcPlan) -> None:
    for finding in plan.findings:
        session.out.note(f"left alone: {finding.path}: {finding.detail}")
    if plan.waiting:
        session.out.note(
            f"{count(len(plan.waiting), 'ghost')} left for a later run (--now takes them at once, without --only):"
        )
    for item in plan.waiting[:_SHOWN]:
        session.out.note(f"  {item.path}: {item.reason}")


def _tell_plan(session: Session, plan: GcPlan) -> None:
    if plan.items:
        rows = [[i.kind.value, i.path, size(i.size_bytes), span(i.age_s), i.reason] for i in plan.items[:_SHOWN]]
        session.out.table(["kind", "file", "size", "age", "reason"], rows, right=["size", "age"])
    if len(plan.items) > _SHOWN:
        session.out.line(f"and {len(plan.items) - _SHOWN} more (--json lists all)")
    seen = f"{count(plan.n_rows, 'row')} and {count(plan.n_files, 'file')} seen"
    session.out.line(f"{count(len(plan.items), 'item')}, {size(plan.size_bytes)} to free; {seen}")


def _tell_report(session: Session, report: GcReport) -> None:
    for done in report.done:
        session.out.line(f"{done.item.kind:<10} {done.item.path}  {done}")
    words = f"run {report.run_no}: freed {size(report.freed_bytes)}"
    if report.n_failed:
        words += f"; {report.n_failed} could not be deleted, the next run tries again"
    if report.n_left:
        words += f"; {count(report.n_left, 'item')} left for the next run"
    session.out.line(words)


def runs(
    session: Session, last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many runs to show.")] = 20
) -> None:
    """Show the last runs of prune and gc: when, where, what they did."""
    from llama_ckpt.collector.collector import Collector

    with session.registry() as registry:
        found = Collector(registry.context).runs(last)

    def human() -> None:
        columns = ["run", "kind", "started", "took", "host", "items", "failed", "freed"]
        session.out.table(columns, [_run_line(run) for run in found], right=["run", "took", "items", "failed", "freed"])

    session.out.result(found, human, [str(run.run_no) for run in found])


def _run_line(run: GcRun) -> list[str]:
    took = "not ended" if run.ended_us is None else span((run.ended_us - run.started_us) / 1_000_000)
    figures = [str(run.n_items), str(run.n_failed), size(run.freed_bytes)]
    return [str(run.run_no), run.kind, when(run.started_us), took, run.host.split(":")[0], *figures]


def stats(session: Session) -> None:
    """Show totals: checkpoints, bytes, hits, time spared; per model; the last runs of prune and gc."""
    from llama_ckpt.collector.collector import Collector

    with session.registry() as registry:
        totals = registry.stats()
        runs = Collector(registry.context).runs(5)
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
        if totals.events:
            session.out.table(
                ["met in files", "times"], [[k, str(n)] for k, n in totals.events.items()], right=["times"]
            )
        for run in runs:
            did = f"{count(run.n_items, 'item')}, {size(run.freed_bytes)} freed, {run.n_failed} failed"
            session.out.line(f"run {run.run_no} {run.kind} {when(run.started_us)}: {did}")

    value = {"totals": totals, "runs": runs, "free_bytes": free, "store": store, "database": database}
    session.out.result(value, human, [str(totals.n_active)])
