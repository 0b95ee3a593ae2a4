"""PostgreSQL goes away in the middle of a batch and comes back; and clocks that are wrong."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import sqlalchemy as sa
from support.databases import empty
from support.proxy import Proxy
from support.sample_engine import SampleEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.errors import CommitOutcomeUnknown, DatabaseUnavailable
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, Status


@pytest.fixture
def proxy(postgresql_url):
    url = sa.make_url(postgresql_url)
    made = Proxy(url.host or "127.0.0.1", url.port or 5432)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def far_registry(postgresql_url, proxy, tmp_path):
    """A registry whose connections can be cut."""
    empty(postgresql_url)
    url = sa.make_url(postgresql_url).set(host="127.0.0.1", port=proxy.port)
    with Registry.open(url.render_as_string(hide_password=False), tmp_path / "store") as opened:
        yield opened


def test_a_batch_goes_on_while_the_server_is_away_and_nothing_is_lost_or_doubled(far_registry, proxy):
    texts = [f"batch {i}" for i in range(9)]
    problems = []
    for i, text in enumerate(texts):
        if i == 3:
            proxy.stop()
        if i == 6:
            proxy.start()
        engine = SampleEngine()
        warmed = far_registry.warm(engine, text)
        assert len(engine.held) == 3, "the engine holds the input in any case"
        problems.append(type(warmed.problem))
    assert problems == [type(None)] * 3 + [DatabaseUnavailable] * 3 + [type(None)] * 3
    for text in texts:
        engine = SampleEngine()
        far_registry.warm(engine, text)
        assert far_registry.restore(engine, text).outcome is Outcome.HIT
    assert len(far_registry.list(status=Status.ACTIVE)) == len(texts)
    assert len(list(far_registry.store.root.rglob("*.llam"))) == len(texts)


def test_a_question_is_asked_again_when_its_connection_was_cut(far_registry, proxy):
    far_registry.save(ready(), "one")
    proxy.stop()
    proxy.start()
    assert far_registry.match("one").outcome is Outcome.HIT


def test_a_question_whose_connection_is_cut_in_the_middle_is_asked_again_once(far_registry, proxy):
    asked = []

    def question(db):
        asked.append(None)
        if len(asked) == 1:
            proxy.stop()
            proxy.start()
        return db.execute(sa.text("SELECT 42")).scalar_one()

    assert far_registry.database.query(question) == 42
    assert len(asked) == 2


def test_a_commit_whose_connection_is_cut_is_told_as_unanswered_and_keeps_its_file(far_registry, proxy):
    far_registry.save(ready(), "zero")

    def cut(step):
        if step == "inserted":
            proxy.stop()

    with pytest.raises(CommitOutcomeUnknown, match="may or may not have been saved"):
        Registry(replace(far_registry.context, hook=cut)).save(ready(), "one")
    proxy.start()
    assert (len(far_registry.list()), len(list(far_registry.store.root.rglob("*.llam")))) == (1, 2)


def test_a_server_that_stays_away_is_told_as_that(far_registry, proxy):
    proxy.stop()
    with pytest.raises(DatabaseUnavailable, match=f"127.0.0.1:{proxy.port}".replace(".", r"\.")):
        far_registry.list()
    assert far_registry.match("one").outcome is Outcome.FAILED


def ready():
    engine = SampleEngine()
    engine.evaluate(engine.ids)
    return engine


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_a_client_whose_clock_is_a_day_off_saves_restores_and_prunes_as_any_other(
    registry, engine, monkeypatch, seconds
):
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + seconds * 10**9)
    row = registry.save(engine, "one", expires_in_s=3600).checkpoint
    assert abs(row.created_us / 1e6 - real()) < 60
    assert registry.restore(engine, "one").outcome is Outcome.HIT
    collector = Collector(registry.context)
    assert collector.plan_prune(Policy(max_age_s=3600, max_idle_s=3600)) == []
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED
