"""Commands about the installation: db upgrade, db current, config."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.session import Session, command, confirm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_ckpt.db.connect import Database


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "config")(config)
    db = typer.Typer(help="The database's schema.", no_args_is_help=True, rich_markup_mode=None)
    command(db, "upgrade")(upgrade)
    command(db, "downgrade")(downgrade)
    command(db, "current")(current)
    command(db, "check")(check)
    command(db, "sql")(sql)
    app.add_typer(db, name="db")


def config(session: Session) -> None:
    """Show every setting and where its value comes from."""
    from llama_ckpt.config import Setting, config_file
    from llama_ckpt.db.connect import hide_password

    resolved = {"store": str(session.root), "database_url": session.database_url}
    settings = {k: Setting(s.value or resolved.get(k, ""), s.origin) for k, s in session.settings.items()}
    shown = {
        k: Setting(hide_password(s.value) if k == "database_url" else s.value, s.origin) for k, s in settings.items()
    }

    if session.database_password is not None:
        shown["database_password"] = Setting("(set)", "environment")

    def human() -> None:
        session.out.table(["setting", "value", "from"], [[k, s.value or "-", s.origin] for k, s in shown.items()])
        session.out.line(f"settings file: {config_file(os.environ)}")

    session.out.result(shown, human, [f"{k}={s.value}" for k, s in shown.items()])


def upgrade(session: Session) -> None:
    """Create the schema or bring it to this version."""
    from llama_ckpt.db import migrate
    from llama_ckpt.store.store import Store

    if not session.value("database_url"):
        Store(session.root).create()
    with _database(session) as database:
        before = migrate.upgrade(database)
    value = {"before": before, "now": migrate.HEAD, "database": database.shown_url}
    words = "is there already" if before == migrate.HEAD else f"made (before: {before or 'no schema'})"
    session.out.result(
        value, lambda: session.out.line(f"{database.shown_url}: schema {migrate.HEAD} {words}"), [migrate.HEAD]
    )


def downgrade(
    session: Session,
    revision: Annotated[str, typer.Argument(help="The revision to go back to; base: nothing of ours is left.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take the schema back to an older revision; what only the newer one holds is lost."""
    from llama_ckpt.db import migrate

    with _database(session) as database:
        confirm(session.out, f"take {database.shown_url} back to {revision}?", yes=yes, advice="add --yes")
        before = migrate.downgrade(database, revision)
    value = {"before": before, "now": revision, "database": database.shown_url}
    line = f"{database.shown_url}: schema {revision} (before: {before or 'no schema'})"
    session.out.result(value, lambda: session.out.line(line), [revision])


def check(session: Session) -> None:
    """Compare the database's schema with the one this version expects. Changes nothing. Exit code 12: they differ."""
    from llama_ckpt.db import migrate
    from llama_ckpt.errors import NotFound, VerifyFailed

    with _database(session) as database:
        if not database.exists():
            raise NotFound(what="database", name=database.shown_url, hint="llama-ckpt db upgrade makes it.")
        found = migrate.check(database)

    def human() -> None:
        for difference in found:
            session.out.line(difference)
        if not found:
            session.out.line(f"{database.shown_url}: the schema is the one of {migrate.HEAD}")

    session.out.result({"differences": found, "head": migrate.HEAD}, human, found)
    if found:
        raise VerifyFailed(n_failed=len(found), n_checked=len(found))


def sql(
    session: Session,
    dialect: Annotated[str, typer.Option(help="oracle or postgresql.")],
    start: Annotated[str, typer.Option("--from", help="The revision the database is at; base: it is empty.")] = "base",
    end: Annotated[str | None, typer.Option("--to", help="The revision to reach; default: this version's.")] = None,
) -> None:
    """Print the schema's statements as a script for a DBA (psql, SQL*Plus). Needs no database."""
    from llama_ckpt.db import migrate

    text = migrate.script(dialect, start, end or migrate.HEAD)
    session.out.result({"script": text}, lambda: session.out.line(text.rstrip()), [text.rstrip()])


def current(session: Session) -> None:
    """Show the schema the database is at, and the one this version makes."""
    from llama_ckpt.db import migrate

    with _database(session) as database:
        found = migrate.current(database) if database.exists() else None
    value = {"current": found, "head": migrate.HEAD, "database": database.shown_url}
    line = f"{database.shown_url}: schema {found or 'none'}, this version makes {migrate.HEAD}"
    session.out.result(value, lambda: session.out.line(line), [found or "none"])


@contextmanager
def _database(session: Session) -> Iterator[Database]:
    from llama_ckpt.db.connect import Database

    database = Database(session.database_url, session.database_password)
    try:
        yield database
    finally:
        database.close()
