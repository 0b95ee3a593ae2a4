"""What does a pipeline of prompts that share a prefix cost, in bytes on disk, files and evaluated tokens?

The prompts share three quarters of their tokens. llama-ckpt warms each with `Registry.warm`, and then all of them again. The
floor stores and evaluates each distinct cell once.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks import ways
from benchmarks.measuring import Case, timed
from benchmarks.sizes import Sizes
from benchmarks.synthetic import TokenEngine
from llama_ckpt.engine import Engine
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.registry import Registry

OURS, PREFILL = "llama-ckpt, first time", "prefill"


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure a case with the model, and one with more prompts and an engine of recorded rows: it stores and evaluates the same.
    What the other ways store is measured on the first prompts and given per prompt, because each of them stores every prompt
    in full.
    """
    engine = ways.engine_for(sizes.prompt_tokens)
    ids = ways.ids_of(engine, sizes.prompt_tokens)
    prompts = prompts_of(ids, sizes.prompts)
    case = _of_pipeline("SmolLM2-135M", engine, prompts, folder / "store")
    _others(case, engine, prompts[: sizes.cached_prompts], folder)
    if not sizes.recorded_prompts:
        return [case]
    recorded = TokenEngine(n_ctx=sizes.prompt_tokens)
    return [case, _of_pipeline("recorded rows", recorded, prompts_of(ids, sizes.recorded_prompts), folder / "recorded")]


def _of_pipeline(model: str, engine: Engine, prompts: list[TokenIds], store: Path) -> Case:
    n, n_tokens = len(prompts), len(prompts[0])
    case = Case(
        question="bytes",
        name=f"{n:,} prompts of {n_tokens:,} tokens, three quarters shared, {model}",
        parameters={"prompts": n, "tokens": n_tokens, "model": model},
    )
    with Registry.open(store=store) as registry:
        evaluated = sum(_warm(case, OURS, registry, engine, ids) for ids in prompts)
        again = sum(_warm(case, "llama-ckpt, again", registry, engine, ids) for ids in prompts)
        stored = _bytes_below(registry.store.root)
        files = sum(entry.kind == "checkpoint" for entry in registry.store.walk())
        rows = len(registry.list())
    cells = distinct_cells(prompts)
    floor = cells * engine.dimensions.kv_token_bytes
    case.facts |= {
        "bytes on disk : distinct cells": stored / floor,
        "tokens evaluated : distinct tokens": evaluated / cells,
        "tokens evaluated again, per prompt": again / n,
        "bytes on disk, per prompt": stored / n,
        "distinct cells' bytes, per prompt": floor / n,
        "files": files,
        "rows": rows,
    }
    return case


def prompts_of(ids: TokenIds, n: int) -> list[TokenIds]:
    """Prompts that share the first three quarters of `ids` and diverge at the next token."""
    n_shared = len(ids) * 3 // 4
    made = []
    for number in range(n):
        own = np.roll(ids[n_shared:], number)
        own[0] = 1000 + number  # of the vocabulary, another one for each
        made.append(np.concatenate([ids[:n_shared], own]))
    return made


def distinct_cells(prompts: list[TokenIds]) -> int:
    """Number of distinct prefixes of the prompts: the number of cells that must be computed and stored."""
    ordered = sorted(prompts, key=lambda ids: ids.tolist())
    shared = [_common(a, b) for a, b in pairwise(ordered)]
    return sum(len(ids) for ids in prompts) - sum(shared)


def _common(a: TokenIds, b: TokenIds) -> int:
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()[0]
    return int(differ[0]) if differ.size else n


def _warm(case: Case, way: str, registry: Registry, engine: Engine, ids: TokenIds) -> int:
    """Warm the prompts, record the time of each, and return the number of evaluated tokens."""
    result = registry.warm(engine, ids)
    assert result.problem is None, result.problem
    case.add(way, result.elapsed_s)
    return result.n_evaluated


def _others(case: Case, engine: LlamaCppEngine, prompts: list[TokenIds], folder: Path) -> None:
    native = folder / "native"
    native.mkdir()
    with contextlib.closing(ways.DiskCache(folder / "cache")) as cache:
        for number, ids in enumerate(prompts):
            case.add(PREFILL, timed(lambda: engine.evaluate(ids)))  # noqa: B023
            ways.native_save(engine, ids, native / str(number))
            cache.save(engine, ids)
        case.facts["LlamaDiskCache: bytes on disk, per prompt"] = cache.bytes_on_disk() / len(prompts)
    case.facts["llama.cpp's files: bytes on disk, per prompt"] = _bytes_below(native) / len(prompts)


def _bytes_below(folder: Path) -> int:
    """Bytes that the files take on the disk, without holes, including those of the database."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
