from __future__ import annotations

import os
import stat
import threading

import numpy as np
import pytest
import sqlalchemy as sa
from support import samples
from support.sample_engine import NOTHING, SampleEngine, TokenEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import marks, rows
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import BadInput, EngineStateMismatch, NotFound, StoreMismatch, StoreUnavailable
from llama_ckpt.formats.kv.layout import Dialect
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, StaleReason, Status


def file_of(registry, checkpoint):
    return registry.store.root / checkpoint.file_path


def set_row(registry, checkpoint, **values):
    with registry.database.write() as db:
        db.execute(sa.update(meta).where(meta.c.id == checkpoint.id).values(**values))


def replace_bytes(path, data):
    path.write_bytes(data)


# -- save ---------------------------------------------------------------------------------------------------------------


def test_a_saved_input_is_found_by_its_text_and_restored_with_the_engines_own_bytes(registry, engine, counters):
    result = registry.save(engine, "one", label="mine", prefill_ms=12)
    assert result.outcome is SaveOutcome.SAVED
    assert result.bytes_written == result.checkpoint.file_size == file_of(registry, result.checkpoint).stat().st_size
    assert (result.checkpoint.label, result.checkpoint.prefill_ms, result.checkpoint.n_tokens) == ("mine", 12, 3)
    found = registry.match("one", fingerprint=engine.fingerprint)
    assert (found.outcome, found.checkpoint.id, found.n_reusable) == (Outcome.HIT, result.checkpoint.id, 2)
    engine.held = NOTHING
    back = registry.restore(engine, "one")  # SampleEngine takes nothing but the very bytes it gave
    assert (back.outcome, back.n_restored, back.n_evaluated) == (Outcome.HIT, 2, 1)
    assert registry.get(result.checkpoint.id).hit_count == 1
    assert (counters["saved"], counters["hit"]) == (1, 1)


def test_saving_the_same_input_again_writes_nothing(registry, engine, saved, counters):
    before = sorted(registry.store.root.rglob("*.llam"))
    again = registry.save(engine, "one")
    assert (again.outcome, again.bytes_written, again.checkpoint) == (SaveOutcome.DEDUPLICATED, 0, saved)
    assert sorted(registry.store.root.rglob("*.llam")) == before
    assert counters["deduplicated"] == 1


def test_a_deduplicated_save_neither_reads_the_state_nor_the_payload(registry, engine, saved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "capture", lambda: pytest.fail("the state was read"))
        patch.setattr(registry.store, "map", lambda _path: pytest.fail("the payload was read"))
        assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_token_ids_are_an_input_of_their_own(registry, engine):
    registry.save(engine, "one")
    engine.held = engine.ids
    assert registry.save(engine, engine.ids.tolist()).outcome is SaveOutcome.SAVED
    assert registry.match(engine.ids, fingerprint=engine.fingerprint).outcome is Outcome.HIT


def test_a_text_that_looks_like_sql_is_data(registry, engine):
    text = "'; DROP TABLE llama_checkpoint_meta; --"
    registry.save(engine, text, label=text)
    assert registry.match(text, fingerprint=engine.fingerprint).outcome is Outcome.HIT
    assert registry.list(label=text)[0].label == text
    assert registry.match(text, model=text).outcome is Outcome.NO_MATCH


def test_saving_what_the_engine_does_not_hold_is_refused_and_leaves_nothing(registry, engine):
    engine.held = engine.ids[:2]
    with pytest.raises(EngineStateMismatch, match="holds 2 tokens, the input has 3"):
        registry.save(engine, "one")
    engine.held = engine.token_ids("one")
    engine.held[1] += 1
    with pytest.raises(EngineStateMismatch, match="differ from token 1 on"):
        registry.save(engine, "one")
    assert registry.list() == []
    assert not list(registry.store.root.rglob("*.llam"))


@pytest.mark.parametrize("given", ["", [], [-1], [2**31], [1.5], b"bytes", "\ud800"])
def test_an_input_that_is_none_is_refused_by_name(registry, engine, given):
    for verb in (registry.save, registry.restore, registry.warm):
        with pytest.raises(BadInput):
            verb(engine, given)
    with pytest.raises(BadInput):
        registry.match(given)


