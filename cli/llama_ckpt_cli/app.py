"""The application: all commands, and the one place that turns an error into a sentence and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from llama_ckpt import __version__
from llama_ckpt.errors import LlamaCkptError, StoreFull
from llama_ckpt_cli import (
    administration,
    batch,
    checkpoints,
    demo,
    diagnosis,
    exchange,
    inspection,
    maintenance,
    pruning,
    repairs,
    schedules,
    verification,
)
from llama_ckpt_cli.output import printable

app = typer.Typer(
    name="llama-ckpt",
    help="Registry and garbage collector for llama.cpp KV-cache checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"llama-ckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Registry and garbage collector for llama.cpp KV-cache checkpoints."""


COMMANDS = (
    *(demo, batch, checkpoints, exchange, inspection, verification, repairs, diagnosis),
    *(pruning, maintenance, schedules, administration),
)
for module in COMMANDS:
    module.add_to(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code. LLAMA_CKPT_DEBUG=1 shows the traceback of an error."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding cannot say is spelt out
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="llama-ckpt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except LlamaCkptError as error:
        if _debugging():
            raise
        sys.stderr.write(f"llama-ckpt: {printable(str(error))}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            return _internal(error)
        sys.stderr.write(f"llama-ckpt: the output cannot be written: {error.strerror}\n")
        # Python would try to write the rest once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return StoreFull.exit_code
    except Exception as error:  # noqa: BLE001 - the last place: a sentence, and how to get the rest
        return _internal(error)
    return 0


def _debugging() -> bool:
    return os.environ.get("LLAMA_CKPT_DEBUG", "0") not in ("", "0")


def _internal(error: Exception) -> int:
    """A fault of the program: one sentence, and how to get the rest."""
    if _debugging():
        raise error
    sys.stderr.write(f"llama-ckpt: internal error: {type(error).__name__}: {printable(str(error))}\n")
    sys.stderr.write("This should not happen. Set LLAMA_CKPT_DEBUG=1 for the traceback, and report it.\n")
    return 1
