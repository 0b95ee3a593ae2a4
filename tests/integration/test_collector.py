from __future__ import annotations

import os

import pytest
import sqlalchemy as sa
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.context import RegistryContext
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_lease
from llama_ckpt.errors import Busy, DatabaseUnavailable, StoreMismatch, StoreUnavailable
from llama_ckpt.gc_values import GcKind, GcOutcome, GcPlan
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Outcome, StaleReason, Status

HOUR_US = 3_600_000_000


@pytest.fixture
def collector(registry):
    return Collector(registry.context)


def age(registry, row, hours, *columns):
    """Moves times of a row into the past, as waiting would."""
    with registry.database.write() as db:
        values = {c: getattr(meta.c, c) - hours * HOUR_US for c in columns}
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def age_file(path, hours):
    found = path.stat()
    os.utime(path, (found.st_atime, found.st_mtime - hours * 3600))


def plant(registry, name, data=None, hours=0):
    """A file of ours that no row names: whole, unless other bytes are given."""
    path = registry.store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint_bytes() if data is None else data)
    age_file(path, hours)
    return path


def plan_now(collector):
    return collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True)


def hooked(registry, **actions):
    """A collector that does something at a named step, once."""

    def hook(step):
        action = actions.pop(step.replace(" ", "_"), None)
        if action:
            action()

    p = registry.context
    return Collector(RegistryContext(database=p.database, store=p.store, registry_id=p.registry_id, hook=hook))


# -- prune --------------------------------------------------------------------------------------------------------------


def test_prune_marks_what_is_older_than_the_policy_and_frees_nothing(registry, engine, collector):
    old, idle, pinned, _fresh = (registry.save(engine, text).checkpoint for text in ("old", "idle", "pinned", "fresh"))
    age(registry, old, 50, "created_us")
    age(registry, idle, 30, "created_us", "last_used_us")
    age(registry, pinned, 999, "created_us", "last_used_us")
    registry.pin(pinned.id)
    policy = Policy(max_age_s=48 * 3600, max_idle_s=24 * 3600)
    verdicts = collector.plan_prune(policy)
    assert {v.row.id: v.rule.split(" is ")[0].split(", ")[1] for v in verdicts} == {
        old.id: "max_age",
        idle.id: "max_idle",
    }
    assert registry.get(old.id).status is Status.ACTIVE, "a plan changes nothing"
    assert len(collector.prune(verdicts)) == 2
    assert registry.get(old.id).stale_reason is StaleReason.EVICTED
    assert registry.match("idle").outcome is Outcome.NO_MATCH
    assert registry.match("fresh").outcome is Outcome.HIT
    assert len(list(registry.store.root.rglob("*.llam"))) == 4
    run = collector.runs()[0]
    assert (run.kind, run.n_items, run.freed_bytes, run.ended_us is not None) == ("prune", 2, 0, True)


def test_a_checkpoint_past_its_own_expiry_is_pruned_by_any_policy(registry, engine, collector):
    row = registry.save(engine, "one", expires_in_s=60).checkpoint
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(expires_us=1))
    collector.prune(collector.plan_prune(Policy()))
    assert registry.get(row.id).stale_reason is StaleReason.EXPIRED


@pytest.mark.parametrize("touch", ["restore", "pin", "lease"])
def test_what_is_used_pinned_or_leased_after_the_plan_survives_prune(registry, engine, saved, collector, touch):
    registry.save(engine, "the newest stays")
    verdicts = collector.plan_prune(Policy(max_age_s=-1))
    assert len(verdicts) == 1
    if touch == "restore":
        registry.restore(engine, "one")
    elif touch == "pin":
        registry.pin(saved.id)
    else:
        with registry.database.write() as db:
            db.execute(sa.update(meta).values(lease_until_us=4 * 10**15))
    assert collector.prune(verdicts) == []
    assert registry.get(saved.id).status is Status.ACTIVE
    if touch == "lease":
        assert collector.plan_prune(Policy(max_age_s=-1)) == []