def test_a_bad_label_or_expiry_is_refused_before_anything_is_evaluated(registry):
    engine = SampleEngine()
    for options in ({"label": ""}, {"label": "x" * 201}, {"expires_in_s": 0}, {"expires_in_s": float("nan")}):
        with pytest.raises(BadInput):
            registry.warm(engine, "one", **options)
    assert engine.n_evaluations == 0


def test_a_checkpoint_past_its_expiry_is_not_offered_and_its_input_is_saved_anew(registry, engine):
    first = registry.save(engine, "one", expires_in_s=3600).checkpoint
    assert registry.match("one").outcome is Outcome.HIT
    set_row(registry, first, expires_us=1)
    assert registry.match("one").outcome is Outcome.NO_MATCH
    assert registry.restore(engine, "one").outcome is Outcome.NO_MATCH
    second = registry.save(engine, "one")
    assert second.outcome is SaveOutcome.SAVED
    assert registry.get(first.id).stale_reason is StaleReason.EXPIRED


# -- match --------------------------------------------------------------------------------------------------------------


def test_no_match_names_the_field_that_keeps_the_states_apart(registry, engine, saved):
    other_weights = SampleEngine(weights="cd" * 32)
    flash = SampleEngine(samples.F16_FLASH)
    quantised = SampleEngine(samples.Q8_FLASH)
    for asking, words in (
        (other_weights, "weights: saved abababababab…, now cdcdcdcdcdcd…"),
        (flash, "flash attention (V transposed): saved yes, now no"),
        (quantised, "K type: saved f16, now q8_0; V type: saved f16, now q8_0"),
    ):
        found = registry.match("one", fingerprint=asking.fingerprint)
        assert (found.outcome, found.nearest.id) == (Outcome.NO_MATCH, saved.id)
        assert words in found.reason
        assert registry.restore(asking, "one").outcome is Outcome.NO_MATCH
        assert asking.n_loads == 0


def test_the_nearest_is_the_one_with_the_fewest_differences(registry, engine, saved):
    far = SampleEngine(samples.Q8_FLASH, weights="cd" * 32)
    far.evaluate(far.ids)
    registry.save(far, "one")
    found = registry.match("one", fingerprint=SampleEngine(weights="ef" * 32).fingerprint)
    assert found.nearest.id == saved.id
    assert [d.field for d in found.differences] == ["weights"]


def test_the_same_weights_under_another_name_and_another_context_size_hit(registry, engine, saved):
    renamed = SampleEngine(model_name="renamed", n_ctx=64)
    assert registry.restore(renamed, "one").outcome is Outcome.HIT


def test_match_by_name_by_weights_and_by_hash_need_no_engine(registry, engine, saved):
    assert registry.match("one", model="sample").checkpoint == saved
    assert registry.match("one", weights=bytes.fromhex("ab" * 32)).checkpoint == saved
    assert registry.match_hash(saved.input_hash).checkpoint == saved
    unknown = registry.match("one", model="unknown")
    assert (unknown.outcome, unknown.nearest) == (Outcome.NO_MATCH, saved)
    assert "only for other models, such as sample" in unknown.reason
    assert registry.match("one", weights=bytes(32)).outcome is Outcome.NO_MATCH
    assert registry.match("two").reason == "no checkpoint of this input is registered"
    with pytest.raises(BadInput, match="64 hex digits"):
        registry.match_hash(b"short")


# -- restore ------------------------------------------------------------------------------------------------------------


def damage_cases():
    def flip(at):
        def change(data):
            changed = bytearray(data)
            changed[at] ^= 0x10
            return bytes(changed)

        return change

    return {
        "short by one byte": (lambda d: d[:-1], "the header says"),
        "longer by one byte": (lambda d: d + b"\0", "the header says"),
        "empty": (lambda d: b"", "the file is empty"),
        "cut inside the header": (lambda d: d[:100], "fewer than a header's 128"),
        "a foreign file": (lambda d: b"GGUF" + d[4:], "no LLAM magic"),
        "nine zero bytes before the magic": (lambda d: bytes(9) + d, "no LLAM magic"),
        "absurd counts": (lambda d: d[:16] + b"\xff" * 16 + d[32:], "CRC of the header"),
        "a flipped header bit": (flip(0x40), "CRC of the header"),
        "a flipped metadata bit": (flip(0x80 + 30), "CRC-32 of the metadata and token ids"),
        "a flipped filling bit": (flip(4000), "filling"),
        "a flipped payload bit": (flip(-1000), "CRC-32 of the payload"),
    }


