"""Which checkpoints a policy keeps: the decision, with the rule that made it. Pure: rows, policy, clock and disk are arguments.

Rules, in this order: what always stays (pinned; leased by a reader; the newest; the last N of a group; what a living delta
needs), a row's own expiry, age, idleness, and then the limits: of what is over one those go first that a longer checkpoint has
superseded, and then what the policy's order names, until the rest fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from llama_ckpt.errors import BadInput
from llama_ckpt.gc_values import Candidate, Disk, Verdict
from llama_ckpt.retention.columns import Columns, Numbers
from llama_ckpt.values import StaleReason

_S = 1_000_000
_NEVER = 0  # a rule's number below: the row stays
Mask = npt.NDArray[np.bool_]


class Order(StrEnum):
    """What goes first when a limit is passed: the least valuable, the least recently or least often used, the oldest."""

    VALUE = "value"
    LRU = "lru"
    LFU = "lfu"
    OLDEST = "oldest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long checkpoints stay, and how much room they have. Seconds, bytes, counts; None: without limit.

    `max_age_s` counts from the save, `max_idle_s` from the last use. `max_bytes` and `max_count` hold for the registry, and
    with `_per_model` and `_per_label` for each. `keep_last_*` newest of each label or model always stay. `min_free` bytes of
    the file system stay free, or `min_free_share` of it. A limit is enforced when `high_water` of it is passed, down to
    `low_water`. In the order "value" a hit counts half after `half_life_s`.

    Raises:
        BadInput: a value that can not be meant.
    """

    max_age_s: float | None = None
    max_idle_s: float | None = None
    max_bytes: int | None = None
    max_count: int | None = None
    max_bytes_per_model: int | None = None
    max_count_per_model: int | None = None
    max_bytes_per_label: int | None = None
    max_count_per_label: int | None = None
    keep_last_per_model: int = 0
    keep_last_per_label: int = 0
    min_free: int | None = None
    min_free_share: float | None = None
    high_water: float = 1.0
    low_water: float = 1.0
    order: Order = Order.VALUE
    half_life_s: float = 6 * 3600.0
    stale_grace_s: float = 24 * 3600.0
    ghost_grace_s: float = 3600.0

    def __post_init__(self) -> None:
        if not 0 < self.low_water <= self.high_water <= 1:
            reason = "expected 0 < low_water <= high_water <= 1"
            raise BadInput(what="low_water, high_water", value=f"{self.low_water}, {self.high_water}", reason=reason)
        if not 0 < self.half_life_s < 1e10:
            raise BadInput(what="half_life", value=self.half_life_s, reason="give a time above 0")
        if self.min_free_share is not None and not 0 <= self.min_free_share < 1:
            raise BadInput(what="min_free", value=f"{self.min_free_share:%}", reason="give less than 100 %")

    @property
    def limits_room(self) -> bool:
        """Whether a save must ask for room before it writes."""
        return (self.max_bytes, self.min_free, self.min_free_share) != (None, None, None)

    def floor_bytes(self, disk: Disk) -> int:
        """Bytes of the file system that must stay free."""
        return max(self.min_free or 0, round((self.min_free_share or 0.0) * disk.total))


def judge(rows: Iterable[Candidate], policy: Policy, now_us: int, disk: Disk | None = None) -> Iterator[Verdict]:
    """The ACTIVE rows, given in order of their number, that a policy condemns, in that order. `disk` is needed for the floor
    of free space.
    """
    table = Columns.of(rows)
    ruling = rule(table, policy, now_us, disk)
    for i in np.flatnonzero(ruling.by != _NEVER).tolist():
        yield Verdict(
            row=table.seen(i),
            model_name=table.model_name(i),
            label=table.label(i),
            size_bytes=int(table.file_size[i]),
            rule=ruling.why(i),
            stale_reason=StaleReason.EXPIRED if ruling.rules[ruling.by[i]] == EXPIRED else StaleReason.EVICTED,
        )


EXPIRED = "its own expiry has passed"


class Ruling:
    """What became of each row: the number of the rule that condemns it (0: it stays), and what shields it."""

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
        """Rows that no rule has condemned so far."""
        living: Mask = self.by == _NEVER
        return living

    def rank(self) -> None:
        """Settles the order in which the limits take what is still living."""
        self.superseded = superseded(self.table, self.living)
        self.order = first_to_go(self.table, self.policy, self.now_us, self.superseded)

    def condemn(self, rule: str, which: Mask) -> None:
        """Condemns rows that no earlier rule condemned and nothing shields."""
        self.rules.append(rule)
        self.by[which & self.living & ~self.shielded] = len(self.rules) - 1

    def why(self, i: int) -> str:
        """The rule that condemned a row, with the row's own figures."""
        age_s = (self.now_us - int(self.table.created_us[i])) / _S
        idle_s = (self.now_us - int(self.table.last_used_us[i])) / _S
        return self.rules[int(self.by[i])].format(age_s=age_s, idle_s=idle_s)


