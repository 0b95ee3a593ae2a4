"""adopt and export: a line for each file, ids or paths for scripts, and an exit code that says whether anything came of it."""

from __future__ import annotations

import os

import pytest
from support import samples
from support.sample_engine import SampleEngine
from support.whole import checkpoint_bytes

from llama_ckpt.errors import BadInput, CorruptFile, FileMissing, NotFound
from llama_ckpt.formats import engine_files
from llama_ckpt_cli import inputs


@pytest.fixture
def folder(tmp_path):
    """A folder of files: a checkpoint of another registry, a slot, a short slot, a stranger."""
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "a.llam").write_bytes(checkpoint_bytes())
    (made / "b.bin").write_bytes(samples.data(samples.F16))
    (made / "c.bin").write_bytes(samples.data(samples.F16)[:-1])
    (made / "d.txt").write_text("hello")
    return made


@pytest.fixture
def made(monkeypatch) -> list:
    """What engines were asked for. They hold recorded states, whatever the model."""
    asked = []

    def load(_out, path, **options):
        asked.append((path, options))
        engine = SampleEngine()
        engine.token_ids = lambda _text: engine.ids  # every text is that of the recorded file
        return engine

    monkeypatch.setattr(inputs, "load_engine", load)
    return asked


@pytest.fixture
def model(made, tmp_path):
    """A GGUF's path."""
    return tmp_path / "model.gguf"


def rows_of(ran) -> dict[str, list[str]]:
    """The cells of each file's line."""
    lines = [line.split() for line in ran.lines if "/theirs/" in line]
    return {cells[0].rpartition("/")[2]: cells[1:] for cells in lines}


def test_a_folder_is_told_file_by_file_and_what_was_good_is_registered(run, empty, folder, model):
    ran = run("adopt", folder, "--model", model, "--label", "theirs").succeeded()
    rows = rows_of(ran)
    assert [rows[name][0] for name in sorted(rows)] == ["adopted", "adopted", "refused", "left"]
    assert rows["b.bin"][1:4] == ["ggsq", "3", "3"]
    assert "no checkpoint format known here" in " ".join(rows["d.txt"])
    assert ran.lines[-1] == "4 files: 2 adopted, 1 refused, 1 left"
    listed = run("ls", "--label", "theirs", "--json").succeeded().json()
    assert {row["id"] for row in listed} == {rows["a.llam"][3], rows["b.bin"][4]}
    again = run("adopt", folder, "--model", model).succeeded()
    assert again.lines[-1] == "4 files: 2 already registered, 1 refused, 1 left"


def test_files_of_llama_cpp_that_need_the_same_engine_share_it(run, empty, folder, model, made):
    (folder / "bb.bin").write_bytes(samples.data(samples.CONTEXT_V9))
    run("adopt", folder, "--model", model).succeeded()
    assert made == [(model, {"n_ctx": 512, "flash_attn": False, "kv_type": "f16", "type_v": "f16"})]
    run("adopt", folder / "b.bin", "--model", model, "--n-ctx", "4096").succeeded()
    assert made[1][1]["n_ctx"] == 4096


def test_json_and_quiet_give_ids_to_scripts(run, empty, folder, model):
    value = run("adopt", folder, "--model", model, "--json").succeeded().json()
    assert [one["outcome"] for one in value] == ["adopted", "adopted", "refused", "left"]
    assert value[2]["error"] == value[2]["reason"]
    ids = [one["checkpoint"]["id"] for one in value[:2]]
    assert run("adopt", folder, "--model", model, "--quiet").succeeded().lines == ids


def test_a_dry_run_changes_nothing(run, empty, folder, model):
    ran = run("adopt", folder, "--model", model, "--dry-run").succeeded()
    assert ran.lines[-1] == "4 files: 2 adoptable, 1 refused, 1 left"
    assert run("ls", "--json").json() == []
    assert not list(empty.rglob("*.llam"))


def test_when_nothing_could_be_adopted_the_exit_code_is_that_of_the_first_refusal(run, empty, folder):
    ran = run("adopt", folder / "c.bin", folder / "b.bin")
    assert ran.code == CorruptFile.exit_code
    assert "c.bin" in ran.err
    assert [cells[0] for cells in rows_of(ran).values()] == ["refused", "refused"]
    assert run("adopt", folder / "b.bin").code == BadInput.exit_code
    assert "--model" in run("adopt", folder / "b.bin").err
    assert run("adopt", folder / "nothing").code == FileMissing.exit_code
    assert run("adopt", folder / "nothing", folder / "a.llam").code == 0


