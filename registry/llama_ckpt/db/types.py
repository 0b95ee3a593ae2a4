"""Column types and the clock, in forms on which SQLite, PostgreSQL and Oracle agree."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Integer, LargeBinary
from sqlalchemy.dialects import oracle
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from llama_ckpt.values import US_PER_S

# LargeBinary alone is BLOB on Oracle, which cannot be a key (ORA-02327).
Digest = LargeBinary(32).with_variant(oracle.RAW(32), "oracle")
# A prefix hash is truncated to 16 bytes: a million checkpoints have some ten million of them.
PrefixHash = LargeBinary(16).with_variant(oracle.RAW(16), "oracle")
# On SQLite only an Integer key is the rowid, which SQLite numbers.
Serial = BigInteger().with_variant(Integer(), "sqlite")


def stored_text(text: str, at_most: int) -> str:
    """A text in a form that every database can store: valid UTF-8, without NUL, at most `at_most` characters, and never empty
    (Oracle stores an empty text as NULL).
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
    # SYSTIMESTAMP has the same value everywhere in a statement.
    since = "(SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')"
    parts = (("DAY", 86_400_000_000), ("HOUR", 3_600_000_000), ("MINUTE", 60_000_000))
    seconds = " + ".join(f"EXTRACT({part} FROM {since}) * {us}" for part, us in parts)
    return f"({seconds} + ROUND(EXTRACT(SECOND FROM {since}) * 1000000))"


def expiry_us(expires_in_s: float | None) -> ColumnElement[int] | None:
    """The expiry of a row that expires in so many seconds, by the database's clock; None for a row that does not expire."""
    return None if expires_in_s is None else now_us() + int(expires_in_s * US_PER_S)
