"""The commands that take files in and hand them out: adopt, export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.inputs import TextFile
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.exchange.adopt import Adoption
    from llama_ckpt.exchange.convert import EngineLayout
    from llama_ckpt_cli.output import Output

_FORMATS = "ggsq (llama-server's slot), ggsn (llama-cli's prompt cache) or llam (a copy for another registry)."


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "adopt")(adopt)
    command(app, "export")(export)


def adopt(
    session: Session,
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders with all that is in them.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="The GGUF that files of llama.cpp are of; LLAM files need none."),
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", min=1, help="Cells that the context of such files had, if the model asks.")
    ] = None,
    text_file: TextFile = None,
    link: Annotated[
        bool, typer.Option("--link", help="Share the bytes of LLAM files on the same file system (mode becomes 0600).")
    ] = False,
    label: Annotated[str | None, typer.Option("--label", help="A word of yours to find them by.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be adopted; change nothing.")] = False,
) -> None:
    """Register checkpoint files of llama-server, llama-cli or another registry, or ghosts of this store."""
    from llama_ckpt.exchange.adopt import AdoptOptions
    from llama_ckpt.exchange.adopt import adopt as adopt_files
    from llama_ckpt_cli.inputs import input_text

    text = None if text_file is None else input_text(None, text_file)
    engine_for = None if model is None else _maker(session.out, model)
    options = AdoptOptions(engine_for=engine_for, n_ctx=n_ctx, link=link, label=label, text=text, dry_run=dry_run)
    with session.registry() as registry, session.out.progress("adopting") as progress:
        _tell_adoptions(session.out, adopt_files(registry.context, paths, options), progress)


def _maker(out: Output, model: Path) -> Callable[[EngineLayout], LlamaCppEngine]:
    """Makes the model's engine; files that follow one another and need the same one share it."""
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


def _tell_adoptions(out: Output, found: Iterator[Adoption], progress: Callable[[int, int], None]) -> None:
    """What became of each file; also of those before a failure that ends the run. Then the failure, or the first refusal if
    nothing could be registered.
    """
    from llama_ckpt.errors import LlamaCkptError

    told: list[Adoption] = []
    failure: LlamaCkptError | None = None
    try:
        for one in found:
            told.append(one)
            progress(len(told), len(told))
    except LlamaCkptError as error:
        failure = error
    ids = [one.checkpoint.id for one in told if one.checkpoint is not None]
    if told or failure is None:
        out.result(told, lambda: _table(out, told), ids)
    if failure is not None:
        raise failure
    refused = [one.error for one in told if one.error is not None]
    if refused and not any(one.outcome in ("adopted", "adoptable", "already registered") for one in told):
        raise refused[0]


def _table(out: Output, told: list[Adoption]) -> None:
    columns = ["file", "outcome", "format", "tokens", "id", "why"]
    rows = [
        [
            str(one.path),
            one.outcome.value,
            one.format or "",
            "" if one.n_tokens is None else str(one.n_tokens),
            one.checkpoint.id[:12] if one.checkpoint else "",
            one.reason,
        ]
        for one in told
    ]
    if rows:
        out.table(columns, rows, right=["tokens"])
    n_by_outcome = {
        outcome: sum(one.outcome == outcome for one in told) for outcome in dict.fromkeys(o.outcome for o in told)
    }
    summary = ", ".join(f"{n} {outcome}" for outcome, n in n_by_outcome.items())
    out.line(f"{count(len(told), 'file')}: {summary}" if told else "no files")


def export(
    session: Session,
    checkpoint_id: Annotated[str, typer.Argument(help="An id, or its first digits.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    kind: Annotated[Literal["ggsq", "ggsn", "llam"], typer.Option("--format", help=_FORMATS)],
    version: Annotated[int | None, typer.Option("--version", help="Version of the format; the newest known.")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="ggsq: a token list as llama-server writes it.")] = False,
    streams: Annotated[
        int | None, typer.Option("--streams", help="llama-server's -np, if its slots do not share one cache (-kvu).")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="ggsn: the GGUF, for its architecture.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there already.")] = False,
) -> None:
    """Write a checkpoint as a file that llama-server, llama-cli or another registry loads, and say how."""
    from llama_ckpt.exchange.export import ExportFormat, ExportOptions
    from llama_ckpt.exchange.export import export as export_file
    from llama_ckpt_cli.inputs import architecture_of

    options = ExportOptions(
        format=ExportFormat(kind),
        version=version,
        packed=packed,
        n_stream=streams,
        architecture=None if model is None else architecture_of(model),
        replace=force,
    )
    with session.registry() as registry:
        done = export_file(registry.context, registry.get(checkpoint_id), output, options)
    what = f"{done.format} version {done.version}, {count(done.n_tokens, 'token')}, {size(done.size_bytes)}"
    session.out.result(
        done, lambda: session.out.fields({"written": f"{output} ({what})", "load": done.how_to_load}), [str(output)]
    )
