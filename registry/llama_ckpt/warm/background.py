"""Saves beside the evaluation: the state is copied, then a worker thread writes file and row while the engine continues."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine
from llama_ckpt.engine.held import PrefixView
from llama_ckpt.errors import LlamaCkptError, without_frames
from llama_ckpt.fingerprint import TokenIds, common_prefix
from llama_ckpt.values import SaveResult

Saved = SaveResult | LlamaCkptError


class BackgroundSaver:
    """Saves what an engine holds in one worker thread, one state at a time. At the end of its `with` block it finishes the
    save in flight, however the block ended. A crash leaves what it leaves of any save: at most a file without a row.
    """

    def __init__(self, context: RegistryContext) -> None:
        self._context = context
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llama-ckpt-save")
        self._in_flight: Future[Saved] | None = None
        self._token_ids = np.empty(0, dtype=np.int32)

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(wait=True)
        if error is None:
            self.finish()

    def save(
        self,
        engine: Engine,
        prompt: ResolvedInput,
        options: SaveOptions,
        *,
        unusable: frozenset[str] = frozenset(),
    ) -> Future[Saved]:
        """Copies the state of the first held tokens, which must be those of `prompt`, and starts to save it. The future gives the
        `SaveResult` or the error. A save that is still in flight is finished first, so that there is one copy at most.
        `unusable` as in `checkpoints.save.save`.

        Raises:
            EngineFailed, Unsupported: there is no state to save.
        """
        self.finish()
        self._token_ids = prompt.token_ids  # here, and not in the worker: a tokenizer is not for two threads
        copied = PrefixView(engine, len(self._token_ids), copy=True)
        self._in_flight = self._worker.submit(_save, self._context, copied, prompt, options, unusable)
        return self._in_flight

    def finish(self) -> None:
        """Waits for the save in flight."""
        if self._in_flight is not None:
            self._in_flight.result()

    def n_shared(self, token_ids: TokenIds) -> int:
        """The number of tokens that an input shares at its start with the state that is being saved; 0 if none is."""
        if self._in_flight is None or self._in_flight.done():
            return 0
        return common_prefix(self._token_ids, token_ids)


def _save(
    context: RegistryContext,
    copied: PrefixView,
    prompt: ResolvedInput,
    options: SaveOptions,
    unusable: frozenset[str],
) -> Saved:
    try:
        return saving.save(context, copied, prompt, options, unusable=unusable)
    except LlamaCkptError as error:
        return without_frames(error)
