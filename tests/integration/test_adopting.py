"""Files of others, and ghosts of our own store, become checkpoints: whole, once, and in the order that keeps data safe."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from support import samples
from support.checksums import counted_crc_bytes, crc_bytes_of_one_check
from support.sample_engine import SampleEngine, TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt import formats
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import (
    BadInput,
    CorruptFile,
    FileMissing,
    Incompatible,
    MissingParent,
    StoreFull,
    StoreUnavailable,
    UnsafePath,
    Unsupported,
)
from llama_ckpt.exchange.adopt import AdoptOptions, AdoptOutcome, adopt
from llama_ckpt.fingerprint import fingerprint, hash_input
from llama_ckpt.formats import container, engine_files
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store import disk
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import path_of
from llama_ckpt.values import MemoryKind, Outcome, StaleReason, Status

TEXT = "found without a row"  # of checkpoint_bytes
ADOPTED, REGISTERED = AdoptOutcome.ADOPTED, AdoptOutcome.REGISTERED
REFUSED, LEFT = AdoptOutcome.REFUSED, AdoptOutcome.LEFT
MODE = 0o777


def run(registry, *paths, **options):
    return list(adopt(registry.context, paths, AdoptOptions(**options)))


def one(registry, path, **options):
    (found,) = run(registry, path, **options)
    return found


def refusal(registry, path, kind, words, **options):
    """The file is refused with an error of that kind; nothing was registered by it."""
    rows = registry.list()
    found = one(registry, path, **options)
    assert (found.outcome, type(found.error)) == (REFUSED, kind), found.reason
    assert words in found.reason
    assert registry.list() == rows


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def maker(sample=samples.F16, **options):
    """An engine whatever the layout; `asked` has the layouts."""
    asked = []

    def make(layout):
        asked.append(layout)
        return SampleEngine(sample, **options)

    make.asked = asked
    return make


def files_of(registry):
    return sorted(p.name for p in registry.store.root.rglob("*") if p.suffix in (".llam", ".tmp"))


# -- LLAM files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path):
    """A checkpoint of another registry, under its own name there."""
    return put(tmp_path / "theirs" / path_of("ab" * 16), checkpoint_bytes())


def test_a_checkpoint_of_another_registry_is_copied_and_restored(registry, theirs, engine):
    found = one(registry, theirs, label="theirs")
    assert (found.outcome, found.format, found.n_tokens) == (ADOPTED, "LLAM", 3)
    row = registry.get(found.checkpoint.id)
    assert (row.status, row.label, row.model_name, row.input_hash) == (
        Status.ACTIVE,
        "theirs",
        "sample",
        hash_input(TEXT),
    )
    assert (row.id, row.file_path) == ("ab" * 16, path_of("ab" * 16)), "its id was free here"
    copy = registry.store.root / row.file_path
    assert copy.read_bytes() == theirs.read_bytes() == checkpoint_bytes()
    assert copy.stat().st_mode & MODE == 0o600
    assert copy.stat().st_ino != theirs.stat().st_ino
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT


def test_an_adopted_file_is_checked_once_and_its_copy_once(registry, theirs):
    with counted_crc_bytes() as sizes:
        assert one(registry, theirs).outcome is ADOPTED
    assert sum(sizes) == 2 * crc_bytes_of_one_check(checkpoint_bytes())


def test_a_damaged_file_is_checked_once(registry, theirs):
    data = bytearray(checkpoint_bytes())
    data[-1] ^= 1
    theirs.write_bytes(data)
    with counted_crc_bytes() as sizes:
        assert one(registry, theirs).reason.endswith(f"the header says {crc32_of(checkpoint_bytes()):08x}")
    assert sum(sizes) == crc_bytes_of_one_check(checkpoint_bytes())


def crc32_of(data):
    return container.unpack_header(memoryview(data), 0).payload_crc32


def test_a_name_that_is_no_id_or_is_taken_gets_a_new_one(registry, engine, tmp_path, saved):
    other = put(tmp_path / "copy of a checkpoint.llam", checkpoint_bytes())
    taken = put(tmp_path / f"{saved.id}.llam", checkpoint_bytes("another text"))
    rows = [found.checkpoint for found in run(registry, other, taken)]
    assert len({row.id for row in rows} | {saved.id}) == 3
    assert all(registry.store.size(row.file_path) == row.file_size for row in rows)


def test_zeros_before_the_magic_are_taken_off_on_copying(registry, tmp_path, engine, counters):
    path = put(tmp_path / "shifted.llam", bytes(5) + checkpoint_bytes())
    row = one(registry, path).checkpoint
    assert (registry.store.root / row.file_path).read_bytes() == checkpoint_bytes()
    assert path.read_bytes() == bytes(5) + checkpoint_bytes(), "the file of others stays as it is"
    assert (counters["padding_detected"], counters["adopted"]) == (1, 1)
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT


def test_the_bytes_are_the_same_where_the_system_cannot_copy_by_itself(registry, theirs, monkeypatch):
    def cannot(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", cannot, raising=False)
    row = one(registry, theirs).checkpoint
    assert (registry.store.root / row.file_path).read_bytes() == checkpoint_bytes()


def test_adopted_again_it_is_already_registered_and_nothing_is_written(registry, theirs):
    first = one(registry, theirs).checkpoint
    again = one(registry, theirs)
    assert (again.outcome, again.checkpoint.id) == (REGISTERED, first.id)
    assert files_of(registry) == [f"{first.id}.llam"]


def test_one_whose_input_was_saved_here_is_already_registered(registry, theirs, engine):
    row = registry.save(engine, TEXT).checkpoint
    found = one(registry, theirs)
    assert (found.outcome, found.checkpoint.id) == (REGISTERED, row.id)


def test_a_row_whose_file_is_gone_stands_in_nobodys_way(registry, theirs, engine):
    row = registry.save(engine, TEXT).checkpoint
    (registry.store.root / row.file_path).unlink()
    assert one(registry, theirs).outcome is ADOPTED
    assert registry.get(row.id).stale_reason is StaleReason.MISSING


@pytest.fixture
def their_chain(tmp_path):
    """Three checkpoints of another registry, two of them deltas, which come before what they stand on in the order of names."""
    engine, found = TokenEngine(), []
    with Registry.open(store=tmp_path / "theirs", delta_depth=8) as theirs:
        for n_tokens in (40, 80, 120):
            engine.evaluate(list(range(n_tokens)))
            found.append(theirs.save(engine, list(range(n_tokens))).checkpoint)
        yield engine, theirs, [theirs.store.root / row.file_path for row in reversed(found)]


def test_deltas_of_another_registry_are_adopted_after_what_they_stand_on(registry, their_chain):
    engine, theirs, paths = their_chain
    rows = {row.id: row for row in theirs.list()}
    would = run(registry, *paths, dry_run=True)
    assert [(f.path, f.outcome) for f in would] == [(path, AdoptOutcome.ADOPTABLE) for path in reversed(paths)]
    assert registry.list() == []
    assert [(f.path, f.outcome) for f in run(registry, *paths)] == [(path, ADOPTED) for path in reversed(paths)]
    for row in registry.list():
        engine.evaluate([1])
        back = registry.restore(engine, list(range(row.n_tokens)))
        assert (back.outcome, back.checkpoint.id) == (Outcome.HIT, row.id)
        assert (row.start_token, row.tokens_hash) == (rows[row.id].start_token, rows[row.id].tokens_hash)
    assert {f.outcome for f in run(registry, *paths)} == {REGISTERED}


def test_a_folder_whose_adoption_was_killed_is_adopted_with_the_deltas_on_it(registry, their_chain):
    """The first file has its name in the store, and no row yet."""
    _, _, paths = their_chain
    put(registry.store.root / path_of(paths[-1].stem), paths[-1].read_bytes())
    assert (registry.list(), files_of(registry)) == ([], [paths[-1].name])
    assert {f.outcome for f in run(registry, *paths)} == {ADOPTED}
    assert {row.id for row in registry.list()} == {path.stem for path in paths}


def test_a_name_that_another_file_has_in_the_store_is_not_taken_from_it(registry, theirs, engine, left_in_store):
    other = put(registry.store.root / path_of(theirs.stem), b"no checkpoint")
    found = one(registry, theirs)
    assert (found.outcome, found.checkpoint.id != theirs.stem) == (ADOPTED, True)
    assert other.read_bytes() == b"no checkpoint"
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT
    left_in_store.add("orphan")


def test_a_flattened_file_of_our_own_whose_row_is_stale_is_left_to_unprune(registry):
    engine = TokenEngine()
    for ids in (list(range(40)), list(range(80))):
        engine.evaluate(ids)
        row = registry.save(engine, ids).checkpoint
    whole = registry.flatten(row.id)
    registry.remove(row.id)
    refusal(registry, registry.store.root / whole.file_path, BadInput, "llama-ckpt unprune")


@pytest.mark.parametrize("parent", [None, "a\0", 7, "../../x", "ab" * 17], ids=repr)
def test_a_delta_that_names_no_parent_is_refused_and_stops_no_other(registry, their_chain, tmp_path, parent):
    _, _, (longest, _, whole) = their_chain
    data = longest.read_bytes()
    file = formats.open_checkpoint(memoryview(data), "x").contents
    head, _ = container.encode_head(file.header, {**file.metadata, "parent": parent}, file.token_ids, file.payload)
    strange = put(tmp_path / "strange.llam", head + bytes(file.payload))
    found = run(registry, strange, whole)
    assert [f.outcome for f in found] == [REFUSED, ADOPTED]
    assert "names no parent" in found[0].reason


def test_an_input_whose_time_is_over_is_renewed_by_an_adoption_where_deltas_stand_on_it(registry, their_chain):
    _, theirs, paths = their_chain
    run(registry, *paths)
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == paths[-1].stem).values(expires_us=1))
    assert one(registry, paths[-1]).outcome is REGISTERED
    assert {row.status for row in registry.list()} == {Status.ACTIVE}
    assert theirs.registry_id != registry.registry_id


def test_a_delta_of_another_registry_without_what_it_stands_on_is_refused_and_names_it(registry, their_chain):
    _, _, (longest, longer, whole) = their_chain
    refusal(registry, longest, MissingParent, f"no ACTIVE checkpoint '{longer.stem}'")
    refusal(registry, longer, MissingParent, "adopt what export --format llam writes")
    assert one(registry, whole).outcome is ADOPTED
    refusal(registry, longest, MissingParent, longer.stem)
    registry.remove(whole.stem)
    refusal(registry, longer, MissingParent, whole.stem)


def test_a_damaged_file_is_refused_with_the_check_that_failed(registry, tmp_path):
    data = bytearray(checkpoint_bytes())
    data[-1] ^= 1
    refusal(registry, put(tmp_path / "rotten.llam", bytes(data)), CorruptFile, "CRC32 FAILED")
    refusal(registry, put(tmp_path / "short.llam", checkpoint_bytes()[:-1]), CorruptFile, "Header FAILED")
    assert files_of(registry) == []


def test_a_file_that_changes_while_it_is_copied_is_refused_and_nothing_of_it_is_kept(registry, theirs, monkeypatch):
    real = disk.copy_rest

    def torn(source, target, data):
        real(source, target, data[:-1])
        os.write(target, bytes([data[-1] ^ 1]))

    monkeypatch.setattr("llama_ckpt.store.store.copy_rest", torn)
    refusal(registry, theirs, CorruptFile, "changed while it was adopted")
    assert files_of(registry) == []


def test_a_text_is_not_taken_for_a_file_that_has_its_input_hash(registry, theirs):
    refusal(registry, theirs, BadInput, "has its input hash already", text="anything")


# -- links ----------------------------------------------------------------------------------------------------------------


def test_a_linked_checkpoint_shares_its_bytes_and_its_mode(registry, theirs, engine):
    theirs.chmod(0o644)
    row = one(registry, theirs, link=True).checkpoint
    ours = registry.store.root / row.file_path
    assert ours.stat().st_ino == theirs.stat().st_ino
    assert theirs.stat().st_mode & MODE == 0o600
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT


def test_a_link_to_another_file_system_is_refused_with_the_reason(registry, theirs, monkeypatch):
    def across(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    theirs.chmod(0o644)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", across)
        refusal(registry, theirs, BadInput, "Invalid cross-device link", link=True)
    assert files_of(registry) == []
    assert theirs.stat().st_mode & MODE == 0o644


def test_a_link_to_somebody_elses_file_is_refused_and_leaves_no_second_name(registry, theirs, monkeypatch):
    def not_ours(*_):
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", not_ours)
        refusal(registry, theirs, StoreUnavailable, "Operation not permitted", link=True)
    assert (files_of(registry), theirs.stat().st_nlink) == ([], 1)


def test_what_cannot_be_shared_as_it_is_is_not_linked(registry, tmp_path):
    refusal(registry, put(tmp_path / "a", bytes(3) + checkpoint_bytes()), BadInput, "omit --link", link=True)
    slot = put(tmp_path / "slot.bin", samples.data(samples.F16))
    refusal(registry, slot, BadInput, "omit --link", link=True, engine_for=maker())


# -- our own store --------------------------------------------------------------------------------------------------------


def test_a_ghost_of_our_own_store_is_registered_where_it_lies(registry, engine):
    path = put(registry.store.root / path_of("cd" * 16), checkpoint_bytes())
    before = path.stat().st_ino
    found = one(registry, path, label="back")
    assert (found.outcome, found.checkpoint.id, found.checkpoint.label) == (ADOPTED, "cd" * 16, "back")
    assert path.stat().st_ino == before
    assert registry.restore(engine, TEXT).outcome is Outcome.HIT
    assert one(registry, path).outcome is REGISTERED


def test_a_file_of_our_own_whose_row_is_stale_is_left_to_unprune(registry, saved):
    registry.remove(saved.id)
    refusal(registry, registry.store.root / saved.file_path, BadInput, f"llama-ckpt unprune {saved.id}")


def test_our_own_folder_is_looked_through_without_opening_the_database(registry, saved, monkeypatch):
    opened = []
    real = disk.map_file
    monkeypatch.setattr("llama_ckpt.exchange.adopt.map_file", lambda path: opened.append(path.name) or real(path))
    ghost = put(registry.store.root / path_of("cd" * 16), checkpoint_bytes())
    unfinished = put(registry.store.root / f"{path_of('ef' * 16)[:-5]}.tmp", checkpoint_bytes("unfinished"))
    outcomes = {found.path.name: found for found in run(registry, registry.store.root, registry.store.root.parent)}
    unfinished.unlink()
    assert outcomes[ghost.name].outcome is REGISTERED, "the second folder has it again"
    assert outcomes[f"{saved.id}.llam"].outcome is REGISTERED
    assert outcomes[MARKER].outcome is LEFT
    assert "not ended" in outcomes[unfinished.name].reason
    assert not [name for name in opened if "sqlite3" in name]
    if registry.database.dialect == "sqlite":
        assert outcomes["registry.sqlite3"].reason == "this registry's database"
        refusal(registry, registry.store.root.parent / "registry.sqlite3", BadInput, "this registry's database")


def test_a_damaged_ghost_of_our_own_is_refused(registry, left_in_store):
    left_in_store.add("orphan")
    path = put(registry.store.root / path_of("cd" * 16), checkpoint_bytes()[:-1])
    refusal(registry, path, CorruptFile, "Header FAILED")


# -- files of llama.cpp ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [samples.V2, samples.F16, samples.CONTEXT_V9, samples.CONTEXT_V10])
def test_a_file_of_llama_cpp_is_rewritten_and_restored(registry, tmp_path, name):
    engine, engines = SampleEngine(), maker()
    found = one(registry, put(tmp_path / name, samples.data(name)), engine_for=engines)
    assert found.outcome is ADOPTED, found.reason
    assert found.format == f"{name[:4]} {name.split('-v')[1].split('-')[0]}"
    (layout,) = engines.asked
    assert (layout.type_k, layout.type_v, layout.flash_attn, layout.n_ctx) == ("f16", "f16", False, 512)
    row = registry.get(found.checkpoint.id)
    assert (row.fingerprint, row.model_name, row.n_tokens) == (engine.fingerprint.digest, "sample", 3)
    assert row.input_hash == hash_input([504, 7742, 2004])
    assert registry.restore(engine, [504, 7742, 2004]).outcome is Outcome.HIT
    with registry.store.map(row.file_path) as view:
        header, padding = container.read_header(view, "x")
        contents = container.read_contents(view, header, padding, "x")
        assert bytes(contents.payload) == engine.state
        assert contents.metadata["engine"] == f"llama.cpp, {name[:4]} version {found.format[5:]}"
        assert contents.metadata.get("architecture") == ("llama" if name.startswith("ggsn") else None)


def test_zeros_before_a_file_of_llama_cpp_do_not_matter(registry, tmp_path, counters):
    path = put(tmp_path / "slot.bin", bytes(8) + samples.data(samples.F16))
    assert one(registry, path, engine_for=maker()).outcome is ADOPTED
    assert counters["padding_detected"] == 1


def test_a_state_keeps_its_own_dialect_in_one_stream(registry, tmp_path):
    name = samples.V4_TWO_STREAMS
    sample = engine_files.read(memoryview(samples.data(name)), name)
    own = kv_edit.to_dialect(engine_files.sequence_state(sample), Dialect(1, True))
    engine = SampleEngine(samples.F16_FLASH)
    engine.capture = lambda: own
    row = one(registry, put(tmp_path / name, samples.data(name)), engine_for=lambda _: engine).checkpoint
    with registry.store.map(row.file_path) as view:
        payload = view[-len(own) :]
        assert kv_state.parse(payload).dialect == "streams=1 rotation_words=1"
        assert bytes(payload) == bytes(own)


def test_a_text_gives_the_input_hash_if_its_tokens_are_the_files(registry, tmp_path):
    path = put(tmp_path / "slot.bin", samples.data(samples.F16))
    other = maker()

    def of_other_tokens(layout):
        engine = other(layout)
        engine.token_ids = lambda _text: np.array([504, 7742, 9, 9], dtype=np.int32)
        return engine

    refusal(registry, path, Incompatible, "the text has 4 tokens, the file holds 3; they differ from token 2 on",
            engine_for=of_other_tokens, text="one")  # fmt: skip

    def of_these_tokens(layout):
        engine = other(layout)
        engine.token_ids = lambda _text: engine.ids
        return engine

    row = one(registry, path, engine_for=of_these_tokens, text="one").checkpoint
    assert row.input_hash == hash_input("one")
    reader = SampleEngine()
    reader.token_ids = lambda _text: reader.ids
    assert registry.restore(reader, "one").outcome is Outcome.HIT


def test_a_text_is_of_one_file(registry, tmp_path):
    path = put(tmp_path / "slot.bin", samples.data(samples.F16))
    for paths in ([path, path], [tmp_path], []):
        with pytest.raises(BadInput, match="name that file alone"):
            run(registry, *paths, text="one")


def test_a_file_that_names_no_model_needs_one(registry, tmp_path):
    refusal(registry, put(tmp_path / "slot.bin", samples.data(samples.F16)), BadInput, "--model")


@pytest.mark.parametrize(
    ("name", "sample", "words"),
    [
        (samples.F16, samples.F16_FLASH, "v_transposed is True in the file, False in the model"),
        (samples.F16_FLASH, samples.Q8_FLASH, "type_k is f16 in the file, q8_0 in the model"),
        (samples.THREE_STREAMS, samples.F16_FLASH, "n_layer is 2 in the file, 30 in the model"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_what_differs(registry, tmp_path, name, sample, words):
    path = put(tmp_path / "slot.bin", samples.data(name))
    refusal(registry, path, Incompatible, words, engine_for=maker(sample))


@pytest.mark.parametrize(("part", "layer"), [("k", 0), ("v", 29)])
def test_a_state_of_other_numbers_than_the_models_is_refused(registry, tmp_path, part, layer):
    data = bytearray(samples.data(samples.F16_FLASH))
    file = engine_files.read(memoryview(bytes(data)), "x")
    at = len(data) - len(file.body) + getattr(file.state, part)[layer].offset
    values = np.frombuffer(data, dtype="<f2", count=3 * 192, offset=at)
    data[at : at + values.nbytes] = (-values).tobytes()
    path = put(tmp_path / "slot.bin", bytes(data))
    words = f"furthest {part.upper()} of layer {layer} with 2 (at most 0.25)"
    refusal(registry, path, Incompatible, words, engine_for=maker(samples.F16_FLASH))


def test_numbers_that_are_none_are_refused(registry, tmp_path):
    data = bytearray(samples.data(samples.F16))
    struct.pack_into("<H", data, len(data) - 2, 0x7E00)
    refusal(registry, put(tmp_path / "a", bytes(data)), CorruptFile, "V of layer 29", engine_for=maker())


def test_a_model_whose_rope_depends_on_the_context_asks_for_its_length(registry, tmp_path):
    path = put(tmp_path / "slot.bin", samples.data(samples.F16))

    def make(layout):
        engine = SampleEngine()
        engine.fingerprint = fingerprint({**engine.fingerprint.fields, "rope_factors": "short"})
        made.append(layout.n_ctx)
        return engine

    made = []
    refusal(registry, path, BadInput, "--n-ctx", engine_for=make)
    one(registry, path, engine_for=make, n_ctx=8192)
    assert made == [512, 8192]


def test_a_model_of_another_memory_is_refused(registry, tmp_path):
    path = put(tmp_path / "slot.bin", samples.data(samples.F16))

    def make(_layout):
        engine = SampleEngine()
        engine.memory_kind = MemoryKind.SWA
        return engine

    refusal(registry, path, Unsupported, "adopting swa memory", engine_for=make)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (samples.data(samples.RECURRENT), "recurrent memory"),
        (samples.data(samples.HYBRID), "hybrid memory"),
        (samples.data(samples.SWA), "swa memory"),
        (samples.data(samples.SWA_SHORT), "caches memory"),
        (b"MALL\0\0\0\1" + bytes(200), "says neither of which weights"),
        (samples.read(samples.F16)[1], "which tokens"),
        (samples.data(samples.F16)[:-1], "FAILED"),
    ],
    ids=["recurrent", "hybrid", "swa", "short swa", "LLAM 1", "bare state", "short"],
)
def test_what_cannot_be_kept_is_refused_without_a_model(registry, tmp_path, data, words):
    engines = maker()
    found = one(registry, put(tmp_path / "file", data), engine_for=engines)
    assert (found.outcome, words in found.reason) == (REFUSED, True), found.reason
    assert engines.asked == []


# -- folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_taken_with_all_that_is_in_it_and_strangers_are_named(registry, theirs, tmp_path):
    top = tmp_path / "theirs"
    put(top / "slots" / "one.bin", samples.data(samples.F16))
    put(top / "slots" / "rotten.bin", samples.data(samples.F16)[:-1])
    put(top / "readme.txt", b"hello")
    (top / "link.llam").symlink_to(theirs)
    os.mkfifo(top / "pipe")
    found = {str(f.path.relative_to(top)): f for f in run(registry, top, engine_for=maker())}
    assert {name: f.outcome for name, f in found.items()} == {
        path_of("ab" * 16): ADOPTED,
        "slots/one.bin": ADOPTED,
        "slots/rotten.bin": REFUSED,
        "readme.txt": LEFT,
        "link.llam": LEFT,
        "pipe": LEFT,
    }
    assert "symlink" in found["link.llam"].reason
    assert "no checkpoint format" in found["readme.txt"].reason


def test_a_file_that_was_named_is_refused_where_a_folder_would_leave_it(registry, theirs, tmp_path):
    (tmp_path / "link.llam").symlink_to(theirs)
    refusal(registry, tmp_path / "link.llam", UnsafePath, "symlink")
    refusal(registry, put(tmp_path / "m.gguf", b"GGUF\3\0\0\0"), Unsupported, "GGUF model file")
    refusal(registry, tmp_path / "nothing", FileMissing, "does not exist")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(b"x" * 100_000, LEFT), (("llama_cpp.llama", "LlamaState", b"x" * 100_000), REFUSED)],
    ids=["of another program", "LlamaDiskCache"],
)
def test_a_folder_of_pickles_is_told_as_a_whole_and_nothing_in_it_is_opened(registry, tmp_path, value, outcome):
    diskcache = pytest.importorskip("diskcache", reason="diskcache is not installed (extra 'llama')")
    folder = tmp_path / "cache"
    with diskcache.Cache(str(folder)) as cache:
        cache["key"] = value
    found = one(registry, folder)
    assert (found.path, found.outcome) == (folder, outcome)
    assert "diskcache" in found.reason or "LlamaDiskCache" in found.reason
    assert "never opened" in found.reason


def test_a_folder_whose_database_is_no_database_is_told_and_gone_through_all_the_same(registry, tmp_path):
    put(tmp_path / "cache" / "cache.db", b"no database")
    put(tmp_path / "cache" / "theirs.llam", checkpoint_bytes())
    outcomes = {found.path.name: found.outcome for found in run(registry, tmp_path / "cache")}
    assert outcomes == {"cache": REFUSED, "cache.db": LEFT, "theirs.llam": ADOPTED}


# -- limits, steps, dry runs ----------------------------------------------------------------------------------------------


def test_a_byte_budget_is_kept_and_the_refusal_names_it(database_url, tmp_path, theirs):
    with Registry.open(database_url, tmp_path / "store", policy=Policy(max_bytes=1000)) as registry:
        refusal(registry, theirs, StoreFull, "max_bytes (1000)")
        refusal(registry, put(tmp_path / "a", samples.data(samples.F16)), StoreFull, "max_bytes", engine_for=maker())
        assert files_of(registry) == []


def test_a_store_of_another_registry_is_not_written_to(registry, theirs):
    (registry.store.root / MARKER).write_text('{"registry_id": "another"}')
    with pytest.raises(StoreUnavailable, match="belongs to registry another"):
        run(registry, theirs)
    assert files_of(registry) == []


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["llam", "ggsq"])
@pytest.mark.parametrize("step", ["created", "written", "staged", "renamed", "inserted"])
def test_a_failure_at_any_step_leaves_neither_file_nor_row(registry, theirs, tmp_path, name, step):
    path = theirs if name == "llam" else put(tmp_path / "a", samples.data(samples.F16))

    def hook(at):
        if at == step:
            raise StoppedError

    context = replace(registry.context, hook=hook)
    context.store._hook = hook
    with pytest.raises(StoppedError):
        list(adopt(context, [path], AdoptOptions(engine_for=maker())))
    registry.store._hook = lambda _step: None
    assert (files_of(registry), registry.list()) == ([], [])
    assert one(registry, path, engine_for=maker()).outcome is ADOPTED


def test_a_dry_run_says_what_would_be_adopted_and_changes_nothing(registry, theirs, tmp_path, engine, left_in_store):
    left_in_store |= {"orphan", "missing"}
    ghost = put(registry.store.root / path_of("cd" * 16), checkpoint_bytes("a ghost"))
    slot = put(tmp_path / "slot.bin", samples.data(samples.F16))
    row = registry.save(engine, "lost").checkpoint
    (registry.store.root / row.file_path).unlink()
    lost = put(tmp_path / "lost.llam", checkpoint_bytes("lost"))
    found = run(registry, ghost, theirs, slot, lost, tmp_path / "no", engine_for=maker(), dry_run=True)
    would = AdoptOutcome.ADOPTABLE
    assert [f.outcome for f in found] == [would, would, would, REGISTERED, REFUSED]
    assert registry.list() == [row]
    assert files_of(registry) == [ghost.name]


def test_a_file_of_the_same_text_and_other_tokens_is_refused(registry, theirs):
    engine = SampleEngine(samples.F16_FLASH, n_tokens=5)
    engine.fingerprint = SampleEngine().fingerprint
    engine.state, engine.ids = samples.read(samples.F16)[1], np.array([1, 2, 3], dtype=np.int32)
    engine.evaluate(engine.ids)
    row = registry.save(engine, TEXT).checkpoint
    refusal(registry, theirs, Incompatible, f"checkpoint {row.id} is of the same input hash")
