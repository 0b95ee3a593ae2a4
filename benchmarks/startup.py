"""How long does a command take from its start to its answer? Each command is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import planting
from benchmarks.measuring import Case, interleaved
from benchmarks.sizes import Sizes
from benchmarks.synthetic import SampleEngine
from llama_ckpt.fingerprint import tokens_hash
from llama_ckpt.registry import Registry

COMMAND = [sys.executable, "-m", "llama_ckpt_cli"]
NOT_FOR_HELP = ("llama_cpp", "numpy", "sqlalchemy")
PYTHON, HELP, MATCH, LS = "python alone", "llama-ckpt --help", "llama-ckpt match --hash", "llama-ckpt ls"


def run(sizes: Sizes, folder: Path) -> list[Case]:
    """Measure one case, over a registry of many rows."""
    store, engine, n = folder / "store", SampleEngine(), sizes.startup_rows
    with Registry.open(store=store) as registry:
        engine.evaluate(engine.ids)
        registry.save(engine, "brings the model")
        with registry.database.write() as db:
            db.exec_driver_sql("DELETE FROM llama_checkpoint_meta")
        planting.plant(registry, engine.fingerprint.digest, n)
    known = tokens_hash(planting.ids_of(planting.blocks_of(1 + n // 2))).hex()
    case = Case(question="startup", name=f"{n:,} rows", parameters={"rows": n}, floor=PYTHON)
    at = ["--store", str(store), "--quiet"]
    interleaved(
        case,
        {
            PYTHON: lambda: _run([sys.executable, "-c", "pass"]),
            HELP: lambda: _run([*COMMAND, "--help"]),
            MATCH: lambda: _run([*COMMAND, "match", "--hash", known, *at]),
            LS: lambda: _run([*COMMAND, "ls", *at]),
        },
        sizes.rounds,
    )
    case.facts["packages that --help imports and must not"] = len(_imported_by_help())
    return [case]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    return done


def _imported_by_help() -> set[str]:
    """The packages that --help must not import and does, as -X importtime lists them."""
    listed = _run([sys.executable, "-X", "importtime", *COMMAND[1:], "--help"]).stderr
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in listed.splitlines()}
    return names & set(NOT_FOR_HELP)


def _environment() -> dict[str, str]:
    """An environment without your own settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_CKPT_")}