@pytest.mark.parametrize("case", damage_cases())
def test_a_damaged_file_is_refused_before_the_engine_and_the_input_is_saved_anew(registry, engine, saved, case):
    change, words = damage_cases()[case]
    replace_bytes(file_of(registry, saved), change(file_of(registry, saved).read_bytes()))
    back = registry.restore(engine, "one")
    assert (back.outcome, back.n_restored) == (Outcome.NO_MATCH, 0)
    assert words in back.reason
    assert engine.n_loads == 0
    assert len(engine.held) == 3, "the engine's live sequence was touched"
    now = registry.get(saved.id)
    assert (now.status, now.stale_reason, now.lease_until_us) == (Status.STALE, StaleReason.CORRUPT, None)
    assert registry.match("one").outcome is Outcome.NO_MATCH
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_file_whose_size_is_wrong_does_not_stop_a_save(registry, engine, saved):
    replace_bytes(file_of(registry, saved), b"short")
    again = registry.save(engine, "one")
    assert again.outcome is SaveOutcome.SAVED
    assert registry.get(saved.id).stale_reason is StaleReason.CORRUPT


@pytest.mark.parametrize("n_zeros", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_file_shifted_by_zero_bytes_is_restored_and_counted(registry, engine, saved, n_zeros, counters, caplog):
    replace_bytes(file_of(registry, saved), bytes(n_zeros) + file_of(registry, saved).read_bytes())
    with caplog.at_level("INFO", logger="llama_ckpt"):
        assert registry.restore(engine, "one").outcome is Outcome.HIT
    assert counters["padding_detected"] == 1
    assert f"detected padding: {n_zeros} byte(s)" in caplog.text
    assert registry.save(engine, "one").outcome is SaveOutcome.DEDUPLICATED


def test_a_missing_file_is_still_matched_but_restored_as_no_match_and_then_saved_again(registry, engine, saved):
    file_of(registry, saved).unlink()
    assert registry.match("one").outcome is Outcome.HIT
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "does not exist" in back.reason
    assert registry.get(saved.id).stale_reason is StaleReason.MISSING
    warmed = registry.warm(engine, "one")
    assert warmed.save.outcome is SaveOutcome.SAVED
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_symlink_in_the_place_of_a_file_is_not_followed(registry, engine, saved, tmp_path, left_in_store):
    outside = tmp_path / "outside.llam"
    file_of(registry, saved).rename(outside)
    file_of(registry, saved).symlink_to(outside)
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "symlink" in back.reason
    assert registry.get(saved.id).stale_reason is StaleReason.CORRUPT
    assert outside.exists()
    left_in_store.add("foreign")


@pytest.mark.parametrize(
    "path", ["../outside.llam", "/etc/passwd", "ab/cd/../../../outside.llam", "ab/cd/" + "e" * 32 + ".llam"]
)
def test_a_row_whose_path_leaves_the_store_is_refused(registry, engine, saved, path, left_in_store):
    set_row(registry, saved, file_path=path)
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "not a path that this store gives" in back.reason
    assert engine.n_loads == 0
    assert registry.get(saved.id).status is Status.STALE
    left_in_store.add("orphan")


def test_a_file_of_another_input_under_a_rows_name_is_refused(registry, engine, saved):
    other = registry.save(engine, "two").checkpoint
    replace_bytes(file_of(registry, saved), file_of(registry, other).read_bytes())
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "input hash: the row says" in back.reason


def test_an_engine_whose_tokenizer_changed_gets_no_match_and_its_warm_supersedes_the_row(registry, engine, saved):
    engine.ids = engine.ids[::-1].copy()
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "tokenizer gives other tokens" in back.reason
    assert registry.get(saved.id).status is Status.ACTIVE, "another engine may still use it"
    warmed = registry.warm(engine, "one")
    assert warmed.save.outcome is SaveOutcome.SAVED
    assert registry.get(saved.id).stale_reason is StaleReason.SUPERSEDED
    assert registry.restore(engine, "one").outcome is Outcome.HIT


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Dialect(1, cell_extension=12), "its cells have 0 bytes more, the engine's 12"),
        (None, "(full memory) is not known"),
    ],
    ids=["extension", "unknown"],
)
def test_an_engine_that_no_translation_reaches_gets_no_match_before_it_is_touched(
    registry, engine, saved, layout, words
):
    engine.layout = layout
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert words in back.reason
    assert engine.n_loads == 0
    assert registry.get(saved.id).status is Status.ACTIVE
    assert registry.warm(engine, "one").save.outcome is SaveOutcome.SAVED
    assert registry.get(saved.id).stale_reason is StaleReason.SUPERSEDED


