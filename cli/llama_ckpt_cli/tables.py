"""Tables of text that fit the terminal. Pure: columns and rows in, lines out."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

_GAP = "  "
_ELLIPSIS = "…"
_NARROWEST_TEXT = 10


class Shorten(Enum):
    """What goes first where a cell is too wide for its column."""

    NEVER = "never"
    END = "end"
    """The end, marked with an ellipsis: sentences."""
    MIDDLE = "middle"
    """The middle, marked with an ellipsis: names and paths, whose ends tell them apart."""
    PREFIX = "prefix"
    """The end, without a mark: ids, which commands take by their first digits."""
    WRAP = "wrap"
    """Nothing: the cell goes on in lines below. For the last column only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. On a terminal it is at most `at_most` wide.

    If the table is wider than the terminal, cells are shortened down to `at_least`. If that is not enough, the columns with a
    `drop_rank` are left out, the lowest rank first.
    """

    name: str
    right: bool = False
    shorten: Shorten = Shorten.NEVER
    at_least: int = 0
    at_most: int | None = None
    drop_rank: int | None = None


def text_width(text: str) -> int:
    """Cells that a terminal needs for a text: two for wide characters, none for combining ones."""
    return sum(_character_width(c) for c in text)


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def lines_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of a table with its head: at most `width` wide if the columns allow it; None: as wide as the cells are."""
    kept, widths = list(range(len(columns))), _natural_widths(columns, rows, width)
    if width is not None:
        kept, widths = _fitted(columns, widths, width)
    shown = [columns[i] for i in kept]
    head = _line([replace(c, shorten=Shorten.NEVER) for c in shown], [c.name for c in shown], widths)
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    body = [line for row in rows for line in _lines(shown, [row[i] for i in kept], widths)]
    return [*head, rule, *body]


def _natural_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    widths = []
    for i, column in enumerate(columns):
        widest = max((text_width(row[i]) for row in rows), default=0)
        if width is not None and column.at_most is not None:
            widest = min(widest, column.at_most)
        widths.append(max(widest, text_width(column.name)))
    return widths


def _fitted(columns: Sequence[Column], natural: list[int], width: int) -> tuple[list[int], list[int]]:
    """The columns that stay, by index, and their widths."""
    kept = list(range(len(columns)))
    while True:
        widths = _shrunk([columns[i] for i in kept], [natural[i] for i in kept], width)
        droppable = [i for i in kept if columns[i].drop_rank is not None]
        if _total(widths) <= width or not droppable:
            return kept, widths
        kept.remove(min(droppable, key=lambda i: columns[i].drop_rank or 0))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _shrunk(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Narrower widths for columns that may be shortened, the widest first, until the table fits or none can be narrower."""
    widths = list(widths)
    lowest = [_lowest(column, natural) for column, natural in zip(columns, widths, strict=True)]
    while (too_many := _total(widths) - width) > 0:
        room = [i for i in range(len(widths)) if widths[i] > lowest[i]]
        if not room:
            break
        widest = max(room, key=lambda i: widths[i])
        others = [widths[i] for i in room if widths[i] < widths[widest]]
        step = min(too_many, widths[widest] - max([lowest[widest], *others]))
        widths[widest] -= max(step, 1)
    return widths


def _lowest(column: Column, natural: int) -> int:
    if column.shorten is Shorten.NEVER:
        return natural
    return min(natural, max(column.at_least or _NARROWEST_TEXT, text_width(column.name)))


def _lines(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row; several lines if its last column is wrapped."""
    if not columns or columns[-1].shorten is not Shorten.WRAP:
        return _line(columns, cells, widths)
    first, *more = _wrapped(cells[-1], widths[-1]) or [""]
    indent = " " * (_total(widths) - widths[-1])
    return [*_line(columns, [*cells[:-1], first], widths), *(indent + line for line in more)]


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    shown = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        text = shortened(cell, width, column.shorten)
        padding = " " * (width - text_width(text))
        shown.append(padding + text if column.right else text + padding)
    return [_GAP.join(shown).rstrip()]


def shortened(text: str, width: int, how: Shorten) -> str:
    """A text that takes at most `width` cells, unless it must never be shortened."""
    if how in (Shorten.NEVER, Shorten.WRAP) or text_width(text) <= width:
        return text
    if how is Shorten.PREFIX:
        return _start(text, width)
    if how is Shorten.END:
        return _start(text, width - 1) + _ELLIPSIS
    n_end = (width - 1) // 2
    return _start(text, width - 1 - n_end) + _ELLIPSIS + _start(text[::-1], n_end)[::-1]


def _start(text: str, width: int) -> str:
    used = 0
    for i, character in enumerate(text):
        used += _character_width(character)
        if used > width:
            return text[:i]
    return text


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words; a longer word is broken."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(lines[-1]) + 1 + text_width(word) <= width:
            lines[-1] += " " + word
            continue
        rest = word
        while text_width(rest) > width:
            lines.append(_start(rest, width))
            rest = rest[len(lines[-1]) :]
        lines.append(rest)
    return lines
