"""Prefix links, deltas, claims: what the queries promise, on planted rows."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import coordination, prefixes, rows
from llama_ckpt.db.tables import checkpoint_prefix, save_claim
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import BadInput, Conflict
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import path_of
from llama_ckpt.values import MemoryKind, NewCheckpoint, PrefixLink, StaleReason, Status


def new_row(engine, number, **changes):
    """A row as a save makes it; its id and its input hash say its number."""
    checkpoint_id = f"{number:032x}"
    row = NewCheckpoint(
        id=checkpoint_id,
        model_name="sample",
        fingerprint=engine.fingerprint.digest,
        input_hash=number.to_bytes(32, "big"),
        tokens_hash=bytes(32),
        n_tokens=1000,
        memory_kind=MemoryKind.FULL,
        file_path=path_of(checkpoint_id),
        file_size=4096,
        payload_crc32=0,
        prefill_ms=None,
        expires_in_s=None,
        label=None,
    )
    return replace(row, **changes)


def chain_hashes(*blocks):
    """Prefix hashes of a chain of named blocks: a hash stands for all blocks up to its own."""
    import hashlib

    hashes, so_far = [], b""
    for block in blocks:
        so_far = hashlib.sha256(so_far + block.encode()).digest()[:16]
        hashes.append(so_far)
    return hashes


@pytest.fixture
def plant(registry, engine, saved):
    """Adds a row with links for its blocks; `saved` has brought the model."""
    registry.remove(saved.id)

    def add(number, *blocks, parent=None, covered=0):
        changes = {} if parent is None else {"parent_no": parent.ckpt_no, "start_token": 256 * covered}
        hashes = chain_hashes(*blocks)
        with registry.database.write() as db:
            row = rows.insert_checkpoint(db, new_row(engine, number, **changes))
            links = [
                PrefixLink(prefix_hash=h, n_tokens=256 * (i + 1), file_tokens=256 * len(blocks), ckpt_no=row.ckpt_no)
                for i, h in enumerate(hashes)
                if i >= covered
            ]
            prefixes.link(db, links)
        return row

    return add


@pytest.fixture(autouse=True)
def rows_without_files(left_in_store):
    left_in_store.update({"missing", "orphan"})


def status_of(registry, row):
    return registry.get(row.id).status


def linked(registry):
    with registry.database.read() as db:
        return set(db.scalars(sa.select(checkpoint_prefix.c.ckpt_no)))


def invariants_hold(registry):
    rows = {c.ckpt_no: c for c in registry.list()}
    active = {n for n, c in rows.items() if c.status is Status.ACTIVE}
    assert linked(registry) <= active, "a link leads to a STALE row"
    for n in active:
        parent = rows[n].parent_no
        assert parent is None or parent in active, "an ACTIVE delta has a STALE parent"


def test_the_deepest_prefix_is_found_by_bisection_and_the_smallest_file_with_it(registry, plant):
    long = plant(1, "system", "doc", "a", "b")
    short = plant(2, "system", "doc")
    plant(3, "system", "other")
    with registry.database.read() as db:
        asked = chain_hashes("system", "doc", "a", "x", "y")
        assert prefixes.deepest(db, asked) == 3
        assert [row.id for row in prefixes.sharing(db, asked[2], 16)[0]] == [long.id]
        assert prefixes.deepest(db, chain_hashes("system", "doc", "z")) == 2
        assert [row.id for row in prefixes.sharing(db, asked[1], 16)[0]] == [short.id, long.id], "the smallest first"
        assert [len(prefixes.sharing(db, asked[0], n)[0]) for n in (2, 3, 4)] == [2, 3, 3], "three share it"
        assert [prefixes.sharing(db, asked[0], n)[1] for n in (2, 3, 4)] == [False, False, True], "whether no more do"
        assert prefixes.deepest(db, chain_hashes("nothing", "like", "it")) == 0
        assert prefixes.deepest(db, []) == 0


def test_bisection_agrees_with_a_naive_walk_over_random_chains(registry, plant):
    choice = random.Random(7)
    kept = []
    for number in range(1, 40):
        blocks = [choice.choice("ab") for _ in range(choice.randint(1, 9))]
        kept.append((plant(number, *blocks), blocks))
    for row, _ in choice.sample(kept, 12):
        registry.remove(row.id)
    alive = [blocks for row, blocks in kept if status_of(registry, row) is Status.ACTIVE]
    for _ in range(60):
        asked = [choice.choice("ab") for _ in range(choice.randint(1, 12))]
        naive = max((sum(1 for _ in common(asked, blocks)) for blocks in alive), default=0)
        with registry.database.read() as db:
            assert {prefixes.deepest(db, chain_hashes(*asked), width) for width in (1, 2, 3, 8, 16)} == {naive}
    invariants_hold(registry)


def common(a, b):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


@pytest.mark.parametrize("how", ["remove", "report_bad", "invalidate", "prune"])
def test_links_leave_with_the_stale_mark_however_it_is_made(registry, engine, plant, how):
    row = plant(1, "a", "b")
    assert linked(registry) == {row.ckpt_no}
    if how == "prune":
        plant(9)  # the newest stays
    if how == "invalidate":
        registry.invalidate(engine.fingerprint)
    elif how == "prune":
        collector = Collector(registry.context)
        collector.prune(collector.plan_prune(Policy(max_age_s=-1)))
    else:
        getattr(registry, how)(row.id)
    assert status_of(registry, row) is Status.STALE
    assert linked(registry) == set()


def test_a_corrupt_parent_takes_its_descendants_and_their_links_along(registry, plant):
    root = plant(1, "a", "b")
    child = plant(2, "a", "b", "c", parent=root, covered=2)
    grandchild = plant(3, "a", "b", "c", "d", parent=child, covered=3)
    other = plant(4, "x")
    registry.report_bad(root.id)
    assert [status_of(registry, r) for r in (root, child, grandchild, other)] == [Status.STALE] * 3 + [Status.ACTIVE]
    assert registry.get(grandchild.id).stale_reason is StaleReason.CORRUPT
    assert linked(registry) == {other.ckpt_no}


def test_a_parent_of_a_living_delta_is_neither_removed_nor_pruned_and_leaves_go_first(registry, plant):
    root = plant(1, "a")
    child = plant(2, "a", "b", parent=root, covered=1)
    with pytest.raises(BadInput, match="a delta needs it"):
        registry.remove(root.id)
    newest = plant(9)
    collector = Collector(registry.context)
    assert [v.row.id for v in collector.prune(collector.plan_prune(Policy(max_count=2)))] == [child.id]
    invariants_hold(registry)
    assert [v.row.id for v in collector.prune(collector.plan_prune(Policy(max_age_s=-1)))] == [root.id]
    assert status_of(registry, newest) is Status.ACTIVE


def test_a_whole_chain_that_is_too_old_goes_in_one_prune(registry, plant):
    root = plant(1, "a")
    child = plant(2, "a", "b", parent=root, covered=1)
    plant(9)
    collector = Collector(registry.context)
    assert {v.row.id for v in collector.prune(collector.plan_prune(Policy(max_age_s=-1)))} == {root.id, child.id}
    invariants_hold(registry)


def test_a_delta_of_a_parent_that_went_stale_is_not_added(registry, engine, plant):
    root = plant(1, "a")
    registry.remove(root.id)
    with pytest.raises(Conflict, match="went STALE"):
        plant(2, "a", "b", parent=root, covered=1)
    assert len(registry.list(status=Status.ACTIVE)) == 0


def test_a_parent_that_got_a_child_after_the_plan_survives_the_prune(registry, plant):
    root = plant(1, "a")
    plant(9)
    collector = Collector(registry.context)
    verdicts = collector.plan_prune(Policy(max_age_s=-1))
    assert [v.row.id for v in verdicts] == [root.id]
    plant(2, "a", "b", parent=root, covered=1)
    assert collector.prune(verdicts) == []
    invariants_hold(registry)


def test_gc_takes_a_stale_delta_before_its_stale_parent_and_both_in_one_run(registry, plant):
    root = plant(1, "a")
    child = plant(2, "a", "b", parent=root, covered=1)
    plant(3, "a", "b", "c", parent=child, covered=2)
    registry.report_bad(root.id)
    collector = Collector(registry.context)
    report = collector.run(collector.plan(Policy(stale_grace_s=0), force=registry.registry_id))
    assert {str(result) for result in report.done} == {"deleted"}
    assert registry.list() == []


def test_gc_keeps_a_stale_parent_whose_delta_is_still_within_the_grace(registry, plant):
    root = plant(1, "a")
    plant(2, "a", "b", parent=root, covered=1)
    registry.report_bad(root.id)
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.ckpt_no == root.ckpt_no).values(stale_us=1))
    collector = Collector(registry.context)
    report = collector.run(collector.plan(Policy(stale_grace_s=3600), force=registry.registry_id))
    assert "skipped: used, pinned, leased or needed by a delta" in {str(result) for result in report.done}
    assert {c.ckpt_no for c in registry.list()} >= {root.ckpt_no}


def test_the_database_refuses_to_delete_a_row_that_a_delta_names(registry, plant):
    root = plant(1, "a")
    plant(2, "a", "b", parent=root, covered=1)
    from llama_ckpt.errors import DatabaseUnavailable

    with pytest.raises(DatabaseUnavailable, match="the schema refuses"), registry.database.write() as db:
        db.execute(sa.delete(meta).where(meta.c.ckpt_no == root.ckpt_no))


def test_threads_that_add_children_and_prune_their_parent_keep_every_invariant(registry, engine, plant):
    roots = [plant(100 + i, f"root {i}") for i in range(8)]
    collector = Collector(registry.context)
    barrier, errors = threading.Barrier(4), []

    def add_children(offset):
        barrier.wait()
        for i, root in enumerate(roots):
            try:
                plant(1000 * offset + i, f"root {i}", f"child {offset}", parent=root, covered=1)
            except Conflict:
                pass  # the parent went first
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)

    def prune():
        barrier.wait()
        try:
            for _ in range(4):
                collector.prune(collector.plan_prune(Policy(max_age_s=-1)))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=add_children, args=(n,)) for n in (1, 2, 3)] + [threading.Thread(target=prune)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    invariants_hold(registry)


# -- claims and leases --------------------------------------------------------------------------------------------------


def claim(registry, key, holder, reserved=100, seconds=60.0):
    try:
        with registry.database.write() as db:
            return coordination.take_claim(db, key, holder, reserved, seconds)
    except Conflict:
        return False


def test_one_process_has_a_claim_until_it_gives_it_back_or_it_expires(registry):
    key = bytes(32)
    assert claim(registry, key, "a")
    assert claim(registry, key, "a"), "one's own claim is renewed"
    assert not claim(registry, key, "b")
    with registry.database.write() as db:
        db.execute(sa.update(save_claim).values(expires_us=1))
    assert claim(registry, key, "b"), "a killed owner delays nobody beyond the expiry"
    with registry.database.write() as db:
        coordination.drop_claim(db, key, "a")
    assert not claim(registry, key, "a"), "only the owner gives a claim back"
    with registry.database.write() as db:
        coordination.drop_claim(db, key, "b")
    assert claim(registry, key, "a")


def test_reserved_bytes_count_until_they_expire(registry):
    for i, seconds in enumerate((60, 60, -1)):
        claim(registry, i.to_bytes(32, "big"), "a", reserved=1000, seconds=seconds)
    with registry.database.read() as db:
        assert coordination.claimed_bytes(db) == 2000


def test_of_many_that_claim_at_once_one_gets_it(registry):
    key, got, barrier = bytes(32), [], threading.Barrier(8)

    def contend(name):
        barrier.wait()
        if claim(registry, key, name):
            got.append(name)

    threads = [threading.Thread(target=contend, args=(f"p{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_lease_has_one_holder_and_a_fence_that_grows(registry):
    def take(holder, seconds=60.0):
        with registry.database.write() as db:
            return coordination.take_lease(db, "gc", holder, seconds)

    first = take("a")
    assert take("b") is None
    assert take("a") == first + 1
    with registry.database.write() as db:
        assert not coordination.renew_lease(db, "gc", first, 60.0), "an old fence renews nothing"
        assert coordination.renew_lease(db, "gc", first + 1, -1.0)
    assert take("b") == first + 2
