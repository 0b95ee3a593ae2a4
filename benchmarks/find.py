"""How long does it take to say which checkpoint serves an input, and to register one more, among how many?

llama-ckpt's time is that of `Registry.match` by 4,000 token ids: hashes, database, and the heads of the files that are compared.
Each round asks every registry one question of each kind, in turn. "answers right" is the share of right answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from benchmarks import databases, planting
from benchmarks.measuring import Case, timed
from benchmarks.sizes import Sizes
from benchmarks.synthetic import SampleEngine, ids_number
from llama_ckpt.db.tables import llama_checkpoint_meta
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.registry import Registry
from llama_ckpt.values import MatchResult

N_TOKENS = 4000
PREFIX, HOT, MISS, SAME = (
    "llama-ckpt, by prefix",
    "llama-ckpt, hot prefix",
    "llama-ckpt, miss",
    "llama-ckpt, same input",
)
DICT, RAM, DISK = "dict of block hashes", "LlamaRAMCache", "LlamaDiskCache"
REGISTER, AGAIN = "register", "register again"
_EVERY = 10  # a cache that looks at every key is asked more seldom


@dataclass
class Planted:
    """A registry with its rows, and its questions: for each kind the ids, and how many of them the best checkpoint shares."""

    registry: Registry
    n_rows: int
    case: Case
    registering: Case
    asked: dict[str, list[tuple[TokenIds, int]]] = field(default_factory=dict)
    others: dict[str, Callable[[TokenIds], object]] = field(default_factory=dict)
    n_right: int = 0
    n_asked: int = 0


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure a case for each database and number of rows, and one for each database that compares most rows with fewest."""
    cases = _of_database("sqlite", sizes.rows, sizes, folder)
    if sizes.postgresql_rows and not databases.why_no_server():
        cases += _of_database("postgresql", sizes.postgresql_rows, sizes, folder)
    return cases


def _of_database(kind: str, counts: tuple[int, ...], sizes: Sizes, folder: Path) -> list[Case]:
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    with contextlib.ExitStack() as stack:
        planted = [_planted(stack, engine, kind, n, sizes, folder) for n in counts]
        _ask_in_turns([p for p in planted if p.n_rows], sizes.calls)
        _register_in_turns(planted, engine, sizes.saves)
    finding, registering = [p.case for p in planted if p.n_rows], [p.registering for p in planted]
    return [*finding, *registering, _flatness(kind, finding, registering)]


def _planted(
    stack: contextlib.ExitStack, engine: SampleEngine, kind: str, n_rows: int, sizes: Sizes, folder: Path
) -> Planted:
    url = stack.enter_context(databases.database_url(kind))
    registry = stack.enter_context(Registry.open(url, folder / f"{kind}-{n_rows}", upgrade=True))
    registry.save(engine, "brings the model, and marks the store")
    with registry.database.write() as db:
        db.execute(sa.delete(llama_checkpoint_meta))
    parameters: dict[str, int | str] = {"database": kind, "rows": n_rows}
    case = Case(question="find", name=f"{kind}, {n_rows:,} rows", parameters=parameters)
    registering = Case(question="find", name=f"{kind}, one more after {n_rows:,} rows", parameters=parameters)
    made, digest = Planted(registry, n_rows, case, registering), engine.fingerprint.digest
    if n_rows:
        planting.plant(registry, digest, n_rows)
        made.asked = _questions(n_rows, sizes.calls)
        planting.plant_files(registry, digest, (ids for some in made.asked.values() for ids, _ in some), n_rows)
        if kind == "sqlite":
            made.others = dict(_others(stack, digest, n_rows, sizes.cache_rows, folder))
            case.floor = DICT
    return made


