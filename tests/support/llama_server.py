"""A real llama-server on a free port, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_S = 120


class LlamaServer:
    def __init__(self, port: int, slots: Path) -> None:
        self.port, self.slots = port, slots

    def post(self, path: str, body: dict):
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return json.loads(answer.read())

    def slot(self, action: str, filename: str = "") -> dict:
        return self.post(f"/slots/0?action={action}", {"filename": filename})

    def complete(self, token_ids, n: int = 8) -> dict:
        """Greedy continuation; `timings` tells how many tokens came from the cache (`cache_n`)."""
        prompt = [int(token) for token in token_ids]
        options = {
            "n_predict": n,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": 0,
            "n_probs": 1,
            "ignore_eos": True,
        }
        return self.post("/completion", {"prompt": prompt, **options})


@contextlib.contextmanager
def running(command: Sequence[str], model: Path, slots: Path, *flags: str) -> Iterator[LlamaServer]:
    """A server that is ready; ended at the end of the block."""
    slots.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [*command, "-m", str(model), "--port", str(port), "--slot-save-path", f"{slots}/", "-c", "512", "-t", "2"]
    # No prompt cache beside the slot: what is reused must come from the slot.
    line += ["-cram", "0", "--no-warmup", *flags]
    server = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=os.environ
    )
    ready, said = threading.Event(), []

    def listen() -> None:
        for text in server.stdout:
            said.append(text)
            if "listening" in text:
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert ready.wait(READY_S), "".join(said)
        assert server.poll() is None, "".join(said)
        yield LlamaServer(port, slots)
    finally:
        server.terminate()
        server.wait(30)
        listener.join(30)
        server.stdout.close()
