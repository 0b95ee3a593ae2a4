"""The differences between a database's schema and the one that this version expects, as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from llama_ckpt.db.tables import VERSION_TABLE, metadata

VIEW = "llama_checkpoint_v"


def differences(db: sa.Connection) -> list[str]:
    """A sentence for each table, column, index, constraint and view that is missing, differs, or is not part of this version's
    schema. Ignores other programs' tables in the same database. Reads only.
    """
    options = {"version_table": VERSION_TABLE, "compare_type": True, "include_object": _is_ours}
    context = MigrationContext.configure(db, opts=options)
    compared = _flattened(compare_metadata(context, metadata))
    sentences = [_sentence(difference) for difference in compared if "comment" not in difference[0]]
    return [*sentences, *_not_compared(sa.inspect(db))]


def _is_ours(thing: Any, name: str | None, kind: str, reflected: bool, expected: Any) -> bool:
    return not (kind == "table" and reflected and expected is None)


def _flattened(differences: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Alembic gives the differences of one column as a nested list."""
    for difference in differences:
        if isinstance(difference, list):
            yield from difference
        else:
            yield difference


def _sentence(difference: tuple[Any, ...]) -> str:
    """A sentence about one difference. Alembic gives the change that would make the schema as expected: what it would add is
    missing.
    """
    verb, *about = difference
    if verb.startswith("modify_"):
        _, table, column, _, found, expected = about
        return f"column {table}.{column}: {verb.removeprefix('modify_')} is {found}, expected is {expected}"
    action, _, kind = verb.partition("_")
    thing = about[-1]
    name = f"{kind.replace('fk', 'foreign key')} {getattr(thing, 'name', None) or thing}"
    if kind != "table":
        name += f" of table {about[1] if kind == 'column' else thing.table.name}"
    return f"{name} is missing" if action == "add" else f"{name} is not of this version"


def _not_compared(seen: sa.Inspector) -> Iterator[str]:
    """Sentences about the things that alembic does not compare: CHECK constraints, by name, and the view."""
    tables = set(seen.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in tables:
            continue
        expected = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
        found = {str(c["name"]) for c in seen.get_check_constraints(table.name)}
        yield from (f"constraint {name} of table {table.name} is missing" for name in sorted(expected - found))
    if VIEW not in seen.get_view_names():
        yield f"view {VIEW} is missing"