# -- gc: what goes ------------------------------------------------------------------------------------------------------


def test_gc_frees_stale_rows_orphans_and_temporaries_and_leaves_the_rest(registry, engine, collector, left_in_store):
    kept = registry.save(engine, "kept").checkpoint
    gone = registry.save(engine, "gone").checkpoint
    registry.remove(gone.id)
    orphan = plant(registry, path_of("0123456789abcdef" * 2))
    n_orphan = orphan.stat().st_size
    temporary = plant(registry, path_of("0123" + "f" * 28).replace(".llam", ".tmp"), b"t" * 70)
    foreign = plant(registry, "01/23/notes.txt")
    plan = plan_now(collector)
    assert sorted((i.kind, i.path) for i in plan.items) == sorted(
        [
            (GcKind.STALE, gone.file_path),
            (GcKind.ORPHAN, orphan.relative_to(registry.store.root).as_posix()),
            (GcKind.TEMPORARY, temporary.relative_to(registry.store.root).as_posix()),
        ]
    )
    assert plan.size_bytes == gone.file_size + n_orphan + 70
    assert [(f.path, f.detail) for f in plan.findings] == [("01/23/notes.txt", "not a name of ours")]
    report = collector.run(plan)
    assert (report.freed_bytes, report.n_failed) == (plan.size_bytes, 0)
    assert {str(result) for result in report.done} == {"deleted"}
    assert not orphan.exists()
    assert not temporary.exists()
    assert foreign.exists()
    assert [c.id for c in registry.list()] == [kept.id]
    assert registry.restore(engine, "kept").outcome is Outcome.HIT
    left_in_store.add("foreign")
    with registry.database.read() as db:
        recorded = db.exec_driver_sql("SELECT kind, result, size_bytes FROM gc_run_item ORDER BY item_no").all()
    assert sorted(r[0] for r in recorded) == ["orphan", "stale", "temporary"]
    assert sum(r[2] for r in recorded) == plan.size_bytes


def test_gc_leaves_alone_what_is_younger_than_the_grace(registry, engine, saved, collector, left_in_store):
    registry.remove(saved.id)
    orphan = plant(registry, path_of("0123456789abcdef" * 2), hours=1)
    assert collector.plan(Policy(stale_grace_s=3600, ghost_grace_s=2 * 3600)).items == ()
    age(registry, saved, 2, "stale_us")
    age_file(orphan, 2)
    assert len(collector.plan(Policy(stale_grace_s=3600, ghost_grace_s=2 * 3600), skip_grace=True).items) == 2
    left_in_store.add("orphan")


def test_an_active_row_whose_file_is_gone_is_marked_first_and_deleted_after_the_grace(
    registry, engine, saved, collector
):
    (registry.store.root / saved.file_path).unlink()
    plan = plan_now(collector)
    assert [(i.kind, i.size_bytes) for i in plan.items] == [(GcKind.MISSING, 0)]
    assert [str(r) for r in collector.run(plan).done] == ["marked"]
    assert registry.get(saved.id).stale_reason is StaleReason.MISSING
    report = collector.run(plan_now(collector))
    assert ([str(r) for r in report.done], report.freed_bytes) == (["deleted"], 0)
    assert registry.list() == []


def test_a_pinned_stale_checkpoint_is_kept_until_it_is_unpinned(registry, engine, saved, collector):
    registry.pin(saved.id)
    registry.report_bad(saved.id)
    assert plan_now(collector).items == ()
    registry.unpin(saved.id)
    assert len(plan_now(collector).items) == 1


def test_a_row_that_a_reader_has_leased_is_kept(registry, engine, saved, collector):
    registry.remove(saved.id)
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(lease_until_us=4 * 10**15))
    assert plan_now(collector).items == ()


# -- gc: what happens between plan and run ------------------------------------------------------------------------------


