"""`llama-ckpt` in a process of its own, with a TokenEngine behind every model file. `python -m support.batch_child STEP N WORDS…`

At the Nth evaluation it dies as `kill -9` would end it (STEP "die"), or is sent SIGINT (STEP "interrupt").
"""

from __future__ import annotations

import os
import signal
import sys

from support.sample_engine import TokenEngine

import llama_ckpt_cli.inputs
from llama_ckpt_cli.app import main

KILLED = 137


class EndingEngine(TokenEngine):
    n_left = int(sys.argv[2])

    def evaluate(self, token_ids, *args, **options):
        EndingEngine.n_left -= 1
        if EndingEngine.n_left == 0:
            if sys.argv[1] == "die":
                os._exit(KILLED)
            os.kill(os.getpid(), signal.SIGINT)
        super().evaluate(token_ids, *args, **options)


if __name__ == "__main__":
    llama_ckpt_cli.inputs.load_engine = lambda *_, **__: EndingEngine()
    sys.exit(main(sys.argv[3:]))
