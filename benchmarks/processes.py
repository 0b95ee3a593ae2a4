"""How fast are many processes on one registry when they save, and when they then look up what was saved?

Each process saves small states of its own for some time, and then looks up what it saved. All processes start at the same moment.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import databases
from benchmarks.measuring import Case, timed
from benchmarks.sizes import Sizes
from benchmarks.synthetic import SampleEngine, ids_number
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome, SaveOutcome

SAVE, MATCH = "save", "match"
_MOST_SAMPLES = 1000  # for one way that are kept
_OF_EACH = 1 << 20  # numbers that a process has for itself
ROOT = Path(__file__).parents[1]


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure a case for each database and number of processes."""
    kinds = ["sqlite", *(["postgresql"] if not databases.why_no_server() else [])]
    return [_of_processes(kind, n, sizes.seconds, folder) for kind in kinds for n in sizes.processes]


def _of_processes(kind: str, n: int, seconds: float, folder: Path) -> Case:
    parameters: dict[str, int | str] = {"database": kind, "processes": n}
    case = Case(question="processes", name=f"{kind}, {n} process{'es' * (n > 1)}", parameters=parameters)
    store = folder / f"{kind}-{n}"
    with databases.database_url(kind) as url:
        Registry.open(url, store, upgrade=True).close()
        orders = [
            json.dumps({"url": url, "store": str(store), "first": i * _OF_EACH, "seconds": seconds}) for i in range(n)
        ]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.processes", order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for order in orders
        ]
        for way in (SAVE, MATCH):
            for child in children:
                _read_line(child)
            for child in children:
                _start(child)
            times_of = [json.loads(_read_line(child)) for child in children]
            case.samples[way] = _thinned(sorted(t for times in times_of for t in times))
            case.facts[f"{way}: per second, all together"] = sum(len(times) for times in times_of) / seconds
        for child in children:
            child.communicate()
            assert child.returncode == 0
    return case


def _thinned(times: list[float]) -> list[float]:
    """Every n-th of very many samples in order of size, including the largest: the quantiles stay the same."""
    return times[:: -math.ceil(len(times) / _MOST_SAMPLES)][::-1]


def _read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "a child ended early; its error stands above"
    return line


def _start(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def _child(url: str | None, store: str, first: int, seconds: float) -> None:
    engine = SampleEngine()
    saved: list[TokenIds] = []
    with Registry.open(url, store) as registry:

        def save() -> None:
            saved.append(ids_number(first + len(saved)))
            engine.evaluate(saved[-1])
            assert registry.save(engine, saved[-1]).outcome is SaveOutcome.SAVED

        def match() -> None:
            ids: TokenIds = saved[next_one() % len(saved)]
            assert registry.match(ids, fingerprint=engine.fingerprint).outcome is Outcome.HIT

        next_one = iter(range(1 << 62)).__next__
        for work in (save, match):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            sys.stdin.readline()
            sys.stdout.write(json.dumps(_for(seconds, work)) + "\n")
            sys.stdout.flush()


def _for(seconds: float, work: Callable[[], None]) -> list[float]:
    """The seconds of each call, one after the other, until the time is over; at least one."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(round(timed(work), 8))
    return times


if __name__ == "__main__":
    _child(**json.loads(sys.argv[1]))
