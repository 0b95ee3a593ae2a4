"""Why a policy keeps or condemns one checkpoint: what each of its rules says about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from llama_ckpt.errors import NotFound
from llama_ckpt.gc_values import Candidate, Disk, RuleEffect, RuleOpinion
from llama_ckpt.retention import rules
from llama_ckpt.retention.columns import Columns
from llama_ckpt.retention.policy import Order, Policy
from llama_ckpt.retention.rules import Ruling
from llama_ckpt.values import US_PER_S, Checkpoint


def explain(
    candidates: Iterable[Candidate], row: Checkpoint, policy: Policy, now_us: int, disk: Disk
) -> list[RuleOpinion]:
    """What each rule says about a row, and at the end whether prune keeps it. `candidates` are all ACTIVE rows, in order of their
    number.

    Raises:
        NotFound: the row is not among them.
    """
    table = Columns.from_rows(candidates)
    at = np.flatnonzero(table.ckpt_no == row.ckpt_no)
    if not len(at):
        hint = "The policy judges ACTIVE checkpoints only; if it is there, llama-ckpt show says why it is STALE."
        raise NotFound(what="ACTIVE checkpoint", name=row.id, hint=hint)
    i = int(at[0])
    ruling = rules.rule(table, policy, now_us, disk)
    return [
        *_shields(ruling, i),
        *_times(table, policy, now_us, i),
        *_limits(ruling, disk, i),
        _place(ruling, i),
        _verdict(ruling, i),
    ]


def _shields(ruling: Ruling, i: int) -> Iterator[RuleOpinion]:
    for name, mask in ruling.shields:
        if mask[i]:
            yield _opinion("always stays", RuleEffect.KEEPS, name)


def _times(table: Columns, policy: Policy, now_us: int, i: int) -> Iterator[RuleOpinion]:
    age_s = (now_us - int(table.created_us[i])) / US_PER_S
    idle_s = (now_us - int(table.last_used_us[i])) / US_PER_S
    if table.expired(now_us)[i]:
        yield _opinion("expiry", RuleEffect.CONDEMNS, rules.EXPIRED)
    for name, limit_s, since_s, event in (
        ("max_age", policy.max_age_s, age_s, "saved"),
        ("max_idle", policy.max_idle_s, idle_s, "last used"),
    ):
        if limit_s is not None:
            why = f"{event} {since_s:.0f} s ago, the limit is {limit_s:.0f} s"
            yield _opinion(name, _condemns_if(since_s > limit_s), why)


def _limits(ruling: Ruling, disk: Disk, i: int) -> Iterator[RuleOpinion]:
    table = ruling.table
    for limit in rules.limits(ruling, disk):
        groups = limit.groups
        members = np.ones(len(table), dtype=np.bool_) if groups is None else groups == groups[i]
        if groups is not None and groups[i] < 0:
            continue
        total = int(limit.amounts[members].sum())
        is_condemned = ruling.rules[ruling.by[i]].startswith(f"over {limit.name} ")
        why = f"{total} of {limit.limit} in use before this prune"
        yield _opinion(limit.name, _condemns_if(is_condemned), why)


def _place(ruling: Ruling, i: int) -> RuleOpinion:
    table, policy = ruling.table, ruling.policy
    place = int(np.flatnonzero(ruling.order == i)[0]) + 1
    worth = rules.values(table, policy, ruling.now_us)[i]
    why = f"place {place} of {len(table)} to go when a limit is passed"
    if policy.order is Order.VALUE:
        why += f"; worth {worth * 1e6:.3g} s of evaluation per MB"
    if ruling.superseded[i]:
        why += "; among the first, since a longer checkpoint begins with all of it"
    return _opinion(f"order = {policy.order}", _condemns_if(False), why)


def _verdict(ruling: Ruling, i: int) -> RuleOpinion:
    if ruling.by[i]:
        return _opinion("prune", RuleEffect.CONDEMNS, ruling.why(i))
    shields = [name for name, mask in ruling.shields if mask[i]]
    is_needed = bool(rules.parents_of(ruling.table, ruling.living)[i])
    why = shields[0] if shields else "a living delta needs it" if is_needed else "within the policy"
    return _opinion("prune", RuleEffect.KEEPS, why)


def _condemns_if(condition: bool) -> RuleEffect:
    return RuleEffect.CONDEMNS if condition else RuleEffect.NO_EFFECT


def _opinion(rule: str, effect: RuleEffect, why: str) -> RuleOpinion:
    return RuleOpinion(rule=rule, effect=effect, why=why)