def rule(table: Columns, policy: Policy, now_us: int, disk: Disk | None) -> Ruling:
    """Applies all rules of a policy to all rows."""
    found = Ruling(table, policy, now_us)
    if not len(table):
        return found
    _shield(found)
    _by_age(found)
    _keep_needed(found)  # before the limits, which count what stays
    found.rank()
    for limit in limits(found, disk):
        which = _over(found, limit)
        over = f"over {limit.name} of {limit.limit}"
        found.condemn(f"{over}: a longer checkpoint begins with all of it", which & found.superseded)
        found.condemn(f"{over}: {policy.order} says what goes first", which)
    _by_age(found)  # what was needed by those that went over a limit
    _keep_needed(found)
    return found


def _by_age(found: Ruling) -> None:
    table, policy, now_us = found.table, found.policy, found.now_us
    found.condemn(EXPIRED, table.expired(now_us))
    if policy.max_age_s is not None:
        text = f"saved over {{age_s:.0f}} s ago, max_age is {policy.max_age_s:.0f} s"
        found.condemn(text, now_us - table.created_us > policy.max_age_s * _S)
    if policy.max_idle_s is not None:
        text = f"unused for over {{idle_s:.0f}} s, max_idle is {policy.max_idle_s:.0f} s"
        found.condemn(text, now_us - table.last_used_us > policy.max_idle_s * _S)


def _shield(found: Ruling) -> None:
    """What always stays. A row's own expiry ends the shield of age and group, not that of a pin or a reader."""
    table, policy = found.table, found.policy
    fresh = ~table.expired(found.now_us)
    newest = np.zeros(len(table), dtype=np.bool_)
    newest[np.lexsort((table.ckpt_no, table.created_us))[-1]] = True
    found.shields = [
        ("pinned", table.pinned),
        ("a reader has it leased", table.leased(found.now_us)),
        ("the newest", newest & fresh),
    ]
    for what, groups, n in (
        ("label", table.label_no, policy.keep_last_per_label),
        ("model", table.model_no, policy.keep_last_per_model),
    ):
        if n:
            found.shields.append((f"of the last {n} of its {what}", _last(table, groups, n) & fresh & (groups >= 0)))
    found.shields.append(("a delta that always stays needs it", parents_of(table, found.shielded)))


def _last(table: Columns, groups: Numbers, n: int) -> Mask:
    """The newest `n` of each group."""
    order = np.lexsort((-table.created_us, groups))
    ranks = _rank_in_group(groups[order])
    mask = np.zeros(len(table), dtype=np.bool_)
    mask[order] = ranks < n
    return mask


def _rank_in_group(groups: Numbers) -> Numbers:
    """For groups in order: the place of each element in its group."""
    places = np.arange(len(groups))
    starts = np.concatenate(([True], groups[1:] != groups[:-1]))
    return places - np.maximum.accumulate(np.where(starts, places, 0))


def parents_of(table: Columns, children: Mask) -> Mask:
    """All rows that rows of `children` need, directly or not."""
    needed = np.zeros(len(table), dtype=np.bool_)
    for child, parent in table.deltas_first():
        if children[child] or needed[child]:
            needed[parent] = True
    return needed


def _keep_needed(found: Ruling) -> None:
    """Parents of living deltas stay, whatever condemned them."""
    found.by[parents_of(found.table, found.living)] = _NEVER


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that is set (`limit`): `groups` (None: the whole registry) and the `amounts` that are counted in each; from above
    `high` on it is enforced, down to `low`.
    """

    name: str
    limit: int
    groups: Numbers | None
    amounts: Numbers
    high: int
    low: int


def limits(found: Ruling, disk: Disk | None) -> Iterator[Limit]:
    """The limits of a policy."""
    table, policy = found.table, found.policy
    ones = np.ones(len(table), dtype=np.int64)
    for scope, groups in (("", None), ("_per_model", table.model_no), ("_per_label", table.label_no)):
        for what, amounts in (("max_count", ones), ("max_bytes", table.file_size)):
            limit = getattr(policy, what + scope)
            if limit is not None:
                high, low = int(limit * policy.high_water), int(limit * policy.low_water)
                yield Limit(what + scope, limit, groups, amounts, high, low)
    if disk is not None and (lacking := policy.floor_bytes(disk) - disk.free - disk.pending) > 0:
        # What was condemned until here frees bytes as well.
        left = max(0, int(table.file_size.sum()) - lacking)  # no share of it: just as much as is lacking
        yield Limit("min_free (the file system has too little room)", left, None, table.file_size, left, left)


def _over(found: Ruling, limit: Limit) -> Mask:
    """The rows that go until each group is within its limit, in the policy's order."""
    living, groups, amounts = found.living, limit.groups, limit.amounts
    order = found.order if groups is None else found.order[np.argsort(groups[found.order], kind="stable")]
    order = order[living[order]]
    if groups is not None:
        order = order[groups[order] >= 0]
    which = np.zeros(len(amounts), dtype=np.bool_)
    if not len(order):
        return which
    of = np.zeros(len(order), dtype=np.int64) if groups is None else groups[order]
    starts = np.flatnonzero(np.concatenate(([True], of[1:] != of[:-1])))
    counted = amounts[order]
    totals = np.repeat(np.add.reduceat(counted, starts), np.diff(np.append(starts, len(order))))
    may_go = np.where(found.shielded[order], 0, counted)
    going = np.cumsum(may_go) - may_go  # what went before, in this group
    going -= np.repeat(going[starts], np.diff(np.append(starts, len(order))))
    which[order] = (totals > limit.high) & (totals - going > limit.low)
    return which