def test_a_stale_row_that_is_pinned_after_the_plan_survives(registry, engine, saved, collector):
    registry.remove(saved.id)
    plan = plan_now(collector)
    registry.pin(saved.id)
    assert [str(r) for r in collector.run(plan).done] == ["skipped: used, pinned, leased or needed by a delta"]
    assert (registry.store.root / saved.file_path).exists()


def test_a_file_that_gets_its_row_after_the_walk_is_no_orphan_and_not_missing(registry, engine, left_in_store):
    made = []
    collector = hooked(registry, walked=lambda: made.append(registry.save(engine, "one").checkpoint))
    assert plan_now(collector).items == ()
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_an_orphan_that_gets_its_row_between_plan_and_run_survives(registry, engine, saved, collector):
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(file_path=path_of("f" * 32)))
    orphans = tuple(i for i in plan_now(collector).items if i.kind is GcKind.ORPHAN)
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(file_path=saved.file_path))
    report = collector.run(GcPlan(items=orphans, findings=(), n_files=1, n_rows=1))
    assert [str(r) for r in report.done] == ["skipped: a row names it now"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_file_that_comes_back_between_plan_and_run_keeps_its_row(registry, engine, saved, collector):
    path = registry.store.root / saved.file_path
    data = path.read_bytes()
    path.unlink()
    plan = plan_now(collector)
    path.write_bytes(data)
    assert [str(r) for r in collector.run(plan).done] == ["skipped: back, or STALE, since the plan"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_file_that_is_gone_already_counts_as_done_and_not_as_freed(registry, engine, saved, collector):
    registry.remove(saved.id)
    plan = plan_now(collector)
    (registry.store.root / saved.file_path).unlink()
    report = collector.run(plan)
    assert ([str(r) for r in report.done], report.freed_bytes, report.n_failed) == (["deleted"], 0, 0)


def test_one_file_that_cannot_be_deleted_is_reported_and_stops_nothing(
    registry, engine, collector, monkeypatch, left_in_store
):
    rows = [registry.save(engine, f"input {i}").checkpoint for i in range(3)]
    for row in rows:
        registry.remove(row.id)
    real = registry.store.remove

    def remove(path, **options):
        if path == rows[1].file_path:
            raise StoreUnavailable(path=path, reason="Device or resource busy (errno EBUSY)")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "remove", remove)
        report = collector.run(plan_now(collector))
    assert report.n_failed == 1
    assert sorted(r.outcome for r in report.done) == [GcOutcome.DELETED, GcOutcome.DELETED, GcOutcome.FAILED]
    retry = collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0)))
    assert [(r.item.kind, r.outcome) for r in retry.done] == [(GcKind.ORPHAN, GcOutcome.DELETED)]


def test_many_items_are_worked_in_batches_and_all_recorded(registry, engine, collector):
    for i in range(230):
        plant(registry, path_of(f"{i:032x}"))
    report = collector.run(
        collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True, force=registry.registry_id)
    )
    assert len(report.done) == 230
    with registry.database.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM gc_run_item").scalar_one() == 230
    assert collector.runs()[0].freed_bytes == 230 * len(checkpoint_bytes())


# -- gc: nothing outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../victim", "/tmp/victim", "ab/../../victim", "ab/cd/victim.llam"])
def test_a_stale_row_whose_path_leaves_the_store_costs_nothing_but_the_row(
    registry, engine, saved, collector, tmp_path, path
):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    registry.remove(saved.id)
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(file_path=path))
    (registry.store.root / saved.file_path).unlink()
    report = collector.run(plan_now(collector))
    assert report.n_failed == 1
    assert "not a path that this store gives" in report.done[0].detail
    assert victim.read_text() == "precious"
    assert registry.list() == []


