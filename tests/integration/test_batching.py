"""A batch: every result as in a cold run, no token computed twice, saves beside the evaluation; what fails is told."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import numpy as np
import pytest
from support.sample_engine import TokenEngine

from llama_ckpt.db.connect import Database
from llama_ckpt.errors import BadInput, DatabaseUnavailable, EngineFailed, StoreFull
from llama_ckpt.fingerprint import hash_input
from llama_ckpt.values import MemoryKind, SaveOutcome, Status
from llama_ckpt.warm import background
from llama_ckpt.warm.batch import BatchInput

MODES = ["prefix", "full", "none"]
SHARED = list(range(100, 140))
INPUTS = [[*SHARED, *range(n, n + 5)] for n in (200, 300, 400, 500)]


@pytest.fixture
def engine():
    return TokenEngine()


def cold(ids):
    engine = TokenEngine()
    engine.evaluate(ids)
    return engine.next_token()


def n_distinct(inputs):
    """Tokens that must be computed at least once: the nodes of the tree of all beginnings."""
    return len({tuple(ids[:n]) for ids in inputs for n in range(1, len(ids) + 1)})


def assert_as_cold(records, inputs):
    assert [record.index for record in records] == list(range(len(inputs)))
    assert [(r.next_token, r.confidence) for r in records] == [cold(ids) for ids in inputs]
    assert [r.input_hash for r in records] == [hash_input(ids) for ids in inputs]
    assert [r.n_kept + r.n_restored + r.n_evaluated for r in records] == [len(ids) for ids in inputs]


def in_step(records):
    """The records, each with its save at an end before the next input is begun."""
    for record in records:
        if record.saving is not None:
            record.saving.result()
        yield record


def counts(record):
    return record.outcome.value, record.n_kept, record.n_restored, record.n_evaluated


# -- what is computed, and what is saved -----------------------------------------------------------------------------------


@pytest.mark.parametrize("save", MODES)
def test_every_input_is_answered_as_in_a_cold_run_and_what_is_shared_is_computed_once(registry, engine, save):
    records = list(registry.batch(engine, INPUTS, save=save))
    assert_as_cold(records, INPUTS)
    assert [counts(r) for r in records] == [("miss", 0, 0, 45), *[("partial", 40, 0, 5)] * 3]
    assert len(engine.evaluated) == n_distinct(INPUTS)
    saved = {"prefix": [40], "full": [45] * 4, "none": []}[save]
    assert [row.n_tokens for row in registry.list()] == saved
    assert [r.problem for r in records] == [None] * 4


@pytest.mark.parametrize("save", MODES)
def test_another_engine_starts_from_what_the_first_batch_saved(registry, engine, save):
    list(registry.batch(engine, INPUTS, save=save))
    other = TokenEngine()
    records = list(registry.batch(other, INPUTS, save=save))
    assert_as_cold(records, INPUTS)
    first, *rest = [counts(r) for r in records]
    assert (first, rest) == {
        "prefix": (("partial", 0, 40, 5), [("partial", 40, 0, 5)] * 3),
        "full": (("hit", 0, 44, 1), [("hit", 0, 44, 1)] * 3),
        "none": (("miss", 0, 0, 45), [("partial", 40, 0, 5)] * 3),
    }[save]
    n_rows = {"prefix": 1, "full": 4, "none": 0}[save]
    assert len(registry.list()) == n_rows, "nothing is saved a second time"


def test_inputs_of_several_families_in_any_order_compute_each_distinct_token_once(registry, engine):
    families = [[n * 1000 + i for i in range(300)] for n in range(1, 4)]
    inputs = [[*family, 9000 + 10 * k, *range(5)] for k in range(7) for family in families]
    random.Random(1).shuffle(inputs)
    records = list(registry.batch(engine, inputs))
    assert_as_cold(records, inputs)
    assert len(engine.evaluated) == sum(r.n_evaluated for r in records) <= 1.02 * n_distinct(inputs)
    assert sorted(row.n_tokens for row in registry.list()) == [300] * 3
    assert {r.outcome.value for r in records if r.n_restored} == {"partial"}
    assert all(r.checkpoint_id == r.restored_from.id for r in records if r.n_restored)


def test_a_shared_prefix_that_is_given_is_saved_once_under_its_own_text(registry, engine):
    text = " ".join(map(str, SHARED))
    inputs = [f"{text} {n} 7 8" for n in (1, 2, 3)]
    records = list(registry.batch(engine, inputs, shared_prefix=text, label="batch"))
    (row,) = registry.list()
    assert (row.n_tokens, row.input_hash, row.label) == (40, hash_input(text), "batch")
    assert records[0].save.outcome is SaveOutcome.SAVED
    assert [r.checkpoint_id for r in records] == [row.id, None, None]
    assert registry.match(text, fingerprint=engine.fingerprint).checkpoint.id == row.id


def test_of_a_given_prefix_that_the_inputs_leave_early_only_what_they_begin_with_is_computed(registry, engine):
    list(registry.batch(engine, INPUTS, shared_prefix=[*SHARED, 1, 2, 3]))
    assert [row.n_tokens for row in registry.list()] == [40]
    assert len(engine.evaluated) == n_distinct(INPUTS)


@pytest.mark.parametrize(
    ("n_shared", "n_rows"), [(15, 0), (16, 1)], ids=["fewer than are a match", "as many as are a match"]
)
def test_a_prefix_is_saved_if_a_match_could_use_it(registry, engine, n_shared, n_rows):
    list(registry.batch(engine, [[*range(n_shared), n, 1] for n in (100, 200)]))
    assert len(registry.list()) == n_rows


def test_what_is_deeper_shared_is_saved_behind_what_the_registry_has(registry, engine):
    document = [*SHARED, *range(600, 630)]
    list(registry.batch(engine, INPUTS))
    other = TokenEngine()
    records = list(registry.batch(other, [[*document, 1, 2], [*document, 3, 4]]))
    assert [counts(r) for r in records] == [("partial", 0, 40, 32), ("partial", 70, 0, 2)]
    assert sorted(row.n_tokens for row in registry.list()) == [40, 70]


@pytest.mark.parametrize("save", MODES)
def test_an_input_that_comes_twice_in_a_row_is_a_hit(registry, engine, save):
    records = list(registry.batch(engine, [INPUTS[0], INPUTS[0]], save=save))
    assert counts(records[1]) == ("hit", 44, 0, 1)
    assert [r.next_token for r in records] == [cold(INPUTS[0])[0]] * 2
    assert len(registry.list()) == (save != "none")


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_an_input_that_comes_again_later_is_a_hit(registry, engine, save):
    inputs = [INPUTS[0], list(range(50)), INPUTS[0]]
    records = list(registry.batch(engine, inputs, save=save))
    assert_as_cold(records, inputs)
    assert counts(records[2]) == ("hit", 0, 44, 1)


def test_an_input_that_comes_again_behind_a_known_prefix_is_saved_whole(registry, engine):
    inputs = [INPUTS[0], INPUTS[1], INPUTS[2], INPUTS[1]]
    records = list(registry.batch(engine, inputs))
    assert_as_cold(records, inputs)
    assert counts(records[3]) == ("hit", 0, 44, 1)
    assert sorted(row.n_tokens for row in registry.list()) == [40, 45]


def test_one_token_is_an_input_too(registry, engine):
    records = list(registry.batch(engine, [[5], [5], [6, 7]]))
    assert [counts(r) for r in records] == [("miss", 0, 0, 1), ("miss", 0, 0, 1), ("miss", 0, 0, 2)]


def test_the_engine_holds_each_input_when_its_record_comes_and_may_be_used(registry, engine):
    for record, ids in zip(registry.batch(engine, INPUTS), INPUTS, strict=True):
        assert engine.held_token_ids().tolist() == ids
        assert record.next_token == cold(ids)[0]
        engine.evaluate([*ids, 1, 2, 3], n_kept=len(ids))


def test_an_input_has_its_own_label_and_a_shared_prefix_that_of_the_batch(registry, engine):
    inputs = [BatchInput(prompt=INPUTS[0], label="mine"), INPUTS[1]]
    list(registry.batch(engine, inputs, save="full", label="all"))
    assert {row.label for row in registry.list()} == {"mine", "all"}
    list(registry.batch(TokenEngine(weights="cd" * 32), inputs, save="prefix", label="all"))
    assert [row.label for row in registry.list() if row.n_tokens == 40] == ["all"]


def test_inputs_are_read_no_further_than_is_looked_ahead(registry, engine):
    read = []

    def source():
        for n in range(100):
            read.append(n)
            yield [n, 1, 2]

    records = registry.batch(engine, source(), save="none")
    next(records)
    assert len(read) == 1
    records.close()
    read.clear()
    records = registry.batch(engine, source(), save="prefix")
    next(records)
    assert len(read) == 33
    records.close()


# -- saves beside the evaluation -------------------------------------------------------------------------------------------


def test_a_save_runs_while_the_next_input_is_computed(registry, engine, monkeypatch):
    """The save of the first input does not go on before the second one is computed."""
    second_is_computed = threading.Event()
    monkeypatch.setattr(
        registry.store, "_hook", lambda step: step == "head" and not second_is_computed.wait(60) and pytest.fail(step)
    )
    records = registry.batch(engine, INPUTS[:2], save="full")
    first = next(records)
    assert (first.save, first.checkpoint_id) == (None, None)
    real = engine.evaluate

    def evaluate(*args, **options):
        real(*args, **options)
        second_is_computed.set()

    monkeypatch.setattr(engine, "evaluate", evaluate)
    second = next(records)
    assert first.save.outcome is SaveOutcome.SAVED
    assert list(records) == []
    assert second.checkpoint_id is not None


def test_what_is_about_to_be_stored_is_waited_for_and_not_computed_again(registry, engine, monkeypatch):
    """The save of the first input's prefix goes on only when somebody waits for it."""
    waited_for, real = threading.Event(), background.BackgroundSaver.finish

    def finish(saver):
        waited_for.set()
        real(saver)

    monkeypatch.setattr(background.BackgroundSaver, "finish", finish)
    monkeypatch.setattr(
        registry.store, "_hook", lambda step: step == "head" and not waited_for.wait(60) and pytest.fail(step)
    )
    inputs = [INPUTS[0], [1, 2, 3], INPUTS[1]]
    records = registry.batch(engine, inputs)
    next(records)
    waited_for.clear()
    assert [counts(r) for r in records] == [("miss", 0, 0, 3), ("partial", 0, 40, 5)]


