"""A checkpoint goes out as a file that llama.cpp's programs load: checked before, whole or not there, never over another."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.errors import BadInput, CorruptFile, FileMissing, StoreFull, Unsupported
from llama_ckpt.exchange.adopt import AdoptOptions, AdoptOutcome, adopt
from llama_ckpt.exchange.export import ExportFormat, ExportOptions, export
from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.formats import engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.registry import Registry

GGSQ, GGSN, LLAM = ExportFormat.GGSQ, ExportFormat.GGSN, ExportFormat.LLAM


def write(registry, row, path, kind=GGSQ, **options):
    return export(registry.context, row, path, ExportOptions(format=kind, **options))


def saved_from(registry, engine):
    engine.evaluate(engine.ids)
    return registry.save(engine, engine.ids).checkpoint


@pytest.fixture
def saved(registry, engine):
    """A checkpoint of the sample's own token ids."""
    return saved_from(registry, engine)


@pytest.mark.parametrize(
    ("kind", "version", "sample"),
    [(GGSQ, 2, samples.V2), (GGSQ, 3, samples.F16)],
    ids=["2", "3"],
)
def test_a_ggsq_file_is_byte_for_byte_what_llama_cpp_wrote_for_these_tokens(
    registry, saved, tmp_path, kind, version, sample
):
    done = write(registry, saved, tmp_path / "out.bin", kind, version=version)
    assert (tmp_path / "out.bin").read_bytes() == samples.data(sample)
    assert (done.format, done.version, done.n_tokens) == ("ggsq", version, 3)
    assert done.size_bytes == len(samples.data(sample))
    assert (tmp_path / "out.bin").stat().st_mode & 0o777 == 0o600


