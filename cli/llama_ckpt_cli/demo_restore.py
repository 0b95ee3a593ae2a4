"""The demo's second process: restores what the first one saved and continues. Reads JSON on stdin, writes JSON on stdout."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Restores the prompt that stdin names, and writes the outcome and the next tokens."""
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.registry import Registry
    from llama_ckpt_cli.demo_model import continuation

    order = json.load(sys.stdin)
    engine = LlamaCppEngine.from_path(order["model"], n_ctx=order["n_ctx"])
    with Registry.open(store=order["store"]) as registry:
        result = registry.restore(engine, order["prompt"])
    tokens = continuation(engine, order["prompt"])
    answer = {
        "outcome": result.outcome.value,
        "n_restored": result.n_restored,
        "n_evaluated": result.n_evaluated,
        "elapsed_s": result.elapsed_s,
        "tokens": tokens,
        "text": engine.llama.detokenize(tokens).decode(errors="replace"),
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
