from __future__ import annotations

import hashlib
import io
import sys

import pytest
from support.sample_engine import TokenEngine

from llama_ckpt.db import rows
from llama_ckpt.errors import BadInput, DatabaseUnavailable
from llama_ckpt.registry import Registry
from llama_ckpt_cli import inputs

NO_MATCH = 3


@pytest.fixture
def stdin(monkeypatch):
    """`stdin(data)`: what `-` reads."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_saved_text_is_found_with_its_checkpoint_and_what_it_spares(run, populated):
    found = run("match", "--text", "two").succeeded().fields
    assert found["outcome"] == "hit"
    assert found["checkpoint"] == populated.ids["two"]
    assert found["input SHA-256"] == populated.hash_of("two")
    assert found["model"] == "sample"
    assert found["tokens matching"] == "3 of 3; the checkpoint has 3"
    assert found["tokens reusable"] == "2 of 3"


def test_a_text_that_was_never_saved_is_no_match(run, populated):
    found = run("match", "--text", "never saved")
    assert (found.code, found.err) == (NO_MATCH, "")
    assert found.fields["outcome"] == "no_match"
    assert "checkpoint" not in found.fields


def test_a_match_changes_neither_rows_nor_files(run, populated):
    before = populated.snapshot()
    assert [run("match", "--text", text).code for text in ("one", "never saved")] == [0, NO_MATCH]
    assert populated.snapshot() == before


def test_a_match_where_no_registry_is_makes_none(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "nothing"))
    assert run("match", "--text", "one").code == NO_MATCH
    assert not (tmp_path / "nothing").exists()


def test_a_files_exact_bytes_count_with_its_mark_and_its_line_ends(run, populated, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(populated.inputs["crlf"])
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    found = run("match", "--text-file", path, "--json").succeeded().json()
    assert found["input_hash"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["checkpoint"]["id"] == populated.ids["crlf"]
    path.write_bytes(populated.inputs["crlf"].replace(b"\r\n", b"\n"))
    assert run("match", "--text-file", path).code == NO_MATCH


def test_a_dash_reads_the_same_bytes_from_stdin(run, populated, stdin):
    stdin(populated.inputs["crlf"])
    assert run("match", "-f", "-", "-q").succeeded().lines == [populated.ids["crlf"]]
    stdin(populated.inputs["crlf"] + b"\n")
    assert run("match", "-f", "-", "-q").code == NO_MATCH


def test_bytes_that_are_no_text_have_the_hash_of_these_bytes(run, populated):
    found = run("match", "--text", "\udcff", "--json")  # as Python gives the argument b"\xff"
    assert (found.code, found.json()["input_hash"]) == (NO_MATCH, hashlib.sha256(b"\xff").hexdigest())


@pytest.mark.parametrize("spelt", [str.lower, str.upper])
def test_a_hash_is_found_in_either_case(run, populated, spelt):
    assert run("match", "--hash", spelt(populated.hash_of("two")), "-q").succeeded().lines == [populated.ids["two"]]


@pytest.mark.parametrize("given", ["ab", "ab" * 31, "ab" * 33, "a" * 63, "zz" * 32, "", "ab" * 31 + "é"])
def test_a_hash_that_is_no_sha256_is_refused(run, populated, given):
    assert "64 hex digits" in run("match", "--hash", given).refused(BadInput, "input hash")


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--text", "one", "--text-file", "prompt.txt"],
        ["--text", "one", "--hash", "ab" * 32],
        ["--text-file", "prompt.txt", "--hash", "ab" * 32],
        ["--tokens", "ids.txt", "--text", "one"],
    ],
    ids=["neither", "text and file", "text and hash", "file and hash", "tokens and text"],
)
def test_an_input_is_given_in_exactly_one_way(run, populated, given):
    run("match", *given).refused(BadInput, "give exactly one of", "--text", "--text-file", "--tokens", "--hash")


def test_who_gives_no_input_is_told_all_four_ways(run, populated):
    assert "None" not in run("match").refused(BadInput, "--text", "--text-file", "--tokens", "--hash")


@pytest.mark.parametrize("where", ["nothing.txt", "."])
def test_an_input_file_that_cannot_be_read_is_told(run, populated, tmp_path, where):
    run("match", "--text-file", tmp_path / where).refused(BadInput, "input file")


@pytest.mark.parametrize("how", ["text", "file", "stdin"])
def test_an_empty_input_is_refused(run, populated, tmp_path, stdin, how):
    stdin(b"")
    (tmp_path / "empty.txt").touch()
    given = {"text": ["--text", ""], "file": ["-f", tmp_path / "empty.txt"], "stdin": ["-f", "-"]}[how]
    run("match", *given).refused(BadInput, "the input is empty")


@pytest.mark.parametrize(("model", "name"), [("sample", "one"), ("other", "other")])
def test_a_registered_name_tells_two_models_of_one_input_apart(run, populated, model, name):
    assert run("match", "--text", "one", "--model", model, "-q").succeeded().lines == [populated.ids[name]]


def test_a_gguf_is_recognised_by_its_bytes_whatever_it_is_called(run, populated, gguf):
    assert run("match", "--text", "one", "--model", gguf, "-q").succeeded().lines == [populated.ids["one"]]
    gguf.write_bytes(gguf.read_bytes() + b"!")
    found = run("match", "--text", "one", "--model", gguf)
    assert (found.code, found.out.splitlines()[0].split()) == (NO_MATCH, ["outcome", "no_match"])
    assert "only for other models" in found.fields["reason"]


def test_a_gguf_that_is_not_there_is_told_and_is_no_miss(run, populated, tmp_path):
    run("match", "--text", "one", "--model", tmp_path / "nothing.gguf").refused(BadInput, "there is no such file")


def test_an_unknown_name_is_no_match_and_names_a_model_that_has_the_input(run, populated):
    found = run("match", "--text", "two", "--model", "unknown")
    assert found.code == NO_MATCH
    assert "such as sample" in found.fields["reason"]
    assert found.fields["nearest"].startswith(populated.ids["two"])


def test_a_removed_checkpoint_is_matched_no_more(run, populated):
    run("rm", populated.ids["two"]).succeeded()
    assert run("match", "--text", "two").code == NO_MATCH


def test_an_expired_checkpoint_is_matched_no_more(run, populated):
    populated.set_row("two", expires_us=populated.row("two").created_us + 1)
    assert run("match", "--text", "two").code == NO_MATCH


def test_the_file_behind_a_row_is_not_opened(run, populated):
    populated.path("two").unlink()
    assert run("match", "--text", "two", "-q").succeeded().lines == [populated.ids["two"]]


def test_json_says_everything_in_hex_and_whole_numbers(run, populated):
    found = run("match", "--text", "two", "--json").succeeded().json()
    assert (found["outcome"], found["n_reusable"], found["error"]) == ("hit", 2, None)
    row = populated.row("two")
    assert found["checkpoint"]["fingerprint"] == row.fingerprint.hex()
    assert found["checkpoint"]["created_us"] == row.created_us
    assert found["checkpoint"]["file_size"] == populated.path("two").stat().st_size


def test_quiet_prints_the_id_alone_and_nothing_for_a_miss(run, populated):
    assert run("match", "--text", "two", "--quiet").succeeded().out == populated.ids["two"] + "\n"
    assert run("match", "--text", "never saved", "--quiet").out == ""


def test_a_database_that_fails_in_the_middle_is_no_miss(run, populated, monkeypatch):
    def lost(*_):
        raise DatabaseUnavailable(url="sqlite:///x", reason="the connection was lost")

    monkeypatch.setattr(rows, "find_by_input", lost)
    failed = run("match", "--text", "two", "--json")
    failed.failed(DatabaseUnavailable, "the connection was lost")
    assert (failed.json()["outcome"], failed.json()["checkpoint"]) == ("failed", None)


# -- by prefix ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_store(populated):
    """The populated store with a checkpoint of the token ids 0 to 39 more; gives its id."""
    engine = TokenEngine(weights=hashlib.sha256(b"weights of the long one").hexdigest(), model_name="long")
    engine.evaluate(list(range(40)))
    with Registry.open(store=populated.root) as registry:
        return registry.save(engine, list(range(40))).checkpoint.id


@pytest.fixture
def ids_file(tmp_path):
    def written(*ids, separator=" "):
        path = tmp_path / "ids.txt"
        path.write_text(separator.join(map(str, ids)))
        return path

    return written


def test_token_ids_are_matched_by_prefix_with_what_matches_and_where_it_diverges(run, long_store, ids_file):
    found = run("match", "--tokens", ids_file(*range(30), 99, 98)).succeeded().fields
    assert (found["outcome"], found["checkpoint"]) == ("hit", long_store)
    assert found["reason"] == "input and checkpoint begin with the same 30 tokens"
    assert found["tokens matching"] == "30 of 32; the checkpoint has 40"
    assert found["tokens reusable"] == "30 of 32"
    assert found["differs at token"] == "30"
    told = run("match", "--tokens", ids_file(*range(30), 99), "--json").succeeded().json()
    assert (told["n_matching"], told["n_reusable"], told["n_tokens"]) == (30, 30, 31)
    assert told["divergence"] == {"at": 30, "before": None, "in_input": None, "in_checkpoint": None}


@pytest.mark.parametrize("separator", [" ", ", ", "\n"])
def test_token_ids_are_read_however_people_separate_them(run, long_store, ids_file, separator):
    assert run("match", "--tokens", ids_file(*range(40), separator=separator), "-q").succeeded().lines == [long_store]


def test_token_ids_are_read_from_a_json_list_on_stdin(run, long_store, stdin):
    stdin(str(list(range(50))).encode())
    assert run("match", "--tokens", "-", "-q").succeeded().lines == [long_store]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 two 3", "'two' is not a non-negative integer"),
        ("", "at least one id"),
        ("-1", "'-1' is not a non-negative integer"),
        ("99999999999", "outside 0 .. 2147483647"),
    ],
    ids=["a word", "nothing", "negative", "too large"],
)
def test_what_is_no_list_of_token_ids_is_refused(run, populated, tmp_path, content, words):
    path = tmp_path / "ids.txt"
    path.write_text(content)
    run("match", "--tokens", path).refused(BadInput, words)


def test_a_prefix_below_the_floor_is_no_match_and_the_nearest_is_named(run, long_store, ids_file, monkeypatch):
    path = ids_file(*range(10), 99)
    found = run("match", "--tokens", path)
    assert (found.code, found.fields["nearest"]) == (NO_MATCH, f"{long_store} (long)")
    assert (
        found.fields["reason"]
        == "the nearest checkpoint begins with 10 tokens of the input; fewer than 16 are no match"
    )
    assert found.fields["differs at token"] == "10"
    assert run("match", "--tokens", path, "--min-match-tokens", "10", "-q").succeeded().lines == [long_store]
    monkeypatch.setenv("LLAMA_CKPT_MIN_MATCH_TOKENS", "10")
    assert run("match", "--tokens", path, "-q").succeeded().lines == [long_store]
    for wrong in ("1", "few"):
        run("match", "--tokens", path, "--min-match-tokens", wrong).refused(BadInput, wrong)


def test_a_text_is_tokenised_with_the_vocabulary_of_a_gguf_and_the_text_around_is_shown(
    run, long_store, tmp_path, monkeypatch
):
    model = tmp_path / "long.gguf"
    model.write_bytes(b"weights of the long one")
    monkeypatch.setattr(inputs, "load_vocabulary", lambda *_: TokenEngine())
    text = " ".join(map(str, [*range(20), 77]))
    found = run("match", "--text", text, "--model", model).succeeded().fields
    assert (found["checkpoint"], found["differs at token"]) == (long_store, "20")
    assert found["text before"] == "'12 13 14 15 16 17 18 19'"
    assert (found["input continues"], found["checkpoint continues"]) == ("'77'", "'20 21 22 23 24 25 26 27'")


def test_a_gguf_that_has_no_vocabulary_still_finds_the_same_input_and_says_so_else(run, populated, gguf):
    assert run("match", "--text", "one", "--model", gguf, "-q").succeeded().lines == [populated.ids["one"]]
    found = run("match", "--text", "never saved", "--model", gguf)
    assert (found.code, found.fields["outcome"]) == (NO_MATCH, "no_match")
    assert "only a complete match is searched for, no prefix match: " in found.err


def test_a_damaged_candidate_goes_stale_and_is_told(run, populated, long_store, ids_file):
    path = populated.root / long_store[:2] / long_store[2:4] / f"{long_store}.llam"
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    found = run("match", "--tokens", ids_file(*range(30)))
    assert found.code == NO_MATCH
    assert f"checkpoint {long_store} is now STALE (corrupt)" in found.err