@pytest.mark.parametrize("end", ["close", "interrupt", "forgotten"])
def test_a_batch_that_ends_early_finishes_its_save(registry, engine, monkeypatch, end):
    records = registry.batch(engine, INPUTS, save="full")
    next(records)
    if end == "close":
        records.close()
    elif end == "forgotten":
        del records
        gc.collect()
    else:
        monkeypatch.setattr(engine, "evaluate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(records)
    assert [row.n_tokens for row in registry.list()] == [45]


def test_inputs_that_break_off_end_the_batch_with_their_error_and_the_save_is_finished(registry, engine):
    def source():
        yield INPUTS[0]
        raise OSError("the disk is gone")

    records = registry.batch(engine, source(), save="full")
    next(records)
    with pytest.raises(OSError, match="the disk is gone"):
        next(records)
    assert len(registry.list()) == 1


# -- what fails ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", MODES)
def test_a_database_that_is_away_for_a_while_is_told_and_no_result_is_lost(registry, engine, monkeypatch, save):
    def lost(self, *_):
        raise DatabaseUnavailable(url=self.shown_url, reason="the connection was lost")

    seen = []
    with monkeypatch.context() as patch:
        for record in in_step(registry.batch(engine, INPUTS, save=save)):
            seen.append(record)
            if record.index == 0:
                for name in ("read", "write", "query"):
                    patch.setattr(Database, name, lost)
            if record.index == 2:
                patch.undo()
    assert_as_cold(seen, INPUTS)
    assert [type(r.problem) for r in seen] == [type(None), DatabaseUnavailable, DatabaseUnavailable, type(None)]
    assert len(engine.evaluated) == n_distinct(INPUTS)
    assert len(registry.list()) == {"prefix": 1, "full": 2, "none": 0}[save]


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_a_full_store_is_told_in_the_record_and_no_result_is_lost(registry, engine, monkeypatch, save):
    monkeypatch.setattr(registry.store, "free_bytes", lambda: 1000)
    records = list(in_step(registry.batch(engine, INPUTS, save=save)))
    assert_as_cold(records, INPUTS)
    with_a_save = {"prefix": records[:3], "full": records}[save]  # behind the last there is nothing to share with
    assert all(isinstance(r.problem, StoreFull) and r.save is None for r in with_a_save)
    assert registry.list() == []
    assert not list(registry.store.root.rglob("*.llam"))


def test_a_save_that_failed_keeps_no_state_alive(registry, engine, monkeypatch):
    """The errors are in the records, which a caller may collect by the thousand."""
    monkeypatch.setattr(
        registry.store, "_hook", lambda step: step == "head" and (_ for _ in ()).throw(OSError(28, "no"))
    )
    states, real = [], engine.capture

    class Tracked(np.ndarray):
        pass

    def capture():
        array = np.frombuffer(real(), dtype=np.uint8).copy().view(Tracked)
        states.append(weakref.ref(array))
        return memoryview(array)

    monkeypatch.setattr(engine, "capture", capture)
    records = list(registry.batch(engine, INPUTS, save="full"))
    assert [type(r.problem) for r in records] == [StoreFull] * 4
    assert len(states) == 4
    assert [state() for state in states] == [None] * 4


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("", "empty"),
        (None, "flat sequence"),
        ([-1], "outside"),
        (list(range(600)), "the context has 512"),
        (BatchInput(prompt=[1, 2], label=""), "label"),
    ],
    ids=["empty", "nothing", "no token id", "too long", "bad label"],
)
@pytest.mark.parametrize("save", ["prefix", "full"])
def test_an_input_that_cannot_be_used_is_a_record_and_the_rest_goes_on(registry, engine, save, bad, word):
    records = list(registry.batch(engine, [INPUTS[0], bad, INPUTS[1]], save=save))
    assert [r.outcome.value for r in records] == ["miss", "failed", "partial"]
    assert isinstance(records[1].error, BadInput)
    assert word in str(records[1].error)
    assert (records[1].next_token, records[1].n_evaluated) == (None, 0)
    assert_as_cold([records[0]], [INPUTS[0]])
    assert records[2].next_token == cold(INPUTS[1])[0]


