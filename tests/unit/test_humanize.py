"""Numbers, sizes, durations and times: one form for each."""

from __future__ import annotations

import pytest

from llama_ckpt.humanize import bytes_, duration, number, plural, timestamp


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (96_678_000, "92.2 MiB"),
        (5 << 40, "5.0 TiB"),
        (9 << 50, "9,216.0 TiB"),
    ],
)
def test_bytes_have_one_decimal_and_a_binary_unit(n_bytes, shown):
    assert bytes_(n_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0032, "3.2 ms"), (4.5, "4.5 s"), (720, "12.0 min"), (12_240, "3.4 h"), (432_000, "5.0 d"), (2e8, "2,314.8 d")],
)
def test_durations_have_one_decimal_and_one_unit(seconds, shown):
    assert duration(seconds) == shown


def test_counts_have_thousands_separators_and_their_noun():
    assert number(1_234_567) == "1,234,567"
    assert [plural(n, "file") for n in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    assert [plural(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]


def test_times_are_utc_to_the_second():
    assert timestamp(1_777_645_800_999_999) == "2026-05-01 14:30:00 UTC"
    assert timestamp(None) == "-"
