"""kill -9 after each step: what is on disk and in the database then, and what the next run does (docs/crash-safety.md)."""

from __future__ import annotations

import json
import subprocess

import pytest
from support import child, samples
from support.sample_engine import TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import collecting
from llama_ckpt.gc_values import GcKind
from llama_ckpt.integrity.verify import Verifier, all_ok
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, Status


def run_child(registry, verb, **order):
    # The password stays in the URL: nothing of it is secret in a test.
    url = registry.database.url.render_as_string(hide_password=False)
    line = child.command(verb=verb, database_url=url, store=str(registry.store.root), **order)
    return subprocess.run(line, env=child.environment(), capture_output=True, text=True, check=False, timeout=60)


def collect_now(registry):
    collector = Collector(registry.context)
    return collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))


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
    plan = Collector(registry.context).plan()
    if files == [".tmp"]:
        assert [item.reason for item in plan.items] == ["a write whose process is gone"]
    else:
        assert plan.items == (), "a fresh orphan is within the grace"
    report = collect_now(registry)
    assert len(report.done) == (0 if n_rows else 1)
    assert files_in(registry) == [".llam"]
    assert registry.restore(engine, "one").outcome is Outcome.HIT


ADOPTION_STEPS = [
    *(("copy", step) for step in ("created", "written", "staged", "renamed", "inserted", "committed")),
    *(("rewrite", step) for step in ("created", "head", "written", "staged", "renamed", "inserted", "committed")),
    *(("link", step) for step in ("renamed", "inserted", "committed")),
]


