"""How long does it take until the next token of a saved input can be sampled?

Every way ends with the decode of the last token, because a state has no logits. llama-ckpt's time is that of `Registry.restore`:
look-up, lease, map, all verification, load, decode, and the hit recorded and committed. All ways get token ids, because
tokenising is the same for all of them.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from statistics import median

import numpy as np
from isal import isal_zlib

from benchmarks import ways
from benchmarks.measuring import Case, Work, drop_from_page_cache, interleaved, peak_above_idle, timed
from benchmarks.sizes import Sizes
from benchmarks.synthetic import SyntheticEngine
from llama_ckpt.engine import Engine
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome

OURS, FLOOR, NATIVE, CACHE, PREFILL = "llama-ckpt", "floor", "llama.cpp's file", "LlamaDiskCache", "prefill"
READ, DECODE = "bare read", "decode alone"


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure two cases for each number of tokens, page cache warm and cold, and the synthetic state if the sizes have one."""
    engine, cases = ways.engine_for(max(sizes.tokens)), []
    for n_tokens in sizes.tokens:
        here = folder / str(n_tokens)
        here.mkdir()
        with Registry.open(store=here / "store") as registry:
            cases += _of_real_state(engine, registry, ways.ids_of(engine, n_tokens), here, sizes.rounds)
    if sizes.synthetic_bytes:
        cases.append(_of_synthetic_state(folder, sizes))
    return cases


def _of_real_state(engine: LlamaCppEngine, registry: Registry, ids: TokenIds, folder: Path, rounds: int) -> list[Case]:
    parameters: dict[str, int | str] = {"tokens": len(ids)}
    warm = Case(
        question="restore", name=f"{len(ids):,} tokens, warm", floor=FLOOR, parameters={**parameters, "cache": "warm"}
    )
    cold = Case(
        question="restore", name=f"{len(ids):,} tokens, cold", floor=READ, parameters={**parameters, "cache": "cold"}
    )
    raw, native, cache = folder / "raw", folder / "native", ways.DiskCache(folder / "cache")
    warm.add(PREFILL, timed(lambda: engine.evaluate(ids)))
    ways.floor_save(engine, raw)
    ways.native_save(engine, ids, native)
    saved = registry.save(engine, ids).checkpoint
    assert saved is not None

    def prepare(name: str) -> None:
        if name == CACHE and not len(cache.cache.cache):
            cache.save(engine, ids)  # an entry that was read is gone

    to_native = lambda: ways.native_restore(engine, ids, native)  # noqa: E731
    ours = lambda: restore_ours(registry, engine, ids)  # noqa: E731
    interleaved(
        warm,
        {
            FLOOR: lambda: ways.floor_restore(engine, ids, raw),
            NATIVE: to_native,
            CACHE: lambda: cache.restore(engine, ids),
            OURS: ours,
            DECODE: lambda: ways.decode_last(engine, ids),
        },
        rounds,
        prepare,
    )
    files = (raw, native, registry.store.root / saved.file_path)
    bare = lambda: ways.read_restore(engine, ids, raw)  # noqa: E731
    interleaved(cold, {READ: bare, NATIVE: to_native, OURS: ours}, rounds, lambda _: drop_from_page_cache(*files))
    warm.add(PREFILL, timed(lambda: engine.evaluate(ids)))
    cache.close()
    _add_facts(warm, raw.stat().st_size, lambda: restore_ours(registry, engine, ids))
    return [warm, cold]


def _add_facts(case: Case, state_bytes: int, ours: Work) -> None:
    case.facts["state bytes"] = state_bytes
    if (peak := peak_above_idle(ours)) is not None:
        case.facts["peak memory above state, MiB"] = (peak - state_bytes) / (1 << 20)
    if DECODE in case.samples:
        rows = zip(case.samples[OURS], case.samples[FLOOR], case.samples[DECODE], strict=True)
        case.facts["llama-ckpt : floor, both without the decode"] = median((a - d) / (b - d) for a, b, d in rows)


def restore_ours(registry: Registry, engine: Engine, ids: TokenIds) -> None:
    """Restore, and fail if it was not a hit: a quick miss is not a restore."""
    result = registry.restore(engine, ids)
    assert result.outcome is Outcome.HIT, result.reason
    assert result.n_restored == len(ids) - 1


def _of_synthetic_state(folder: Path, sizes: Sizes) -> Case:
    """Measure a state of many bytes without a model: the engine copies it and decodes nothing."""
    engine = SyntheticEngine(sizes.synthetic_bytes)
    case = Case(question="restore", name=f"synthetic, {engine.state.nbytes / 1e9:.2f} GB", floor=FLOOR)
    case.parameters = {"cache": "warm", "synthetic": engine.state.nbytes}
    raw = folder / "synthetic"
    raw.write_bytes(engine.state.data)

    def floor() -> None:
        with raw.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, dtype=np.uint8)
            isal_zlib.crc32(data)
            engine.take(data)
            del data

    with Registry.open(store=folder / "store-synthetic") as registry:
        engine.evaluate(engine.ids)
        registry.save(engine, engine.ids)
        ours = lambda: restore_ours(registry, engine, engine.ids)  # noqa: E731
        interleaved(case, {FLOOR: floor, OURS: ours}, max(2, sizes.rounds // 3))
        _add_facts(case, engine.state.nbytes, ours)
    return case
