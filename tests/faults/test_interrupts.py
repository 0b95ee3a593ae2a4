"""Ctrl-C in a process that lives on: nothing is left on the disk, and what is left there counts."""

from __future__ import annotations

import os
import time

import pytest
from support import samples
from support.sample_engine import SampleEngine, TokenEngine
from support.whole import checkpoint_bytes

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import collecting
from llama_ckpt.exchange.adopt import AdoptOptions, adopt
from llama_ckpt.integrity.repair import FileRepairer
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store import disk, writers
from llama_ckpt.values import Outcome, SaveOutcome

SAVE_STEPS = ["created", "head", "written", "staged", "renamed", "inserted", "committed"]


class Interrupt:
    """A hook that raises KeyboardInterrupt at a step, as SIGINT in a notebook does."""

    def __init__(self):
        self.at = None

    def __call__(self, step):
        if step == self.at:
            raise KeyboardInterrupt


@pytest.fixture
def interrupt():
    return Interrupt()


@pytest.fixture
def interrupted(database_url, tmp_path, interrupt):
    """A registry whose work can be interrupted; at the end rows and files agree."""
    with Registry.open(database_url, tmp_path / "store", hook=interrupt) as registry:
        yield registry
        interrupt.at = None
        assert Verifier(registry.database, registry.store).findings() == []


def files_in(registry):
    return [path for path in registry.store.root.rglob("*") if path.suffix in (".llam", ".tmp")]


@pytest.mark.parametrize("step", SAVE_STEPS)
def test_a_save_that_is_interrupted_leaves_a_row_with_its_file_or_nothing(interrupted, interrupt, engine, step):
    interrupt.at = step
    with pytest.raises(KeyboardInterrupt):
        interrupted.save(engine, "one")
    interrupt.at = None
    n_saved = 1 if step == "committed" else 0
    assert (len(interrupted.list()), len(files_in(interrupted))) == (n_saved, n_saved)
    assert interrupted.save(engine, "one").outcome is (SaveOutcome.DEDUPLICATED if n_saved else SaveOutcome.SAVED)


@pytest.mark.parametrize("step", ["created", "written", "staged", "renamed", "named"])
def test_a_flatten_that_is_interrupted_leaves_the_delta_as_it_was(interrupted, interrupt, step):
    engine, story = TokenEngine(), list(range(100, 140))
    rows = []
    for ids in (story, [*story, *range(40)]):
        engine.evaluate(ids)
        rows.append(interrupted.save(engine, ids).checkpoint)
    assert rows[1].parent_no == rows[0].ckpt_no
    interrupt.at = step
    with pytest.raises(KeyboardInterrupt):
        interrupted.flatten(rows[1].id)
    interrupt.at = None
    assert (interrupted.get(rows[1].id).file_path, len(files_in(interrupted))) == (rows[1].file_path, 2)
    assert interrupted.flatten(rows[1].id).parent_no is None


@pytest.mark.parametrize("how", ["copy", "link", "rewrite"])
@pytest.mark.parametrize("step", ["created", "staged", "renamed", "inserted", "committed"])
def test_an_adoption_that_is_interrupted_leaves_a_row_with_its_file_or_nothing(
    interrupted, interrupt, tmp_path, how, step
):
    path = tmp_path / "theirs"
    path.write_bytes(samples.data(samples.F16) if how == "rewrite" else checkpoint_bytes())
    before, options = path.read_bytes(), AdoptOptions(engine_for=lambda _: SampleEngine(), link=how == "link")
    interrupt.at = step
    if how == "link" and step in ("created", "staged"):
        pytest.skip("a link has no such step")
    with pytest.raises(KeyboardInterrupt):
        list(adopt(interrupted.context, [path], options))
    interrupt.at = None
    n_adopted = 1 if step == "committed" else 0
    assert (len(interrupted.list()), len(files_in(interrupted))) == (n_adopted, n_adopted)
    assert path.read_bytes() == before
    list(adopt(interrupted.context, [path], options))
    assert len(interrupted.list()) == 1


def test_an_adoption_that_is_interrupted_while_the_copy_is_checked_removes_it(interrupted, tmp_path, monkeypatch):
    path = tmp_path / "theirs"
    path.write_bytes(checkpoint_bytes())

    def stop(*_args, **_kw):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(interrupted.store, "map", stop)
        with pytest.raises(KeyboardInterrupt):
            list(adopt(interrupted.context, [path], AdoptOptions()))
    assert files_in(interrupted) == []


@pytest.mark.parametrize("step", ["written", "backed up"])
def test_a_repair_that_is_interrupted_leaves_no_temporary(interrupt, tmp_path, step):
    path = tmp_path / "padded.llam"
    path.write_bytes(bytes(3) + checkpoint_bytes())
    interrupt.at = step
    with pytest.raises(KeyboardInterrupt):
        FileRepairer(in_place=True, hook=interrupt).repair(path)
    assert path.read_bytes() == bytes(3) + checkpoint_bytes()
    assert {other.suffix for other in tmp_path.iterdir()} <= {".llam", ".bak"}


def test_a_file_outside_the_store_whose_write_is_interrupted_is_not_there(tmp_path, monkeypatch):
    def stop(_fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        disk.write_file(tmp_path / "exported", [b"data"], replace=False)
    assert list(tmp_path.glob("*exported*")) == []


def test_a_temporary_of_a_living_process_that_no_claim_counts_any_more_counts_in_the_budget(registry, engine):
    """Such as one that could not be unlinked. It is never deleted while its process lives."""
    first = registry.save(engine, "one").checkpoint
    left = registry.store.root / first.file_path
    left = left.with_name(f"{left.name[:4]}{'0' * 28}.{writers.my_tag()}.tmp")
    left.write_bytes(bytes(1_000_000))

    def collect(age_s):
        os.utime(left, (time.time() - age_s,) * 2)
        report = Collector(registry.context)
        report = report.run(report.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
        assert (report.done, left.exists()) == ((), True)
        with registry.database.read() as db:
            return collecting.used_bytes(db)

    assert collect(age_s=60) == first.file_size + collecting.BLOCK_BYTES, "the claim of its save counts it"
    assert collect(age_s=3600) == first.file_size + collecting.BLOCK_BYTES + 1_000_000
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    left.unlink()
