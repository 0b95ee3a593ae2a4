"""kill -9 after each step: what is on disk and in the database then, and what the next run does (docs/crash-safety.md)."""

from __future__ import annotations

import subprocess

import pytest
from support import child

from llama_ckpt.collector import Collector
from llama_ckpt.gc_values import GcKind
from llama_ckpt.values import Outcome, SaveOutcome, Status
from llama_ckpt.verify import Verifier, all_ok


def run_child(registry, verb, **order):
    # The password stays in the URL: nothing of it is secret in a test.
    url = registry.database.url.render_as_string(hide_password=False)
    line = child.command(verb=verb, database_url=url, store=str(registry.store.root), **order)
    return subprocess.run(line, env=child.environment(), capture_output=True, text=True, check=False, timeout=60)


def collect_now(registry):
    collector = Collector(registry.parts)
    return collector.run(collector.plan(stale_grace_s=0, ghost_grace_s=0))


def files_in(registry):
    return sorted(p.suffix for p in registry.store.root.rglob("*") if p.suffix in (".llam", ".tmp"))


def active_rows_are_whole(registry):
    return all(all_ok(checks) for _, checks in Verifier(registry.database, registry.store).everything())


@pytest.mark.parametrize(
    ("step", "files", "n_rows"),
    [
        ("created", [".tmp"], 0),
        ("head", [".tmp"], 0),
        ("written", [".tmp"], 0),
        ("staged", [".tmp"], 0),
        ("renamed", [".llam"], 0),
        ("inserted", [".llam"], 0),
        ("committed", [".llam"], 1),
    ],
)
def test_a_save_killed_at_any_step_leaves_no_row_without_a_whole_file(registry, engine, step, files, n_rows):
    killed = run_child(registry, "save", texts=["one"], die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert files_in(registry) == files
    assert len(registry.list()) == n_rows
    assert active_rows_are_whole(registry)
    expected = SaveOutcome.DEDUPLICATED if n_rows else SaveOutcome.SAVED
    assert registry.save(engine, "one").outcome is expected
    assert Collector(registry.parts).plan().items == (), "a fresh left-over is within the grace"
    report = collect_now(registry)
    assert len(report.done) == (0 if n_rows else 1)
    assert files_in(registry) == [".llam"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_restore_killed_while_it_holds_a_lease_blocks_nobody(registry, engine, saved):
    killed = run_child(registry, "restore", texts=["one"], die_at="leased")
    assert killed.returncode == child.KILLED, killed.stderr
    assert registry.get(saved.id).lease_until_us is not None
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_a_prune_killed_before_its_commit_marks_nothing_and_the_next_marks_all(registry, engine, saved):
    killed = run_child(registry, "prune", die_at="marked")
    assert killed.returncode == child.KILLED, killed.stderr
    assert registry.get(saved.id).status is Status.ACTIVE
    take_over_the_lease(registry)
    assert run_child(registry, "prune").stdout == "1"
    assert registry.get(saved.id).status is Status.STALE


@pytest.mark.parametrize(
    ("step", "n_rows", "n_files"), [("walked", 1, 1), ("rows deleted", 0, 1), ("file deleted", 0, 0)]
)
def test_a_gc_killed_at_any_step_is_finished_by_the_next(registry, engine, saved, step, n_rows, n_files):
    registry.remove(saved.id)
    killed = run_child(registry, "gc", die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert (len(registry.list()), len(files_in(registry))) == (n_rows, n_files)
    take_over_the_lease(registry)
    report = collect_now(registry)
    kinds = [item.kind for item, _ in report.done]
    assert kinds == {"walked": [GcKind.STALE], "rows deleted": [GcKind.ORPHAN], "file deleted": []}[step]
    assert (registry.list(), files_in(registry)) == ([], [])


def take_over_the_lease(registry):
    """As time would: the killed run's lease expires by the database's clock."""
    with registry.database.write() as db:
        db.exec_driver_sql("UPDATE registry_lease SET expires_us = 1")
