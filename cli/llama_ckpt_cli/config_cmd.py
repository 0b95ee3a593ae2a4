"""The command that shows the settings: config."""

from __future__ import annotations

import os

import typer

from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.tables import Column, Shorten

_SETTINGS = (
    Column(name="setting"),
    Column(name="value", shorten=Shorten.MIDDLE, at_least=16),
    Column(name="from", shorten=Shorten.MIDDLE, at_least=20),
)


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "config", group=LOOK)(config)


def config(invocation: Invocation) -> None:
    """Show every setting and where its value comes from."""
    from llama_ckpt.config import Setting, config_file
    from llama_ckpt.db.connect import hide_password

    resolved = {"store": str(invocation.root), "database_url": invocation.database_url}
    shown = {name: Setting(s.value or resolved.get(name, ""), s.origin) for name, s in invocation.settings.items()}
    url = shown["database_url"]
    shown["database_url"] = Setting(hide_password(url.value), url.origin)
    if invocation.database_password is not None:
        shown["database_password"] = Setting("(set)", "environment")

    def human() -> None:
        invocation.out.table(_SETTINGS, [[name, s.value or "-", s.origin] for name, s in shown.items()])
        invocation.out.line(f"settings file: {config_file(os.environ) or 'none, since this user has no home folder'}")

    invocation.out.result(shown, human, [f"{name}={s.value}" for name, s in shown.items()])
