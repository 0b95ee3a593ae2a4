"""The words of values that people see."""

from __future__ import annotations

import dataclasses

import pytest

from llama_ckpt import values
from llama_ckpt.errors import StoreUnavailable
from llama_ckpt.gc_values import CollectionSummary, GcItem, GcKind, GcPlan, GcReport, RowVersion, Verdict
from llama_ckpt.values import (
    Check,
    CheckName,
    Checkpoint,
    Difference,
    Fingerprint,
    MatchResult,
    MemoryKind,
    MergeResult,
    ModelDimensions,
    ModelStats,
    Outcome,
    RegisteredModel,
    RestoreResult,
    SaveOutcome,
    SaveResult,
    StaleReason,
    Stats,
    Status,
    WarmResult,
)


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (Check(name=CheckName.HEADER, ok=True), "Header OK"),
        (Check(name=CheckName.CRC32, ok=True), "CRC32 OK"),
        (Check(name=CheckName.STRUCTURE, ok=True), "Structure OK"),
        (Check(name=CheckName.DIMENSIONS, ok=True), "Dimensions match model"),
        (Check(name=CheckName.ROW, ok=True), "Row OK"),
        (Check(name=CheckName.HEADER, ok=False, detail="no LLAM magic"), "Header FAILED: no LLAM magic"),
        (Check(name=CheckName.CRC32, ok=False), "CRC32 FAILED"),
        (Check(name=CheckName.DIMENSIONS, ok=False, detail="n_layer is 32"), "Dimensions differ from model: n_layer is 32"),
        (Check(name=CheckName.DIMENSIONS, ok=None, detail="the model is not registered here"),
         "Dimensions not checked: the model is not registered here"),
        (Check(name=CheckName.CRC32, ok=None, detail="Header failed"), "CRC32 not checked: Header failed"),
        (Check(name=CheckName.HEADER, ok=True, detail="after 8 zero bytes before the magic"),
         "Header OK: after 8 zero bytes before the magic"),
    ],
)  # fmt: skip
def test_a_check_is_one_line(check, line):
    assert str(check) == line


def test_a_difference_names_both_sides():
    assert str(Difference(field="K type", saved="f16", now="q8_0")) == "K type: saved f16, now q8_0"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Status, {"ACTIVE", "STALE"}),
        (Outcome, {"hit", "no_match", "failed"}),
        (SaveOutcome, {"saved", "deduplicated", "refused"}),
        (StaleReason, {"superseded", "expired", "evicted", "corrupt", "missing", "incompatible", "removed"}),
        (MemoryKind, {"full", "swa", "recurrent", "hybrid"}),
    ],
)
def test_the_words_that_stand_in_databases_and_json_stay_as_they_are(kind, words):
    assert {member.value for member in kind} == words
    assert {str(member) for member in kind} == words


def test_a_fingerprint_names_its_weights_by_their_bytes():
    assert Fingerprint(digest=bytes(32), fields={"weights": "0aff" + "00" * 30}).weights_sha256 == b"\x0a\xff" + bytes(
        30
    )


def gc_item(size_bytes: int) -> GcItem:
    return GcItem(kind=GcKind.ORPHAN, path="p", reason="r", size_bytes=size_bytes, age_s=0.0)


@pytest.mark.parametrize(("sizes", "total"), [([], 0), ([5], 5), ([1, 0, 1 << 40], (1 << 40) + 1)])
def test_a_gc_plan_gives_the_bytes_it_frees(sizes, total):
    plan = GcPlan(items=tuple(map(gc_item, sizes)), findings=(), n_files=0, n_rows=0)
    assert plan.size_bytes == total


@pytest.mark.parametrize(("active_bytes", "n_tokens", "expected"), [(92_000, 4000, 23.0), (100, 0, 0.0), (0, 0, 0.0)])
def test_the_bytes_per_token_are_zero_if_there_is_none(active_bytes, n_tokens, expected):
    stats = ModelStats(
        model_name="m", fingerprint=b"", n_active=1, active_bytes=active_bytes, n_tokens=n_tokens, hit_count=0
    )
    assert stats.bytes_per_token == expected


@pytest.mark.parametrize(
    "kind", [v for v in vars(values).values() if dataclasses.is_dataclass(v)], ids=lambda k: k.__name__
)
def test_a_value_cannot_be_changed_and_its_parts_are_named(kind):
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))


