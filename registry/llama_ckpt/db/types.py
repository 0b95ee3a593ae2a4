"""Column types and the clock, spelt so that SQLite, PostgreSQL and Oracle agree."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Integer, LargeBinary
from sqlalchemy.dialects import oracle
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

# LargeBinary alone is BLOB on Oracle, which cannot be a key (ORA-02327).
Digest = LargeBinary(32).with_variant(oracle.RAW(32), "oracle")
# A prefix hash is kept to 16 bytes: a million checkpoints have some ten million of them.
PrefixHash = LargeBinary(16).with_variant(oracle.RAW(16), "oracle")
# BigInteger is not the rowid on SQLite, and so would not count up by itself.
Serial = BigInteger().with_variant(Integer(), "sqlite")


def stored_text(text: str, at_most: int) -> str:
    """A text as every database keeps it: valid UTF-8, without NUL, of this many characters, and never empty (to Oracle an
    empty text is NULL).
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:at_most] or "-"


class now_us(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """The database's clock: whole microseconds since 1970-01-01 UTC (on SQLite in steps of a millisecond)."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_us)
def _now_us_any(_element: now_us, compiler: SQLCompiler, **_kw: Any) -> str:
    raise NotImplementedError(f"no clock is known for {compiler.dialect.name}")


@compiles(now_us, "sqlite")
def _now_us_sqlite(_element: now_us, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"


@compiles(now_us, "postgresql")
def _now_us_postgresql(_element: now_us, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(now_us, "oracle")
def _now_us_oracle(_element: now_us, _compiler: SQLCompiler, **_kw: Any) -> str:
    # SYSTIMESTAMP has one value in a statement, however often it stands there.
    since = "(SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')"
    parts = (("DAY", 86_400_000_000), ("HOUR", 3_600_000_000), ("MINUTE", 60_000_000))
    whole = " + ".join(f"EXTRACT({part} FROM {since}) * {us}" for part, us in parts)
    return f"({whole} + ROUND(EXTRACT(SECOND FROM {since}) * 1000000))"


def expiry_us(expires_in_s: float | None) -> ColumnElement[int] | None:
    """The end of a row that expires in so many seconds, by the database's clock; None for one without an end."""
    return None if expires_in_s is None else now_us() + int(expires_in_s * 1_000_000)
