"""Deltas: only cells that are not stored yet are written; what is read back is byte for byte what the engine held."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from support.links import wrong_links
from support.sample_engine import TokenEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import rows
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.db.tables import registry_info
from llama_ckpt.errors import BadInput, CommitOutcomeUnknown, Conflict, StoreFull
from llama_ckpt.gc_values import GcKind
from llama_ckpt.integrity.reconcile import MendOutcome, Reconciler
from llama_ckpt.integrity.verify import Verifier, all_ok
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Order, Policy
from llama_ckpt.values import MatchResult, Outcome, SaveOutcome, StaleReason, Status

STORY = list(range(100, 140))
PARTING = [*STORY[:30], *range(900, 920)]


@pytest.fixture
def engine():
    return TokenEngine()


@pytest.fixture
def blocks_of_four(database_url, registry):
    """The registry with short blocks, so that short inputs have many links; checked at the end of each test."""
    with registry.database.write() as db:
        db.execute(sa.insert(registry_info).values(name="block_size", value="4"))
    with Registry.open(database_url, registry.store.root) as short:
        yield short
        assert wrong_links(short) == []


@pytest.fixture
def save(blocks_of_four, engine):
    """Evaluates and saves token ids; gives the result."""

    def evaluate_and_save(ids, changed_cells=(), **options):
        engine.evaluate(ids)
        engine.state = changed(engine.state, len(ids), changed_cells)
        return blocks_of_four.save(engine, list(ids), **options)

    return evaluate_and_save


def changed(state, n_cells, cells):
    """A state of which some cells have another number in the last layer's V."""
    made = bytearray(state)
    for cell in cells:
        made[len(made) - 1 - (n_cells - 1 - cell) * 384] ^= 1  # f16 rows of 192 values, by cell
    return bytes(made)


def restored(registry, engine, ids):
    """What a restore brings; the engine refuses a state that is not byte for byte its own."""
    engine.evaluate(ids)
    whole, engine.held = engine.state, engine.held[:0]
    result = registry.restore(engine, list(ids))
    assert engine.state == whole
    return result


def path(registry, row):
    return registry.store.root / row.file_path


# -- what is written -------------------------------------------------------------------------------------------------------


