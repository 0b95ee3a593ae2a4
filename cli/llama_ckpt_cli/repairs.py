"""The command that puts damaged files right: repair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from llama_ckpt.integrity.repair import FileRepairer, Repaired

Trust = "the CRC is wrong, not what it is of, where nothing in the file tells which."


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "repair")(repair)


def repair(
    session: Session,
    files: Annotated[list[Path], typer.Argument(help="Damaged files of any format.", metavar="FILE")],
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the file; keep it as FILE.bak.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write one file; else FILE.repaired.")
    ] = None,
    no_backup: Annotated[bool, typer.Option("--no-backup", help="With --in-place: keep no FILE.bak.")] = False,
    trust_payload: Annotated[bool, typer.Option("--trust-payload", help=f"Of the payload: {Trust}")] = False,
    trust_tokens: Annotated[bool, typer.Option("--trust-tokens", help=f"Of metadata and token ids: {Trust}")] = False,
) -> None:
    """Take off padding, correct headers, rebuild CRCs, as far as the file itself proves what is right. Needs no database.

    The original stays, and no file is written over. Exit code 5: a file cannot be put right, and why.
    """
    from llama_ckpt.errors import BadInput
    from llama_ckpt.integrity.repair import FileRepairer

    if output is not None and (in_place or len(files) > 1):
        raise BadInput(what="--output", value=str(output), reason="it goes with one file, and not with --in-place")
    if no_backup and not in_place:
        raise BadInput(what="--no-backup", value="", reason="it goes with --in-place: else the original stays as it is")
    repairer = FileRepairer(
        in_place=in_place, keep_backup=not no_backup, trust_payload=trust_payload, trust_tokens=trust_tokens
    )
    _repair_each(session, repairer, files, output)


def _repair_each(session: Session, repairer: FileRepairer, files: list[Path], output: Path | None) -> None:
    """Every file, whatever became of the others; then the first error, if there was one."""
    from llama_ckpt.errors import LlamaCkptError

    done: list[Repaired] = []
    errors: list[LlamaCkptError] = []
    for path in files:
        try:
            done.append(repairer.repair(path, output))
        except LlamaCkptError as error:
            errors.append(error)
    written = [str(one.written) for one in done if one.written]
    session.out.result({"repaired": done, "failed": errors}, lambda: _show(session, done), written)
    for later in errors[1:]:
        session.out.note(str(later))
    if errors:
        raise errors[0]


def _show(session: Session, done: list[Repaired]) -> None:
    for one in done:
        for fault in one.faults:
            session.out.line(f"{one.path}: {fault}")
        if one.written is None:
            session.out.line(f"{one.path}: whole, nothing to repair")
        else:
            kept = f", the original is {one.backup}" if one.backup else ""
            session.out.line(f"{one.path}: written to {one.written}{kept}")
