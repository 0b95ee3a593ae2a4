"""A stand-in for the `oracledb` module: SQLAlchemy's real Oracle dialect, the driver's real constants and errors, no server.

    create_engine("oracle+oracledb://u:p@h/?service_name=s", module=RecordingOracle("19.21.0.0.0", rows))

Everything that the driver would have sent is kept in `log`, as it would have sent it: the text, the binds, the types of the
binds, the commits. `support.oracle_rules` holds that log to what Oracle takes.

Answers come from rows, not from a script. `rows` is an SQLite file with the product's schema, and each SELECT, INSERT,
UPDATE and DELETE is run there. That is the more honest test: a canned row would say of a save, a prune or a lease whatever
its author believed, while here rowcounts, unique keys and the next query follow from what was really written, and a
statement that the test did not think of gets a true answer. The price is a translation, kept to six textual rewrites
(`_to_sqlite`), which is all that the product's portable SQL needs. A translation through sqlglot was rejected: it would
rewrite the whole of each statement by rules of its own, and an error in the Oracle text could be mended on the way. What
the rewrites do not cover fails loudly and never reaches the product.

What follows Oracle and not SQLite: a statement sees what was committed before it (READ COMMITTED), a write begins a
transaction, an empty string is NULL, column names come back in upper case, numbers pass through the dialect's output
converters, and a violated constraint is the driver's own exception with Oracle's code. What is not here: Oracle's types,
optimizer and locks. It proves what is sent, never that a server accepts it.

Without `rows` it answers a SELECT with no row and counts one row for each write.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracledb
from oracledb.errors import _Error
from sqlalchemy.dialects import oracle, sqlite

from llama_ckpt.db.types import now_us

COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"

Row = tuple[Any, ...]
Binds = dict[str, Any]


@dataclass
class Statement:
    """One call of the driver. `COMMIT` and `ROLLBACK` stand for the connection's methods of that name."""

    sql: str
    connection: int
    rows: list[Binds] = field(default_factory=list)
    """The binds, one set for each execution: exactly one unless `many`."""
    sizes: Binds = field(default_factory=dict)
    """The types that the dialect declared for binds (`setinputsizes`)."""
    many: bool = False
    failed: int = 0
    """The code of the error it got, 0 for none."""
    of_dialect: bool = False
    """SQLAlchemy's own question about the server, not a statement of the product."""


@dataclass(frozen=True)
class Answer:
    """What a statement that matches `pattern` gets. Without columns its row goes into the OUT binds."""

    pattern: str
    columns: tuple[str, ...]
    rows: Callable[[RecordingOracle, Binds], list[Row]]


def _always(*row: Any) -> Callable[[RecordingOracle, Binds], list[Row]]:
    return lambda _driver, _binds: [row]


# What SQLAlchemy asks of the server itself, none of which the rows could answer.
_OF_DIALECT = (
    # The first connection reads the isolation level, to restore it later: it needs a transaction's id of three parts …
    Answer(r"dbms_transaction\.local_transaction_id", (), _always("1.2.3")),
    # … and looks it up. The dialect translates the flag inside the query, so this is the translated word.
    Answer(r"FROM v\$transaction\b", ("ISOLATION_LEVEL",), _always("READ COMMITTED")),
    # The decimal separator of the connection's NLS settings, read off a number.
    Answer(r"^SELECT 1\.1 FROM DUAL$", ("1.1",), _always("1.1")),
    # The pool's pre-ping.
    Answer(r"^SELECT 1 FROM DUAL$", ("1",), _always(1)),
    # The schema that reflection looks into.
    Answer(r"sys_context\( 'userenv', 'current_schema' \)", ("CURRENT_SCHEMA",), _always("LLAMA_CKPT")),
    # `Inspector.has_table`: those of the names in the binds that exist. Oracle's dictionary has them in upper case.
    Answer(r"\ball_tables\b.*\ball_views\b", ("TABLE_NAME",), lambda driver, binds: driver.known_tables(binds)),
)


