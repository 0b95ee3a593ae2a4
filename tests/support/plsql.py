"""Oracle scripts without Oracle: split as SQL*Plus does, and their names held to the tables.

The name check knows our own style and no other: parameters are `p_`, locals `l_`, constants and cursors `c_`, types `t_`, and
every subprogram ends with its name. It is no parser: sqlglot parses the statements inside, a grammar elsewhere the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.oracle_names import words

from llama_ckpt.db.tables import VERSION_TABLE, metadata

OURS = {t.name: frozenset(t.columns.keys()) for t in metadata.tables.values()} | {
    VERSION_TABLE: frozenset({"version_num"}),
    "llama_checkpoint_v": frozenset(),
}
DICTIONARY = {
    "dual": frozenset(),
    "user_errors": frozenset({"name", "attribute"}),
    "user_scheduler_jobs": frozenset(
        {"job_name", "enabled", "state", "run_count", "failure_count", "last_start_date", "next_run_date"}
    ),
    "user_scheduler_job_run_details": frozenset({"job_name", "log_date", "status", "run_duration", "additional_info"}),
}
FUNCTIONS = words(
    """
    COALESCE COUNT EXTRACT GREATEST HEXTORAW LENGTH LOWER NUMTODSINTERVAL RAISE_APPLICATION_ERROR RAWTOHEX ROUND RPAD
    STANDARD_HASH SUBSTR SYS_CONTEXT SYS_EXTRACT_UTC TO_CHAR TRUNC CREATE_JOB DROP_JOB
    """
)
# What may stand before a parenthesis and is no function.
KEYWORDS = words("AND AS CASE DAY EXISTS IN IS NOT OR RAW SECOND SET TIMESTAMP VALUES VARCHAR2 WHERE")

_SQLPLUS = re.compile(r"\s*(WHENEVER|SET|SHOW|PROMPT|SPOOL|EXIT|DEFINE|UNDEFINE|COLUMN|REM|@@?)\b", re.IGNORECASE)
_PLSQL = re.compile(
    r"(CREATE\s+(OR\s+REPLACE\s+)?(PACKAGE|PROCEDURE|FUNCTION|TRIGGER|TYPE)|DECLARE|BEGIN)\b", re.IGNORECASE
)
_PREFIXED = r"\b[plct]_[a-z]\w*"
_DECLARED = re.compile(
    rf"(?:\bCURSOR\s+|\bTYPE\s+)?({_PREFIXED})\s+(?:CONSTANT\s+)?(?:IN\s+OUT\s+|IN\s+|OUT\s+)?"
    r"(?:IS\b|VARCHAR2|NUMBER|PLS_INTEGER|RAW|INTERVAL|TIMESTAMP|BOOLEAN|t_\w+)",
    re.IGNORECASE,
)
_DML = re.compile(
    r"(?<![\w'])(?:INSERT\s+INTO|UPDATE\s+(?!OF\b|SKIP\b|SET\b)\w+|DELETE\s+FROM|SELECT)\b[^;]*;", re.IGNORECASE
)


@dataclass(frozen=True)
class Unit:
    """What SQL*Plus sends, or does, at once. Kinds: sqlplus, sql, plsql, unterminated."""

    line: int
    kind: str
    text: str


def without_comments(text: str) -> str:
    return re.sub(r"('(?:[^']|'')*')|--[^\n]*|/\*.*?\*/", lambda found: found[1] or "", text, flags=re.DOTALL)


def without_strings(text: str) -> str:
    return re.sub(r"'(?:[^']|'')*'", "''", text)


def split(script: str) -> list[Unit]:
    """PL/SQL ends at a line with nothing but "/", plain SQL at ";" or "/"; a script that ends before is unterminated."""
    units: list[Unit] = []
    lines: list[str] = []
    start = 0
    for number, line in enumerate(script.splitlines(), 1):
        code = without_comments(line).strip()
        if not lines:
            if not code or code == "/":
                continue
            if _SQLPLUS.match(code):
                units.append(Unit(number, "sqlplus", code))
                continue
            start = number
        plsql = _PLSQL.match(without_comments("\n".join(lines) or line).strip())
        if code == "/" or (code.endswith(";") and not plsql):
            text = "\n".join(lines if code == "/" else [*lines, line[: line.rindex(";")]])
            units.append(Unit(start, "plsql" if plsql else "sql", text))
            lines = []
        else:
            lines.append(line)
    if lines:
        units.append(Unit(start, "unterminated", "\n".join(lines)))
    return units


def faults(script: str, package: str = "") -> list[str]:
    """All that is wrong with a script, each with the line of its unit. `package`: the script of the package that it may call."""
    units = [u for u in split(script) if u.kind != "sqlplus"]
    known = _Known([*units, *(u for u in split(package) if u.kind != "sqlplus")])
    return [f"line {u.line}: {x}" for u in units for x in sorted(set(_faults_of(u, known)))]


class _Known:
    """The names that scripts declare themselves: subprograms, everything prefixed, and what stands outside of subprograms."""

    def __init__(self, units: list[Unit]) -> None:
        codes = [without_strings(without_comments(u.text)) for u in units]
        self.subprograms = {
            x.lower() for code in codes for x in re.findall(r"\b(?:PROCEDURE|FUNCTION)\s+(\w+)", code, re.IGNORECASE)
        }
        self.declared = {x.lower() for code in codes for x in _DECLARED.findall(code)}
        outside = [_SUBPROGRAM.sub("", code) for code in codes if re.match(r"\s*CREATE\b", code, re.IGNORECASE)]
        self.of_package = {
            x.lower() for code in outside for x in _DECLARED.findall(code) if x[:2].lower() in ("c_", "t_")
        }


_SUBPROGRAM = re.compile(
    r"\b(?:PROCEDURE|FUNCTION)\s+(\w+)\b(?:(?!\b(?:PROCEDURE|FUNCTION)\b).)*?\bEND\s+\1\s*;", re.IGNORECASE | re.DOTALL
)


def _faults_of(unit: Unit, known: _Known) -> Iterator[str]:
    text = without_comments(unit.text)
    code = without_strings(text)
    if unit.kind == "unterminated":
        yield "missing terminator: the script ends inside"
    if unit.kind != "sql":
        yield from _block_faults(code)
    for scope in _scopes(code):
        yield from _undeclared(scope, known)
    yield from _call_faults(text, code, known)
    yield from _declaration_faults(code)
    for table in re.findall(r"\bGRANT\s[\w\s,]+?\sON\s+(\w+)|'TABLE\s+(\w+)", text, re.IGNORECASE):
        name = (table[0] or table[1]).lower()
        if name not in OURS and name != "llama_checkpoint":
            yield f"unknown table {name}"
    if not text.lstrip().upper().startswith("GRANT"):
        for found in _DML.finditer(text + ";"):
            yield from _statement_faults(found[0].rstrip(";"), known.declared)


def _call_faults(text: str, code: str, known: _Known) -> Iterator[str]:
    for name in re.findall(r"\b([a-z]\w*)\s*\(", code, re.IGNORECASE):
        ours = known.subprograms | known.declared | OURS.keys()
        if name.upper() not in FUNCTIONS | KEYWORDS and name.lower() not in ours:
            yield f"unknown function {name}"
    # Also in strings: a job's action is one.
    for name in re.findall(r"\bllama_checkpoint\.(\w+)", text, re.IGNORECASE):
        if name.lower() not in known.subprograms:
            yield f"unknown function llama_checkpoint.{name}"
    for name in re.findall(r"\b(p_\w+)\s*=>", text, re.IGNORECASE):
        if name.lower() not in known.declared:
            yield f"undeclared name {name}"


def _block_faults(code: str) -> Iterator[str]:
    if re.search(
        r"^\s*(CREATE\s+OR\s+REPLACE|WHENEVER|SHOW\s+ERRORS|GRANT)\b",
        code.lstrip().split("\n", 1)[-1],
        re.IGNORECASE | re.MULTILINE,
    ):
        yield 'missing "/": another unit begins inside'
    closed = len(re.findall(r"\bEND\b", code, re.IGNORECASE))
    opened = len(
        re.findall(r"(?<!\bEND )\b(?:BEGIN|IF|LOOP|CASE|PACKAGE)\b", re.sub(r"\bEND\s+", "END ", code), re.IGNORECASE)
    )
    if opened != closed:
        yield f"missing END or its opening: {opened} opened, {closed} closed"


def _scopes(code: str) -> list[str]:
    """A package's subprograms, each for itself; any other unit as a whole."""
    if not re.match(r"\s*CREATE\b", code, re.IGNORECASE):
        return [code]
    return [found[0] for found in _SUBPROGRAM.finditer(code)]


