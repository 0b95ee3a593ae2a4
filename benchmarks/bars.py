"""The bars, and which of them a run reached or missed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measuring import Case

FILE = Path(__file__).with_name("bars.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit for a figure; bars.toml explains the fields."""

    what: str
    question: str
    where: Mapping[str, int | str] = field(default_factory=dict)
    way: str = ""
    to: str = ""
    fact: str = ""
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if bool(self.way) == bool(self.fact) or (self.to and not self.way):
            raise ValueError(f"bar '{self.what}': give either a way, with or without a 'to', or a fact")
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"bar '{self.what}': give at_most or at_least")

    @property
    def limit(self) -> str:
        """The limit as text."""
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"

    def figure(self, case: Case) -> float | None:
        """The figure of a case; None if the bar does not apply to the case, or the case did not measure it."""
        if case.question != self.question or any(case.parameters.get(k) != v for k, v in self.where.items()):
            return None
        if self.fact:
            return case.facts.get(self.fact)
        if not {self.way, self.to or self.way} <= case.samples.keys():
            return None
        return case.ratio(self.way, self.to) if self.to else case.median(self.way)

    def holds(self, figure: float) -> bool:
        """Whether a figure reaches the bar."""
        return figure <= self.at_most if self.at_most is not None else figure >= (self.at_least or 0.0)


@dataclass(frozen=True, slots=True)
class BarResult:
    """A bar and the worst figure that it applies to; `case` and `figure` are None if it applies to none."""

    bar: Bar
    case: Case | None
    figure: float | None

    @property
    def verdict(self) -> str:
        """Reached, missed, or not measured."""
        if self.figure is None:
            return "not measured"
        return "reached" if self.bar.holds(self.figure) else "missed"


def load(file: Path = FILE) -> list[Bar]:
    """Read the bars of a file.

    Raises:
        ValueError: a bar does not say what is measured or what must be reached.
        TypeError: a bar has an unknown field, or lacks one.
    """
    return [Bar(**entry) for entry in tomllib.loads(file.read_text(encoding="utf-8"))["bar"]]


def bar_results(bars: Iterable[Bar], cases: Iterable[Case]) -> list[BarResult]:
    """The result of each bar, for the questions that were asked."""
    cases = list(cases)
    asked = {case.question for case in cases}
    return [_bar_result(bar, cases) for bar in bars if bar.question in asked]


def _bar_result(bar: Bar, cases: list[Case]) -> BarResult:
    figures = [(figure, case) for case in cases if (figure := bar.figure(case)) is not None]
    if not figures:
        return BarResult(bar, None, None)
    worst = max if bar.at_most is not None else min
    figure, case = worst(figures, key=lambda pair: pair[0])
    return BarResult(bar, case, figure)
