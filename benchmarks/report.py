"""The results of a run, for people: text for the terminal, docs/benchmarks.md with its plots, and the README's section."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import bars, plots
from benchmarks.bars import BarResult
from benchmarks.measuring import Case
from benchmarks.plots import seconds
from benchmarks.results import QUESTIONS, Results

BEGIN, END = "<!-- benchmarks: written by `python -m benchmarks report` -->", "<!-- /benchmarks -->"

TITLES = {
    "restore": "Restore: time until the next token can be sampled",
    "save": "Save: time to save a state",
    "find": "Find and register among many checkpoints",
    "bytes": "Bytes: a pipeline of prompts that share a prefix",
    "processes": "Many processes on one registry",
    "collect": "Garbage collection",
    "scenario": "The published scenario",
    "startup": "Start-up",
}


def publish(results: Results, root: Path) -> list[Path]:
    """Write docs/benchmarks.md, its plots, the raw samples beside them and the README's section; return the paths.

    Raises:
        ValueError: the README has no markers for the section.
    """
    folder, readme = root / "docs" / "benchmarks", root / "README.md"
    section = _with_section(readme.read_text(encoding="utf-8"), _for_readme(results))
    folder.mkdir(parents=True, exist_ok=True)
    written = {readme: section, root / "docs" / "benchmarks.md": _document(results)}
    written |= {folder / f"{name}.svg": svg for name, svg in drawn(results).items()}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    results.write(folder / "results.json")
    return [*written, folder / "results.json"]


def _with_section(readme: str, section: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


# -- the plots ------------------------------------------------------------------------------------------------------------


def drawn(results: Results) -> dict[str, str]:
    """The plots of a run by name, as SVG, for the questions that it asked at more than one size."""
    found = {}
    lines = _lines([c for c in results.of("find") if "rows" in c.parameters], "rows", ("by prefix", "dict", "Cache"))
    if lines:
        found["find"] = plots.log_log("Find the checkpoint with the longest prefix", "checkpoints", "median", lines)
    warm = [c for c in results.of("restore") if "tokens" in c.parameters and c.parameters["cache"] == "warm"]
    lines = _lines(warm, "tokens", ("llama-ckpt", "floor", "llama.cpp", "Cache", "prefill"))
    if lines:
        found["restore"] = plots.log_log("Restore, verified, page cache warm", "tokens", "median", lines)
    return found


def _lines(cases: Iterable[Case], parameter: str, wanted: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """The medians over a parameter, by way (and by database if it is not SQLite)."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for case in sorted(cases, key=lambda c: int(c.parameters[parameter])):
        server = case.parameters.get("database") == "postgresql"
        for way in case.samples:
            if any(word in way for word in wanted):
                name = f"{way} (PostgreSQL)" if server else way
                lines.setdefault(name, []).append((float(case.parameters[parameter]), case.median(way)))
    return lines


# -- the documents --------------------------------------------------------------------------------------------------------


def _for_readme(results: Results) -> str:
    rows = [_bar_row(s) for s in bars.bar_results(bars.load(), results.cases) if s.figure is not None]
    links = [f"![{name} by size](docs/benchmarks/{name}.svg)" for name in drawn(results)]
    return "\n".join(
        [
            _on_what(results),
            "",
            *_table(["what", "figure", "bar", ""], rows),
            "",
            *links,
            "",
            "All measurements, with medians, tails and spread: [docs/benchmarks.md](docs/benchmarks.md).",
        ]
    )


def _document(results: Results) -> str:
    parts = ["# Benchmarks", "", _on_what(results), "", HOW, "", "## Bars", ""]
    parts += _table(
        ["what", "worst figure", "bar", ""], [_bar_row(s) for s in bars.bar_results(bars.load(), results.cases)]
    )
    plotted = drawn(results)
    for question in QUESTIONS:
        cases = results.of(question)
        if not cases:
            continue
        parts += ["", f"## {TITLES[question]}", "", _docstring(question), ""]
        if question in plotted:
            parts += [f"![{question}](benchmarks/{question}.svg)", ""]
        for case in cases:
            parts += [f"### {case.name}", "", *_case_tables(case), ""]
    return "\n".join(parts).rstrip() + "\n"


