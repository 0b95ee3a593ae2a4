"""Tracks which positions of a `Llama` really hold the token ids that it reports."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import llama_cpp

_NAME = "_llama_ckpt_tracking"


class Tracking:
    """`n_known` is the number of a `Llama`'s first positions that were evaluated from token ids, or loaded with them.

    llama-cpp-python's handlers for images and sound count their positions in `n_tokens`, and leave in `input_ids` what an earlier
    prompt wrote there. The `Llama` does not show which positions those are, so its `eval`, `reset` and `load_state` are wrapped.
    Its arrays are not changed.
    """

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._llama = weakref.ref(llama)  # so that its memory is freed with the caller's last reference
        self.n_known = llama.n_tokens
        llama.eval, llama.reset, llama.load_state = self._eval, self._reset, self._load_state  # type: ignore[method-assign]

    @classmethod
    def attached_to(cls, llama: llama_cpp.Llama) -> Tracking:
        """The one `Tracking` of this `Llama`, which is made at the first call."""
        if not hasattr(llama, _NAME):
            setattr(llama, _NAME, cls(llama))
        tracking: Tracking = getattr(llama, _NAME)
        return tracking

    def _eval(self, tokens: Sequence[int]) -> None:
        llama = self._llama()
        assert llama is not None  # noqa: S101 - its caller has a reference
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
        assert llama is not None  # noqa: S101 - its caller has a reference
        type(llama).load_state(llama, state)
        self.n_known = llama.n_tokens
