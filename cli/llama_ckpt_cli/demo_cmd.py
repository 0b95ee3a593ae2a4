"""The command that shows every feature on a real model: demo."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from llama_ckpt_cli.help_format import USE
from llama_ckpt_cli.invocation import Invocation, command

Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", help="Model to use (default: SmolLM2 from the extra 'demo').", metavar="GGUF"),
]
Tokens = Annotated[
    int, typer.Option("--tokens", min=64, max=100_000, help="Approximate number of tokens of the prompt.", metavar="N")
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "demo", group=USE)(demo)


def demo(invocation: Invocation, model: Model = None, n_tokens: Tokens = 1500) -> None:
    """Save, find, restore, damage and collect checkpoints of a real model, and check each step. Uses a temporary registry."""
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.registry import Registry
    from llama_ckpt_cli.demo_model import prompt_of, smollm2
    from llama_ckpt_cli.demo_story import Story

    path, out = model or smollm2(), invocation.out
    with (
        tempfile.TemporaryDirectory(prefix="llama-ckpt-demo-", dir=_parent(invocation)) as folder,
        Registry.open(store=Path(folder) / "store") as registry,
    ):
        out.note(f"loading {path.name}")
        with out.progress(f"SHA-256 of {path.name}") as progress:
            engine = LlamaCppEngine.from_path(path, n_ctx=n_tokens + 256, progress=progress)
        Story(out, registry, engine, path, prompt_of(engine, n_tokens)).run()


def _parent(invocation: Invocation) -> Path | None:
    """Where the temporary registry is made: in the folder that --store names, or else in the system's temporary folder."""
    store = invocation.settings["store"]
    if store.origin != "flag":
        return None
    invocation.root.mkdir(parents=True, exist_ok=True)
    return invocation.root
