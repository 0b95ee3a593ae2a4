"""Many waits at once: work on items in several threads, none of which outlives its reason."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_parallel(work: Callable[[T], R], items: Sequence[T], n_threads: int, done: dict[int, R]) -> None:
    """Works on the items in up to `n_threads` threads, the caller's among them. What comes of each item stands in `done` under
    its place as soon as it is known. When one fails, or the caller is interrupted, no other item is begun, those in hand are
    ended, and the first failure is raised; `done` says what was done. Where no thread can be started, the caller does all.

    The threads are daemons: those of a pool would keep the interpreter from its end, and could not be started during it.
    """
    todo, failures = deque(enumerate(items)), list[BaseException]()

    def take() -> None:
        while todo and not failures:
            try:
                at, item = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                done[at] = work(item)
            except BaseException as failure:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(failure)

    helpers: list[threading.Thread] = []
    try:
        _start(helpers, take, min(n_threads, len(items)) - 1)
        take()
        for helper in helpers:
            helper.join()
    finally:
        todo.clear()
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]


def _start(helpers: list[threading.Thread], work: Callable[[], None], n: int) -> None:
    for _ in range(n):
        helper = threading.Thread(target=work, daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system has no more, or the interpreter is about to end
            return
        helpers.append(helper)
