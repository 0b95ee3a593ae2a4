"""What every command shares: the common options, settings, and the registry they name."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.retention.policy import SETTINGS, Step
from llama_ckpt_cli.output import Output

if TYPE_CHECKING:
    from llama_ckpt.config import Setting
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy

_COMMON: dict[str, tuple[Any, Any]] = {
    "database_url": (
        Annotated[
            str | None, typer.Option(help="Database, e.g. sqlite:////path/registry.sqlite3.", show_default=False)
        ],
        None,
    ),
    "store": (Annotated[str | None, typer.Option(help="Folder of the checkpoint files.", show_default=False)], None),
    "json": (Annotated[bool, typer.Option("--json", help="Print the result as JSON.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Print the bare value only.")], False),
}

_HELP = {declared.name: declared.help for declared in SETTINGS} | {
    "min_match_tokens": "Shortest shared prefix that counts as a match, in tokens (default 16)."
}
GRACES = tuple(declared.name for declared in SETTINGS if declared.step is Step.GC)
LIMITS = tuple(declared.name for declared in SETTINGS if declared.step is Step.PRUNE)
MATCHING = ("min_match_tokens",)


class Session:
    """One run of a command: its output, its settings, its registry (opened when it is asked for)."""

    def __init__(self, flags: dict[str, str | None], out: Output) -> None:
        self._flags = flags
        self.out = out

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """Every setting with its origin."""
        from llama_ckpt.config import config_file, settings

        return settings(self._flags, os.environ, config_file(os.environ))

    def value(self, name: str, flag: str | None = None) -> str:
        """A setting's value; a command's own flag goes before all."""
        return flag if flag is not None else self.settings[name].value

    @property
    def root(self) -> Path:
        """The store's folder."""
        from llama_ckpt.registry import store_of

        return store_of(self.settings)

    @property
    def database_url(self) -> str:
        """The database's URL: named, or SQLite beside the files."""
        from llama_ckpt.db.connect import sqlite_url
        from llama_ckpt.registry import DATABASE_FILE

        return self.value("database_url") or sqlite_url(self.root / DATABASE_FILE)

    @property
    def database_password(self) -> str | None:
        """The password that is not in the URL: from the environment, or the file that it names."""
        from llama_ckpt.config import database_password

        return database_password(os.environ)

    def policy(self) -> Policy:
        """The retention policy that flags and settings describe."""
        from llama_ckpt.config import policy_of

        return policy_of({name: setting.value for name, setting in self.settings.items()})

    def registry(self, upgrade: bool | None = None) -> Registry:
        """The registry that the settings name. The caller closes it."""
        from llama_ckpt.registry import Registry

        return Registry.configured(self.settings, upgrade=upgrade)

    @contextmanager
    def existing_registry(self, upgrade: bool | None = None) -> Iterator[Registry | None]:
        """The same, but None instead of making one: for questions that need no registry, or change nothing."""
        from llama_ckpt.registry import DATABASE_FILE

        root = self.root
        possible = not any(path.is_file() for path in (root, *root.parents))  # opening an impossible one tells why
        if possible and not self.value("database_url") and not (root / DATABASE_FILE).exists():
            yield None
            return
        with self.registry(upgrade) as registry:
            yield registry


def command(
    app: typer.Typer, name: str | None, *, policy: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command: it gets a `Session` as first argument, and the common options are added, and an option for
    each setting that `policy` names. Without a name it is what the group `app` does when no command of it is named.
    """
    options = _COMMON | {
        key: (Annotated[str | None, typer.Option(help=_HELP[key], show_default=False)], None) for key in policy
    }

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        common = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for key, (kind, default) in options.items()
        ]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            shared = {key: values.pop(key) for key in options}
            out = Output(as_json=shared["json"], quiet=shared["quiet"])
            _set_up_log(quiet=shared["quiet"])
            flags = {key: shared[key] for key in ("database_url", "store", *policy)}
            try:
                function(Session(flags, out), **values)
            except KeyboardInterrupt:
                sys.stderr.write("interrupted\n")
                raise typer.Exit(130) from None

        parameters = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would read the original's parameters through it
        if name is None:
            app.callback(invoke_without_command=True)(run)
        else:
            app.command(name)(run)
        return function

    return register


def _set_up_log(*, quiet: bool) -> None:
    log = logging.getLogger("llama_ckpt")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("llama-ckpt: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def confirm(out: Output, question: str, *, yes: bool, advice: str = "add --yes (or --dry-run)") -> None:
    """Asks before something goes; without a terminal only --yes will do.

    Raises:
        BadInput: nobody can be asked.
        typer.Exit: the answer is no, or Ctrl-C.
    """
    from llama_ckpt.errors import BadInput

    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput(what="confirmation", value="none", reason=f"there is no terminal to ask on; {advice}")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:  # the end of input, as Ctrl-D gives it
        raise typer.Exit(130)
    if answer.strip().lower() not in ("y", "yes"):
        out.note("nothing was changed")
        raise typer.Exit(0)
