"""Guards for moments too short to meet by chance: another program acts between two steps, and the second step sees it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from support.databases import waits_for_a_lock
from support.sample_engine import TokenEngine
from support.steps import once

from llama_ckpt.checkpoints.read import CellRequest, ChainReader
from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.db import collecting, coordination, marks
from llama_ckpt.errors import Incompatible, StoreUnavailable
from llama_ckpt.gc_values import RowVersion
from llama_ckpt.integrity.reconcile import MendOutcome, Reconciler
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import Store
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status

STORY = list(range(100, 140))
LONGER = [*STORY, 7, 8, 9]


def save_ids(registry, ids):
    engine = TokenEngine()
    engine.evaluate(ids)
    return registry.save(engine, ids).checkpoint


def require_concurrent_writers(registry):
    if registry.database.dialect == "sqlite":
        pytest.skip("SQLite has one writer at a time")


# -- a row is never without its file -----------------------------------------------------------------------------------------


def delete_new_file(registry, *old):
    """What gc of another host does to the file of a process that slept for longer than the grace."""
    names = {row.file_path for row in old}
    for path in registry.store.root.rglob("*.llam"):
        if str(path.relative_to(registry.store.root)) not in names:
            path.unlink()


def test_a_save_whose_file_was_collected_before_its_row_is_committed_fails_and_leaves_no_row(registry, engine):
    hook = once("inserted", lambda: delete_new_file(registry))
    with pytest.raises(StoreUnavailable, match="it was collected while it was saved"):
        Registry(replace(registry.context, hook=hook)).save(engine, "one")
    assert registry.list() == []
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_a_flatten_whose_file_was_collected_before_its_row_is_committed_leaves_the_delta_as_it_was(registry):
    parent, delta = save_ids(registry, STORY), save_ids(registry, LONGER)
    hook = once("named", lambda: delete_new_file(registry, parent, delta))
    with pytest.raises(StoreUnavailable, match="it was collected while it was written"):
        Registry(replace(registry.context, hook=hook)).flatten(delta.id)
    assert registry.get(delta.id).parent_no == parent.ckpt_no
    assert registry.restore(TokenEngine(), LONGER).outcome is Outcome.HIT


def test_a_file_that_flatten_wrote_long_ago_is_new_to_gc_when_its_row_names_it(registry):
    save_ids(registry, STORY)
    delta = save_ids(registry, LONGER)

    def age():
        for path in registry.store.root.rglob("*.llam"):
            os.utime(path, (1, 1))

    store = Store(registry.store.root, hook=once("renamed", age))
    Registry(replace(registry.context, store=store)).flatten(delta.id)
    modified_s = registry.store.modified_ns(registry.get(delta.id).file_path) / 1e9
    assert modified_s > 1_000_000_000


# -- an ACTIVE delta has an ACTIVE parent ------------------------------------------------------------------------------------


def test_a_delta_that_is_saved_while_its_parent_is_removed_goes_stale_with_it(registry, monkeypatch):
    require_concurrent_writers(registry)
    parent, real = save_ids(registry, STORY), marks.lock

    def lock(db, numbers):
        monkeypatch.setattr(marks, "lock", real)
        save_ids(registry, LONGER)
        return real(db, numbers)

    monkeypatch.setattr(marks, "lock", lock)
    registry.remove(parent.id)
    assert {row.status for row in registry.list()} == {Status.STALE}
    assert len(registry.list()) == 2


def test_a_delta_that_is_saved_while_its_parent_is_purged_is_purged_with_it(registry, monkeypatch):
    save_ids(registry, STORY)
    real = Purger.plan

    def plan(purger, purge):
        rows = real(purger, purge)
        monkeypatch.setattr(Purger, "plan", real)
        save_ids(registry, LONGER)
        return rows

    monkeypatch.setattr(Purger, "plan", plan)
    assert Purger(registry.context).run(Purge(everything=True)).n_rows == 2
    assert registry.list() == []
    assert not list(registry.store.root.rglob("*.llam"))


# -- no byte is counted as free before it is ---------------------------------------------------------------------------------


def test_two_saves_that_fit_only_one_at_a_time_do_not_both_take_the_room(registry, engine, monkeypatch):
    require_concurrent_writers(registry)
    size = registry.save(engine, "size").checkpoint.file_size + collecting.BLOCK_BYTES
    Purger(registry.context).run(Purge(everything=True))
    limited = Registry(replace(registry.context, policy=Policy(max_bytes=size + size // 2)))
    outcomes, real = [], coordination.take_claim

    def save(text):
        outcomes.append(limited.save(engine, text).outcome)

    second = threading.Thread(target=save, args=["two"])

    def take_claim(*given):
        """The first one has seen that there is room, and has claimed nothing yet."""
        monkeypatch.setattr(coordination, "take_claim", real)
        second.start()
        while second.is_alive() and not waits_for_a_lock(registry.database):
            pass
        return real(*given)

    monkeypatch.setattr(coordination, "take_claim", take_claim)
    on_disk = []

    def look(step):
        if step == "renamed":
            on_disk.append(sum(path.stat().st_size for path in registry.store.root.rglob("*.llam")))

    limited = Registry(replace(limited.context, store=Store(registry.store.root, hook=look)))
    save("one")
    second.join()
    assert SaveOutcome.SAVED in outcomes
    assert max(on_disk) <= size


def test_the_bytes_of_a_deleted_row_count_until_gc_has_deleted_its_file(registry, engine, saved):
    registry.remove(saved.id)
    limited = Registry(replace(registry.context, policy=Policy(max_bytes=saved.file_size + 2 * collecting.BLOCK_BYTES)))
    outcomes = []
    hook = once("rows deleted", lambda: outcomes.append(limited.save(engine, "two").outcome))
    collector = Collector(replace(registry.context, hook=hook))
    collector.run(collector.plan(Policy(stale_grace_s=0)))
    outcomes.append(limited.save(engine, "two").outcome)
    assert outcomes == [SaveOutcome.REFUSED, SaveOutcome.SAVED]


def test_a_row_whose_file_is_given_up_for_room_while_it_is_checked_does_not_come_back(registry, saved):
    with registry.database.write() as db:
        collecting.mark_untouched(db, {RowVersion.of(saved): StaleReason.EVICTED})
    stale = registry.get(saved.id)

    def give_up():
        with registry.database.write() as db:
            collecting.forget_files(db, [RowVersion.of(stale)])
        registry.store.remove(stale.file_path)

    reconciler = Reconciler(replace(registry.context, hook=once("checked", give_up)))
    assert [result.outcome for result in reconciler.unprune([stale])] == [MendOutcome.UNCHANGED]
    assert registry.get(saved.id).status is Status.STALE


# -- the last look at what is loaded, and at the database --------------------------------------------------------------------


def test_a_checkpoint_gives_no_cells_for_other_tokens_than_its_own(registry):
    row = save_ids(registry, STORY)
    request = CellRequest(begins_with=np.array([*STORY[:20], 1], dtype=np.int32), n_tokens=21)
    with (
        pytest.raises(Incompatible, match="other tokens from token 20 on"),
        ChainReader(registry.context, row).cells(TokenEngine(), request),
    ):
        pass


def test_a_commit_to_sqlite_is_durable_enough_to_keep_the_database_intact_at_a_power_loss(registry):
    if registry.database.dialect != "sqlite":
        pytest.skip("a setting of the server there")
    with registry.database.read() as db:
        assert db.exec_driver_sql("PRAGMA synchronous").scalar() == 1  # NORMAL: in WAL mode a checkpoint is synced
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_a_connection_that_the_server_closed_while_it_was_idle_is_replaced_before_it_is_used(registry, saved):
    if registry.database.dialect != "postgresql":
        pytest.skip("a file has no connection")
    with registry.database.read() as db:
        pid = db.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    other = sa.create_engine(registry.database.url)
    with other.connect() as db:
        db.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    other.dispose()
    with registry.database.write() as db:
        assert db.exec_driver_sql("SELECT pg_backend_pid()").scalar() != pid
