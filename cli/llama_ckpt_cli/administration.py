"""Commands about the installation: db upgrade, db current, config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from llama_ckpt_cli.session import Session, command, config_file

if TYPE_CHECKING:
    from llama_ckpt.db.connect import Database


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "config")(config)
    db = typer.Typer(help="The database's schema.", no_args_is_help=True, rich_markup_mode=None)
    command(db, "upgrade")(upgrade)
    command(db, "current")(current)
    app.add_typer(db, name="db")


def config(session: Session) -> None:
    """Show every setting and where its value comes from."""
    from llama_ckpt.config import Setting
    from llama_ckpt.db.connect import hide_password

    resolved = {"store": str(session.root), "database_url": session.database_url}
    settings = {k: Setting(s.value or resolved.get(k, ""), s.origin) for k, s in session.settings.items()}
    shown = {
        k: Setting(hide_password(s.value) if k == "database_url" else s.value, s.origin) for k, s in settings.items()
    }

    def human() -> None:
        session.out.table(["setting", "value", "from"], [[k, s.value or "-", s.origin] for k, s in shown.items()])
        session.out.line(f"settings file: {config_file()}")

    session.out.result(shown, human, [f"{k}={s.value}" for k, s in shown.items()])


def upgrade(session: Session) -> None:
    """Create the schema or bring it to this version."""
    from llama_ckpt.db import migrate

    database = _database(session)
    before = migrate.upgrade(database)
    value = {"before": before, "now": migrate.HEAD, "database": database.shown_url}
    words = "is there already" if before == migrate.HEAD else f"made (before: {before or 'no schema'})"
    session.out.result(
        value, lambda: session.out.line(f"{database.shown_url}: schema {migrate.HEAD} {words}"), [migrate.HEAD]
    )


def current(session: Session) -> None:
    """Show the schema the database is at, and the one this version makes."""
    from llama_ckpt.db import migrate

    database = _database(session)
    found = migrate.current(database)
    value = {"current": found, "head": migrate.HEAD, "database": database.shown_url}
    line = f"{database.shown_url}: schema {found or 'none'}, this version makes {migrate.HEAD}"
    session.out.result(value, lambda: session.out.line(line), [found or "none"])


def _database(session: Session) -> Database:
    from llama_ckpt.db.connect import Database
    from llama_ckpt.files import Store

    if not session.value("database_url"):
        Store(session.root).create()
    return Database(session.database_url)
