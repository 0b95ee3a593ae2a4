"""Why a policy keeps or condemns one checkpoint: what each of its rules says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from llama_ckpt.errors import NotFound
from llama_ckpt.gc_values import Candidate, Disk, RuleEffect, RuleOpinion
from llama_ckpt.retention import policy as retention
from llama_ckpt.retention.columns import Columns
from llama_ckpt.retention.policy import Order, Policy, Ruling
from llama_ckpt.values import Checkpoint

_S = 1_000_000


def explain(rows: Iterable[Candidate], row: Checkpoint, policy: Policy, now_us: int, disk: Disk) -> list[RuleOpinion]:
    """What each rule says of a row, and at the end what becomes of it.

    Raises:
        NotFound: it is not among the rows.
    """
    table = Columns.of(rows)
    at = np.flatnonzero(table.ckpt_no == row.ckpt_no)
    if not len(at):
        hint = "A STALE one is past all rules: llama-ckpt show tells why it went."
        raise NotFound(what="ACTIVE checkpoint", name=row.id, hint=hint)
    i = int(at[0])
    ruling = retention.rule(table, policy, now_us, disk)
    return [
        *_shields(ruling, i),
        *_own_times(table, policy, now_us, i),
        *_limits(ruling, disk, i),
        _place(ruling, i),
        _verdict(ruling, i),
    ]


def _shields(ruling: Ruling, i: int) -> Iterator[RuleOpinion]:
    for name, mask in ruling.shields:
        if mask[i]:
            yield RuleOpinion(rule="always stays", word=RuleEffect.KEEPS, why=name)


def _own_times(table: Columns, policy: Policy, now_us: int, i: int) -> Iterator[RuleOpinion]:
    age_s = (now_us - int(table.created_us[i])) / _S
    idle_s = (now_us - int(table.last_used_us[i])) / _S
    if table.expired(now_us)[i]:
        yield RuleOpinion(rule="expiry", word=RuleEffect.CONDEMNS, why=retention.EXPIRED)
    for name, limit, since, what in (
        ("max_age", policy.max_age_s, age_s, "saved"),
        ("max_idle", policy.max_idle_s, idle_s, "last used"),
    ):
        if limit is not None:
            word = RuleEffect.CONDEMNS if since > limit else RuleEffect.SILENT
            yield RuleOpinion(rule=name, word=word, why=f"{what} {since:.0f} s ago, the limit is {limit:.0f} s")


def _limits(ruling: Ruling, disk: Disk, i: int) -> Iterator[RuleOpinion]:
    table = ruling.table
    for limit in retention.limits(ruling, disk):
        groups = limit.groups
        members = np.ones(len(table), dtype=np.bool_) if groups is None else groups == groups[i]
        if groups is not None and groups[i] < 0:
            continue
        total = int(limit.amounts[members].sum())
        mine = ruling.rules[ruling.by[i]].startswith(f"over {limit.name} ")
        word = RuleEffect.CONDEMNS if mine else RuleEffect.SILENT
        yield RuleOpinion(rule=limit.name, word=word, why=f"{total} of {limit.limit} in use before this prune")


def _place(ruling: Ruling, i: int) -> RuleOpinion:
    table, policy = ruling.table, ruling.policy
    place = int(np.flatnonzero(ruling.order == i)[0]) + 1
    worth = retention.values(table, policy, ruling.now_us)[i]
    why = f"place {place} of {len(table)} to go when a limit is passed"
    if policy.order is Order.VALUE:
        why += f"; worth {worth * 1e6:.3g} s of evaluation per MB"
    if ruling.superseded[i]:
        why += "; among the first, since a longer checkpoint begins with all of it"
    return RuleOpinion(rule=f"order = {policy.order}", word=RuleEffect.SILENT, why=why)


def _verdict(ruling: Ruling, i: int) -> RuleOpinion:
    if ruling.by[i]:
        return RuleOpinion(rule="prune", word=RuleEffect.CONDEMNS, why=ruling.why(i))
    shields = [name for name, mask in ruling.shields if mask[i]]
    needed = bool(retention.parents_of(ruling.table, ruling.living)[i])
    why = shields[0] if shields else "a living delta needs it" if needed else "within the policy"
    return RuleOpinion(rule="prune", word=RuleEffect.KEEPS, why=why)