class RecordingOracle:
    """The module object. `version` is the server's ("19.21.0.0.0", "23.5.0.24.7"); whatever is not defined here is oracledb's."""

    def __init__(self, version: str, rows: Path | None = None) -> None:
        self.server_version = version
        self.rows = rows
        self.log: list[Statement] = []
        self.connect_arguments: list[dict[str, Any]] = []
        self._answers: list[Answer] = []
        self._failures: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(oracledb, name)

    def connect(self, dsn: str | None = None, **arguments: Any) -> _Connection:
        """A connection. Arguments that the real driver does not know are refused as it would refuse them."""
        oracledb.ConnectParams(**arguments)
        self.connect_arguments.append({"dsn": dsn, **arguments})
        return _Connection(self, len(self.connect_arguments))

    def answer(self, pattern: str, columns: Iterable[str], rows: Iterable[Row]) -> None:
        """From now on statements that match `pattern` get these rows."""
        known = list(rows)
        self._answers.append(Answer(pattern, tuple(columns), lambda _driver, _binds: list(known)))

    def fail(self, pattern: str, code: int, times: int = 1) -> None:
        """The next `times` statements that match `pattern` (or `COMMIT`) get this ORA- code and do nothing."""
        self._failures += [(pattern, code)] * times

    def statements(self) -> list[Statement]:
        """The product's statements, without transaction control and without the dialect's own questions."""
        return [s for s in self.log if not s.of_dialect and s.sql not in (COMMIT, ROLLBACK)]

    def known_tables(self, binds: Binds) -> list[Row]:
        """Those of the upper-case names among `binds` that the rows have a table for."""
        if self.rows is None:
            return []
        with sqlite3.connect(self.rows) as db:
            named = db.execute("SELECT upper(name) FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        db.close()
        return [row for row in named if row[0] in binds.values()]

    def note(self, statement: Statement) -> None:
        """Keeps a statement, and raises the failure that was planned for it."""
        self.log.append(statement)
        for planned in self._failures:
            if _matches(planned[0], statement.sql):
                self._failures.remove(planned)
                statement.failed = planned[1]
                raise ora_error(planned[1])

    def answer_to(self, statement: Statement) -> Answer | None:
        """The canned answer for a statement, if there is one."""
        for answer in (*self._answers, *_OF_DIALECT):
            if _matches(answer.pattern, statement.sql):
                statement.of_dialect = answer in _OF_DIALECT
                return answer
        return None


def _matches(pattern: str, sql: str) -> bool:
    return re.search(pattern, sql, re.IGNORECASE | re.DOTALL) is not None


def ora_error(code: int, detail: str = "as the test planned it") -> oracledb.DatabaseError:
    """The exception that the driver raises for an error of the server: its class, its message, its mapping to DPY- codes."""
    error = _Error(message=f"ORA-{code:05d}: {detail}", code=code)
    return error.exc_type(error)


class _Variable:
    """`cursor.var`: where the driver puts an OUT bind, or how it converts a fetched column."""

    def __init__(self, type_: Any, outconverter: Callable[[Any], Any] | None) -> None:
        self._is_text = type_ in (str, oracledb.STRING)
        self._outconverter = outconverter
        self.values: list[list[Any]] = [[None]]

    def converted(self, value: Any) -> Any:
        """A value of the server as this variable hands it out."""
        if value is None:
            return None
        if self._is_text and not isinstance(value, str):
            value = str(value)
        return value if self._outconverter is None else self._outconverter(value)

    def put(self, values: Sequence[Any]) -> None:
        """The values of one execution."""
        self.values = [[self.converted(value) for value in values]]

    def getvalue(self, pos: int = 0) -> Any:
        return self.values[pos][0]


class _Cursor:
    arraysize = 100
    prefetchrows = 2
    outputtypehandler: Callable[..., Any] | None = None
    description: list[Row] | None = None
    rowcount = 0

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._sizes: Binds = {}
        self._fetched: list[Row] = []

    def var(self, type_: Any, size: int = 0, arraysize: int = 1, outconverter: Any = None, **_: Any) -> _Variable:
        return _Variable(type_, outconverter)

    def setinputsizes(self, **sizes: Any) -> None:
        self._sizes = sizes

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] | None = None) -> _Cursor | None:
        statement = self._noted(sql, [_named(parameters)], many=False)
        binds = statement.rows[0]
        if answer := self._connection.driver.answer_to(statement):
            rows = answer.rows(self._connection.driver, binds)
            if not answer.columns:
                _put_out(binds, rows)
            self._show(answer.columns, rows)
        else:
            self._show_run(self._connection.run(statement), binds)
        return self if self.description is not None else None

    def executemany(self, sql: str, parameters: Sequence[Mapping[str, Any] | Sequence[Any]]) -> None:
        statement = self._noted(sql, [_named(p) for p in parameters], many=True)
        ran = self._connection.run(statement)
        self.description, self.rowcount = None, len(statement.rows) if ran is None else ran.rowcount

    def _noted(self, sql: str, rows: list[Binds], *, many: bool) -> Statement:
        statement = Statement(sql, self._connection.number, rows, self._sizes, many)
        self._sizes = {}  # the driver forgets them after one execution
        self._connection.driver.note(statement)
        return statement

    def _show_run(self, ran: sqlite3.Cursor | None, binds: Binds) -> None:
        if ran is None:  # there are no rows to run it on
            _put_out(binds, [(1,) * len(binds)])
            self._show(("X",) if _is_query(self._connection.driver.log[-1].sql) else (), [])
            self.rowcount = 1
        elif any(isinstance(value, _Variable) for value in binds.values()):
            _put_out(binds, ran.fetchall())
            self._show((), [])
            self.rowcount = 1
        else:
            sql = self._connection.driver.log[-1].sql
            names = [name if f'"{name}"' in sql else name.upper() for name, *_ in ran.description or ()]
            self._show(names, ran.fetchall())
            self.rowcount = max(0, ran.rowcount)

    def _show(self, columns: Sequence[str], rows: list[Row]) -> None:
        """Describes a result as the driver does, and passes each column through the dialect's converter for its type."""
        if not columns:
            self.description, self._fetched = None, []
            return
        types = [_type_of([row[i] for row in rows]) for i in range(len(columns))]
        handler = self.outputtypehandler or self._connection.outputtypehandler
        # Precision 0 and scale -127 is a NUMBER of unknown size, as the server describes an expression.
        out = [handler and handler(self, name, type_, 0, 0, -127) for name, type_ in zip(columns, types, strict=True)]
        self.description = [
            (name, type_, None, None, 0, -127, True) for name, type_ in zip(columns, types, strict=True)
        ]
        self._fetched = [
            tuple(v if o is None else o.converted(v) for v, o in zip(row, out, strict=True)) for row in rows
        ]

    def fetchone(self) -> Row | None:
        return self._fetched.pop(0) if self._fetched else None

    def fetchmany(self, size: int | None = None) -> list[Row]:
        taken = self._fetched[: size or self.arraysize]
        del self._fetched[: len(taken)]
        return taken

    def fetchall(self) -> list[Row]:
        return self.fetchmany(len(self._fetched))

    def close(self) -> None:
        self._fetched = []

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection:
    # What the dialect reads of a connection when it meets a server.
    thin = True
    autocommit = False
    stmtcachesize = 20
    max_identifier_length = 128
    outputtypehandler: Callable[..., Any] | None = None

    def __init__(self, driver: RecordingOracle, number: int) -> None:
        self.driver, self.number, self.version = driver, number, driver.server_version
        self._rows: sqlite3.Connection | None = None
        if driver.rows is not None:
            # Pools hand connections from thread to thread. No time-out: one process that waits for itself waits for ever.
            self._rows = sqlite3.connect(driver.rows, isolation_level=None, check_same_thread=False, timeout=0)
            self._rows.execute("PRAGMA foreign_keys = ON")
            self._rows.execute("PRAGMA synchronous = OFF")

    def cursor(self, scrollable: bool = False) -> _Cursor:
        return _Cursor(self)

    def run(self, statement: Statement) -> sqlite3.Cursor | None:
        """Runs a statement on the rows; None where there are none, or where it is neither query nor change of rows."""
        if self._rows is None or not (_is_query(statement.sql) or _is_write(statement.sql)):
            return None
        if _is_write(statement.sql) and not self._rows.in_transaction:
            self._rows.execute("BEGIN IMMEDIATE")
        # On Oracle an empty string is NULL.
        rows = [{k: None if v == "" else v for k, v in binds.items()} for binds in statement.rows]
        sql = _to_sqlite(statement.sql)
        try:
            return (
                self._rows.executemany(sql, rows) if statement.many else self._rows.execute(sql, _without_out(rows[0]))
            )
        except sqlite3.IntegrityError as error:
            statement.failed = _ORA_CODES[error.sqlite_errorname]
            if statement.failed == _ORA_CODES["SQLITE_CONSTRAINT_FOREIGNKEY"] and _matches(
                r"^\s*DELETE\b", statement.sql
            ):
                statement.failed = _CHILD_FOUND
            raise ora_error(statement.failed, str(error)) from error
        except sqlite3.Error as error:
            # No exception of the driver: the product must not take the stand-in's limits for a database that fails.
            raise AssertionError(f"the stand-in cannot run this: {error}\n{statement.sql}\n{sql}") from error

    def commit(self) -> None:
        self.driver.note(Statement(COMMIT, self.number))
        self._end(COMMIT)

    def rollback(self) -> None:
        self.driver.note(Statement(ROLLBACK, self.number))
        self._end(ROLLBACK)

    def _end(self, how: str) -> None:
        if self._rows is not None and self._rows.in_transaction:
            self._rows.execute(how)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


