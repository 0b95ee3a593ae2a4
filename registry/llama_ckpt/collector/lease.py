"""The lease that prune, gc and purge run under: one run at a time, over all hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_ckpt.db import coordination
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import Busy

_NAME = "gc"
_LEASE_S = 300.0


class RunLease:
    """Keeps runs apart. The lease is a row with an expiry, so that a killed process blocks others for 5 minutes at most. `holder`
    names the host and the process, for messages and records.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.holder = f"{coordination.this_host()}:{os.getpid()}:{time.monotonic_ns()}"

    @contextmanager
    def held(self) -> Iterator[int]:
        """Holds the lease for a block. Gives its fence, a number that grows each time the lease changes hands.

        Raises:
            Busy: another run holds it.
            DatabaseUnavailable: the database failed.
        """
        with self._database.write() as db:
            fence = coordination.take_lease(db, _NAME, self.holder, _LEASE_S)
            holder, left_s = coordination.lease_holder(db, _NAME)
        if fence is None:
            raise Busy(what="prune or gc", holder=holder, seconds_left=left_s)
        try:
            yield fence
        finally:
            with self._database.write() as db:
                coordination.drop_lease(db, _NAME, fence)

    def renew(self, db: Any, fence: int) -> None:
        """Extends the lease, in the transaction of the work: if another run took the lease, the transaction is rolled back.

        Raises:
            Busy: another run took it.
        """
        if not coordination.renew_lease(db, _NAME, fence, _LEASE_S):
            holder, left_s = coordination.lease_holder(db, _NAME)
            raise Busy(what="prune or gc", holder=holder, seconds_left=left_s)