def _questions(n_rows: int, n: int) -> dict[str, list[tuple[TokenIds, int]]]:
    """`n` questions of each kind: ids, and how many of them the best checkpoint starts with."""
    choice = random.Random(2)
    some = [planting.blocks_of(choice.randrange(1, n_rows + 1)) for _ in range(n)]
    shared = [blocks[: N_TOKENS // planting.BLOCK] for blocks in some]
    as_asked = [(planting.ids_of(blocks, N_TOKENS), planting.BLOCK * len(blocks)) for blocks in shared]
    hot = planting.system_blocks(0)
    return {
        PREFIX: as_asked,
        HOT: [(planting.ids_of(hot, N_TOKENS), planting.BLOCK * len(hot))] * n,
        MISS: [(planting.ids_of([(planting.NEW, i, 0)], N_TOKENS), 0) for i in range(n)],
        SAME: [(ids := planting.ids_of(blocks), len(ids)) for blocks in some],
    }


def _others(
    stack: contextlib.ExitStack, digest: bytes, n_rows: int, cache_rows: int, folder: Path
) -> Iterator[tuple[str, Callable[[TokenIds], object]]]:
    known = {}
    for number in range(1, n_rows + 1):
        known.update(dict.fromkeys(planting.prefix_hashes(digest, planting.ids_of(planting.blocks_of(number))), number))
    yield DICT, lambda ids: _deepest(known, planting.prefix_hashes(digest, ids))
    if n_rows > cache_rows or importlib.util.find_spec("llama_cpp") is None:
        return
    from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

    ram, disk = LlamaRAMCache(), LlamaDiskCache(str(folder / f"cache-{n_rows}"))
    stack.callback(disk.cache.close)
    for number in range(1, n_rows + 1):
        key = tuple(planting.ids_of(planting.blocks_of(number)).tolist())
        ram.cache_state[key] = cast(Any, None)  # the look-up does not look at it
        disk.cache[key] = b""
    yield RAM, lambda ids: tuple(ids.tolist()) in ram
    yield DISK, lambda ids: tuple(ids.tolist()) in disk


def _deepest(known: dict[bytes, int], chain: list[bytes]) -> int | None:
    """The deepest linked block, by bisection: links are monotone."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if chain[middle] in known else (low, middle)
    return known[chain[low - 1]] if low else None


def _ask_in_turns(planted: list[Planted], n_calls: int) -> None:
    fingerprint = SampleEngine().fingerprint
    for i in range(-3, n_calls):  # three go ahead uncounted
        for one in planted:
            for kind, questions in one.asked.items():
                ids, n_shared = questions[i]
                found: list[MatchResult] = []
                seconds = timed(lambda: found.append(one.registry.match(ids, fingerprint=fingerprint)))  # noqa: B023
                if i >= 0:
                    one.case.add(kind, seconds)
                    one.n_asked += 1
                    one.n_right += found[0].n_matching == n_shared and (found[0].checkpoint is not None) == (
                        n_shared > 0
                    )
            for name, look_up in one.others.items():
                if i >= 0 and (name == DICT or i % _EVERY == 0):
                    one.case.add(name, timed(lambda: look_up(one.asked[PREFIX][i][0])))  # noqa: B023
    for one in planted:
        one.case.facts["answers right"] = one.n_right / one.n_asked
        for way in one.asked:
            if (late := one.case.p99(way)) is not None:
                one.case.facts[f"{way}: p99 : median"] = late / one.case.median(way)


def _register_in_turns(planted: list[Planted], engine: Any, n_saves: int) -> None:
    """Save a small state, so that most of the time is the row's; fsync and commit are included."""
    for i in range(n_saves + 1):
        ids = ids_number((1 << 25) + i)
        engine.evaluate(ids)
        for one in planted:
            for way in (REGISTER, AGAIN):
                seconds = timed(lambda: one.registry.save(engine, ids))  # noqa: B023
                if i:
                    one.registering.add(way, seconds)


def _flatness(kind: str, finding: list[Case], registering: list[Case]) -> Case:
    """The time of each way with the most rows, divided by its time with the fewest."""
    flat = Case(question="find", name=f"{kind}, the most rows : the fewest", parameters={"database": kind})
    for ways, cases in (((PREFIX, HOT, MISS, SAME), finding), ((REGISTER, AGAIN), registering)):
        for way in ways:
            flat.facts[way] = cases[-1].median(way) / cases[0].median(way)
    return flat
