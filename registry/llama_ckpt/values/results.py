"""The results of what users call: match, save, restore, merge, warm, stats. `str()` of each is one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from llama_ckpt.humanize import bytes_, duration, plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llama_ckpt.errors import LlamaCkptError
    from llama_ckpt.values.rows import Checkpoint, Difference


class Outcome(StrEnum):
    """The outcome of a match or a restore. Not a bool: `NO_MATCH` (nothing fits) and `FAILED` (an error) are different."""

    HIT = "hit"
    NO_MATCH = "no_match"
    FAILED = "failed"


class SaveOutcome(StrEnum):
    """The outcome of a save. `REFUSED`: it would exceed a limit of the policy, and every checkpoint that could be pruned for it
    is worth more.
    """

    SAVED = "saved"
    DEDUPLICATED = "deduplicated"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an input and a checkpoint diverge: at token index `at`, counted from 0. `before` is the text of some tokens before
    it, which both have; `in_input` and `in_checkpoint` are the text of each from there on. None if no tokenizer is available.
    """

    at: int
    before: str | None = None
    in_input: str | None = None
    in_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """The answer to "which checkpoint matches this input?".

    `n_matching` is the length in tokens of the prefix that input and checkpoint share. `n_reusable` is the number of tokens that
    a restore saves from evaluation: at most the input's tokens less one, since a restored state has no logits and the last
    token is decoded again. `n_tokens` is the input's length in tokens, None if it is not known. For a `NO_MATCH`, `nearest` and
    `differences` explain why, and `n_matching` is that of `nearest`. `divergence` says where the input and the checkpoint (or
    `nearest`) diverge, if they do. `error` explains a `FAILED`.
    """

    outcome: Outcome
    reason: str
    input_hash: bytes
    checkpoint: Checkpoint | None = None
    n_matching: int = 0
    n_reusable: int = 0
    n_tokens: int | None = None
    nearest: Checkpoint | None = None
    divergence: Divergence | None = None
    differences: tuple[Difference, ...] = ()
    error: LlamaCkptError | None = None

    def __str__(self) -> str:
        if self.outcome is not Outcome.HIT or self.checkpoint is None:
            nearest = "" if self.nearest is None else f" (nearest: checkpoint {self.nearest.short_id})"
            return f"{'no match' if self.outcome is Outcome.NO_MATCH else 'match failed'}: {printable(self.reason)}{nearest}"
        of = "" if self.n_tokens is None else f" of {self.n_tokens:,}"
        reusable = f"{self.n_matching:,}{of} tokens match, {self.n_reusable:,} can be restored"
        return f"hit: {reusable}: {printable(self.reason)} (checkpoint {self.checkpoint.short_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The result of a save. `bytes_written` is 0 unless the outcome is `SAVED`. A `REFUSED` save has no checkpoint, and `reason`
    says why.
    """

    outcome: SaveOutcome
    checkpoint: Checkpoint | None
    bytes_written: int
    elapsed_s: float
    reason: str = ""

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"save {self.outcome}: {printable(self.reason)}"
        tokens, name = plural(self.checkpoint.n_tokens, "token"), f"(checkpoint {self.checkpoint.short_id})"
        if self.outcome is SaveOutcome.DEDUPLICATED:
            return f"already saved: {tokens} {name}"
        return f"saved {tokens}, wrote {bytes_(self.bytes_written)}, in {duration(self.elapsed_s)} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The result of a restore. Unless the outcome is `HIT`, `n_restored` is 0 and `reason` says why; `error` is set on `FAILED`.

    `n_restored` is the number of tokens that the restore saved from evaluation. `n_evaluated` is 1 if the complete input was
    restored and its last token decoded again. It is 0 if the checkpoint has only the first `n_restored` tokens of the input: the
    engine holds these, and the caller evaluates the rest (`warm` does so itself).
    """

    outcome: Outcome
    reason: str
    n_restored: int
    n_evaluated: int
    checkpoint: Checkpoint | None
    elapsed_s: float
    error: LlamaCkptError | None = None

    def __str__(self) -> str:
        if self.outcome is not Outcome.HIT:
            return _not_restored(self)
        evaluated = f", evaluated {self.n_evaluated:,}" if self.n_evaluated else ""
        restored = f"restored {plural(self.n_restored, 'token')}{evaluated}, in {duration(self.elapsed_s)}"
        return restored + _of(self.checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """The result of a merge: the cells of `n_merged` tokens of `checkpoint` were appended to those that the engine held, and it
    now holds `n_held` tokens. The last token was decoded again, for its logits.
    """

    checkpoint: Checkpoint
    n_merged: int
    n_held: int
    elapsed_s: float

    def __str__(self) -> str:
        merged = f"merged {plural(self.n_merged, 'token')}, the engine holds {self.n_held:,}"
        return f"{merged}, in {duration(self.elapsed_s)}{_of(self.checkpoint)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """The result of `warm`: the engine holds the input in every case.

    Of the input's tokens, `n_restored` came from checkpoints, `n_evaluated` were evaluated (including those of a shared prefix),
    and `n_kept` were in the engine already. `restore` is the restore that gave the most tokens; `save` is None if nothing was
    saved. `waited_s` is how long `warm` waited for another process that evaluated the same input; `gave_up`: the wait reached
    its limit, and the input was evaluated here as well. `problem` is the error if the database or the store failed: the input
    was evaluated without them.
    """

    restore: RestoreResult
    save: SaveResult | None
    n_restored: int
    n_evaluated: int
    elapsed_s: float
    n_kept: int = 0
    waited_s: float = 0.0
    gave_up: bool = False
    problem: LlamaCkptError | None = None

    def __str__(self) -> str:
        counts = (("restored", self.n_restored), ("kept", self.n_kept), ("evaluated", self.n_evaluated))
        verbs = [(verb, n) for verb, n in counts if n] or [("evaluated", 0)]
        (first, n_first), *others = verbs
        line = ", ".join([f"{first} {plural(n_first, 'token')}", *(f"{verb} {n:,}" for verb, n in others)])
        line += f", in {duration(self.elapsed_s)}"
        if self.restore.outcome is Outcome.HIT and self.n_restored:
            line += _of(self.restore.checkpoint)
        return line + "".join(f"; {part}" for part in self._remarks())

    def _remarks(self) -> Iterator[str]:
        if self.save is not None:
            yield str(self.save)
        if self.problem is not None:
            yield f"without the registry: {printable(str(self.problem))}"
        elif self.restore.outcome is not Outcome.HIT:
            yield _not_restored(self.restore)
        if self.waited_s:
            gave_up = ", which had not finished" if self.gave_up else ""
            yield f"waited {duration(self.waited_s)} for another process{gave_up}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals of the registry, counted from the rows at each call.

    `n_tokens` and `models` are of the ACTIVE rows; `hit_count` and `spared_ms`, the evaluation that hits saved, are of all rows.
    `events` is how often all processes together met each `metrics.Event` since the registry was created; events that never
    occurred are left out.
    """

    n_active: int
    n_stale: int
    active_bytes: int
    stale_bytes: int
    n_tokens: int
    hit_count: int
    spared_ms: int
    models: tuple[ModelStats, ...] = field(default=())
    events: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.n_active:,} ACTIVE ({bytes_(self.active_bytes)}, {plural(self.n_tokens, 'token')}), "
            f"{self.n_stale:,} STALE ({bytes_(self.stale_bytes)}), {plural(len(self.models), 'model')}, "
            f"{plural(self.hit_count, 'hit')}, {duration(self.spared_ms / 1000)} of evaluation saved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """Totals of the ACTIVE rows of one fingerprint."""

    model_name: str
    fingerprint: bytes
    n_active: int
    active_bytes: int
    n_tokens: int
    hit_count: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token of these checkpoints; 0 if there are none."""
        return self.active_bytes / self.n_tokens if self.n_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{printable(self.model_name)}: {plural(self.n_active, 'checkpoint')}, {plural(self.n_tokens, 'token')}, "
            f"{bytes_(self.active_bytes)} ({bytes_(self.bytes_per_token)} per token), {plural(self.hit_count, 'hit')} "
            f"(fingerprint {self.fingerprint.hex()[:12]})"
        )


def _not_restored(result: RestoreResult) -> str:
    return f"{'not restored' if result.outcome is Outcome.NO_MATCH else 'restore failed'}: {printable(result.reason)}"


def _of(checkpoint: Checkpoint | None) -> str:
    return "" if checkpoint is None else f" (checkpoint {checkpoint.short_id})"
