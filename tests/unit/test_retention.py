"""What a retention policy keeps, row by row, with the rule that decided."""

from __future__ import annotations

import dataclasses

import pytest

from llama_ckpt.retention import Policy, judge
from llama_ckpt.values import Checkpoint, StaleReason

NOW = 1_700_000_000_000_000
S = 1_000_000


def row(*, age_s: float = 100.0, idle_s: float | None = None, **values) -> Checkpoint:
    """A row saved `age_s` ago and last used `idle_s` ago; unpinned, without lease or expiry."""
    fields = {field.name: None for field in dataclasses.fields(Checkpoint)}
    fields |= {"created_us": NOW - round(age_s * S), "pinned": False}
    fields["last_used_us"] = fields["created_us"] if idle_s is None else NOW - round(idle_s * S)
    return Checkpoint(**{**fields, **values})


def verdict(checkpoint: Checkpoint, **policy: float):
    (found,) = judge([checkpoint], Policy(**policy), NOW)
    assert found.checkpoint is checkpoint
    return found


MICROSECOND = 1e-6
EVICTED, EXPIRED = StaleReason.EVICTED, StaleReason.EXPIRED


@pytest.mark.parametrize(
    ("given", "policy", "keep", "rule", "stale"),
    [
        # no limit
        ({}, {}, True, "within the policy", None),
        ({"age_s": 1e9}, {}, True, "within the policy", None),
        # age, counted from the save
        ({"age_s": 59}, {"max_age_s": 60}, True, "within the policy", None),
        ({"age_s": 60}, {"max_age_s": 60}, True, "within the policy", None),
        ({"age_s": 60 + MICROSECOND}, {"max_age_s": 60}, False, "saved over 60 s ago, max_age is 60 s", EVICTED),
        ({"age_s": 3600}, {"max_age_s": 60}, False, "saved over 3600 s ago, max_age is 60 s", EVICTED),
        ({"age_s": 3600, "idle_s": 0}, {"max_age_s": 60}, False, "saved over 3600 s ago, max_age is 60 s", EVICTED),
        ({"age_s": 0}, {"max_age_s": 0}, True, "within the policy", None),
        ({"age_s": 1}, {"max_age_s": 0}, False, "saved over 1 s ago, max_age is 0 s", EVICTED),
        ({"age_s": 0.4}, {"max_age_s": 0.5}, True, "within the policy", None),
        # idleness, counted from the last use
        ({"age_s": 3600, "idle_s": 59}, {"max_idle_s": 60}, True, "within the policy", None),
        ({"age_s": 3600, "idle_s": 60}, {"max_idle_s": 60}, True, "within the policy", None),
        (
            {"age_s": 3600, "idle_s": 60 + MICROSECOND},
            {"max_idle_s": 60},
            False,
            "unused for over 60 s, max_idle is 60 s",
            EVICTED,
        ),
        ({"age_s": 3600, "idle_s": 61}, {"max_idle_s": 60}, False, "unused for over 61 s, max_idle is 60 s", EVICTED),
        # both
        ({"age_s": 100, "idle_s": 10}, {"max_age_s": 200, "max_idle_s": 20}, True, "within the policy", None),
        (
            {"age_s": 300, "idle_s": 30},
            {"max_age_s": 200, "max_idle_s": 20},
            False,
            "saved over 300 s ago, max_age is 200 s",
            EVICTED,
        ),
        (
            {"age_s": 100, "idle_s": 30},
            {"max_age_s": 200, "max_idle_s": 20},
            False,
            "unused for over 30 s, max_idle is 20 s",
            EVICTED,
        ),
        # its own expiry needs no policy
        ({"expires_us": NOW + 1}, {}, True, "within the policy", None),
        ({"expires_us": NOW}, {}, False, "its own expiry has passed", EXPIRED),
        ({"expires_us": NOW - 1}, {}, False, "its own expiry has passed", EXPIRED),
        ({"expires_us": NOW - 1, "age_s": 300}, {"max_age_s": 200}, False, "its own expiry has passed", EXPIRED),
        (
            {"expires_us": NOW + 1, "age_s": 300},
            {"max_age_s": 200},
            False,
            "saved over 300 s ago, max_age is 200 s",
            EVICTED,
        ),
        # leases
        ({"lease_until_us": NOW + 1, "age_s": 300}, {"max_age_s": 200}, True, "a reader has it leased", None),
        ({"lease_until_us": NOW + 1, "expires_us": NOW - 1}, {}, True, "a reader has it leased", None),
        ({"lease_until_us": NOW, "expires_us": NOW - 1}, {}, False, "its own expiry has passed", EXPIRED),
        (
            {"lease_until_us": NOW - 1, "age_s": 300},
            {"max_age_s": 200},
            False,
            "saved over 300 s ago, max_age is 200 s",
            EVICTED,
        ),
        # pins
        ({"pinned": True, "age_s": 1e9}, {"max_age_s": 0, "max_idle_s": 0}, True, "pinned", None),
        ({"pinned": True, "expires_us": 1}, {}, True, "pinned", None),
        ({"pinned": True, "lease_until_us": NOW + 1}, {}, True, "pinned", None),
        # a clock that went back
        ({"age_s": -3600}, {"max_age_s": 0, "max_idle_s": 0}, True, "within the policy", None),
    ],
)
def test_a_row_is_kept_or_condemned_by_the_first_rule_that_speaks(given, policy, keep, rule, stale):
    found = verdict(row(**given), **policy)
    assert (found.keep, found.rule, found.stale_reason) == (keep, rule, stale)


def test_every_row_gets_one_verdict_in_the_order_given():
    rows = [row(age_s=age) for age in (300, 1, 200, 2)]
    verdicts = list(judge(iter(rows), Policy(max_age_s=100), NOW))
    assert [v.checkpoint for v in verdicts] == rows
    assert [v.keep for v in verdicts] == [False, True, False, True]


def test_no_rows_give_no_verdicts():
    assert list(judge([], Policy(max_age_s=0), NOW)) == []
