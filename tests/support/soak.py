"""Many processes on one registry, some of them killed: `python -m support.soak --seconds 90` (`make soak`).

Every process of `support.soak_child` saves, restores, extends, merges, flattens, removes, prunes, collects, purges and repairs at
random under a byte budget; the parent kills one now and then and starts another. The engine's state depends on its tokens, so a
wrong state is seen. Afterwards every row, file, link and byte is checked. The command does it on SQLite and on PostgreSQL, and
exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support import child, soak_child
from support.causal_engine import state_of
from support.databases import POSTGRESQL, temporary_database
from support.links import wrong_links
from support.program import program
from support.shards import bytes_seen_at_once, occupied

from llama_ckpt.checkpoints.read import stored_cells
from llama_ckpt.collector.collector import Collector
from llama_ckpt.db.connect import sqlite_url
from llama_ckpt.errors import Busy
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Checkpoint, Status

MAX_BYTES = 1_500_000
PATIENCE_S = 60  # for a process to end after its time is over
LOOK_S = 0.1  # between two looks at the processes and at the bytes on disk


@dataclass
class Soak:
    """What a soak did, and what was wrong."""

    operations: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    n_kills: int = 0
    peak_bytes: int = 0
    n_active: int = 0
    n_deltas: int = 0


@dataclass
class _Process:
    running: subprocess.Popen[bytes]
    log: Path

    def problem(self) -> str | None:
        """What its exit code and its last words say; None if it ended well."""
        if self.running.returncode == 0:
            return None
        return f"a process ended with {self.running.returncode}: {self.log.with_suffix('.err').read_text()[-1500:]}"


class _Crowd:
    """The processes of a soak."""

    def __init__(self, url: str, store: Path, logs: Path, end: float, seed: int):
        self._order = {"url": url, "store": str(store), "max_bytes": MAX_BYTES}
        self._logs, self._end, self._seed = logs, end, seed
        self.processes: list[_Process] = []
        self.n_started = 0

    def start(self) -> None:
        self.n_started += 1
        log = self._logs / f"{self.n_started}.jsonl"
        seconds = max(0.0, self._end - time.monotonic())
        order = {**self._order, "log": str(log), "seed": self._seed * 7919 + self.n_started, "seconds": seconds}
        line = [sys.executable, "-m", "support.soak_child", json.dumps(order)]
        with log.with_suffix(".err").open("wb") as errors:
            self.processes.append(_Process(subprocess.Popen(line, env=child.environment(), stderr=errors), log))

    def kill(self, victim: _Process, soak: Soak) -> None:
        """Kills a process at an arbitrary moment, and starts another in its place."""
        self.processes.remove(victim)
        if victim.running.poll() is None:
            victim.running.send_signal(signal.SIGKILL)
            victim.running.wait()
            soak.n_kills += 1
        else:
            self._note_end(victim, soak)
        self.start()

    def join(self, soak: Soak) -> None:
        """Waits for all; a process that does not end is a problem."""
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            try:
                process.running.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.running.kill()
                process.running.wait()
                soak.problems["a process hung"] += 1
            else:
                self._note_end(process, soak)

    def _note_end(self, process: _Process, soak: Soak) -> None:
        if said := process.problem():
            soak.problems[said] += 1

    def read_logs(self, soak: Soak) -> None:
        for log in self._logs.glob("*.jsonl"):
            for line in log.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed process
                    name, problems = json.loads(line)
                    soak.operations[name] += 1
                    soak.problems.update(problems)


def run(url: str, store: Path, *, processes: int, seconds: float, kill_every_s: float, seed: int = 1) -> Soak:
    """Runs the processes, kills some, then checks everything that they left."""
    soak, choice = Soak(), random.Random(seed)
    Registry.open(url, store).close()  # the schema is made once
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-soak-") as logs:
        end = time.monotonic() + seconds
        crowd = _Crowd(url, store, Path(logs), end, seed)
        for _ in range(processes):
            crowd.start()
        next_kill = time.monotonic() + kill_every_s
        while (now := time.monotonic()) < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                crowd.processes[0].running.wait(timeout=min(LOOK_S, end - now))
            soak.peak_bytes = max(soak.peak_bytes, bytes_seen_at_once(store, occupied))
            if now > next_kill:
                next_kill = now + choice.uniform(0.5, 1.5) * kill_every_s
                crowd.kill(choice.choice(crowd.processes), soak)
        crowd.join(soak)
        crowd.read_logs(soak)
    if soak.peak_bytes > MAX_BYTES:
        soak.problems[f"{soak.peak_bytes} bytes on disk, and the budget is {MAX_BYTES}"] += 1
    soak.problems.update(_check_end(url, store, soak))
    return soak


# -- what must hold at the end ---------------------------------------------------------------------------------------------


def _check_end(url: str, store: Path, soak: Soak) -> Iterator[str]:
    with Registry.open(url, store) as registry:
        _collect_all(registry)
        for finding in Verifier(registry.database, registry.store).findings():
            yield f"after gc: {finding.kind}: {finding.path}: {finding.detail}"
        rows = registry.list()
        active = {row.ckpt_no: row for row in rows if row.status is Status.ACTIVE}
        soak.n_active, soak.n_deltas = len(active), sum(row.parent_no is not None for row in active.values())
        if len({(row.fingerprint, row.input_hash) for row in active.values()}) != len(active):
            yield "two ACTIVE rows of one input"
        for row in active.values():
            yield from _check_row(registry, row, active)
        yield from wrong_links(registry)
        named = {row.file_path for row in rows}
        files = [path for path in store.rglob("*") if path.suffix in (".llam", ".tmp")]
        yield from (f"without a row: {path}" for path in files if str(path.relative_to(store)) not in named)
    where = ("--store", store, "--database-url", url)
    verified = program("verify", "--all", "--quiet", *where, capture_output=True)
    if verified.returncode:
        yield f"llama-ckpt verify --all ends with {verified.returncode}: {verified.stdout}{verified.stderr}"


def _collect_all(registry: Registry) -> None:
    """Runs gc without any grace until it has seen every ghost twice; waits for the lease of a killed run."""
    collector, policy = Collector(registry.context), Policy(stale_grace_s=0, ghost_grace_s=0)
    deadline = time.monotonic() + 2 * soak_child.LEASE_S
    n_runs = 0
    while n_runs < 2:
        try:
            collector.run(collector.plan(policy, skip_grace=True, force=registry.registry_id))
            n_runs += 1
        except Busy:
            if time.monotonic() > deadline:
                raise


def _check_row(registry: Registry, row: Checkpoint, active: dict[int, Checkpoint]) -> Iterator[str]:
    path = registry.store.root / row.file_path
    if not row.is_covered and (not path.exists() or path.stat().st_size != row.file_size):
        yield f"{row.id}: its file is missing or has another size"
    elif row.parent_no is not None and row.parent_no not in active:
        yield f"{row.id}: its parent is not ACTIVE"
    else:
        with stored_cells(registry.context, row) as (cells, _):
            if bytes(cells.state) != state_of(cells.token_ids):
                yield f"{row.id}: WRONG STATE"


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m support.soak", description=__doc__)
    arguments.add_argument("--seconds", type=float, default=90, help="for each database")
    arguments.add_argument("--processes", type=int, default=12)
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    chosen = arguments.parse_args()
    n_problems = 0
    for name in ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory(prefix="llama-ckpt-soak-") as folder, contextlib.ExitStack() as databases:
            url = sqlite_url(Path(folder) / "registry.sqlite3")
            if name == "postgresql":
                url = databases.enter_context(temporary_database(POSTGRESQL))
            store = Path(folder) / "store"
            size = {"processes": chosen.processes, "seconds": chosen.seconds}
            soak = run(url, store, **size, kill_every_s=1.6, seed=chosen.seed)
        n_problems += sum(soak.problems.values())
        said = {"database": name, "seed": chosen.seed, **vars(soak), "n_operations": soak.operations.total()}
        said |= {"operations": dict(sorted(soak.operations.items())), "problems": dict(soak.problems.most_common(20))}
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
    return 1 if n_problems else 0


if __name__ == "__main__":
    sys.exit(main())
