"""The benchmarks: the runner measures, the bars are held, the report is written. No time is asserted here."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import bars, collect, databases, plots, report
from benchmarks.__main__ import main
from benchmarks.measuring import Case, interleaved
from benchmarks.results import QUESTIONS, Results, measure
from benchmarks.sizes import FULL, QUICK, TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_server(monkeypatch):
    monkeypatch.setattr(databases, "why_no_server", lambda: "not asked for here")


def results_with(*cases: Case) -> Results:
    return Results(
        sizes={case.question: "tiny" for case in cases},
        measured_at="2026-01-02T03:04:05+00:00",
        seconds=1.5,
        machine={
            "processor": "a processor",
            "cores": 2,
            "memory_bytes": 8 << 30,
            "kernel": "Linux 6",
            "file_system": "ext4",
        },
        versions={"llama_ckpt": "0.1.0", "python": "3.11"},
        cases=list(cases),
    )


def restored(tokens: int, ours: float, floor: float = 0.020) -> Case:
    """A case of restore that was planted, not measured."""
    case = Case(question="restore", name=f"{tokens:,} tokens, warm", floor="floor")
    case.parameters = {"tokens": tokens, "cache": "warm"}
    case.samples = {"llama-ckpt": [ours, ours * 1.1, ours * 0.9], "floor": [floor, floor * 1.1, floor * 0.9]}
    return case


def found(rows: int, ours: float) -> Case:
    parameters = {"database": "sqlite", "rows": rows}
    samples = {"llama-ckpt, by prefix": [ours] * 3, "dict of block hashes": [1e-5] * 3}
    return Case(question="find", name=f"sqlite, {rows:,} rows", samples=samples, parameters=parameters)


# -- the runner -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["find", "collect"])
def test_a_question_that_needs_no_model_is_measured_and_comes_back_from_its_file(question, tmp_path, no_server):
    measured = measure([question], TINY, tmp_path / "results.json", tmp_path)
    assert Results.read(tmp_path / "results.json") == measured
    value = json.loads((tmp_path / "results.json").read_text())
    assert {"cores", "memory_bytes", "file_system", "kernel"} <= value["machine"].keys()
    assert {"llama_ckpt", "python", "sqlite"} <= value["versions"].keys()
    assert {case["question"] for case in value["cases"]} == {question}
    samples = [times for case in value["cases"] for times in case["samples"].values()]
    assert samples
    assert all(times and min(times) > 0 for times in samples)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # what was planted is gone


def test_find_asks_every_registry_the_same_number_of_questions(tmp_path, no_server):
    measured = measure(["find"], TINY, tmp_path / "results.json")
    asked = [case for case in measured.cases if "llama-ckpt, by prefix" in case.samples]
    assert [case.parameters["rows"] for case in asked] == [20, 40]
    assert {len(case.samples["llama-ckpt, by prefix"]) for case in asked} == {TINY.calls}
    saved = [case for case in measured.cases if "register" in case.samples]
    assert [case.parameters["rows"] for case in saved] == [0, 20, 40]


def test_a_run_that_ends_early_leaves_what_it_measured(tmp_path, no_server, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(["find", "collect"], TINY, tmp_path / "results.json", tmp_path)
    assert {case.question for case in Results.read(tmp_path / "results.json").cases} == {"find"}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_question_that_is_asked_again_leaves_what_others_found(tmp_path, no_server):
    file = tmp_path / "results.json"
    first = measure(["find", "collect"], TINY, file, tmp_path)
    again = measure(["collect"], replace(TINY, name="larger", collect=((80, 40),)), file, tmp_path, keep=True)
    assert Results.read(file) == again
    assert again.of("find") == first.of("find")
    assert [case.parameters["rows"] for case in again.of("collect")] == [80]
    assert again.sizes == {"find": "tiny", "collect": "larger"}
    assert "the larger set of collect; the tiny set of find" in report.as_text(again)
    other = replace(again, machine={**again.machine, "cores": 99})
    other.write(file)
    with pytest.raises(ValueError, match="another machine"):
        measure(["collect"], TINY, file, tmp_path, keep=True)
    assert Results.read(file) == other


def test_restore_and_save_of_a_real_model_measure_every_way_people_have(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra 'llama')")
    restore, save = (measure([question], TINY, tmp_path / "results.json") for question in ("restore", "save"))
    warm, cold, synthetic = restore.cases
    assert {"prefill", "floor", "llama.cpp's file", "LlamaDiskCache", "llama-ckpt"} <= warm.samples.keys()
    assert {"bare read", "llama-ckpt"} <= cold.samples.keys()
    assert len(synthetic.samples["llama-ckpt"]) >= 2
    (saved,) = save.cases
    assert {
        "floor",
        "llama.cpp's file",
        "LlamaDiskCache",
        "llama-ckpt",
        "llama-ckpt, deduplicated",
    } <= saved.samples.keys()
    assert 1 <= saved.facts["bytes on disk : the state"] < 1.05


def test_every_question_has_a_module_a_title_and_more_to_do_in_full():
    assert set(QUESTIONS) == set(report.TITLES)
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} >= set(QUESTIONS)
    assert max(FULL.rows) == 1_000_000 > max(QUICK.rows)
    assert set(FULL.tokens) > set(QUICK.tokens)


def test_each_round_has_every_way_once_and_begins_with_another():
    case, order = Case(question="restore", name="order"), []
    interleaved(case, {way: lambda: None for way in "abc"}, 3, order.append)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 12, 3)]
    assert [sorted(one) for one in rounds] == [list("abc")] * 4  # one goes ahead uncounted
    assert [one[0] for one in rounds[1:]] == ["a", "b", "c"]
    assert len({one[one.index("a") - 1] for one in rounds}) > 1, "not always behind the same one"
    assert {way: len(times) for way, times in case.samples.items()} == {"a": 3, "b": 3, "c": 3}


# -- figures and bars -------------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_same_rounds_so_a_slow_round_changes_nothing():
    case = Case(question="save", name="a slow moment", samples={"ours": [2.0, 20.0, 2.2], "floor": [1.0, 10.0, 1.1]})
    assert case.ratio("ours", "floor") == pytest.approx(2.0)
    case.samples["floor"].append(1.0)  # other rounds
    assert case.ratio("ours", "floor") == pytest.approx(2.2 / 1.05)


def test_a_99th_percentile_needs_a_hundred_samples():
    case = Case(question="find", name="tail", samples={"few": [1.0] * 99, "many": [1.0] * 98 + [5.0, 9.0]})
    assert case.p99("few") is None
    assert case.p99("many") == 9.0


def test_the_bars_can_be_read_and_each_is_of_a_question_that_is_asked():
    loaded = bars.load()
    assert {bar.question for bar in loaded} <= set(QUESTIONS)
    assert len({bar.what for bar in loaded}) == len(loaded)


@pytest.mark.parametrize(
    "entry",
    [
        'way = "llama-ckpt"',
        'way = "llama-ckpt"\nat_most = 1\nat_least = 1',
        'way = "llama-ckpt"\nfact = "files"\nat_most = 1',
        'to = "floor"\nat_most = 1',
        "at_most = 1",
    ],
    ids=["no limit", "two limits", "two figures", "a ratio of nothing", "no figure"],
)
def test_a_bar_that_does_not_say_what_it_asks_is_named(entry, tmp_path):
    file = tmp_path / "bars.toml"
    file.write_text(f'[[bar]]\nwhat = "the one"\nquestion = "save"\n{entry}\n')
    with pytest.raises(ValueError, match="bar 'the one'"):
        bars.load(file)


def test_a_bar_is_held_to_the_worst_case_and_says_when_there_was_none():
    bar = bars.Bar(what="find", question="find", way="llama-ckpt, by prefix", at_most=0.002)
    worst, other = found(1_000_000, 0.0019), found(1_000, 0.0004)
    (result,) = bars.bar_results([bar], [other, worst])
    assert (result.case, result.verdict) == (worst, "reached")
    elsewhere = bars.Bar(what="find", question="find", where={"rows": 7}, way="llama-ckpt, by prefix", at_most=0.002)
    (result,) = bars.bar_results([elsewhere], [other, worst])
    assert result.verdict == "not measured"
    assert bars.bar_results([bar], [restored(4000, 0.02)]) == []  # that question was not asked


def test_a_bar_from_below_is_held_to_the_smallest_figure():
    bar = bars.Bar(what="answers", question="find", fact="answers right", at_least=1.0)
    cases = [Case(question="find", name=str(share), facts={"answers right": share}) for share in (1.0, 0.9)]
    (result,) = bars.bar_results([bar], cases)
    assert (result.figure, result.verdict) == (0.9, "missed")


@pytest.mark.parametrize(("ours", "code"), [(0.024, 0), (0.026, 1)], ids=["within the bar", "beyond the bar"])
def test_check_exits_with_one_where_a_ratio_falls_short(ours, code, tmp_path, capsys):
    file = tmp_path / "results.json"
    results_with(restored(4000, ours)).write(file)
    assert main(["check", "--results", str(file)]) == code
    told = capsys.readouterr().err
    assert ("missed: restore, verified" in told) == bool(code)
    assert ("1.3 (bar ≤ 1.25, missed)" in told) == bool(code)


def test_make_hands_its_switches_on():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "python -m benchmarks run $(if $(FULL),--full) $(if $(CHECK),--check)" in text


# -- the report -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A folder with the project's README."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_the_report_has_table_plots_and_samples_and_can_be_written_again(project):
    results = results_with(restored(500, 0.005), restored(4000, 0.024), found(1_000, 4e-4), found(100_000, 5e-4))
    written = report.publish(results, project)
    names = {path.relative_to(project).as_posix() for path in written}
    plots_of = {"docs/benchmarks/find.svg", "docs/benchmarks/restore.svg"}
    assert names == {"README.md", "docs/benchmarks.md", "docs/benchmarks/results.json", *plots_of}
    for name in plots_of:
        assert ET.parse(project / name).getroot().tag.endswith("svg")
    document, readme = (project / "docs/benchmarks.md").read_text(), (project / "README.md").read_text()
    for target in re.findall(r"\]\((benchmarks/[^)]+)\)", document):
        assert (project / "docs" / target).exists()
    assert "| llama-ckpt | 1.20 | 24 ms | - | 22.8 ms – 25.2 ms | 3 |" in document
    assert "(4,000 tokens, warm) | 1.2 | ≤ 1.25 | reached |" in readme
    assert readme.startswith((ROOT / "README.md").read_text(encoding="utf-8").partition(report.BEGIN)[0])
    report.publish(results, project)
    assert (project / "README.md").read_text() == readme
    assert Results.read(project / "docs/benchmarks/results.json") == results


def test_a_readme_without_a_place_for_the_section_stays_as_it_is(project):
    (project / "README.md").write_text("# another\n")
    with pytest.raises(ValueError, match=r"README\.md has no lines"):
        report.publish(results_with(restored(500, 0.005)), project)
    assert (project / "README.md").read_text() == "# another\n"
    assert list((project / "docs").iterdir()) == []


def test_results_of_another_format_are_refused(tmp_path):
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"old\.json: no results of this format"):
        Results.read(tmp_path / "old.json")


def test_a_plot_has_every_line_with_its_label_and_escapes_it():
    svg = plots.log_log("a & b", "x", "y", {"one": [(10, 1e-3), (1000, 1e-1)], "<two>": [(10, 2e-3), (1000, 1.1e-1)]})
    root = ET.fromstring(svg)
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"a & b", "one", "<two>", "10", "1,000", "1 ms", "100 ms", "1 s"} <= texts
    labels = [float(e.get("y")) for e in root.iter() if e.text in ("one", "<two>")]
    assert abs(labels[0] - labels[1]) >= 16  # they do not cover each other


def test_nothing_to_plot_is_an_error():
    with pytest.raises(ValueError, match="nothing to plot for 'empty'"):
        plots.log_log("empty", "x", "y", {})


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.34, "12.3 s"), (0.0123, "12.3 ms"), (0.00045, "450 µs"), (1e-3, "1 ms"), (5e-9, "5 ns"), (1234.0, "1,234 s")],
)
def test_a_time_has_a_unit_that_suits_it(value, text):
    assert plots.seconds(value) == text


def test_the_benchmarks_and_their_samples_are_not_shipped():
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert not [name for name in packages if "bench" in name]
