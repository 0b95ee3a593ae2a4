"""A byte budget under several processes, measured from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess

import pytest
import sqlalchemy as sa
from support import child, samples
from support.sample_engine import SampleEngine
from support.shards import bytes_in_shards, bytes_seen_at_once

from llama_ckpt.db.tables import save_claim
from llama_ckpt.fingerprint import hash_input
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.values import Outcome, Status

LIMIT = 10 << 20
N_TOKENS = 117  # some 2.7 MB a checkpoint: three fit


def run_children(registry, orders):
    """Children at work, and the largest sum of bytes that was seen meanwhile."""
    url = registry.database.url.render_as_string(hide_password=False)
    lines = [child.command(database_url=url, store=str(registry.store.root), **order) for order in orders]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(line, env=child.environment(), **pipes) for line in lines]
    most = n_looks = 0
    while working := [process for process in running if process.poll() is None]:
        most = max(most, bytes_seen_at_once(registry.store.root))
        n_looks += 1
        with contextlib.suppress(subprocess.TimeoutExpired):  # leaves the processors to those who work
            working[0].wait(0.003)
    answers = []
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    return answers, max(most, bytes_in_shards(registry.store.root)), n_looks


@pytest.mark.parametrize("n_at_start", [0, 3])
def test_of_twenty_saves_from_four_processes_the_store_never_holds_more_than_its_budget(registry, n_at_start):
    engine = SampleEngine(samples.F16_FLASH, n_tokens=N_TOKENS)
    engine.evaluate(engine.ids)
    size = 0
    for i in range(n_at_start):
        size = registry.save(engine, f"earlier {i}").bytes_written
    orders = [
        {"verb": "save", "texts": [f"{p} {i}" for i in range(5)], "max_bytes": LIMIT, "n_tokens": N_TOKENS}
        for p in range(4)
    ]
    answers, most, n_looks = run_children(registry, orders)
    outcomes = [outcome for answer in answers for outcome, _ in answer]
    assert len(outcomes) == 20
    assert set(outcomes) <= {"saved", "refused"}
    assert outcomes.count("saved") >= 5, "a budget is no reason to save nothing"
    assert most <= LIMIT, f"{most} bytes were there at once"
    assert most >= max(size * n_at_start, LIMIT // 2), f"{n_looks} looks saw nothing of it"
    assert Verifier(registry.database, registry.store).findings() == []
    # Two that make room at once may mark one more than they free: its row is STALE, and has its file.
    assert sum(row.file_size for row in registry.list()) == bytes_in_shards(registry.store.root)
    active = registry.list(status=Status.ACTIVE)
    assert all(registry.restore(engine, text).outcome is Outcome.HIT for text in texts_of(active, n_at_start))
    with registry.database.read() as db:
        assert list(db.scalars(sa.select(save_claim.c.holder).where(save_claim.c.holder != "budget"))) == []


def texts_of(rows, n_at_start):
    texts = [f"earlier {i}" for i in range(n_at_start)] + [f"{p} {i}" for p in range(4) for i in range(5)]
    known = {hash_input(text): text for text in texts}
    return [known[row.input_hash] for row in rows]
