"""The values of prune and gc as text."""

from __future__ import annotations

import pytest

from llama_ckpt.gc_values import GcItem, GcKind, GcOutcome, GcResult

ITEM = GcItem(kind=GcKind.ORPHAN, path="ab/cd.llam", reason="no row names it", size_bytes=1, age_s=2.0)


@pytest.mark.parametrize(
    ("outcome", "detail", "sentence"),
    [
        (GcOutcome.DELETED, "", "deleted"),
        (GcOutcome.MARKED, "", "marked"),
        (GcOutcome.QUARANTINED, "quarantine/cd.llam", "quarantined as quarantine/cd.llam"),
        (GcOutcome.SKIPPED, "it changed since the plan", "skipped: it changed since the plan"),
        (GcOutcome.FAILED, "the disk failed", "failed: the disk failed"),
    ],
)
def test_a_result_of_gc_is_one_sentence(outcome, detail, sentence):
    assert str(GcResult(item=ITEM, outcome=outcome, detail=detail)) == sentence