@pytest.mark.parametrize(("how", "step"), ADOPTION_STEPS)
def test_an_adoption_killed_at_any_step_leaves_no_row_without_a_whole_file(registry, tmp_path, how, step):
    path = tmp_path / "theirs"
    data = samples.data(samples.F16) if how == "rewrite" else checkpoint_bytes()
    path.write_bytes(data)
    killed = run_child(registry, "adopt", path=str(path), link=how == "link", die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert len(files_in(registry)) == 1
    assert len(registry.list()) == (1 if step == "committed" else 0)
    assert active_rows_are_whole(registry)
    again = run_child(registry, "adopt", path=str(path), link=how == "link")
    assert json.loads(again.stdout) == ["already registered" if step == "committed" else "adopted"], again.stderr
    collect_now(registry)
    assert files_in(registry) == [".llam"]
    assert path.read_bytes() == data


def test_a_restore_killed_while_it_holds_a_lease_blocks_nobody(registry, engine, saved):
    killed = run_child(registry, "restore", texts=["one"], die_at="leased")
    assert killed.returncode == child.KILLED, killed.stderr
    assert registry.get(saved.id).lease_until_us is not None
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


@pytest.mark.parametrize(
    ("step", "is_whole", "files"),
    [
        ("staged", False, [".llam", ".llam", ".tmp"]),
        ("renamed", False, [".llam"] * 3),
        ("named", False, [".llam"] * 3),
        ("flattened", True, [".llam"] * 3),
    ],
)
def test_a_flatten_killed_at_any_step_leaves_the_delta_or_a_whole_checkpoint(registry, step, is_whole, files):
    engine, story = TokenEngine(), list(range(100, 140))
    longer = [*story, *range(40)]
    for ids in (story, longer):
        engine.evaluate(ids)
        row = registry.save(engine, ids).checkpoint
    killed = run_child(registry, "flatten", id=row.id, die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert (registry.get(row.id).parent_no is None) == is_whole
    assert files_in(registry) == files
    assert registry.restore(TokenEngine(), longer).outcome is Outcome.HIT
    collector = Collector(registry.context)
    plan = collector.plan(Policy(ghost_grace_s=0), skip_grace=True, force=registry.registry_id)
    collector.run(plan)
    assert files_in(registry) == [".llam"] * 2
    assert registry.flatten(row.id).parent_no is None


def test_a_prune_killed_before_its_commit_marks_nothing_and_the_next_marks_all(registry, engine, saved):
    registry.save(engine, "the newest stays")
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
    kinds = [result.item.kind for result in report.done]
    assert kinds == {"walked": [GcKind.STALE], "rows deleted": [GcKind.ORPHAN], "file deleted": []}[step]
    assert (registry.list(), files_in(registry)) == ([], [])


def room(n):
    return n * (len(checkpoint_bytes()) + collecting.BLOCK_BYTES)


def claims_expire(registry):
    """As time would: a killed process's claim ends by the database's clock."""
    with registry.database.write() as db:
        db.exec_driver_sql("UPDATE save_claim SET expires_us = 1")


@pytest.mark.parametrize(
    ("step", "files"),
    [
        ("room promised", [".llam", ".llam"]),
        ("room made", [".llam"]),
        ("created", [".llam", ".tmp"]),
        ("renamed", [".llam", ".llam"]),
        ("inserted", [".llam", ".llam"]),
        ("committed", [".llam", ".llam"]),
    ],
)
def test_a_save_under_a_budget_that_is_killed_takes_its_room_until_its_claim_ends(registry, engine, saved, step, files):
    registry.save(engine, "two")
    killed = run_child(registry, "save", texts=["three"], max_bytes=room(2), die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert files_in(registry) == files
    assert active_rows_are_whole(registry)
    went = registry.get(saved.id)
    assert (went.status, went.file_size) == (Status.STALE, 0), "what makes room is the least recently used"
    claims_expire(registry)
    collect_now(registry)
    again = json.loads(run_child(registry, "save", texts=["three"], max_bytes=room(2)).stdout)
    assert again[0][0] == ("deduplicated" if step == "committed" else "saved")
    assert Verifier(registry.database, registry.store).findings() == []
    assert files_in(registry) == [".llam", ".llam"]
    assert [registry.restore(engine, text).outcome for text in ("two", "three")] == [Outcome.HIT] * 2


@pytest.mark.parametrize("step", ["room promised", "room made"])
def test_a_claim_of_a_killed_save_refuses_others_their_room_for_a_while_and_no_longer(registry, engine, saved, step):
    run_child(registry, "save", texts=["two"], max_bytes=room(1), die_at=step)
    order = {"texts": ["two"], "max_bytes": room(1)}
    assert json.loads(run_child(registry, "save", **order).stdout)[0][0] == "refused"
    claims_expire(registry)
    collect_now(registry)
    assert json.loads(run_child(registry, "save", **order).stdout)[0][0] == "saved"
    assert files_in(registry) == [".llam"]


@pytest.mark.parametrize(("step", "n_back"), [("checked", 0), ("reactivated", 1)])
def test_an_unprune_killed_at_any_step_leaves_back_what_is_back_and_the_next_does_the_rest(
    registry, engine, saved, step, n_back
):
    registry.remove(saved.id)
    registry.remove(registry.save(engine, "two").checkpoint.id)
    killed = run_child(registry, "unprune", die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert len(registry.list(status=Status.ACTIVE)) == n_back
    assert Verifier(registry.database, registry.store).findings() == []
    assert set(json.loads(run_child(registry, "unprune").stdout)) == {"ACTIVE"}
    assert [registry.restore(engine, text).outcome for text in ("one", "two")] == [Outcome.HIT] * 2


@pytest.mark.parametrize(
    ("step", "n_rows", "n_files"), [("rows condemned", 1, 1), ("files deleted", 1, 0), ("rows deleted", 0, 0)]
)
@pytest.mark.parametrize("by", ["purge", "gc"])
def test_a_purge_killed_at_any_step_is_finished_by_the_next_purge_or_gc(registry, engine, step, n_rows, n_files, by):
    registry.save(engine, "one", label="secret")
    killed = run_child(registry, "purge", label="secret", die_at=step)
    assert killed.returncode == child.KILLED, killed.stderr
    assert (len(registry.list()), len(files_in(registry))) == (n_rows, n_files)
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    assert Verifier(registry.database, registry.store).findings() == []
    take_over_the_lease(registry)
    if by == "purge":
        assert run_child(registry, "purge", label="secret").stdout == str(n_rows)
    else:
        collect_now(registry)
    assert (registry.list(), files_in(registry)) == ([], [])


def take_over_the_lease(registry):
    """As time would: the killed run's lease expires by the database's clock."""
    with registry.database.write() as db:
        db.exec_driver_sql("UPDATE registry_lease SET expires_us = 1")
