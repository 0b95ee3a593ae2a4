"""How long do scan, plan and delete take on a store with a tenth of each kind to collect, and do they slow down other saves?

The same run also measures a bare walk of the folders, a bare read of the rows, a bare loop of unlinks over as many files of the
same kind, and `diskcache.Cache.check` over as many entries. A run deletes what it collects, so each store is timed once.
The files to collect are those of the shortest checkpoints that a match accepts. With longer files an unlink takes longer, and
the time in addition to it stays the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import sqlalchemy as sa

from benchmarks import databases, planting
from benchmarks.measuring import Case, peak_above_idle, timed
from benchmarks.sizes import Sizes
from benchmarks.synthetic import SampleEngine, checkpoint_bytes, ids_number
from llama_ckpt.collector.collector import Collector
from llama_ckpt.context import DEFAULT_MIN_TOKENS
from llama_ckpt.db import rows
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.fingerprint import active_key
from llama_ckpt.gc_values import GcKind, GcPlan
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import path_of

DAY_US = 86_400 * 1_000_000
DEAD = "00000000-1-1"  # a temporary of a machine that is not this one
ROOT = Path(__file__).parents[1]
_MOST_ROUNDS = 10


def file_bytes() -> bytes:
    """A complete checkpoint with the fewest tokens that a match accepts."""
    return checkpoint_bytes(n_tokens=DEFAULT_MIN_TOKENS)


def is_collected(number: int) -> bool:
    """Whether gc deletes this file. STALE ones are complete files, because most of an unlink is the freeing of blocks."""
    return number % 20 == 0 or number % 10 in (1, 2)


def relative_path(number: int) -> str:
    """Every twentieth file is a temporary."""
    relative = path_of(planting.id_of(number))
    return relative.replace(".llam", f".{DEAD}.tmp") if number % 20 == 0 else relative


def plant_files(root: Path, n_files: int) -> None:
    whole = file_bytes()
    long_ago = time.time() - 2 * 86_400
    for number in range(n_files):
        path = root / relative_path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(whole if is_collected(number) else whole[:300])  # else a header that holds, and one block
            file.truncate(len(whole))
        os.utime(path, (long_ago, long_ago))


def plant_rows(registry: Registry, engine: SampleEngine, n_rows: int, n_files: int) -> None:
    digest, size = engine.fingerprint.digest, len(file_bytes())
    with registry.database.read() as db:
        now = rows.clock_us(db)
    for first in range(0, n_rows, 5000):
        values = []
        for number in range(first, min(first + 5000, n_rows)):
            kind = number % 10 if number < n_files else 9  # 1: an orphan; 2: STALE; 3: its file is gone
            if number < n_files and (kind == 1 or number % 20 == 0):
                continue
            stale, input_hash = kind == 2, number.to_bytes(32, "big")
            checkpoint_id = planting.id_of(number)
            values.append(
                dict(id=checkpoint_id, model_name="sample", input_hash=input_hash, status="STALE" if stale else "ACTIVE",
                     pinned=0, file_path=path_of(checkpoint_id), active_key=None if stale else active_key(digest, input_hash),
                     fingerprint=digest, tokens_hash=input_hash, n_tokens=256, memory_kind="full",
                     file_size=size if number < n_files else 0, payload_crc32=0, created_us=now - DAY_US,
                     last_used_us=now - number, hit_count=number % 7, stale_reason="evicted" if stale else None,
                     stale_us=now - 2 * DAY_US if stale else None, start_token=0)
            )  # fmt: skip
        if values:
            with registry.database.write() as db:
                db.execute(sa.insert(meta), values)
    if registry.database.dialect == "postgresql":
        with registry.database.write() as db:
            db.exec_driver_sql("ANALYZE")  # as the server does by itself within a minute or two
    for number in range(3, n_files, 10):
        (registry.store.root / path_of(planting.id_of(number))).unlink()


def bare_walk(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            os.lstat(os.path.join(folder, name))


def bare_read(registry: Registry) -> None:
    last = 0
    columns = [meta.c.ckpt_no, meta.c.file_path, meta.c.status, meta.c.stale_us, meta.c.last_used_us, meta.c.pinned]
    with registry.database.read() as db:
        while rows := db.execute(
            sa.select(*columns).where(meta.c.ckpt_no > last).order_by(meta.c.ckpt_no).limit(5000)
        ).all():
            last = rows[-1].ckpt_no


def plant_bare(folder: Path, n_files: int) -> set[str]:
    """Write the same files as half of those that gc will delete; return their paths in the folder."""
    whole = file_bytes()
    relative = [relative_path(number) for number in range(n_files) if is_collected(number)][::2]
    for path in (folder / name for name in relative):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
    return set(relative)


def bare_unlinks(folder: Path, paths: list[str]) -> None:
    for path in paths:
        os.unlink(f"{folder}/{path}")


def check_seconds(folder: Path, n: int) -> float:
    """Seconds of `diskcache.Cache.check` over as many entries, each a file of one block, which it does not read."""
    import diskcache

    with diskcache.Cache(str(folder), disk_min_file_size=0) as cache:
        whole = file_bytes()[:4096]
        with cache.transact():
            for number in range(n):
                cache.set(number, whole)
        return timed(cache.check)


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure a case for each database and size."""
    kinds = ["sqlite", *(["postgresql"] if sizes.postgresql_rows and not databases.why_no_server() else [])]
    return [_of_store(kind, *size, folder / f"{kind}-{size[0]}") for kind in kinds for size in sizes.collect]


