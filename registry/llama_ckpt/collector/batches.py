"""Batches of rows, of a size that keeps a transaction short."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_MIN_BATCH_ROWS = 100
_MAX_BATCH_ROWS = 2000
# Target duration of one transaction. On SQLite it blocks every other writer; on a server only writers of the same rows.
_TRANSACTION_S = {"sqlite": 0.02}
_SERVER_TRANSACTION_S = 0.25

T = TypeVar("T")


class BatchSizer:
    """Splits work into batches, and adapts their size to the target duration of a transaction on this database."""

    def __init__(self, dialect: str) -> None:
        self._n_rows, self._target_s = _MIN_BATCH_ROWS, _TRANSACTION_S.get(dialect, _SERVER_TRANSACTION_S)

    def batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """The items in batches; the size of each is decided when it is asked for."""
        at = 0
        while at < len(items):
            batch = items[at : at + self._n_rows]
            at += len(batch)
            yield batch

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times the transaction of a batch."""
        started = time.monotonic()
        yield
        took_s = time.monotonic() - started
        if took_s < self._target_s / 2:
            self._n_rows = min(self._n_rows * 2, _MAX_BATCH_ROWS)
        elif took_s > self._target_s:
            self._n_rows = max(self._n_rows // 2, _MIN_BATCH_ROWS)
