"""Words that pages, help texts and messages do not use, and what to write instead: one meaning a word, the field's word first."""

from __future__ import annotations

import re

REFUSED: dict[str, str] = {
    r"\b(?:go|goes|going|gone|went) on from\b": "extends",
    r"\b(?:stand|stands|standing|stood) on\b": "has the parent",
    r"\btold\b": "reported, shown",
    r"\bnoted\b": "recorded",
    r"\bwhole\b": "complete, valid",
    r"\bbeginnings?\b": "prefix (of tokens); start",
    r"\bcuts?\b": "truncate; slice",
    r"\b(?:files|state|tables) of others\b|\bothers' \w+": "other programs' files",
    r"\bsavers?\b|\bwhoever saves\b": "the process that saves",
    r"\bof no use\b": "unusable",
    r"\banew\b": "again",
    r"\bbears?\b": "contains",
    r"\bless long ago\b": "more recently than",
    r"\bput(?:s|ting)?(?: \w+){0,3} right\b|\bmend(?:s|ed|ing)?\b": "repaired, fixed",
    r"\bat hand\b": "available",
    r"\bwhatever\b|\bwhoever\b|\bwhat it is of\b": "the noun",
}
"""What is refused, as a regular expression, and what to write in its place."""


def refused_words(text: str) -> list[str]:
    """One line for each refused word of a text: its line number, the word as it stands there, and what to write instead."""
    lines = text.splitlines()
    return [
        f"line {number}: {match[0]!r}: write {instead!r}"
        for number, line in enumerate(lines, 1)
        for pattern, instead in REFUSED.items()
        for match in re.finditer(pattern, line, re.IGNORECASE)
    ]
