"""`Database`: connections, transactions, and the mapping of driver errors to those of llama-ckpt, by code."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from llama_ckpt.db.mounts import is_remote, is_shared_folder, mount_of, read_mountinfo
from llama_ckpt.errors import BadInput, CommitOutcomeUnknown, Conflict, DatabaseUnavailable

# Driver name -> the extra of llama-ckpt that brings it.
SUPPORTED = {"sqlite": "", "postgresql+psycopg": "postgres", "oracle+oracledb": "oracle"}
_SHORT = {"postgresql": "postgresql+psycopg", "oracle": "oracle+oracledb"}
_BUSY_TIMEOUT_S = 30
# Pages of 4 KiB: 64 MiB. Keys are hashes, so rows change pages all over the file. The more rows one checkpoint of the log writes
# back, the fewer pages it writes per row. With SQLite's default of 1,000, gc's deletes take twice as long among a million rows.
_WAL_PAGES = 16_384
_CONNECT_TIMEOUT_S = 10
_CALL_TIMEOUT_S = 300
_CREATING = threading.Lock()

log = logging.getLogger("llama_ckpt")

Connection = sa.Connection  # for modules that must not import SQLAlchemy
T = TypeVar("T")


class Database:
    """Connections to one database, named by an SQLAlchemy URL (`sqlite:///path`, `postgresql+psycopg://…`,
    `oracle+oracledb://…`). `password` is used where the URL has none.

    No connection is opened before the first transaction.

    Raises:
        BadInput: the URL cannot be parsed, or names a database that llama-ckpt does not support.
        DatabaseUnavailable: its driver is not installed, or it is SQLite on a network file system.
    """

    def __init__(self, url: str, password: str | None = None) -> None:
        self.url = _parse(url)
        if password is not None and self.url.password is None and self.dialect != "sqlite":
            self.url = self.url.set(password=password)
        self._engine = _engine(self.url)
        self._writer = self._engine.execution_options(llama_ckpt_writer=True)

    @property
    def shown_url(self) -> str:
        """The URL without the password, for logs and messages."""
        return _shown(self.url)

    @property
    def dialect(self) -> str:
        """SQLAlchemy's name of the database: "sqlite", "postgresql" or "oracle"."""
        return self.url.get_backend_name()

    def exists(self) -> bool:
        """Whether the database exists; True for one on a server. Does not connect: on SQLite that would create the file."""
        return self.dialect != "sqlite" or Path(self.url.database or "").exists()

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection for reading. Nothing written on it is kept.

        Raises:
            DatabaseUnavailable: the database cannot be reached or read.
        """
        with self._mapped_errors(), self._engine.connect() as db:
            yield db

    def query(self, read_rows: Callable[[sa.Connection], T]) -> T:
        """The result of a function that only reads. If the connection is lost, it is called once more on a new one.

        Raises:
            DatabaseUnavailable: the database cannot be reached or read.
        """
        try:
            with self.read() as db:
                return read_rows(db)
        except DatabaseUnavailable as error:
            if not _is_lost(error):
                raise
            with self.read() as db:
                return read_rows(db)

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction for writing: committed when the block ends, rolled back when it raises.

        On SQLite it takes the write lock at the start, so that it cannot fail for want of the lock half-way.

        Raises:
            Conflict: a unique key is taken.
            CommitOutcomeUnknown: the connection was lost, or a call took too long, during the commit: either all of the block
                is committed, now or shortly, or nothing.
            DatabaseUnavailable: the database cannot be reached or written; nothing of the block was kept.
        """
        committing = False
        try:
            with self._mapped_errors(), self._writer.begin() as db:
                yield db
                committing = True
        except DatabaseUnavailable as error:
            # Few of Oracle's errors are known here to mean that nothing was kept.
            if committing and (_is_lost(error) or self.dialect == "oracle"):
                raise CommitOutcomeUnknown(**error.values) from error.__cause__
            raise

    @contextlib.contextmanager
    def migration(self) -> Iterator[sa.Connection]:
        """A transaction for migrations. On SQLite foreign keys are off: otherwise a batch migration that re-creates a table would
        delete the rows that refer to it.

        Raises:
            DatabaseUnavailable: the database cannot be reached or written.
        """
        engine = _engine(self.url, foreign_keys=False, poolclass=sa.NullPool)
        try:
            with self._mapped_errors(), engine.execution_options(llama_ckpt_writer=True).begin() as db:
                if self.dialect == "postgresql":  # two hosts that upgrade at the same time queue, as on SQLite
                    db.execute(sa.text("SELECT pg_advisory_xact_lock(7133701)"))
                yield db
        finally:
            engine.dispose()

    def close(self) -> None:
        """Closes all connections. The object may be used again."""
        self._engine.dispose()

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        """Raises errors of llama-ckpt for those of SQLAlchemy and the driver."""
        try:
            yield
        except sa.exc.IntegrityError as error:
            if _code(error) in _UNIQUE:
                raise Conflict(what=str(error.orig).splitlines()[0]) from error
            reason = f"the schema refuses a row: {_reason(error)}"
            raise DatabaseUnavailable(url=self.shown_url, reason=reason) from error
        except sa.exc.DBAPIError as error:
            raise DatabaseUnavailable(url=self.shown_url, reason=_reason(error)) from error
        except sa.exc.TimeoutError as error:
            raise DatabaseUnavailable(url=self.shown_url, reason="all its connections are in use") from error


