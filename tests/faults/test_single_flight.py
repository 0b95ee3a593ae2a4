"""Many processes that need the same tokens: one evaluates them, the others wait for what it saves, and no longer than need be."""

from __future__ import annotations

import os
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from support import flights
from support.causal_engine import CausalEngine, state_of
from support.links import wrong_links
from support.sample_engine import SampleEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import coordination
from llama_ckpt.db.tables import save_claim
from llama_ckpt.errors import BadInput, DatabaseUnavailable, StoreFull
from llama_ckpt.fingerprint import flight_key
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, Status
from llama_ckpt.warm import single_flight
from llama_ckpt.warm.single_flight import SingleFlight

KEY = bytes(range(32))
IDS = list(range(1, 41))
NOT_MINE = "warm by another"


def key_of(engine, token_ids, n_known=0):
    return flight_key(engine.fingerprint.digest, engine.token_ids(" ".join(map(str, token_ids))), n_known, 256)


def claim(registry, key, *, seconds=60.0, holder=NOT_MINE):
    with registry.database.write() as db:
        return coordination.take_claim(db, key, holder, 0, seconds)


def drop(registry, key, holder=NOT_MINE):
    with registry.database.write() as db:
        coordination.drop_claim(db, key, holder)


def expire(registry):
    """As time would, by the database's clock."""
    with registry.database.write() as db:
        db.execute(sa.update(save_claim).where(save_claim.c.holder != "budget").values(expires_us=1))


def claims(registry):
    with registry.database.read() as db:
        query = sa.select(save_claim.c.holder).where(save_claim.c.holder != "budget")
        return list(db.scalars(query))


@pytest.fixture
def clock(monkeypatch):
    """The seconds of this process's clock; waiting moves it on, and takes no time."""
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(single_flight, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.fixture
def at_wait(registry, clock):
    """What happens while a process waits: its n-th step of waiting calls the n-th of these, the last one again and again."""
    steps = []

    def hook(step):
        if step == "waits":
            (steps.pop(0) if len(steps) > 1 else steps[0])()

    object.__setattr__(registry.context, "hook", hook)
    return steps


# -- eight processes ---------------------------------------------------------------------------------------------------------


def opened_again(database_url, tmp_path):
    """A registry with small blocks."""
    with Registry.open(database_url, tmp_path / "store") as made:
        flights.set_block_size(made)
    return Registry.open(database_url, tmp_path / "store")


def require_all_inputs_whole(registry):
    """Every input is there, once, and continues as the cold run."""
    engine = CausalEngine()
    for token_ids in flights.inputs():
        back = registry.restore(engine, token_ids)
        assert (back.outcome, back.n_restored) == (Outcome.HIT, len(token_ids) - 1)
        assert engine.state == state_of(token_ids)
    active = registry.list(status=Status.ACTIVE)
    assert len({row.input_hash for row in active}) == len(active) == len(flights.inputs())
    assert wrong_links(registry) == []


def test_eight_processes_evaluate_each_distinct_prefix_of_200_inputs_once(database_url, tmp_path):
    with opened_again(database_url, tmp_path) as registry:
        reading, writing = os.pipe()
        running = [flights.start(registry, reading, seed=seed) for seed in range(8)]
        os.close(reading)
        os.close(writing)
        answers = [flights.answer_of(process, 300) for process in running]
        evaluated = Counter(key for answer in answers for key in answer["evaluated"])
        assert len(evaluated) == flights.N_DISTINCT
        assert set(evaluated.values()) == {1}
        assert [(a["gave_up"], a["problems"]) for a in answers] == [(0, 0)] * 8
        assert Verifier(registry.database, registry.store).findings() == []
        assert claims(registry) == []
        require_all_inputs_whole(registry)


def test_processes_that_are_killed_at_any_step_delay_the_others_by_no_more_than_a_claim(database_url, tmp_path):
    choice = random.Random(6)
    with opened_again(database_url, tmp_path) as registry:
        reading, writing = os.pipe()
        dying = {
            flights.start(
                registry, reading, seed=i, die_at=step, die_after=choice.randrange(1, 20), claim_s=flights.CLAIM_S
            )
            for i, step in enumerate(flights.STEPS)
        }
        living = [flights.start(registry, reading, seed=100 + i, claim_s=flights.CLAIM_S) for i in range(4)]
        os.close(reading)
        os.close(writing)
        answers = [flights.answer_of(process, 300) for process in (*living, *dying)]
        assert answers.count(None) >= 4, "most of those that were to die did"
        assert all(answers[:4]), "the others went through"
        whole = [answer for answer in answers if answer]
        assert [(a["gave_up"], a["problems"]) for a in whole] == [(0, 0)] * len(whole)
        assert max(a["waited_s"] for a in whole) < 3 * flights.CLAIM_S + 5
        require_all_inputs_whole(registry)
        collector = Collector(registry.context)
        collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True))
        assert {f.kind.value for f in Verifier(registry.database, registry.store).findings()} <= {"temporary"}