def test_a_text_with_the_bytes_of_token_ids_is_not_taken_for_them(registry, engine):
    text = "a\0\0\0b\0\0\0"
    assert text.encode() == np.array([97, 98], dtype="<i4").tobytes()
    registry.save(engine, text)
    engine.held = np.array([97, 98], dtype=np.int32)
    assert registry.save(engine, [97, 98]).outcome is SaveOutcome.SAVED


def test_a_checkpoint_longer_than_the_context_is_no_match_and_stays(registry, engine, saved):
    engine.n_ctx = 2
    back = registry.restore(engine, "one")
    assert back.outcome is Outcome.NO_MATCH
    assert "set a larger n_ctx" in back.reason
    assert registry.get(saved.id).status is Status.ACTIVE


def test_an_engine_that_refuses_a_verified_state_gives_failed_and_the_row_is_not_offered_again(registry, engine, saved):
    engine.refuses = True
    back = registry.restore(engine, "one")
    assert (back.outcome, back.n_restored) == (Outcome.FAILED, 0)
    assert back.error is not None
    assert registry.match("one").outcome is Outcome.NO_MATCH


def test_restoring_never_consumes(registry, engine, saved):
    assert [registry.restore(engine, "one").outcome for _ in range(3)] == [Outcome.HIT] * 3
    now = registry.get(saved.id)
    assert (now.hit_count, now.lease_until_us) == (3, None)
    assert now.last_used_us >= saved.last_used_us
    assert now.verified_us is not None


# -- warm ---------------------------------------------------------------------------------------------------------------


def test_warm_evaluates_and_saves_once_and_restores_after_that(registry):
    first, second = SampleEngine(), SampleEngine()
    cold = registry.warm(first, "one")
    assert (cold.n_restored, cold.n_evaluated, cold.save.outcome) == (0, 3, SaveOutcome.SAVED)
    assert cold.save.checkpoint.prefill_ms is not None
    hit = registry.warm(second, "one")
    assert (hit.n_restored, hit.n_evaluated, hit.save, hit.problem) == (2, 1, None, None)
    assert (second.n_evaluations, len(second.held)) == (0, 3)


# -- care ---------------------------------------------------------------------------------------------------------------


def test_a_pinned_checkpoint_cannot_be_removed_until_it_is_unpinned(registry, engine, saved):
    assert registry.pin(saved.id).pinned
    with pytest.raises(BadInput, match="unpin it first"):
        registry.remove(saved.id)
    assert not registry.unpin(saved.id).pinned
    assert registry.remove(saved.id).stale_reason is StaleReason.REMOVED
    assert registry.match("one").outcome is Outcome.NO_MATCH


def test_a_checkpoint_reported_bad_is_not_offered_again_and_saved_anew(registry, engine, saved):
    assert registry.report_bad(saved.id).stale_reason is StaleReason.CORRUPT
    assert registry.match("one").outcome is Outcome.NO_MATCH
    assert registry.save(engine, "one").outcome is SaveOutcome.SAVED


def test_invalidate_takes_rows_in_batches_and_deltas_before_what_they_stand_on(registry, monkeypatch):
    engine = TokenEngine()
    for n_tokens in (40, 80, 120, 160, 200):
        engine.evaluate(list(range(n_tokens)))
        registry.save(engine, list(range(n_tokens)))
    monkeypatch.setattr("llama_ckpt.catalogue._MARKED_AT_ONCE", 2)
    seen, real = [], marks.active_of_model

    def between(db, *given):
        by_no = {row.ckpt_no: row for row in rows.list_checkpoints(db)}
        living = [row for row in by_no.values() if row.status is Status.ACTIVE]
        assert all(row.parent_no is None or by_no[row.parent_no].status is Status.ACTIVE for row in living)
        seen.append(len(living))
        return real(db, *given)

    monkeypatch.setattr(marks, "active_of_model", between)
    assert registry.invalidate(engine.fingerprint) == 5
    assert seen == [5, 3, 1, 0]


