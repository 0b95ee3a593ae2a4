"""The commands about the database's schema: db upgrade, db downgrade, db current, db check, db sql."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt_cli.help_format import DATABASES, HelpGroup
from llama_ckpt_cli.invocation import Invocation, command, confirm
from llama_ckpt_cli.options import Yes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_ckpt.db.connect import Database

Revision = Annotated[
    str, typer.Argument(help="Revision to go back to; base removes all tables of this program.", metavar="REVISION")
]
Dialect = Annotated[str, typer.Option(help="Database to print for: oracle or postgresql.", metavar="DIALECT")]
Start = Annotated[
    str, typer.Option("--from", help="Revision that the database has now; base: it is empty.", metavar="REVISION")
]
End = Annotated[
    str | None, typer.Option("--to", help="Revision to reach (default: this version's).", metavar="REVISION")
]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    help_text = "Create, upgrade, compare or print the database schema."
    db = typer.Typer(cls=HelpGroup, help=help_text, no_args_is_help=True, rich_markup_mode=None)
    command(db, "upgrade")(upgrade)
    command(db, "downgrade")(downgrade)
    command(db, "current")(current)
    command(db, "check")(check)
    command(db, "sql")(sql)
    app.add_typer(db, name="db", rich_help_panel=DATABASES)


def upgrade(invocation: Invocation) -> None:
    """Create the schema, or upgrade it to the revision of this version. Older versions of llama-ckpt refuse an upgraded database:
    update every host first, and back the database up.
    """
    from llama_ckpt.db import migrate
    from llama_ckpt.store.store import Store

    if not invocation.value("database_url"):
        Store(invocation.root).create()
    with _database(invocation) as database:
        before = migrate.upgrade(database)
    value = {"before": before, "now": migrate.HEAD, "database": database.shown_url}
    done = "is already there" if before == migrate.HEAD else f"created (before: {before or 'no schema'})"
    line = f"{database.shown_url}: schema {migrate.HEAD} {done}"
    invocation.out.result(value, lambda: invocation.out.line(line), [migrate.HEAD])


def downgrade(invocation: Invocation, revision: Revision, yes: Yes = False) -> None:
    """Downgrade the schema to an older revision. Data that only the newer schema can hold is deleted."""
    from llama_ckpt.db import migrate

    with _database(invocation) as database:
        confirm(invocation.out, f"downgrade {database.shown_url} to {revision}?", yes=yes, advice="add --yes")
        before = migrate.downgrade(database, revision)
    value = {"before": before, "now": revision, "database": database.shown_url}
    line = f"{database.shown_url}: schema {revision} (before: {before or 'no schema'})"
    invocation.out.result(value, lambda: invocation.out.line(line), [revision])


def current(invocation: Invocation) -> None:
    """Show the revision of the database's schema, and the revision that this version uses."""
    from llama_ckpt.db import migrate

    with _database(invocation) as database:
        revision = migrate.current(database) if database.exists() else None
    value = {"current": revision, "head": migrate.HEAD, "database": database.shown_url}
    line = f"{database.shown_url}: schema {revision or 'none'}, this version uses {migrate.HEAD}"
    invocation.out.result(value, lambda: invocation.out.line(line), [revision or "none"])


def check(invocation: Invocation) -> None:
    """Compare the database's schema with the one this version expects. Changes nothing. Exit code 12: they differ."""
    from llama_ckpt.db import migrate
    from llama_ckpt.errors import NotFound, VerifyFailed

    with _database(invocation) as database:
        if not database.exists():
            raise NotFound(what="database", name=database.shown_url, hint="To create it: llama-ckpt db upgrade")
        differences = migrate.check(database)
    same = f"{database.shown_url}: the schema is that of revision {migrate.HEAD}"

    def human() -> None:
        invocation.out.line("\n".join(differences) or same)

    invocation.out.result({"differences": differences, "head": migrate.HEAD}, human, differences)
    if differences:
        raise VerifyFailed(n_failed=len(differences), n_checked=len(differences))


def sql(invocation: Invocation, dialect: Dialect, start: Start = "base", end: End = None) -> None:
    """Print the schema's statements as a script for a database administrator (psql, SQL*Plus). Needs no database."""
    from llama_ckpt.db import migrate

    text = migrate.script(dialect, start, end or migrate.HEAD)
    invocation.out.result({"script": text}, lambda: invocation.out.line(text.rstrip()), [text.rstrip()])


@contextmanager
def _database(invocation: Invocation) -> Iterator[Database]:
    from llama_ckpt.db.connect import Database

    database = Database(invocation.database_url, invocation.database_password)
    try:
        yield database
    finally:
        database.close()