def test_symlinks_and_hard_links_lead_gc_nowhere(registry, engine, saved, collector, tmp_path, left_in_store):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (outside / path_of("cd" * 16).split("/")[2]).write_text("precious")
    shard = registry.store.root / "cd"
    shard.mkdir(exist_ok=True)
    (shard / "cd").symlink_to(outside)  # a folder that leads outside
    link = registry.store.root / path_of("ab" * 16)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "file")  # a file that leads outside
    hard = registry.store.root / path_of("ef" * 16)
    hard.parent.mkdir(parents=True, exist_ok=True)
    os.link(outside / "file", hard)
    plan = plan_now(collector)
    assert [i.path for i in plan.items] == [hard.relative_to(registry.store.root).as_posix()]
    assert [f.path for f in plan.findings] == [link.relative_to(registry.store.root).as_posix()]
    collector.run(plan)
    assert sorted(p.name for p in outside.iterdir()) == sorted(["file", "cd" * 16 + ".llam"])
    assert (outside / "file").read_text() == "precious"
    left_in_store.add("foreign")


# -- evidence and single run --------------------------------------------------------------------------------------------


def test_an_empty_registry_beside_a_full_folder_is_refused_unless_forced(registry, collector):
    for i in range(10):
        plant(registry, path_of(f"{i:032x}"))
    with pytest.raises(StoreMismatch, match=r"the registry is empty, but .* has 10 files"):
        plan_now(collector)
    with pytest.raises(StoreMismatch):
        collector.plan(Policy(ghost_grace_s=0), force="wrong")
    collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id))


def test_more_than_a_fifth_of_the_files_as_ghosts_is_refused_unless_forced(
    registry, engine, saved, collector, left_in_store
):
    for i in range(10):
        plant(registry, path_of(f"{i:032x}"))
    with pytest.raises(StoreMismatch, match="10 of 11 files would go as ghosts"):
        plan_now(collector)
    assert len(collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id).items) == 10
    left_in_store.add("orphan")


def test_more_than_a_fifth_of_the_rows_without_files_is_refused_unless_forced(
    registry, engine, collector, left_in_store
):
    rows = [registry.save(engine, f"input {i}").checkpoint for i in range(12)]
    for row in rows[:10]:
        (registry.store.root / row.file_path).unlink()
    with pytest.raises(StoreMismatch, match="the files of 10 of 12 rows are gone"):
        plan_now(collector)
    assert len(collector.plan(force=registry.registry_id).items) == 10
    left_in_store.add("missing")


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_a_host_whose_clock_is_a_day_off_is_refused(registry, engine, saved, collector, monkeypatch, seconds):
    import time

    real = time.time
    monkeypatch.setattr("llama_ckpt.collector.collector.time.time", lambda: real() + seconds)
    with pytest.raises(StoreMismatch, match=rf"clock is {'.' if seconds > 0 else '-'}86[34]\d\d s from the database's"):
        plan_now(collector)


def test_a_file_that_was_touched_after_the_plan_is_no_orphan_any_more(registry, collector, left_in_store):
    orphan = plant(registry, path_of("0123456789abcdef" * 2), hours=3)
    plan = plan_now(collector)
    os.utime(orphan)
    assert [str(r) for r in collector.run(plan).done] == ["skipped: it changed since the plan"]
    assert orphan.exists()
    left_in_store.add("orphan")


def test_records_of_runs_are_kept_for_90_days(registry, engine, saved, collector):
    registry.remove(saved.id)
    collector.run(plan_now(collector))
    with registry.database.write() as db:
        db.exec_driver_sql("UPDATE gc_run SET started_us = 1")
    collector.run(plan_now(collector))
    assert len(collector.runs()) == 1
    with registry.database.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM gc_run_item").scalar_one() == 0


def test_a_run_that_is_cut_short_records_what_it_did(registry, engine, left_in_store):
    for i in range(250):
        plant(registry, path_of(f"{i:032x}"))

    def fail():
        raise DatabaseUnavailable(url="", reason="lost")

    collector = hooked(registry, rows_deleted=fail)
    with pytest.raises(DatabaseUnavailable):
        collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id))
    assert collector.runs()[0].ended_us is not None
    left_in_store.add("orphan")