def test_invalidate_makes_every_checkpoint_of_a_fingerprint_stale_and_no_other(registry, engine, saved):
    other = SampleEngine(weights="cd" * 32)
    other.evaluate(other.ids)
    kept = registry.save(other, "one").checkpoint
    registry.save(engine, "two")
    assert registry.invalidate(engine.fingerprint) == 2
    assert [c.id for c in registry.list(status=Status.ACTIVE)] == [kept.id]


def test_an_id_is_found_by_its_first_digits(registry, engine, saved):
    assert registry.get(saved.id[:8].upper()).id == saved.id
    with pytest.raises(NotFound, match="no checkpoint 'ffffffffffff'"):
        registry.get("ffffffffffff")
    for bad in ("abc", "%%%%", "xyzxyz"):
        with pytest.raises(BadInput, match="4 to 32 hex digits"):
            registry.get(bad)


def test_an_ambiguous_id_is_refused(registry, engine, saved, left_in_store):
    second = registry.save(engine, "two").checkpoint
    for row, digit in ((saved, "1"), (second, "2")):
        set_row(registry, row, id="abcd" + digit * 28)
    with pytest.raises(BadInput, match="several ids begin like this"):
        registry.get("abcd")
    assert registry.get("abcd1").id == "abcd" + "1" * 28


def test_stats_are_recounted_from_the_rows(registry, engine, saved):
    registry.save(engine, "two", prefill_ms=500)
    registry.restore(engine, "two")
    registry.remove(saved.id)
    totals = registry.stats()
    assert (totals.n_active, totals.n_stale, totals.hit_count, totals.spared_ms) == (1, 1, 1, 500)
    assert totals.active_bytes == totals.stale_bytes == saved.file_size
    assert (totals.models[0].model_name, totals.models[0].n_tokens) == ("sample", 3)


def test_list_filters_and_limits_newest_first(registry, engine):
    ids = [registry.save(engine, f"input {i}", label="even" if i % 2 == 0 else "odd").checkpoint.id for i in range(5)]
    assert [c.id for c in registry.list()] == ids[::-1]
    assert [c.id for c in registry.list(label="odd", at_most=1)] == [ids[3]]
    assert registry.list(model_name="unknown") == []


# -- places and privacy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with spaces", "日本語", "Егор", "q'uote\"s", "n" * 200, "percent%20 &;"])
def test_any_folder_name_works(tmp_path, engine, name):
    root = tmp_path / name / "store"
    with Registry.open(store=root) as opened:
        opened.save(engine, "one")
    with Registry.open(store=root) as opened:
        assert opened.restore(engine, "one").outcome is Outcome.HIT


def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path, engine):
    before = os.umask(0)
    try:
        with Registry.open(store=tmp_path / "store") as opened:
            opened.save(engine, "one")
            modes = {
                p.relative_to(opened.store.root): stat.S_IMODE(p.stat().st_mode) for p in opened.store.root.rglob("*")
            }
            modes["."] = stat.S_IMODE(opened.store.root.stat().st_mode)
            folders = {str(k): v for k, v in modes.items() if (opened.store.root / k).is_dir()}
    finally:
        os.umask(before)
    assert set(folders.values()) == {0o700}
    assert {v for k, v in modes.items() if str(k) not in folders} == {0o600}
    assert len(modes) - len(folders) >= 3


def test_no_text_of_an_input_reaches_database_log_or_metadata(tmp_path, engine, caplog):
    secret = "the launch code is 0451"
    with caplog.at_level("DEBUG"), Registry.open(store=tmp_path / "store") as opened:
        opened.save(engine, secret)
        opened.restore(engine, secret)
        opened.match(secret + "?")
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
    assert "0451" not in caplog.text


