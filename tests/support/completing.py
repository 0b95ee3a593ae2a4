"""A process that completes a prompt with the drop-in cache: `python -m support.completing ORDER-AS-JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    order = json.loads(sys.argv[1])
    from llama_ckpt.engine.cache import LlamaCkptCache
    from llama_ckpt.engine.digests import FileDigests
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.registry import Registry

    engine = LlamaCppEngine.from_path(order["model"], digests=FileDigests(Path(order["digests"])), n_ctx=512)
    llama, evaluated, real = engine.llama, [], engine.llama.eval
    llama.eval = lambda tokens: evaluated.append(len(tokens)) or real(tokens)
    with Registry.open(store=order["store"]) as registry:
        llama.set_cache(LlamaCkptCache(registry, engine))
        text = llama(order["prompt"], max_tokens=12, temperature=0.0)["choices"][0]["text"]
    sys.stdout.write(json.dumps({"text": text, "evaluated": evaluated}))


if __name__ == "__main__":
    main()
