"""`make bench`: restore and save against their floors and the ways people have today, in one run."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np
from isal import isal_zlib

from llama_ckpt.collector import Collector
from llama_ckpt.engine.llamacpp import LlamaCppEngine
from llama_ckpt.registry import Registry
from llama_ckpt_cli.demo import prompt_of, smollm2


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(ways: dict, rounds: int, before=lambda: None) -> dict[str, float]:
    """Median seconds of each way; every round runs all of them, so that a slow moment hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        before()
        for name, work in ways.items():
            samples[name].append(timed(work))
    return {name: median(times) for name, times in samples.items()}


class Bench:
    def __init__(self, folder: Path, n_tokens: int) -> None:
        self.folder = folder
        self.engine = LlamaCppEngine.from_path(smollm2(), n_ctx=n_tokens + 256)
        self.prompt = prompt_of(self.engine, n_tokens)
        self.ids = self.engine.token_ids(self.prompt)
        self.registry = Registry.open(store=folder / "store")
        self.c_ids = (llama_cpp.llama_token * len(self.ids))(*self.ids.tolist())

    def prefill(self) -> float:
        return timed(lambda: self.engine.evaluate(self.ids))

    # -- restore: all end with the last token decoded ---------------------------------------------------------------

    def decode_last(self) -> None:
        """What `evaluate` does after a load, for states that the engine was given behind the wrapper's back."""
        llama, n_before = self.engine.llama, len(self.ids) - 1
        llama.input_ids[:n_before] = self.ids[:n_before]
        llama.n_tokens = n_before
        llama.eval(self.ids[n_before:].tolist())

    def restore_floor(self) -> None:
        """Map, CRC, set_data: nothing is known of the file."""
        with self.raw.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, dtype=np.uint8)
            isal_zlib.crc32(data)
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            assert llama_cpp.llama_state_seq_set_data(self.engine.llama.ctx, pointer, data.nbytes, 0) == data.nbytes
            del data, pointer
        self.decode_last()

    def restore_native(self) -> None:
        """llama.cpp's own loader: unverified."""
        room, count = (llama_cpp.llama_token * (len(self.ids) + 8))(), ctypes.c_size_t()
        path = str(self.native).encode()
        done = llama_cpp.llama_state_seq_load_file(
            self.engine.llama.ctx, path, 0, room, len(self.ids) + 8, ctypes.byref(count)
        )
        assert done > 0
        self.decode_last()

    def restore_ours(self) -> None:
        assert self.registry.restore(self.engine, self.prompt).n_restored == len(self.ids) - 1

    # -- save -------------------------------------------------------------------------------------------------------

    def save_floor(self) -> None:
        """get_data, write, fsync."""
        state = self.engine.capture()
        fd = os.open(self.raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, state)
        os.fsync(fd)
        os.close(fd)

    def save_native(self) -> None:
        """llama.cpp's own saver: not durable."""
        path = str(self.native).encode()
        assert llama_cpp.llama_state_seq_save_file(self.engine.llama.ctx, path, 0, self.c_ids, len(self.ids)) > 0

    def save_ours(self) -> None:
        """Verified structure, CRC, write, fsync of file and folder, commit."""
        assert self.registry.save(self.engine, self.prompt).bytes_written > 0

    def forget(self) -> None:
        """Nothing is saved and nothing waits to be written back."""
        for row in self.registry.list():
            self.registry.remove(row.id)
        collector = Collector(self.registry.parts)
        collector.run(collector.plan(stale_grace_s=0))
        for path in (self.raw, self.native):
            path.unlink(missing_ok=True)
        os.sync()

    raw = property(lambda self: self.folder / "raw")
    native = property(lambda self: self.folder / "native")


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks")
    arguments.add_argument("--tokens", type=int, default=1500)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="llama-ckpt-bench-") as folder:
        bench = Bench(Path(folder), chosen.tokens)
        cold = bench.prefill()
        saves = {"floor": bench.save_floor, "llama.cpp": bench.save_native, "llama-ckpt": bench.save_ours}
        save = interleaved(saves, chosen.rounds, bench.forget)
        restore = interleaved(
            {"floor": bench.restore_floor, "llama.cpp": bench.restore_native, "llama-ckpt": bench.restore_ours},
            chosen.rounds,
        )
        again = median(timed(lambda: bench.registry.save(bench.engine, bench.prompt)) for _ in range(chosen.rounds))
        size = bench.registry.list()[0].file_size / len(bench.engine.capture())
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "engine": bench.engine.engine_name,
        "n_tokens": len(bench.ids),
        "prefill_s": cold,
        "save_s": save,
        "restore_s": restore,
        "deduplicated_save_s": again,
        "size_to_state": size,
    }
    if chosen.json:
        json.dump(report, sys.stdout, indent=2)
        return 0
    print(
        f"{report['n_tokens']} tokens, {report['machine']}, {report['engine']}; medians of {chosen.rounds} interleaved rounds"
    )
    print(f"restore, each with one decode: prefill is {cold / restore['llama-ckpt']:.0f} x llama-ckpt")
    for name, seconds in restore.items():
        print(f"  {name:<11} {seconds * 1000:8.1f} ms  {seconds / restore['floor']:.2f} x floor")
    print("save")
    for name, seconds in save.items():
        print(f"  {name:<11} {seconds * 1000:8.1f} ms  {seconds / save['floor']:.2f} x floor")
    print(f"deduplicated save {again * 1000:.1f} ms; file {size:.4f} x the state")
    return 0


if __name__ == "__main__":
    sys.exit(main())
