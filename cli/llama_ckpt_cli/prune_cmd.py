"""The commands that apply the retention policy and undo it: prune, unprune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import bytes_, number, plural
from llama_ckpt_cli.help_format import CLEAN
from llama_ckpt_cli.invocation import Invocation, command, confirm
from llama_ckpt_cli.options import N_LISTED, DryRun, Yes
from llama_ckpt_cli.policy_options import LIMITS
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.gc_values import Verdict
    from llama_ckpt.integrity.reconcile import Unpruned
    from llama_ckpt.registry import Registry
    from llama_ckpt_cli.output import Output

Ids = Annotated[list[str] | None, typer.Argument(help="Ids of checkpoints, or their first digits.", metavar="ID...")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        help="Bring back what prune marked and what expired since then, but not what rm marked (give its id instead): a duration"
        " such as 2h, or a UTC time such as '2026-05-01 14:30'.",
        metavar="TIME",
    ),
]

_VERDICTS = (
    Column(name="id", shorten=Shorten.PREFIX, at_least=8, at_most=12),
    Column(name="model", shorten=Shorten.MIDDLE, at_least=12),
    Column(name="size", right=True),
    Column(name="rule", shorten=Shorten.END, at_least=20),
)


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "prune", group=CLEAN, policy=LIMITS)(prune)
    command(app, "unprune", group=CLEAN)(unprune)


def prune(invocation: Invocation, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Mark checkpoints STALE that the policy no longer keeps, or that have expired. No file is deleted: run `gc` for that, after
    the grace period.
    """
    from llama_ckpt.collector.collector import Collector

    out, policy = invocation.out, invocation.policy()
    if dry_run:
        with invocation.existing_registry(upgrade=False) as registry:
            verdicts = Collector(registry.context).plan_prune(policy) if registry else []
        return _report(out, verdicts, "would be marked STALE")
    with invocation.registry() as registry:
        collector = Collector(registry.context)
        verdicts = collector.plan_prune(policy)
        if verdicts:
            if out.human and not yes:
                _print_verdicts(out, verdicts)
            confirm(out, f"mark {plural(len(verdicts), 'checkpoint')} STALE?", yes=yes)
            verdicts = collector.prune(verdicts)
    return _report(out, verdicts, "marked STALE")


def _print_verdicts(out: Output, verdicts: list[Verdict]) -> None:
    if verdicts:
        out.table(_VERDICTS, [[v.row.id, v.model_name, bytes_(v.size_bytes), v.rule] for v in verdicts[:N_LISTED]])
    if len(verdicts) > N_LISTED:
        out.line(f"and {number(len(verdicts) - N_LISTED)} more (--json lists all)")


def _report(out: Output, verdicts: list[Verdict], done: str) -> None:
    total = bytes_(sum(v.size_bytes for v in verdicts))

    def human() -> None:
        _print_verdicts(out, verdicts)
        out.line(f"{plural(len(verdicts), 'checkpoint')} {done} ({total})")

    out.result(verdicts, human, [v.row.id for v in verdicts])


def unprune(invocation: Invocation, ids: Ids = None, since: Since = None) -> None:
    """Make STALE checkpoints ACTIVE again if their files are still complete. The next prune can mark them again: pin them, or
    change the policy. Exit code 12: at least one could not be made ACTIVE; the output says why.
    """
    from llama_ckpt.errors import BadInput
    from llama_ckpt.integrity.reconcile import Reconciler

    if bool(ids) == bool(since):
        raise BadInput(what="unprune", value=since or "nothing", reason="give either ids or --since")
    with invocation.registry() as registry:
        reconciler = Reconciler(registry.context)
        rows = [registry.get(i) for i in ids] if ids else reconciler.pruned_since(_since_us(registry, since or ""))
        results = reconciler.unprune(rows)
    _report_unprune(invocation.out, results)


def _report_unprune(out: Output, results: list[Unpruned]) -> None:
    from llama_ckpt.errors import VerifyFailed
    from llama_ckpt.integrity.reconcile import MendOutcome

    back = [result.checkpoint.id for result in results if result.outcome is MendOutcome.REACTIVATED]

    def human() -> None:
        for result in results:
            out.line(f"{result.checkpoint.short_id}  {result}")
        out.line(f"{number(len(back))} of {plural(len(results), 'checkpoint')} ACTIVE again")

    value = [{"id": result.checkpoint.id, "result": str(result)} for result in results]
    out.result(value, human, back)
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
        pass  # not a duration: a time, then
    try:
        moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError as error:
        reason = "give a duration such as 2h, or a time such as 2026-05-01 14:30 (UTC)"
        raise BadInput(what="--since", value=text, reason=reason) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000)
