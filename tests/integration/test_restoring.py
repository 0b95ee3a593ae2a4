"""What a restore and a merge make of rows and files, on each database, with recorded states."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from support import samples
from support.planted import replant
from support.sample_engine import NOTHING, SampleEngine

from llama_ckpt.db import leases, rows, usage
from llama_ckpt.db.tables import usage_day
from llama_ckpt.errors import CorruptFile, EngineFailed, FileMissing, Incompatible, NotFound, StoreUnavailable
from llama_ckpt.fingerprint import fingerprint
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome, StaleReason, Status


def path_of(registry, row):
    return registry.store.root / row.file_path


def beginning(engine, n):
    """The engine with only the first tokens of "one"."""
    engine.evaluate(engine.token_ids("one")[:n])
    return engine


# -- counts over all processes ---------------------------------------------------------------------------------------------


def test_what_is_met_in_files_is_counted_over_processes_and_days(registry, engine, saved, database_url, counters):
    path = path_of(registry, saved)
    path.write_bytes(bytes(5) + path.read_bytes())
    registry.restore(engine, "one")
    with registry.database.write() as db:
        db.execute(sa.update(usage_day).values(day_no=usage_day.c.day_no - 1))
    with Registry.open(database_url, registry.store.root) as another_process:
        for _ in range(2):
            another_process.restore(engine, "one")
    assert registry.stats().events == {"padding_detected": 3}
    assert counters["padding_detected"] == 1, "this process's own"
    with registry.database.read() as db:
        days = db.execute(sa.select(usage_day).order_by(usage_day.c.day_no)).all()
    assert [row.n_times for row in days] == [1, 2]
    assert days[1].day_no == registry.clock_us() // 86_400_000_000


def test_an_ordinary_restore_counts_no_event(registry, engine, saved):
    registry.restore(engine, "one")
    assert registry.stats().events == {}


def test_a_checkpoint_of_another_engine_version_is_restored_and_counted(registry, engine, saved, counters):
    replant(registry, saved, engine.state, engine="llama-cpp-python 0.3.26")
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert registry.stats().events == {"other_version_met": 1}
    assert counters["other_version_met"] == 1


@pytest.mark.parametrize(
    ("head", "events"),
    [
        (b"LLAM" + struct.pack("<I", 1), {"legacy_refused": 1}),
        (b"MALL" + struct.pack(">I", 1), {"byte_order_met": 1, "legacy_refused": 1}),
        (b"LLAM" + struct.pack(">I", 1), {"byte_order_met": 1, "legacy_refused": 1}),
        (bytes(8) + b"MALL" + struct.pack("<I", 1), {"byte_order_met": 1, "legacy_refused": 1}),
    ],
    ids=["little", "big", "mixed", "behind zeros"],
)
def test_a_file_of_version_1_is_never_restored_the_answer_says_why_and_it_is_counted(
    registry, engine, saved, head, events
):
    path_of(registry, saved).write_bytes(head + bytes(5000))
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "LLAM version 1 says neither of which weights nor of which tokens" in back.reason
    assert engine.n_loads == 0
    assert registry.get(saved.id).stale_reason is StaleReason.CORRUPT
    assert registry.stats().events == events


def test_events_of_one_restore_are_counted_together(registry):
    with registry.database.write() as db:
        usage.count(db, ["b", "a"])
        usage.count(db, ["a"])
        usage.count(db, [])
    with registry.database.read() as db:
        assert usage.totals(db) == {"a": 2, "b": 1}


# -- leases -----------------------------------------------------------------------------------------------------------------


def test_a_restore_gives_back_its_own_lease_and_leaves_that_of_a_later_reader(registry, engine, saved):
    held = []

    def while_it_reads(step):
        if step == "leased":
            held.append(registry.get(saved.id).lease_until_us)
            if len(held) == 1:
                with registry.database.write() as db:
                    held.append(leases.lease(db, saved, 3600))

    registry = Registry(replace(registry.context, hook=while_it_reads))
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    first, later = held
    now = registry.get(saved.id)
    assert (now.lease_until_us, now.hit_count) == (later, 1), "the hit counts all the same"
    assert first < later
    with registry.database.write() as db:
        leases.release(db, saved, first)
        assert rows.get(db, saved.id).lease_until_us == later
        leases.release(db, saved, later)
    now = registry.get(saved.id)
    assert (now.lease_until_us, now.hit_count) == (None, 1), "without a hit none is counted"


# -- merge -----------------------------------------------------------------------------------------------------------------


def test_a_merge_counts_as_a_use_and_takes_an_id_or_its_beginning(registry, engine, saved, counters):
    for named in (saved, saved.id, saved.id[:8]):
        merged = registry.merge(beginning(engine, 2), named)
        assert (merged.n_merged, merged.n_held, merged.checkpoint.id) == (1, 3, saved.id)
        assert engine.held.tolist() == engine.token_ids("one").tolist()
    row = registry.get(saved.id)
    assert (row.hit_count, row.lease_until_us) == (3, None)
    assert counters["merged"] == 3
    with pytest.raises(NotFound, match="no checkpoint 'ffffffff'"):
        registry.merge(engine, "ffffffff")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (SampleEngine(weights="cd" * 32), "weights: saved abababababab…, now cdcdcdcdcdcd…"),
        (SampleEngine(samples.F16_FLASH), "flash attention"),
        (SampleEngine(n_ctx=2), "the state has 3 cells, the context 2"),
    ],
    ids=["weights", "flash", "context"],
)
def test_a_checkpoint_of_another_engine_is_not_merged_and_stays(registry, engine, saved, other, words):
    beginning(other, 2)
    with pytest.raises(Incompatible, match=words):
        registry.merge(other, saved)
    assert (other.n_loads, len(other.held)) == (0, 2)
    assert registry.get(saved.id).status is Status.ACTIVE


def test_a_checkpoint_that_is_stale_is_not_merged(registry, engine, saved):
    registry.remove(saved.id)
    with pytest.raises(Incompatible, match=f"checkpoint {saved.id} went STALE"):
        registry.merge(beginning(engine, 2), saved)
    assert engine.n_loads == 0


def damaged(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "kind", "stale"),
    [(damaged, CorruptFile, StaleReason.CORRUPT), (lambda path: path.unlink(), FileMissing, StaleReason.MISSING)],
    ids=["short", "gone"],
)
def test_a_merge_from_a_bad_file_is_refused_before_the_engine_and_the_row_goes_stale(
    registry, engine, saved, harm, kind, stale
):
    harm(path_of(registry, saved))
    with pytest.raises(kind):
        registry.merge(beginning(engine, 2), saved)
    row = registry.get(saved.id)
    assert (row.stale_reason, row.lease_until_us, row.hit_count) == (stale, None, 0)
    assert (engine.n_loads, len(engine.held)) == (0, 2)


def test_a_merge_from_an_unmounted_store_changes_no_row(registry, engine, saved, tmp_path, database_url):
    with (
        Registry.open(database_url, tmp_path / "elsewhere") as wrong,
        pytest.raises(StoreUnavailable, match="contains no marker"),
    ):
        wrong.merge(beginning(engine, 2), saved)
    assert registry.get(saved.id).status is Status.ACTIVE


def test_an_engine_that_refuses_a_merge_holds_nothing_and_the_row_is_not_offered_again(registry, engine, saved):
    beginning(engine, 2).refuses = True
    with pytest.raises(EngineFailed):
        registry.merge(engine, saved)
    assert engine.held is NOTHING
    assert registry.get(saved.id).stale_reason is StaleReason.INCOMPATIBLE


# -- options of a restore --------------------------------------------------------------------------------------------------


def test_sound_values_pass_the_check(registry, engine, saved):
    assert registry.restore(engine, "one", check_values=True).outcome is Outcome.HIT


def test_a_quantised_v_is_not_turned(registry):
    writer = SampleEngine(samples.Q8_FLASH)
    writer.evaluate(writer.ids)
    row = registry.save(writer, "one").checkpoint
    reader = SampleEngine(samples.Q8_FLASH)
    reader.fingerprint = fingerprint({**writer.fingerprint.fields, "v_transposed": True})
    back = registry.restore(reader, "one", transpose_v=True)
    assert back.outcome is Outcome.NO_MATCH
    assert "turning V of type q8_0 is not supported" in back.reason
    assert reader.n_loads == 0
    assert registry.get(row.id).status is Status.ACTIVE


def test_a_capture_that_fails_for_chosen_layers_is_told_and_costs_no_row(registry, engine, saved, monkeypatch):
    def fails():
        raise EngineFailed(reason="it gave 0 of 7 bytes of state")

    monkeypatch.setattr(engine, "capture", fails)
    back = registry.restore(engine, "one", layers=[0])
    assert (back.outcome, str(back.error)) == (Outcome.FAILED, "the engine failed: it gave 0 of 7 bytes of state")
    assert registry.get(saved.id).status is Status.ACTIVE
    assert np.array_equal(engine.held, engine.token_ids("one"))
