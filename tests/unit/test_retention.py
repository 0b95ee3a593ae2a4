"""What a retention policy keeps, row by row, with the rule that decided."""

from __future__ import annotations

import itertools

import pytest

from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.gc_values import Candidate, Disk, RuleEffect
from llama_ckpt.retention.columns import Columns
from llama_ckpt.retention.explain import explain
from llama_ckpt.retention.policy import Order, Policy
from llama_ckpt.retention.rules import judge, places_before
from llama_ckpt.values import StaleReason

NOW = 1_700_000_000_000_000
S = 1_000_000


def row(*, age_s: float = 100.0, idle_s: float | None = None, **values) -> Candidate:
    """A row saved `age_s` ago and last used `idle_s` ago; unpinned, without lease or expiry."""
    n = next(numbers)
    created_us = NOW - round(age_s * S)
    fields = {
        "ckpt_no": n,
        "id": f"{n:032x}",
        "model_name": "m",
        "label": None,
        "n_tokens": 100,
        "file_size": 1000,
        "created_us": created_us,
        "last_used_us": created_us if idle_s is None else NOW - round(idle_s * S),
        "hit_count": 0,
        "prefill_ms": None,
        "expires_us": None,
        "lease_until_us": None,
        "pinned": False,
        "parent_no": None,
        "extends_no": None,
    }
    return Candidate(**{**fields, **values})


numbers = itertools.count(1)


def condemned(rows, now_us=NOW, disk=None, **policy):
    """The numbers of the rows that go."""
    return [v.row.ckpt_no for v in judge(rows, Policy(**policy), now_us, disk)]


def outcome(candidate: Candidate, **policy: float):
    """What becomes of a row that has a newer one beside it, as (keep, rule, reason); explain gives the rule that keeps."""
    rows = [candidate, row(age_s=-1e6)]
    given = Policy(**policy)
    for verdict in judge(rows, given, NOW):
        return False, verdict.rule, verdict.stale_reason
    opinion = explain(rows, candidate, given, NOW, Disk(free=1, total=1))[-1]
    assert opinion.effect is RuleEffect.KEEPS
    return True, opinion.why, None


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
    assert outcome(row(**given), **policy) == (keep, rule, stale)


def test_no_rows_give_no_verdicts():
    assert condemned([], max_age_s=0, max_bytes=0, max_count_per_label=0) == []


# -- what always stays ---------------------------------------------------------------------------------------------------------


def test_the_newest_always_stays_unless_its_own_time_is_over():
    old, new = row(age_s=300), row(age_s=200)
    assert condemned([old, new], max_age_s=100) == [old.ckpt_no]
    assert condemned([old, new], max_bytes=0) == [old.ckpt_no]
    assert condemned([old, new._replace(expires_us=1)], max_age_s=1000) == [new.ckpt_no]


def test_the_last_n_of_each_label_or_model_stay_at_any_age():
    rows = [row(age_s=1000 - i, label=label) for i, label in enumerate("aabbba")]
    rows += [row(age_s=900, label=None), row(age_s=0, label="z")]
    kept = {r.ckpt_no for r in rows} - set(condemned(rows, max_age_s=1, keep_last_per_label=1))
    assert kept == {rows[5].ckpt_no, rows[4].ckpt_no, rows[7].ckpt_no}
    by_model = [row(age_s=1000 - i, model_name=name) for i, name in enumerate("mmnn")] + [row(age_s=0, model_name="z")]
    gone = condemned(by_model, max_idle_s=1, max_count=1, keep_last_per_model=1)
    assert gone == [by_model[0].ckpt_no, by_model[2].ckpt_no]


def test_parents_of_living_deltas_stay_and_leaves_go_first():
    root = row(age_s=500)
    delta = row(age_s=400, parent_no=root.ckpt_no)
    leaf = row(age_s=50, parent_no=delta.ckpt_no)
    newest = row(age_s=0)
    assert condemned([root, delta, leaf, newest], max_age_s=100) == []
    assert condemned([root, delta, newest], max_age_s=100) == [root.ckpt_no, delta.ckpt_no]
    pinned = leaf._replace(pinned=1)
    assert condemned([root, delta, pinned, newest], max_count=1) == []
    # Over a limit of two the leaf goes, though its parents are older.
    assert condemned([root, delta, leaf, newest], max_count=3, order=Order.OLDEST) == [leaf.ckpt_no]


def nested(n, **values):
    """Checkpoints that each extend the one before, oldest first, and an unrelated newest one."""
    rows = [row(age_s=500, n_tokens=100, **values)]
    while len(rows) < n:
        rows.append(row(age_s=500 - len(rows), n_tokens=100 + len(rows), extends_no=rows[-1].ckpt_no, **values))
    return [*rows, row(age_s=0)]


