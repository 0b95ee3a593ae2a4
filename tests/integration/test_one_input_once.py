"""What a call asks of tokenizer, hash and database: counted. Each input is tokenised once and hashed once, wherever it goes."""

from __future__ import annotations

import contextlib
import hashlib
from types import SimpleNamespace

import pytest
from support.causal_engine import CausalEngine

from llama_ckpt import fingerprint
from llama_ckpt.db.connect import Database
from llama_ckpt.registry import Registry
from llama_ckpt.values import Outcome, SaveOutcome

TEXT = " ".join(map(str, range(1, 401)))
LONGER = TEXT + " 1001 1002 1003"


class CountingEngine(CausalEngine):
    """Counts how often each text is tokenised."""

    def __init__(self):
        super().__init__()
        self.tokenised: list[str] = []

    def token_ids(self, text):
        self.tokenised.append(text)
        return super().token_ids(text)


@pytest.fixture
def engine():
    return CountingEngine()


@pytest.fixture
def hashed(monkeypatch):
    """All data that a SHA-256 of the product was started with."""
    seen: list[bytes] = []

    def sha256(data=b""):
        seen.append(bytes(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(fingerprint, "hashlib", SimpleNamespace(sha256=sha256))
    return seen


@pytest.fixture
def reads(monkeypatch):
    """A list that grows by one for each transaction that only reads."""
    seen: list[None] = []
    real = Database.read

    @contextlib.contextmanager
    def read(self):
        seen.append(None)
        with real(self) as db:
            yield db

    monkeypatch.setattr(Database, "read", read)
    return seen


def require_once(engine, hashed, text):
    assert engine.tokenised == [text]
    assert hashed.count(text.encode()) == 1


def test_a_cold_warm_of_a_text_tokenises_and_hashes_it_once_and_reads_the_database_six_times(
    registry, engine, hashed, reads
):
    warmed = registry.warm(engine, TEXT)
    assert (warmed.n_evaluated, warmed.save.outcome) == (400, SaveOutcome.SAVED)
    require_once(engine, hashed, TEXT)
    assert len(reads) <= 6, "12 before"


def test_a_warm_of_a_stored_text_tokenises_and_hashes_it_once_and_reads_the_database_once(
    registry, engine, hashed, reads
):
    registry.warm(CausalEngine(), TEXT)
    hashed.clear()
    reads.clear()
    assert registry.warm(engine, TEXT).n_restored == 399
    require_once(engine, hashed, TEXT)
    assert len(reads) == 1


def test_a_warm_of_a_longer_text_tokenises_and_hashes_it_once_and_reads_the_database_four_times(
    registry, engine, hashed, reads
):
    registry.warm(CausalEngine(), TEXT)
    hashed.clear()
    reads.clear()
    warmed = registry.warm(engine, LONGER)
    assert (warmed.n_restored, warmed.n_evaluated, warmed.save.outcome) == (400, 3, SaveOutcome.SAVED)
    require_once(engine, hashed, LONGER)
    assert len(reads) <= 4, "8 before"


def test_a_restore_by_prefix_tokenises_and_hashes_once_and_reads_once(registry, engine, hashed, reads):
    registry.warm(CausalEngine(), TEXT)
    hashed.clear()
    reads.clear()
    assert registry.restore(engine, LONGER).n_restored == 400
    require_once(engine, hashed, LONGER)
    assert len(reads) == 1


@pytest.mark.parametrize("save", ["prefix", "full"])
def test_a_batch_tokenises_and_hashes_each_input_once(registry, engine, hashed, save):
    list(registry.batch(engine, [TEXT, LONGER], save=save))
    assert sorted(engine.tokenised) == sorted([TEXT, LONGER])
    assert [hashed.count(text.encode()) for text in (TEXT, LONGER)] == [1, 1]


def test_what_needs_no_token_ids_tokenises_nothing(registry, engine):
    registry.warm(CausalEngine(), TEXT)
    assert registry.save(engine, TEXT).outcome is SaveOutcome.DEDUPLICATED
    assert registry.match(TEXT, fingerprint=engine.fingerprint).outcome is Outcome.HIT
    assert registry.match(TEXT, fingerprint=engine.fingerprint, vocabulary=engine).outcome is Outcome.HIT
    assert engine.tokenised == []


def test_a_miss_is_still_explained_by_what_other_models_have(registry, engine):
    other = CausalEngine()
    other.fingerprint = fingerprint.fingerprint({**other.fingerprint.fields, "weights": "ab" * 32})
    registry.warm(other, TEXT)
    for result in (registry.restore(engine, TEXT), registry.warm(engine, TEXT).restore):
        assert result.outcome is Outcome.NO_MATCH
        assert "its state does not fit this engine: weights: saved abababababab…" in result.reason


# -- bad candidates -----------------------------------------------------------------------------------------------------------


def flip_last_byte(registry, row):
    path = registry.store.root / row.file_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def restored_by_restore(registry, engine, ids):
    return registry.restore(engine, ids).n_restored


def restored_by_warm(registry, engine, ids):
    return registry.warm(engine, ids).n_restored


def restored_by_batch(registry, engine, ids):
    return next(registry.batch(engine, [ids])).n_restored


@pytest.mark.parametrize("call", [restored_by_restore, restored_by_warm, restored_by_batch])
@pytest.mark.parametrize(("n_bad", "expected"), [(0, 350), (1, 300), (2, 250), (3, 200), (4, 0)])
def test_restore_warm_and_batch_survive_the_same_number_of_bad_checkpoints(
    database_url, tmp_path, call, n_bad, expected
):
    """Of five checkpoints, each a prefix of the next, the longest are damaged."""
    with Registry.open(database_url, tmp_path / "store", delta_depth=0) as registry:
        writer, ids = CausalEngine(), list(range(1, 401))
        rows = []
        for n in (150, 200, 250, 300, 350):
            writer.evaluate(ids[:n])
            rows.append(registry.save(writer, ids[:n]).checkpoint)
        for row in rows[len(rows) - n_bad :]:
            flip_last_byte(registry, row)
        assert call(registry, CausalEngine(), ids) == expected


@pytest.mark.parametrize("call", [restored_by_restore, restored_by_warm, restored_by_batch])
def test_a_checkpoint_that_does_not_fit_and_stays_active_does_not_hide_the_next_best(registry, call):
    """The tokenizer has changed since the text was saved: its checkpoint has other tokens, and stays for who has the old one."""
    writer = CausalEngine()
    old = registry.warm(writer, TEXT).save.checkpoint
    changed = [*range(1, 301), 7, 7, 7]
    writer.evaluate(changed[:300])
    shorter = registry.save(writer, changed[:300]).checkpoint

    class Changed(CausalEngine):
        def token_ids(self, text):
            return super().token_ids(" ".join(map(str, changed)))

    assert call(registry, Changed(), TEXT) == 300
    assert registry.get(shorter.id).hit_count + registry.get(old.id).hit_count == 1