def test_a_continuation_writes_its_own_cells_only_and_restores_whole(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    longer = save([*STORY, 7, 8, 9])
    row = longer.checkpoint
    assert (row.parent_no, row.start_token, row.n_tokens) == (story.ckpt_no, 40, 43)
    assert longer.bytes_written == path(blocks_of_four, row).stat().st_size < story.file_size / 4
    back = restored(blocks_of_four, engine, [*STORY, 7, 8, 9])
    assert (back.outcome, back.n_restored, back.checkpoint.id) == (Outcome.HIT, 42, row.id)


def test_an_input_that_parts_from_a_stored_one_starts_inside_it(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    row = save(PARTING).checkpoint
    assert (row.parent_no, row.start_token) == (story.ckpt_no, 30)
    assert restored(blocks_of_four, engine, PARTING).outcome is Outcome.HIT


def test_cells_that_are_not_bit_for_bit_the_same_are_the_deltas_own(blocks_of_four, engine, save):
    save(STORY)
    row = save([*STORY, 7], changed_cells=[20]).checkpoint
    assert row.start_token == 20


def test_a_state_of_which_hardly_a_cell_is_the_same_is_written_full(save):
    save(STORY)
    assert save([*STORY, 7], changed_cells=[3]).checkpoint.parent_no is None


def test_a_delta_that_would_spare_less_than_a_quarter_is_written_full(save):
    save(STORY[:16])
    assert save([*STORY[:16], *range(500, 549)]).checkpoint.parent_no is None
    assert save([*STORY[:16], *range(600, 648)]).checkpoint.parent_no is not None


def test_fewer_shared_tokens_than_are_worth_a_match_are_written_full(save):
    save(STORY[:15])
    assert save(STORY[:20]).checkpoint.parent_no is None


def test_states_of_another_model_or_layout_share_nothing(blocks_of_four, save):
    save(STORY)
    other = TokenEngine(weights="cd" * 32)
    other.evaluate([*STORY, 7])
    assert blocks_of_four.save(other, [*STORY, 7]).checkpoint.parent_no is None


def test_a_registry_without_deltas_writes_every_state_full(registry, engine):
    full = Registry(replace(registry.context, delta_depth=0))
    for ids in (STORY, [*STORY, 7]):
        engine.evaluate(ids)
        assert full.save(engine, ids).checkpoint.parent_no is None


# -- inputs without a file ---------------------------------------------------------------------------------------------------


def test_an_input_that_a_longer_checkpoint_begins_with_takes_no_bytes(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    short = save(STORY[:25])
    row = short.checkpoint
    assert (short.outcome, short.bytes_written, row.file_size) == (SaveOutcome.SAVED, 0, 0)
    assert (row.parent_no, row.start_token, row.n_tokens) == (story.ckpt_no, 25, 25)
    assert len(list(blocks_of_four.store.root.rglob("*.llam"))) == 1
    assert save(STORY[:25]).outcome is SaveOutcome.DEDUPLICATED
    back = restored(blocks_of_four, engine, STORY[:25])
    assert (back.outcome, back.n_restored, back.checkpoint.id) == (Outcome.HIT, 24, row.id)


def test_a_row_without_a_file_is_verified_pruned_collected_and_brought_back(blocks_of_four, save):
    save(STORY)
    row = save(STORY[:25]).checkpoint
    assert all_ok(Verifier(blocks_of_four.database, blocks_of_four.store).checkpoint(row))
    collector = Collector(blocks_of_four.context)
    assert collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True).items == ()
    blocks_of_four.remove(row.id)
    assert (
        Reconciler(blocks_of_four.context).unprune([blocks_of_four.get(row.id)])[0].outcome is MendOutcome.REACTIVATED
    )
    blocks_of_four.remove(row.id)
    report = collector.run(collector.plan(Policy(stale_grace_s=0)))
    assert ([str(result) for result in report.done], report.freed_bytes) == (["deleted"], 0)


# -- chains ----------------------------------------------------------------------------------------------------------------------


def test_a_conversation_of_many_turns_restores_at_each_and_no_chain_is_longer_than_eight(blocks_of_four, engine, save):
    turns = [[*STORY, *range(1000, 1000 + 2 * n)] for n in range(12)]
    saved = [save(turn).checkpoint for turn in turns]
    with blocks_of_four.database.read() as db:
        depths = [len(rows.ancestors(db, row)) for row in saved]
    assert depths == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert all(restored(blocks_of_four, engine, turn).outcome is Outcome.HIT for turn in turns)


def test_what_starts_below_a_deltas_own_cells_stands_on_its_parent(save):
    story = save(STORY).checkpoint
    save([*STORY, *range(1000, 1010)])
    row = save([*STORY[:35], *range(2000, 2010)]).checkpoint
    assert (row.parent_no, row.start_token) == (story.ckpt_no, 35)


def test_a_longer_and_a_shorter_input_are_served_from_a_delta(blocks_of_four, engine, save):
    save(STORY)
    delta = save([*STORY, *range(1000, 1010)]).checkpoint
    engine.evaluate([1])
    back = blocks_of_four.restore(engine, [*STORY, *range(1000, 1010), 5, 6])
    assert engine.held.tolist() == [*STORY, *range(1000, 1010)]
    assert (back.outcome, back.n_restored, back.n_evaluated, back.checkpoint.id) == (Outcome.HIT, 50, 0, delta.id)
    back = restored(blocks_of_four, engine, [*STORY, *range(1000, 1005)])
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, 44, 1)


# -- time ------------------------------------------------------------------------------------------------------------------


def expire(registry, row):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(expires_us=1))


def test_an_input_whose_time_is_over_is_renewed_where_deltas_stand_on_it(blocks_of_four, engine, save):
    story = save(STORY, expires_in_s=60).checkpoint
    delta = save([*STORY, 7, 8]).checkpoint
    expire(blocks_of_four, story)
    again = save(STORY, expires_in_s=3600)
    assert (again.outcome, again.checkpoint.id, again.bytes_written) == (SaveOutcome.DEDUPLICATED, story.id, 0)
    assert again.checkpoint.expires_us > story.expires_us
    assert restored(blocks_of_four, engine, STORY).checkpoint.id == story.id
    assert restored(blocks_of_four, engine, [*STORY, 7, 8]).checkpoint.id == delta.id
    expire(blocks_of_four, story)
    assert save(STORY).checkpoint.expires_us is None


