"""The application: all commands, and the only place that turns an error into a message and an exit code."""

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
from llama_ckpt.humanize import printable
from llama_ckpt_cli import (
    adopt_cmd,
    batch_cmd,
    checkpoints_cmd,
    config_cmd,
    db_cmd,
    demo_cmd,
    doctor_cmd,
    explain_cmd,
    export_cmd,
    gc_cmd,
    inspect_cmd,
    match_cmd,
    prune_cmd,
    purge_cmd,
    repair_cmd,
    schedule_cmd,
    stats_cmd,
    verify_cmd,
    warm_cmd,
)
from llama_ckpt_cli.help_format import HelpGroup
from llama_ckpt_cli.output import Output

app = typer.Typer(
    name="llama-ckpt",
    cls=HelpGroup,
    context_settings={"help_option_names": ["--help", "-h"]},
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Registry and garbage collector for llama.cpp KV-cache checkpoints: save the state of a prompt once, restore it instead of
    evaluating it again, and keep the disk within limits.
    """


# In the order in which the help lists them.
COMMANDS = (
    *(demo_cmd, warm_cmd, batch_cmd, match_cmd),
    *(inspect_cmd, verify_cmd, stats_cmd, explain_cmd, doctor_cmd, config_cmd),
    *(prune_cmd, gc_cmd, purge_cmd),
    *(schedule_cmd, adopt_cmd, export_cmd, repair_cmd),
    *(checkpoints_cmd, db_cmd),
)
for module in COMMANDS:
    module.add_to(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code. LLAMA_CKPT_DEBUG=1 shows the traceback of an error."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # characters that the terminal's encoding does not have are escaped
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
        Output.discard()
        return StoreFull.exit_code
    except Exception as error:  # noqa: BLE001 - the last place: a message, and how to get the traceback
        return _internal(error)
    return 0


def _open_closed_streams() -> None:
    """Opens the null device in place of a standard stream that the caller closed: what the command does matters to the caller,
    not what it shows. Otherwise the next file, such as the database, would get the stream's descriptor and what is written to it.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, open(fd, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - a descriptor, not a path


def _debugging() -> bool:
    return os.environ.get("LLAMA_CKPT_DEBUG", "0") not in ("", "0")


def _internal(error: Exception) -> int:
    """Reports a bug of this program: one sentence, and how to get the traceback."""
    if _debugging():
        raise error
    sys.stderr.write(f"llama-ckpt: internal error: {type(error).__name__}: {printable(str(error))}\n")
    sys.stderr.write("This should not happen. Set LLAMA_CKPT_DEBUG=1 for the traceback, and report it.\n")
    return 1
