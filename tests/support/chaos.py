"""Many processes on one registry, some of them killed: `python -m support.chaos --seconds 60 --processes 16 --url URL`.

Each child saves, matches, restores, removes, prunes and collects at random; the parent kills one now and then and starts
another. At the end the invariants are counted: one ACTIVE row a key, every ACTIVE row its whole file, every ACTIVE delta an
ACTIVE parent, the links of ACTIVE rows and no others, and no error but the documented ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

N_INPUTS = 40
# Longer than any save takes here: gc must not take a file for an orphan whose row is on its way.
GHOST_GRACE_S = 5.0


def child(url: str, store: str, seed: int, n_operations: int, seconds: float) -> None:
    """Works until it has done its share or its time is over; prints what it did as JSON."""
    from support.sample_engine import SampleEngine

    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.errors import Busy, NotFound
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy

    choice, counts, end = random.Random(seed), {}, time.monotonic() + seconds
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with Registry.open(url, store) as registry:
        collector = Collector(registry.context)
        for _ in range(n_operations):
            if time.monotonic() > end:
                break
            text = f"input {choice.randrange(N_INPUTS)}"
            verb = choice.choices(["save", "restore", "match", "remove", "prune", "gc"], [8, 8, 4, 3, 1, 1])[0]
            try:
                if verb == "save":
                    result = registry.save(engine, text).outcome.value
                elif verb == "restore":
                    result = registry.restore(engine, text).outcome.value
                elif verb == "match":
                    result = registry.match(text, fingerprint=engine.fingerprint).outcome.value
                elif verb == "remove":
                    rows = registry.list(at_most=5)
                    result = registry.remove(choice.choice(rows).id).status.value if rows else "none"
                elif verb == "prune":
                    result = str(min(1, len(collector.prune(collector.plan_prune(Policy(max_idle_s=1.0))[:3]))))
                else:
                    plan = collector.plan(Policy(stale_grace_s=0.5, ghost_grace_s=GHOST_GRACE_S))
                    result = f"failed {collector.run(plan).n_failed}"
            except (Busy, NotFound) as documented:
                result = type(documented).__name__
            counts[f"{verb}: {result}"] = counts.get(f"{verb}: {result}", 0) + 1
            engine.held = engine.ids  # a refused restore would have emptied it
    sys.stdout.write(json.dumps(counts))


def run(
    url: str, store: Path, *, processes: int, seconds: float, n_operations: int, n_kills: int, seed: int = 1
) -> dict:
    """Runs the children, kills some, and gives counts of outcomes, kills and errors."""
    choice = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    end, started, running, kills = time.monotonic() + seconds, 0, [], 0
    counts: dict[str, int] = {}
    errors: list[str] = []

    def start() -> None:
        nonlocal started
        started += 1
        left = max(0.5, end - time.monotonic())
        order = [url, str(store), str(seed * 1000 + started), str(n_operations), str(left)]
        line = [sys.executable, "-m", "support.chaos", "--child", *order]
        running.append(
            subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )

    for _ in range(processes):
        start()
    pause = max(0.05, seconds / (n_kills + 1))
    while running:
        victim = choice.choice(running)
        try:
            out, err = victim.communicate(timeout=pause)
        except subprocess.TimeoutExpired:
            if kills < n_kills and time.monotonic() < end:
                victim.send_signal(signal.SIGKILL)
                victim.communicate()
                kills += 1
                running.remove(victim)
                start()
            continue
        running.remove(victim)
        if victim.returncode != 0:
            errors.append(err[-2000:])
            continue
        for name, n in json.loads(out).items():
            counts[name] = counts.get(name, 0) + n
    return {"counts": counts, "kills": kills, "errors": errors}


def broken_invariants(url: str, store: Path) -> list[str]:
    """What does not hold, in words; nothing when all is well."""
    from support.links import wrong_links

    from llama_ckpt.integrity.verify import Verifier
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Status

    broken: list[str] = []
    with Registry.open(url, store) as registry:
        found = Verifier(registry.database, registry.store).findings()
        broken += [f"{f.kind}: {f.path}: {f.detail}" for f in found if f.kind.value in ("missing", "corrupt")]
        active = {c.ckpt_no: c for c in registry.list(status=Status.ACTIVE)}
        keys = [(c.fingerprint, c.input_hash) for c in active.values()]
        if len(set(keys)) != len(keys):
            broken.append("two ACTIVE rows of one key")
        broken += [f"{c.id}: its parent is not ACTIVE" for c in active.values() if c.parent_no not in (None, *active)]
        broken += [] if broken else wrong_links(registry)
    return broken


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        url, store, seed, n_operations, seconds = sys.argv[2:]
        child(url, store, int(seed), int(n_operations), float(seconds))
        return 0
    arguments = argparse.ArgumentParser(prog="python -m support.chaos", description=__doc__)
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--processes", type=int, default=16)
    arguments.add_argument("--seconds", type=float, default=60)
    arguments.add_argument("--kills", type=int, default=30)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-chaos-") as folder:
        store = Path(folder) / "store"
        done = run(
            chosen.url,
            store,
            processes=chosen.processes,
            seconds=chosen.seconds,
            n_operations=10**9,
            n_kills=chosen.kills,
        )
        broken = broken_invariants(chosen.url, store)
    sys.stdout.write(json.dumps({**done, "broken": broken}, indent=2) + "\n")
    return 1 if broken or done["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
