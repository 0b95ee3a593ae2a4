"""`batch`: a file of inputs in, a file of results out, whatever is in the one and wherever the other was left."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys

import pytest
from support.child import environment
from support.sample_engine import TokenEngine

from llama_ckpt.errors import BadInput, StoreFull
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.store.store import Store
from llama_ckpt_cli.batch_files import Results, read_lines

SHARED = " ".join(map(str, range(100, 140)))
TEXTS = [f"{SHARED} {n} 1 2" for n in range(5)]
EVIL = "\x1b[2J'; DROP TABLE llama_checkpoint_meta; --[red]"


@pytest.fixture
def place(tmp_path, monkeypatch, left_in_store):
    """A registry, named by the environment, that must be in order at the end."""
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "store"))
    yield tmp_path / "store"
    if (tmp_path / "store").exists():
        with Registry.open(store=tmp_path / "store") as registry:
            assert {f.kind.value for f in Verifier(registry.database, registry.store).findings()} <= left_in_store


@pytest.fixture
def batch(run, monkeypatch, place, tmp_path):
    """`batch(values, "--save", "full")`: runs the command with a stand-in for the model on these inputs, as JSON Lines."""
    monkeypatch.setattr("llama_ckpt_cli.inputs.load_engine", lambda *_, **__: TokenEngine())

    def command(values, *options):
        write(tmp_path / "in.jsonl", values)
        return run(*words(tmp_path), *options)

    return command


def write(path, values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values), encoding="utf-8")


def words(folder):
    return ["batch", folder / "in.jsonl", "--model", "any.gguf", "-o", folder / "out.jsonl"]


def results(folder):
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def answers(folder):
    """What does not depend on what was at hand."""
    told = ("line", "id", "label", "input_hash", "next_token", "next_text", "confidence", "error")
    return [{name: one[name] for name in told} for one in results(folder)]


def test_each_input_has_a_line_of_results_and_the_totals_are_told(batch, tmp_path):
    ran = batch([{"text": text, "id": f"case {i}"} for i, text in enumerate(TEXTS)]).succeeded()
    lines = results(tmp_path)
    assert [(one["line"], one["id"], one["outcome"]) for one in lines] == [
        (1, "case 0", "miss"),
        *[(n, f"case {n - 1}", "partial") for n in (2, 3, 4, 5)],
    ]
    assert [(one["n_kept"], one["n_restored"], one["n_evaluated"]) for one in lines[1:]] == [(40, 0, 3)] * 4
    engine = TokenEngine()
    engine.evaluate(engine.token_ids(TEXTS[3]))
    assert (lines[3]["next_token"], lines[3]["confidence"]) == engine.next_token()
    assert ran.fields["inputs"] == "5: 0 hit, 4 partial, 1 miss, 0 failed; 0 already had a result"
    assert (ran.fields["tokens evaluated"], ran.fields["tokens kept"]) == ("55", "160")
    assert ran.fields["saved"].startswith("1 checkpoint, ")
    assert "case 4" in ran.out
    assert ran.n_left_open == 0


def test_of_many_inputs_the_table_has_the_first_and_the_last(batch):
    ran = batch([{"tokens": [n, 7, 8], "id": f"case {n}"} for n in range(30)], "--save", "none").succeeded()
    assert [n for n in range(30) if f"case {n} " in ran.out] == [*range(10), *range(20, 30)]
    assert "(10 more)" in ran.out


def test_text_and_tokens_ids_and_labels_and_blank_lines_are_understood(batch, run, tmp_path):
    batch([json.dumps("1 2 3"), "", {"tokens": [4, 5], "id": 7, "label": "mine"}], "--save", "full", "--label", "all")
    assert [(one["line"], one["id"], one["label"], one["error"]) for one in results(tmp_path)] == [
        (1, None, None, None),
        (3, 7, "mine", None),
    ]
    assert sorted(row["label"] for row in run("ls", "--json").json()) == ["all", "mine"]


BAD = {
    "no JSON": "{",
    "deeper than a stack": "[" * 100_000,
    "a number": "5",
    "neither": "{}",
    "both": '{"text": "1", "tokens": [1]}',
    "empty": '""',
    "a surrogate": '"\\ud800"',
    "text is a number": '{"text": 1}',
    "true is no token": '{"tokens": [true]}',
    "a fraction": '{"tokens": [1.5]}',
    "too large": '{"tokens": [2147483648]}',
    "too long": json.dumps({"tokens": [1] * 600}),
    "bad label": json.dumps({"text": "1", "label": ""}),
    "label is a list": '{"text": "1", "label": []}',
    "id is a list": '{"text": "1", "id": []}',
    "no UTF-8": None,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_a_record_with_its_number_and_the_rest_goes_on(batch, run, tmp_path, name):
    if BAD[name] is None:
        batch([])
        (tmp_path / "in.jsonl").write_bytes(b'"1 2"\n"\xff"\n"3 4"\n')
        ran = run(*words(tmp_path))
    else:
        ran = batch([json.dumps("1 2"), BAD[name], json.dumps("3 4")])
    ran.failed(BadInput, "1 line could not be computed", "out.jsonl")
    first, bad, last = results(tmp_path)
    assert (first["error"], last["error"], last["line"]) == (None, None, 3)
    assert bad["outcome"] == "failed"
    assert bad["error"].startswith("line 2: ")
    assert bad["next_token"] is None


def test_what_stands_in_labels_ids_and_texts_is_data_and_nothing_else(batch, run, tmp_path):
    ran = batch([{"tokens": [1, 2, 3], "id": EVIL, "label": EVIL}, json.dumps(EVIL)], "--save", "full")
    assert [one["label"] for one in results(tmp_path)] == [EVIL, None]
    assert [row["label"] for row in run("ls", "--json").json()] == [None, EVIL]
    for shown in (ran.out, ran.err, (tmp_path / "out.jsonl").read_text(), run("ls").out):
        assert "\x1b" not in shown
    assert "DROP TABLE" in ran.out
    assert "[red]" in ran.out


# -- going on ------------------------------------------------------------------------------------------------------------


def test_what_has_a_result_is_not_computed_again(batch, tmp_path):
    batch(TEXTS_JSON[:3])
    before = (tmp_path / "out.jsonl").read_bytes()
    ran = batch(TEXTS_JSON).succeeded()
    assert ran.fields["inputs"].startswith("2: ")
    assert ran.fields["inputs"].endswith("; 3 already had a result")
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert [one["line"] for one in results(tmp_path)] == [1, 2, 3, 4, 5]


TEXTS_JSON = [json.dumps(text) for text in TEXTS]


def test_a_last_line_that_was_cut_off_goes_and_is_computed_again(batch, tmp_path):
    batch(TEXTS_JSON)
    whole, path = answers(tmp_path), tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    batch(TEXTS_JSON).succeeded()
    assert answers(tmp_path) == whole
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.jsonl"]


def test_a_line_that_failed_is_tried_again(batch, tmp_path):
    batch([TEXTS_JSON[0], "{", TEXTS_JSON[1]])
    batch(TEXTS_JSON[:1] + TEXTS_JSON[2:3] + TEXTS_JSON[1:2]).succeeded()
    assert sorted((one["line"], one["error"]) for one in results(tmp_path)) == [(1, None), (2, None), (3, None)]


def test_results_of_other_inputs_are_refused_and_stay(batch, tmp_path):
    batch(TEXTS_JSON)
    before = (tmp_path / "out.jsonl").read_bytes()
    batch([*TEXTS_JSON[:3], json.dumps("9 9"), TEXTS_JSON[4]]).refused(BadInput, "line 4 belongs to another input")
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", ["my notes\n", '{"line": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_refused_and_stays(batch, tmp_path, content):
    (tmp_path / "out.jsonl").write_text(content)
    (tmp_path / "out.jsonl.tmp").write_text("mine")
    batch(TEXTS_JSON).refused(BadInput, "not results of batch")
    assert (tmp_path / "out.jsonl").read_text() == content
    assert (tmp_path / "out.jsonl.tmp").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.glob("*out.jsonl*")) == ["out.jsonl", "out.jsonl.tmp"]


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_a_batch_that_was_killed_half_way_and_run_again_has_each_input_once(place, tmp_path, save, left_in_store):
    left_in_store |= {"temporary", "orphan"}  # of the save that the kill met
    write(tmp_path / "in.jsonl", TEXTS_JSON)
    assert in_a_child("die", 4, tmp_path, save).returncode == 137
    assert len(results(tmp_path)) == 3
    assert in_a_child("none", 0, tmp_path, save).returncode == 0
    resumed = answers(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    assert in_a_child("none", 0, tmp_path, save).returncode == 0
    assert resumed == answers(tmp_path)
    with Registry.open(store=place) as registry:
        assert len(registry.list()) == {"prefix": 1, "full": 5}[save]


def test_ctrl_c_ends_with_the_input_at_hand_and_the_results_are_there(place, tmp_path):
    write(tmp_path / "in.jsonl", TEXTS_JSON)
    ran = in_a_child("interrupt", 2, tmp_path, "full")
    assert ran.returncode == 130
    assert "2: 0 hit, 1 partial, 1 miss" in ran.stdout
    assert "run the same command again to continue" in ran.stderr
    assert [one["line"] for one in results(tmp_path)] == [1, 2]
    with Registry.open(store=place) as registry:
        assert len(registry.list()) == 2, "the saves in flight were finished"


def in_a_child(step, at, folder, save):
    command = [sys.executable, "-m", "support.batch_child", step, str(at), *map(str, words(folder)), "--save", save]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment())


# -- options and failures ------------------------------------------------------------------------------------------------


def test_a_limit_computes_so_many_and_the_next_run_goes_on(batch, tmp_path):
    batch(TEXTS_JSON, "--limit", "2").succeeded()
    batch(TEXTS_JSON, "--limit", "2").succeeded()
    assert [one["line"] for one in results(tmp_path)] == [1, 2, 3, 4]


def test_a_shared_prefix_from_a_file_is_saved(batch, run, tmp_path):
    (tmp_path / "shared.txt").write_text(SHARED)
    batch(TEXTS_JSON, "--shared-prefix", tmp_path / "shared.txt", "--label", "mine").succeeded()
    (row,) = run("ls", "--json").json()
    assert (row["n_tokens"], row["label"]) == (40, "mine")
    assert run("match", "--text", SHARED, "-q").succeeded().lines == [row["id"]]


def test_json_has_the_totals_and_quiet_the_number_of_inputs(batch, tmp_path):
    told = batch(TEXTS_JSON, "--json").succeeded().json()
    assert (told["miss"], told["partial"], told["n_evaluated"], told["n_kept"]) == (1, 4, 55, 160)
    assert told["reuse"] == pytest.approx(160 / 215)
    assert told["saved_bytes"] > 0
    (tmp_path / "out.jsonl").unlink()
    assert batch(TEXTS_JSON, "-q").succeeded().lines == ["5"]


def test_a_store_that_is_full_is_told_and_every_result_is_there(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "free_bytes", lambda _: 1000)
    ran = batch(TEXTS_JSON, "--save", "full")
    assert (ran.code, len(results(tmp_path))) == (0, 5)
    assert "5 problems" in ran.err
    assert str(StoreFull.__doc__).split("{")[0] in ran.err


def test_inputs_are_read_from_stdin(batch, run, tmp_path, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS_JSON).encode())))
    batch([])
    run("batch", "-", "--model", "any.gguf", "-o", tmp_path / "out.jsonl").succeeded()
    assert len(results(tmp_path)) == 5


@pytest.mark.parametrize(
    ("options", "word"), [(["--save", "all"], "prefix, full, none"), (["--label", ""], "label")], ids=["save", "label"]
)
def test_an_option_that_cannot_be_used_is_refused(batch, tmp_path, options, word):
    batch(TEXTS_JSON, *options).refused(BadInput, word)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        list(read_lines(str(tmp_path / "nothing.jsonl")))
    with pytest.raises(BadInput, match="Is a directory"):
        Results(tmp_path)


def test_processes_on_one_registry_give_the_same_results_and_save_once(place, tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
        write(folder / "in.jsonl", TEXTS_JSON)
    Registry.open(store=place).close()
    command = [sys.executable, "-m", "support.batch_child", "none", "0"]
    running = [
        subprocess.Popen(
            [*command, *map(str, words(folder)), "--save", "full"], env=environment(), stdout=subprocess.DEVNULL
        )
        for folder in folders
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert answers(folders[0]) == answers(folders[1]) == answers(folders[2])
    with Registry.open(store=place) as registry:
        assert len(registry.list()) == 5


def test_a_terminal_sees_rate_reuse_and_bytes_saved(batch, monkeypatch):
    told = []

    @contextlib.contextmanager
    def progress(_out, _what):
        yield lambda *heard: told.append(heard)

    monkeypatch.setattr("llama_ckpt_cli.output.Output.progress", progress)
    batch(TEXTS_JSON).succeeded()
    assert [heard[:2] for heard in told] == [(n, 5) for n in range(1, 6)]
    assert re.fullmatch(r"\d+\.\d/s, 7\d% reused, .+ saved", told[-1][2])
