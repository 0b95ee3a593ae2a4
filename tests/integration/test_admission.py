"""Saves under a byte budget and a floor of free space: what goes for them, what never does, and when they are refused."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support import samples
from support.sample_engine import SampleEngine
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import collecting, coordination, marks, rows
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import save_claim
from llama_ckpt.errors import DatabaseUnavailable, StoreFull, StoreUnavailable
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import Store, no_hook, path_of
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status

HOUR_US = 3_600_000_000
BLOCK = collecting.BLOCK_BYTES


def room(n):
    """A budget that `n` checkpoints of the sample fill."""
    return n * (len(checkpoint_bytes()) + BLOCK)


@pytest.fixture
def limited(registry):
    """The same registry under a policy."""

    def make(hook=no_hook, **policy):
        return Registry(replace(registry.context, policy=Policy(**policy), hook=hook))

    return make


@pytest.fixture
def two(registry, engine):
    """Two checkpoints, "old" used an hour before "new"."""
    old, new = (registry.save(engine, text).checkpoint for text in ("old", "new"))
    age(registry, old, 1)
    return old, new


@pytest.fixture
def dear(registry, engine):
    """Two checkpoints that took ten seconds each to compute."""
    return [registry.save(engine, text, prefill_ms=10_000).checkpoint for text in ("dear 1", "dear 2")]


def age(registry, row, hours):
    used = (meta.c.created_us - hours * HOUR_US, meta.c.last_used_us - hours * HOUR_US)
    set_row(registry, row, created_us=used[0], last_used_us=used[1])


def set_row(registry, row, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def is_there(registry, row):
    return (registry.store.root / row.file_path).exists()


def files_of(registry):
    return sorted(p.name for p in registry.store.root.rglob("*") if p.suffix in (".llam", ".tmp"))


def claims(registry):
    """Holders of claims, beside the row that savers queue at."""
    with registry.database.read() as db:
        return list(db.scalars(sa.select(save_claim.c.holder).where(save_claim.c.holder != "budget")))


def nothing_changed(registry, files, rows):
    assert files_of(registry) == files
    assert registry.list() == rows
    assert claims(registry) == []


def refused(result):
    assert (result.outcome, result.checkpoint, result.bytes_written) == (SaveOutcome.REFUSED, None, 0)
    return result.reason


def stuck(registry, monkeypatch, *rows):
    """Files of these rows cannot be unlinked."""
    real, paths = registry.store.remove, {row.file_path for row in rows}

    def remove(path, **options):
        if path in paths:
            raise StoreUnavailable(path=path, reason="Device or resource busy (errno EBUSY)")
        return real(path, **options)

    monkeypatch.setattr(registry.store, "remove", remove)


def plant_delta(registry, engine, parent, number=7, **values):
    """A row of a delta; no file is needed for what is asked here."""
    checkpoint_id = f"{number:032x}"
    with registry.database.write() as db:
        new = rows.NewCheckpoint(
            id=checkpoint_id,
            model_name="sample",
            fingerprint=engine.fingerprint.digest,
            input_hash=number.to_bytes(32, "big"),
            tokens_hash=bytes(32),
            n_tokens=6,
            memory_kind=parent.memory_kind,
            file_path=path_of(checkpoint_id),
            file_size=BLOCK,
            payload_crc32=0,
            prefill_ms=None,
            expires_in_s=None,
            label=None,
            start_token=3,
            parent_no=parent.ckpt_no,
        )
        row = rows.insert_checkpoint(db, new)
        if values:
            db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))
    return row


# -- what goes ------------------------------------------------------------------------------------------------------------


def test_over_the_budget_the_least_recently_used_goes_and_the_newcomer_is_saved(
    registry, limited, engine, two, counters
):
    old, new = two
    result = limited(max_bytes=room(2)).save(engine, "newcomer")
    assert result.outcome is SaveOutcome.SAVED
    gone = registry.get(old.id)
    assert (gone.status, gone.stale_reason, gone.file_size) == (Status.STALE, StaleReason.EVICTED, 0)
    assert not is_there(registry, old)
    assert is_there(registry, new)
    assert [registry.restore(engine, text).outcome for text in ("new", "newcomer", "old")] == [
        Outcome.HIT,
        Outcome.HIT,
        Outcome.NO_MATCH,
    ]
    assert (counters["evicted"], claims(registry)) == (1, [])
    collector = Collector(registry.context)
    assert [str(r) for r in collector.run(collector.plan(Policy(stale_grace_s=0))).done] == ["deleted"]
    assert registry.store.root.exists()


def test_within_the_budget_nothing_goes(registry, limited, engine, two, counters):
    assert limited(max_bytes=room(3)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert len(registry.list(status=Status.ACTIVE)) == 3
    assert (counters["evicted"], claims(registry)) == (0, [])


def test_what_spares_least_goes_however_recently_it_was_used(registry, limited, engine):
    dear = registry.save(engine, "dear", prefill_ms=10_000).checkpoint
    cheap = registry.save(engine, "cheap", prefill_ms=10).checkpoint
    age(registry, dear, 1)
    assert limited(max_bytes=room(2)).save(engine, "newcomer", prefill_ms=1000).outcome is SaveOutcome.SAVED
    assert registry.get(cheap.id).status is Status.STALE
    assert registry.restore(engine, "dear").outcome is Outcome.HIT


def test_another_order_of_the_policy_is_kept_to(registry, limited, engine):
    dear = registry.save(engine, "dear", prefill_ms=10_000).checkpoint
    registry.save(engine, "cheap", prefill_ms=10)
    age(registry, dear, 1)
    assert limited(max_bytes=room(2), order="lru").save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert registry.get(dear.id).status is Status.STALE


def test_files_of_stale_checkpoints_go_before_any_active_one(registry, limited, engine, two, counters):
    old, new = two
    registry.remove(new.id)
    assert limited(max_bytes=room(2)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert (is_there(registry, new), registry.get(new.id).file_size) == (False, 0)
    assert registry.get(old.id).status is Status.ACTIVE
    assert counters["evicted"] == 0


@pytest.mark.parametrize("shield", ["pinned", "leased", "a pinned delta needs it"])
def test_what_is_shielded_never_goes_and_another_goes_for_it(registry, limited, engine, two, shield, left_in_store):
    old, new = two
    budget = room(2)
    if shield == "pinned":
        registry.pin(old.id)
    elif shield == "leased":
        set_row(registry, old, lease_until_us=4 * 10**15)
    else:
        plant_delta(registry, engine, old, pinned=1)
        age(registry, old, 2)  # the delta's INSERT touched it
        budget += 2 * BLOCK
        left_in_store.add("missing")
    tight = limited(max_bytes=budget)
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert registry.get(old.id).status is Status.ACTIVE
    assert is_there(registry, old)
    assert registry.get(new.id).status is Status.STALE


def test_the_last_of_each_label_stays_and_an_older_one_goes(registry, limited, engine):
    rows = [registry.save(engine, text, label="night").checkpoint for text in ("older", "newer")]
    with registry.database.write() as db:  # the newer one was used less recently
        db.execute(sa.update(meta).where(meta.c.id == rows[1].id).values(last_used_us=1))
    assert limited(max_bytes=room(2), keep_last_per_label=1, order="lru").save(engine, "newcomer").bytes_written
    assert [registry.get(row.id).status for row in rows] == [Status.STALE, Status.ACTIVE]


@pytest.mark.parametrize("status", ["ACTIVE", "STALE"])
def test_where_all_is_pinned_a_save_is_refused(registry, limited, engine, two, status):
    for row in two:
        if status == "STALE":
            registry.remove(row.id)
        registry.pin(row.id)
    before = files_of(registry), registry.list()
    refused(limited(max_bytes=room(2)).save(engine, "newcomer"))
    nothing_changed(registry, *before)


def test_of_a_chain_the_delta_goes_before_what_it_needs(registry, limited, engine, saved):
    delta = plant_delta(registry, engine, saved)
    age(registry, saved, 2)
    age(registry, delta, 1)
    tight = limited(max_bytes=room(2) + 2 * BLOCK - 1, order="lru")
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [registry.get(row.id).status for row in (saved, delta)] == [Status.ACTIVE, Status.STALE]


def test_a_chain_goes_whole_where_its_delta_alone_is_not_enough(registry, limited, engine, saved):
    delta = plant_delta(registry, engine, saved)
    age(registry, saved, 1)
    age(registry, delta, 2)
    assert limited(max_bytes=room(1), order="lru").save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [registry.get(row.id).status for row in (saved, delta)] == [Status.STALE] * 2


def test_a_checkpoint_that_is_used_at_this_moment_stays_and_another_goes(registry, limited, engine, two, monkeypatch):
    old, new = two
    real, used = collecting.mark_untouched, []

    def use_first(db, rows):
        if not used:
            used.extend(rows)
            later = meta.c.last_used_us + 2 * HOUR_US
            db.execute(sa.update(meta).where(meta.c.id == old.id).values(last_used_us=later, hit_count=1))
        return real(db, rows)

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "mark_untouched", use_first)
        assert limited(max_bytes=room(2)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [seen.id for seen in used] == [old.id]
    assert registry.get(old.id).status is Status.ACTIVE
    assert registry.get(new.id).status is Status.STALE


# -- refusals -------------------------------------------------------------------------------------------------------------


def test_a_newcomer_that_would_be_the_first_to_go_is_refused_and_nothing_is_touched(
    registry, limited, engine, dear, counters
):
    before = files_of(registry), registry.list()
    reason = refused(limited(max_bytes=room(2)).save(engine, "cheap", prefill_ms=1))
    assert f"max_bytes ({room(2)})" in reason
    assert "worth more" in reason
    nothing_changed(registry, *before)
    assert (counters["refused"], counters["evicted"]) == (1, 0)


def test_nothing_goes_for_a_newcomer_that_has_no_place_even_then(registry, limited, engine, dear):
    cheap = registry.save(engine, "cheap", prefill_ms=1).checkpoint
    large = SampleEngine(samples.F16_FLASH, n_tokens=6)
    large.evaluate(large.ids)
    before = files_of(registry), registry.list()
    refused(limited(max_bytes=room(3)).save(large, "needs room for two", prefill_ms=100))
    nothing_changed(registry, *before)
    assert registry.get(cheap.id).status is Status.ACTIVE


def test_a_checkpoint_larger_than_the_budget_is_refused_before_anything_is_asked_to_go(
    registry, limited, engine, saved
):
    before = files_of(registry), registry.list()
    assert "more than all of max_bytes" in refused(limited(max_bytes=room(1) - 1).save(engine, "newcomer"))
    nothing_changed(registry, *before)


def test_what_is_registered_already_is_deduplicated_whatever_the_budget(registry, limited, engine, saved):
    assert limited(max_bytes=1).save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_a_warm_whose_save_is_refused_has_evaluated_and_says_so(registry, limited, dear):
    engine = SampleEngine()
    warmed = limited(max_bytes=room(1) - 1).warm(engine, "newcomer")
    assert (warmed.n_evaluated, len(engine.held), warmed.problem) == (3, 3, None)
    assert warmed.restore.outcome is Outcome.NO_MATCH
    assert "max_bytes" in refused(warmed.save)


# -- the floor of free space ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(registry, monkeypatch):
    """A file system with room for three checkpoints and nothing else on it."""
    capacity = room(3)

    def space(self):
        return capacity - sum(p.stat().st_size for p in self.root.rglob("*.llam")), capacity

    monkeypatch.setattr(Store, "space", space)
    yield capacity
    monkeypatch.undo()


@pytest.mark.parametrize("floor", [{"min_free": room(1)}, {"min_free_share": 0.3334}])
def test_below_the_floor_of_free_space_the_least_recently_used_goes(registry, limited, engine, two, small_disk, floor):
    tight = limited(**floor)
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [is_there(registry, row) for row in two] == [False, True]
    assert registry.store.space()[0] >= small_disk // 3


def test_below_the_floor_a_newcomer_that_is_worth_less_is_refused(registry, limited, engine, dear, small_disk):
    before = files_of(registry), registry.list()
    reason = refused(limited(min_free=room(1)).save(engine, "cheap", prefill_ms=1))
    assert f"min_free ({room(1)})" in reason
    nothing_changed(registry, *before)


def test_what_others_have_reserved_is_not_taken_for_free_space(registry, limited, engine, saved, small_disk):
    with registry.database.write() as db:
        coordination.take_claim(db, b"k" * 32, "another", room(2), 60)
        marks.set_pinned(db, saved.id, True)
    refused(limited(min_free=1).save(engine, "newcomer"))
    with registry.database.write() as db:
        coordination.drop_claim(db, b"k" * 32, "another")
    assert limited(min_free=1).save(engine, "newcomer").outcome is SaveOutcome.SAVED


def test_where_the_free_space_cannot_be_told_nothing_is_written(registry, limited, engine, two, monkeypatch):
    def broken(_path):
        raise OSError(errno.EIO, "told by the system")

    before = files_of(registry), registry.list()
    with monkeypatch.context() as patch:
        patch.setattr("llama_ckpt.store.store.shutil.disk_usage", broken)
        with pytest.raises(StoreUnavailable, match="told by the system"):
            limited(min_free=1).save(engine, "newcomer")
    nothing_changed(registry, *before)


# -- what counts ----------------------------------------------------------------------------------------------------------


def test_a_file_that_was_deleted_by_hand_is_counted_until_gc_saw_it_and_not_after(registry, limited, engine, dear):
    tight = limited(max_bytes=room(2))
    (registry.store.root / dear[0].file_path).unlink()
    refused(tight.save(engine, "cheap", prefill_ms=1))
    collector = Collector(registry.context)
    assert [str(r) for r in collector.run(collector.plan()).done] == ["marked"]
    assert tight.save(engine, "cheap", prefill_ms=1).outcome is SaveOutcome.SAVED
    assert registry.get(dear[1].id).status is Status.ACTIVE


def test_files_of_an_earlier_process_count(registry, engine, two):
    url = registry.database.url.render_as_string(hide_password=False)
    with Registry.open(url, registry.store.root, policy=Policy(max_bytes=room(2))) as later:
        assert later.save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [is_there(registry, row) for row in two] == [False, True]


def test_ghosts_that_gc_saw_count_until_they_are_gone(registry, limited, engine):
    ghost = registry.store.root / path_of("ab" * 16)
    ghost.parent.mkdir(parents=True)
    ghost.write_bytes(checkpoint_bytes())
    os.utime(ghost, (1_000_000_000, 1_000_000_000))
    collector = Collector(registry.context)
    collector.run(collector.plan())
    assert ghost.exists()
    tight = limited(max_bytes=room(1) + len(checkpoint_bytes()) - 1)
    refused(tight.save(engine, "newcomer"))
    collector.run(collector.plan())
    assert not ghost.exists()
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED


def test_what_another_process_has_reserved_counts_until_it_expires(registry, limited, engine):
    with registry.database.write() as db:
        coordination.take_claim(db, b"k" * 32, "another", 1, 60)
    tight = limited(max_bytes=room(1))
    refused(tight.save(engine, "newcomer"))
    with registry.database.write() as db:
        db.execute(sa.update(save_claim).where(save_claim.c.holder == "another").values(expires_us=1))
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED


def test_a_file_that_is_being_written_is_reserved_from_before_its_first_byte_until_its_row_counts_it(
    registry, limited, engine, monkeypatch
):
    seen = []

    def look(step):
        with registry.database.read() as db:
            seen.append((step, collecting.used_bytes(db)))

    monkeypatch.setattr(registry.store, "_hook", look)
    assert limited(max_bytes=room(1)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    monkeypatch.undo()
    assert seen == [(step, room(1)) for step in ("created", "head", "written", "staged", "renamed")]
    look("after")
    assert seen[-1] == ("after", room(1))


# -- failures -------------------------------------------------------------------------------------------------------------


def test_a_save_that_finds_the_disk_full_gives_its_claim_back(registry, limited, engine, monkeypatch):
    def full(step):
        if step == "written":
            raise OSError(errno.ENOSPC, "told by the system")

    tight = limited(max_bytes=room(1))
    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "_hook", full)
        with pytest.raises(StoreFull):
            tight.save(engine, "newcomer")
    nothing_changed(registry, [], [])
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED


def test_a_save_whose_row_is_refused_gives_its_claim_back(registry, limited, engine, monkeypatch):
    def refuse(_db, _new):
        raise sa.exc.OperationalError("INSERT", {}, Exception("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr(rows, "insert_checkpoint", refuse)
        with pytest.raises(DatabaseUnavailable):
            limited(max_bytes=room(1)).save(engine, "newcomer")
    nothing_changed(registry, [], [])


def test_a_claim_that_cannot_be_given_back_expires_and_its_save_tells_what_failed(
    registry, limited, engine, monkeypatch, caplog
):
    def lose(step):
        if step == "renamed":

            def fail(self, *_args):
                raise DatabaseUnavailable(url="", reason="the connection was lost")

            for name in ("read", "write", "query"):
                monkeypatch.setattr(Database, name, fail)

    monkeypatch.setattr(registry.store, "_hook", lose)
    tight = limited(max_bytes=room(1))
    with pytest.raises(DatabaseUnavailable, match="the connection was lost"):
        tight.save(engine, "newcomer")
    monkeypatch.undo()
    assert "is free again in 600 s" in caplog.text
    assert (files_of(registry), registry.list(), len(claims(registry))) == ([], [], 1)
    refused(tight.save(engine, "newcomer"))
    with registry.database.write() as db:
        db.execute(sa.update(save_claim).where(save_claim.c.holder != "budget").values(expires_us=1))
    assert tight.save(engine, "newcomer").outcome is SaveOutcome.SAVED


def test_without_a_database_nothing_is_written_under_a_budget(registry, limited, engine, saved, monkeypatch):
    def fail(_db):
        raise sa.exc.OperationalError("SELECT", {}, Exception("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "used_bytes", fail)
        with pytest.raises(DatabaseUnavailable):
            limited(max_bytes=room(2)).save(engine, "newcomer")
    nothing_changed(registry, [f"{saved.id}.llam"], [saved])


def test_a_stale_file_that_cannot_be_unlinked_keeps_its_bytes_and_the_save_is_refused(
    registry, limited, engine, dear, monkeypatch, caplog
):
    registry.remove(dear[0].id)
    before = files_of(registry), registry.list()
    with monkeypatch.context() as patch:
        stuck(registry, patch, dear[0])
        refused(limited(max_bytes=room(2)).save(engine, "cheap", prefill_ms=1))
    nothing_changed(registry, *before)
    assert registry.get(dear[0].id).file_size == dear[0].file_size
    assert "Device or resource busy" in caplog.text
    assert limited(max_bytes=room(2)).save(engine, "cheap", prefill_ms=1).outcome is SaveOutcome.SAVED


@pytest.mark.parametrize("other", [Status.STALE, Status.ACTIVE])
def test_where_one_file_cannot_be_unlinked_another_goes(registry, limited, engine, two, monkeypatch, other):
    old, new = two
    registry.remove(old.id)
    if other is Status.STALE:
        registry.remove(new.id)
    with monkeypatch.context() as patch:
        stuck(registry, patch, old)
        assert limited(max_bytes=room(2)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert [is_there(registry, row) for row in two] == [True, False]
    assert registry.get(old.id).file_size == old.file_size
    assert claims(registry) == []


def test_an_unprune_between_the_promise_of_room_and_the_unlink_brings_nothing_back(registry, limited, engine, two):
    old, _ = two
    registry.remove(old.id)
    before, said = registry.get(old.id), []

    def unprune(step):
        if step == "room promised":
            said.extend(str(result) for result in Reconciler(registry.context).unprune([before, registry.get(old.id)]))

    assert limited(unprune, max_bytes=room(2)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert said[0].startswith("it was collected meanwhile")
    assert said[1] == "its file is freed already"
    assert (registry.get(old.id).status, is_there(registry, old)) == (Status.STALE, False)


def test_a_gc_between_the_promise_of_room_and_the_unlink_does_no_harm(registry, limited, engine, two):
    old, new = two
    registry.remove(old.id)
    collector = Collector(registry.context)

    def collect(step):
        if step == "room promised":
            report = collector.run(collector.plan(Policy(stale_grace_s=0)))
            assert [(r.item.path, str(r)) for r in report.done] == [(old.file_path, "deleted")]

    assert limited(collect, max_bytes=room(2)).save(engine, "newcomer").outcome is SaveOutcome.SAVED
    assert {row.id for row in registry.list()} >= {new.id}
    assert claims(registry) == []
