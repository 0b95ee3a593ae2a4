"""The command that checks the installation: doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_ckpt.engine.llamacpp import LlamaCppEngine

_N_CTX = 128  # a handful of tokens; the logits of each take n_ctx x vocabulary x 4 bytes

Model = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Also test whether this model continues correctly from a loaded state.", metavar="GGUF"
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "doctor", group=LOOK)(doctor)


def doctor(invocation: Invocation, model: Model = None) -> None:
    """Check the store, the database, the clocks, the policy and optionally a model. Prints one line for each check: OK, WARN or
    FAIL. Exit code 22: a check failed.
    """
    from llama_ckpt.doctor import Level, examine, worst
    from llama_ckpt.errors import DoctorFailed

    with invocation.out.progress("checking") as progress:
        checks = examine(
            root=invocation.root,
            database_url=invocation.database_url,
            database_password=invocation.database_password,
            settings={name: setting.value for name, setting in invocation.settings.items()},
            model=None if model is None else _model_loader(model, progress),
        )
    value = {"worst": worst(checks), "checks": checks}
    invocation.out.result(value, lambda: invocation.out.line("\n".join(map(str, checks))), [worst(checks).value])
    n_failed = sum(check.level is Level.FAIL for check in checks)
    if n_failed:
        raise DoctorFailed(n_failed=n_failed, n_checks=len(checks))


def _model_loader(model: Path, progress: Callable[[int, int], None]) -> Callable[[], LlamaCppEngine]:
    """A function that loads the model: a failure to load it is then one check of several."""

    def load() -> LlamaCppEngine:
        from llama_ckpt.engine.llamacpp import LlamaCppEngine

        return LlamaCppEngine.from_path(model, progress=progress, n_ctx=_N_CTX, logits_all=True)

    return load
