"""Which checkpoints a policy keeps: the decision, with the rule that made it. Pure: rows, policy, clock and disk are arguments.

The rules, in this order: rows that always stay (pinned; leased by a reader; the newest; the last N of a group; the parents of
those), a row's own expiry, age, idleness, and the limits. Over a limit, superseded rows go first, then rows in the policy's
order, until the rest is within the limit. The parents of a delta that stays always stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llama_ckpt.gc_values import Candidate, Disk, Verdict
from llama_ckpt.retention.columns import Columns, Mask, Numbers
from llama_ckpt.retention.policy import Order, Policy
from llama_ckpt.values import StaleReason

_S = 1_000_000
_NO_RULE = 0  # in `Ruling.by`: no rule condemns the row


def judge(rows: Iterable[Candidate], policy: Policy, now_us: int, disk: Disk | None = None) -> Iterator[Verdict]:
    """The rows that a policy condemns, in order of their number. `rows` are all ACTIVE rows in that order; `disk` is needed for
    the minimum of free space.
    """
    table = Columns.from_rows(rows)
    ruling = rule(table, policy, now_us, disk)
    for i in np.flatnonzero(ruling.by != _NO_RULE).tolist():
        yield Verdict(
            row=table.version(i),
            model_name=table.model_name(i),
            label=table.label(i),
            size_bytes=int(table.file_size[i]),
            rule=ruling.why(i),
            stale_reason=StaleReason.EXPIRED if ruling.rules[ruling.by[i]] == EXPIRED else StaleReason.EVICTED,
        )


EXPIRED = "its own expiry has passed"


class Ruling:
    """The state of a decision: `by` is for each row the index in `rules` of the rule that condemns it (0: it stays), `shields`
    are the reasons for which rows always stay, `order` the order in which rows go over a limit.
    """

    def __init__(self, table: Columns, policy: Policy, now_us: int) -> None:
        self.table, self.policy, self.now_us = table, policy, now_us
        self.by: npt.NDArray[np.int16] = np.zeros(len(table), dtype=np.int16)
        self.rules = [""]
        self.shields: list[tuple[str, Mask]] = []
        self.order: Numbers = np.zeros(0, dtype=np.int64)
        self.superseded: Mask = np.zeros(len(table), dtype=np.bool_)

    @property
    def shielded(self) -> Mask:
        """Rows that always stay."""
        shielded: Mask = np.zeros(len(self.table), dtype=np.bool_)
        for _, mask in self.shields:
            shielded |= mask
        return shielded

    @property
    def living(self) -> Mask:
        """Rows that no rule has condemned yet."""
        living: Mask = self.by == _NO_RULE
        return living

    def rank(self) -> None:
        """Computes the order in which the limits condemn the rows that are still living."""
        self.superseded = superseded(self.table, self.living)
        self.order = first_to_go(self.table, self.policy, self.now_us, self.superseded)

    def condemn(self, rule: str, which: Mask) -> None:
        """Condemns those rows of `which` that no earlier rule condemned and that have no shield."""
        self.rules.append(rule)
        self.by[which & self.living & ~self.shielded] = len(self.rules) - 1

    def why(self, i: int) -> str:
        """The rule that condemned row `i`, with the figures of the row."""
        age_s = (self.now_us - int(self.table.created_us[i])) / _S
        idle_s = (self.now_us - int(self.table.last_used_us[i])) / _S
        return self.rules[int(self.by[i])].format(age_s=age_s, idle_s=idle_s)


def rule(table: Columns, policy: Policy, now_us: int, disk: Disk | None) -> Ruling:
    """Applies all rules of a policy to all rows."""
    ruling = Ruling(table, policy, now_us)
    if not len(table):
        return ruling
    _shield(ruling)
    _by_age(ruling)
    _keep_parents(ruling)  # before the limits, which count the rows that stay
    ruling.rank()
    for limit in limits(ruling, disk):
        excess = _excess(ruling, limit)
        over = f"over {limit.name} of {limit.limit}"
        ruling.condemn(f"{over}: a longer checkpoint begins with all of it", excess & ruling.superseded)
        ruling.condemn(f"{over}: {policy.order} says what goes first", excess)
    _by_age(ruling)  # parents that stayed only for a delta that a limit condemned
    _keep_parents(ruling)
    return ruling


def _by_age(ruling: Ruling) -> None:
    table, policy, now_us = ruling.table, ruling.policy, ruling.now_us
    ruling.condemn(EXPIRED, table.expired(now_us))
    if policy.max_age_s is not None:
        text = f"saved over {{age_s:.0f}} s ago, max_age is {policy.max_age_s:.0f} s"
        ruling.condemn(text, now_us - table.created_us > policy.max_age_s * _S)
    if policy.max_idle_s is not None:
        text = f"unused for over {{idle_s:.0f}} s, max_idle is {policy.max_idle_s:.0f} s"
        ruling.condemn(text, now_us - table.last_used_us > policy.max_idle_s * _S)


def _shield(ruling: Ruling) -> None:
    """Finds the rows that always stay. After its own expiry a row has only the shields of a pin and of a reader."""
    table, policy = ruling.table, ruling.policy
    fresh = ~table.expired(ruling.now_us)
    newest = np.zeros(len(table), dtype=np.bool_)
    newest[np.lexsort((table.ckpt_no, table.created_us))[-1]] = True
    ruling.shields = [
        ("pinned", table.pinned),
        ("a reader has it leased", table.leased(ruling.now_us)),
        ("the newest", newest & fresh),
    ]
    for group, numbers, n in (
        ("label", table.label_no, policy.keep_last_per_label),
        ("model", table.model_no, policy.keep_last_per_model),
    ):
        if n:
            ruling.shields.append(
                (f"of the last {n} of its {group}", _last(table, numbers, n) & fresh & (numbers >= 0))
            )
    ruling.shields.append(("a delta that always stays needs it", parents_of(table, ruling.shielded)))


def _last(table: Columns, groups: Numbers, n: int) -> Mask:
    """The newest `n` of each group."""
    order = np.lexsort((-table.created_us, groups))
    ranks = _rank_in_group(groups[order])
    mask = np.zeros(len(table), dtype=np.bool_)
    mask[order] = ranks < n
    return mask


def _rank_in_group(groups: Numbers) -> Numbers:
    """The place of each element in its group, from 0. `groups` is sorted."""
    places = np.arange(len(groups))
    starts = np.concatenate(([True], groups[1:] != groups[:-1]))
    return places - np.maximum.accumulate(np.where(starts, places, 0))


def parents_of(table: Columns, children: Mask) -> Mask:
    """The parents of rows of `children`, their parents, and so on."""
    needed = np.zeros(len(table), dtype=np.bool_)
    for child, parent in table.parents.pairs_children_first():
        if children[child] or needed[child]:
            needed[parent] = True
    return needed


def _keep_parents(ruling: Ruling) -> None:
    """Takes back what condemned the parents of living deltas."""
    ruling.by[parents_of(ruling.table, ruling.living)] = _NO_RULE


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that is set to `limit`. `groups` is each row's group (None: all rows are one; below 0: in no group), `amounts` what
    each row adds to its group. Pruning starts when a group exceeds `high` and ends at `low` or below.
    """

    name: str
    limit: int
    groups: Numbers | None
    amounts: Numbers
    high: int
    low: int


