"""Check that an engine continues from a loaded state as from its own, by evaluating a few tokens.

Some models accept a state silently and then continue from nothing, or evaluate the last token twice. The logits of the next
token show it: after a load they must be those of the cold run, and still be so two tokens later.
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
# Share of the difference that another context makes. Rounding between batch shapes stays far below it; an ignored state is
# far above it.
_MAX_RELATIVE_DIFFERENCE = 0.05
_PRETENDS = "this model only pretends to reuse a state: do not save checkpoints of it"
Logits = npt.NDArray[np.float64]


class WrappingEngine(Engine, Protocol):
    """An engine around a `llama_cpp.Llama` that was made with `logits_all=True`, so that the logits of every token are kept."""

    @property
    def llama(self) -> Any:
        """The `Llama`."""


def check_state_reuse(engine: WrappingEngine) -> Diagnosis:
    """Evaluates a few tokens, loads their state over that of another text, and compares the logits of the next token. Afterwards
    the engine holds the tokens of the check.

    Raises:
        EngineFailed: the engine cannot evaluate, or gives no state.
    """
    if engine.layout is None:
        detail = f"its {engine.memory_kind} memory has a layout that is not known here"
        return warn(NAME, detail, "warm evaluates its inputs each time, and saves nothing")
    ids = engine.token_ids(_TEXT)
    if len(ids) < 2 * _N_PREFIX:
        return not_checked(NAME, f"its tokenizer makes {len(ids)} tokens of a whole sentence")
    prefix, more = ids[:_N_PREFIX], ids[_N_PREFIX : _N_PREFIX + _N_MORE]
    # The same last token after other ones: the difference shows how much the state before it matters.
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
        if engine.memory_kind is MemoryKind.FULL:  # any other memory cannot remove its last token
            engine.evaluate(prefix, n_kept=_N_PREFIX - 1)
            pairs["at once"] = (cold, _next(engine))
    except EngineFailed as error:
        return fail(NAME, f"it refuses its own state: {error}", _PRETENDS)
    pairs["two tokens on"] = (cold_more, _after(engine, more))
    engine.evaluate(ids[: _N_PREFIX + _N_MORE])
    return _verdict(unlike, pairs, _next(engine))


def _verdict(unlike: float, pairs: dict[str, tuple[Logits, Logits]], complete: Logits) -> Diagnosis:
    """The diagnosis. `unlike` is the difference that another context makes; `pairs` are logits of a cold and of a loaded run;
    `complete` are those of one run over all tokens. Logits have shape `[n_vocab]`.
    """
    if not unlike > 0:
        return fail(NAME, "the next token's logits are the same whatever stands before it, or no numbers", _PRETENDS)
    (_, warm_more) = pairs["two tokens on"]
    for when, (cold, warm) in {**pairs, "against a run of the whole": (complete, warm_more)}.items():
        apart = _apart(cold, warm)
        if not apart <= _MAX_RELATIVE_DIFFERENCE * unlike:  # so that NaN fails too
            detail = f"after a load its logits are off by {apart:.3g} {when} (another context: {unlike:.3g})"
            return fail(NAME, detail, _PRETENDS)
    furthest = max(_apart(cold, warm) for cold, warm in pairs.values())
    how = "bit for bit" if furthest == 0 else f"within {furthest:.2g} (another context: {unlike:.2g})"
    return ok(NAME, f"continues from a loaded state as from its own, {how}")


def _next(engine: WrappingEngine) -> Logits:
    """The logits of the token after what the engine holds; shape `[n_vocab]`."""
    return np.array(engine.llama.scores[engine.llama.n_tokens - 1], dtype=np.float64)


def _after(engine: WrappingEngine, token_ids: TokenIds) -> Logits:
    """The same after these tokens, evaluated one by one: both runs then compute with the same batch shapes."""
    for token in token_ids:
        engine.llama.eval([int(token)])
    return _next(engine)


def _apart(one: Logits, other: Logits) -> float:
    """The largest difference of two logits."""
    return float(np.abs(one - other).max())
