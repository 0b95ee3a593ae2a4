"""The results of a run, as a JSON file: on what it was measured, every sample, every fact."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.databases import server_version
from benchmarks.machine import machine, versions
from benchmarks.measuring import Case
from benchmarks.sizes import Sizes

QUESTIONS = ("restore", "save", "find", "bytes", "processes", "collect", "scenario", "startup")
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one run found."""

    sizes: str
    measured_at: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    cases: list[Case]

    def of(self, question: str) -> list[Case]:
        """The cases of one question."""
        return [case for case in self.cases if case.question == question]

    def write(self, file: Path) -> None:
        """As one JSON file, a line for each case; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "cases"}
        head = json.dumps({"format": FORMAT, **fields}, indent=1).removesuffix("\n}")
        cases = ",\n  ".join(json.dumps(case.as_json()) for case in self.cases)
        file.write_text(f'{head},\n "cases": [\n  {cases}\n ]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Results:
        """What `write` wrote.

        Raises:
            ValueError: the file is of another format.
        """
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.pop("format", None) != FORMAT:
            raise ValueError(f"{file}: no results of this format; measure again")
        return cls(**{**value, "cases": [Case(**case) for case in value["cases"]]})


def measure(questions: Sequence[str], sizes: Sizes, file: Path, folder: Path | None = None) -> Results:
    """Asks the questions one after the other, each in a folder of its own that is gone afterwards; `folder` is where those are
    made. Results are written to `file` after each: a run that is interrupted leaves what it measured. Says on stderr where it is.
    """
    started, now = time.perf_counter(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-bench-", dir=folder) as top:
        about: dict[str, Any] = {"machine": machine(Path(top)), "versions": {**versions(), **server_version()}}
        for question in questions:
            before = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=top) as own:
                cases += importlib.import_module(f"benchmarks.{question}").run(sizes, Path(own))
            sys.stderr.write(f"{question}: {time.perf_counter() - before:.0f} s\n")
            seconds = round(time.perf_counter() - started, 1)
            results = Results(sizes=sizes.name, measured_at=now, seconds=seconds, cases=cases, **about)
            results.write(file)
    return results
