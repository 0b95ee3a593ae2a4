"""What tests run in a process of their own: a registry, a SampleEngine, one verb. `python -m support.child ORDER-AS-JSON`.

With `die_at` the process ends at that step as `kill -9` would end it: no clean-up, no flush, no exception.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

KILLED = 137


def main() -> None:
    order = json.loads(sys.argv[1])
    die_at = order.get("die_at")

    def hook(step: str) -> None:
        if step == die_at:
            os._exit(KILLED)

    from support.sample_engine import SampleEngine

    from llama_ckpt.collector import Collector
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention import Policy

    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with Registry.open(order["database_url"], order["store"], hook=hook) as registry:
        collector = Collector(registry.parts)
        if order.get(
            "gate"
        ):  # all children start their work at once: each holds the pipe's reading end until it is closed
            os.read(int(order["gate"]), 1)
        if order["verb"] == "save":
            results = [registry.save(engine, text) for text in order["texts"]]
            answer = [[r.outcome.value, r.checkpoint.id] for r in results]
        elif order["verb"] == "restore":
            answer = [registry.restore(engine, text).outcome.value for text in order["texts"]]
        elif order["verb"] == "prune":
            answer = len(collector.prune(collector.plan_prune(Policy(max_age_s=0))))
        elif order["verb"] == "gc":
            report = collector.run(collector.plan(stale_grace_s=0, ghost_grace_s=0))
            answer = [report.freed_bytes, report.n_failed]
        else:
            raise SystemExit(f"unknown verb {order['verb']}")
    sys.stdout.write(json.dumps(answer))


def command(**order: object) -> list[str]:
    """The command line of a child."""
    return [sys.executable, "-m", "support.child", json.dumps(order)]


def environment() -> dict[str, str]:
    """The child finds `support` as the tests do."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


if __name__ == "__main__":
    main()
