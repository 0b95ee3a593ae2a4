"""The options and arguments that several commands take, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llama_ckpt_cli.help_format import COMMON_PANEL

N_LISTED = 100  # lines of a plan that a person is shown; --json has all of them
MAX_CONTEXT = 2**31 - 1  # positions of llama.cpp are 32-bit numbers with a sign
MAX_THREADS = 512  # GGML_MAX_N_THREADS: ggml aborts the process beyond it
MAX_COUNT = 10**9  # of rows or items; the databases' numbers have 64 bits

# Options that every command takes: annotation and default by name.
COMMON: dict[str, tuple[Any, Any]] = {
    "database_url": (
        Annotated[
            str | None,
            typer.Option(
                help="Database to use, e.g. sqlite:////path/registry.sqlite3.",
                metavar="URL",
                show_default=False,
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "store": (
        Annotated[
            str | None,
            typer.Option(
                help="Folder of the checkpoint files.",
                metavar="FOLDER",
                show_default=False,
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "json": (
        Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=COMMON_PANEL)],
        False,
    ),
    "quiet": (
        Annotated[
            bool,
            typer.Option(
                "--quiet",
                "-q",
                help="Print only the bare values (ids, paths, numbers), and no notes.",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        False,
    ),
}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what the command would do; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

CheckpointId = Annotated[str, typer.Argument(help="Id of a checkpoint, or its first digits.", metavar="ID")]
CheckpointIds = Annotated[list[str], typer.Argument(help="Ids of checkpoints, or their first digits.", metavar="ID...")]
Label = Annotated[
    str | None,
    typer.Option("--label", help="Label for grouping, filtering and per-label limits.", metavar="LABEL"),
]

TextFile = Annotated[
    str | None,
    typer.Option(
        "--text-file", "-f", help="File with the input text (UTF-8, exact bytes); - reads stdin.", metavar="FILE"
    ),
]
Text = Annotated[str | None, typer.Option("--text", "-t", help="The input text.", metavar="TEXT")]
Gguf = Annotated[Path, typer.Option("--model", "-m", help="Model to use, a GGUF file.", metavar="GGUF")]
ContextSize = Annotated[
    int,
    typer.Option(
        "--n-ctx", min=1, max=MAX_CONTEXT, help="Context size in tokens; the complete input must fit.", metavar="N"
    ),
]
FlashAttention = Annotated[
    bool,
    typer.Option(
        "--flash-attn", help="Use flash attention. A checkpoint matches only with the setting it was saved with."
    ),
]
KvType = Annotated[
    str,
    typer.Option(
        "--kv-type",
        help="Data type of K and V: f16, f32, bf16, q8_0, q4_0, … A checkpoint matches only with the type it was saved with.",
        metavar="TYPE",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=MAX_THREADS, help="Threads for the evaluation.", metavar="N")
]
