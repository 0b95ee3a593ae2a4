"""The command doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_ckpt.engine.llamacpp import LlamaCppEngine

_N_CTX = 128  # a handful of tokens; the logits of each take n_ctx x vocabulary x 4 bytes


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "doctor")(doctor)


def doctor(
    session: Session,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Also try whether this GGUF continues from a loaded state.")
    ] = None,
) -> None:
    """Check store, database, clocks, policy and a model, one line each: OK, WARN or FAIL. Exit code 22: something FAILs."""
    from llama_ckpt.doctor import Level, examine, worst
    from llama_ckpt.errors import DoctorFailed

    with session.out.progress("looking") as progress:
        found = examine(
            root=session.root,
            database_url=session.database_url,
            database_password=session.database_password,
            settings={name: setting.value for name, setting in session.settings.items()},
            model=None if model is None else _maker(model, progress),
        )
    value = {"worst": worst(found), "checks": found}
    session.out.result(value, lambda: session.out.line("\n".join(map(str, found))), [worst(found).value])
    n_failed = sum(one.level is Level.FAIL for one in found)
    if n_failed:
        raise DoctorFailed(n_failed=n_failed, n_checks=len(found))


def _maker(model: Path, progress: Callable[[int, int], None]) -> Callable[[], LlamaCppEngine]:
    """Loads the model when it is asked for: that it cannot be loaded is one line among others."""

    def make() -> LlamaCppEngine:
        from llama_ckpt.engine.llamacpp import LlamaCppEngine

        return LlamaCppEngine.from_path(model, progress=progress, n_ctx=_N_CTX, logits_all=True)

    return make
