"""Single flight: of many processes that need the same tokens evaluated, one evaluates them, and the others wait for its save.

A claim is a row with an expiry by the database's clock. Its holder renews it whenever it makes progress, so a holder that is
killed delays the others by no more than the rest of its claim. While something is computed no lock is held, and no thread is
needed. docs/single-flight.md has the rule.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time

from llama_ckpt.context import RegistryContext
from llama_ckpt.db import coordination
from llama_ckpt.errors import BadInput, Conflict, DatabaseUnavailable

log = logging.getLogger("llama_ckpt")

CLAIM_S = 60.0
DEFAULT_WAIT_S = 300.0
_PATIENCE = (
    4  # times the longest silence of a holder so far: a large batch on a slow machine does not mean that it is dead
)
_FIRST_STEP_S, _LONGEST_STEP_S, _GROWTH = 0.01, 1.0, 1.5


class SingleFlight:
    """The claims of one caller, one key at a time, and its waiting for others: at most `wait_s` seconds in all, 0 for not at all.

    `waited_s` is how long it has waited, `gave_up` whether the limit ended that, `problem` the error if the database failed.

    Raises:
        BadInput: a `wait_s` below 0.
    """

    def __init__(self, context: RegistryContext, wait_s: float) -> None:
        if not 0 <= wait_s < 1e10:
            raise BadInput(what="wait_s", value=wait_s, reason="give seconds from 0 on; 0 is for not waiting")
        self._context = context
        self._wait_s = wait_s
        self._holder = f"warm {secrets.token_hex(8)} on {socket.gethostname()[:60]}"
        self._claimed: bytes | None = None
        self._ended = set[bytes]()  # keys whose holder has ended while this caller waited
        self._claim_s = CLAIM_S
        self._progress_at = self._renew_at = 0.0  # by the monotonic clock: the last progress, the next renewal
        self.waited_s = 0.0
        self.gave_up = False
        self.problem: DatabaseUnavailable | None = None

    def should_compute(self, key: bytes) -> bool:
        """Whether the caller should compute `key` now. False means that something has changed: match again, then call again with
        the key that the new match gives. Either this caller has just claimed the key, or it has waited and another holder has
        ended. In both cases another process may have saved the tokens since the last match.
        """
        if key == self._claimed:
            return True
        self.leave()
        if self.gave_up or self.problem is not None:
            return True
        try:
            if self._take(key):
                self._claimed = key
                return False
            if self._wait_s == 0 or key in self._ended:
                return True  # the holder ended without a result, and the next one may do so too
            self._wait(key)
        except DatabaseUnavailable as error:
            self.problem = error
            return True
        return False

    def renew(self, *, force: bool = False) -> None:
        """Reports progress: renews the claim if a third of it is over, or with `force` in any case. Never fails."""
        if self._claimed is None:
            return
        now = time.monotonic()
        self._claim_s = max(self._claim_s, _PATIENCE * (now - self._progress_at))
        self._progress_at = now
        if now < self._renew_at and not force:
            return
        try:
            if not self._take(self._claimed):
                log.info("%s continues without a claim: it had expired, and another process took it", self._holder)
                self._claimed = None
        except DatabaseUnavailable as error:
            log.warning("a claim was not renewed, others may compute the same: %s", error)

    def leave(self) -> None:
        """Gives the claim back, if there is one. If that fails, it expires by itself."""
        key, self._claimed = self._claimed, None
        if key is None:
            return
        try:
            with self._context.database.write() as db:
                coordination.drop_claim(db, key, self._holder)
                coordination.forget_claims(db)
        except DatabaseUnavailable as error:
            log.warning("others may wait %.0f s for a claim that could not be given back: %s", self._claim_s, error)

    def _take(self, key: bytes) -> bool:
        self._progress_at = time.monotonic()
        self._renew_at = self._progress_at + self._claim_s / 3
        try:
            with self._context.database.write() as db:
                return coordination.take_claim(db, key, self._holder, 0, self._claim_s)
        except Conflict:  # another process inserted it at this moment
            return False

    def _wait(self, key: bytes) -> None:
        """Waits until no process has the key any more, or the limit is reached."""
        started, before = time.monotonic(), self.waited_s
        step, holder, expires = _FIRST_STEP_S, "", 0.0
        while not self.gave_up:
            asked_at = time.monotonic()
            seen = self._context.database.query(lambda db: coordination.claim_of(db, key))
            now = time.monotonic()
            self.waited_s = before + now - started
            if seen is not None and seen[1] <= 0:
                return  # its holder was killed, or hangs: one process takes over, and the others wait for that one
            if seen is None or (holder and seen[0] != holder and now < expires):
                self._ended.add(key)
                return
            holder, expires = seen[0], asked_at + seen[1]
            if self.waited_s >= self._wait_s:
                log.warning("after %.1f s of waiting for %s: computing the same here", self.waited_s, holder)
                self.gave_up = True
                return
            self._context.hook("waits")
            time.sleep(min(step, seen[1], self._wait_s - self.waited_s))
            step = min(step * _GROWTH, _LONGEST_STEP_S)