def test_the_newest_version_is_written_unless_another_is_named(registry, saved, tmp_path):
    assert write(registry, saved, tmp_path / "a").version == max(engine_files.VERSIONS["ggsq"])
    assert write(registry, saved, tmp_path / "b", GGSN, architecture="llama").version == max(
        engine_files.VERSIONS["ggsn"]
    )
    assert write(registry, saved, tmp_path / "c", LLAM).version == 2
    assert (tmp_path / "a").read_bytes()[:8] == struct.pack("<4sI", b"qsgg", 4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n_stream", [None, 4])
def test_streams_and_token_list_are_as_asked(registry, saved, tmp_path, packed, n_stream):
    write(registry, saved, tmp_path / "out", packed=packed, n_stream=n_stream)
    file = engine_files.read(memoryview((tmp_path / "out").read_bytes()), "out")
    assert (file.packed, file.state.n_stream, file.token_ids.tolist()) == (packed, n_stream or 1, [504, 7742, 2004])
    back = kv_edit.to_dialect(engine_files.sequence_state(file), Dialect())
    assert bytes(back) == SampleEngine().state


def test_a_prompt_cache_names_the_architecture_and_leaves_the_last_cell_to_llama_cli(registry, saved, tmp_path):
    with pytest.raises(BadInput, match="--model"):
        write(registry, saved, tmp_path / "out", GGSN)
    write(registry, saved, tmp_path / "out", GGSN, architecture="llama")
    file = engine_files.read(memoryview((tmp_path / "out").read_bytes()), "out")
    assert (file.version, file.architecture, len(file.token_ids)) == (11, "llama", 3)
    assert engine_files.held_token_ids(file).tolist() == [504, 7742]


def test_a_checkpoint_that_was_a_prompt_cache_remembers_its_architecture(registry, tmp_path):
    path = samples.SAMPLES / samples.CONTEXT_V10
    (found,) = adopt(registry.context, [path], AdoptOptions(engine_for=lambda _: SampleEngine()))
    write(registry, found.checkpoint, tmp_path / "out", GGSN)
    assert engine_files.read(memoryview((tmp_path / "out").read_bytes()), "out").architecture == "llama"


def test_a_copy_is_adopted_by_another_registry(registry, saved, tmp_path):
    write(registry, saved, tmp_path / "out.llam", LLAM)
    assert (tmp_path / "out.llam").read_bytes() == (registry.store.root / saved.file_path).read_bytes()
    with Registry.open(store=tmp_path / "other") as other:
        (found,) = adopt(other.context, [tmp_path / "out.llam"], AdoptOptions())
        assert (found.outcome, found.checkpoint.input_hash) == (AdoptOutcome.ADOPTED, saved.input_hash)


def test_a_copy_is_without_the_zeros_before_the_magic(registry, saved, tmp_path):
    path = registry.store.root / saved.file_path
    data = path.read_bytes()
    path.write_bytes(bytes(4) + data)
    write(registry, saved, tmp_path / "out.llam", LLAM)
    assert (tmp_path / "out.llam").read_bytes() == data


# -- rotation -------------------------------------------------------------------------------------------------------------


def rotated(engine):
    engine.fingerprint = fingerprint({**engine.fingerprint.fields, "kv_rotation": "hadamard"})
    return engine


def test_a_rotated_quantised_state_says_so_in_a_version_that_can(registry, tmp_path):
    row = saved_from(registry, rotated(SampleEngine(samples.Q8_FLASH)))
    write(registry, row, tmp_path / "3", version=3)
    assert (tmp_path / "3").read_bytes() == samples.data(samples.Q8_FLASH)
    write(registry, row, tmp_path / "4", version=4, packed=True)
    made, real = (tmp_path / "4").read_bytes(), samples.data(samples.V4_ROTATED)
    first_rows = 12 + 28 + 8 + 36 + 16 + 12
    assert (made[:first_rows], len(made)) == (real[:first_rows], len(real)), "as llama-server wrote it"


def test_an_unrotated_quantised_state_says_that_too(registry, tmp_path):
    row = saved_from(registry, SampleEngine(samples.Q8_FLASH))
    write(registry, row, tmp_path / "4", version=4)
    file = engine_files.read(memoryview((tmp_path / "4").read_bytes()), "4")
    assert file.state.rotation_words == (0, 0)


@pytest.mark.parametrize(("n_head", "words"), [(6, (0, 0)), (3, (64, 64)), (1, (64, 64))])
def test_the_rotation_follows_from_the_size_of_a_head(registry, tmp_path, n_head, words):
    """192 values a row: heads of 32 are not rotated, heads of 64 and 192 by 64."""
    engine = rotated(SampleEngine(samples.Q8_FLASH))
    engine.dimensions = replace(engine.dimensions, n_kv_head=n_head)
    row = saved_from(registry, engine)
    write(registry, row, tmp_path / "4")
    file = engine_files.read(memoryview((tmp_path / "4").read_bytes()), "4")
    assert file.state.rotation_words == words


def test_a_rotation_that_cannot_be_known_is_not_guessed(registry, tmp_path):
    engine = rotated(SampleEngine(samples.Q8_FLASH))
    engine.dimensions = replace(engine.dimensions, n_kv_head=0)
    row = saved_from(registry, engine)
    with pytest.raises(Unsupported, match="may be rotated"):
        write(registry, row, tmp_path / "4")
    assert not (tmp_path / "4").exists()


# -- how to load it -------------------------------------------------------------------------------------------------------


def test_how_to_load_it_is_told_in_one_line_with_the_flags_of_its_layout(registry, tmp_path):
    row = saved_from(registry, SampleEngine(samples.Q8_FLASH))
    slot = write(registry, row, tmp_path / "a slot.bin").how_to_load
    assert f"llama-server -fa on -ctk q8_0 -ctv q8_0 --slot-save-path {tmp_path}/" in slot
    assert 'POST /slots/0?action=restore {"filename": "a slot.bin"}' in slot
    cache = write(registry, row, tmp_path / "cache", GGSN, architecture="llama").how_to_load
    assert f"--prompt-cache {tmp_path / 'cache'}" in cache
    assert write(registry, row, tmp_path / "x.llam", LLAM).how_to_load == f"llama-ckpt adopt {tmp_path / 'x.llam'}"
    assert not any("\n" in line for line in (slot, cache))


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_stays_unless_it_may_go(registry, saved, tmp_path):
    target = tmp_path / "out"
    target.write_bytes(b"somebody's")
    with pytest.raises(BadInput, match="--force"):
        write(registry, saved, target)
    assert target.read_bytes() == b"somebody's"
    write(registry, saved, target, version=3, replace=True)
    assert target.read_bytes() == samples.data(samples.F16)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_folder_that_is_not_there_is_not_made(registry, saved, tmp_path):
    with pytest.raises(BadInput, match="folder is not there"):
        write(registry, saved, tmp_path / "no" / "out")


def test_a_stale_checkpoint_is_not_exported(registry, saved, tmp_path):
    registry.remove(saved.id)
    with pytest.raises(BadInput, match=f"llama-ckpt unprune {saved.id}"):
        write(registry, saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_or_lost_checkpoint_is_not_exported(registry, saved, tmp_path, left_in_store):
    left_in_store.add("missing")
    path = registry.store.root / saved.file_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for kind in (LLAM, GGSQ):
        with pytest.raises(CorruptFile, match="CRC32"):
            write(registry, saved, tmp_path / "out", kind)
    path.unlink()
    with pytest.raises(FileMissing):
        write(registry, saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert registry.get(saved.id).lease_until_us is None


def test_it_is_leased_while_it_is_read_and_not_after(registry, saved, tmp_path):
    leases = []
    parts = replace(registry.context, hook=lambda step: leases.append((step, registry.get(saved.id).lease_until_us)))
    export(parts, saved, tmp_path / "out", ExportOptions(format=GGSQ))
    assert [(step, until is not None) for step, until in leases] == [("leased", True)]
    assert registry.get(saved.id).lease_until_us is None


def test_a_full_disk_leaves_nothing(registry, saved, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llama_ckpt.store.disk.write_all", full)
    with pytest.raises(StoreFull, match="No space left"):
        write(registry, saved, tmp_path / "folder-of-nothing")
    assert [p.name for p in tmp_path.iterdir() if "folder-of-nothing" in p.name] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": GGSN, "packed": True}, "only a ggsq file"),
        ({"format": LLAM, "packed": True}, "only a ggsq file"),
        ({"format": LLAM, "n_stream": 2}, "copied as it is"),
        ({"format": LLAM, "version": 1}, "known is 2"),
        ({"format": GGSQ, "n_stream": 0}, "from 1 on"),
    ],
)
def test_an_option_that_a_format_has_not_is_refused(options, words):
    with pytest.raises(BadInput, match=words):
        ExportOptions(**options)


def test_a_version_that_is_not_known_is_refused(registry, saved, tmp_path):
    with pytest.raises(BadInput, match="known are 2, 3, 4"):
        write(registry, saved, tmp_path / "out", version=7)


def test_how_to_load_it_can_be_given_to_a_shell(registry, saved, tmp_path):
    folder = tmp_path / "ein Ordner 日本語"
    folder.mkdir()
    assert (
        f"--prompt-cache '{folder}/out.bin',"
        in write(registry, saved, folder / "out.bin", GGSN, architecture="llama").how_to_load
    )
    assert f"--slot-save-path '{folder}'/," in write(registry, saved, folder / "slot.bin").how_to_load
