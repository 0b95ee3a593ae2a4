"""The command that registers existing files: adopt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import number, plural
from llama_ckpt_cli.help_format import OPERATE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import MAX_CONTEXT, Label
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.exchange.adopt import Adoption
    from llama_ckpt.exchange.convert import EngineLayout
    from llama_ckpt_cli.output import Output

Paths = Annotated[list[Path], typer.Argument(help="Files, or folders of files.", metavar="PATH...")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Model that wrote the files of llama.cpp. LLAM files need no model.", metavar="GGUF"
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option(
        "--n-ctx",
        min=1,
        max=MAX_CONTEXT,
        help="Context size the files were written with. Needed only for models with separate long and short RoPE factors;"
        " adopt refuses a file and says so if it needs the size.",
        metavar="N",
    ),
]
TextFile = Annotated[
    str | None,
    typer.Option(
        "--text-file",
        "-f",
        help="File with the exact text (UTF-8) that one file of llama.cpp was computed from; - reads stdin.",
        metavar="FILE",
    ),
]
Link = Annotated[
    bool,
    typer.Option(
        "--link",
        help="Add hard links to LLAM files instead of copying them. A file on another file system is refused. The original gets"
        " mode 0600, and a later change of its content damages the checkpoint.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be adopted; change nothing.")]

_ADOPTED = ("adopted", "adoptable", "already registered")
_ADOPTIONS = (
    Column(name="file", shorten=Shorten.MIDDLE, at_least=16),
    Column(name="outcome"),
    Column(name="format", drop_rank=1),
    Column(name="tokens", right=True),
    Column(name="id", shorten=Shorten.PREFIX, at_least=8, at_most=12),
    Column(name="reason", shorten=Shorten.WRAP, at_least=16),
)


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "adopt", group=OPERATE)(adopt)


def adopt(
    invocation: Invocation,
    *,
    paths: Paths,
    model: Model = None,
    n_ctx: ContextSize = None,
    text_file: TextFile = None,
    link: Link = False,
    label: Label = None,
    dry_run: DryRun = False,
) -> None:
    """Register existing checkpoint files: of llama-server, of llama-cli, of another registry, or ghosts of this store."""
    from llama_ckpt.exchange.adopt import AdoptOptions
    from llama_ckpt.exchange.adopt import adopt as adopt_files
    from llama_ckpt_cli.inputs import input_text

    text = None if text_file is None else input_text(None, text_file)
    engine_for = None if model is None else _engine_maker(invocation.out, model)
    options = AdoptOptions(engine_for=engine_for, n_ctx=n_ctx, link=link, label=label, text=text, dry_run=dry_run)
    with invocation.registry() as registry, invocation.out.progress("adopting") as progress:
        _report(invocation.out, adopt_files(registry.context, paths, options), progress)


def _engine_maker(out: Output, model: Path) -> Callable[[EngineLayout], LlamaCppEngine]:
    """A function that makes the model's engine; consecutive files that need the same engine share it."""
    import functools

    from llama_ckpt.formats.kv.state import GGML_TYPES
    from llama_ckpt_cli.inputs import load_engine

    known = {kind.name for kind in GGML_TYPES.values()}

    @functools.lru_cache(maxsize=1)
    def make(layout: EngineLayout) -> LlamaCppEngine:
        type_v = layout.type_v if layout.type_v in known else layout.type_k  # a model that keeps no V
        return load_engine(
            out,
            model,
            n_ctx=layout.n_ctx,
            flash_attn=layout.flash_attn,
            kv_type=layout.type_k,
            type_v=type_v,
        )

    return make


def _report(out: Output, adoptions: Iterator[Adoption], progress: Callable[[int, int], None]) -> None:
    """The outcome of each file, also of those before a failure that ended the run. Then the failure, or the first refusal if
    no file could be registered.
    """
    from llama_ckpt.errors import LlamaCkptError

    done: list[Adoption] = []
    failure: LlamaCkptError | None = None
    try:
        for adoption in adoptions:
            done.append(adoption)
            progress(len(done), len(done))
    except LlamaCkptError as error:
        failure = error
    if done or failure is None:
        ids = [adoption.checkpoint.id for adoption in done if adoption.checkpoint is not None]
        out.result(done, lambda: _print(out, done), ids)
    refusals = [adoption.error for adoption in done if adoption.error is not None]
    if failure is None and refusals and not any(adoption.outcome in _ADOPTED for adoption in done):
        failure = refusals[0]
    if failure is not None:
        raise failure


def _print(out: Output, adoptions: list[Adoption]) -> None:
    if not adoptions:
        return out.line("no files")
    out.table(_ADOPTIONS, [_row(adoption) for adoption in adoptions])
    n_by_outcome = Counter(adoption.outcome for adoption in adoptions)
    summary = ", ".join(f"{number(n)} {outcome}" for outcome, n in n_by_outcome.items())
    return out.line(f"{plural(len(adoptions), 'file')}: {summary}")


def _row(adoption: Adoption) -> list[str]:
    return [
        str(adoption.path),
        adoption.outcome.value,
        adoption.format or "",
        "" if adoption.n_tokens is None else number(adoption.n_tokens),
        adoption.checkpoint.id if adoption.checkpoint else "",
        adoption.reason,
    ]
