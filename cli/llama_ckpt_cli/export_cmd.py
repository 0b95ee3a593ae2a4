"""The command that writes a checkpoint for another program: export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llama_ckpt.humanize import bytes_, plural
from llama_ckpt_cli.help_format import OPERATE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import CheckpointId

if TYPE_CHECKING:
    from llama_ckpt.exchange.export import Export
    from llama_ckpt_cli.output import Output

OutputFile = Annotated[Path, typer.Option("--output", "-o", help="File to write.", metavar="FILE")]
Format = Annotated[
    Literal["ggsq", "ggsn", "llam"],
    typer.Option(
        "--format",
        help="Format to write: ggsq (a slot of llama-server), ggsn (a prompt cache of llama-cli) or llam (another registry).",
        metavar="FORMAT",
    ),
]
Version = Annotated[
    int | None,
    typer.Option("--version", help="Version of the format to write (default: the newest known).", metavar="N"),
]
Packed = Annotated[bool, typer.Option("--packed", help="ggsq: write the token list as llama-server itself does.")]
Streams = Annotated[
    int | None,
    typer.Option(
        "--streams",
        help="Number of slots (-np) of a llama-server that runs with -no-kvu: it rejects a file with another number. Omit this"
        " option for any other engine.",
        metavar="N",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", help="ggsn: the model, to read its architecture from.", metavar="GGUF"),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file if it exists. Its content is lost.")]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "export", group=OPERATE)(export)


def export(
    invocation: Invocation,
    *,
    checkpoint_id: CheckpointId,
    output: OutputFile,
    kind: Format,
    version: Version = None,
    packed: Packed = False,
    streams: Streams = None,
    model: Model = None,
    force: Force = False,
) -> None:
    """Write a checkpoint as a file that llama-server, llama-cli or another registry can load, and show how to load it."""
    from llama_ckpt_cli.inputs import architecture_of

    options = {
        "version": version,
        "packed": packed,
        "n_stream": streams,
        "architecture": None if model is None else architecture_of(model),
        "replace": force,
    }
    _export(invocation, checkpoint_id, output, kind, options)


def _export(invocation: Invocation, checkpoint_id: str, output: Path, kind: str, options: dict[str, Any]) -> None:
    from llama_ckpt.exchange.export import ExportFormat, ExportOptions, export

    checked = ExportOptions(format=ExportFormat(kind), **options)
    with invocation.registry() as registry:
        done = export(registry.context, registry.get(checkpoint_id), output, checked)
    _report(invocation.out, done, output)


def _report(out: Output, done: Export, path: Path) -> None:
    what = f"{done.format} version {done.version}, {plural(done.n_tokens, 'token')}, {bytes_(done.size_bytes)}"
    pairs = {"written": f"{path} ({what})", "load": done.how_to_load}
    out.result(done, lambda: out.fields(pairs), [str(path)])
