"""A process that generates under autosave until it is stopped: `python -m support.generating ORDER-AS-JSON`.

It tells each token on stdout, so that a test can send signals at a token of its choice, and waits to be told to go on.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path


def main() -> None:
    order = json.loads(sys.argv[1])
    from support.causal_engine import CausalEngine

    from llama_ckpt.registry import Registry

    handlers = {"own": lambda *_: say("own handler"), "ignore": signal.SIG_IGN}
    # A test run in the background of a shell is started with the signal ignored.
    signal.signal(signal.SIGINT, handlers.get(order.get("handler"), signal.default_int_handler))
    engine = CausalEngine()
    engine.evaluate(list(range(1, 21)))
    with Registry.open(order["database_url"], order["store"]) as registry:
        before = signal.getsignal(signal.SIGINT)
        try:
            with registry.autosave(engine, every=order["every"]) as autosave:
                for token in autosave.along(generate(engine, order["n_tokens"])):
                    say(token)
                    sys.stdin.readline()
            say("went on")
        finally:
            say("handler is back" if signal.getsignal(signal.SIGINT) is before else "handler is another")


def generate(engine, n_tokens: int):
    for token in range(1000, 1000 + n_tokens):
        yield token
        held = engine.held_token_ids()
        engine.evaluate([*held, token], n_kept=len(held))


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