# -- print(result) -------------------------------------------------------------------------------------------------------


def checkpoint(**given) -> Checkpoint:
    fields = {
        "ckpt_no": 1,
        "id": "7976cafa2ebb" + "0" * 20,
        "model_name": "smollm2",
        "fingerprint": bytes(32),
        "input_hash": bytes(32),
        "tokens_hash": bytes(32),
        "n_tokens": 1131,
        "memory_kind": MemoryKind.FULL,
        "file_path": "ab/x.ckpt",
        "file_size": 2 << 20,
        "payload_crc32": 0,
        "status": Status.ACTIVE,
        "stale_reason": None,
        "stale_us": None,
        "created_us": 0,
        "last_used_us": 0,
        "hit_count": 0,
        "prefill_ms": None,
        "expires_us": None,
        "lease_until_us": None,
        "verified_us": None,
        "pinned": False,
        "label": None,
    }
    return Checkpoint(**{**fields, **given})


def match(outcome=Outcome.HIT, **given) -> MatchResult:
    return MatchResult(outcome=outcome, input_hash=bytes(32), **given)


def restored(outcome=Outcome.HIT, **given) -> RestoreResult:
    fields = {"reason": "", "n_restored": 0, "n_evaluated": 0, "checkpoint": None, "elapsed_s": 0.061}
    return RestoreResult(outcome=outcome, **{**fields, **given})


def saved(outcome=SaveOutcome.SAVED, **given) -> SaveResult:
    fields = {"checkpoint": checkpoint(), "bytes_written": 2 << 20, "elapsed_s": 0.25}
    return SaveResult(outcome=outcome, **{**fields, **given})


def warmed(restore, save=None, **given) -> WarmResult:
    fields = {"n_restored": 0, "n_evaluated": 0, "elapsed_s": 2.5}
    return WarmResult(restore=restore, save=save, **{**fields, **given})


