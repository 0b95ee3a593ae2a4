"""Which of a `Llama`'s positions hold the token ids that it says."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import llama_cpp

_NAME = "_llama_ckpt_tracking"


class Tracking:
    """Counts the first positions of a `Llama` that were evaluated from token ids, or loaded with them, in `n_known`.

    llama-cpp-python's handlers for images and sound count their positions in `n_tokens` and leave `input_ids` as an earlier
    prompt left it. Nothing of the `Llama` tells: so it is watched where it evaluates, resets and loads. Its own arrays stay as
    they are.
    """

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._llama = weakref.ref(llama)  # its memory goes with the last reference that others hold
        self.n_known = llama.n_tokens
        llama.eval, llama.reset, llama.load_state = self._eval, self._reset, self._load_state  # type: ignore[method-assign]

    @classmethod
    def of(cls, llama: llama_cpp.Llama) -> Tracking:
        """The one of this `Llama`, whoever asks."""
        if not hasattr(llama, _NAME):
            setattr(llama, _NAME, cls(llama))
        tracking: Tracking = getattr(llama, _NAME)
        return tracking

    def _eval(self, tokens: Sequence[int]) -> None:
        llama = self._llama()
        assert llama is not None  # noqa: S101 - whoever calls it has it
        n_before = llama.n_tokens
        type(llama).eval(llama, tokens)
        if n_before <= self.n_known:
            self.n_known = llama.n_tokens

    def _reset(self) -> None:
        self.n_known = 0
        if (llama := self._llama()) is not None:
            type(llama).reset(llama)  # type: ignore[no-untyped-call]

    def _load_state(self, state: Any) -> None:
        llama = self._llama()
        assert llama is not None  # noqa: S101 - whoever calls it has it
        type(llama).load_state(llama, state)
        self.n_known = llama.n_tokens
