"""What a caller gives to a call: the input as a `ResolvedInput`, and the options of a save as `SaveOptions`."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_ckpt.engine import Tokenizer
from llama_ckpt.errors import BadInput
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, hash_input, text_bytes, tokens_hash

_MAX_NAME_LENGTH = 200


class ResolvedInput:
    """An input with its input hash and its token ids. Each is computed when it is first asked for, and once.

    `prompt` is what the caller gave: a text, or token ids. `token_ids` are those of a text if the caller knows them; else
    `tokenizer` (an engine is one) computes them. It is made where a call enters the library, and passed on from there.
    """

    def __init__(
        self,
        prompt: Input,
        tokenizer: Tokenizer | None = None,
        *,
        token_ids: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> None:
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._given_ids = None if token_ids is None else as_token_ids(token_ids)

    @cached_property
    def input_hash(self) -> bytes:
        """The input hash, 32 raw bytes (`fingerprint.hash_input`).

        Raises:
            BadInput: the input is empty, or is neither a text nor token ids.
        """
        return hash_input(self.prompt)

    @cached_property
    def token_ids(self) -> TokenIds:
        """The token ids of the input; shape `[n_tokens]`.

        Raises:
            BadInput: the input is empty, is neither a text nor token ids, or has no token; or nothing can tokenise it.
        """
        if self._given_ids is not None:
            return self._given_ids
        if not isinstance(self.prompt, str):
            return as_token_ids(self.prompt)
        text_bytes(self.prompt)
        if self._tokenizer is None:
            raise BadInput(what="input text", value=f"{len(self.prompt)} characters", reason="it needs a tokenizer")
        return self._tokenizer.token_ids(self.prompt)

    @cached_property
    def tokens_hash(self) -> bytes:
        """SHA-256 of the token ids, 32 raw bytes (`fingerprint.tokens_hash`).

        Raises:
            BadInput: as `token_ids`.
        """
        is_ids = self._given_ids is None and not isinstance(self.prompt, str)
        return self.input_hash if is_ids else tokens_hash(self.token_ids)

    def resolve(self) -> ResolvedInput:
        """The same input, with hash and token ids computed now: for a caller who needs the errors of a bad input here.

        Raises:
            BadInput: as `input_hash` and `token_ids`.
        """
        _ = self.input_hash, self.token_ids
        return self

    @property
    def has_token_ids(self) -> bool:
        """Whether `token_ids` can be had: not for a text without a tokenizer."""
        return self._tokenizer is not None or self.is_tokenized

    @property
    def is_tokenized(self) -> bool:
        """Whether `token_ids` costs nothing: they were given, or were computed before."""
        return not isinstance(self.prompt, str) or self._given_ids is not None or "token_ids" in self.__dict__

    @property
    def required_tokens_hash(self) -> bytes | None:
        """The `tokens_hash` that a checkpoint with this input hash must have; None if the input hash alone proves the input.

        It proves a text, whatever its token ids are now. It does not prove token ids, or a text that contains NUL characters:
        those bytes can be both. A caller who gives token ids beside a text wants a checkpoint of these.
        """
        if (
            isinstance(self.prompt, str)
            and self._given_ids is None
            and not ("\0" in self.prompt and self.has_token_ids)
        ):
            return None
        return self.tokens_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a caller can say about a save besides the input. `expires_in_s` counts from the save.

    Raises:
        BadInput: a label that is empty or has over 200 characters, or an expiry that is not in the future.
    """

    label: str | None = None
    expires_in_s: float | None = None
    prefill_ms: int | None = None

    def __post_init__(self) -> None:
        if self.label is not None:
            _require_label(self.label)
        _require_number("expires_in_s", self.expires_in_s, lambda s: 0 < s < 1e10, "give seconds greater than 0")
        _require_number("prefill_ms", self.prefill_ms, lambda ms: 0 <= ms < 1 << 53, "give milliseconds from 0 on")


def _require_number(what: str, value: Any, is_allowed: Callable[[Any], bool], reason: str) -> None:
    if value is not None and not (isinstance(value, numbers.Real) and is_allowed(value)):
        raise BadInput(what=what, value=value, reason=reason)


def _require_label(label: str) -> None:
    if not 0 < len(label) <= _MAX_NAME_LENGTH:
        raise BadInput(what="label", value=label[:40], reason=f"a label has 1 to {_MAX_NAME_LENGTH} characters")
    if clean_name(label) != label:
        raise BadInput(what="label", value=label[:40], reason="a label has no NUL and no lone surrogate")


def clean_name(name: str) -> str:
    """A name as every database can store it: at most 200 characters, valid UTF-8, no NUL, not empty."""
    return name.encode(errors="replace").decode().replace("\0", "?")[:_MAX_NAME_LENGTH] or "unnamed"