# -- the order -----------------------------------------------------------------------------------------------------------------


def superseded(table: Columns, living: Mask) -> Mask:
    """Rows from which exactly one living row goes on, that has no expiry of its own, is under the same limits (model, label),
    and that only such deltas need: whatever serves by token ids is served by the longer one, cut. What several go on from is a
    root that they share, and stays as worthy as its use makes it; as far as the saves noted it, of rows that are still there.
    Only full attention memory can be cut, and a save notes what it goes on from only there.
    """
    longer, shorter = table.extensions
    takes_over = living & table.lasting
    alike = (table.model_no[longer] == table.model_no[shorter]) & (table.label_no[longer] == table.label_no[shorter])
    n_living = np.bincount(shorter[living[longer]], minlength=len(table))
    n_lasting = np.bincount(shorter[takes_over[longer] & alike], minlength=len(table))
    found: Mask = living & (n_living == 1) & (n_lasting == 1)
    for child, parent in table.deltas_first():
        if living[child] and not found[child]:
            found[parent] = False
    return found


def first_to_go(table: Columns, policy: Policy, now_us: int, early: Mask) -> Numbers:
    """Places of all rows, in the order in which they would go: first the `early` ones, shortest first, since each is superseded
    by the next longer one, which is worth at least what they were. A delta comes before its parent: a parent is worth at least
    what its most valuable delta is worth, which is lost with it.
    """
    key, used = keys(table, policy, now_us), table.last_used_us.astype(np.float64)
    longer, shorter = (side[np.argsort(table.n_tokens[table.extensions[1]])] for side in table.extensions)
    for over, under in zip(longer[early[shorter]].tolist(), shorter[early[shorter]].tolist(), strict=True):
        key[over], used[over] = max(key[over], key[under]), max(used[over], used[under])
    key = np.where(early, table.n_tokens, key)
    for child, parent in table.deltas_first():
        if early[child] == early[parent]:
            key[parent] = max(key[parent], key[child])
            used[parent] = max(used[parent], used[child])
    return np.lexsort((-table.ckpt_no, used, key, ~early))


def keys(table: Columns, policy: Policy, now_us: int) -> npt.NDArray[np.float64]:
    """What each row is worth in the policy's order; the lowest goes first."""
    match policy.order:
        case Order.LRU:
            return table.last_used_us.astype(np.float64)
        case Order.LFU:
            return table.hit_count.astype(np.float64)
        case Order.OLDEST:
            return table.created_us.astype(np.float64)
    return np.round(np.log2(values(table, policy, now_us)) * _STEPS)


# Two equal prefills differ by some percent in the time that they took: what differs by less than a fifth is worth the same, and
# then the last use decides.
_STEPS = 4


def values(table: Columns, policy: Policy, now_us: int) -> npt.NDArray[np.float64]:
    """Seconds of evaluation that a byte may spare: (decayed hits + 1) x seconds to rebuild / bytes."""
    idle_s = np.maximum(0, now_us - table.last_used_us) / _S
    hits = table.hit_count * np.exp2(-idle_s / policy.half_life_s)
    return (hits + 1) * np.maximum(table.rebuild_s(), 1e-9) / np.maximum(table.file_size, 1)


def places_before(newcomer: Candidate, others: Sequence[Candidate], policy: Policy, now_us: int) -> list[Candidate]:
    """Those of `others` that would go before `newcomer`, in the order in which they would go. By their worth alone: `others` are
    some of many, and do not tell who shares what.
    """
    table = Columns.of([*others, newcomer])
    order = [int(i) for i in first_to_go(table, policy, now_us, np.zeros(len(table), dtype=np.bool_))]
    return [others[i] for i in order[: order.index(len(others))]]
