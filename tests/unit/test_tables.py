"""Tables that fit the terminal."""

from __future__ import annotations

import pytest

from llama_ckpt_cli.tables import Column, Shorten, lines_of, shortened, text_width

PATH = "ab/cd/0123456789abcdef0123456789abcdef.llam"


def table(columns, *rows, width=None):
    return lines_of(columns, rows, width)


def test_without_a_terminal_every_cell_is_complete():
    columns = [Column(name="id", shorten=Shorten.PREFIX, at_most=4), Column(name="file", shorten=Shorten.MIDDLE)]
    assert table(columns, ["0123456789", PATH])[-1].split() == ["0123456789", PATH]


def test_a_table_starts_with_its_head_and_a_rule():
    assert table([Column(name="n", right=True), Column(name="file")], ["1,234", "a"]) == [
        "    n  file",
        "─────────────"[: 5 + 2 + 4],
        "1,234  a",
    ]


def test_a_name_loses_its_middle_and_keeps_both_ends():
    assert shortened("Llama-3.1-8B-Instruct-Q4_K_M", 13, Shorten.MIDDLE) == "Llama-…Q4_K_M"


def test_an_id_keeps_digits_that_a_command_takes():
    assert shortened("0123456789abcdef", 8, Shorten.PREFIX) == "01234567"


def test_a_sentence_loses_its_end():
    assert shortened("no row names it", 8, Shorten.END) == "no row …"


@pytest.mark.parametrize("how", [Shorten.MIDDLE, Shorten.PREFIX, Shorten.END])
@pytest.mark.parametrize("text", ["日本語のモデル", "e\u0301" * 9, "plain text of some length"])
@pytest.mark.parametrize("width", [3, 4, 7])
def test_wide_and_combining_characters_take_the_room_that_a_terminal_gives_them(how, text, width):
    assert text_width(shortened(text, width, how)) <= width


def test_cells_that_must_not_be_shortened_never_are():
    columns = [Column(name="status"), Column(name="model", shorten=Shorten.MIDDLE, at_least=5)]
    assert table(columns, ["ACTIVE", "a long name of a model"], width=14)[-1].startswith("ACTIVE  ")


def test_the_widest_columns_are_shortened_first_and_only_as_far_as_needed():
    columns = [Column(name=name, shorten=Shorten.MIDDLE, at_least=4) for name in ("a", "b")]
    assert table(columns, ["x" * 6, "y" * 20], width=20)[-1] == f"xxxxxx  {'y' * 6}…{'y' * 5}"


def test_columns_are_left_out_lowest_rank_first_and_no_more_than_needed():
    columns = [
        Column(name="id"),
        Column(name="used", drop_rank=2),
        Column(name="hits", drop_rank=1),
        Column(name="status"),
    ]
    row = ["01234567", "3.2 d ago", "12", "ACTIVE"]
    assert table(columns, row, width=80)[0].split() == ["id", "used", "hits", "status"]
    assert table(columns, row, width=28)[0].split() == ["id", "used", "status"]
    assert table(columns, row, width=20)[0].split() == ["id", "status"]


def test_a_head_is_never_shortened():
    columns = [Column(name="fingerprint", shorten=Shorten.PREFIX, at_least=4), Column(name="x")]
    assert table(columns, ["0123456789abcdef", "1"], width=3)[0] == "fingerprint  x"


def test_a_reason_goes_on_below_itself_and_breaks_between_words():
    columns = [Column(name="rule"), Column(name="why", shorten=Shorten.WRAP, at_least=10)]
    lines = table(columns, ["max_age", "saved 40 days ago, the limit is 30 days"], width=31)
    assert lines[2:] == ["max_age  saved 40 days ago, the", "         limit is 30 days"]


def test_a_table_without_rows_has_its_head():
    assert table([Column(name="rule"), Column(name="why", shorten=Shorten.WRAP)]) == ["rule  why", "─────────"]