@pytest.mark.parametrize("order", Order)
def test_of_nested_prefixes_the_shortest_go_first_since_the_longest_serves_all(order):
    *chain, newest = nested(5, hit_count=50, idle_s=1)
    others = [row(age_s=900, idle_s=900) for _ in range(3)]
    rows = sorted([*chain, newest, *others])
    assert condemned(rows, max_count=5, order=order) == [r.ckpt_no for r in chain[:4]]
    assert condemned(rows, max_count=8, order=order) == [chain[0].ckpt_no]


def test_a_prefix_that_several_extend_is_a_shared_root_and_does_not_go_first():
    root, one, newest = nested(2, hit_count=50)
    other = row(age_s=300, n_tokens=120, extends_no=root.ckpt_no, hit_count=50)
    useless = row(age_s=50)
    rows = [root, one, newest, other, useless]
    assert condemned(rows, max_count=4) == [useless.ckpt_no]
    # One of them is gone: the other serves every input that the root serves.
    assert condemned([root, one, newest, useless], max_count=3) == [root.ckpt_no]


def test_a_checkpoint_is_not_superseded_by_one_that_expires_or_is_condemned():
    root, longer, newest = nested(2, hit_count=50)
    useless = row(age_s=50)
    assert condemned([root, longer._replace(expires_us=NOW + 1), newest, useless], max_count=3) == [useless.ckpt_no]
    idle = longer._replace(last_used_us=NOW - 900 * S)
    assert condemned([root, idle, newest, useless], max_idle_s=600, max_count=2) == [idle.ckpt_no, useless.ckpt_no]


def test_a_superseded_prefix_stays_if_a_living_delta_needs_it_or_it_is_pinned():
    root, delta, newest = nested(2, hit_count=50)
    delta = delta._replace(parent_no=root.ckpt_no)
    useless = row(age_s=50)
    assert condemned([root, delta, newest, useless], max_count=3) == [useless.ckpt_no]
    root, longer, newest = nested(2)
    pinned = root._replace(pinned=1)
    assert condemned([pinned, longer, newest, useless], max_count=3, order=Order.OLDEST) == [longer.ckpt_no]


def test_a_chain_of_deltas_that_a_full_checkpoint_extends_goes_leaves_first():
    root, delta, full, newest = nested(3, hit_count=50)
    delta = delta._replace(parent_no=root.ckpt_no)
    useless = row(age_s=50)
    rows = [root, delta, full, newest, useless]
    assert condemned(rows, max_count=4) == [delta.ckpt_no]
    assert condemned(rows, max_count=3) == [root.ckpt_no, delta.ckpt_no]
    # One more delta has the root as its parent: the root is shared, and only the leaf is superseded.
    rows.append(row(age_s=40, parent_no=root.ckpt_no, extends_no=root.ckpt_no, hit_count=50))
    assert condemned(rows, max_count=4) == [delta.ckpt_no, useless.ckpt_no]


@pytest.mark.parametrize("order", [Order.VALUE, Order.LRU, Order.LFU])
def test_the_value_of_a_prefix_passes_to_the_longer_checkpoint_that_supersedes_it(order):
    hot = row(age_s=500, idle_s=1, hit_count=20)
    longer = row(age_s=400, idle_s=400, n_tokens=200, extends_no=hot.ckpt_no)
    cool, newest = row(age_s=300, idle_s=200, hit_count=2), row(age_s=0)
    assert condemned([hot, longer, cool, newest], max_count=2, order=order) == [hot.ckpt_no, cool.ckpt_no]


def test_a_longer_checkpoint_with_another_label_supersedes_nothing():
    mine = row(age_s=500, label="mine", hit_count=20)
    theirs = row(age_s=400, label="theirs", n_tokens=200, extends_no=mine.ckpt_no)
    rows = [mine, theirs, row(age_s=300, label="mine"), row(age_s=0, label="theirs")]
    assert condemned(rows, max_count_per_label=1) == [theirs.ckpt_no, rows[2].ckpt_no]


def test_explain_and_the_rule_say_that_a_longer_checkpoint_supersedes_it():
    root, longer, newest = nested(2)
    rule = "over max_count of 2: a longer checkpoint begins with all of it"
    policy = Policy(max_count=2)
    assert [v.rule for v in judge([root, longer, newest], policy, NOW)] == [rule]
    opinions = explain([root, longer, newest], root, policy, NOW, Disk(free=1, total=1))
    assert (opinions[-1].effect, opinions[-1].why) == (RuleEffect.CONDEMNS, rule)
    assert opinions[-2].why.endswith("; among the first, since a longer checkpoint begins with all of it")