# -- waiting -------------------------------------------------------------------------------------------------------------------


def test_who_waits_restores_what_the_other_saved(registry, at_wait):
    engine, other = CausalEngine(), CausalEngine()
    claim(registry, key_of(engine, IDS))

    def the_other_ends():
        other.evaluate(IDS)
        registry.save(other, IDS)
        drop(registry, key_of(engine, IDS))

    at_wait += [lambda: None, the_other_ends]
    warmed = registry.warm(engine, IDS)
    assert (warmed.n_restored, warmed.n_evaluated, engine.evaluated) == (39, 1, [])
    assert warmed.waited_s > 0
    assert not warmed.gave_up
    assert claims(registry) == []


def test_who_waits_for_a_longer_input_restores_what_both_begin_with(registry, at_wait):
    shared = list(range(1, 301))
    engine, other = CausalEngine(), CausalEngine()
    claim(registry, key_of(engine, [*shared, 7]))

    def the_other_ends():
        other.evaluate([*shared, 8, 9])
        registry.save(other, [*shared, 8, 9])
        drop(registry, key_of(engine, [*shared, 7]))

    at_wait += [the_other_ends]
    warmed = registry.warm(engine, [*shared, 7])
    assert (warmed.n_restored, warmed.n_evaluated, warmed.n_kept) == (300, 1, 0)
    assert engine.state == state_of([*shared, 7])


def test_a_claim_that_expires_is_taken_over(registry, at_wait):
    engine = CausalEngine()
    claim(registry, key_of(engine, IDS))
    at_wait += [lambda: None, lambda: expire(registry)]
    warmed = registry.warm(engine, IDS)
    assert (warmed.n_evaluated, warmed.save.outcome, warmed.gave_up) == (40, SaveOutcome.SAVED, False)
    assert claims(registry) == []


def test_after_a_killed_holder_one_takes_over_and_the_others_wait_for_that_one(registry, at_wait, clock):
    engine, other = CausalEngine(), CausalEngine()
    key = key_of(engine, IDS)
    claim(registry, key)

    def another_takes_over():
        clock[0] += 61
        expire(registry)
        assert claim(registry, key, holder="warm by a third")

    def that_one_ends():
        other.evaluate(IDS)
        registry.save(other, IDS)
        drop(registry, key, holder="warm by a third")

    at_wait += [another_takes_over, lambda: None, that_one_ends]
    warmed = registry.warm(engine, IDS)
    assert (warmed.n_restored, warmed.n_evaluated, engine.evaluated) == (39, 1, [])


def test_a_flight_that_ended_without_a_result_is_not_waited_for_a_second_time(registry, at_wait):
    """Where nothing can be saved, the processes must not queue up, each for the one before it."""
    engine = CausalEngine()
    key = key_of(engine, IDS)
    claim(registry, key)

    def it_fails_and_a_third_begins():
        drop(registry, key)
        claim(registry, key, holder="warm by a third")

    at_wait += [it_fails_and_a_third_begins]
    warmed = registry.warm(engine, IDS)
    assert (warmed.n_evaluated, warmed.gave_up) == (40, False)
    assert claims(registry) == ["warm by a third"]
    drop(registry, key, holder="warm by a third")


def test_who_has_waited_up_to_the_limit_computes_and_says_so(registry, at_wait, caplog):
    engine = CausalEngine()
    key = key_of(engine, IDS)
    claim(registry, key)
    at_wait += [lambda: None]
    warmed = registry.warm(engine, IDS, wait_s=10)
    assert (warmed.n_evaluated, warmed.gave_up, warmed.save.outcome) == (40, True, SaveOutcome.SAVED)
    assert warmed.waited_s == pytest.approx(10)
    assert f"after 10.0 s of waiting for {NOT_MINE}: computing the same here" in caplog.text
    assert claims(registry) == [NOT_MINE], "another's claim is left alone"
    drop(registry, key)


