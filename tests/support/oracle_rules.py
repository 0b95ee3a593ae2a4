"""Rules over what `support.recording_oracle` has recorded: what Oracle, or its driver, would refuse or quietly change.

Each rule looks at one statement and gives a reason for each fault; `findings` applies them all. The oldest server in scope is
19c: what only 23ai takes (FALSE, a longer IN list, a SELECT without FROM) is a fault.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import oracledb
import sqlalchemy as sa
from support.oracle_names import SQL_RESERVED
from support.recording_oracle import COMMIT, ROLLBACK, Statement

from llama_ckpt.db.tables import metadata

LOBS = frozenset(c.name for t in metadata.tables.values() for c in t.columns if isinstance(c.type, sa.Text))
MAX_IN_LIST = 1000
MAX_STRING_BYTES = 4000
MAX_RAW_BYTES = 2000
MAX_BINDS = 65535
MAX_NUMBER = 10**19 - 1


@dataclass(frozen=True)
class Finding:
    """One fault: the rule it breaks, what exactly, and where."""

    rule: str
    what: str
    sql: str


def findings(log: Sequence[Statement]) -> list[Finding]:
    """Every fault in a log. What SQLAlchemy asks by itself is not ours to judge."""
    ours = [s for s in log if not s.of_dialect]
    found = [Finding(name, what, _flat(s.sql)[:400]) for s in ours for name, rule in RULES.items() for what in rule(s)]
    return found + list(_missing_commits(ours))


def names(sql: str) -> set[str]:
    """The identifiers of a statement, as far as they can be told from keywords: tables, aliases, qualified columns, columns of an
    INSERT or a SET, binds.
    """
    text = _flat(_without_literals(sql))
    found = set(re.findall(r"\b(?:FROM|INTO|UPDATE|JOIN) (\w+)\b", text))
    found |= set(re.findall(r"\b\w+\.(\w+)\b(?! ?\()", text))
    found |= set(re.findall(r"\bAS (\w+)\b(?!\()", re.sub(r"\bCAST\(.*?\bAS\b", "", text)))
    found |= set(re.findall(r":([A-Za-z]\w*)", text))
    if match := re.search(r"\bINSERT INTO \w+ \(([^()]*)\)", text):
        found |= {column.strip() for column in match[1].split(",")}
    if match := re.search(r"\bUPDATE \w+ SET (.*?)(?: WHERE |$)", text):
        found |= set(re.findall(r"(?:^|, )(\w+) ?=", match[1]))
    return found - {"DUAL"}


# -- what is wrong with a text ------------------------------------------------------------------------------------------


def _locked_rows_cut_off(s: Statement) -> Iterator[str]:
    text = _flat(_without_literals(s.sql))
    if re.search(r"\bFOR UPDATE\b", text) and (
        cut := re.search(r"\b(FETCH FIRST|DISTINCT|GROUP BY|UNION|ROWNUM)\b", text)
    ):
        yield f"ORA-02014 (or rows that are skipped unseen): FOR UPDATE with {cut[1]}"


def _long_in_list(s: Statement) -> Iterator[str]:
    for items in re.findall(r"\bIN \(([^()]*)\)", _flat(_without_literals(s.sql))):
        if items.count(",") + 1 > MAX_IN_LIST:
            yield f"ORA-01795: an IN list of {items.count(',') + 1}"


_ELSEWHERE = {
    r"\bLIMIT\b": "LIMIT",
    r"::": "a cast by ::",
    r"\bON CONFLICT\b": "ON CONFLICT",
    r"\bILIKE\b": "ILIKE",
    r"\bTRUE\b": "TRUE",
    r"\bFALSE\b": "FALSE",
    r"\b(FROM|JOIN|UPDATE) \w+ AS \w+": "AS before the alias of a table",
    r"\bRETURNING\b(?!.*\bINTO :)": "RETURNING without INTO",
    r"\bVALUES \([^()]*\), \(": "several rows in VALUES",
}


def _not_oracle(s: Statement) -> Iterator[str]:
    text = _flat(_without_literals(s.sql))
    yield from (what for pattern, what in _ELSEWHERE.items() if re.search(pattern, text))
    if re.match(r"SELECT\b", text) and not re.search(r"\bFROM\b", re.sub(r"\bEXTRACT\(\w+ FROM\b", "", text)):
        yield "SELECT without FROM"


def _compared_lob(s: Statement) -> Iterator[str]:
    text = _flat(_without_literals(s.sql))
    tail = re.search(r"\b(WHERE|ORDER BY|GROUP BY|HAVING|ON)\b.*", text)
    for lob in LOBS:
        # NULL or not can be asked of a LOB, and LIKE.
        if tail and re.search(rf"\b{lob}\b(?! IS (NOT )?NULL\b| (NOT )?LIKE\b)", tail[0]):
            yield f"ORA-00932: {lob} is a CLOB, which is neither compared nor sorted"
        if re.search(rf"\b(DISTINCT|UNION|MINUS|INTERSECT)\b.*\b{lob}\b", text):
            yield f"ORA-00932: {lob} is a CLOB, which is not made distinct"


def _reserved_name(s: Statement) -> Iterator[str]:
    """SQLAlchemy quotes those it knows; its list lacks ACCESS, FILE, SESSION and more."""
    yield from (f"ORA-00904, ORA-01745: {name}" for name in sorted(names(s.sql)) if name.upper() in SQL_RESERVED)


def _quoted_name(s: Statement) -> Iterator[str]:
    """A name in quotes must be written in quotes for ever. A bind or a label of a result is quoted by SQLAlchemy where it must
    be, and is seen by nobody.
    """
    text = re.sub(r'(?::|\bAS )"[^"]*"', "", _flat(_without_literals(s.sql)))
    yield from re.findall(r'"[^"]*"', text)


# -- what is wrong with a bind ------------------------------------------------------------------------------------------


def _of_value(fault: Callable[[Any], str | None]) -> Callable[[Statement], Iterator[str]]:
    def rule(s: Statement) -> Iterator[str]:
        for binds in s.rows:
            for name, value in binds.items():
                if what := fault(value):
                    yield f":{name} {what}"

    return rule


def _empty_string(value: Any) -> str | None:
    return "is '', which Oracle keeps as NULL" if value == "" and isinstance(value, str) else None


def _bool(value: Any) -> str | None:
    return f"is {value}: a BOOLEAN, which 19c has not" if isinstance(value, bool) else None


def _datetime(value: Any) -> str | None:
    if not isinstance(value, datetime.datetime):
        return None
    lost = "its zone" if value.tzinfo else "its fractions of a second"
    return f"is a datetime, of which the driver drops {lost}"


def _long_string(value: Any) -> str | None:
    size = len(value.encode()) if isinstance(value, str) else 0
    return f"is a string of {size} bytes" if size > MAX_STRING_BYTES else None


def _wide_int(value: Any) -> str | None:
    wide = isinstance(value, int) and abs(value) > MAX_NUMBER
    return f"is {value}, wider than NUMBER(19)" if wide else None


def _bytes_not_raw(s: Statement) -> Iterator[str]:
    for binds in s.rows:
        for name, value in binds.items():
            if not isinstance(value, bytes | bytearray | memoryview):
                continue
            declared = s.sizes.get(name, oracledb.DB_TYPE_RAW)  # not declared, the driver takes bytes for RAW
            if declared is not oracledb.DB_TYPE_RAW:
                yield f":{name} is bound as {declared.name}"
            elif len(value) > MAX_RAW_BYTES:
                yield f":{name} has {len(value)} bytes, too many for RAW"


def _many_binds(s: Statement) -> Iterator[str]:
    most = max((len(binds) for binds in s.rows), default=0)
    if most > MAX_BINDS:
        yield f"{most} binds"


def _nothing_to_execute(s: Statement) -> Iterator[str]:
    if s.many and not s.rows:
        yield "executemany with an empty list"


RULES: dict[str, Callable[[Statement], Iterator[str]]] = {
    "locked rows cut off": _locked_rows_cut_off,
    "long IN list": _long_in_list,
    "not Oracle's SQL": _not_oracle,
    "LOB compared": _compared_lob,
    "reserved name": _reserved_name,
    "quoted name": _quoted_name,
    "empty string": _of_value(_empty_string),
    "bool": _of_value(_bool),
    "datetime": _of_value(_datetime),
    "long string": _of_value(_long_string),
    "wide int": _of_value(_wide_int),
    "bytes not RAW": _bytes_not_raw,
    "many binds": _many_binds,
    "nothing to execute": _nothing_to_execute,
}


# -- what is wrong with a transaction -----------------------------------------------------------------------------------


def _missing_commits(log: Sequence[Statement]) -> Iterator[Finding]:
    """Writes that were not committed although nothing had failed: given back to the pool, which rolls them back, or left open."""
    open_writes: dict[int, list[Statement]] = {}
    for s in log:
        writes = open_writes.setdefault(s.connection, [])
        if s.sql == COMMIT and not s.failed:
            writes.clear()
        elif s.sql == ROLLBACK:
            yield from _lost(writes)
            writes.clear()
        elif s.failed or re.match(r"\s*(INSERT|UPDATE|DELETE|MERGE)\b", s.sql):
            writes.append(s)
        elif re.match(r"\s*(CREATE|ALTER|DROP|TRUNCATE|GRANT|COMMENT)\b", s.sql):
            writes.clear()  # Oracle commits before and after DDL
    for writes in open_writes.values():
        yield from _lost(writes)


def _lost(writes: Sequence[Statement]) -> Iterator[Finding]:
    if writes and not any(s.failed for s in writes):
        yield Finding("no COMMIT", f"{len(writes)} write(s) without a COMMIT", _flat(writes[0].sql)[:400])


def _without_literals(sql: str) -> str:
    return re.sub(r"'(?:[^']|'')*'", "''", sql)


def _flat(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip()