_ORA_CODES = {
    "SQLITE_CONSTRAINT_UNIQUE": 1,
    "SQLITE_CONSTRAINT_PRIMARYKEY": 1,
    "SQLITE_CONSTRAINT_NOTNULL": 1400,
    "SQLITE_CONSTRAINT_CHECK": 2290,
    "SQLITE_CONSTRAINT_FOREIGNKEY": 2291,
}
_CHILD_FOUND = 2292

_CLOCK = str(now_us().compile(dialect=oracle.dialect()))
_SQLITE_CLOCK = str(now_us().compile(dialect=sqlite.dialect()))


def _to_sqlite(sql: str) -> str:
    """The six things that the product's SQL on Oracle says otherwise than SQLite does."""
    sql = sql.replace(_CLOCK, _SQLITE_CLOCK)
    sql = re.sub(r"\bFROM DUAL\b", "", sql)
    sql = re.sub(r"\s+FOR UPDATE( SKIP LOCKED)?$", "", sql)  # who writes on SQLite is alone
    sql = re.sub(r"\bFETCH FIRST (\S+) ROWS ONLY\b", r"LIMIT \1", sql)
    sql = re.sub(r"(\bRETURNING .*) INTO :.*$", r"\1", sql, flags=re.DOTALL)
    return re.sub(r':"(\w+)"', r":\1", sql)