def test_with_a_limit_of_0_nobody_is_waited_for(registry, at_wait):
    engine = CausalEngine()
    claim(registry, key_of(engine, IDS))
    at_wait += [lambda: pytest.fail("it waited")]
    warmed = registry.warm(engine, IDS, wait_s=0)
    assert (warmed.n_evaluated, warmed.waited_s, warmed.gave_up) == (40, 0.0, False)
    drop(registry, key_of(engine, IDS))


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(registry, wait_s):
    with pytest.raises(BadInput, match=r"wait_s: .* cannot be used: give seconds from 0 on"):
        registry.warm(CausalEngine(), IDS, wait_s=wait_s)


# -- claims --------------------------------------------------------------------------------------------------------------------


def test_a_holder_that_shows_progress_keeps_its_claim_and_a_silent_one_gets_more_patience(registry, clock):
    flight = SingleFlight(registry.context, 300)
    assert not flight.should_compute(KEY)

    def seconds_left():
        with registry.database.read() as db:
            return coordination.claim_of(db, KEY)[1]

    assert 50 < seconds_left() <= single_flight.CLAIM_S
    expire(registry)
    clock[0] += 5
    flight.renew()
    assert seconds_left() < 0, "a third of the claim is not over"
    clock[0] += 40  # a batch that takes long
    flight.renew()
    assert 150 < seconds_left() <= 160
    flight.leave()
    assert claims(registry) == []


def test_a_holder_whose_claim_was_taken_over_goes_on_without(registry):
    flight = SingleFlight(registry.context, 300)
    assert not flight.should_compute(KEY)
    expire(registry)
    assert claim(registry, KEY)
    flight.renew(force=True)
    flight.leave()
    assert claims(registry) == [NOT_MINE]
    drop(registry, KEY)


def test_claims_that_killed_holders_left_are_forgotten_in_the_end(registry):
    claim(registry, KEY)
    expire(registry)
    registry.warm(CausalEngine(), IDS)
    assert claims(registry) == []


def test_a_failed_evaluation_gives_its_claim_back(registry):
    engine = CausalEngine()

    def fails():
        raise RuntimeError("no power")

    engine.evaluating = fails
    with pytest.raises(RuntimeError, match="no power"):
        registry.warm(engine, IDS)
    assert claims(registry) == []


def test_a_save_that_fails_gives_the_claim_back_and_the_next_one_computes_at_once(registry, monkeypatch):
    engine = CausalEngine()

    def full(*_):
        raise StoreFull(needed=1, path="store", reason="none")

    monkeypatch.setattr(type(registry.store), "write", full)
    warmed = registry.warm(engine, IDS)
    assert (warmed.save, type(warmed.problem), claims(registry)) == (None, StoreFull, [])


@pytest.mark.parametrize("way", ["write", "query"])
def test_without_the_database_one_computes_without_a_claim_and_the_answer_says_so(registry, monkeypatch, way, at_wait):
    """It goes away after the match."""
    engine = SampleEngine()
    of_claims = {"write": "take_claim", "query": "claim_of"}[way]

    def fails(*_):
        raise DatabaseUnavailable(url="sqlite://", reason="it went away")

    if way == "query":
        claim(registry, flight_key(engine.fingerprint.digest, engine.token_ids("one"), 0, 256))
    monkeypatch.setattr(coordination, of_claims, fails)
    warmed = registry.warm(engine, "one")
    assert (len(engine.held), warmed.n_evaluated, type(warmed.problem)) == (3, 3, DatabaseUnavailable)
    monkeypatch.undo()
    drop(registry, flight_key(engine.fingerprint.digest, engine.token_ids("one"), 0, 256))


def test_a_claim_that_cannot_be_given_back_is_told_and_changes_nothing(registry, monkeypatch, caplog):
    engine = CausalEngine()

    def fails(*_):
        raise DatabaseUnavailable(url="sqlite://", reason="it went away")

    monkeypatch.setattr(coordination, "drop_claim", fails)
    warmed = registry.warm(engine, IDS)
    assert (warmed.n_evaluated, warmed.problem) == (40, None)
    assert "others may wait 60 s for a claim that could not be given back" in caplog.text
