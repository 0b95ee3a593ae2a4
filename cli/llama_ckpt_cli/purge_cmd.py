"""The command that deletes checkpoints for good: purge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import bytes_, number, plural
from llama_ckpt_cli.help_format import CLEAN
from llama_ckpt_cli.invocation import Invocation, command, confirm
from llama_ckpt_cli.options import N_LISTED, DryRun, Yes

if TYPE_CHECKING:
    from llama_ckpt.collector.purge import Purge, PurgeReport
    from llama_ckpt_cli.output import Output

InputHash = Annotated[
    str | None,
    typer.Option(
        "--input-hash", help="Purge the checkpoints of this input: its SHA-256, 64 hex digits.", metavar="SHA256"
    ),
]
Label = Annotated[str | None, typer.Option("--label", help="Purge all checkpoints with this label.", metavar="LABEL")]
Model = Annotated[
    str | None, typer.Option("--model", help="Purge all checkpoints of the model with this name.", metavar="NAME")
]
Everything = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Purge every checkpoint, and every file that this program wrote to the store: ghosts and quarantined files, too.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "purge", group=CLEAN)(purge)


def purge(
    invocation: Invocation,
    *,
    input_hash: InputHash = None,
    label: Label = None,
    model: Model = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete checkpoints and their files immediately and permanently, without a grace period. This cannot be undone. It also
    deletes pinned checkpoints, and the deltas that need a deleted one. Afterwards it checks that nothing is left. Give exactly
    one of --input-hash, --label, --model and --all.
    """
    from llama_ckpt.collector.purge import Purger

    chosen = _purge_of(input_hash, label, model, everything)
    with invocation.registry() as registry:
        purger = Purger(registry.context)
        ids = [row.id for row, _ in purger.plan(chosen)]
        if dry_run:
            return invocation.out.result(ids, lambda: _print_ids(invocation.out, ids, "would be purged"), ids)
        confirm(invocation.out, f"delete {plural(len(ids), 'checkpoint')} permanently?", yes=yes)
        report = purger.run(chosen)
    return invocation.out.result(report, lambda: _print_report(invocation.out, ids, report), ids)


def _print_report(out: Output, ids: list[str], report: PurgeReport) -> None:
    _print_ids(out, ids, "purged")
    deleted = f"{plural(report.n_files, 'file')} and {plural(report.n_ghosts, 'ghost')} deleted"
    out.line(f"{deleted}, {bytes_(report.freed_bytes)} freed; a second look found none of them")


def _print_ids(out: Output, ids: list[str], done: str) -> None:
    for checkpoint_id in ids[:N_LISTED]:
        out.line(checkpoint_id)
    if len(ids) > N_LISTED:
        out.line(f"and {number(len(ids) - N_LISTED)} more (--json lists all)")
    out.line(f"{plural(len(ids), 'checkpoint')} {done}")


def _purge_of(input_hash: str | None, label: str | None, model: str | None, everything: bool) -> Purge:
    from llama_ckpt.collector.purge import Purge
    from llama_ckpt.errors import BadInput

    named = {"--input-hash": input_hash, "--label": label, "--model": model}
    given = [name for name, value in named.items() if value] + ["--all"] * everything
    if len(given) != 1:
        reason = "give exactly one of --input-hash, --label, --model and --all"
        raise BadInput(what="purge", value=" ".join(given) or "nothing", reason=reason)
    digest = None if not input_hash else _digest(input_hash)
    return Purge(input_hash=digest, label=label or None, model_name=model or None, everything=everything)


def _digest(input_hash: str) -> bytes:
    from llama_ckpt.errors import BadInput

    try:
        digest = bytes.fromhex(input_hash)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise BadInput(what="--input-hash", value=input_hash, reason="a SHA-256 has 64 hex digits")
    return digest
