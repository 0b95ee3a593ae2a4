"""How much each question measures: the quick set, the full set, and the smallest set that shows that a question works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`tokens` of an input, `rows` of a registry, `rounds` of interleaved ways, `calls` of short ones."""

    name: str
    tokens: tuple[int, ...]
    rounds: int
    synthetic_bytes: int  # of the state without a model; 0: none
    rows: tuple[int, ...]
    postgresql_rows: tuple[int, ...]
    cache_rows: int  # up to which count the caches of llama-cpp-python are asked
    calls: int
    saves: int
    prompts: int  # that share a prefix
    recorded_prompts: int  # the same, of an engine that holds recorded rows and evaluates nothing; 0: none
    cached_prompts: int  # of them by the other ways, which keep each whole
    prompt_tokens: int
    processes: tuple[int, ...]
    seconds: float  # for which each process works
    collect: tuple[tuple[int, int], ...]  # rows, files
    texts: int  # that begin alike, timed three ways
    texts_in_a_row: int
    startup_rows: int


TINY = Sizes(
    name="tiny", tokens=(24,), rounds=2, synthetic_bytes=1 << 20, rows=(0, 20, 40), postgresql_rows=(), cache_rows=20, calls=3,
    saves=2, prompts=3, recorded_prompts=4, cached_prompts=2, prompt_tokens=60, processes=(1, 2), seconds=0.05,
    collect=((60, 40),), texts=2, texts_in_a_row=4, startup_rows=20,
)  # fmt: skip

QUICK = Sizes(
    name="quick", tokens=(500, 1500, 4000), rounds=7, synthetic_bytes=0, rows=(0, 1_000, 10_000, 100_000),
    postgresql_rows=(0, 1_000, 10_000), cache_rows=1_000, calls=200, saves=30, prompts=24, recorded_prompts=0, cached_prompts=4,
    prompt_tokens=300, processes=(1, 2, 4, 8), seconds=1.0, collect=((10_000, 2_000),), texts=10, texts_in_a_row=30,
    startup_rows=100_000,
)  # fmt: skip

FULL = Sizes(
    name="full", tokens=(500, 1500, 4000, 8000), rounds=15, synthetic_bytes=2 << 30, rows=(0, 1_000, 10_000, 100_000, 1_000_000),
    postgresql_rows=(0, 1_000, 10_000, 100_000, 1_000_000), cache_rows=3_000, calls=1_000, saves=100, prompts=200,
    recorded_prompts=1_000, cached_prompts=10, prompt_tokens=2_000, processes=(1, 2, 4, 8), seconds=5.0,
    collect=((10_000, 2_000), (100_000, 20_000), (1_000_000, 200_000)), texts=50, texts_in_a_row=1_000, startup_rows=100_000,
)  # fmt: skip