def _is_lost(error: DatabaseUnavailable) -> bool:
    """Whether the connection was lost; otherwise the database has answered."""
    return bool(getattr(error.__cause__, "connection_invalidated", False))


def sqlite_url(path: Path) -> str:
    """The URL of the SQLite database in this file, quoted where a URL needs it.

    Raises:
        BadInput: the path is no text in UTF-8.
    """
    try:
        path.as_posix().encode()
    except UnicodeEncodeError as error:
        reason = "the name is no text in UTF-8, and SQLite cannot open it"
        raise BadInput(what="store", value=ascii(str(path)), reason=reason) from error
    return URL.create("sqlite", database=path.as_posix()).render_as_string()


def hide_password(url: str) -> str:
    """A database URL without the password, for messages.

    Raises:
        BadInput: the URL cannot be parsed.
    """
    return _shown(_parse(url))


def _shown(url: URL) -> str:
    """The URL with the secrets in its user part and its query replaced by asterisks."""
    secret = {key: "***" for key in url.query if "pass" in key.lower() or "secret" in key.lower()}
    return url.update_query_dict(secret).render_as_string(hide_password=True)


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except (sa.exc.ArgumentError, ValueError, TypeError) as error:
        shown = text.split("@")[-1]  # the part before an @ may be a password
        raise BadInput(
            what="database URL", value=shown, reason="expected e.g. sqlite:////path/registry.sqlite3"
        ) from error
    if "@" in (url.host or ""):
        raise BadInput(what="database URL", value=url.drivername, reason="write an @ inside the password as %40")
    url = url.set(drivername=_SHORT.get(url.drivername, url.drivername))
    if url.drivername not in SUPPORTED:
        raise BadInput(what="database URL", value=url.drivername, reason=f"llama-ckpt speaks {', '.join(SUPPORTED)}")
    if url.drivername == "postgresql+psycopg" and not url.database:
        raise BadInput(what="database URL", value=url.drivername, reason="it names no database: postgresql://host/NAME")
    if url.get_backend_name() == "sqlite" and url.query:
        raise BadInput(
            what="database URL", value="?" + "&".join(url.query), reason="SQLite's URL takes no options here"
        )
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise BadInput(what="database URL", value=text, reason="name a file: a registry in memory would lose every row")
    return url


def _engine(url: URL, *, foreign_keys: bool = True, **options: Any) -> sa.Engine:
    name = url.get_backend_name()
    arguments: dict[str, Any] = {"timeout": _BUSY_TIMEOUT_S}
    if name != "sqlite":
        # A firewall or a restart may have closed a pooled connection: it is tested before it is used.
        if options.get("poolclass") is None:
            options |= {"pool_pre_ping": True, "pool_recycle": 1800, "pool_timeout": 30}
        # Options of the URL override these.
        arguments = {key: value for key, value in _LIMITS[name].items() if key not in url.query}
    try:
        engine = sa.create_engine(url, connect_args=arguments, **options)
    except (sa.exc.ArgumentError, ValueError, TypeError) as error:
        raise BadInput(what="database URL", value=_shown(url), reason=str(error)) from error
    except ModuleNotFoundError as error:
        reason = f"{error}; install it with: pip install 'llama-ckpt[{SUPPORTED[url.drivername]}]'"
        raise DatabaseUnavailable(url=_shown(url), reason=reason) from error
    if name != "sqlite" and options.get("poolclass") is None:  # no limit for a migration
        _limit_waits(engine)
    if name == "sqlite":
        _require_local(Path(url.database or ""))
        _tune_sqlite(engine, Path(url.database or ""), foreign_keys)
    return engine