def _docstring(question: str) -> str:
    return (importlib.import_module(f"benchmarks.{question}").__doc__ or "").strip()


def _on_what(results: Results) -> str:
    on, packages = results.machine, ", ".join(f"{name} {version}" for name, version in results.versions.items())
    memory = f"{int(on['memory_bytes']) / (1 << 30):.0f} GiB"
    return (
        f"{on['cores']} cores of {on['processor']}, {memory}, {on['kernel']}, {on['file_system']}; SmolLM2-135M (Q4_1, f16 KV); "
        f"{packages}. Measured {results.measured_at[:10]} in {results.seconds:.0f} s: {_sets(results.sizes)}."
    )


def _sets(sizes: dict[str, str]) -> str:
    """Which set of sizes was used for which questions."""
    names = sorted(set(sizes.values()))
    if len(names) == 1:
        return f"the {names[0]} set"
    return "; ".join(f"the {name} set of {', '.join(q for q in sizes if sizes[q] == name)}" for name in names)


HOW = """To repeat it, run `make bench` (ten minutes on two cores) or `make bench FULL=1` (all sizes, some hours). To measure
one question in full and keep what the quick set measured of the others: `python -m benchmarks --only find --full --keep`. Then
run `python -m benchmarks report`. It writes this text, its plots and the README's table from the samples in
[benchmarks/results.json](benchmarks/results.json). `make bench CHECK=1` fails if a bar is missed. The bars are in
[benchmarks/bars.toml](../benchmarks/bars.toml). [benchmarks-misses.md](benchmarks-misses.md) says what was missed, and why.

Compare ratios, not seconds: ratios carry over to other machines. In each round every way has its turn, in a new order, and a
ratio is the median of the ratios of all rounds. *Spread* is the range between the quartiles. There is a 99th percentile if
there are 100 samples or more. llama-ckpt's times include everything that a user waits for: fsync of file and folder, every
checksum, the lease and the database commit. *Floor* is the least that the machine must do. *Cold* is after
posix_fadvise(DONTNEED) on the file; a disk that is a file on a host may still be cached there."""


def _bar_row(result: BarResult) -> list[str]:
    case, figure = result.case, result.figure
    if case is None or figure is None:
        return [result.bar.what, "-", result.bar.limit, result.verdict]
    return [f"{result.bar.what} ({case.name})", f"{_number(figure)}", result.bar.limit, result.verdict]


def bar_as_text(result: BarResult) -> str:
    """A bar and its result in one line."""
    what, figure, limit, verdict = _bar_row(result)
    return f"{what}: {figure} (bar {limit}, {verdict})"


def _case_tables(case: Case) -> Iterator[str]:
    floor = case.floor if case.floor in case.samples else ""
    head = [*([f"× {floor}"] if floor else []), "median", "99th percentile", "spread", "samples"]
    if case.samples:
        yield from _table(["way", *head], [_way_row(case, way, floor) for way in case.samples])
    if case.samples and case.facts:
        yield ""
    if case.facts:
        yield from _table(["fact", "value"], [[name, _number(value)] for name, value in case.facts.items()])


def _way_row(case: Case, way: str, floor: str) -> list[str]:
    low, high = case.quartiles(way)
    late = case.p99(way)
    ratio = [f"{case.ratio(way, floor):.2f}"] if floor else []
    spread, tail = f"{seconds(low)} – {seconds(high)}", seconds(late) if late is not None else "-"
    return [way, *ratio, seconds(case.median(way)), tail, spread, str(len(case.samples[way]))]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


# -- the terminal ---------------------------------------------------------------------------------------------------------


def as_text(results: Results) -> str:
    """The results as text: ratios first, then the bars."""
    lines = [_on_what(results)]
    for case in results.cases:
        lines += ["", f"{case.question}: {case.name}"]
        floor = case.floor if case.floor in case.samples else ""
        for way in case.samples:
            ratio = f"{case.ratio(way, floor):9.2f} × {floor}" if floor else ""
            lines.append(f"  {way:<28} {seconds(case.median(way)):>10}{ratio}")
        lines += [f"  {name}: {_number(value)}" for name, value in case.facts.items()]
    lines += ["", *(bar_as_text(s) for s in bars.bar_results(bars.load(), results.cases))]
    return "\n".join(lines) + "\n"