def test_a_delta_whose_parent_is_not_active_is_judged_for_itself():
    lonely, newest = row(age_s=500, parent_no=999_999_999), row(age_s=0)
    assert condemned([lonely, newest], max_age_s=100) == [lonely.ckpt_no]


def test_relations_are_of_rows_that_are_both_there_and_the_children_of_a_row_come_before_it():
    root = row()
    delta = row(parent_no=root.ckpt_no, extends_no=root.ckpt_no)
    leaf = row(parent_no=delta.ckpt_no, extends_no=999_999_999)
    table = Columns.from_rows([root, delta, leaf, row(parent_no=999_999_999)])
    assert table.parents.pairs_children_first() == [(2, 1), (1, 0)]
    assert (table.extensions.children.tolist(), table.extensions.parents.tolist()) == ([1], [0])


# -- limits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "goes"),
    [({"max_count": 2}, 2), ({"max_bytes": 2999}, 2), ({"max_bytes": 3000}, 1), ({"max_bytes": 9999}, 0)],
)
def test_over_a_limit_the_least_recently_used_go_until_the_rest_fits(limit, goes):
    rows = [row(age_s=100, idle_s=idle_s) for idle_s in (40, 30, 20, 10)]
    assert condemned(rows, order=Order.LRU, **limit) == [r.ckpt_no for r in rows[:goes]]


def test_each_group_has_its_own_limit_and_rows_without_a_label_have_none():
    rows = [row(age_s=100 - i, label=label) for i, label in enumerate("aab-b")]
    rows = [r._replace(label=None) if r.label == "-" else r for r in rows]
    assert condemned(rows, order=Order.OLDEST, max_count_per_label=1) == [rows[0].ckpt_no, rows[2].ckpt_no]
    assert condemned(rows, order=Order.OLDEST, max_bytes_per_model=4000) == [rows[0].ckpt_no]
    assert len(condemned(rows, order=Order.OLDEST, max_count_per_model=1, max_count_per_label=1)) == 4


def test_a_shielded_row_takes_room_and_the_others_make_up_for_it():
    rows = [row(age_s=100 - i, pinned=i == 0) for i in range(4)]
    assert condemned(rows, order=Order.OLDEST, max_count=2) == [rows[1].ckpt_no, rows[2].ckpt_no]


def test_a_limit_is_enforced_from_high_water_down_to_low_water():
    rows = [row(age_s=100 - i) for i in range(10)]
    water = {"order": Order.OLDEST, "max_count": 10, "high_water": 0.9, "low_water": 0.5}
    assert len(condemned(rows, **water)) == 5
    assert condemned(rows[:9], **water) == []


@pytest.mark.parametrize(
    ("floor", "pending", "goes"),
    [
        ({"min_free": 5000}, 0, 2),
        ({"min_free": 5000}, 2000, 0),
        ({"min_free_share": 0.05}, 0, 2),
        ({"min_free": 1}, 0, 0),
    ],
)
def test_below_the_floor_of_free_space_as_much_goes_as_is_lacking(floor, pending, goes):
    rows = [row(age_s=100 - i) for i in range(5)]
    disk = Disk(free=3000, total=100_000, pending=pending)
    assert condemned(rows, disk=disk, order=Order.OLDEST, **floor) == [r.ckpt_no for r in rows[:goes]]


@pytest.mark.parametrize("water", [{}, {"high_water": 1.0, "low_water": 0.5}])
def test_the_floor_of_free_space_knows_no_water_marks(water):
    rows = [row(age_s=100 - i) for i in range(10)]
    disk = Disk(free=3000, total=100_000)
    assert condemned(rows, disk=disk, order=Order.OLDEST, min_free=3001, **water) == [rows[0].ckpt_no]


def test_a_root_that_is_kept_for_its_deltas_counts_against_a_limit():
    root = row(age_s=900)
    delta = row(age_s=1, parent_no=root.ckpt_no)
    others = [row(age_s=50 - i) for i in range(3)]
    gone = condemned([root, delta, *others], max_idle_s=100, max_count=3, order=Order.OLDEST)
    assert gone == [others[0].ckpt_no, others[1].ckpt_no]


