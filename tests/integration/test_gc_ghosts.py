"""Ghosts: what an earlier run must have seen, whose temporaries go, what is unreadable, and what a run may leave for the next."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import sqlalchemy as sa
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import StoreUnavailable
from llama_ckpt.gc_values import GcKind
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store import writers as owners
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Outcome

HOUR_S = 3600
ORPHAN = path_of("0123456789abcdef" * 2)


@pytest.fixture
def collector(registry):
    return Collector(registry.context)


def plant(registry, name, data=None, age_s=2 * HOUR_S):
    path = registry.store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint_bytes() if data is None else data)
    made = path.stat().st_mtime - age_s
    os.utime(path, (made, made))
    return path


def temporary(registry, tag, age_s=2 * HOUR_S):
    return plant(registry, ORPHAN.replace(".llam", f"{'.' if tag else ''}{tag}.tmp"), b"half", age_s)


def run(collector, *, skip_grace=False, **graces):
    report = collector.run(collector.plan(Policy(**graces), skip_grace=skip_grace))
    return {result.item.path: str(result) for result in report.done}


def dead_tag():
    """The tag of a process that has ended."""
    code = "from llama_ckpt.store import writers; print(writers.my_tag())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def other_machine(tag):
    return ("0" * 8 if tag[:8] != "0" * 8 else "1" * 8) + tag[8:]


# -- seen by an earlier run ----------------------------------------------------------------------------------------------


def test_an_orphan_goes_with_the_second_run_that_sees_it(registry, engine, saved, collector):
    path = plant(registry, ORPHAN)
    plan = collector.plan()
    assert (plan.items, [(i.path, i.kind) for i in plan.waiting]) == ((), [(ORPHAN, GcKind.ORPHAN)])
    assert collector.plan().items == (), "a plan is no run"
    assert run(collector) == {}
    assert path.exists()
    assert run(collector) == {ORPHAN: "deleted"}
    assert not path.exists()


def test_an_orphan_that_changed_since_it_was_seen_is_seen_for_the_first_time(registry, saved, collector):
    path = plant(registry, ORPHAN)
    run(collector)
    plant(registry, ORPHAN, age_s=3 * HOUR_S)
    assert run(collector) == {}
    assert run(collector) == {ORPHAN: "deleted"}
    assert not path.exists()


def test_without_grace_a_ghost_goes_that_no_earlier_run_saw(registry, saved, collector):
    plant(registry, ORPHAN)
    assert run(collector, skip_grace=True) == {ORPHAN: "deleted"}


def test_a_young_orphan_is_neither_taken_nor_noted(registry, saved, collector, left_in_store):
    plant(registry, ORPHAN, age_s=60)
    for _ in range(3):
        assert run(collector) == {}
    assert collector.plan().waiting == ()
    left_in_store.add("orphan")


# -- temporaries ---------------------------------------------------------------------------------------------------------


def test_a_temporary_whose_process_is_gone_goes_at_once_however_young(registry, saved, collector):
    path = temporary(registry, dead_tag(), age_s=0)
    (item,) = collector.plan().items
    assert (item.kind, item.reason) == (GcKind.TEMPORARY, "a write whose process is gone")
    collector.run(collector.plan())
    assert not path.exists()


def test_a_temporary_of_a_living_process_stays_however_old(registry, saved, collector, left_in_store):
    path = temporary(registry, owners.my_tag(), age_s=90 * 24 * HOUR_S)
    for _ in range(2):
        assert run(collector, ghost_grace_s=0, skip_grace=True) == {}
    assert path.exists()
    left_in_store.add("temporary")


def test_a_process_of_the_same_number_that_began_later_is_another_one(registry, saved, collector):
    machine, pid, started = owners.my_tag().split("-")
    path = temporary(registry, f"{machine}-{pid}-{int(started) - 1000}", age_s=0)
    run(collector)
    assert not path.exists()


@pytest.mark.parametrize("tag", ["", "another machine"])
def test_a_temporary_of_which_nothing_is_known_goes_by_age_and_when_it_was_seen(registry, saved, collector, tag):
    path = temporary(registry, other_machine(owners.my_tag()) if tag else "", age_s=2 * HOUR_S)
    assert run(collector, ghost_grace_s=3 * HOUR_S) == {}
    assert run(collector) == {}
    assert path.exists()
    run(collector)
    assert not path.exists()


def test_a_save_writes_under_a_name_that_tells_its_process(registry, engine):
    seen = []

    def hook(step):
        if step == "written":
            seen.extend(registry.store.walk())

    registry.store._hook = hook
    registry.save(engine, "one")
    assert [(e.kind, owners.ask(e.owner)) for e in seen] == [("temporary", owners.Owner.ALIVE)]


# -- unreadable files ----------------------------------------------------------------------------------------------------


def test_an_unreadable_orphan_goes_to_the_quarantine_and_from_there_after_the_grace(
    registry, saved, collector, left_in_store
):
    plant(registry, ORPHAN, b"no checkpoint" * 20)
    (item,) = collector.plan(skip_grace=True).items
    assert item.kind is GcKind.UNREADABLE
    assert "no LLAM magic" in item.reason
    aside = "quarantine/" + ORPHAN.rpartition("/")[2]
    assert run(collector, skip_grace=True) == {ORPHAN: f"quarantined as {aside}"}
    assert (registry.store.root / aside).read_bytes() == b"no checkpoint" * 20
    assert run(collector) == {}, "the quarantine has a grace of its own"
    assert run(collector, stale_grace_s=0) == {aside: "deleted"}
    assert list((registry.store.root / "quarantine").iterdir()) == []


def test_a_checkpoint_that_a_restore_found_damaged_is_put_aside_before_it_is_deleted(
    registry, engine, saved, collector
):
    path = registry.store.root / saved.file_path
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    assert run(collector, stale_grace_s=0) == {saved.file_path: f"quarantined as quarantine/{saved.id}.llam"}
    assert registry.list() == []
    assert (registry.store.root / "quarantine" / f"{saved.id}.llam").read_bytes() == damaged
    run(collector, skip_grace=True)
    assert not (registry.store.root / "quarantine" / f"{saved.id}.llam").exists()


def test_a_quarantine_that_is_a_symlink_is_not_entered(registry, saved, collector, tmp_path, left_in_store):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'ab' * 16}.llam").write_text("precious")
    (registry.store.root / "quarantine").symlink_to(outside)
    plant(registry, ORPHAN, b"x")
    report = collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
    assert report.n_failed == 1
    assert "symlink" in report.done[0].detail
    assert [p.name for p in outside.iterdir()] == [f"{'ab' * 16}.llam"]
    left_in_store.add("orphan")


# -- parts of a run ------------------------------------------------------------------------------------------------------


def test_only_the_wanted_kinds_are_taken(registry, engine, saved, collector):
    registry.remove(saved.id)
    plant(registry, ORPHAN)
    plan = collector.plan(Policy(stale_grace_s=0), only=[GcKind.STALE])
    assert [item.kind for item in plan.items] == [GcKind.STALE]
    collector.run(plan)
    collector.run(collector.plan(Policy(stale_grace_s=0), only=[GcKind.STALE]))  # due by now, and not asked for
    assert run(collector) == {ORPHAN: "deleted"}, "the runs before saw it"


def test_a_run_takes_at_most_so_many_and_the_next_one_the_rest(registry, saved, collector):
    for i in range(8):
        plant(registry, path_of(f"{i:032x}"))
    plan = collector.plan(skip_grace=True)
    report = collector.run(plan, max_delete=3)
    assert (len(report.done), report.n_left) == (3, 5)
    assert len(run(collector)) == 5


def test_a_run_whose_time_is_over_begins_no_batch(registry, saved, collector):
    plant(registry, ORPHAN)
    report = collector.run(collector.plan(skip_grace=True), max_duration_s=0)
    assert (report.done, report.n_left) == ((), 1)
    assert run(collector) == {ORPHAN: "deleted"}


def test_a_file_that_could_not_be_deleted_is_tried_again_by_the_next_run(registry, saved, collector, monkeypatch):
    path = plant(registry, ORPHAN)

    def refused(_path, **_options):
        raise StoreUnavailable(path=ORPHAN, reason="Operation not permitted (errno EPERM)")

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "remove", refused)
        assert run(collector, skip_grace=True)[ORPHAN].startswith("failed")
    assert run(collector) == {ORPHAN: "deleted"}
    assert not path.exists()


def test_a_file_that_a_killed_process_was_about_to_unlink_goes_without_grace(registry, engine, saved, collector):
    registry.remove(saved.id)
    with registry.database.write() as db:
        db.execute(sa.update(meta).values(file_size=0))
    assert run(collector) == {saved.file_path: "deleted"}
    assert not (registry.store.root / saved.file_path).exists()