def _is_query(sql: str) -> bool:
    return _matches(r"^\s*(SELECT|WITH)\b", sql)


def _is_write(sql: str) -> bool:
    return _matches(r"^\s*(INSERT|UPDATE|DELETE|SAVEPOINT|ROLLBACK TO)\b", sql) or _matches(
        r"\bFOR UPDATE( SKIP LOCKED)?$", sql
    )


def _named(parameters: Mapping[str, Any] | Sequence[Any] | None) -> Binds:
    if isinstance(parameters, Mapping):
        return {name.strip('"'): value for name, value in parameters.items()}
    return {str(i): value for i, value in enumerate(parameters or (), 1)}


def _without_out(binds: Binds) -> Binds:
    return {name: value for name, value in binds.items() if not isinstance(value, _Variable)}


def _put_out(binds: Binds, rows: list[Row]) -> None:
    variables = [value for value in binds.values() if isinstance(value, _Variable)]
    for i, variable in enumerate(variables):
        variable.put([row[i] for row in rows])


def _type_of(values: Sequence[Any]) -> Any:
    first = next((v for v in values if v is not None), "")
    by_type = {int: oracledb.DB_TYPE_NUMBER, float: oracledb.DB_TYPE_NUMBER, bytes: oracledb.DB_TYPE_RAW}
    return by_type.get(type(first), oracledb.DB_TYPE_VARCHAR)
