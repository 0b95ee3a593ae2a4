"""The words of values that people see."""

from __future__ import annotations

import dataclasses

import pytest

from llama_ckpt import values
from llama_ckpt.gc_values import GcItem, GcKind, GcPlan
from llama_ckpt.values import (
    Check,
    Difference,
    Fingerprint,
    MemoryKind,
    ModelStats,
    Outcome,
    SaveOutcome,
    StaleReason,
    Status,
)


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (Check(name="Header", ok=True), "Header OK"),
        (Check(name="CRC32", ok=True), "CRC32 OK"),
        (Check(name="Structure", ok=True), "Structure OK"),
        (Check(name="Dimensions", ok=True), "Dimensions match model"),
        (Check(name="Row", ok=True), "Row OK"),
        (Check(name="Header", ok=False, detail="no LLAM magic"), "Header FAILED: no LLAM magic"),
        (Check(name="CRC32", ok=False), "CRC32 FAILED"),
        (Check(name="Dimensions", ok=False, detail="n_layer is 32"), "Dimensions differ from model: n_layer is 32"),
        (Check(name="Dimensions", ok=None, detail="the model is not registered here"),
         "Dimensions not checked: the model is not registered here"),
        (Check(name="CRC32", ok=None, detail="Header failed"), "CRC32 not checked: Header failed"),
        (Check(name="Header", ok=True, detail="after 8 zero bytes before the magic"),
         "Header OK: after 8 zero bytes before the magic"),
    ],
)  # fmt: skip
def test_a_check_is_one_line(check, line):
    assert str(check) == line


def test_a_difference_is_told_with_both_sides():
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
def test_a_gc_plan_tells_the_bytes_it_frees(sizes, total):
    plan = GcPlan(items=tuple(map(gc_item, sizes)), findings=(), n_files=0, n_rows=0)
    assert plan.size_bytes == total


@pytest.mark.parametrize(("active_bytes", "n_tokens", "expected"), [(92_000, 4000, 23.0), (100, 0, 0.0), (0, 0, 0.0)])
def test_the_bytes_a_token_costs_are_told_even_where_there_is_none(active_bytes, n_tokens, expected):
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
