"""Does an engine continue from a loaded state as it would from its own? Asked of the engine itself, with a handful of tokens.

Some models take a state without a word and then continue from nothing, or from the last token twice. What tells is the next
token's logits: after a load they must be those of the cold run, and still be so two tokens further on.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llama_ckpt.doctor.diagnosis import Diagnosis, fail, not_checked, ok, warn
from llama_ckpt.engine import Engine
from llama_ckpt.errors import EngineFailed
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.values import MemoryKind

NAME = "model reuse"
_TEXT = "The weather station on the hill reports wind from the north-west, and rain since the early morning."
_N_PREFIX, _N_MORE = 4, 2
# Of what another context changes: rounding between batch shapes stays far below it, a state that is not there far above.
_TOLERANCE = 0.05
_PRETENDS = "this model only pretends to reuse a state: do not save checkpoints of it"
Logits = npt.NDArray[np.float64]


class WrappingEngine(Engine, Protocol):
    """An engine around a `llama_cpp.Llama` that was made with `logits_all=True`, so that every token's logits are kept."""

    @property
    def llama(self) -> Any:
        """The `Llama`."""


def reuse(engine: WrappingEngine) -> Diagnosis:
    """Evaluates a few tokens, loads their state over another text's, and compares what would come next. The engine holds a text
    of its own afterwards.

    Raises:
        EngineFailed: the engine cannot even evaluate, or gives no state.
    """
    if engine.layout is None:
        detail = f"its {engine.memory_kind} memory has a layout that is not known here"
        return warn(NAME, detail, "warm evaluates its inputs each time, and saves nothing")
    ids = engine.token_ids(_TEXT)
    if len(ids) < 2 * _N_PREFIX:
        return not_checked(NAME, f"its tokenizer makes {len(ids)} tokens of a whole sentence")
    prefix, more = ids[:_N_PREFIX], ids[_N_PREFIX : _N_PREFIX + _N_MORE]
    # The same last token after other ones: what the state before it is worth shows in the difference.
    other = np.append(ids[_N_PREFIX : 2 * _N_PREFIX - 1], prefix[-1:]).astype(np.int32)
    engine.evaluate(prefix)
    cold, state = _next(engine), engine.capture()
    cold_more = _after(engine, more)
    engine.evaluate(other)
    unlike = _apart(cold, _next(engine))
    try:
        engine.load(state, prefix)
        if not np.array_equal(engine.held_token_ids(), prefix):
            return fail(NAME, f"after the load it holds other tokens than the state's {_N_PREFIX}", _PRETENDS)
        pairs = {}
        if engine.memory_kind is MemoryKind.FULL:  # any other memory cannot take its last token back
            engine.evaluate(prefix, n_kept=_N_PREFIX - 1)
            pairs["at once"] = (cold, _next(engine))
    except EngineFailed as error:
        return fail(NAME, f"it refuses its own state: {error}", _PRETENDS)
    pairs["two tokens on"] = (cold_more, _after(engine, more))
    engine.evaluate(ids[: _N_PREFIX + _N_MORE])
    return _verdict(unlike, pairs, _next(engine))


def _verdict(unlike: float, pairs: dict[str, tuple[Logits, Logits]], whole: Logits) -> Diagnosis:
    """What the numbers say. `unlike` is how far another context moves the logits."""
    if not unlike > 0:
        return fail(NAME, "the next token's logits are the same whatever stands before it, or no numbers", _PRETENDS)
    (_, warm_more) = pairs["two tokens on"]
    for when, (cold, warm) in {**pairs, "against a run of the whole": (whole, warm_more)}.items():
        apart = _apart(cold, warm)
        if not apart <= _TOLERANCE * unlike:  # so that NaN fails too
            detail = f"after a load its logits are off by {apart:.3g} {when} (another context: {unlike:.3g})"
            return fail(NAME, detail, _PRETENDS)
    furthest = max(_apart(cold, warm) for cold, warm in pairs.values())
    how = "bit for bit" if furthest == 0 else f"within {furthest:.2g} (another context: {unlike:.2g})"
    return ok(NAME, f"continues from a loaded state as from its own, {how}")


def _next(engine: WrappingEngine) -> Logits:
    """The logits of the token after what the engine holds; shape `[n_vocab]`."""
    return np.array(engine.llama.scores[engine.llama.n_tokens - 1], dtype=np.float64)


def _after(engine: WrappingEngine, token_ids: TokenIds) -> Logits:
    """The same after these tokens, each by itself: both runs compute in the same batch shapes."""
    for token in token_ids:
        engine.llama.eval([int(token)])
    return _next(engine)


def _apart(one: Logits, other: Logits) -> float:
    return float(np.abs(one - other).max())
