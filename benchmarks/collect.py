"""`python -m benchmarks.collect --rows 1000000 --files 200000`: plan and run of gc on a planted store, a tenth to collect.

Yardsticks, in the same run: a bare walk of the folders, a bare read of the rows, a bare loop of unlinks over as many files of the
same kind. Saves run beside gc in a process of their own. Memory is the peak of the process that plans and runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import sqlalchemy as sa

from llama_ckpt.collector import Collector
from llama_ckpt.db import queries
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.files import path_of
from llama_ckpt.fingerprint import active_key
from llama_ckpt.registry import Registry

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.sample_engine import SampleEngine  # a state without a model
from support.whole import checkpoint_bytes

DAY_US = 86_400 * 1_000_000
DEAD = "00000000-1-1"  # a temporary of a machine that is not this one


def is_collected(number: int) -> bool:
    """Temporaries, orphans and STALE ones: those are whole, since freeing blocks is most of what an unlink takes."""
    return number % 20 == 0 or number % 10 in (1, 2)


def plant_files(root: Path, n_files: int) -> None:
    """Every twentieth is a temporary."""
    whole = checkpoint_bytes()
    long_ago = time.time() - 2 * 86_400
    for number in range(n_files):
        relative = path_of(f"{number * 7919 % 65536:04x}{number:028x}")
        if number % 20 == 0:
            relative = relative.replace(".llam", f".{DEAD}.tmp")
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(whole if is_collected(number) else whole[:300])  # else a header that holds, and one block
            file.truncate(len(whole))
        os.utime(path, (long_ago, long_ago))


def plant_rows(registry: Registry, engine: SampleEngine, n_rows: int, n_files: int) -> None:
    digest, size = engine.fingerprint.digest, len(checkpoint_bytes())
    with registry.database.read() as db:
        now = queries.clock_us(db)
    for first in range(0, n_rows, 5000):
        rows = []
        for number in range(first, min(first + 5000, n_rows)):
            kind = number % 10 if number < n_files else 9  # 1: an orphan; 2: STALE; 3: its file is gone
            if number < n_files and (kind == 1 or number % 20 == 0):
                continue
            stale, of_input = kind == 2, number.to_bytes(32, "big")
            checkpoint_id = f"{number * 7919 % 65536:04x}{number:028x}"
            rows.append(
                dict(id=checkpoint_id, model_name="sample", input_hash=of_input, status="STALE" if stale else "ACTIVE",
                     pinned=0, file_path=path_of(checkpoint_id), active_key=None if stale else active_key(digest, of_input),
                     fingerprint=digest, tokens_hash=of_input, n_tokens=256, memory_kind="full",
                     file_size=size if number < n_files else 0, payload_crc32=0, created_us=now - DAY_US,
                     last_used_us=now - number, hit_count=number % 7, stale_reason="evicted" if stale else None,
                     stale_us=now - 2 * DAY_US if stale else None, start_token=0)
            )  # fmt: skip
        if rows:
            with registry.database.write() as db:
                db.execute(sa.insert(meta), rows)
    for number in range(3, n_files, 10):
        (registry.store.root / path_of(f"{number * 7919 % 65536:04x}{number:028x}")).unlink()


def bare_walk(root: Path) -> float:
    start = time.perf_counter()
    for folder, _, names in os.walk(root):
        for name in names:
            os.lstat(os.path.join(folder, name))
    return time.perf_counter() - start


def bare_read(registry: Registry) -> float:
    start, last = time.perf_counter(), 0
    columns = [meta.c.ckpt_no, meta.c.file_path, meta.c.status, meta.c.stale_us, meta.c.last_used_us, meta.c.pinned]
    with registry.database.read() as db:
        while rows := db.execute(
            sa.select(*columns).where(meta.c.ckpt_no > last).order_by(meta.c.ckpt_no).limit(5000)
        ).all():
            last = rows[-1].ckpt_no
    return time.perf_counter() - start


def bare_unlinks(folder: Path, n: int) -> float:
    """As many files of the same size, in as many folders."""
    whole, paths = checkpoint_bytes(), []
    for number in range(n):
        path = folder / path_of(f"{number * 7919 % 65536:04x}{number:028x}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        paths.append(path)
    start = time.perf_counter()
    for path in paths:
        path.unlink()
    return time.perf_counter() - start


def saver(url: str, store: str) -> None:
    """Saves until its standard input is closed; prints the milliseconds of each."""
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    os.set_blocking(0, False)
    times, number = [], 0
    with Registry.open(url, store) as registry:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin.buffer.raw.read(1) is None:
            start = time.perf_counter()
            registry.save(engine, f"saved beside gc {os.getpid()} {number}")
            times.append((time.perf_counter() - start) * 1000)
            number += 1
    print(json.dumps(times))


def saves_during(url: str, store: Path, work) -> float:
    """Runs `work` beside a saver; the saver's median in milliseconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.collect", "--saver", "--url", url, "--store", str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.stdout.readline()
    work()
    out, _ = child.communicate("")
    return median(json.loads(out))


def run(url: str, n_rows: int, n_files: int) -> dict[str, object]:
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        with Registry.open(url or None, root) as registry:
            registry.save(engine, "the first brings the model")
            plant_files(root, n_files)
            plant_rows(registry, engine, n_rows, n_files)
            shown = registry.database.url.render_as_string(hide_password=False)
            walk_s, read_s = bare_walk(root), bare_read(registry)
            before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            collector = Collector(registry.parts)
            start = time.perf_counter()
            plan = collector.plan(at_once=True)
            plan_s = time.perf_counter() - start
            # Every second item alone, timed; the others beside a process that saves.
            start = time.perf_counter()
            report = collector.run(replace(plan, items=plan.items[::2]))
            run_s = time.perf_counter() - start
            unlink_s = bare_unlinks(Path(folder) / "bare", sum(i.kind != "missing" for i in plan.items[::2]))
            quiet_ms = saves_during(shown, root, lambda: time.sleep(3))
            during_ms = saves_during(shown, root, lambda: collector.run(replace(plan, items=plan.items[1::2])))
        kinds: dict[str, int] = {}
        for item in plan.items:
            kinds[item.kind.value] = kinds.get(item.kind.value, 0) + 1
    return {
        "database": registry.database.dialect,
        "rows": n_rows,
        "files": n_files,
        "items": kinds,
        "failed": report.n_failed,
        "walk_s": walk_s,
        "read_rows_s": read_s,
        "plan_s": plan_s,
        "plan_to_walk_and_read": plan_s / (walk_s + read_s),
        "run_s": run_s,
        "bare_unlink_s": unlink_s,
        "run_to_unlink": run_s / unlink_s,
        "save_ms": {"alone": quiet_ms, "beside gc": during_ms},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_before_plan_mb": before_mb,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=__doc__)
    arguments.add_argument("--url", default="", help="default: SQLite beside the files")
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--files", type=int, default=200_000)
    arguments.add_argument("--saver", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--store", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.saver:
        saver(chosen.url, chosen.store)
        return 0
    print(json.dumps(run(chosen.url, chosen.rows, chosen.files), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
