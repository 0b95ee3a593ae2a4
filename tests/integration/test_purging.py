"""Purge: rows and files of an input, a label, a model, or all, gone at once, and the proof of it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.sample_engine import SampleEngine, TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import collecting, rows
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_lease, save_claim
from llama_ckpt.errors import BadInput, Busy, Conflict, StoreUnavailable
from llama_ckpt.fingerprint import hash_input
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import path_of
from llama_ckpt.values import NewCheckpoint, Outcome, SaveOutcome, Status

GHOST_TEXT = "found without a row"


@pytest.fixture
def purger(registry):
    return Purger(registry.context)


@pytest.fixture
def kept(registry, engine):
    """A checkpoint that no purge here but that of everything is about."""
    return registry.save(engine, "kept", label="kept").checkpoint


@pytest.fixture
def other_model():
    """An engine of another model."""
    engine = SampleEngine(weights="cd" * 32, model_name="other")
    engine.evaluate(engine.ids)
    return engine


def hooked(registry, **actions):
    """A purger that does something at a named step, once."""

    def hook(step):
        if action := actions.pop(step.replace(" ", "_"), None):
            action()

    return Purger(replace(registry.context, hook=hook))


def set_row(registry, row, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def plant(registry, name=None, data=None):
    """A file that no row names, of the input `GHOST_TEXT`."""
    path = registry.store.root / (name or path_of("ab" * 16))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint_bytes(GHOST_TEXT) if data is None else data)
    return path


def plant_delta(registry, parent, number):
    checkpoint_id = f"{number:032x}"
    new = NewCheckpoint(
        id=checkpoint_id,
        model_name="sample",
        fingerprint=parent.fingerprint,
        input_hash=number.to_bytes(32, "big"),
        tokens_hash=bytes(32),
        n_tokens=6,
        memory_kind=parent.memory_kind,
        file_path=path_of(checkpoint_id),
        file_size=100,
        payload_crc32=0,
        prefill_ms=None,
        expires_in_s=None,
        label=None,
        start_token=3,
        parent_no=parent.ckpt_no,
    )
    with registry.database.write() as db:
        row = rows.insert_checkpoint(db, new)
    plant(registry, row.file_path, b"x" * 100)
    return row


def ids(registry):
    return {row.id for row in registry.list()}


def files_of(registry):
    return {p.stem for p in registry.store.root.rglob("*.llam")}


def nothing_is_left_but(registry, *rows):
    assert ids(registry) == files_of(registry) == {row.id for row in rows}
    with registry.database.read() as db:
        assert list(db.scalars(sa.select(save_claim.c.holder).where(save_claim.c.holder != "budget"))) == []


# -- what goes ------------------------------------------------------------------------------------------------------------


def test_many_rows_go_in_batches_and_deltas_before_what_they_stand_on(registry, kept, monkeypatch):
    engine = TokenEngine()
    for n_tokens in (40, 80, 120, 160, 200):
        engine.evaluate(list(range(n_tokens)))
        registry.save(engine, list(range(n_tokens)), label="story")
    monkeypatch.setattr("llama_ckpt.collector.purge._BATCH_ROWS", 2)
    report = Purger(registry.context).run(Purge(label="story"))
    assert (report.n_rows, report.n_files) == (5, 5)
    assert [row.id for row in registry.list()] == [kept.id]
    with registry.database.read() as db:
        assert db.execute(sa.select(save_claim).where(save_claim.c.reserved_bytes > 0)).first() is None


def test_the_checkpoints_of_an_input_go_whatever_their_model_and_status(registry, engine, other_model, kept, purger):
    first = registry.save(engine, "one").checkpoint
    registry.remove(first.id)
    registry.save(engine, "one")
    registry.save(other_model, "one")
    input_hash = Purge(input_hash=hash_input("one"))
    assert len(purger.plan(input_hash)) == 3
    assert len(registry.list()) == 4, "a plan changes nothing"
    report = purger.run(input_hash)
    assert (report.n_rows, report.n_files, report.n_ghosts) == (3, 3, 0)
    assert report.freed_bytes > 3 * len(checkpoint_bytes()) // 2
    nothing_is_left_but(registry, kept)
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    assert registry.restore(engine, "kept").outcome is Outcome.HIT


def test_the_checkpoints_of_a_label_go(registry, engine, kept, purger):
    registry.save(engine, "one", label="secret")
    registry.save(engine, "two", label="secret")
    assert purger.run(Purge(label="secret")).n_rows == 2
    nothing_is_left_but(registry, kept)


def test_the_checkpoints_of_a_models_name_go(registry, engine, other_model, kept, purger):
    registry.save(other_model, "one")
    registry.save(other_model, "kept")
    assert purger.run(Purge(model_name="other")).n_rows == 2
    nothing_is_left_but(registry, kept)


def test_everything_goes_and_the_next_save_begins_anew(registry, engine, other_model, kept, purger):
    registry.save(other_model, "one")
    plant(registry)
    plant(registry, "quarantine/" + "cd" * 16 + ".llam", b"unreadable")
    report = purger.run(Purge(everything=True))
    assert (report.n_rows, report.n_ghosts) == (2, 2)
    nothing_is_left_but(registry)
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_pins_and_leases_do_not_hold(registry, engine, kept, purger):
    pinned = registry.pin(registry.save(engine, "one", label="secret").checkpoint.id)
    leased = registry.save(engine, "two", label="secret").checkpoint
    set_row(registry, leased, lease_until_us=4 * 10**15)
    assert purger.run(Purge(label="secret")).n_rows == 2
    assert ids(registry).isdisjoint({pinned.id, leased.id})
    nothing_is_left_but(registry, kept)


def test_deltas_go_with_what_they_need(registry, engine, saved, kept, purger):
    child = plant_delta(registry, saved, 7)
    grandchild = plant_delta(registry, child, 8)
    planned = [seen.id for seen, _ in purger.plan(Purge(input_hash=hash_input("one")))]
    assert planned == [grandchild.id, child.id, saved.id]
    assert purger.run(Purge(input_hash=hash_input("one"))).n_rows == 3
    nothing_is_left_but(registry, kept)


def test_a_delta_alone_does_not_take_what_it_needs_along(registry, engine, saved, purger):
    child = plant_delta(registry, saved, 7)
    assert purger.run(Purge(input_hash=child.input_hash)).n_rows == 1
    nothing_is_left_but(registry, saved)


def test_where_there_is_nothing_a_purge_says_so(registry, kept, purger):
    report = purger.run(Purge(label="nobody's"))
    assert (report.n_rows, report.n_files, report.n_ghosts, report.freed_bytes) == (0, 0, 0, 0)
    nothing_is_left_but(registry, kept)


@pytest.mark.parametrize("given", [{}, {"label": "a", "model_name": "b"}, {"label": "a", "everything": True}])
def test_a_purge_of_nothing_named_or_of_two_things_is_refused(given):
    with pytest.raises(BadInput, match="give one of"):
        Purge(**given)


# -- files without a row --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", [path_of("ab" * 16), path_of("ab" * 16).replace(".llam", ".tmp"), "quarantine/" + "ab" * 16 + ".llam"]
)
def test_files_without_a_row_go_by_what_their_headers_say(registry, engine, kept, purger, place):
    path = plant(registry, place)
    assert purger.run(Purge(input_hash=hash_input("another input"))).n_ghosts == 0
    assert path.exists()
    report = purger.run(Purge(input_hash=hash_input(GHOST_TEXT)))
    assert (report.n_rows, report.n_ghosts, report.freed_bytes) == (0, 1, len(checkpoint_bytes(GHOST_TEXT)))
    nothing_is_left_but(registry, kept)


def test_files_without_a_row_go_by_their_model(registry, other_model, kept, purger):
    path = plant(registry)
    registry.save(other_model, "one")
    assert purger.run(Purge(model_name="other")).n_ghosts == 0
    assert path.exists()
    assert purger.run(Purge(model_name="sample")).n_ghosts == 1
    nothing_is_left_but(registry)


def test_a_ghost_that_is_purged_counts_against_no_budget(registry, kept, purger):
    os.utime(plant(registry), (1_000_000_000, 1_000_000_000))
    collector = Collector(registry.context)
    collector.run(collector.plan())
    purger.run(Purge(input_hash=hash_input(GHOST_TEXT)))
    with registry.database.read() as db:
        assert collecting.used_bytes(db) == kept.file_size + collecting.BLOCK_BYTES


def test_unreadable_files_are_left_to_gc_and_go_with_everything(registry, kept, purger):
    path = plant(registry, data=b"no checkpoint")
    assert purger.run(Purge(input_hash=hash_input("one"))).n_ghosts == 0
    assert path.exists()
    assert purger.run(Purge(everything=True)).n_ghosts == 1
    assert not path.exists()


# -- nothing else ---------------------------------------------------------------------------------------------------------


def test_foreign_files_are_not_touched(registry, kept, purger, left_in_store):
    foreign = plant(registry, "ab/ab/notes.txt")
    beside = plant(registry, "notes.txt")
    purger.run(Purge(everything=True))
    assert foreign.exists()
    assert beside.exists()
    assert (registry.store.root / MARKER).exists()
    left_in_store.add("foreign")


@pytest.mark.parametrize("path", ["../victim", "/tmp/victim", "ab/../../victim"])
def test_a_row_whose_path_leaves_the_store_costs_nothing_but_the_row(registry, engine, saved, purger, tmp_path, path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    set_row(registry, saved, file_path=path)
    assert purger.run(Purge(everything=True)).n_rows == 1
    assert victim.read_text() == "precious"
    nothing_is_left_but(registry)


def test_symlinks_and_hard_links_lead_nowhere(registry, kept, purger, tmp_path, left_in_store):
    outside = tmp_path / "outside"
    outside.mkdir()
    data = checkpoint_bytes(GHOST_TEXT)
    inside_name = path_of("cd" * 16).rpartition("/")[2]
    for name in ("file", inside_name):
        (outside / name).write_bytes(data)
    (registry.store.root / "cd").mkdir(exist_ok=True)
    (registry.store.root / "cd/cd").symlink_to(outside)
    (registry.store.root / "quarantine").symlink_to(outside)
    link = registry.store.root / path_of("ab" * 16)
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "file")
    hard = registry.store.root / path_of("ef" * 16)
    hard.parent.mkdir(parents=True)
    os.link(outside / "file", hard)
    assert purger.run(Purge(everything=True)).n_ghosts == 1, "the store's own name of the hard-linked file"
    assert not hard.exists()
    assert link.is_symlink()
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {"file": data, inside_name: data}
    left_in_store.add("foreign")


def test_a_store_that_is_not_mounted_is_not_taken_for_purged(registry, engine, saved, purger, tmp_path):
    registry.store.root.rename(tmp_path / "unmounted")
    registry.store.root.mkdir()
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        purger.run(Purge(everything=True))
    registry.store.root.rmdir()
    (tmp_path / "unmounted").rename(registry.store.root)
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_purge_while_gc_runs_is_refused(registry, saved, purger):
    with registry.database.write() as db:
        db.execute(sa.update(registry_lease).values(holder="host:1", expires_us=4 * 10**15))
    with pytest.raises(Busy, match="host:1"):
        purger.run(Purge(everything=True))
    assert ids(registry) == {saved.id}


# -- failures and races ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["label", "input_hash", "model_name", "everything"])
def test_a_file_that_cannot_be_deleted_is_told_and_the_next_run_finishes_it(
    registry, engine, saved, purger, monkeypatch, by
):
    rows = [registry.save(engine, f"input {i}", label="secret").checkpoint for i in range(3)]
    input_hash = hash_input("input 1")
    purge = Purge(**{by: {"label": "secret", "input_hash": input_hash, "model_name": "sample", "everything": True}[by]})
    real = registry.store.remove

    def remove(path, **options):
        if path == rows[1].file_path:
            raise StoreUnavailable(path=path, reason="Device or resource busy (errno EBUSY)")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "remove", remove)
        with pytest.raises(StoreUnavailable, match=r"1 file.*EBUSY"):
            purger.run(purge)
    assert registry.match("input 1").outcome is Outcome.NO_MATCH
    if by == "label":
        assert files_of(registry) == {saved.id, rows[1].id}, "the others are gone"
    assert registry.get(rows[1].id).status is Status.STALE
    assert purger.run(purge).n_files == 1
    assert rows[1].id not in ids(registry) | files_of(registry)


def test_a_checkpoint_that_is_saved_meanwhile_is_told(registry, engine, kept, purger):
    registry.save(engine, "one", label="secret")
    late = hooked(registry, rows_deleted=lambda: registry.save(engine, "two", label="secret"))
    with pytest.raises(StoreUnavailable, match="was it saved again meanwhile"):
        late.run(Purge(label="secret"))
    assert purger.run(Purge(label="secret")).n_rows == 1
    nothing_is_left_but(registry, kept)


def test_a_delta_that_comes_too_late_is_refused(registry, engine, saved, kept):
    seen = []

    def add_delta():
        with pytest.raises(Conflict, match="went STALE"):
            plant_delta(registry, saved, 7)
        seen.append(True)

    assert hooked(registry, rows_condemned=add_delta).run(Purge(input_hash=hash_input("one"))).n_rows == 1
    assert seen
    nothing_is_left_but(registry, kept)


def test_an_unprune_meanwhile_brings_nothing_back(registry, engine, saved, kept):
    before = registry.remove(saved.id)
    said = []

    def unprune():
        said.extend(str(result) for result in Reconciler(registry.context).unprune([before, registry.get(saved.id)]))

    hooked(registry, rows_condemned=unprune).run(Purge(input_hash=hash_input("one")))
    assert "ACTIVE" not in said
    assert len(said) == 2
    nothing_is_left_but(registry, kept)


@pytest.mark.parametrize("step", ["rows condemned", "files deleted", "rows deleted"])
@pytest.mark.parametrize("by", ["purge", "gc"])
def test_a_purge_that_is_cut_off_is_finished_by_the_next_purge_or_gc(registry, engine, kept, purger, step, by):
    def die():
        raise KeyboardInterrupt

    registry.save(engine, "one", label="secret")
    with pytest.raises(KeyboardInterrupt):
        hooked(registry, **{step.replace(" ", "_"): die}).run(Purge(label="secret"))
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    if by == "purge":
        purger.run(Purge(label="secret"))
    else:
        collector = Collector(registry.context)
        collector.run(collector.plan(Policy(stale_grace_s=0)))
    assert ids(registry) == files_of(registry) == {kept.id}
