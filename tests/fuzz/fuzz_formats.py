"""Coverage-guided fuzzing of every reader and operation: `make fuzz`, or `python tests/fuzz/fuzz_formats.py --seconds 60`.

With atheris (pip install atheris; Linux, CPython 3.11 to 3.13) bytes are changed where they lead to new code; without it
the same checks run on random changes of the samples. What is looked for: any exception but the library's own, an answer
that contradicts itself, an allocation beyond the input's size plus 1 MiB, a result that its own reader refuses.
"""

from __future__ import annotations

import argparse
import random
import sys
import tracemalloc
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "samples"
LIMIT = 1 << 20

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None:
    with atheris.instrument_imports(include=["llama_ckpt.formats"]):
        from llama_ckpt import formats
        from llama_ckpt.formats import engine_files
        from llama_ckpt.formats.kv import edit as kv_edit
        from llama_ckpt.formats.kv import state as kv_state
        from llama_ckpt.formats.kv import values as kv_values
else:
    from llama_ckpt import formats
    from llama_ckpt.formats import engine_files
    from llama_ckpt.formats.kv import edit as kv_edit
    from llama_ckpt.formats.kv import state as kv_state
    from llama_ckpt.formats.kv import values as kv_values

from llama_ckpt.errors import BadInput, CorruptFile, Incompatible, Unsupported  # noqa: E402
from llama_ckpt.formats.kv.layout import Dialect  # noqa: E402

OPERATIONS = (
    lambda state: kv_edit.truncate(state, 2),
    lambda state: kv_edit.tail(state, 1),
    lambda state: kv_edit.join(kv_edit.truncate(state, 1), kv_edit.tail(state, 1)),
    lambda state: kv_edit.to_dialect(state, Dialect(2, True)),
    lambda state: kv_edit.to_dialect(state, Dialect(1), seq_id=3, rotation=(64, 64), now=(64, 64)),
    lambda state: kv_edit.transpose_v(state, transposed=True),
    lambda state: kv_edit.replace_layers(state, state, [0]),
)


def one_input(data: bytes) -> None:
    """Everything that may be done with bytes of unknown origin."""
    view = memoryview(data)
    tracemalloc.start()
    found = formats.identify(view, "the file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if found.restorable and (not found.whole or found.why_not is not None):
        raise AssertionError(f"an answer that contradicts itself: {found}")
    if peak > len(data) + LIMIT:
        raise AssertionError(f"{peak} bytes were allocated for {len(data)}")
    formats.engine_verdicts(view, found)
    mend(view)
    try:
        file = engine_files.read(view, "the file")
        state = engine_files.sequence_state(file)
    except (CorruptFile, Unsupported):
        if found.format in ("ggsq", "ggsn") and found.restorable:
            raise
        state = view
    operate(state)


def mend(view: memoryview) -> None:
    """What a repair makes of the bytes has to be a whole file."""
    try:
        plan = formats.plan_file_repair(view, "the file")
    except CorruptFile:
        return
    if not formats.identify(memoryview(b"".join(plan.parts)), "the file").whole:
        raise AssertionError(f"a repair that is not whole: {plan.faults}")


def operate(state: memoryview) -> None:
    """Every operation on a state that may be none."""
    for operation in OPERATIONS:
        try:
            result = operation(state)
        except (BadInput, Incompatible, Unsupported):
            continue
        if len(result) > 2 * len(state) + 4096:
            raise AssertionError(f"{len(result)} bytes were made of {len(state)}")
        kv_state.parse(result)
    try:
        kv_values.not_finite(state)
    except Unsupported:
        return


def seeds() -> list[bytes]:
    """Small real files, and their states."""
    files = [path.read_bytes() for path in sorted(SAMPLES.glob("*tiny*.bin"))]
    states = []
    for data in files:
        try:
            states.append(bytes(engine_files.sequence_state(engine_files.read(memoryview(data), "seed"))))
        except Unsupported:
            continue
    return files + states + [bytes(3) + files[0], b"MALL\1\0\0\0" + bytes(9)]


def without_atheris(seconds: float, seed: int) -> int:
    """Random changes of the seeds until the time is over; gives how many inputs were tried."""
    rng, given = random.Random(seed), seeds()
    end, n = monotonic() + seconds, 0
    while monotonic() < end:
        data = bytearray(rng.choice(given))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(min(len(data), rng.choice((64, 256, len(data)))))
            data[at] = rng.choice((0, 1, 2, 0x7F, 0xFF, rng.randrange(256)))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        one_input(bytes(data))
        n += 1
    return n


def main() -> None:
    """Runs for the given time; a finding ends the program with its traceback, and atheris keeps the input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if atheris is None:
        n_inputs = without_atheris(options.seconds, options.seed)
        sys.stdout.write(f"atheris is not installed: {n_inputs} random inputs, no finding\n")
        return
    options.corpus.mkdir(exist_ok=True)
    for i, data in enumerate(seeds()):
        (options.corpus / f"seed-{i}").write_bytes(data)
    arguments = [f"-max_total_time={options.seconds}", "-max_len=16384", "-timeout=10", "-rss_limit_mb=1024"]
    if options.seed:
        arguments.append(f"-seed={options.seed}")
    atheris.Setup([sys.argv[0], *arguments, str(options.corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
