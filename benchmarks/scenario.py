"""The published scenario: one base checkpoint, then many inputs like it, each of 1,024 characters.

Each input is timed three times, with `Registry.warm`: cold (evaluated, nothing registered), base reused (the base is restored),
and again (the input's own checkpoint is restored). Then texts in a row, where each finds what the earlier ones saved.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks import ways
from benchmarks.measuring import Case, peak_above_idle, timed
from benchmarks.sizes import Sizes
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.registry import Registry
from llama_ckpt.values import WarmResult

N_CHARACTERS, N_SHARED = 1024, 768
COLD, BASE, DELTA = "cold", "base reused", "delta reused"


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure a case for the three ways, and one for the texts in a row."""
    engine = ways.engine_for(1024)
    return [_three_ways(engine, sizes, folder / "one-by-one"), _in_a_row(engine, sizes, folder / "in-a-row")]


def text_of(number: int) -> str:
    """A document of 768 characters and a question of its own, 1,024 characters in all."""
    document = "".join(
        f"Day {d}: wind {d * 7 % 31} km/h, rain {d * 13 % 17} mm, pressure {990 + d % 40} hPa.\n" for d in range(40)
    )
    tail = "".join(
        f"Question {number}.{i}: how was the weather on day {(number * 7 + i * 3) % 40}?\n" for i in range(10)
    )
    return document[:N_SHARED] + tail[: N_CHARACTERS - N_SHARED]


def _three_ways(engine: LlamaCppEngine, sizes: Sizes, store: Path) -> Case:
    case = Case(
        question="scenario",
        name=f"{sizes.texts} texts of {N_CHARACTERS:,} characters",
        parameters={"texts": sizes.texts},
    )
    case.floor = COLD
    base = text_of(0)[:N_SHARED]
    reuse: dict[str, list[float]] = {BASE: [], DELTA: []}
    with Registry.open(store=store) as registry:
        registry.warm(engine, base)
        for number in range(1, sizes.texts + 1):
            text = text_of(number)
            ids = engine.token_ids(text)
            case.add(COLD, timed(lambda: engine.evaluate(ids)))  # noqa: B023
            for way in (BASE, DELTA):
                engine.evaluate(ids[:1])  # it holds nothing of the text but its first token
                result = registry.warm(engine, text)
                case.add(way, result.elapsed_s)
                reuse[way].append(_reused(result))
        peak = peak_above_idle(lambda: registry.warm(engine, text_of(sizes.texts + 1)))
    for way, shares in reuse.items():
        case.facts[f"{way}: share of tokens reused"] = fmean(shares)
    for way, times in case.samples.items():
        case.facts[f"{way}: mean, s"] = fmean(times)
        case.facts[f"{way}: deviation, s"] = stdev(times)
    if peak is not None:
        case.facts["peak memory, MiB"] = peak / (1 << 20)
    return case


def _in_a_row(engine: LlamaCppEngine, sizes: Sizes, store: Path) -> Case:
    n, step = sizes.texts_in_a_row, max(1, sizes.texts_in_a_row // 10)
    case = Case(question="scenario", name=f"{n:,} texts in a row", parameters={"texts": n})
    shares = []
    with Registry.open(store=store) as registry:
        for number in range(1, n + 1):
            result = registry.warm(engine, text_of(number))
            case.add("llama-ckpt", result.elapsed_s)
            shares.append(_reused(result))
    for end in range(step, n + 1, step):
        case.facts[f"share reused, texts {end - step + 1:,} to {end:,}"] = float(np.mean(shares[end - step : end]))
    return case


def _reused(result: WarmResult) -> float:
    return result.n_restored / (result.n_restored + result.n_evaluated)