def test_a_root_that_is_idle_goes_with_its_last_delta():
    root = row(age_s=900)
    delta = row(age_s=90, parent_no=root.ckpt_no)
    others = [row(age_s=50 - i) for i in range(3)]
    gone = condemned([root, delta, *others], max_idle_s=100, max_count=4, order=Order.OLDEST)
    assert sorted(gone) == [root.ckpt_no, delta.ckpt_no]


# -- the order -----------------------------------------------------------------------------------------------------------------


def first(rows, **policy):
    (gone,) = condemned([*rows, row(age_s=0)], max_count=len(rows), **policy)
    return gone


def test_in_the_order_value_the_row_that_saves_the_least_evaluation_per_byte_goes_first():
    small = row(prefill_ms=100, file_size=1000)
    large = row(prefill_ms=1000, file_size=100_000)
    used = row(prefill_ms=100, file_size=1000, hit_count=3)
    assert first([small, large, used]) == large.ckpt_no
    assert first([small, used]) == small.ckpt_no


def test_a_hit_counts_half_after_the_half_life():
    long_ago = row(age_s=1e6, idle_s=60_000, hit_count=8, prefill_ms=100)  # decayed to 0.25
    lately = row(age_s=1e6, idle_s=0, hit_count=2, prefill_ms=100)
    assert first([long_ago, lately], half_life_s=12_000.0) == long_ago.ckpt_no
    assert first([long_ago, lately], half_life_s=1e9) == lately.ckpt_no


def test_a_row_without_a_measured_prefill_has_its_models_mean_time_per_token():
    measured = row(prefill_ms=1000, n_tokens=100)
    guessed = row(prefill_ms=None, n_tokens=1000)  # ten times as long
    other = row(prefill_ms=3000, n_tokens=100)
    assert first([measured, guessed, other]) == measured.ckpt_no


def test_equal_values_within_the_noise_of_a_measurement_go_by_their_last_use():
    quicker, slower = row(prefill_ms=101, idle_s=5), row(prefill_ms=100, idle_s=1)
    assert first([quicker, slower]) == quicker.ckpt_no


@pytest.mark.parametrize(
    ("order", "goes"), [(Order.LRU, "idle"), (Order.LFU, "seldom"), (Order.OLDEST, "old")], ids=["lru", "lfu", "oldest"]
)
def test_each_order_names_its_own_first(order, goes):
    rows = {
        "idle": row(age_s=50, idle_s=50, hit_count=9),
        "seldom": row(age_s=60, idle_s=1, hit_count=1),
        "old": row(age_s=90, idle_s=1, hit_count=9),
    }
    assert first(list(rows.values()), order=order) == rows[goes].ckpt_no


def test_a_newcomer_that_is_worth_less_than_all_others_has_nobody_before_it():
    others = [row(prefill_ms=10_000, file_size=100) for _ in range(3)]
    poor = row(prefill_ms=1, file_size=100_000, age_s=0)
    rich = row(prefill_ms=100_000, file_size=10, age_s=0)
    assert places_before(poor, others, Policy(), NOW) == []
    assert len(places_before(rich, others, Policy(), NOW)) == 3


# -- explain -------------------------------------------------------------------------------------------------------------------


def test_explain_gives_the_effect_of_every_rule_and_the_decision():
    rows = [row(age_s=100 - i, label="night") for i in range(3)]
    policy = Policy(max_age_s=99.5, max_count_per_label=2, order=Order.OLDEST, max_bytes=10**6)
    disk = Disk(free=1, total=1)
    opinions = {o.rule: (o.effect, o.why) for o in explain(rows, rows[0], policy, NOW, disk)}
    assert opinions["max_age"] == (RuleEffect.CONDEMNS, "saved 100 s ago, the limit is 100 s")
    assert opinions["max_bytes"] == (RuleEffect.NO_EFFECT, "3000 of 1000000 in use before this prune")
    assert opinions["order = oldest"][1] == "place 1 of 3 to go when a limit is passed"
    assert opinions["prune"] == (RuleEffect.CONDEMNS, "saved over 100 s ago, max_age is 100 s")
    newest = {o.rule: (o.effect, o.why) for o in explain(rows, rows[2], policy, NOW, disk)}
    assert newest["always stays"] == newest["prune"] == (RuleEffect.KEEPS, "the newest")
    with pytest.raises(NotFound, match="why it is STALE"):
        explain(rows, row(), policy, NOW, disk)


@pytest.mark.parametrize(
    "values", [{"high_water": 0.5, "low_water": 0.9}, {"low_water": 0.0}, {"half_life_s": 0.0}, {"min_free_share": 1.0}]
)
def test_a_policy_that_cannot_be_meant_is_refused(values):
    with pytest.raises(BadInput):
        Policy(**values)
