"""What every command shares: the common options, the settings, and the registry they name."""

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
from typing import TYPE_CHECKING, Any

import typer

from llama_ckpt_cli.help_format import HelpCommand
from llama_ckpt_cli.options import COMMON
from llama_ckpt_cli.output import Output
from llama_ckpt_cli.policy_options import policy_options

if TYPE_CHECKING:
    from llama_ckpt.config import Setting
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy

Function = Callable[..., None]


class Invocation:
    """One call of a command: its output, its settings, its registry (opened on first use)."""

    def __init__(self, flags: dict[str, str | None], out: Output) -> None:
        self._flags = flags
        self.out = out

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """Every setting with its origin."""
        from llama_ckpt.config import config_file, settings

        return settings(self._flags, os.environ, config_file(os.environ))

    def value(self, name: str, flag: str | None = None) -> str:
        """The value of a setting; a command's own flag overrides it."""
        return flag if flag is not None else self.settings[name].value

    @property
    def root(self) -> Path:
        """The store's folder."""
        from llama_ckpt.registry import store_of

        return store_of(self.settings)

    @property
    def database_url(self) -> str:
        """The database's URL from the settings, or else that of SQLite beside the files."""
        from llama_ckpt.db.connect import sqlite_url
        from llama_ckpt.registry import DATABASE_FILE

        return self.value("database_url") or sqlite_url(self.root / DATABASE_FILE)

    @property
    def database_password(self) -> str | None:
        """The password if the URL has none: from the environment, or from the file that the environment names."""
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
        """The registry, or None if there is none yet: for commands that need no registry or change nothing."""
        from llama_ckpt.registry import DATABASE_FILE

        root = self.root
        possible = not any(path.is_file() for path in (root, *root.parents))  # opening an impossible path reports why
        if possible and not self.value("database_url") and not (root / DATABASE_FILE).exists():
            yield None
            return
        with self.registry(upgrade) as registry:
            yield registry


def command(
    app: typer.Typer, name: str | None, *, group: str | None = None, policy: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Registers a function as a command of `app`, in a group of the help.

    The function's first parameter is the `Invocation`. The command also gets the common options, and an option for each setting
    that `policy` names. With `name` None, the function runs when the group `app` is called without a command of its own.
    """

    def register(function: Function) -> Function:
        run = _with_options(function, COMMON | policy_options(policy), ("database_url", "store", *policy))
        if name is None:
            app.callback(invoke_without_command=True)(run)
        else:
            app.command(name, cls=HelpCommand, rich_help_panel=group)(run)
        return function

    return register


def _with_options(function: Function, options: dict[str, tuple[Any, Any]], settings: Sequence[str]) -> Function:
    """The function as typer calls it: without the `Invocation`, which is made from the options that are named in `settings`."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        shared = {key: values.pop(key) for key in options}
        _set_up_log(quiet=shared["quiet"])
        out = Output(as_json=shared["json"], quiet=shared["quiet"])
        try:
            function(Invocation({key: shared[key] for key in settings}, out), **values)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # as of `| head`: the reader has what it wants
            out.discard()
            raise typer.Exit(141) from None

    parameters = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for key, (kind, default) in options.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # typer would read the original's parameters through it
    return run


def _set_up_log(*, quiet: bool) -> None:
    log = logging.getLogger("llama_ckpt")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("llama-ckpt: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def confirm(out: Output, question: str, *, yes: bool, advice: str = "add --yes (or --dry-run)") -> None:
    """Asks before something is changed or deleted; without a terminal, only --yes is an answer.

    Raises:
        BadInput: there is no terminal to ask on.
        typer.Exit: the answer is no, or the input ended.
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
