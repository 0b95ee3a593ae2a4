"""The command that repairs damaged files: repair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.help_format import OPERATE
from llama_ckpt_cli.invocation import Invocation, command

if TYPE_CHECKING:
    from llama_ckpt.integrity.repair import FileRepairer, Repaired
    from llama_ckpt_cli.output import Output

Files = Annotated[list[Path], typer.Argument(help="Damaged files of any format.", metavar="FILE...")]
InPlace = Annotated[bool, typer.Option("--in-place", help="Replace the file, and keep the original as FILE.bak.")]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Where to write one repaired file (default: FILE.repaired).", metavar="FILE"),
]
NoBackup = Annotated[
    bool, typer.Option("--no-backup", help="With --in-place: keep no FILE.bak. The original bytes are then lost.")
]
TrustPayload = Annotated[
    bool,
    typer.Option(
        "--trust-payload",
        help="Assume the K and V data is intact and only its stored CRC is wrong. Use this only if you know that the data was"
        " not changed: a wrong guess restores a damaged state, and the model continues from it.",
    ),
]
TrustTokens = Annotated[
    bool,
    typer.Option(
        "--trust-tokens",
        help="Assume the metadata and the token ids are intact and only their stored CRC is wrong. A wrong guess makes the"
        " checkpoint match inputs that it does not contain.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "repair", group=OPERATE)(repair)


def repair(
    invocation: Invocation,
    *,
    files: Files,
    in_place: InPlace = False,
    output: OutputFile = None,
    no_backup: NoBackup = False,
    trust_payload: TrustPayload = False,
    trust_tokens: TrustTokens = False,
) -> None:
    """Repair damaged checkpoint files, as far as the rest of each file proves what is right. It removes padding and corrects
    headers and CRCs. By default it writes FILE.repaired and leaves FILE unchanged. No existing output and no FILE.bak is
    overwritten; only --in-place with --no-backup loses the original. Needs no database.

    Exit code 5: at least one file cannot be repaired; the message says why.
    """
    from llama_ckpt.integrity.repair import FileRepairer

    _check_options(files, in_place=in_place, output=output, no_backup=no_backup)
    repairer = FileRepairer(
        in_place=in_place, keep_backup=not no_backup, trust_payload=trust_payload, trust_tokens=trust_tokens
    )
    _repair_each(invocation.out, repairer, files, output)


def _check_options(files: list[Path], *, in_place: bool, output: Path | None, no_backup: bool) -> None:
    from llama_ckpt.errors import BadInput

    if output is not None and (in_place or len(files) > 1):
        raise BadInput(what="--output", value=str(output), reason="use it with one file, and not with --in-place")
    if no_backup and not in_place:
        raise BadInput(
            what="--no-backup", value="", reason="use it with --in-place; otherwise the original is kept anyway"
        )


def _repair_each(out: Output, repairer: FileRepairer, files: list[Path], output: Path | None) -> None:
    """Repairs each file independently of the others. Then raises the first error, if there was one."""
    from llama_ckpt.errors import LlamaCkptError

    done: list[Repaired] = []
    errors: list[LlamaCkptError] = []
    for path in files:
        try:
            done.append(repairer.repair(path, output))
        except LlamaCkptError as error:
            errors.append(error)
    written = [str(repaired.written) for repaired in done if repaired.written]
    out.result({"repaired": done, "failed": errors}, lambda: _print(out, done), written)
    for later in errors[1:]:
        out.note(str(later))
    if errors:
        raise errors[0]


def _print(out: Output, done: list[Repaired]) -> None:
    for repaired in done:
        for fault in repaired.faults:
            out.line(f"{repaired.path}: {fault}")
        if repaired.written is None:
            out.line(f"{repaired.path}: complete, nothing to repair")
        else:
            kept = f", the original is {repaired.backup}" if repaired.backup else ""
            out.line(f"{repaired.path}: written to {repaired.written}{kept}")
