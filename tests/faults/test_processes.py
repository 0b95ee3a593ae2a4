"""Several processes on one registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support import child

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import rows
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, Status

# Restores, saves and collections of the race, over all its processes.
ROUNDS = int(os.environ.get("LLAMA_CKPT_TEST_ROUNDS", "1000"))  # read before clean_environment takes it away


def start_together(registry, orders, seconds=120):
    """Starts a child per order; all begin their work when every one is ready to. Gives their answers."""
    reading, writing = os.pipe()
    url = registry.database.url.render_as_string(hide_password=False)
    running = [
        subprocess.Popen(
            child.command(database_url=url, store=str(registry.store.root), gate=reading, **order),
            env=child.environment(),
            pass_fds=(reading,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    os.close(reading)
    os.close(writing)
    answers = []
    for process in running:
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    return answers


def test_processes_that_save_the_same_input_at_once_make_one_row_and_one_file_and_all_succeed(registry, engine):
    texts = [f"input {i}" for i in range(12)]
    answers = start_together(registry, [{"verb": "save", "texts": texts}] * 4)
    for of_one_text in zip(*answers, strict=True):
        outcomes = sorted(outcome for outcome, _ in of_one_text)
        assert outcomes == ["deduplicated"] * 3 + ["saved"]
        assert len({checkpoint_id for _, checkpoint_id in of_one_text}) == 1
    assert len(registry.list()) == len(texts)
    assert len(list(registry.store.root.rglob("*.llam"))) == len(texts)
    assert not list(registry.store.root.rglob("*.tmp"))


def test_readers_savers_and_gc_at_once_give_hits_and_misses_and_never_an_error(registry, engine):
    texts = [f"input {i}" for i in range(20)]
    for text in texts:
        registry.remove(registry.save(engine, text).checkpoint.id)
    reading = {"verb": "restore", "texts": texts * 3}
    answers = start_together(registry, [reading, reading, {"verb": "save", "texts": texts}, {"verb": "gc"}])
    assert set(answers[0] + answers[1]) <= {"hit", "no_match"}
    assert answers[3][1] == 0
    assert all(registry.restore(engine, text).outcome is Outcome.HIT for text in texts)
    assert not Collector(registry.context).plan(Policy(stale_grace_s=0)).findings


def test_eight_processes_that_read_save_and_collect_lose_no_live_row_its_file_and_never_fail(registry, engine):
    texts = [f"input {i}" for i in range(24)]
    n_each = ROUNDS // 8
    roles = ["read"] * 4 + ["save"] * 3 + ["collect"]
    answers = start_together(
        registry,
        [
            {"verb": "race", "role": r, "texts": texts, "rounds": n_each // 4 if r == "collect" else n_each}
            for r in roles
        ],
        seconds=120 + ROUNDS,
    )
    readers, savers, collector = answers[:4], answers[4:7], answers[7]
    assert {outcome for counts in readers for outcome in counts} <= {"hit", "no_match"}
    assert {outcome for counts in savers for outcome in counts} <= {"saved", "deduplicated"}
    assert set(collector) == {"collected"}
    assert sum(counts.get("hit", 0) for counts in readers) > 0
    assert Verifier(registry.database, registry.store).findings() == []
    assert registry.list(status=Status.ACTIVE)


def test_a_row_outlives_another_process_that_closes_the_database_after_a_second_connection_was_opened(tmp_path, engine):
    """Closing any descriptor of SQLite's file would drop the locks of this process: the one that closes last is then taken
    for the only one, deletes the write-ahead log, and what is committed after that is lost.
    """
    with Registry.open(store=tmp_path) as opened:
        with opened.database.read() as first, opened.database.read() as second:
            assert rows.is_empty(first)
            assert rows.is_empty(second)
        file = opened.database.url.database
        closing = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT 1 FROM gc_run').fetchall(); c.close()"
        subprocess.run([sys.executable, "-c", closing, file], check=True)
        saved = opened.save(engine, "one").checkpoint
        reading = (
            "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('SELECT id FROM llama_checkpoint_meta'))"
        )
        seen = subprocess.run([sys.executable, "-c", reading, file], check=True, capture_output=True, text=True)
    assert saved.id in seen.stdout
