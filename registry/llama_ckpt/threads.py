"""Runs a function on many items in several threads, which all end before the call does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_parallel(work: Callable[[T], R], items: Sequence[T], n_threads: int, done: dict[int, R]) -> None:
    """Calls `work` on each item in up to `n_threads` threads, one of which is the caller's. Puts each result into `done`, by the
    index of its item, as soon as it is known. If a call raises, or the caller is interrupted, no other item is begun; the calls
    under way end, and the first exception is raised. `done` then has the results so far. If no thread can be started, the
    caller's does all the work.

    The threads are daemons. Threads of a pool would keep the interpreter from ending, and could not be started while it ends.
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
        except RuntimeError:  # the system has no more threads, or the interpreter is about to end
            return
        helpers.append(helper)