def test_a_wrong_or_unmounted_store_costs_nothing(registry, engine, saved, tmp_path, database_url):
    with Registry.open(database_url, tmp_path / "typo") as wrong:
        back = wrong.restore(engine, "one")
        assert back.outcome is Outcome.FAILED
        assert "contains no marker of this registry" in str(back.error)
        for text in ("one", "two"):
            with pytest.raises(StoreUnavailable, match="is it mounted"):
                wrong.save(engine, text)
        warmed = wrong.warm(engine, "one")
        assert isinstance(warmed.problem, StoreUnavailable)
        with pytest.raises(StoreMismatch):
            Collector(wrong.context).plan()
    assert not list((tmp_path / "typo").rglob("*.llam"))
    assert registry.get(saved.id).status is Status.ACTIVE
    assert registry.restore(engine, "one").outcome is Outcome.HIT


def test_a_store_whose_files_are_really_gone_is_taken_anew_by_force(registry, engine, saved, tmp_path, database_url):
    with Registry.open(database_url, tmp_path / "new") as new:
        collector = Collector(new.context)
        collector.run(collector.plan(force=new.registry_id))
        assert new.get(saved.id).stale_reason is StaleReason.MISSING
        assert new.warm(engine, "one").save.outcome is SaveOutcome.SAVED
        assert new.restore(engine, "one").outcome is Outcome.HIT
        for row in new.list(status=Status.ACTIVE):
            new.remove(row.id)
    for path in registry.store.root.rglob("*.llam"):
        path.unlink()


def test_a_relative_store_does_not_follow_the_working_folder(tmp_path, engine, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Registry.open(store="relative") as opened:
        opened.save(engine, "one")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert opened.restore(engine, "one").outcome is Outcome.HIT


def test_threads_that_open_fresh_registries_at_once_do_not_disturb_each_other(tmp_path, engine):
    errors, barrier = [], threading.Barrier(8)

    def opens(number):
        barrier.wait()
        try:
            with Registry.open(store=tmp_path / str(number)) as opened:
                opened.list()
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=opens, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_row_that_is_gone_lends_its_number_to_no_other(tmp_path, engine):
    with Registry.open(store=tmp_path / "store") as opened:
        first = opened.save(engine, "one").checkpoint
        opened.remove(first.id)
        collector = Collector(opened.context)
        collector.run(collector.plan(Policy(stale_grace_s=0)))
        assert opened.save(engine, "two").checkpoint.ckpt_no > first.ckpt_no


def test_a_failed_restore_keeps_no_file_open(registry, engine, saved):
    engine.refuses = True
    kept = registry.restore(engine, "one")
    assert kept.outcome is Outcome.FAILED
    with open("/proc/self/maps") as maps:
        assert saved.id not in maps.read()


@pytest.mark.parametrize("name", ["", "n" * 500, "a\0b", "\udcff.gguf", "日本語"])
def test_a_model_of_any_name_can_be_saved(registry, engine, name):
    engine.model_name = name
    row = registry.save(engine, "one").checkpoint
    assert 0 < len(row.model_name) <= 200
    assert registry.restore(engine, "one").outcome is Outcome.HIT


@pytest.mark.parametrize(
    "options", [{"label": "a\0b"}, {"label": "\ud800"}, {"prefill_ms": 1 << 70}, {"prefill_ms": -1}]
)
def test_a_value_that_no_database_can_hold_is_refused_before_a_file_is_written(registry, engine, options):
    with pytest.raises(BadInput):
        registry.save(engine, "one", **options)
    assert not list(registry.store.root.rglob("*.llam"))


def test_what_is_wrong_with_an_input_is_told_without_quoting_it(registry, engine):
    with pytest.raises(BadInput) as told:
        registry.match("the launch code is 0451 \ud800")
    assert "0451" not in str(told.value)
    assert "24" in str(told.value)


def test_a_store_of_another_registry_is_refused(tmp_path, engine):
    with Registry.open(store=tmp_path / "a") as first:
        first.save(engine, "one")
    with pytest.raises(StoreUnavailable, match="belongs to registry"):
        Registry.open(f"sqlite:///{tmp_path}/other.sqlite3", tmp_path / "a")


def test_a_registry_is_printed_in_one_line_without_a_password_and_without_a_query(registry, monkeypatch):
    monkeypatch.setattr(type(registry.database), "read", lambda _: pytest.fail("it asked the database"))
    shown = str(registry)
    monkeypatch.undo()
    assert shown == f"Registry(database={registry.database.shown_url!r}, store={str(registry.store.root)!r})"
    assert "\n" not in shown
