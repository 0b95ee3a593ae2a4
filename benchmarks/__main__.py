"""`python -m benchmarks` (make bench) measures, prints and writes the results; `python -m benchmarks report` publishes them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import bars, report
from benchmarks.results import QUESTIONS, Results, measure
from benchmarks.sizes import FULL, QUICK

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "benchmarks.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a bar was missed and `--check` was given."""
    chosen = _arguments().parse_args(argv)
    if chosen.command == "report":
        for path in report.publish(Results.read(chosen.results), ROOT):
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    if chosen.command == "run":
        sizes = FULL if chosen.full else QUICK
        results = measure(chosen.only or QUESTIONS, sizes, chosen.results, chosen.folder, keep=chosen.keep)
        print(report.as_text(results), end="")
    return check(chosen.results) if chosen.check or chosen.command == "check" else 0


def check(file: Path) -> int:
    """Print each bar that was missed to stderr; return 1 if there is one, otherwise 0."""
    missed = [s for s in bars.bar_results(bars.load(), Results.read(file).cases) if s.verdict == "missed"]
    for result in missed:
        print(f"missed: {report.bar_as_text(result)}", file=sys.stderr)
    return 1 if missed else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("command", nargs="?", default="run", choices=["run", "report", "check"], help="default: run")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, metavar="QUESTION", help=f"of: {', '.join(QUESTIONS)}")
    parser.add_argument("--keep", action="store_true", help="keep the results of other questions in the results file")
    parser.add_argument("--full", action="store_true", help="all sizes; without it a set that ends within ten minutes")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: build/benchmarks.json")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder to measure in, on the disk that matters; default: the system's temporary folder",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