# So that no process waits for a server that is gone: data that is not acknowledged for a minute ends the connection, and idle
# connections are probed.
_LIMITS: dict[str, dict[str, Any]] = {
    "postgresql": {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "tcp_user_timeout": 60_000,  # ms
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
    },
    "oracle": {"tcp_connect_timeout": _CONNECT_TIMEOUT_S},
}


def _limit_waits(engine: sa.Engine) -> None:
    """Limits how long a host that hangs or dies in a transaction blocks others: a wait for its locks ends with an error, and the
    server ends idle transactions. SQLite has its busy timeout.
    """

    @sa.event.listens_for(engine, "connect")
    def limits(connection: Any, _record: Any) -> None:
        if engine.dialect.name == "postgresql":
            values = {"lock_timeout": _BUSY_TIMEOUT_S, "idle_in_transaction_session_timeout": _CALL_TIMEOUT_S}
            sets = ", ".join(f"set_config('{name}', '{seconds}s', false)" for name, seconds in values.items())
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {sets}")
            connection.commit()
        elif engine.dialect.name == "oracle":
            connection.call_timeout = _CALL_TIMEOUT_S * 1000


def _require_local(path: Path) -> None:
    mount = mount_of(path.absolute(), read_mountinfo())
    if mount is None:
        return
    if is_shared_folder(mount.kind):
        log.warning(
            "the SQLite database %s is in a folder that a host shares with a virtual machine (%s), where SQLite was reported to"
            " lose data: name a --database-url on a local disk, or PostgreSQL",
            path,
            mount.kind,
        )
    elif is_remote(mount.kind):
        reason = (
            f"it is on a file system that is not known to be local ({mount.kind}); on a network file system SQLite's"
            " write-ahead log cannot work, and rows would be lost."
            " Name a --database-url on a local disk, or PostgreSQL; the store may stay where it is"
        )
        raise DatabaseUnavailable(url=sqlite_url(path), reason=reason)


def _tune_sqlite(engine: sa.Engine, path: Path, foreign_keys: bool) -> None:
    """Sets WAL and mode 0600, and begins transactions itself: those of sqlite3 begin late, and then fail if another writes."""

    @sa.event.listens_for(engine, "do_connect")
    def private_file(*_: Any) -> None:
        # SQLite would create it by the umask; the WAL files get the mode of the main file. Only a new file may be opened here,
        # and not while another thread opens it: closing any descriptor of a file drops all locks that this process has on it
        # (fcntl, POSIX). Another process that closes the database would then take itself for the last one, and delete the
        # write-ahead log that this one uses. https://sqlite.org/howtocorrupt.html, section 2.2
        with _CREATING, contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600))

    @sa.event.listens_for(engine, "connect")
    def settings(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        with contextlib.suppress(sqlite3.OperationalError):  # a read-only file keeps its mode
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get("llama_ckpt_writer") else "BEGIN"
        driver = connection.connection.driver_connection
        assert driver is not None  # noqa: S101 - narrows the type
        try:
            driver.execute(statement)  # of the driver itself: through SQLAlchemy it takes ten times as long
        except sqlite3.Error as error:
            raise sa.exc.DBAPIError.instance(statement, None, error, sqlite3.Error) from error


_SQLITE_HINTS = {
    "SQLITE_BUSY": f"another process has held the write lock for {_BUSY_TIMEOUT_S} s",
    "SQLITE_READONLY": "the file or its folder is read-only",
    "SQLITE_CANTOPEN": "the file cannot be opened or created; is its folder there, and yours?",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_NOTADB": "the file is no SQLite database",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a backup",
    "SQLITE_IOERR": "the file system failed",
}


# The codes for a taken unique key: SQLite's names, PostgreSQL's SQLSTATE, Oracle's ORA-00001.
_UNIQUE = {"SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", "23505", "ORA-00001"}


def _code(error: sa.exc.DBAPIError) -> str:
    """The driver's own code of an error, as the driver writes it."""
    original = error.orig
    for name in ("sqlite_errorname", "sqlstate"):
        if code := getattr(original, name, None):
            return str(code)
    first = original.args[0] if original is not None and original.args else None
    return str(getattr(first, "full_code", "") or "")


def _reason(error: sa.exc.DBAPIError) -> str:
    first, code = (str(error.orig).splitlines() or ["no message"])[0], _code(error)
    hint = next((h for name, h in _SQLITE_HINTS.items() if code.startswith(name)), "")
    return f"{first}{f' [{code}]' if code and code not in first else ''}{f': {hint}' if hint else ''}"
