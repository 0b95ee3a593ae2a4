from __future__ import annotations

import hashlib
import shutil
import struct

import pytest
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.errors import BadInput, FileMissing, NotFound, UnsafePath, VerifyFailed
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.registry import Registry
from llama_ckpt.store.store import path_of
from llama_ckpt.values import StaleReason, Status

WEIGHTS = b"GGUF, and the weights of the model 'sample'"

GOOD = ["Header OK", "CRC32 OK", "Structure OK", "Dimensions match model", "Row OK"]


def damage(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_good_checkpoint_has_one_line_for_each_check(run, populated):
    assert run("verify", populated.ids["one"]).succeeded().lines == GOOD


def test_a_good_file_of_a_known_model_has_the_same_lines_but_for_its_row(run, populated, tmp_path):
    path = shutil.copy(populated.path("one"), tmp_path / "elsewhere.llam")
    assert run("verify", path).succeeded().lines == GOOD[:-1]


def test_a_shifted_file_is_good_and_the_shift_is_told(run, populated, tmp_path):
    path = tmp_path / "shifted.llam"
    path.write_bytes(bytes(4) + populated.path("one").read_bytes())
    first, *rest = run("verify", path).succeeded().lines
    assert first.startswith("Header OK")
    assert "4 zero bytes" in first
    assert rest == GOOD[1:-1]


def test_a_file_of_a_model_that_is_not_registered_here_is_checked_as_far_as_can_be(run, empty, template):
    lines = run("verify", template.path("one")).succeeded().lines
    assert lines[:3] == GOOD[:3]
    assert lines[3].startswith("Dimensions not checked: the model is not registered")


def test_a_file_is_checked_without_a_database_and_none_is_made(run, template, tmp_path):
    lines = run("verify", template.path("one")).succeeded().lines
    assert lines[:3] == GOOD[:3]
    assert not (tmp_path / "xdg_data_home").exists()


@pytest.mark.parametrize("given", ["id", "file"])
def test_a_damaged_payload_is_told_by_the_check_that_found_it(run, populated, given):
    damage(populated.path("one"))
    ran = run("verify", populated.ids["one"] if given == "id" else populated.path("one"))
    ran.failed(VerifyFailed, "1 of 1")
    assert ran.lines[0] == "Header OK"
    assert ran.lines[1].startswith("CRC32 FAILED: ")
    assert "Dimensions not checked: CRC32 failed" in ran.lines


@pytest.mark.parametrize("length", [0, 1, 100, 5000])
def test_a_cut_file_fails_at_its_header(run, populated, length):
    populated.path("one").write_bytes(populated.path("one").read_bytes()[:length])
    ran = run("verify", populated.ids["one"])
    ran.failed(VerifyFailed)
    assert ran.lines[0].startswith("Header FAILED: ")
    assert not any(line.endswith("OK") for line in ran.lines)


def test_another_checkpoints_file_under_a_rows_name_fails_at_the_row(run, populated):
    shutil.copy(populated.path("two"), populated.path("one"))
    ran = run("verify", populated.ids["one"])
    ran.failed(VerifyFailed)
    assert ran.lines[-1].startswith("Row FAILED: input hash")


def test_a_missing_file_fails(run, populated):
    populated.path("one").unlink()
    ran = run("verify", populated.ids["one"])
    ran.failed(VerifyFailed)
    assert ran.lines[0].startswith("File FAILED")


def test_all_goes_through_every_active_checkpoint_and_counts(run, populated):
    run("rm", populated.ids["two"]).succeeded()
    lines = run("verify", "--all").succeeded().lines
    assert lines[:-1] == [f"{populated.ids[name]}: {check}" for name in ("other", "one", "crlf") for check in GOOD]
    assert lines[-1] == "3 of 3 checkpoints verified"


def test_all_names_each_checkpoint_that_fails_and_goes_on(run, populated):
    damage(populated.path("one"))
    populated.path("two").unlink()
    ran = run("verify", "--all")
    ran.failed(VerifyFailed, "2 of 4")
    assert f"{populated.ids['one']}: CRC32 FAILED" in ran.out
    assert f"{populated.ids['two']}: File FAILED" in ran.out
    assert f"{populated.ids['crlf']}: Row OK" in ran.out
    assert ran.lines[-1] == "2 of 4 checkpoints verified"
    assert set(run("verify", "--all", "-q").lines) == {populated.ids["one"], populated.ids["two"]}


def test_all_of_an_empty_registry_is_clean(run, empty):
    assert run("verify", "--all").succeeded().lines == ["0 of 0 checkpoints verified"]


def test_all_tells_of_files_without_a_row_on_stderr(run, populated):
    orphan, temporary = (populated.root / path_of("ab" * 16).replace(".llam", s) for s in (".llam", ".tmp"))
    orphan.parent.mkdir(parents=True)
    for path in (orphan, temporary, orphan.with_name("what is this")):
        path.write_bytes(b"12345")
    ran = run("verify", "--all")
    assert ran.code == 0
    told = dict(line.split(": ", 1) for line in ran.err.splitlines())
    assert set(told) == {"orphan", "temporary", "foreign"}
    assert told["orphan"].startswith(path_of("ab" * 16))
    assert orphan.exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_json_has_the_checks_by_name(run, populated, damaged):
    if damaged:
        damage(populated.path("one"))
    ran = run("verify", populated.ids["one"], "--json")
    (checks,) = ran.json()["checkpoints"].values()
    assert [check["name"] for check in checks][:4] == ["Header", "CRC32", "Structure", "Dimensions"]
    assert checks[1]["ok"] is not damaged
    assert ran.code == (VerifyFailed.exit_code if damaged else 0)


def test_quiet_prints_what_failed_and_nothing_when_nothing_did(run, populated):
    assert run("verify", populated.ids["one"], "-q").succeeded().out == ""
    damage(populated.path("one"))
    assert run("verify", populated.ids["one"], "-q").out == f"{populated.ids['one']}\n"


def test_verify_of_all_notes_what_passed_and_marks_nothing(run, populated):
    damage(populated.path("one"))
    assert run("verify", "--all").code == VerifyFailed.exit_code
    rows = {name: populated.row(name) for name in ("one", "two")}
    assert {name: (row.status, row.verified_us is not None) for name, row in rows.items()} == {
        "one": ("ACTIVE", False),
        "two": ("ACTIVE", True),
    }


def test_a_full_check_is_spread_over_runs_the_least_recently_checked_first(run, populated):
    assert (
        run("verify", "--all", "--max-duration", "0s")
        .succeeded()
        .lines[-1]
        .startswith("0 of 0 checkpoints verified; 4 ")
    )
    run("verify", "--all").succeeded()
    assert run("verify", "--all", "--max-age", "1d", "-q").succeeded().lines == []
    populated.set_row("two", verified_us=1)
    shown = run("verify", "--all", "--max-age", "1d", "--json").succeeded().json()
    assert list(shown["checkpoints"]) == [populated.ids["two"]]
    run("verify", populated.ids["one"], "--repair").refused(BadInput, "--all")


def test_repair_marks_the_bad_and_registers_sound_orphans_again(run, populated):
    damage(populated.path("one"))
    row_of_two = populated.row("two")
    run("purge", "--label", "none", "--yes").succeeded()
    with Registry.open(store=populated.root) as registry, registry.database.write() as db:
        db.exec_driver_sql("DELETE FROM llama_checkpoint_meta WHERE id = ?", (populated.ids["two"],))
    ran = run("verify", "--all", "--repair")
    assert ran.code == VerifyFailed.exit_code
    assert "registered again" in ran.err
    assert populated.row("one").stale_reason == "corrupt"
    back = populated.row("two")
    assert (back.status, back.input_hash, back.file_size) == ("ACTIVE", row_of_two.input_hash, row_of_two.file_size)
    run("verify", "--all").succeeded()


def test_verify_of_one_changes_nothing_not_even_the_row_of_a_damaged_file(run, populated):
    damage(populated.path("one"))
    populated.path("two").unlink()
    before = populated.snapshot()
    for what in (populated.ids["one"], populated.ids["two"], populated.path("one")):
        assert run("verify", what).code == VerifyFailed.exit_code
    assert populated.snapshot() == before


@pytest.mark.parametrize("given", [[], ["ID", "--all"]], ids=["neither", "both"])
def test_either_one_thing_or_all_is_verified(run, populated, given):
    given = [populated.ids["one"] if word == "ID" else word for word in given]
    run("verify", *given).refused(BadInput, "--all")


def test_an_id_of_nothing_is_told(run, populated):
    run("verify", "0" * 32).refused(NotFound, "0" * 32)


def test_a_symlink_is_refused(run, populated, tmp_path):
    (tmp_path / "link.llam").symlink_to(populated.path("one"))
    run("verify", tmp_path / "link.llam").refused(UnsafePath, "symlink")


def test_a_path_of_nothing_is_told_as_a_file_that_is_not_there(run, populated, tmp_path):
    ran = run("verify", tmp_path / "nothing.llam")
    assert (ran.code, ran.out) == (18, "")
    assert "hex digits" not in ran.err


@pytest.mark.parametrize("given", ["x" * 5000, "/" + "y" * 300])
def test_a_name_that_no_file_can_have_is_refused(run, populated, given):
    ran = run("verify", given)
    assert ran.code in (BadInput.exit_code, 18)
    assert "internal error" not in ran.err


# -- several, of any format, and in depth ---------------------------------------------------------------------------------


def not_a_number(data: bytes, at: int) -> bytes:
    made = bytearray(data)
    struct.pack_into("<H", made, at, 0x7E00)
    return bytes(made)


def first_row_of(data: bytes, name: str = samples.F16) -> int:
    """Where the first layer's K begins in an engine's file."""
    return len(data) - len(samples.read(name)[1]) + kv_state.parse(memoryview(samples.read(name)[1])).k[0].offset


@pytest.mark.parametrize("name", samples.all_names())
@pytest.mark.parametrize("zeros", [0, 3])
def test_a_file_of_an_engine_has_lines_of_its_own(run, tmp_path, name, zeros):
    path = tmp_path / "state.bin"
    path.write_bytes(bytes(zeros) + samples.data(name))
    lines = run("verify", path, "--deep").succeeded().lines
    version = name.split("-")[1][1:]
    note = f": after {zeros} zero bytes before the magic" if zeros else ""
    assert lines[:2] == [f"Magic OK{note}", f"Version OK: {version}"]
    assert [line.split(":")[0] for line in lines[2:]] == ["Structure OK", "CRC32 not checked", "Values OK", "Tokens OK"]
    assert "a changed number, or an end between two parts of the memory, cannot be seen" in lines[3]


def test_a_damaged_file_of_an_engine_fails_at_its_structure(run, tmp_path):
    path = tmp_path / "state.bin"
    path.write_bytes(samples.data(samples.F16)[:-1])
    ran = run("verify", path)
    ran.failed(VerifyFailed, "1 of 1")
    assert ran.lines[2].startswith("Structure FAILED: ")


def test_cells_that_do_not_fit_the_tokens_fail(run, tmp_path):
    data = bytearray(samples.data(samples.F16))
    data[12 + 12 + 8] ^= 1  # the first cell's position
    (tmp_path / "state.bin").write_bytes(data)
    ran = run("verify", tmp_path / "state.bin")
    ran.failed(VerifyFailed)
    assert ran.lines[-1].startswith("Tokens FAILED: its positions are not 0 to 2")


def test_an_unknown_version_is_held_to_the_layouts_that_are_known_and_said_to_be_unknown(run, tmp_path):
    data = bytearray(samples.data(samples.F16))
    data[4] = 9
    (tmp_path / "state.bin").write_bytes(data)
    assert "Version not checked: 9, which is not known here" in run("verify", tmp_path / "state.bin").succeeded().out


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "Magic FAILED: the file is empty"),
        (b"GGUF" + bytes(99), "Magic FAILED: it is a GGUF model file"),
        (b"LLAM\1\0\0\0" + bytes(99), "Structure FAILED: LLAM version 1 says neither"),
        (b"MALL\0\0\0\2" + bytes(99), "Structure FAILED: Header: magic MALL"),
    ],
)
def test_what_cannot_be_verified_fails(run, tmp_path, data, line):
    (tmp_path / "file").write_bytes(data)
    ran = run("verify", tmp_path / "file")
    ran.failed(VerifyFailed)
    assert any(told.startswith(line) for told in ran.lines), ran.out


