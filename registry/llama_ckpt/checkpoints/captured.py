"""A state in memory that is to become a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llama_ckpt.engine import HeldState
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.formats.kv import state as kv_state


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """The state of an input, computed by the model of `engine`. `written_by` is metadata for the file: the program that wrote it.

    Raises:
        Unsupported: the state is not of these tokens. Full attention has one cell for each; other memory ends with the last.
    """

    engine: HeldState
    input_hash: bytes
    token_ids: TokenIds
    payload: memoryview
    written_by: Mapping[str, str]

    def __post_init__(self) -> None:
        require = kv_state.require_plain_sequence if self.can_be_truncated else kv_state.require_whole_sequence
        require(kv_state.parse(self.payload), len(self.token_ids))

    @property
    def can_be_truncated(self) -> bool:
        """Whether the first cells of it are a state, too."""
        return self.engine.memory_kind.can_be_truncated
