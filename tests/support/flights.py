"""Processes that warm the same inputs in random order: `python -m support.flights ORDER-AS-JSON`. Some die on the way.

The inputs are 5 system prompts of two blocks, 8 documents of one block each, and 5 questions of one block about each.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import sqlalchemy as sa
from support import child

BLOCK = 16
N_DISTINCT = 5 * 2 * BLOCK + 5 * 8 * BLOCK + 5 * 8 * 5 * BLOCK  # tokens, each with all before it
STEPS = ["evaluating", "looked up", "staged", "renamed", "inserted", "committed", "leased", "waits"]
CLAIM_S = 2.0


def inputs() -> list[list[int]]:
    """200 inputs of four blocks."""

    def block(kind: int, number: int, n: int) -> list[int]:
        return [1 + kind * 100_000 + number * 100 + i for i in range(n)]

    return [
        block(0, system, 2 * BLOCK) + block(1, document, BLOCK) + block(2, question, BLOCK)
        for system in range(5)
        for document in range(8)
        for question in range(5)
    ]


def set_block_size(registry) -> None:
    """Small blocks, for small inputs. Takes effect when the registry is opened again."""
    from llama_ckpt.db.tables import registry_info

    with registry.database.write() as db:
        db.execute(sa.insert(registry_info).values(name="block_size", value=str(BLOCK)))


def work(order: dict) -> dict:
    """Warms all inputs; says what was evaluated, restored and waited."""
    from support.causal_engine import CausalEngine, state_of

    from llama_ckpt.registry import Registry
    from llama_ckpt.warm import single_flight

    choice = random.Random(order["seed"])
    left = {order["die_at"]: order["die_after"]} if order.get("die_at") else {}

    def hook(step: str) -> None:
        if step in left:
            left[step] -= 1
            if left[step] <= 0:
                os._exit(child.KILLED)

    if order.get("claim_s"):
        single_flight.CLAIM_S = order["claim_s"]
    engine = CausalEngine()
    engine.evaluating = lambda: hook("evaluating")
    waited, gave_up, problems = 0.0, 0, 0
    todo = inputs()
    choice.shuffle(todo)
    with Registry.open(order["database_url"], order["store"], hook=hook) as registry:
        os.read(int(order["gate"]), 1)
        for token_ids in todo:
            before = len(engine.evaluated)
            warmed = registry.warm(engine, token_ids)
            assert engine.held.tolist() == token_ids
            assert engine.state == state_of(token_ids), "not the state of a cold run"
            assert warmed.n_evaluated - (warmed.n_restored == len(token_ids) - 1) == len(engine.evaluated) - before
            assert warmed.n_kept + warmed.n_restored + warmed.n_evaluated == len(token_ids)
            waited, gave_up = max(waited, warmed.waited_s), gave_up + warmed.gave_up
            problems += warmed.problem is not None
    evaluated = [key.hex() for key in engine.evaluated]
    return {"evaluated": evaluated, "waited_s": waited, "gave_up": gave_up, "problems": problems}


def start(registry, gate: int, **order: object) -> subprocess.Popen:
    """One process; it begins when the gate's writing end is closed."""
    url = registry.database.url.render_as_string(hide_password=False)
    line = json.dumps({"database_url": url, "store": str(registry.store.root), "gate": gate, **order})
    return subprocess.Popen(
        [sys.executable, "-m", "support.flights", line],
        env=child.environment(),
        pass_fds=(gate,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(process: subprocess.Popen, seconds: float) -> dict | None:
    """What a process did; None if it died on the way."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode in (0, child.KILLED), err
    return json.loads(out) if process.returncode == 0 else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(work(json.loads(sys.argv[1]))))