def limits(ruling: Ruling, disk: Disk | None) -> Iterator[Limit]:
    """The limits of a policy that are set. `ruling` has condemned rows by time already: their bytes are free for `min_free`."""
    table, policy = ruling.table, ruling.policy
    ones = np.ones(len(table), dtype=np.int64)
    for scope, groups in (("", None), ("_per_model", table.model_no), ("_per_label", table.label_no)):
        for what, amounts in (("max_count", ones), ("max_bytes", table.file_size)):
            limit = getattr(policy, what + scope)
            if limit is not None:
                high, low = int(limit * policy.high_water), int(limit * policy.low_water)
                yield Limit(what + scope, limit, groups, amounts, high, low)
    if disk is not None and (lacking := policy.floor_bytes(disk) - disk.free - disk.pending) > 0:
        # Of all rows, not of the living ones: the bytes of rows that are condemned already count as freed. No water marks apply.
        left = max(0, int(table.file_size.sum()) - lacking)
        yield Limit("min_free (the file system has too little room)", left, None, table.file_size, left, left)


def _excess(ruling: Ruling, limit: Limit) -> Mask:
    """The rows to condemn, in the policy's order, so that each group is within its limit."""
    living, groups, amounts = ruling.living, limit.groups, limit.amounts
    order = ruling.order if groups is None else ruling.order[np.argsort(groups[ruling.order], kind="stable")]
    order = order[living[order]]
    if groups is not None:
        order = order[groups[order] >= 0]
    excess = np.zeros(len(amounts), dtype=np.bool_)
    if not len(order):
        return excess
    group = np.zeros(len(order), dtype=np.int64) if groups is None else groups[order]
    starts = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    counted = amounts[order]
    totals = np.repeat(np.add.reduceat(counted, starts), np.diff(np.append(starts, len(order))))
    may_go = np.where(ruling.shielded[order], 0, counted)
    going = np.cumsum(may_go) - may_go  # the sum of the rows before it, below of its own group only
    going -= np.repeat(going[starts], np.diff(np.append(starts, len(order))))
    excess[order] = (totals > limit.high) & (totals - going > limit.low)
    return excess


