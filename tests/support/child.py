"""What tests run in a process of their own: a registry, a SampleEngine, one verb. `python -m support.child ORDER-AS-JSON`.

With `die_at` the process ends at that step as `kill -9` would end it: no clean-up, no flush, no exception.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

KILLED = 137


def main() -> None:
    order = json.loads(sys.argv[1])
    die_at = order.get("die_at")

    def hook(step: str) -> None:
        if step == die_at:
            os._exit(KILLED)

    from support import samples
    from support.sample_engine import SampleEngine

    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy

    n_tokens = order.get("n_tokens")  # a larger file than a recorded state gives
    engine = SampleEngine() if n_tokens is None else SampleEngine(samples.F16_FLASH, n_tokens=n_tokens)
    engine.evaluate(engine.ids)
    policy = Policy(max_bytes=order.get("max_bytes"))
    with Registry.open(order["database_url"], order["store"], policy=policy, hook=hook) as registry:
        if order.get(
            "gate"
        ):  # all children start their work at once: each holds the pipe's reading end until it is closed
            os.read(int(order["gate"]), 1)
        answer = work(registry, engine, order)
    sys.stdout.write(json.dumps(answer))


def work(registry, engine, order):
    """Does what the verb says, and gives the answer."""
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.collector.purge import Purge, Purger
    from llama_ckpt.exchange.adopt import AdoptOptions, adopt
    from llama_ckpt.integrity.reconcile import Reconciler
    from llama_ckpt.retention.policy import Policy
    from llama_ckpt.values import Status

    collector = Collector(registry.context)
    if order["verb"] == "save":
        results = [registry.save(engine, text) for text in order["texts"]]
        answer = [[r.outcome.value, r.checkpoint and r.checkpoint.id] for r in results]
    elif order["verb"] == "restore":
        answer = [registry.restore(engine, text).outcome.value for text in order["texts"]]
    elif order["verb"] == "prune":
        answer = len(collector.prune(collector.plan_prune(Policy(max_age_s=-1))))
    elif order["verb"] == "gc":
        # A file whose row is on its way in another process is younger than the grace.
        report = collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=60)))
        answer = [report.freed_bytes, report.n_failed]
    elif order["verb"] == "unprune":
        answer = [str(result) for result in Reconciler(registry.context).unprune(registry.list(status=Status.STALE))]
    elif order["verb"] == "flatten":
        answer = registry.flatten(order["id"]).id
    elif order["verb"] == "purge":
        answer = Purger(registry.context).run(Purge(label=order["label"])).n_rows
    elif order["verb"] == "adopt":
        options = AdoptOptions(engine_for=lambda _: engine, link=order.get("link", False))
        answer = [found.outcome.value for found in adopt(registry.context, [Path(order["path"])], options)]
    elif order["verb"] == "race":
        answer = race(registry, engine, order["role"], order["texts"], order["rounds"])
    else:
        raise SystemExit(f"unknown verb {order['verb']}")
    return answer


def race(registry, engine, role: str, texts: list[str], rounds: int) -> dict[str, int]:
    """Reads, saves, or marks and frees, over and over; counts what each round came to."""
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.errors import Busy
    from llama_ckpt.retention.policy import Policy

    collector, counts = Collector(registry.context), {}
    choice = random.Random(os.getpid())
    for _ in range(rounds):
        text = choice.choice(texts)
        if role == "read":
            came_to = registry.restore(engine, text).outcome.value
        elif role == "save":
            came_to = registry.save(engine, text).outcome.value
        else:
            try:
                collector.prune(collector.plan_prune(Policy(max_count=len(texts) // 2)))
                # Files whose rows are on their way are younger than the grace.
                report = collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=60), skip_grace=True))
                came_to = "failed" if report.n_failed else "collected"
            except Busy:
                came_to = "busy"
        counts[came_to] = counts.get(came_to, 0) + 1
    return counts


def command(**order: object) -> list[str]:
    """The command line of a child."""
    return [sys.executable, "-m", "support.child", json.dumps(order)]


def environment() -> dict[str, str]:
    """The child finds `support` as the tests do."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


if __name__ == "__main__":
    main()