def test_an_input_whose_time_is_over_is_saved_anew_where_nothing_stands_on_it(blocks_of_four, save):
    story = save(STORY, expires_in_s=60).checkpoint
    expire(blocks_of_four, story)
    again = save(STORY)
    assert (again.outcome, again.checkpoint.id != story.id) == (SaveOutcome.SAVED, True)
    assert blocks_of_four.get(story.id).stale_reason is StaleReason.EXPIRED


def test_an_input_whose_time_is_over_and_whose_file_is_damaged_is_saved_anew(blocks_of_four, engine, save):
    story = save(STORY, expires_in_s=60).checkpoint
    delta = save([*STORY, 7, 8]).checkpoint
    expire(blocks_of_four, story)
    with path(blocks_of_four, story).open("r+b") as file:
        file.truncate(4096)
    assert save(STORY).outcome is SaveOutcome.SAVED
    assert blocks_of_four.get(delta.id).stale_reason is StaleReason.CORRUPT
    assert restored(blocks_of_four, engine, STORY).outcome is Outcome.HIT


# -- removing, pruning, flattening -----------------------------------------------------------------------------------------------


def test_a_parent_stays_while_a_delta_needs_it_until_that_is_flattened(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7, 8]).checkpoint
    with pytest.raises(BadInput, match="llama-ckpt flatten"):
        blocks_of_four.remove(story.id)
    whole = blocks_of_four.flatten(delta.id)
    assert (whole.id, whole.parent_no, whole.start_token) == (delta.id, None, 0)
    assert not path(blocks_of_four, delta).exists()
    blocks_of_four.remove(story.id)
    back = restored(blocks_of_four, engine, [*STORY, 7, 8])
    assert (back.outcome, back.checkpoint.id) == (Outcome.HIT, delta.id)
    assert blocks_of_four.flatten(delta.id) == blocks_of_four.get(delta.id)


def test_gc_marks_what_lost_its_file_though_pinned_and_needed_and_the_deltas_on_it(blocks_of_four, save):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7, 8]).checkpoint
    blocks_of_four.pin(story.id)
    path(blocks_of_four, story).unlink()
    collector = Collector(blocks_of_four.context)
    assert [(result.item.kind, str(result)) for result in collector.run(collector.plan()).done] == [
        (GcKind.MISSING, "marked")
    ]
    for row in (story, delta):
        now = blocks_of_four.get(row.id)
        assert (now.status, now.stale_reason) == (Status.STALE, StaleReason.MISSING)
    assert collector.plan().items == ()


def test_a_row_without_a_file_and_one_in_the_middle_of_a_chain_can_be_flattened(blocks_of_four, engine, save):
    save(STORY)
    middle = save([*STORY, *range(1000, 1010)]).checkpoint
    last = save([*STORY, *range(1000, 1010), 5]).checkpoint
    covered = save(STORY[:25]).checkpoint
    for row in (covered, middle):
        blocks_of_four.flatten(row.id)
    assert blocks_of_four.get(last.id).parent_no == middle.ckpt_no
    for ids in (STORY[:25], [*STORY, *range(1000, 1010)], [*STORY, *range(1000, 1010), 5]):
        assert restored(blocks_of_four, engine, ids).outcome is Outcome.HIT


def test_a_stale_delta_is_not_flattened(blocks_of_four, save):
    save(STORY)
    delta = save([*STORY, 7]).checkpoint
    blocks_of_four.remove(delta.id)
    with pytest.raises(BadInput, match="it is STALE"):
        blocks_of_four.flatten(delta.id)


def test_a_flatten_beyond_the_budget_is_refused_and_leaves_the_delta(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7]).checkpoint
    tight = replace(blocks_of_four.context, policy=Policy(max_bytes=story.file_size + delta.file_size + 3 * 4096))
    with pytest.raises(StoreFull, match="max_bytes"):
        Registry(tight).flatten(delta.id)
    assert blocks_of_four.get(delta.id) == delta
    assert restored(blocks_of_four, engine, [*STORY, 7]).outcome is Outcome.HIT


def test_a_flatten_makes_no_room_by_what_it_flattens(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7]).checkpoint
    policy = Policy(max_bytes=story.file_size + delta.file_size + 3 * 4096, order=Order.LRU)
    with pytest.raises(StoreFull, match="max_bytes"):
        Registry(replace(blocks_of_four.context, policy=policy)).flatten(delta.id)
    assert restored(blocks_of_four, engine, [*STORY, 7]).checkpoint.id == delta.id