def _undeclared(scope: str, known: _Known) -> Iterator[str]:
    declared = {x.lower() for x in _DECLARED.findall(scope)} | known.of_package
    declared |= {x.lower() for x in re.findall(r"\bFOR(?:ALL)?\s+(\w+)\s+IN\b", scope, re.IGNORECASE)}
    for found in re.finditer(rf"({_PREFIXED})(\s*=>)?", scope, re.IGNORECASE):
        name = found[1].lower()
        if not found[2] and name not in declared:  # before => stands a parameter of another
            yield f"undeclared name {name}"


def _declaration_faults(code: str) -> Iterator[str]:
    if re.search(r"(?<!\bRETURN )\b(?:VARCHAR2|RAW)\s*(?::=|;)", code, re.IGNORECASE):
        yield "VARCHAR2 or RAW variable without a length"
    if re.search(r"\bOUT\s+\w+\s+(?:DEFAULT\b|:=)", code, re.IGNORECASE):
        yield "OUT parameter with a default"
    if re.search(r"\b(?:IN|OUT)\s+(?:VARCHAR2|NUMBER|RAW)\s*\(", code, re.IGNORECASE):
        yield "parameter with a size"


def _statement_faults(statement: str, variables: set[str]) -> Iterator[str]:
    if re.search(r"\bFOR\s+UPDATE\b", statement, re.IGNORECASE) and re.search(
        r"\b(FETCH\s+(FIRST|NEXT)|DISTINCT|GROUP\s+BY|UNION)\b", statement, re.IGNORECASE
    ):
        yield "FOR UPDATE with FETCH FIRST, DISTINCT or GROUP BY (ORA-02014)"
    if re.search(r"\bRETURNING\b(?!.*\bINTO\b)", statement, re.IGNORECASE | re.DOTALL):
        yield "RETURNING without INTO"
    yield from _name_faults(_plain(statement), variables)


