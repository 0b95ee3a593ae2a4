"""Saving beside evaluation: the state is copied, then becomes file and row in a worker thread while the engine goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.match import common_prefix
from llama_ckpt.checkpoints.register import SaveOptions
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine
from llama_ckpt.errors import LlamaCkptError, Unsupported, without_frames
from llama_ckpt.fingerprint import Input, TokenIds
from llama_ckpt.formats.kv import edit as kv_edit
from llama_ckpt.values import MemoryKind, SaveResult

Saved = SaveResult | LlamaCkptError


class Snapshot:
    """What an engine held at one moment: a copy of the state of its first `n_tokens` tokens.

    Raises:
        EngineFailed: the engine gave no state.
        Unsupported: fewer tokens than are held, of a memory that cannot be cut.
    """

    def __init__(self, engine: Engine, n_tokens: int) -> None:
        self.fingerprint = engine.fingerprint
        self.model_name = engine.model_name
        self.engine_name = engine.engine_name
        self.memory_kind = engine.memory_kind
        self.dimensions = engine.dimensions
        self.layout = engine.layout
        self.rotation = engine.rotation
        held = engine.held_token_ids()
        self._held = held[:n_tokens]
        if n_tokens < len(held) and self.memory_kind is not MemoryKind.FULL:
            raise Unsupported(what=f"a part of {self.memory_kind} memory", reason="it cannot be cut")
        state = engine.capture()
        self._state = kv_edit.truncate(state, n_tokens) if n_tokens < len(held) else state

    def token_ids(self, _text: str) -> TokenIds:
        """The token ids of the text that it is saved for, which are those that it holds; shape `[n_tokens]`."""
        return self._held

    def held_token_ids(self) -> TokenIds:
        """The token ids whose state this is; shape `[n_tokens]`."""
        return self._held

    def capture(self) -> memoryview:
        """The copy."""
        return self._state


class BackgroundSaver:
    """Saves what an engine holds in one worker thread, one state at a time. At the end of its `with` the save in flight is
    finished, whatever ended the block; a crash leaves what it leaves of any save: at most a file without a row.
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

    def save(self, engine: Engine, n_tokens: int, given: Input, options: SaveOptions) -> Future[Saved]:
        """Copies the state of the first `n_tokens` held tokens, which are those of `given`, and begins to save it: what comes of
        it is a `SaveResult`, or the error. A save that is still in flight is finished first, so that there is one copy at most.

        Raises:
            EngineFailed, Unsupported: there is no state to save.
        """
        self.finish()
        snapshot = Snapshot(engine, n_tokens)
        self._token_ids = snapshot.held_token_ids()
        self._in_flight = self._worker.submit(_save, self._context, snapshot, given, options)
        return self._in_flight

    def finish(self) -> None:
        """Waits for the save in flight."""
        if self._in_flight is not None:
            self._in_flight.result()

    def n_shared(self, token_ids: TokenIds) -> int:
        """How many token ids an input begins with like the state that is being saved; 0 when none is."""
        if self._in_flight is None or self._in_flight.done():
            return 0
        return common_prefix(self._token_ids, token_ids)


def _save(context: RegistryContext, snapshot: Snapshot, given: Input, options: SaveOptions) -> Saved:
    try:
        return saving.save(context, snapshot, given, options)
    except LlamaCkptError as error:
        return without_frames(error)