@pytest.mark.parametrize("kept", [True, False], ids=["committed", "not committed"])
def test_a_flatten_whose_commit_got_no_answer_keeps_the_file_that_the_row_names(
    blocks_of_four, engine, save, monkeypatch, kept, left_in_store
):
    save(STORY)
    delta = save([*STORY, 7]).checkpoint
    real, named = Database.write, []

    @contextlib.contextmanager
    def unanswered(self):
        with contextlib.ExitStack() as stack:
            db = stack.enter_context(real(self))
            yield db
            if named and not kept:
                db.rollback()
            if not named:
                return
        named.clear()
        raise CommitOutcomeUnknown(url="", reason="lost")

    context = replace(blocks_of_four.context, hook=lambda step: named.append(step) if step == "named" else None)
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", unanswered)
        if kept:
            assert Registry(context).flatten(delta.id).parent_no is None
        else:
            with pytest.raises(CommitOutcomeUnknown):
                Registry(context).flatten(delta.id)
            left_in_store.add("orphan")
    assert restored(blocks_of_four, engine, [*STORY, 7]).checkpoint.id == delta.id


def test_who_goes_stale_while_it_is_flattened_leaves_no_file_behind(blocks_of_four, save):
    save(STORY)
    delta = save([*STORY, 7]).checkpoint
    seen = []

    def hook(step):
        if step == "renamed":
            seen.append(blocks_of_four.remove(delta.id))

    blocks_of_four.store._hook = hook
    try:
        with pytest.raises(Conflict, match="went STALE or was flattened"):
            blocks_of_four.flatten(delta.id)
    finally:
        blocks_of_four.store._hook = lambda _step: None
    assert len(seen) == 1
    assert len(list(blocks_of_four.store.root.rglob("*.llam"))) == 2


def test_a_reader_that_finds_a_flattened_deltas_old_file_gone_marks_nothing(blocks_of_four, engine, save):
    save(STORY)
    delta = save([*STORY, 7]).checkpoint

    def hook(step):
        if step == "leased":
            blocks_of_four.flatten(delta.id)

    reader = Registry(replace(blocks_of_four.context, hook=hook))
    engine.held = engine.held[:0]
    back = reader.restore(engine, [*STORY, 7])
    assert (back.outcome, back.n_restored) == (Outcome.HIT, len(STORY)), "from the next best one"
    assert blocks_of_four.get(delta.id).status is Status.ACTIVE
    assert restored(blocks_of_four, engine, [*STORY, 7]).outcome is Outcome.HIT


def test_prune_takes_deltas_before_what_they_stand_on(blocks_of_four, save):
    save(STORY)
    for n in range(3):
        save([*STORY, n, n])
    save([7] * 20)  # the newest stays
    collector = Collector(blocks_of_four.context)
    for left in (4, 3, 2, 1):
        assert len(collector.prune(collector.plan_prune(Policy(max_count=left)))) == 1
        assert collector.run(collector.plan(Policy(stale_grace_s=0))).n_failed == 0
    assert [row.parent_no for row in blocks_of_four.list(status=Status.ACTIVE)] == [None]


def test_a_purge_of_a_parents_input_takes_the_deltas_that_need_it(blocks_of_four, save):
    story = save(STORY).checkpoint
    save([*STORY, 7])
    report = Purger(blocks_of_four.context).run(Purge(input_hash=story.input_hash))
    assert (report.n_rows, report.n_files, blocks_of_four.list()) == (2, 2, [])


# -- damage ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_a_bad_parent_takes_its_deltas_along_and_the_next_save_writes_in_full(blocks_of_four, engine, save, harm):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7]).checkpoint
    file = path(blocks_of_four, story)
    if harm == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    assert restored(blocks_of_four, engine, [*STORY, 7]).outcome is Outcome.NO_MATCH
    reason = StaleReason.MISSING if harm == "gone" else StaleReason.CORRUPT
    rows = [blocks_of_four.get(row.id) for row in (story, delta)]
    assert [(row.status, row.stale_reason) for row in rows] == [(Status.STALE, reason)] * 2
    assert save([*STORY, 7]).checkpoint.parent_no is None
    assert restored(blocks_of_four, engine, [*STORY, 7]).outcome is Outcome.HIT


