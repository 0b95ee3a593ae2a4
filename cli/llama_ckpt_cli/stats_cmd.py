"""The command that shows totals: stats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from llama_ckpt.humanize import bytes_, duration, number, plural, timestamp
from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.values import ModelStats, Stats
    from llama_ckpt_cli.output import Output

_N_RUNS = 5


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "stats", group=LOOK)(stats)


def stats(invocation: Invocation) -> None:
    """Show totals and per-model figures (checkpoints, bytes, hits, evaluation time saved), and the last runs of prune and gc."""
    from llama_ckpt.collector.collector import Collector

    with invocation.registry() as registry:
        value: dict[str, Any] = {
            "totals": registry.stats(),
            "runs": Collector(registry.context).runs(_N_RUNS),
            "free_bytes": registry.store.free_bytes(),
            "store": registry.store.root,
            "database": registry.database.shown_url,
        }
    invocation.out.result(value, lambda: _print(invocation.out, value), [str(value["totals"].n_active)])


def _print(out: Output, value: dict[str, Any]) -> None:
    totals: Stats = value["totals"]
    out.fields(
        {
            "database": value["database"],
            "store": value["store"],
            "free space": bytes_(value["free_bytes"]),
            "ACTIVE": f"{plural(totals.n_active, 'checkpoint')}, {plural(totals.n_tokens, 'token')},"
            f" {bytes_(totals.active_bytes)}",
            "STALE": f"{plural(totals.n_stale, 'checkpoint')}, {bytes_(totals.stale_bytes)} that gc can free",
            "hits": number(totals.hit_count),
            "evaluation time saved": duration(totals.spared_ms / 1000),
        },
        shorten=("database", "store"),
    )
    if totals.models:
        out.table(_MODELS, [_model_row(model) for model in totals.models])
    if totals.events:
        out.table(_EVENTS, [[name, number(n)] for name, n in totals.events.items()])
    for run in value["runs"]:
        did = f"{plural(run.n_items, 'item')}, {bytes_(run.freed_bytes)} freed, {number(run.n_failed)} failed"
        out.line(f"run {run.run_no} {run.kind} {timestamp(run.started_us)}: {did}")


_MODELS = (
    Column(name="model", shorten=Shorten.MIDDLE, at_least=12),
    Column(name="fingerprint", shorten=Shorten.PREFIX, at_most=12),
    Column(name="checkpoints", right=True),
    Column(name="size", right=True),
    Column(name="per token", right=True),
    Column(name="hits", right=True),
)
_EVENTS = (Column(name="found in files"), Column(name="times", right=True))


def _model_row(model: ModelStats) -> list[str]:
    sizes = [bytes_(model.active_bytes), bytes_(model.bytes_per_token)]
    return [model.model_name, model.fingerprint.hex(), number(model.n_active), *sizes, number(model.hit_count)]