def test_a_bare_state_is_sound_and_says_nothing_of_tokens(run, tmp_path):
    (tmp_path / "state").write_bytes(samples.read(samples.F16)[1])
    lines = run("verify", tmp_path / "state", "--deep").succeeded().lines
    assert [line.split(":")[0] for line in lines] == [
        "Magic OK",
        "Structure OK",
        "CRC32 not checked",
        "Values OK",
        "Tokens not checked",
    ]


@pytest.mark.parametrize("name", [samples.F16, samples.CONTEXT_V10, "ours"])
def test_deep_finds_a_number_that_is_none_and_names_its_place(run, tmp_path, name):
    if name == "ours":
        engine = SampleEngine()
        engine.state = not_a_number(engine.state, kv_state.parse(memoryview(engine.state)).k[0].offset)
        engine.evaluate(engine.ids)
        with Registry.open(store=tmp_path / "a store") as registry:
            path = registry.store.root / registry.save(engine, "x").checkpoint.file_path
    else:
        path, data = tmp_path / "state.bin", samples.data(name)
        path.write_bytes(not_a_number(data, first_row_of(data)))
    run("verify", path).succeeded()
    ran = run("verify", path, "--deep")
    ran.failed(VerifyFailed)
    assert "Values FAILED: K of layer 0, cell 0, position 0 is no finite number" in ran.lines


