"""The longest known prefix of an input: what is found, what is not, and what happens when something goes meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from support.links import wrong_links
from support.sample_engine import TokenEngine

from llama_ckpt.checkpoints import search as finding
from llama_ckpt.checkpoints.search import MatchQuery
from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import marks, prefixes, rows
from llama_ckpt.db.tables import checkpoint_prefix, registry_info
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import BadInput, DatabaseUnavailable, StoreUnavailable
from llama_ckpt.fingerprint import links_of, prefix_hashes, tokens_hash
from llama_ckpt.formats import container
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.marker import MARKER
from llama_ckpt.values import Divergence, MemoryKind, Outcome, StaleReason, Status

BLOCK = 4


@pytest.fixture
def registry(database_url, tmp_path, registry):
    """The registry of conftest, with blocks of 4 token ids and a floor of 2. Every checkpoint has a file of its own."""
    with registry.database.write() as db:
        db.execute(sa.insert(registry_info).values(name="block_size", value=str(BLOCK)))
    with Registry.open(database_url, tmp_path / "store", min_match_tokens=2, delta_depth=0) as opened:
        yield opened
        assert wrong_links(opened) == []


@pytest.fixture
def engine():
    return TokenEngine()


@pytest.fixture
def save(registry, engine):
    """`save(1, 2, 3)`: a checkpoint of these token ids."""

    def saved(*ids, **options):
        engine.evaluate(ids)
        return registry.save(engine, list(ids), **options).checkpoint

    return saved


@pytest.fixture
def find(registry, engine):
    """`find(1, 2, 3)`: what is found for these token ids, and how many tokens it has in common."""

    def found(*ids, **options):
        result = registry.match(list(ids), **{"fingerprint": engine.fingerprint, **options})
        return (result.checkpoint and result.checkpoint.id, result.n_matching) if result.checkpoint else None

    return found


def run(n, *tail):
    return [*range(1, n + 1), *tail]


def set_row(registry, row, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == row.id).values(**values))


def during(registry, action):
    """A registry in which something happens between the look-up of the rows and the look at their files, once."""
    left = [action]

    def hook(step):
        if step == "looked up" and left:
            left.pop()()

    return Registry(replace(registry.context, hook=hook))


def damage(registry, row, at=container.HEADER_SIZE + 1):
    path = registry.store.root / row.file_path
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


# -- what is found --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_shared", [2, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("n_stored", [0, 1, 4, 6])
def test_a_checkpoint_that_diverges_anywhere_in_a_block_is_found_with_what_it_shares(save, find, n_shared, n_stored):
    row = save(*run(n_shared, *[90 + i for i in range(n_stored)]))
    assert find(*run(n_shared, *range(50, 57))) == (row.id, n_shared)
    assert find(*run(n_shared)) == (row.id, n_shared), "the whole input, inside a checkpoint that is as long or longer"


def test_the_longest_of_several_is_found(save, find):
    system = save(*run(8))
    document = save(*run(13))
    save(*run(13, 70, 71))
    longest = save(*run(16, 80))
    assert find(*run(16, 99)) == (longest.id, 16)
    assert find(*run(13, 99)) == (document.id, 13)
    assert find(*run(8, 99)) == (system.id, 8)
    assert find(77, 78, 79) is None


def test_a_match_by_prefix_says_what_can_be_reused_and_where_it_ends(registry, engine, save):
    row = save(*run(10, 60, 61))
    result = registry.match(run(10, 50), fingerprint=engine.fingerprint, vocabulary=engine)
    assert (result.outcome, result.checkpoint.id) == (Outcome.HIT, row.id)
    assert (result.n_matching, result.n_reusable, result.n_tokens) == (10, 10, 11)
    assert result.divergence == Divergence(at=10, before="3 4 5 6 7 8 9 10", in_input="50", in_checkpoint="60 61")
    inside = registry.match(run(6), fingerprint=engine.fingerprint)
    assert (inside.n_matching, inside.n_reusable, inside.divergence) == (6, 5, None)


def test_a_text_is_matched_by_the_token_ids_that_a_vocabulary_or_the_caller_gives(registry, engine, save):
    row = save(*run(9))
    text = " ".join(map(str, run(9, 70)))
    assert registry.match(text, fingerprint=engine.fingerprint).reason == "no checkpoint of this input is registered"
    for given in ({"vocabulary": engine}, {"token_ids": run(9, 70)}, {"token_ids": np.array(run(9, 70))}):
        result = registry.match(text, fingerprint=engine.fingerprint, **given)
        assert (result.checkpoint.id, result.n_matching) == (row.id, 9)


def test_the_token_ids_have_the_last_word_over_an_input_hash(registry, engine):
    engine.evaluate(run(8))
    row = registry.save(engine, " ".join(map(str, run(8)))).checkpoint
    text = " ".join(map(str, run(8)))
    assert registry.match(text, fingerprint=engine.fingerprint).checkpoint.id == row.id
    result = registry.match(text, fingerprint=engine.fingerprint, token_ids=run(6, 90, 91))  # another tokenizer
    assert (result.outcome, result.checkpoint.id, result.n_matching) == (Outcome.HIT, row.id, 6)
    assert result.reason == "input and checkpoint begin with the same 6 tokens"


def test_the_bytes_of_token_ids_given_as_a_text_are_held_to_the_tokens(registry, engine, save):
    row = save(*run(5))
    as_text = np.array(run(5), dtype="<i4").tobytes().decode()
    assert registry.match(as_text, fingerprint=engine.fingerprint).checkpoint.id == row.id, "by hash alone they are one"
    other = registry.match(as_text, fingerprint=engine.fingerprint, token_ids=[7, 8, 9])
    assert other.outcome is Outcome.NO_MATCH


def test_one_token_in_common_is_no_match_and_the_nearest_is_told(registry, engine, save, find):
    row = save(1, 20, 21, 22, 23)
    assert find(1, 30, 31, 32, 33) is None
    result = registry.match([1, 30, 31], fingerprint=engine.fingerprint, vocabulary=engine)
    assert (result.outcome, result.nearest.id, result.n_matching) == (Outcome.NO_MATCH, row.id, 1)
    assert result.divergence == Divergence(at=1, before="1", in_input="30 31", in_checkpoint="20 21 22 23")
    assert find(1) is None


def test_a_short_input_that_was_saved_whole_is_a_match_below_the_floor(registry, engine, save, database_url, tmp_path):
    row = save(1, 2, 3)
    with Registry.open(database_url, tmp_path / "store") as careful:  # 16, by default
        assert careful.match([1, 2, 3], fingerprint=engine.fingerprint).checkpoint.id == row.id
        by_tokens = careful.match("1 2 3", fingerprint=engine.fingerprint, vocabulary=engine)
        assert (by_tokens.checkpoint.id, by_tokens.reason) == (row.id, "the same token ids")
        assert careful.match([1, 2, 3, 4], fingerprint=engine.fingerprint).outcome is Outcome.NO_MATCH


@pytest.mark.parametrize("floor", [1, 0, -5])
def test_a_floor_that_takes_one_token_for_a_match_is_refused(tmp_path, floor):
    with pytest.raises(BadInput, match=r"min_match_tokens.*2 or more"):
        Registry.open(store=tmp_path / "other", min_match_tokens=floor)


def test_a_block_size_that_is_none_is_refused_when_the_registry_is_opened(registry, database_url, tmp_path):
    with registry.database.write() as db:
        db.execute(sa.update(registry_info).where(registry_info.c.name == "block_size").values(value="many"))
    with pytest.raises(BadInput, match=r"block_size.*'many'"):
        Registry.open(database_url, tmp_path / "store")
    with registry.database.write() as db:
        db.execute(sa.delete(registry_info).where(registry_info.c.name == "block_size"))


# -- models -----------------------------------------------------------------------------------------------------------------


def test_a_prefix_of_another_model_is_never_offered(registry, save, find):
    save(*run(12))
    other = TokenEngine(weights="cd" * 32)
    assert find(*run(12, 9), fingerprint=other.fingerprint) is None


def test_without_a_fingerprint_every_fitting_model_is_looked_through(registry, engine, save):
    row = save(*run(9))
    other = TokenEngine(weights="cd" * 32, model_name="other")
    other.evaluate(run(14))
    longer = registry.save(other, run(14)).checkpoint
    assert registry.match(run(14, 99)).checkpoint.id == longer.id
    assert registry.match(run(14, 99), model="sample").checkpoint.id == row.id
    assert registry.match(run(14, 99), weights=bytes.fromhex("ab" * 32)).checkpoint.id == row.id
    assert registry.match(run(14, 99), model="unknown").outcome is Outcome.NO_MATCH


def test_the_same_input_of_another_model_explains_a_miss_by_the_field_that_differs(registry, save):
    save(*run(6))
    other = TokenEngine(weights="cd" * 32)
    result = registry.match(run(6), fingerprint=other.fingerprint)
    assert (result.outcome, [d.field for d in result.differences]) == (Outcome.NO_MATCH, ["weights"])


# -- kinds of memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MemoryKind.SWA, MemoryKind.RECURRENT, MemoryKind.HYBRID])
def test_memory_that_cannot_be_cut_is_found_where_all_of_it_is_a_prefix_at_whatever_depth(registry, save, find, kind):
    whole = save(*run(6))
    equal, longer, diverging = save(*run(15)), save(*run(15, 70)), save(*run(13, 80, 81))
    for row in (whole, equal, longer, diverging):
        set_row(registry, row, memory_kind=kind.value)
    assert find(*run(15)) == (whole.id, 6), "an equal one leaves no token to evaluate, a longer one cannot be truncated"
    assert find(*run(15, 90)) == (equal.id, 15)
    assert find(*run(14, 90)) == (whole.id, 6)
    assert find(*run(5)) is None
    assert find(*run(8)) == (whole.id, 6)


def test_the_whole_input_in_memory_that_cannot_be_cut_is_no_match_and_says_why(registry, engine, save):
    row = save(*run(6))
    set_row(registry, row, memory_kind=MemoryKind.RECURRENT.value)
    for result in (
        registry.match(run(6), fingerprint=engine.fingerprint),
        registry.match_hash(row.input_hash, fingerprint=engine.fingerprint),
    ):
        assert (result.outcome, result.nearest.id) == (Outcome.NO_MATCH, row.id)
        assert "recurrent memory, which cannot be truncated" in result.reason


def test_many_that_cannot_be_cut_do_not_hide_the_one_that_is_a_prefix(registry, save, find):
    whole = save(*run(5))
    rows = [whole, *(save(*run(12, 60 + i)) for i in range(finding.MOST_HEADS + 2))]
    for row in rows:
        set_row(registry, row, memory_kind=MemoryKind.SWA.value)
    assert find(*run(12, 99)) == (whole.id, 5)


# -- what goes or is damaged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "short", "of other tokens"])
def test_a_damaged_candidate_goes_stale_and_the_next_one_is_taken(registry, save, find, counters, left_in_store, how):
    shorter, longer = save(*run(6)), save(*run(11))
    path = registry.store.root / longer.file_path
    if how == "damaged":
        damage(registry, longer)
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        set_row(registry, longer, tokens_hash=bytes(32))
    assert find(*run(11, 99)) == (shorter.id, 6)
    now = registry.get(longer.id)
    assert (now.status, now.stale_reason) == (Status.STALE, StaleReason.CORRUPT)
    assert find(*run(11, 99)) == (shorter.id, 6)


def test_a_candidate_whose_file_is_gone_goes_stale_as_missing(registry, save, find):
    shorter, longer = save(*run(6)), save(*run(11))
    (registry.store.root / longer.file_path).unlink()
    assert find(*run(11, 99)) == (shorter.id, 6)
    assert registry.get(longer.id).stale_reason is StaleReason.MISSING


def test_a_store_that_is_not_there_is_a_failure_and_changes_no_row(registry, engine, save, left_in_store):
    row = save(*run(6))
    path, marker = registry.store.root / row.file_path, registry.store.root / MARKER
    data, mark = path.read_bytes(), marker.read_bytes()
    path.unlink()
    marker.unlink()
    result = registry.match(run(6, 99), fingerprint=engine.fingerprint)
    assert (result.outcome, type(result.error)) == (Outcome.FAILED, StoreUnavailable)
    assert registry.get(row.id).status is Status.ACTIVE
    path.write_bytes(data)
    marker.write_bytes(mark)


def test_a_file_that_cannot_be_read_now_is_passed_over_and_stays(registry, engine, save, find, monkeypatch):
    shorter, longer = save(*run(6)), save(*run(11))
    beginning = registry.store.beginning

    def failing(relative, n_bytes):
        if relative == longer.file_path:
            raise StoreUnavailable(path=relative, reason="EIO")
        return beginning(relative, n_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(registry.store, "beginning", failing)
        assert find(*run(11, 99)) == (shorter.id, 6)
        assert registry.get(longer.id).status is Status.ACTIVE
        registry.remove(shorter.id)
        result = registry.match(run(11, 99), fingerprint=engine.fingerprint)
    assert (result.outcome, result.error.values["reason"]) == (Outcome.FAILED, "EIO"), "something may be there"


def test_a_row_that_the_database_does_not_let_go_stale_is_passed_over(registry, save, find, monkeypatch, left_in_store):
    left_in_store.add("corrupt")
    shorter, longer = save(*run(6)), save(*run(11))
    damage(registry, longer)

    def refused(*_):
        raise DatabaseUnavailable(url="x", reason="read-only")

    with monkeypatch.context() as patch:
        patch.setattr(marks, "mark_stale", refused)
        assert find(*run(11, 99)) == (shorter.id, 6)
    assert registry.get(longer.id).status is Status.ACTIVE
    registry.report_bad(longer.id)


def test_a_database_that_fails_is_a_failure_and_no_miss(registry, engine, save, monkeypatch):
    save(*run(6))

    def lost(*_):
        raise DatabaseUnavailable(url="x", reason="the connection was lost")

    monkeypatch.setattr(rows, "find_active", lost)
    result = registry.match(run(6, 99), fingerprint=engine.fingerprint)
    assert (result.outcome, result.checkpoint) == (Outcome.FAILED, None)
    assert "the connection was lost" in result.reason


@pytest.mark.parametrize("how", ["all and their files", "its file", "its mark alone"])
def test_what_goes_between_the_look_up_and_the_answer_is_a_miss_or_the_next_one(registry, engine, save, how):
    shorter, longer = save(*run(6)), save(*run(11))

    def goes():
        if how != "all and their files":
            registry.remove(longer.id)
        else:
            registry.invalidate(engine.fingerprint)
            collector = Collector(registry.context)
            collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
        if how == "its file":
            (registry.store.root / longer.file_path).unlink()

    result = during(registry, goes).match(run(11, 99), fingerprint=engine.fingerprint)
    found = (result.checkpoint and result.checkpoint.id, result.n_matching)
    assert (
        found
        == {
            "all and their files": (None, 0),
            "its file": (shorter.id, 6),
            "its mark alone": (longer.id, 11),  # it was ACTIVE when it was asked for, and its file is whole
        }[how]
    )


def test_an_expired_checkpoint_is_not_offered_though_its_links_are_still_there(registry, save, find):
    shorter, longer = save(*run(6)), save(*run(11))
    set_row(registry, longer, expires_us=1)
    assert find(*run(11, 99)) == (shorter.id, 6)


# -- how much is done for it ------------------------------------------------------------------------------------------------


def test_of_many_that_share_a_block_few_files_are_looked_at(registry, engine, save, monkeypatch):
    for i in range(finding.MOST_HEADS + 4):
        save(*run(8, 60 + i))
    looked_at = []
    beginning = registry.store.beginning
    monkeypatch.setattr(registry.store, "beginning", lambda *a: looked_at.append(a) or beginning(*a))
    result = registry.match(run(8, 99), fingerprint=engine.fingerprint)
    assert (result.outcome, result.n_matching) == (Outcome.HIT, 8)
    assert len(looked_at) == finding.MOST_HEADS
    looked_at.clear()
    end = save(*run(8, 60))
    assert registry.match(run(8, 60, 99), fingerprint=engine.fingerprint).checkpoint.id == end.id, (
        "an end is found first"
    )


def test_a_checkpoint_that_cannot_be_better_than_the_one_found_is_not_opened(registry, engine, save, monkeypatch):
    best = save(*run(10))
    longer = save(*run(9, 70, 71))
    save(*run(9)), save(*run(8, 60)), save(*run(8)), save(*run(9, 80))
    looked_at = []
    beginning = registry.store.beginning
    monkeypatch.setattr(registry.store, "beginning", lambda *a: looked_at.append(a[0]) or beginning(*a))
    result = registry.match(run(10, 99), fingerprint=engine.fingerprint)
    assert (result.checkpoint.id, result.n_matching) == (best.id, 10)
    assert looked_at == [best.file_path, longer.file_path], "the others have no more tokens than it"


def test_of_equal_token_ids_under_two_inputs_the_one_that_was_saved_first_is_taken(registry, engine, save, find):
    first = save(*run(10))
    engine.evaluate(run(10))
    second = registry.save(engine, " ".join(map(str, run(10)))).checkpoint
    assert second.id != first.id
    assert find(*run(10, 99)) == (first.id, 10)
    registry.remove(first.id)
    assert find(*run(10, 99)) == (second.id, 10)


def test_ends_inside_a_block_are_not_asked_for_where_all_that_could_end_there_are_known(
    registry, save, find, monkeypatch
):
    inside = save(*run(10))
    save(*run(8, 60, 61))
    with monkeypatch.context() as patch:
        patch.setattr(prefixes, "ending_at", lambda *_: pytest.fail("the ends were asked for"))
        assert find(*run(10, 99)) == (inside.id, 10), "few share the deepest block"
        for i in range(finding.MOST_HEADS):
            save(*run(8, 70 + i, 1, 2, 3, 4))
        assert find(*run(10, 99)) == (inside.id, 10), "many do, and the shortest of them go beyond the next block"


def test_an_end_is_found_behind_many_shorter_ones_though_some_of_them_have_expired(registry, save, find):
    shorter = [save(*run(8, 60 + i)) for i in range(finding.MOST_HEADS)]
    inside = save(*run(10))
    for row in shorter[: finding.MOST_HEADS // 2]:
        set_row(registry, row, expires_us=1)
    assert find(*run(10, 99)) == (inside.id, 10)


def test_a_longer_one_is_found_behind_so_many_that_have_expired_that_they_fill_what_is_looked_over_first(
    registry, save, find
):
    for i in range(finding.MOST_HEADS):
        set_row(registry, save(*run(8, 60 + i)), expires_us=1)
    longer = save(*run(11, 90, 91))
    assert find(*run(11, 99)) == (longer.id, 11)


def test_no_payload_is_read_or_mapped(registry, engine, save, monkeypatch):
    row = save(*run(40))
    damage(registry, row, at=-1)
    monkeypatch.setattr(registry.store, "map", lambda *_: pytest.fail("the file was mapped"))
    assert registry.match(run(40, 99), fingerprint=engine.fingerprint).n_matching == 40
    damage(registry, row, at=-1)


def test_a_wide_search_asks_fewer_statements_than_bisection_with_the_same_answers(registry, engine, save):
    choice = random.Random(5)
    for _ in range(12):
        save(*[choice.choice([1, 2]) for _ in range(choice.randint(1, 40))])
    chains = [
        prefix_hashes(
            engine.fingerprint.digest, np.array([choice.choice([1, 2]) for _ in range(60)], dtype=np.int32), BLOCK
        )
        for _ in range(30)
    ]
    counted = []

    def count(_connection, _cursor, statement, *_):
        if "SELECT" in statement:
            counted.append(statement)

    def answers(width):
        counted.clear()
        with registry.database.read() as db:
            return [prefixes.deepest(db, chain, width) for chain in chains], len(counted)

    sa.event.listen(registry.database._engine, "before_cursor_execute", count)
    try:
        (one_by_one, n_near), (wide, n_far) = answers(1), answers(16)
    finally:
        sa.event.remove(registry.database._engine, "before_cursor_execute", count)
    assert wide == one_by_one
    assert any(one_by_one)
    assert n_far == len(chains) < n_near


# -- links ------------------------------------------------------------------------------------------------------------------


def test_links_are_exactly_those_of_active_rows_whatever_happens_to_them(registry, engine, save):
    rows = [save(*run(n, 70 + n)) for n in (1, 3, 4, 7, 8, 12)]
    assert wrong_links(registry) == []
    registry.remove(rows[0].id)
    registry.report_bad(rows[1].id)
    set_row(registry, rows[2], expires_us=1)
    engine.evaluate(run(4, 74))
    again = registry.save(engine, run(4, 74)).checkpoint
    assert again.id != rows[2].id
    assert registry.get(rows[2].id).stale_reason is StaleReason.EXPIRED
    assert wrong_links(registry) == []
    collector = Collector(registry.context)
    collector.prune(collector.plan_prune(Policy(max_count=2)))
    assert wrong_links(registry) == []
    reconciler = Reconciler(registry.context)
    back = [str(result) for result in reconciler.unprune(reconciler.pruned_since(0))]
    assert "ACTIVE" in back
    assert wrong_links(registry) == []
    collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
    assert wrong_links(registry) == []
    registry.invalidate(engine.fingerprint)
    with registry.database.read() as db:
        assert db.execute(sa.select(checkpoint_prefix)).all() == []


def test_a_sound_orphan_gets_its_links_with_its_row(registry, save, find):
    row = save(*run(9))
    with registry.database.write() as db:
        db.execute(sa.delete(meta))
    assert find(*run(9, 99)) is None
    assert [str(result) for result in Reconciler(registry.context).apply(_ghosts(registry))] == ["registered again"]
    assert find(*run(9, 99)) == (row.id, 9)


def _ghosts(registry):
    from llama_ckpt.integrity.verify import Verifier

    return list(Verifier(registry.database, registry.store).ghosts())


def missing_links(registry, rows):
    with registry.database.read() as db:
        have = {(n, end) for n, end in db.execute(sa.select(checkpoint_prefix.c.ckpt_no, checkpoint_prefix.c.n_tokens))}
    wanted = {(r.ckpt_no, n) for r in rows for n in (*range(BLOCK, r.n_tokens, BLOCK), r.n_tokens)}
    return [f"row {number} at token {n} has no link" for number, n in sorted(wanted - have)]


def test_rows_of_a_version_without_links_are_linked_by_a_repair_once(registry, save, find, left_in_store):
    rows = [save(*run(n, 70 + n)) for n in (3, 6, 9)]
    damage(registry, rows[2])
    with registry.database.write() as db:
        db.execute(sa.delete(checkpoint_prefix).where(checkpoint_prefix.c.ckpt_no != rows[0].ckpt_no))
    assert f"row {rows[1].ckpt_no} at token 7 has no link" in missing_links(registry, rows[:2])
    reconciler = Reconciler(registry.context)
    assert reconciler.link() == 1, "one has links, one is damaged"
    assert find(*run(6, 76, 99)) == (rows[1].id, 7)
    assert reconciler.link() == 0
    registry.report_bad(rows[2].id)


def test_a_row_that_goes_stale_before_it_is_linked_later_gets_no_links(registry, save, monkeypatch):
    row = save(*run(6))
    links = links_of(row, finding.token_ids_of(registry.context, row), BLOCK)
    registry.remove(row.id)
    with registry.database.write() as db:
        assert not prefixes.link_later(db, row.ckpt_no, links)
    assert wrong_links(registry) == []


# -- deltas -----------------------------------------------------------------------------------------------------------------


def test_a_deltas_token_ids_come_from_its_parents_files_too(registry, save, find, left_in_store):
    left_in_store.add("corrupt")  # this version reads no delta's payload
    parent, child = save(*run(6, 80, 81)), save(*run(6, 90, 91, 92, 93))
    path = registry.store.root / child.file_path
    data = path.read_bytes()
    header, padding = container.read_header(memoryview(data), "x")
    contents = container.read_contents(memoryview(data), header, padding, "x")
    made = replace(header, flags=header.flags | container.FLAG_DELTA, start_token=6)
    head, full = container.encode_head(made, contents.metadata, contents.token_ids[6:], contents.payload)
    path.write_bytes(head + bytes(contents.payload))
    set_row(registry, child, parent_no=parent.ckpt_no, start_token=6, file_size=full.payload_offset + full.payload_size)
    with registry.database.write() as db:
        its = checkpoint_prefix.c
        db.execute(sa.delete(checkpoint_prefix).where(its.ckpt_no == child.ckpt_no, its.n_tokens <= 6))
    now = registry.get(child.id)
    ids = finding.token_ids_of(registry.context, now)
    assert (ids.tolist(), tokens_hash(ids)) == (run(6, 90, 91, 92, 93), child.tokens_hash)
    assert find(*run(6, 90, 91, 92, 99)) == (child.id, 9)
    damage(registry, parent)
    assert find(*run(6, 90, 91, 92, 99)) is None
    assert [registry.get(row.id).stale_reason for row in (parent, child)] == [StaleReason.CORRUPT] * 2


def test_a_question_without_an_input_has_no_token_ids():
    assert MatchQuery(input_hash=bytes(32)).token_ids() is None


@pytest.mark.parametrize("question", ["newest", "by input", "sharing", "ending"])
def test_no_statement_of_a_match_reads_all_active_rows(registry, engine, save, question):
    if registry.database.dialect != "sqlite":
        pytest.skip("the plan of few rows says nothing where the database counts rows before it plans")
    row = save(*run(6))
    said = []
    sa.event.listen(registry.database._engine, "before_cursor_execute", lambda *a: said.append((a[2], a[3])))
    with registry.database.read() as db:
        {
            "newest": lambda: prefixes.newest(db, row.fingerprint, 16),
            "by input": lambda: rows.find_by_input(db, row.input_hash),
            "sharing": lambda: prefixes.sharing(db, bytes(16), 16),
            "ending": lambda: prefixes.ending_at(db, [bytes(16)], 16),
        }[question]()
        plans = [db.exec_driver_sql("EXPLAIN QUERY PLAN " + sql, values).all() for sql, values in list(said)]
    steps = [step[-1] for plan in plans for step in plan]
    walks = [step for step in steps if "(status=?)" in step or step.startswith("SCAN")]
    assert [step for step in walks if step != "SCAN few"] == [], "but for the few links that were found"
