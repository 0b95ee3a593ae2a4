"""The commands that delete files that are no longer needed: gc, gc runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import bytes_, duration, number, plural, timestamp
from llama_ckpt_cli.help_format import CLEAN, HelpGroup
from llama_ckpt_cli.invocation import Invocation, command, confirm
from llama_ckpt_cli.options import MAX_COUNT, N_LISTED, DryRun, Yes
from llama_ckpt_cli.policy_options import GRACES
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.gc_values import GcKind, GcPlan, GcReport, GcRun

Now = Annotated[
    bool,
    typer.Option(
        "--now",
        help="Delete ghosts at their first sighting, not only after a second run saw them, and delete the unreadable files"
        " that an earlier run put into quarantine. STALE checkpoints still wait for --stale-grace, and only --ghost-grace"
        " then protects the file of a save that is still running.",
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        help="Handle only these kinds, separated by commas: stale (files of STALE checkpoints), orphan (ghosts), unreadable"
        " (damaged files), temporary (interrupted writes), missing (checkpoints whose file is gone: they are marked STALE).",
        metavar="KINDS",
    ),
]
MaxDuration = Annotated[
    str | None, typer.Option("--max-duration", help="Start no more deletions after this time, e.g. 5m.", metavar="TIME")
]
MaxDelete = Annotated[
    int | None,
    typer.Option("--max-delete", min=0, max=MAX_COUNT, help="Process at most this many items (0: none).", metavar="N"),
]
Force = Annotated[
    str | None,
    typer.Option(
        "--force",
        help="Run although gc refuses because database and store do not seem to belong together, or many files are missing."
        " Check --store and --database-url first: this can delete files that another registry needs. The refusal names the"
        " registry id to give here.",
        metavar="REGISTRY-ID",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(cls=HelpGroup, rich_markup_mode=None)
    command(group, None, policy=GRACES)(gc)
    command(group, "runs")(runs)
    app.add_typer(group, name="gc", rich_help_panel=CLEAN)


def gc(
    invocation: Invocation,
    context: typer.Context,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    now: Now = False,
    only: Only = None,
    max_duration: MaxDuration = None,
    max_delete: MaxDelete = None,
    force: Force = None,
) -> None:
    """Delete files that are no longer needed: files of STALE checkpoints past their grace period, files that the database
    does not know (ghosts), and interrupted writes. Shows the plan and asks first. `gc runs` lists past runs.
    """
    if (subcommand := context.invoked_subcommand) is not None:
        return _require_no_options(context, subcommand)
    from llama_ckpt.config import seconds

    selection = {"skip_grace": now, "only": _kinds(only), "force": force}
    max_duration_s = None if max_duration is None else seconds(max_duration, "--max-duration")
    if dry_run:
        return _show_plan(invocation, selection)
    return _run(invocation, selection, yes=yes, max_duration_s=max_duration_s, max_delete=max_delete)


def _show_plan(invocation: Invocation, selection: dict[str, Any]) -> None:
    from llama_ckpt.collector.collector import NOTHING, Collector

    with invocation.existing_registry(upgrade=False) as registry:
        plan = _plan(invocation, Collector(registry.context), selection) if registry else NOTHING
    _note_left_alone(invocation, plan)
    invocation.out.result(plan, lambda: _print_plan(invocation, plan), [item.path for item in plan.items])


def _run(
    invocation: Invocation,
    selection: dict[str, Any],
    *,
    yes: bool,
    max_duration_s: float | None,
    max_delete: int | None,
) -> None:
    from llama_ckpt.collector.collector import Collector

    with invocation.registry() as registry:
        collector = Collector(registry.context)
        plan = _plan(invocation, collector, selection)
        _note_left_alone(invocation, plan)
        if plan.items and not yes:
            if invocation.out.human:
                _print_plan(invocation, plan)
            confirm(invocation.out, f"delete {plural(len(plan.items), 'item')} ({bytes_(plan.size_bytes)})?", yes=False)
        report = collector.run(plan, max_duration_s=max_duration_s, max_delete=max_delete)
    value = {
        "run_no": report.run_no,
        "done": [(done.item, str(done)) for done in report.done],
        "freed_bytes": report.freed_bytes,
        "n_failed": report.n_failed,
        "n_left": report.n_left,
    }
    invocation.out.result(value, lambda: _print_report(invocation, report), [str(report.freed_bytes)])
    _require_all_deleted(invocation, report)


def _plan(invocation: Invocation, collector: Collector, selection: dict[str, Any]) -> GcPlan:
    return collector.plan(invocation.policy(), **selection)


def _kinds(only: str | None) -> list[GcKind] | None:
    from llama_ckpt.errors import BadInput
    from llama_ckpt.gc_values import GcKind

    if only is None:
        return None
    words = [word.strip().lower() for word in only.split(",")]
    for word in words:
        if word not in list(GcKind):
            raise BadInput(what="--only", value=word, reason=f"the kinds are {', '.join(GcKind)}")
    return [GcKind(word) for word in words]


def _require_all_deleted(invocation: Invocation, report: GcReport) -> None:
    from llama_ckpt.errors import StoreUnavailable

    if report.n_failed:  # cron must notice
        reason = f"{plural(report.n_failed, 'file')} could not be deleted; the next run tries again"
        raise StoreUnavailable(path=invocation.root, reason=reason)


def _require_no_options(context: typer.Context, subcommand: str) -> None:
    """Rejects options before a subcommand, which would otherwise be ignored.

    Raises:
        BadInput: there is such an option.
    """
    from llama_ckpt.errors import BadInput

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            reason = f"put it after {subcommand}: llama-ckpt {context.info_name} {subcommand} {option} …"
            raise BadInput(what="option", value=option, reason=reason)


def _note_left_alone(invocation: Invocation, plan: GcPlan) -> None:
    for finding in plan.findings:
        invocation.out.note(f"left alone: {finding.path}: {finding.detail}")
    if plan.waiting:
        invocation.out.note(
            f"{plural(len(plan.waiting), 'ghost')} left for a later run (--now deletes them in this one, without --only):"
        )
    for item in plan.waiting[:N_LISTED]:
        invocation.out.note(f"  {item.path}: {item.reason}")


_PLAN = (
    Column(name="kind"),
    Column(name="file", shorten=Shorten.MIDDLE, at_least=21),
    Column(name="size", right=True),
    Column(name="age", right=True),
    Column(name="reason", shorten=Shorten.END, at_least=16),
)


def _print_plan(invocation: Invocation, plan: GcPlan) -> None:
    if plan.items:
        rows = [
            [i.kind.value, i.path, bytes_(i.size_bytes), duration(i.age_s), i.reason] for i in plan.items[:N_LISTED]
        ]
        invocation.out.table(_PLAN, rows)
    if len(plan.items) > N_LISTED:
        invocation.out.line(f"and {number(len(plan.items) - N_LISTED)} more (--json lists all)")
    compared = f"compared {plural(plan.n_rows, 'row')} with {plural(plan.n_files, 'file')}"
    invocation.out.line(f"{plural(len(plan.items), 'item')}, {bytes_(plan.size_bytes)} to free; {compared}")


def _print_report(invocation: Invocation, report: GcReport) -> None:
    for done in report.done:
        invocation.out.line(f"{done.item.kind:<10} {done.item.path}  {done}")
    summary = f"run {report.run_no}: freed {bytes_(report.freed_bytes)}"
    if report.n_failed:
        summary += f"; {plural(report.n_failed, 'file')} could not be deleted, the next run tries again"
    if report.n_left:
        summary += f"; {plural(report.n_left, 'item')} left for the next run"
    invocation.out.line(summary)


Last = Annotated[int, typer.Option("--last", "-n", min=1, max=MAX_COUNT, help="Number of runs to show.", metavar="N")]


def runs(invocation: Invocation, last: Last = 20) -> None:
    """Show the last runs of prune and gc: when and where they ran, and what they did."""
    from llama_ckpt.collector.collector import Collector

    with invocation.registry() as registry:
        past = Collector(registry.context).runs(last)

    def human() -> None:
        invocation.out.table(_RUNS, [_run_line(run) for run in past])

    invocation.out.result(past, human, [str(run.run_no) for run in past])


_RUNS = (
    Column(name="run", right=True),
    Column(name="kind"),
    Column(name="started"),
    Column(name="took", right=True),
    Column(name="host", shorten=Shorten.MIDDLE, at_least=8, drop_rank=1),
    Column(name="items", right=True),
    Column(name="failed", right=True),
    Column(name="freed", right=True),
)


def _run_line(run: GcRun) -> list[str]:
    took = "not ended" if run.ended_us is None else duration((run.ended_us - run.started_us) / 1_000_000)
    figures = [number(run.n_items), number(run.n_failed), bytes_(run.freed_bytes)]
    return [str(run.run_no), run.kind, timestamp(run.started_us), took, run.host.split(":")[0], *figures]
