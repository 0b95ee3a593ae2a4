"""The results of a run, as a JSON file: the machine, every sample, every fact."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.databases import server_version
from benchmarks.machine import machine, versions
from benchmarks.measuring import Case
from benchmarks.sizes import Sizes

QUESTIONS = ("restore", "save", "find", "bytes", "processes", "collect", "scenario", "startup")
FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was measured. `sizes` has the name of the set of sizes for each question, `seconds` the duration of the run."""

    sizes: dict[str, str]
    measured_at: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    cases: list[Case]

    def of(self, question: str) -> list[Case]:
        """The cases of one question."""
        return [case for case in self.cases if case.question == question]

    def write(self, file: Path) -> None:
        """Write the results as one JSON file, a line for each case; create its folder."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "cases"}
        head = json.dumps({"format": FORMAT, **fields}, indent=1).removesuffix("\n}")
        cases = ",\n  ".join(json.dumps(case.as_json()) for case in self.cases)
        file.write_text(f'{head},\n "cases": [\n  {cases}\n ]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Results:
        """Read what `write` wrote.

        Raises:
            ValueError: the file is of another format.
        """
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.pop("format", None) != FORMAT:
            raise ValueError(f"{file}: no results of this format; measure again")
        return cls(**{**value, "cases": [Case(**case) for case in value["cases"]]})


def measure(
    questions: Sequence[str], sizes: Sizes, file: Path, folder: Path | None = None, *, keep: bool = False
) -> Results:
    """Measure the questions one after the other, each in a folder of its own below `folder`, which is removed afterwards. Results
    are written to `file` after each question: an interrupted run leaves what it measured. `keep` keeps the results of other
    questions in `file`. Progress is printed to stderr.

    Raises:
        ValueError: the results to keep were measured on another machine or with other versions.
    """
    started, now = time.perf_counter(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-bench-", dir=folder) as top:
        about: dict[str, Any] = {"machine": machine(Path(top)), "versions": {**versions(), **server_version()}}
        kept = _kept(file, questions, about) if keep else None
        cases, asked = (kept.cases, kept.sizes) if kept else ([], {})
        for question in questions:
            before = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=top) as own:
                cases += importlib.import_module(f"benchmarks.{question}").run(sizes, Path(own))
            sys.stderr.write(f"{question}: {time.perf_counter() - before:.0f} s\n")
            asked[question] = sizes.name
            seconds = round(time.perf_counter() - started + (kept.seconds if kept else 0), 1)
            results = Results(sizes=asked, measured_at=now, seconds=seconds, cases=cases, **about)
            results.write(file)
    return results


def _kept(file: Path, questions: Sequence[str], about: dict[str, Any]) -> Results:
    """The results of other questions in a file."""
    before = Results.read(file)
    if {"machine": before.machine, "versions": before.versions} != about:
        raise ValueError(f"{file} was measured on another machine or other versions: measure all of it again")
    return replace(
        before,
        cases=[case for case in before.cases if case.question not in questions],
        sizes={question: name for question, name in before.sizes.items() if question not in questions},
    )