def test_an_engine_that_fails_once_fails_one_input(registry, engine, monkeypatch):
    real = engine.evaluate

    def evaluate(ids, *args, **options):
        if ids[-1] == INPUTS[1][-1]:
            engine.held = engine.held[:0]
            raise EngineFailed(reason="llama_decode returned -3")
        real(ids, *args, **options)

    monkeypatch.setattr(engine, "evaluate", evaluate)
    records = list(registry.batch(engine, INPUTS))
    assert [r.outcome.value for r in records] == ["miss", "failed", "partial", "partial"]
    assert counts(records[2]) == ("partial", 0, 40, 5)
    assert "returned -3" in str(records[1].error)


def test_a_damaged_checkpoint_is_computed_again_and_goes_stale(registry, engine):
    list(registry.batch(engine, INPUTS))
    (row,) = registry.list()
    path = registry.store.root / row.file_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    records = list(registry.batch(TokenEngine(), INPUTS))
    assert_as_cold(records, INPUTS)
    assert counts(records[0]) == ("miss", 0, 0, 45)
    assert registry.get(row.id).status is Status.STALE
    assert len(registry.list(status=Status.ACTIVE)) == 1


def test_an_engine_that_refuses_a_state_computes_the_input(registry, engine):
    list(registry.batch(engine, INPUTS))
    other = TokenEngine()
    other.refuses = True
    records = list(registry.batch(other, INPUTS))
    assert_as_cold(records, INPUTS)
    assert isinstance(records[0].problem, EngineFailed)


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_memory_that_cannot_be_cut_is_used_and_saved_whole(registry, engine, save):
    engine.memory_kind = MemoryKind.RECURRENT
    inputs = [SHARED, [*SHARED, 1], [*SHARED, 2]]
    records = list(in_step(registry.batch(engine, inputs, save=save)))
    assert_as_cold(records, inputs)
    assert [r.n_kept + r.n_restored for r in records] == [0, 40, 39]
    assert {row.parent_no for row in registry.list()} == {None}


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_memory_that_cannot_be_cut_is_saved_where_the_evaluation_comes_by(registry, engine, save):
    engine.memory_kind = MemoryKind.RECURRENT
    inputs = [[*SHARED, 1], [*SHARED, 2], [*SHARED, 3]]
    records = list(in_step(registry.batch(engine, inputs, save=save)))
    assert_as_cold(records, inputs)
    assert [r.n_restored for r in records] == [0, 40, 40]
    assert [r.problem for r in records] == [None] * 3
    again = list(in_step(registry.batch(engine, [[*SHARED, 3], [*SHARED, 4]], save=save)))
    assert [r.n_kept + r.n_restored for r in again] == [40, 40]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"save": "all"}, "prefix, full, none"),
        ({"label": ""}, "label"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"shared_prefix": ""}, "empty"),
    ],
    ids=["save", "label", "expiry", "prefix"],
)
def test_what_a_batch_cannot_use_is_refused_before_anything_is_read(registry, engine, options, word):
    with pytest.raises(BadInput, match=word):
        registry.batch(engine, iter([]), **options)


def test_a_batch_of_nothing_gives_nothing(registry, engine):
    assert list(registry.batch(engine, [])) == []
