"""Which checkpoints a policy keeps: the decision, with the rule that made it. Pure: rows, policy and clock come as arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llama_ckpt.values import Checkpoint, StaleReason, Verdict

_S = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long checkpoints stay. `max_age_s` counts from the save, `max_idle_s` from the last use; None: without limit."""

    max_age_s: float | None = None
    max_idle_s: float | None = None
    stale_grace_s: float = 24 * 3600.0
    ghost_grace_s: float = 3600.0


def judge(rows: Iterable[Checkpoint], policy: Policy, now_us: int) -> Iterator[Verdict]:
    """One verdict per ACTIVE row, in the order given. Pinned rows and rows that a reader has leased are always kept."""
    for row in rows:
        yield _judge(row, policy, now_us)


def _judge(row: Checkpoint, policy: Policy, now_us: int) -> Verdict:
    age_s, idle_s = (now_us - row.created_us) / _S, (now_us - row.last_used_us) / _S
    if row.pinned:
        return Verdict(checkpoint=row, keep=True, rule="pinned")
    if row.lease_until_us is not None and row.lease_until_us > now_us:
        return Verdict(checkpoint=row, keep=True, rule="a reader has it leased")
    if row.expires_us is not None and row.expires_us <= now_us:
        return Verdict(checkpoint=row, keep=False, rule="its own expiry has passed", stale_reason=StaleReason.EXPIRED)
    if policy.max_age_s is not None and age_s > policy.max_age_s:
        rule = f"saved over {age_s:.0f} s ago, max_age is {policy.max_age_s:.0f} s"
        return Verdict(checkpoint=row, keep=False, rule=rule, stale_reason=StaleReason.EVICTED)
    if policy.max_idle_s is not None and idle_s > policy.max_idle_s:
        rule = f"unused for over {idle_s:.0f} s, max_idle is {policy.max_idle_s:.0f} s"
        return Verdict(checkpoint=row, keep=False, rule=rule, stale_reason=StaleReason.EVICTED)
    return Verdict(checkpoint=row, keep=True, rule="within the policy")
