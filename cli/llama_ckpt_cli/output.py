"""The one output: results on stdout (table, JSON, or the bare value), everything else on stderr."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from llama_ckpt.humanize import is_visible


class Progress(Protocol):
    """Hears how far something is, and what it is where that changes."""

    def __call__(self, done: int, total: int | None, what: str = ..., /) -> None:
        """`total` None: nobody knows."""


class Output:
    """Where a command speaks. `as_json` and `quiet` are the user's flags; quiet prints the bare value only."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    @property
    def human(self) -> bool:
        """Whether results are for a person to read."""
        return not self.as_json and not self.quiet

    def result(self, value: Any, human: Callable[[], None], bare: Sequence[str] = ()) -> None:
        """Prints a result once: `value` as JSON, or what `human` prints, or the lines `bare` for --quiet."""
        if self.as_json:
            # JSON's own escapes: exact for any text, harmless on any terminal, and right in any encoding.
            sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")
        elif self.quiet:
            for line in bare:
                self.line(line)
        else:
            human()
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """A line of a result on stdout, or several."""
        sys.stdout.write("\n".join(map(printable, text.split("\n"))) + "\n")

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        if not self.quiet:
            sys.stderr.write(printable(text) + "\n")

    def fields(self, pairs: Mapping[str, Any]) -> None:
        """Names and values, one a line."""
        width = max(map(len, pairs), default=0)
        for name, value in pairs.items():
            self.line(f"{name:<{width}}  {'-' if value is None else printable(str(value))}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """A table; as wide as the terminal, and uncut where stdout is no terminal."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name == "id")
        for row in rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        console = Console(file=sys.stdout, highlight=False, emoji=False)
        if not console.is_terminal:
            console = Console(file=sys.stdout, highlight=False, emoji=False, width=400, no_color=True)
            table.expand = False
        console.print(table)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A progress bar on stderr, on a terminal only; gives the function that hears (done, total), and what it is now."""
        if self.quiet or self.as_json or not sys.stderr.isatty():
            yield lambda _done, _total, _what=what: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total, what=what: bar.update(task, completed=done, total=total, description=what)


def printable(text: str) -> str:
    """`text` with control characters spelt out: what stands in a row, a file or a name must not steer a terminal."""
    return "".join(c if is_visible(c) else repr(c)[1:-1] for c in text)


def plain(value: Any) -> Any:
    """A value as JSON can say it: hashes as hex, enums by value, dataclasses as objects."""
    match value:
        case bytes():
            return value.hex()
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case BaseException():
            return str(value)
        case Mapping():
            return {str(k): plain(v) for k, v in value.items()}
        case tuple() if hasattr(value, "_asdict"):
            return plain(value._asdict())
        case list() | tuple():
            return [plain(v) for v in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        case _:
            return value


def span(seconds: float) -> str:
    """A length of time for people: 3.2 ms, 4.5 s, 12 min, 3.4 h, 5.0 d."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for unit, length, limit in (("s", 1.0, 120), ("min", 60.0, 7200), ("h", 3600.0, 172800)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:.1f} d"


def when(time_us: int | None) -> str:
    """A time in UTC to the second."""
    if time_us is None:
        return "-"
    return datetime.fromtimestamp(time_us / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