def _of_store(kind: str, n_rows: int, n_files: int, folder: Path) -> Case:
    parameters: dict[str, int | str] = {"database": kind, "rows": n_rows, "files": n_files}
    case = Case(question="collect", name=f"{kind}, {n_rows:,} rows, {n_files:,} files", parameters=parameters)
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with databases.database_url(kind) as url, Registry.open(url, folder / "store", upgrade=True) as registry:
        registry.save(engine, "the first brings the model")
        plant_files(registry.store.root, n_files)
        half = plant_bare(folder / "bare", n_files)
        plant_rows(registry, engine, n_rows, n_files)
        os.sync()  # the first to unlink a file that is not on the disk yet would have the less to do
        _measure(case, registry, folder / "bare", half)
    case.add("diskcache.Cache.check", check_seconds(folder / "diskcache", n_files))
    return case


def _measure(case: Case, registry: Registry, bare: Path, half: set[str]) -> None:
    collector = Collector(registry.context)
    plans: list[GcPlan] = []
    case.add("bare walk", timed(lambda: bare_walk(registry.store.root)))
    case.add("bare read of rows", timed(lambda: bare_read(registry)))
    peak = peak_above_idle(lambda: case.add("plan", timed(lambda: plans.append(collector.plan(skip_grace=True)))))
    plan = plans[0]
    # Rows whose file is gone are marked, not deleted. Of the rest one half goes alone, the other beside a process that saves.
    missing = [item for item in plan.items if item.kind is GcKind.MISSING]
    mine = [item for item in plan.items if item.path in half]
    others = [item for item in plan.items if item.kind is not GcKind.MISSING and item.path not in half]
    case.add("mark missing", timed(lambda: collector.run(replace(plan, items=tuple(missing)))))
    assert len(mine) == len(half)
    # Some of each in turn: how long an unlink takes changes with what the disk does just then.
    rounds = max(1, min(_MOST_ROUNDS, len(mine) // 1000))
    for i in range(rounds):
        case.add("bare unlink", timed(lambda: bare_unlinks(bare, [item.path for item in mine[i::rounds]])))  # noqa: B023
        case.add("run", timed(lambda: collector.run(replace(plan, items=tuple(mine[i::rounds])))))  # noqa: B023
    url, store = registry.database.url.render_as_string(hide_password=False), registry.store.root
    alone = saves_during(url, store, lambda: time.sleep(1))
    beside = saves_during(url, store, lambda: collector.run(replace(plan, items=tuple(others))))
    prune = Policy(max_count=max(1, registry.stats().n_active * 99 // 100))
    verdicts = []
    case.add("plan prune", timed(lambda: verdicts.extend(collector.plan_prune(prune))))
    marking = timed(lambda: collector.prune(verdicts))
    case.add("prune", marking)
    case.facts |= {
        "items": len(plan.items),
        "bytes of a file to collect": len(file_bytes()),
        "run: us a file": sum(case.samples["run"]) / len(mine) * 1e6,
        "plan : walk and read": case.median("plan") / (case.median("bare walk") + case.median("bare read of rows")),
        "run : bare unlink": case.ratio("run", "bare unlink"),
        "save alone, ms": alone * 1000,
        "save beside gc, ms": beside * 1000,
        "a save waits longer beside gc, ms": (beside - alone) * 1000,
        "rows marked per second": len(verdicts) / marking,
    }
    if peak is not None:
        case.facts["plan: peak memory, MiB"] = peak / (1 << 20)


def saves_during(url: str, store: Path, work: Callable[[], object]) -> float:
    """Run `work` beside a process that saves; return the median time of a save, in seconds."""
    command = [sys.executable, "-m", "benchmarks.collect", url, str(store)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    child.stdout.readline()
    work()
    out, _ = child.communicate("")
    assert child.returncode == 0
    return float(median(json.loads(out)))


def _save_until_closed(url: str, store: str) -> None:
    """Save until standard input is closed, at least once; print the seconds of each save."""
    engine = SampleEngine()
    times: list[float] = []
    os.set_blocking(0, False)
    with Registry.open(url, store) as registry:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while not times or sys.stdin.buffer.raw.read(1) is None:
            ids = ids_number((os.getpid() << 12) + len(times))
            engine.evaluate(ids)
            times.append(timed(lambda: registry.save(engine, ids)))  # noqa: B023
    sys.stdout.write(json.dumps(times))


if __name__ == "__main__":
    _save_until_closed(*sys.argv[1:])
