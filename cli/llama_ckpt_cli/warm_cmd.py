"""The command that restores an input, or evaluates and saves it: warm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import bytes_, duration, number
from llama_ckpt_cli.help_format import USE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import ContextSize, FlashAttention, Gguf, KvType, Label, Text, TextFile, Threads

if TYPE_CHECKING:
    from llama_ckpt.values import Checkpoint, WarmResult
    from llama_ckpt_cli.output import Output

ExpiresIn = Annotated[
    str | None,
    typer.Option("--expires-in", help="Stop offering the saved checkpoint after this time, e.g. 7d.", metavar="TIME"),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "warm", group=USE)(warm)


def warm(
    invocation: Invocation,
    *,
    model: Gguf,
    text_file: TextFile = None,
    text: Text = None,
    n_ctx: ContextSize = 8192,
    flash_attn: FlashAttention = False,
    kv_type: KvType = "f16",
    threads: Threads = None,
    label: Label = None,
    expires_in: ExpiresIn = None,
) -> None:
    """Restore the checkpoint of an input, or evaluate the input and save it. The same input is saved only once."""
    from llama_ckpt.config import seconds
    from llama_ckpt_cli.inputs import input_text, load_engine

    given = input_text(text, text_file)
    expires_in_s = None if expires_in is None else seconds(expires_in, "--expires-in")
    out = invocation.out
    with invocation.registry() as registry:
        engine = load_engine(out, model, n_ctx=n_ctx, flash_attn=flash_attn, kv_type=kv_type, threads=threads)
        with out.progress("evaluating") as progress:
            result = registry.warm(engine, given, label=label, expires_in_s=expires_in_s, progress=progress)
    _report(out, result)


def _report(out: Output, result: WarmResult) -> None:
    """The result, then the problem that kept it from the registry, if there was one."""
    from llama_ckpt.values import Outcome

    restored = result.restore.checkpoint if result.restore.outcome is Outcome.HIT else None
    checkpoint = result.save.checkpoint if result.save else restored
    out.result(result, lambda: _print(out, result, checkpoint), [checkpoint.id] if checkpoint else [])
    if result.problem is not None:
        raise result.problem


def _print(out: Output, result: WarmResult, checkpoint: Checkpoint | None) -> None:
    out.fields(
        {
            "outcome": _outcome(result),
            "reason": result.restore.reason,
            "tokens restored": number(result.n_restored),
            "tokens evaluated": number(result.n_evaluated),
            "took": duration(result.elapsed_s),
            "checkpoint": checkpoint.id if checkpoint else None,
            "written": bytes_(result.save.bytes_written) if result.save else "nothing",
        }
    )


def _outcome(result: WarmResult) -> str:
    restored = result.restore.outcome == "hit"
    if restored and result.save is None and result.problem is None:
        return "restored"
    first = "partly restored" if restored else "evaluated"
    return f"{first}, {result.save.outcome if result.save else 'not saved'}"