def test_a_folder_without_a_checkpoint_is_no_failure(run, empty, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert run("adopt", tmp_path / "nothing").succeeded().lines == ["no files"]


def test_a_failure_of_the_database_is_told_after_what_was_done(run, empty, folder, monkeypatch):
    from llama_ckpt.errors import DatabaseUnavailable
    from llama_ckpt.exchange import adopt as adopting

    real = adopting.map_file

    def failing(path):
        if path.name == "b.bin":
            raise DatabaseUnavailable(url="sqlite", reason="it went away")
        return real(path)

    monkeypatch.setattr(adopting, "map_file", failing)
    ran = run("adopt", folder)
    assert ran.code == DatabaseUnavailable.exit_code
    assert "it went away" in ran.err
    assert ran.lines[-1] == "1 file: 1 adopted"


def test_a_text_file_gives_the_input_hash(run, empty, folder, model, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"one\r\n")
    run("adopt", folder / "b.bin", "--model", model, "--text-file", tmp_path / "prompt.txt").succeeded()
    assert run("match", "--text-file", tmp_path / "prompt.txt", "-q").succeeded().lines
    run("adopt", folder, "--model", model, "--text-file", tmp_path / "prompt.txt").refused(BadInput, "that file alone")


def test_a_link_shares_the_bytes(run, empty, folder):
    (row,) = run("adopt", folder / "a.llam", "--link", "--json").succeeded().json()
    assert os.path.samefile(folder / "a.llam", empty / row["checkpoint"]["file_path"])


def test_control_characters_in_a_name_do_not_reach_the_terminal(run, empty, tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "\x1b[31m.llam").write_bytes(checkpoint_bytes())
    assert "\x1b" not in run("adopt", tmp_path / "f").succeeded().out


# -- export ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_and_how_to_load_it_is_told(run, populated, tmp_path):
    shown = run(
        "export", populated.ids["one"][:8], "--format", "ggsq", "-o", tmp_path / "s.bin", "--version", "3"
    ).succeeded()
    written, recorded = (tmp_path / "s.bin").read_bytes(), samples.data(samples.F16)
    assert (written[:12], written[16:]) == (recorded[:12], recorded[16:]), "but for the text's own first token"
    assert "ggsq version 3, 3 tokens, 68.3 KiB" in shown.fields["written"]
    assert "POST /slots/0?action=restore" in shown.fields["load"]


def test_json_has_everything_and_quiet_the_path(run, populated, tmp_path):
    words = ["export", populated.ids["one"], "--format", "ggsq", "--packed", "--streams", "2", "-o", tmp_path / "s.bin"]
    value = run(*words, "--json").succeeded().json()
    assert (value["format"], value["version"], value["checkpoint"]["id"]) == ("ggsq", 4, populated.ids["one"])
    assert value["size_bytes"] == (tmp_path / "s.bin").stat().st_size
    assert run(*words, "--force", "--quiet").succeeded().lines == [str(tmp_path / "s.bin")]
    file = engine_files.read(memoryview((tmp_path / "s.bin").read_bytes()), "s")
    assert (file.packed, file.state.n_stream) == (True, 2)


def test_a_prompt_cache_takes_the_architecture_from_the_model(run, populated, tmp_path):
    from support import tiny_models

    model = tiny_models.write(tmp_path / "tiny.gguf", "full")
    words = ["export", populated.ids["one"], "--format", "ggsn", "-o", tmp_path / "cache"]
    run(*words).refused(BadInput, "--model")
    run(*words, "--model", tmp_path / "nothing.gguf").refused(BadInput, "nothing.gguf")
    run(*words, "--model", populated.path("one")).refused(CorruptFile, "GGUF")
    run(*words, "--model", model).succeeded()
    assert engine_files.read(memoryview((tmp_path / "cache").read_bytes()), "c").architecture == "llama"


def test_a_file_that_is_there_stays_without_force(run, populated, tmp_path):
    (tmp_path / "s.bin").write_text("mine")
    words = ["export", populated.ids["one"], "--format", "llam", "-o", tmp_path / "s.bin"]
    run(*words).refused(BadInput, "--force")
    assert (tmp_path / "s.bin").read_text() == "mine"
    run(*words, "--force").succeeded()
    assert (tmp_path / "s.bin").read_bytes() == populated.path("one").read_bytes()


def test_what_is_not_known_is_refused(run, populated, tmp_path):
    run("export", "0" * 32, "--format", "llam", "-o", tmp_path / "x").refused(NotFound, "0" * 32)
    run("export", populated.ids["one"], "--format", "ggsq", "--version", "9", "-o", tmp_path / "x").refused(
        BadInput, "known"
    )
    assert run("export", populated.ids["one"], "--format", "tar", "-o", tmp_path / "x").code == 2
    assert run("export", populated.ids["one"], "--format", "llam").code == 2
