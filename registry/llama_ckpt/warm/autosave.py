"""Saves while an engine generates: every so many tokens, at the end, and when Ctrl-C ends it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions
from llama_ckpt.context import RegistryContext
from llama_ckpt.engine import Engine
from llama_ckpt.errors import BadInput, LlamaCkptError
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.values import SaveResult

log = logging.getLogger("llama_ckpt")

T = TypeVar("T")


class Autosave:
    """Saves what an engine generates, every so many tokens and when its `with` block ends. Made by `Registry.autosave`.

    There are two ways to report the tokens to it. As a stopping criterion of llama-cpp-python, for `llama(…)` and
    `llama.generate(…)`: `stopping_criteria=autosave`. Or around any iterator that yields while tokens are generated, such as the
    stream of a chat: `for chunk in autosave.along(stream)`. It saves the tokens that the engine holds, by their ids: all but the
    last one that was sampled.

    In the main thread it also handles SIGINT inside the block; in other threads it leaves signals alone, and it leaves an ignored
    SIGINT ignored. At the first SIGINT the token in flight is finished and generation stops. When the block ends, the state is
    saved, a warning in the log says where, and the signal goes to the handler that was there before. Python's own raises
    KeyboardInterrupt, which ends a program with the usual code 130. A second SIGINT goes to that handler at once; what was saved
    so far stays.

    A save that fails does not end the generation: the log reports it, and `problem` keeps the last one. `saved` is the last save.

    Raises:
        BadInput: `every` is below 1.
    """

    def __init__(self, context: RegistryContext, engine: Engine, every: int, options: SaveOptions) -> None:
        if every < 1:
            raise BadInput(what="every", value=every, reason="give the tokens between two saves, 1 or more")
        self._context, self._engine, self._every, self._options = context, engine, every, options
        self._old_handler: Any = None
        self._last: TokenIds | None = None  # what the engine held at the first look, or at the last save
        self.interrupted = False
        self.saved: SaveResult | None = None
        self.problem: LlamaCkptError | None = None

    def __enter__(self) -> Autosave:
        old_handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and old_handler not in (None, signal.SIG_IGN):
            self._old_handler = old_handler
            signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __call__(self, _token_ids: Any = None, _logits: Any = None) -> bool:
        """Reports one more token: saves if it is due, and returns whether to stop. llama-cpp-python calls it with token ids and
        logits, which are not used: the engine knows the tokens whose cells it holds.
        """
        held = self._engine.held_token_ids()
        if self._last is None or len(held) < len(self._last):
            self._last = held  # a new prompt: its own state is not saved here
        elif len(held) - len(self._last) >= self._every:
            self._save(held)
        return self.interrupted

    def along(self, stream: Iterable[T]) -> Iterator[T]:
        """Yields the items of `stream`; after each it saves if that is due. Ends early after a SIGINT."""
        for item in stream:
            yield item
            if self():
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                self._finish()
        finally:
            self._restore_handler()
        if self.interrupted and not isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def _finish(self) -> None:
        held = self._engine.held_token_ids()
        if len(held):
            self._save(held)
        row = None if self.saved is None else self.saved.checkpoint
        if self.interrupted and row is not None:
            path = self._context.store.root / row.file_path
            log.warning("interrupted: %d tokens are saved as checkpoint %s in %s", row.n_tokens, row.id, path)

    def _save(self, held: TokenIds) -> None:
        self._last = held  # also if the save fails: the next try is due after as many tokens
        try:
            self.saved = saving.save(self._context, self._engine, ResolvedInput(held), self._options)
            log.info("%s: %d tokens", self.saved.outcome, len(held))
        except LlamaCkptError as failure:
            self.problem = failure
            log.warning("%d tokens were not saved, the generation continues: %s", len(held), failure)

    def _on_sigint(self, _signal: int, _frame: FrameType | None) -> None:
        self.interrupted = True
        self._restore_handler()

    def _restore_handler(self) -> None:
        """Restores the old signal handler, once."""
        old_handler, self._old_handler = self._old_handler, None
        if old_handler is not None:
            signal.signal(signal.SIGINT, old_handler)
