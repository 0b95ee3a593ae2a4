"""The command that explains the policy's decision on one checkpoint: explain."""

from __future__ import annotations

import typer

from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import CheckpointId
from llama_ckpt_cli.policy_options import LIMITS
from llama_ckpt_cli.tables import Column, Shorten

_RULES = (Column(name="rule"), Column(name="effect"), Column(name="why", shorten=Shorten.WRAP, at_least=20))


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "explain", group=LOOK, policy=LIMITS)(explain)


def explain(invocation: Invocation, checkpoint_id: CheckpointId) -> None:
    """Show what each rule of the policy says about one checkpoint, and whether prune would keep it."""
    from llama_ckpt.collector.collector import Collector

    with invocation.registry() as registry:
        row = registry.get(checkpoint_id)
        opinions = Collector(registry.context).explain(row, invocation.policy())

    def human() -> None:
        invocation.out.table(_RULES, [[o.rule, o.effect.value, o.why] for o in opinions])

    rules = [{"rule": o.rule, "word": o.effect, "why": o.why} for o in opinions]
    invocation.out.result({"id": row.id, "rules": rules}, human, [opinions[-1].effect.value])
