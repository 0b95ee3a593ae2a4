"""Unprune brings back what prune marked; repair marks what is lost and registers sound files again."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.sample_engine import TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import collecting, marks
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import StoreUnavailable
from llama_ckpt.formats import container
from llama_ckpt.gc_values import FindingKind
from llama_ckpt.integrity.reconcile import MendOutcome, Reconciler
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import path_of
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status


@pytest.fixture
def reconciler(registry):
    return Reconciler(registry.context)


def hooked(registry, **actions):
    """A reconciler that does something at a named step, once."""

    def hook(step):
        if action := actions.pop(step, None):
            action()

    return Reconciler(replace(registry.context, hook=hook))


def set_row(registry, row, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def mark(registry, row, reason):
    with registry.database.write() as db:
        assert marks.mark_stale(db, row, reason)
    return registry.get(row.id)


def results(mended):
    return [str(result) for result in mended]


def collect(registry):
    collector = Collector(registry.context)
    return collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))


def plant(registry, data=None, name="ab" * 16):
    """A file that no row names."""
    path = registry.store.root / path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint_bytes() if data is None else data)
    return path


def with_metadata(**changes):
    """The file of `checkpoint_bytes` with other metadata, its checks in order."""
    data = checkpoint_bytes()
    header, padding = container.read_header(memoryview(data), "x")
    contents = container.read_contents(memoryview(data), header, padding, "x")
    metadata = json.loads(json.dumps(dict(contents.metadata))) | changes
    head, _ = container.encode_head(header, metadata, contents.token_ids, contents.payload)
    return head + bytes(contents.payload)


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def repair(registry, reconciler):
    """What became of each finding, by kind."""
    return {
        done.finding.kind: str(done)
        for done in reconciler.apply(Verifier(registry.database, registry.store).findings())
    }


# -- unprune --------------------------------------------------------------------------------------------------------------


def test_what_prune_marked_comes_back_by_the_time_since_when(registry, engine, reconciler):
    rows = [registry.save(engine, text).checkpoint for text in ("one", "two", "the newest stays")]
    before = registry.clock_us()
    collector = Collector(registry.context)
    assert len(collector.prune(collector.plan_prune(Policy(max_age_s=-1)))) == 2
    set_row(registry, rows[0], stale_us=before - 3_600_000_000)
    found = reconciler.pruned_since(before - 1000)
    assert [row.id for row in found] == [rows[1].id]
    assert results(reconciler.unprune(found)) == ["ACTIVE"]
    assert [registry.restore(engine, text).outcome for text in ("one", "two")] == [Outcome.NO_MATCH, Outcome.HIT]
    assert [row.id for row in reconciler.pruned_since(0)] == [rows[0].id]


@pytest.mark.parametrize(
    "reason", [StaleReason.EVICTED, StaleReason.EXPIRED, StaleReason.REMOVED, StaleReason.SUPERSEDED]
)
def test_a_whole_checkpoint_comes_back_by_its_id_whatever_policy_took_it(registry, engine, saved, reconciler, reason):
    row = mark(registry, saved, reason)
    assert results(reconciler.unprune([row])) == ["ACTIVE"]
    back = registry.get(saved.id)
    assert (back.status, back.stale_reason, back.stale_us) == (Status.ACTIVE, None, None)
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_only_prune_and_expiry_are_undone_by_time(registry, engine, reconciler):
    for reason in StaleReason:
        mark(registry, registry.save(engine, reason.value).checkpoint, reason)
    assert {row.stale_reason for row in reconciler.pruned_since(0)} == {StaleReason.EVICTED, StaleReason.EXPIRED}


@pytest.mark.parametrize("reason", [StaleReason.CORRUPT, StaleReason.MISSING, StaleReason.INCOMPATIBLE])
def test_what_is_no_matter_of_policy_does_not_come_back(registry, engine, saved, reconciler, reason):
    row = mark(registry, saved, reason)
    assert results(reconciler.unprune([row])) == [f"it is {reason}: that is no matter of policy"]
    assert registry.get(saved.id) == row


def test_a_checkpoint_whose_file_is_damaged_stays_stale_and_the_check_says_why(registry, engine, saved, reconciler):
    registry.remove(saved.id)
    damage(registry.store.root / saved.file_path)
    assert results(reconciler.unprune([registry.get(saved.id)]))[0].startswith("CRC32 FAILED: ")
    assert registry.get(saved.id).status is Status.STALE


def test_a_checkpoint_whose_file_is_freed_stays_stale(registry, engine, saved, reconciler):
    registry.remove(saved.id)
    (registry.store.root / saved.file_path).unlink()
    assert results(reconciler.unprune([registry.get(saved.id)])) == ["its file is freed already"]
    set_row(registry, saved, file_size=0)
    assert results(reconciler.unprune([registry.get(saved.id)])) == ["its file is freed already"]
    assert registry.get(saved.id).status is Status.STALE


def test_an_active_checkpoint_is_said_to_be_so(registry, saved, reconciler):
    assert results(reconciler.unprune([saved])) == ["it is ACTIVE"]


def test_where_the_input_was_saved_again_the_newer_checkpoint_stays(registry, engine, saved, reconciler):
    row = mark(registry, saved, StaleReason.EVICTED)
    newer = registry.save(engine, "one").checkpoint
    assert results(reconciler.unprune([row])) == ["another checkpoint of the same input is ACTIVE"]
    assert registry.restore(engine, "one").checkpoint.id == newer.id
    assert registry.get(saved.id) == row


def test_a_newer_checkpoint_whose_time_is_over_is_in_nobodys_way(registry, engine, saved, reconciler):
    row = mark(registry, saved, StaleReason.EVICTED)
    newer = registry.save(engine, "one", expires_in_s=60).checkpoint
    set_row(registry, newer, expires_us=1)
    assert results(reconciler.unprune([row])) == ["ACTIVE"]
    assert registry.get(newer.id).stale_reason is StaleReason.EXPIRED
    assert registry.restore(engine, "one").checkpoint.id == saved.id


def test_an_expired_checkpoint_comes_back_without_its_expiry(registry, engine, reconciler):
    row = registry.save(engine, "one", expires_in_s=60).checkpoint
    set_row(registry, row, expires_us=1)
    collector = Collector(registry.context)
    collector.prune(collector.plan_prune(Policy()))
    assert registry.get(row.id).stale_reason is StaleReason.EXPIRED
    assert results(reconciler.unprune([registry.get(row.id)])) == ["ACTIVE"]
    assert registry.get(row.id).expires_us is None
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_delta_comes_back_after_what_it_needs_and_not_without_it(registry, reconciler):
    engine, story = TokenEngine(), list(range(100, 140))
    saved = []
    for ids in (story, [*story, 7]):
        engine.evaluate(ids)
        saved.append(registry.save(engine, ids).checkpoint)
    assert saved[1].parent_no == saved[0].ckpt_no
    mark(registry, saved[0], StaleReason.EVICTED)
    parent, child = (registry.get(row.id) for row in saved)
    assert child.status is Status.STALE
    assert results(reconciler.unprune([child])) == [
        "it was collected meanwhile, or the checkpoint that it is a delta of is not ACTIVE"
    ]
    assert [(done.checkpoint.id, done.outcome) for done in reconciler.unprune([child, parent])] == [
        (parent.id, MendOutcome.REACTIVATED),
        (child.id, MendOutcome.REACTIVATED),
    ]


def test_a_checkpoint_that_gc_takes_after_the_check_does_not_come_back(registry, engine, saved, collector_of_all):
    row = mark(registry, saved, StaleReason.EVICTED)
    reconciler = hooked(registry, checked=collector_of_all)
    assert results(reconciler.unprune([row]))[0].startswith("it was collected meanwhile")
    assert registry.list() == []


@pytest.fixture
def collector_of_all(registry):
    return lambda: collect(registry)


@pytest.mark.parametrize(("step", "n_back"), [("checked", 0), ("reactivated", 1)])
def test_an_unprune_that_is_interrupted_leaves_whole_what_is_back_and_can_be_run_again(
    registry, engine, reconciler, step, n_back
):
    def stop():
        raise KeyboardInterrupt

    rows = [mark(registry, registry.save(engine, t).checkpoint, StaleReason.EVICTED) for t in ("one", "two")]
    with pytest.raises(KeyboardInterrupt):
        hooked(registry, **{step: stop}).unprune(rows)
    assert len(registry.list(status=Status.ACTIVE)) == n_back
    assert results(
        reconciler.unprune([registry.get(row.id) for row in rows if registry.get(row.id).status is Status.STALE])
    )
    assert [registry.restore(engine, text).outcome for text in ("one", "two")] == [Outcome.HIT] * 2


def test_of_a_store_that_is_not_mounted_nothing_is_said(registry, saved, reconciler, tmp_path):
    registry.remove(saved.id)
    registry.store.root.rename(tmp_path / "unmounted")
    registry.store.root.mkdir()
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        reconciler.unprune([registry.get(saved.id)])
    registry.store.root.rmdir()
    (tmp_path / "unmounted").rename(registry.store.root)
    assert results(reconciler.unprune([registry.get(saved.id)])) == ["ACTIVE"]


def test_a_row_whose_path_leads_elsewhere_stays_stale_and_stops_no_other(registry, engine, saved, reconciler):
    other = mark(registry, registry.save(engine, "other").checkpoint, StaleReason.EVICTED)
    row = mark(registry, saved, StaleReason.EVICTED)
    set_row(registry, saved, file_path="../victim")
    said = results(reconciler.unprune([registry.get(row.id), other]))
    assert "not a path that this store gives" in said[0]
    assert said[1] == "ACTIVE"
    set_row(registry, saved, file_path=row.file_path)


# -- repair ---------------------------------------------------------------------------------------------------------------


def test_a_sound_file_without_a_row_is_registered_again_and_restored(registry, engine, saved, reconciler):
    with registry.database.write() as db:
        db.execute(sa.delete(meta))
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    assert repair(registry, reconciler) == {FindingKind.ORPHAN: "registered again"}
    back = registry.restore(engine, "one")
    assert (back.outcome, back.checkpoint.id, back.checkpoint.model_name) == (Outcome.HIT, saved.id, "sample")
    assert back.checkpoint.file_size == saved.file_size
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_a_store_whose_database_was_lost_is_registered_again_whole(registry, engine, tmp_path):
    for text in ("one", "two"):
        registry.save(engine, text)
    (registry.store.root / MARKER).unlink()  # as the refusal of the new registry says
    url = f"sqlite:///{tmp_path / 'new.sqlite3'}"
    with Registry.open(url, registry.store.root) as new:
        mended = Reconciler(new.context).apply(Verifier(new.database, new.store).findings())
        assert results(mended) == ["registered again"] * 2
        assert [new.restore(engine, text).outcome for text in ("one", "two")] == [Outcome.HIT] * 2
        assert new.save(engine, "three").outcome is SaveOutcome.SAVED
        assert Verifier(new.database, new.store).findings() == []
    with registry.database.write() as db:
        db.execute(sa.delete(meta))
    (registry.store.root / MARKER).unlink()
    for path in registry.store.root.rglob("*.llam"):
        path.unlink()


@pytest.fixture
def chain(registry):
    """An engine; and a checkpoint, a delta on it and a delta on that one, each with its token ids."""
    engine, made = TokenEngine(), []
    for n_tokens in (40, 80, 120):
        ids = list(range(100, 100 + n_tokens))
        engine.evaluate(ids)
        made.append((registry.save(engine, ids).checkpoint, ids))
    assert [row.start_token for row, _ in made] == [0, 40, 80]
    return engine, made


def test_deltas_whose_rows_were_lost_come_back_after_what_they_stand_on(registry, reconciler, chain):
    engine, made = chain
    with registry.database.write() as db:
        for row, _ in reversed(made):
            db.execute(sa.delete(meta).where(meta.c.id == row.id))
    by_path = {f.path: f for f in Verifier(registry.database, registry.store).findings()}
    longest_first = [by_path[row.file_path] for row, _ in reversed(made)]
    mended = reconciler.apply(longest_first)
    assert [(done.finding.path, done.outcome) for done in mended] == [
        (row.file_path, MendOutcome.REGISTERED) for row, _ in made
    ]
    assert {row.id for row in registry.list()} == {row.id for row, _ in made}
    for row, ids in made:
        engine.evaluate([1])
        back = registry.restore(engine, ids)
        assert (back.outcome, back.checkpoint.id) == (Outcome.HIT, row.id)
        assert (back.checkpoint.tokens_hash, back.checkpoint.start_token) == (row.tokens_hash, row.start_token)
    assert Verifier(registry.database, registry.store).findings() == []


def test_what_stands_on_a_flattened_delta_comes_back_too(registry, reconciler, chain):
    engine, made = chain
    (_, _), (middle, _), (last, ids) = made
    registry.flatten(middle.id)
    with registry.database.write() as db:
        for row, _ in reversed(made):
            db.execute(sa.delete(meta).where(meta.c.id == row.id))
    assert set(results(reconciler.apply(Verifier(registry.database, registry.store).findings()))) == {
        "registered again"
    }
    assert registry.get(middle.id).parent_no is None
    engine.evaluate([1])
    assert registry.restore(engine, ids).checkpoint.id == last.id


def test_a_delta_whose_parent_has_other_tokens_by_now_is_left_for_gc(registry, reconciler, chain):
    _, ((root, _), (middle, _), (last, _)) = chain
    with registry.database.write() as db:
        db.execute(sa.delete(meta).where(meta.c.id == last.id))
        db.execute(sa.update(meta).where(meta.c.id == root.id).values(id="0" * 32))
        db.execute(sa.update(meta).where(meta.c.id == middle.id).values(id=root.id))
        db.execute(sa.update(meta).where(meta.c.id == "0" * 32).values(id=middle.id))
    said = repair(registry, reconciler)[FindingKind.ORPHAN]
    assert said.startswith("left for gc: ")
    with registry.database.write() as db:  # as it was
        db.execute(sa.update(meta).where(meta.c.id == middle.id).values(id="0" * 32))
        db.execute(sa.update(meta).where(meta.c.id == root.id).values(id=middle.id))
        db.execute(sa.update(meta).where(meta.c.id == "0" * 32).values(id=root.id))
    assert repair(registry, reconciler) == {FindingKind.ORPHAN: "registered again"}


def test_a_delta_without_what_it_stands_on_is_left_for_gc_and_says_what_it_lacks(registry, reconciler, chain):
    _, ((root, _), (middle, _), (last, _)) = chain
    with registry.database.write() as db:
        for row in (last, middle):
            db.execute(sa.delete(meta).where(meta.c.id == row.id))
    (registry.store.root / middle.file_path).unlink()
    said = repair(registry, reconciler)[FindingKind.ORPHAN]
    assert said.startswith(f"left for gc: no ACTIVE checkpoint '{middle.id}'. {last.file_path} is a delta")
    assert [row.id for row in registry.list()] == [root.id]
    collect(registry)


def test_a_damaged_file_without_a_row_is_left_for_gc(registry, saved, reconciler):
    damage(plant(registry))
    said = repair(registry, reconciler)[FindingKind.ORPHAN]
    assert said.startswith("left for gc: ")
    assert "CRC32 FAILED" in said
    assert len(registry.list()) == 1
    assert [str(r) for r in collect(registry).done] == ["deleted"]


def test_a_file_of_no_known_kind_of_memory_is_left_for_gc(registry, saved, reconciler):
    plant(registry, with_metadata(memory_kind="holographic"))
    assert "no kind of memory known here: holographic" in repair(registry, reconciler)[FindingKind.ORPHAN]
    collect(registry)


def test_a_models_name_that_no_database_can_hold_is_made_fit(registry, engine, saved, reconciler):
    plant(registry, with_metadata(model_name="nul \0 and more" + "x" * 300))
    assert repair(registry, reconciler) == {FindingKind.ORPHAN: "registered again"}
    assert registry.get("ab" * 16).model_name == ("nul ? and more" + "x" * 300)[:200]
    assert registry.restore(engine, "found without a row").outcome is Outcome.HIT


def test_a_file_whose_input_has_an_active_checkpoint_is_left_for_gc(registry, engine, saved, reconciler):
    path = plant(registry, (registry.store.root / saved.file_path).read_bytes())
    assert repair(registry, reconciler) == {
        FindingKind.ORPHAN: "left for gc: another checkpoint of the same input is ACTIVE"
    }
    assert [row.id for row in registry.list()] == [saved.id]
    collect(registry)
    assert not path.exists()


def test_a_file_that_gc_takes_while_it_is_registered_gets_no_row(registry, saved):
    path = plant(registry)
    findings = Verifier(registry.database, registry.store).findings()
    (said,) = results(hooked(registry, checked=path.unlink).apply(findings))
    assert said.startswith("not registered: ")
    assert [row.id for row in registry.list()] == [saved.id]


def test_a_file_that_gc_would_take_is_counted_once_when_it_has_a_row(registry, saved, reconciler):
    path = plant(registry)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    collector = Collector(registry.context)
    collector.run(collector.plan())
    assert repair(registry, reconciler) == {FindingKind.ORPHAN: "registered again"}
    with registry.database.read() as db:
        assert collecting.used_bytes(db) == 2 * (saved.file_size + collecting.BLOCK_BYTES)


@pytest.mark.parametrize(("what", "reason"), [("missing", StaleReason.MISSING), ("corrupt", StaleReason.CORRUPT)])
def test_rows_of_missing_and_damaged_files_are_marked_and_a_save_writes_them_anew(
    registry, engine, saved, reconciler, what, reason
):
    path = registry.store.root / saved.file_path
    if what == "missing":
        path.unlink()
    else:
        damage(path)
    assert repair(registry, reconciler) == {FindingKind(what): "marked STALE"}
    assert registry.get(saved.id).stale_reason is reason
    assert registry.match("one").outcome is Outcome.NO_MATCH
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_row_that_went_since_it_was_found_is_said_to_have_gone(registry, engine, saved, reconciler):
    damage(registry.store.root / saved.file_path)
    findings = Verifier(registry.database, registry.store).findings()
    registry.remove(saved.id)
    assert results(reconciler.apply(findings)) == ["its row went meanwhile"]
    assert registry.get(saved.id).stale_reason is StaleReason.REMOVED


def test_temporaries_are_left_for_gc_and_foreign_things_alone(registry, saved, reconciler, left_in_store):
    plant(registry).rename(registry.store.root / path_of("ab" * 16).replace(".llam", ".tmp"))
    (registry.store.root / "ab/ab/notes.txt").write_text("mine")
    assert repair(registry, reconciler) == {FindingKind.TEMPORARY: "left for gc", FindingKind.FOREIGN: "left alone"}
    left_in_store.update({"temporary", "foreign"})


def test_from_a_store_that_is_not_mounted_no_row_is_taken_for_lost(registry, engine, saved, reconciler, tmp_path):
    registry.store.root.rename(tmp_path / "unmounted")
    registry.store.root.mkdir()
    findings = Verifier(registry.database, registry.store).findings()
    assert [f.kind for f in findings] == [FindingKind.MISSING]
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        reconciler.apply(findings)
    registry.store.root.rmdir()
    (tmp_path / "unmounted").rename(registry.store.root)
    assert registry.restore(engine, "one").outcome is Outcome.HIT
