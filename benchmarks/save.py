"""How long does it take to save the state of an input, and how large is the file?

llama-ckpt's time is that of `Registry.save`: look-up, copy of the state, its structure checked, CRC, write, fsync of the file and
its folder, row and commit. The floor is durable too; llama.cpp's own save function and LlamaDiskCache are not.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import ways
from benchmarks.measuring import Case, interleaved, peak_above_idle, timed
from benchmarks.sizes import Sizes
from llama_ckpt.collector.collector import Collector
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import SaveOutcome, SaveResult

OURS, FLOOR, NATIVE, CACHE = "llama-ckpt", "floor", "llama.cpp's file", "LlamaDiskCache"
NATIVE_DURABLE, ON_PREFIX, AGAIN = "llama.cpp's file + fsync", "llama-ckpt, prefix saved", "llama-ckpt, deduplicated"


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure one case for each number of tokens."""
    engine = ways.engine_for(max(sizes.tokens))
    return [_of_state(engine, ways.ids_of(engine, n), folder / str(n), sizes.rounds) for n in sizes.tokens]


def _of_state(engine: LlamaCppEngine, ids: TokenIds, folder: Path, rounds: int) -> Case:
    """In a registry of its own, the state of three quarters of the input is saved first: there the save can write a delta."""
    case = Case(question="save", name=f"{len(ids):,} tokens", floor=FLOOR, parameters={"tokens": len(ids)})
    folder.mkdir()
    base = ids[: len(ids) * 3 // 4]
    raw, native, cache = folder / "raw", folder / "native", ways.DiskCache(folder / "cache")
    with Registry.open(store=folder / "store") as registry, Registry.open(store=folder / "prefixes") as with_prefix:
        engine.evaluate(base)
        with_prefix.save(engine, base, label="base")
        engine.llama.eval(ids[len(base) :].tolist())

        def before(name: str) -> None:
            _forget(with_prefix if name == ON_PREFIX else registry)
            for path in (raw, native):
                path.unlink(missing_ok=True)
            os.sync()  # nothing waits to be written back

        interleaved(
            case,
            {
                FLOOR: lambda: ways.floor_save(engine, raw),
                NATIVE: lambda: ways.native_save(engine, ids, native),
                NATIVE_DURABLE: lambda: ways.native_save(engine, ids, native, durable=True),
                CACHE: lambda: cache.save(engine, ids),
                OURS: lambda: _saved(registry, engine, ids),
                ON_PREFIX: lambda: _saved(with_prefix, engine, ids),
            },
            rounds,
            before,
        )
        _add_facts(case, registry, with_prefix, engine, ids)
        case.facts["LlamaDiskCache: bytes on disk : the state"] = cache.bytes_on_disk() / case.facts["state bytes"]
    cache.close()
    return case


def _add_facts(case: Case, registry: Registry, with_prefix: Registry, engine: LlamaCppEngine, ids: TokenIds) -> None:
    """Add the facts that are measured separately: a deduplicated save, memory, sizes."""
    state_bytes = engine.capture().nbytes
    _forget(registry)
    peak = peak_above_idle(lambda: _saved(registry, engine, ids))
    for _ in range(len(case.samples[OURS])):
        case.add(AGAIN, timed(lambda: registry.save(engine, ids)))
    case.facts["state bytes"] = state_bytes
    case.facts["bytes on disk : the state"] = registry.list()[0].file_size / state_bytes
    if peak is not None:
        case.facts["peak memory above state, MiB"] = (peak - state_bytes) / (1 << 20)
    _forget(with_prefix)
    delta = _saved(with_prefix, engine, ids)
    case.facts["prefix saved: start_token"] = delta.checkpoint.start_token if delta.checkpoint else 0
    case.facts["prefix saved: bytes written : the state"] = delta.bytes_written / state_bytes


def _saved(registry: Registry, engine: LlamaCppEngine, ids: TokenIds) -> SaveResult:
    result = registry.save(engine, ids)
    assert result.outcome is SaveOutcome.SAVED, result.reason
    return result


def _forget(registry: Registry) -> None:
    """Delete rows and files of everything but the base."""
    gone = [row.id for row in registry.list() if row.label != "base"]
    for checkpoint_id in gone:
        registry.remove(checkpoint_id)
    if gone:
        collector = Collector(registry.context)
        collector.run(collector.plan(Policy(stale_grace_s=0)))
