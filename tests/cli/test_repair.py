from __future__ import annotations

import pytest
from support import samples, small

from llama_ckpt.errors import BadInput, CorruptFile, FileMissing, UnsafePath

WHOLE = small.checkpoint()
PADDED = bytes(3) + WHOLE


@pytest.fixture
def damaged(tmp_path):
    """A file with three zero bytes before the magic, in a folder of its own."""
    path = tmp_path / "files" / "a file.llam"
    path.parent.mkdir()
    path.write_bytes(PADDED)
    path.chmod(0o640)
    return path


def beside(path):
    """Every file in the folder, with its bytes."""
    return {p.name: p.read_bytes() for p in path.parent.iterdir()}


def test_the_repaired_file_stands_beside_the_original(run, damaged):
    lines = run("repair", damaged).succeeded().lines
    assert lines == [
        f"{damaged}: 3 zero bytes before the magic: taken off",
        f"{damaged}: written to {damaged}.repaired",
    ]
    assert beside(damaged) == {"a file.llam": PADDED, "a file.llam.repaired": WHOLE}
    run("verify", f"{damaged}.repaired", "--deep").succeeded()


def test_the_repaired_file_gets_the_name_that_is_asked_for(run, damaged, tmp_path):
    run("repair", damaged, "-o", tmp_path / "mended.llam").succeeded()
    assert (tmp_path / "mended.llam").read_bytes() == WHOLE
    assert beside(damaged) == {"a file.llam": PADDED}


def test_in_place_the_original_is_kept_under_another_name(run, damaged):
    lines = run("repair", damaged, "--in-place").succeeded().lines
    assert lines[-1] == f"{damaged}: written to {damaged}, the original is {damaged}.bak"
    assert beside(damaged) == {"a file.llam": WHOLE, "a file.llam.bak": PADDED}
    assert damaged.stat().st_mode & 0o777 == 0o640


def test_in_place_without_a_backup_there_is_one_file(run, damaged):
    run("repair", damaged, "--in-place", "--no-backup").succeeded()
    assert beside(damaged) == {"a file.llam": WHOLE}


@pytest.mark.parametrize(
    ("options", "taken"), [(["--in-place"], "a file.llam.bak"), ([], "a file.llam.repaired"), (["-o"], "named.llam")]
)
def test_a_file_that_is_there_is_never_written_over(run, damaged, options, taken):
    (damaged.parent / taken).write_bytes(b"something else")
    before = beside(damaged)
    options = [*options, damaged.parent / taken] if options == ["-o"] else options
    run("repair", damaged, *options).refused(BadInput, taken, "it is there already")
    assert beside(damaged) == before


def test_a_symlink_of_the_backups_name_that_leads_nowhere_is_not_written_through(run, damaged, tmp_path):
    damaged.with_name("a file.llam.bak").symlink_to(tmp_path / "elsewhere")
    run("repair", damaged, "--in-place").refused(BadInput, ".bak")
    assert damaged.read_bytes() == PADDED
    assert not (tmp_path / "elsewhere").exists()


def test_a_whole_file_is_left_alone(run, damaged):
    damaged.write_bytes(WHOLE)
    for options in ([], ["--in-place"]):
        assert run("repair", damaged, *options).succeeded().lines == [f"{damaged}: complete, nothing to repair"]
    assert beside(damaged) == {"a file.llam": WHOLE}


def test_a_header_that_disagrees_is_corrected_and_each_field_named(run, damaged):
    damaged.write_bytes(small.changed(WHOLE, seal=True, seq_len=5, n_layer=9))
    lines = run("repair", damaged, "--in-place").succeeded().lines
    assert lines[:2] == [f"{damaged}: seq_len was 5: 6", f"{damaged}: n_layer was 9: 2"]
    assert damaged.read_bytes() == WHOLE


def test_what_cannot_be_put_right_says_why_and_nothing_is_written(run, damaged):
    for data in (WHOLE[:-1], small.flipped(WHOLE, 4096 + 200), samples.data(samples.F16)[:-1], b"GGUF"):
        damaged.write_bytes(data)
        for options in ([], ["--in-place"]):
            run("repair", damaged, *options).refused(CorruptFile, "Repair FAILED")
            assert beside(damaged) == {"a file.llam": data}


def test_a_payload_is_sealed_only_when_the_user_says_that_it_did_not_change(run, damaged):
    data = small.flipped(WHOLE, 4096 + 200)
    damaged.write_bytes(data)
    run("repair", damaged).refused(CorruptFile, "say --trust-payload")
    run("repair", damaged, "--trust-payload", "--in-place").succeeded()
    assert damaged.read_bytes()[4096:] == data[4096:]
    run("verify", damaged).succeeded()


def test_token_ids_are_sealed_only_when_the_user_says_that_they_did_not_change(run, damaged):
    damaged.write_bytes(small.flipped(WHOLE, 128 + small.field(WHOLE, "metadata_size")))
    run("repair", damaged, "--trust-payload").refused(CorruptFile, "say --trust-tokens")
    run("repair", damaged, "--trust-tokens").succeeded()


def test_every_file_is_tried_whatever_became_of_the_others(run, damaged):
    good, bad = damaged, damaged.with_name("short.bin")
    bad.write_bytes(samples.data(samples.F16)[:-1])
    ran = run("repair", bad, damaged.with_name("nowhere"), good)
    assert ran.code == CorruptFile.exit_code
    assert [line.partition("FAILED")[0] for line in ran.err.splitlines()] == [
        f"the file {damaged.with_name('nowhere')} does not exist",
        f"llama-ckpt: {bad}: Repair ",
    ]
    assert f"{good}: written to {good}.repaired" in ran.lines
    shown = run("repair", bad, damaged.with_name("nowhere"), "--json").json()
    assert (shown["repaired"], len(shown["failed"])) == ([], 2)


def test_quiet_prints_what_was_written(run, damaged):
    assert run("repair", damaged, "-q").succeeded().lines == [f"{damaged}.repaired"]


def test_json_has_the_faults_and_the_names(run, damaged):
    (one,) = run("repair", damaged, "--in-place", "--json").succeeded().json()["repaired"]
    assert one == {
        "path": str(damaged),
        "faults": ["3 zero bytes before the magic: taken off"],
        "written": str(damaged),
        "backup": f"{damaged}.bak",
    }


@pytest.mark.parametrize("options", [["-o", "x", "--in-place"], ["-o", "x", "other"], ["--no-backup"]])
def test_options_that_contradict_one_another_are_refused(run, damaged, options):
    run("repair", damaged, *options).refused(BadInput)
    assert beside(damaged) == {"a file.llam": PADDED}


def test_what_is_no_file_is_refused(run, damaged):
    run("repair", damaged.with_name("nothing")).refused(FileMissing)
    run("repair", damaged.parent).refused(UnsafePath, "not a regular file")
    damaged.with_name("link").symlink_to(damaged)
    run("repair", damaged.with_name("link"), "--in-place").refused(UnsafePath, "symlink")