# -- the order -----------------------------------------------------------------------------------------------------------------


def superseded(table: Columns, living: Mask) -> Mask:
    """Rows that exactly one longer living row makes redundant: it extends them, has the same model and label, and does not
    expire by itself. The longer row serves every input by token ids that the shorter one serves, truncated. Not superseded are
    rows that several rows extend (a shared root, whose value shows in its use) and parents of a delta that is not superseded.

    Only rows with full attention memory can be truncated; a save records `extends_no` only for those. What a row extends is
    known only if its save recorded it, and as long as both rows are there.
    """
    longer, shorter = table.extensions.children, table.extensions.parents
    takes_over = living & table.without_expiry
    alike = (table.model_no[longer] == table.model_no[shorter]) & (table.label_no[longer] == table.label_no[shorter])
    n_living = np.bincount(shorter[living[longer]], minlength=len(table))
    n_takes_over = np.bincount(shorter[takes_over[longer] & alike], minlength=len(table))
    redundant: Mask = living & (n_living == 1) & (n_takes_over == 1)
    for child, parent in table.parents.pairs_children_first():
        if living[child] and not redundant[child]:
            redundant[parent] = False
    return redundant


def first_to_go(table: Columns, policy: Policy, now_us: int, early: Mask) -> Numbers:
    """The indices of all rows, in the order in which they go: the `early` ones first, shortest first, then by the policy's order.

    The longer row that supersedes an early one is worth at least what the early one is worth. A delta goes before its parent:
    a parent is worth at least what its most valuable delta is worth, which is lost with it.
    """
    key, used = keys(table, policy, now_us), table.last_used_us.astype(np.float64)
    shortest_first = np.argsort(table.n_tokens[table.extensions.parents])
    longer, shorter = table.extensions.children[shortest_first], table.extensions.parents[shortest_first]
    for over, under in zip(longer[early[shorter]].tolist(), shorter[early[shorter]].tolist(), strict=True):
        key[over], used[over] = max(key[over], key[under]), max(used[over], used[under])
    key = np.where(early, table.n_tokens, key)
    for child, parent in table.parents.pairs_children_first():
        if early[child] == early[parent]:
            key[parent] = max(key[parent], key[child])
            used[parent] = max(used[parent], used[child])
    return np.lexsort((-table.ckpt_no, used, key, ~early))


def keys(table: Columns, policy: Policy, now_us: int) -> npt.NDArray[np.float64]:
    """The sort key of each row in the policy's order; the lowest goes first."""
    match policy.order:
        case Order.LRU:
            return table.last_used_us.astype(np.float64)
        case Order.LFU:
            return table.hit_count.astype(np.float64)
        case Order.OLDEST:
            return table.created_us.astype(np.float64)
    return np.round(np.log2(values(table, policy, now_us)) * _STEPS)


# Two equal prefills differ by some percent in the time they take. Values are rounded to steps of 2 ** (1 / 4), about a fifth:
# rows with less difference are worth the same, and the last use decides.
_STEPS = 4


def values(table: Columns, policy: Policy, now_us: int) -> npt.NDArray[np.float64]:
    """Seconds of evaluation saved per byte on disk: (decayed hits + 1) x seconds to rebuild / bytes. A hit counts half after
    `half_life_s` without a use.
    """
    idle_s = np.maximum(0, now_us - table.last_used_us) / _S
    hits = table.hit_count * np.exp2(-idle_s / policy.half_life_s)
    return (hits + 1) * np.maximum(table.rebuild_s(), 1e-9) / np.maximum(table.file_size, 1)


def places_before(newcomer: Candidate, others: Sequence[Candidate], policy: Policy, now_us: int) -> list[Candidate]:
    """The rows of `others` that go before `newcomer`, in the order in which they go. By the policy's order alone: `others` are a
    part of the registry, which does not show what is superseded.
    """
    table = Columns.from_rows([*others, newcomer])
    order = [int(i) for i in first_to_go(table, policy, now_us, np.zeros(len(table), dtype=np.bool_))]
    return [others[i] for i in order[: order.index(len(others))]]
