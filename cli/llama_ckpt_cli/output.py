"""The one output: results on stdout (table, JSON, or the bare value), everything else on stderr."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from llama_ckpt.humanize import printable
from llama_ckpt_cli.tables import Column, Shorten, lines_of, shortened


class Progress(Protocol):
    """Receives how much of a work is done, and its name if that changes."""

    def __call__(self, done: int, total: int | None, what: str = ..., /) -> None:
        """`total` is None if it is not known."""


class Output:
    """Where a command writes. `as_json` and `quiet` are the user's flags; quiet prints only the bare values."""

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

    @staticmethod
    def discard() -> None:
        """Discards everything that is still to be written on stdout. Python would try to write the rest once more at its end."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def line(self, text: str) -> None:
        """A line of a result on stdout, or several."""
        sys.stdout.write("\n".join(map(printable, text.split("\n"))) + "\n")

    def note(self, text: str) -> None:
        """A note for the user that is not part of the result, on stderr; none with --quiet."""
        if not self.quiet:
            sys.stderr.write(printable(text) + "\n")

    def fields(self, pairs: Mapping[str, Any], shorten: Sequence[str] = ()) -> None:
        """Names and values, one a line. On a terminal, the values of `shorten` lose their middle if the line is too long."""
        names = max(map(len, pairs), default=0)
        width = _terminal_width()
        for name, value in pairs.items():
            text = "-" if value is None else printable(str(value))
            if width is not None and name in shorten:
                text = shortened(text, width - names - 2, Shorten.MIDDLE)
            self.line(f"{name:<{names}}  {text}")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """A table: as wide as the terminal allows, and with complete cells if stdout is not a terminal."""
        cells = [[printable(cell) for cell in row] for row in rows]
        self.line("\n".join(lines_of(columns, cells, _terminal_width())))

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A progress bar on stderr, only on a terminal. Gives the function to call with (done, total) and a new name."""
        if self.quiet or self.as_json or not sys.stderr.isatty():
            yield lambda _done, _total, _what=what: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total, what=what: bar.update(task, completed=done, total=total, description=what)


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


def _terminal_width() -> int | None:
    """Columns of the terminal on stdout; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