FINGERPRINT = Fingerprint(digest=b"\x0a\xff" + bytes(30), fields={})
SHAPE = ModelDimensions(n_layer=30, n_kv_head=3, kv_token_bytes=23040)
HIT = restored(n_restored=1130, n_evaluated=1, checkpoint=checkpoint())
MISS = restored(Outcome.NO_MATCH, reason="no checkpoint begins like this input")
LOST = StoreUnavailable(path="/mnt/store", reason="not mounted\nnow")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (match(reason="the same input", checkpoint=checkpoint(), n_matching=1131, n_reusable=1130, n_tokens=1131),
         "hit: 1,131 of 1,131 tokens match, 1,130 can be restored: the same input (checkpoint 7976cafa2ebb)"),
        (match(Outcome.NO_MATCH, reason="too short"), "no match: too short"),
        (match(Outcome.NO_MATCH, reason="too short", nearest=checkpoint()),
         "no match: too short (nearest: checkpoint 7976cafa2ebb)"),
        (match(Outcome.FAILED, reason="the database is gone"), "match failed: the database is gone"),
        (saved(), "saved 1,131 tokens, wrote 2.0 MiB, in 250.0 ms (checkpoint 7976cafa2ebb)"),
        (saved(SaveOutcome.DEDUPLICATED, bytes_written=0), "already saved: 1,131 tokens (checkpoint 7976cafa2ebb)"),
        (saved(SaveOutcome.REFUSED, checkpoint=None, bytes_written=0, reason="over max_bytes"),
         "save refused: over max_bytes"),
        (HIT, "restored 1,130 tokens, evaluated 1, in 61.0 ms (checkpoint 7976cafa2ebb)"),
        (restored(n_restored=1, checkpoint=checkpoint()), "restored 1 token, in 61.0 ms (checkpoint 7976cafa2ebb)"),
        (MISS, "not restored: no checkpoint begins like this input"),
        (restored(Outcome.FAILED, reason="CRC32\nFAILED"), "restore failed: CRC32\\nFAILED"),
        (MergeResult(checkpoint=checkpoint(), n_merged=50, n_held=1150, elapsed_s=0.004),
         "merged 50 tokens, the engine holds 1,150, in 4.0 ms (checkpoint 7976cafa2ebb)"),
        (warmed(HIT, n_restored=1130, n_evaluated=1, elapsed_s=0.061),
         "restored 1,130 tokens, evaluated 1, in 61.0 ms (checkpoint 7976cafa2ebb)"),
        (warmed(MISS, saved(), n_evaluated=1131),
         "evaluated 1,131 tokens, in 2.5 s; saved 1,131 tokens, wrote 2.0 MiB, in 250.0 ms (checkpoint 7976cafa2ebb); "
         "not restored: no checkpoint begins like this input"),
        (warmed(HIT, saved(SaveOutcome.REFUSED, checkpoint=None, reason="no room"), n_restored=9, n_kept=1, n_evaluated=2,
                waited_s=3.0, gave_up=True),
         "restored 9 tokens, kept 1, evaluated 2, in 2.5 s (checkpoint 7976cafa2ebb); save refused: no room; "
         "waited 3.0 s for another process, which had not finished"),
        (warmed(restored(Outcome.FAILED, reason=str(LOST)), n_evaluated=7, problem=LOST),
         f"evaluated 7 tokens, in 2.5 s; without the registry: {str(LOST).replace(chr(10), chr(92) + 'n')}"),
        (checkpoint(), "checkpoint 7976cafa2ebb of smollm2: 1,131 tokens, 2.0 MiB, ACTIVE"),
        (checkpoint(label="night", pinned=True, parent_no=7, start_token=1000, status=Status.STALE,
                    stale_reason=StaleReason.EVICTED),
         "checkpoint 7976cafa2ebb of smollm2: 1,131 tokens, a delta from token 1,000, 2.0 MiB, label night, "
         "STALE (evicted), pinned"),
        (checkpoint(model_name="two\nlines", label="a\x1b[31m"),
         "checkpoint 7976cafa2ebb of two\\nlines: 1,131 tokens, 2.0 MiB, label a\\x1b[31m, ACTIVE"),
        (Stats(n_active=5, n_stale=1, active_bytes=2 << 20, stale_bytes=10, n_tokens=12345, hit_count=1, spared_ms=3000),
         "5 ACTIVE (2.0 MiB, 12,345 tokens), 1 STALE (10 B), 0 models, 1 hit, 3.0 s of evaluation saved"),
        (ModelStats(model_name="smollm2", fingerprint=FINGERPRINT.digest, n_active=1, active_bytes=92_000, n_tokens=4000,
                    hit_count=7),
         "smollm2: 1 checkpoint, 4,000 tokens, 89.8 KiB (23 B per token), 7 hits (fingerprint 0aff00000000)"),
        (RegisteredModel(fingerprint=FINGERPRINT, model_name="smollm2", dimensions=SHAPE),
         "smollm2: 30 layers, 3 KV heads, 22.5 KiB per token (fingerprint 0aff00000000)"),
        (RegisteredModel(fingerprint=FINGERPRINT, model_name="m", dimensions=dataclasses.replace(SHAPE, n_kv_head=0)),
         "m: 30 layers, 22.5 KiB per token (fingerprint 0aff00000000)"),
        (FINGERPRINT, "0aff00000000"),
        (GcPlan(items=(gc_item(5),), findings=(), n_files=3, n_rows=1, waiting=(gc_item(1),)),
         "1 item, 5 B to free; 3 files and 1 row compared, 1 for a later run"),
        (GcReport(run_no=4, done=(), freed_bytes=2048, n_failed=1, n_left=2),
         "run 4: 0 items, 2.0 KiB freed, 1 failed, 2 left for the next run"),
        (CollectionSummary(n_marked=1, n_items=2, n_failed=0, freed_bytes=3),
         "1 checkpoint marked STALE; 2 items, 3 B freed, 0 failed"),
        (Verdict(row=RowVersion(1, "7976cafa2ebb" + "0" * 20, 0, 0), model_name="m", label=None, size_bytes=9,
                 rule="its own expiry has passed", stale_reason=StaleReason.EXPIRED),
         "checkpoint 7976cafa2ebb of m (9 B): its own expiry has passed"),
    ],
)  # fmt: skip
def test_a_printed_result_is_one_line_with_outcome_counts_checkpoint_and_reason(value, line):
    assert str(value) == f"{value}" == line
    assert line.isprintable()