def test_deep_goes_with_an_id_and_reports_what_else_failed(run, populated):
    deep = [*GOOD[:3], "Values OK", *GOOD[3:]]
    assert run("verify", populated.ids["one"], "--deep").succeeded().lines == deep
    damage(populated.path("one"))
    assert "Values not checked: CRC32 failed" in run("verify", populated.ids["one"], "--deep").lines
    assert "Values" not in run("verify", populated.ids["one"]).out


def test_a_row_whose_numbers_are_none_goes_stale_as_other_damage_does(run, populated):
    engine = SampleEngine(weights=hashlib.sha256(WEIGHTS).hexdigest())
    engine.state = not_a_number(engine.state, kv_state.parse(memoryview(engine.state)).k[0].offset)
    engine.evaluate(engine.ids)
    with Registry.open(store=populated.root) as registry:
        bad = registry.save(engine, "bad").checkpoint.id
    run("verify", "--all").succeeded()
    ran = run("verify", "--all", "--deep")
    ran.failed(VerifyFailed, "1 of 5")
    with Registry.open(store=populated.root) as registry:
        assert registry.get(bad).status is Status.ACTIVE
    assert "marked STALE" in run("verify", "--all", "--deep", "--repair").err
    with Registry.open(store=populated.root) as registry:
        row = registry.get(bad)
        assert (row.status, row.stale_reason) == (Status.STALE, StaleReason.CORRUPT)
    assert run("verify", "--all", "--deep").succeeded().lines[-1] == "4 of 4 checkpoints verified"


def test_several_files_and_ids_are_checked_and_each_line_says_whose_it_is(run, populated, tmp_path):
    good, bad = tmp_path / "good.bin", tmp_path / "bad.bin"
    good.write_bytes(samples.data(samples.F16))
    bad.write_bytes(samples.data(samples.F16)[:-1])
    ran = run("verify", good, populated.ids["one"], bad)
    ran.failed(VerifyFailed, "1 of 3")
    assert f"{good}: Structure OK" in ran.out
    assert f"{populated.ids['one']}: Row OK" in ran.lines
    assert f"{bad}: Structure FAILED" in ran.out
    assert run("verify", good, populated.ids["one"], bad, "-q").lines == [str(bad)]


def test_nothing_is_checked_when_one_of_the_names_is_of_nothing(run, populated):
    for missing, kind in (("no/such.llam", FileMissing), ("0" * 32, NotFound)):
        run("verify", populated.ids["one"], missing).refused(kind, missing)
