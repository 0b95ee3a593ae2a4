"""llama-server out of the wheel `xllamacpp` (extra `server`), with the flags of the binary that the tests use.

Run it as a program. It prints "server is listening" when it is ready, and ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

import xllamacpp

FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slot-save-path", default="")
    parser.add_argument("-c", dest="n_ctx", type=int, default=512)
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-cram", dest="cache_ram", type=int, default=0)
    parser.add_argument("-np", dest="n_parallel", type=int, default=1)
    parser.add_argument("--no-warmup", action="store_true")
    parser.add_argument("-no-kvu", dest="separate_streams", action="store_true")
    parser.add_argument("-fa", dest="flash", choices=sorted(FLASH), default="auto")
    parser.add_argument("-ctk", dest="type_k", default="f16")
    parser.add_argument("-ctv", dest="type_v", default="f16")
    return parser.parse_args()


def parameters(given: argparse.Namespace) -> xllamacpp.CommonParams:
    made = xllamacpp.CommonParams()
    made.model.path = given.model
    made.port = given.port
    made.slot_save_path = given.slot_save_path
    made.n_ctx = given.n_ctx
    made.n_parallel = given.n_parallel
    made.kv_unified = not given.separate_streams
    made.cache_ram_mib = given.cache_ram
    made.warmup = not given.no_warmup
    made.endpoint_slots = True
    made.cpuparams.n_threads = given.threads
    made.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{FLASH[given.flash]}")
    made.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{given.type_k.upper()}")
    made.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{given.type_v.upper()}")
    return made


def main() -> None:
    server = xllamacpp.Server(parameters(arguments()))
    sys.stdout.write(f"server is listening on {server.listening_address}\n")
    sys.stdout.flush()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    os._exit(0)  # the wheel's own end waits for its threads


if __name__ == "__main__":
    main()