def test_a_run_that_is_interrupted_between_two_files_records_those_that_went(registry, engine, left_in_store):
    for i in range(60):
        plant(registry, path_of(f"{i:032x}"))

    def interrupted():
        raise KeyboardInterrupt

    collector = hooked(registry, file_deleted=interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id))
    n_left = len(list(registry.store.root.rglob("*.llam")))
    assert 0 < n_left < 60
    assert (
        collector.runs()[0].n_items == 60 - n_left - 1
    )  # the one at which it was interrupted is a file less, and no item
    left_in_store.add("orphan")


def test_a_store_that_is_not_mounted_is_no_reason_to_forget_every_row(registry, engine, saved, collector, tmp_path):
    registry.store.root.rename(tmp_path / "unmounted")
    registry.store.root.mkdir()
    with pytest.raises(StoreMismatch, match="contains no marker of this registry: is it mounted"):
        plan_now(collector)
    registry.store.root.rmdir()
    with pytest.raises(StoreUnavailable):
        plan_now(collector)
    (tmp_path / "unmounted").rename(registry.store.root)
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_store_that_another_registry_marked_is_refused(registry, engine, saved, collector, tmp_path):
    marker = registry.store.root / "llama-ckpt-store.json"
    mine = marker.read_bytes()
    marker.write_text('{"registry_id": "somebody"}')
    with pytest.raises(StoreMismatch, match="belongs to registry somebody"):
        plan_now(collector)
    marker.write_bytes(mine)


def test_only_one_run_at_a_time_and_an_expired_one_is_taken_over(registry, engine, saved, collector):
    with registry.database.write() as db:
        clock = db.exec_driver_sql("SELECT max(created_us) FROM llama_checkpoint_meta").scalar_one()
        db.execute(sa.update(registry_lease).values(holder="host:1", expires_us=clock + HOUR_US))
    with pytest.raises(Busy, match=r"is running: host:1, for at most 3\d\d\d s more"):
        collector.run(plan_now(collector))
    with registry.database.write() as db:
        db.execute(sa.update(registry_lease).values(expires_us=clock - HOUR_US))
    collector.run(plan_now(collector))


def test_a_run_that_lost_its_lease_stops_before_the_next_batch(registry, engine, left_in_store):
    for i in range(250):
        plant(registry, path_of(f"{i:032x}"))

    def steal():
        other = Database(registry.database.url.render_as_string(hide_password=False))
        with other.write() as db:
            db.execute(
                sa.update(registry_lease).values(
                    holder="thief", fence=registry_lease.c.fence + 1, expires_us=4 * 10**15
                )
            )
        other.close()

    collector = hooked(registry, rows_deleted=steal)
    plan = collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id)
    with pytest.raises(Busy, match="is running: thief"):
        collector.run(plan)
    n_left = len(list(registry.store.root.rglob("*.llam")))
    assert 0 < n_left < 250
    assert collector.runs()[0].n_items == 250 - n_left  # what was done is on record
    left_in_store.add("orphan")


def test_a_run_that_is_told_to_stop_ends_after_the_batch_at_hand_and_the_next_one_does_the_rest(registry, collector):
    for i in range(250):
        plant(registry, path_of(f"{i:032x}"))
    plan = collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id)
    asked = iter([False, True])
    report = collector.run(plan, stopped=lambda: next(asked))
    assert 0 < report.n_left == 250 - len(report.done)
    assert [run.n_items for run in collector.runs()] == [len(report.done)]
    again = collector.run(collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id))
    assert len(again.done) == report.n_left


def test_a_prune_that_is_told_to_stop_marks_nothing_more(registry, engine, collector):
    for i in range(3):
        registry.save(engine, f"input {i}")
    verdicts = collector.plan_prune(Policy(max_count=1))
    assert collector.prune(verdicts, lambda: True) == []
    assert len(collector.prune(verdicts)) == 2


def test_two_registries_may_share_a_database_server_but_not_a_store(tmp_path, engine):
    with Registry.open(store=tmp_path / "a") as a, Registry.open(store=tmp_path / "b") as b:
        a.save(engine, "one")
        b.save(engine, "one")
        assert a.registry_id != b.registry_id