def test_a_restore_whose_best_checkpoint_is_damaged_takes_the_next_best(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    longer = save([*STORY, 7, 8]).checkpoint
    data = bytearray(path(blocks_of_four, longer).read_bytes())
    data[-5] ^= 1
    path(blocks_of_four, longer).write_bytes(data)
    engine.evaluate([1])
    back = blocks_of_four.restore(engine, [*STORY, 7, 8, 9])
    assert (back.outcome, back.checkpoint.id, back.n_restored) == (Outcome.HIT, story.id, 40)
    assert blocks_of_four.get(longer.id).stale_reason is StaleReason.CORRUPT


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_a_save_that_finds_its_base_bad_writes_in_full(blocks_of_four, save, harm):
    story = save(STORY).checkpoint
    file = path(blocks_of_four, story)
    if harm == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    assert save([*STORY, 7]).checkpoint.parent_no is None
    assert blocks_of_four.get(story.id).status is Status.STALE


def test_a_deduplicated_save_of_a_delta_looks_at_all_the_files_it_needs(blocks_of_four, save):
    story = save(STORY).checkpoint
    delta = save([*STORY, 7]).checkpoint
    assert save([*STORY, 7]).outcome is SaveOutcome.DEDUPLICATED
    path(blocks_of_four, story).unlink()
    again = save([*STORY, 7])
    assert (again.outcome, again.checkpoint.parent_no) == (SaveOutcome.SAVED, None)
    assert blocks_of_four.get(delta.id).stale_reason is StaleReason.MISSING


def test_a_base_that_goes_while_the_delta_is_written_makes_it_full(blocks_of_four, engine, save):
    story = save(STORY).checkpoint
    store = blocks_of_four.store
    gone = []

    def hook(step):
        if step == "renamed" and not gone:
            gone.append(blocks_of_four.remove(story.id))

    store._hook = hook
    try:
        row = save([*STORY, 7]).checkpoint
    finally:
        store._hook = lambda _step: None
    assert (len(gone), row.parent_no, row.start_token) == (1, None, 0)
    assert len(list(store.root.rglob("*.llam"))) == 2  # the story's, which gc takes, and the one that is whole
    assert restored(blocks_of_four, engine, [*STORY, 7]).outcome is Outcome.HIT


def test_a_deltas_file_alone_is_verified_as_far_as_it_goes(blocks_of_four, save):
    save(STORY)
    delta = save([*STORY, 7]).checkpoint
    verifier = Verifier(blocks_of_four.database, blocks_of_four.store)
    assert all_ok(verifier.checkpoint(delta))
    data = bytearray(path(blocks_of_four, delta).read_bytes())
    data[-1] ^= 1
    path(blocks_of_four, delta).write_bytes(data)
    assert not all_ok(verifier.checkpoint(delta))
    blocks_of_four.report_bad(delta.id)


def test_a_budget_never_evicts_what_the_newcomer_stands_on(blocks_of_four, engine, save):
    story = save(STORY, prefill_ms=1).checkpoint
    tight = Registry(replace(blocks_of_four.context, policy=Policy(max_bytes=2 * story.file_size)))
    engine.evaluate([*STORY, 7])
    saved = tight.save(engine, [*STORY, 7], prefill_ms=10)
    assert (saved.outcome, saved.checkpoint.parent_no) == (SaveOutcome.SAVED, story.ckpt_no)
    assert blocks_of_four.get(story.id).status is Status.ACTIVE


def test_every_turn_of_two_branching_talks_matches_and_restores_what_the_engine_held(blocks_of_four, engine, save):
    talks = [[*STORY[:20], *(word for _ in range(n)), *range(n)] for word in (501, 502) for n in range(1, 9)]
    for talk in talks:
        save(talk)
    for talk in itertools.chain(talks, reversed(talks)):
        found: MatchResult = blocks_of_four.match(talk, fingerprint=engine.fingerprint)
        assert (found.outcome, found.n_matching) == (Outcome.HIT, len(talk))
        assert restored(blocks_of_four, engine, talk).n_restored == len(talk) - 1
    stored = sum(row.n_tokens - row.start_token for row in blocks_of_four.list())
    distinct = len({tuple(talk[:n]) for talk in talks for n in range(1, len(talk) + 1)})
    assert stored == distinct
    assert np.all([row.file_size > 0 for row in blocks_of_four.list()])