def _plain(statement: str) -> str:
    """The statement without what only PL/SQL puts into it."""
    into = rf"\b(?:BULK\s+COLLECT\s+)?INTO\s+{_PREFIXED}(?:\s*,\s*{_PREFIXED})*"
    returning = re.search(r"\bRETURNING\b(.*)$", statement, re.IGNORECASE | re.DOTALL)
    plain = statement if returning is None else statement[: returning.start()]
    plain = re.sub(into, "", plain, flags=re.IGNORECASE)
    plain = re.sub(r"\bFOR\s+UPDATE\b.*$", "", plain, flags=re.IGNORECASE | re.DOTALL)
    return re.sub(rf"({_PREFIXED})\s*\(\s*\w+\s*\)", r"\1", plain, flags=re.IGNORECASE)  # an element of a collection


def _name_faults(statement: str, variables: set[str]) -> Iterator[str]:
    import sqlglot
    from sqlglot import exp

    try:
        tree = sqlglot.parse_one(statement, dialect="oracle")
    except sqlglot.errors.ParseError as error:
        yield f"no SQL: {str(error).splitlines()[0]}"
        return
    known = OURS | DICTIONARY
    tables = {(t.alias or t.name).lower(): t.name.lower() for t in tree.find_all(exp.Table)}
    for name in sorted(set(tables.values()) - known.keys()):
        yield f"unknown table {name}"
    columns = {alias: known.get(name, frozenset()) for alias, name in tables.items()}
    columns[""] = frozenset().union(*columns.values(), variables, {"systimestamp"})
    named = [(c.table.lower(), c.name.lower()) for c in tree.find_all(exp.Column)]
    if isinstance(tree, exp.Insert) and isinstance(tree.this, exp.Schema):
        named += [("", c.name.lower()) for c in tree.this.expressions]
    for table, name in named:
        if table not in columns:
            yield f"unknown table {table}"
        elif name not in columns[table]:
            yield f"unknown column {name}"
