from __future__ import annotations

import pytest
from support.sample_engine import SampleEngine

from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.registry import Registry
from llama_ckpt.values import StaleReason

NEWEST_FIRST = ["crlf", "two", "one", "other"]
NASTY = "\x1b[31mred\x1b[0m\a\u009b2J [bold]x[/bold]\r\n"


def ids(populated, names):
    return [populated.ids[name] for name in names]


def made_stale(populated, name, reason):
    populated.set_row(
        name, status="STALE", active_key=None, stale_reason=reason.value, stale_us=populated.row(name).created_us
    )


# -- ls -----------------------------------------------------------------------------------------------------------------


def test_ls_lists_the_newest_first(run, populated):
    assert run("ls", "-q").succeeded().lines == ids(populated, NEWEST_FIRST)
    assert [c["id"] for c in run("ls", "--json").succeeded().json()] == ids(populated, NEWEST_FIRST)


def test_ls_shows_what_tells_checkpoints_apart(run, populated):
    table = run("ls").succeeded()
    line = next(line for line in table.lines if populated.ids["one"][:12] in line)
    assert {"sample", "3", "KiB", "ACTIVE", "mine", "ago"} <= set(line.split())
    heads = next(line for line in table.lines if "tokens" in line)
    assert heads.split() == ["id", "model", "tokens", "size", "saved", "used", "hits", "status", "label"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--model", "other"], ["other"]),
        (["-m", "sample"], ["crlf", "two", "one"]),
        (["--label", "mine"], ["one"]),
        (["--limit", "2"], ["crlf", "two"]),
        (["-n", "1", "--model", "sample"], ["crlf"]),
        (["--model", "sample", "--label", "mine"], ["one"]),
    ],
)
def test_ls_filters(run, populated, options, names):
    assert run("ls", *options, "-q").succeeded().lines == ids(populated, names)


@pytest.mark.parametrize("options", [["--model", "unknown"], ["--label", "unknown"], ["--label", "' OR 1=1 --"]])
def test_an_empty_list_is_told_on_stderr_and_is_no_error(run, populated, options):
    listed = run("ls", *options)
    assert (listed.code, listed.out) == (0, "")
    assert "no ACTIVE checkpoints" in listed.err
    assert run("ls", *options, "--json").json() == []
    quiet = run("ls", *options, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


def test_a_list_that_was_cut_says_so(run, populated):
    assert "--limit lists more" in run("ls", "--limit", "3").err


def test_a_list_that_is_just_whole_does_not_say_that_it_was_cut(run, populated):
    assert run("ls", "--limit", "4").err == ""


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_limit_that_is_none_is_a_wrong_use(run, populated, limit):
    assert run("ls", "--limit", limit).code == 2


def test_stale_checkpoints_are_listed_when_they_are_asked_for_with_the_reason(run, populated):
    run("rm", populated.ids["two"]).succeeded()
    assert run("ls", "-q").lines == ids(populated, ["crlf", "one", "other"])
    assert run("ls", "--all", "-q").lines == ids(populated, NEWEST_FIRST)
    assert "STALE (removed)" in run("ls", "-a").out


def test_a_label_that_the_shell_gave_as_no_text_matches_nothing(run, populated):
    assert "internal error" not in run("ls", "--label", "\udcff").err


def test_control_characters_of_a_label_are_spelt_out(run, populated):
    populated.set_row("one", label=NASTY)
    for shown in (run("ls").succeeded().out, run("show", populated.ids["one"]).succeeded().out):
        assert not {"\x1b", "\a", "\u009b", "\r"} & set(shown)
        assert r"\x1b[31mred\x1b[0m\x07\x9b2J [bold]x[/bold]\r\n" in shown


@pytest.mark.parametrize("label", [NASTY, "no-break\u00a0space", "soft\u00adhyphen", "\U000e0001"], ids=ascii)
def test_a_label_of_any_characters_is_told_exactly_by_json(run, populated, label):
    populated.set_row("one", label=label)
    shown = run("show", populated.ids["one"], "--json").succeeded()
    assert shown.json()["label"] == label
    assert all(c.isprintable() or c == "\n" for c in shown.out)


@pytest.fixture
def nasty_model(populated, monkeypatch):
    """A checkpoint of a model whose name steers terminals."""
    engine = SampleEngine(weights="ef" * 32, model_name=f"model {NASTY}")
    engine.evaluate(engine.ids)
    with Registry.open(store=populated.root) as registry:
        saved = registry.save(engine, "of the nasty model").checkpoint
    populated.ids["nasty"] = saved.id
    return f"model {NASTY}"


@pytest.mark.parametrize(
    "words", [["ls"], ["show"], ["match", "--text", "of the nasty model"], ["stats"]], ids=" ".join
)
def test_control_characters_of_a_models_name_are_spelt_out(run, populated, nasty_model, words):
    shown = run(*words, *([populated.ids["nasty"]] if words == ["show"] else [])).succeeded().out
    assert r"model \x1b[31mred" in shown
    assert not {"\x1b", "\a", "\u009b", "\r"} & set(shown)


def test_control_characters_of_a_models_name_are_spelt_out_in_a_reason(run, populated, nasty_model):
    shown = run("match", "--text", "of the nasty model", "--model", "unknown").out
    assert "such as model" in shown
    assert not {"\x1b", "\a", "\u009b", "\r"} & set(shown)


def test_control_characters_of_a_files_metadata_are_spelt_out_by_inspect(run, populated, nasty_model):
    shown = run("inspect", populated.path("nasty")).succeeded().out
    assert "model" in shown
    assert not {"\x1b", "\a", "\u009b", "\r"} & set(shown)


# -- show ---------------------------------------------------------------------------------------------------------------


def test_show_says_everything_of_one_checkpoint(run, populated):
    shown = run("show", populated.ids["one"]).succeeded().fields
    row = populated.row("one")
    assert shown["id"] == populated.ids["one"]
    assert shown["status"] == "ACTIVE"
    assert shown["model"] == "sample"
    assert shown["input SHA-256"] == populated.hash_of("one")
    assert shown["fingerprint"] == row.fingerprint.hex()
    assert shown["file"].startswith(str(populated.path("one")))
    assert shown["payload CRC-32"] == f"{row.payload_crc32:08x}"
    assert (shown["type_k"], shown["type_v"]) == ("f16", "f16")
    assert (shown["label"], shown["pinned"], shown["hits"]) == ("mine", "no", "0")
    assert shown["evaluation took"] == "1.5 s"
    assert shown["expires"] == shown["last verified"] == "-"


@pytest.mark.parametrize("command", ["show", "pin", "unpin", "rm"])
def test_an_id_may_be_cut_to_its_first_digits_in_either_case(run, populated, command):
    cut = populated.ids["one"][:12].upper()
    ran = run(command, cut, "--json").succeeded().json()
    assert (ran if command == "show" else ran[0])["id"] == populated.ids["one"]


@pytest.mark.parametrize("command", ["show", "pin", "unpin", "rm", "verify"])
@pytest.mark.parametrize(
    ("given", "kind"),
    [("0" * 32, NotFound), ("abc", BadInput), ("no-hex-at-all", BadInput), ("%%%%", BadInput), ("0" * 33, BadInput)],
)
def test_an_id_of_nothing_is_told(run, populated, command, given, kind):
    before = populated.snapshot()
    run(command, given).refused(kind, given)
    assert populated.snapshot() == before


@pytest.mark.parametrize("command", ["show", "pin", "unpin", "rm", "verify"])
def test_digits_that_two_ids_begin_with_are_refused(run, populated, command):
    for name, digit in (("one", "1"), ("two", "2")):
        populated.set_row(name, id="abcd" + digit * 28)
    run(command, "abcd").refused(BadInput, "several ids begin like this")


@pytest.mark.parametrize("command", ["show", "pin", "unpin", "rm"])
def test_a_command_about_a_checkpoint_needs_an_id(run, populated, command):
    ran = run(command)
    assert (ran.code, ran.out) == (2, "")
    assert "Missing argument" in ran.err


def test_show_of_a_stale_checkpoint_says_why_and_since_when(run, populated):
    run("rm", populated.ids["one"]).succeeded()
    assert run("show", populated.ids["one"]).fields["status"].startswith("STALE: removed, 20")


def test_show_quiet_prints_the_files_path(run, populated):
    (path,) = run("show", populated.ids["one"], "-q").succeeded().lines
    assert (populated.root / path).samefile(populated.path("one"))


def test_show_of_a_checkpoint_whose_file_is_gone_shows_the_row_all_the_same(run, populated):
    populated.path("one").unlink()
    assert run("show", populated.ids["one"]).succeeded().fields["id"] == populated.ids["one"]


# -- pin, unpin, rm -----------------------------------------------------------------------------------------------------


def test_a_pinned_checkpoint_is_shown_so_and_cannot_be_removed_before_it_is_unpinned(run, populated):
    one = populated.ids["one"]
    assert run("pin", one).succeeded().out == f"{one} pinned\n"
    assert "ACTIVE pinned" in run("ls").out
    assert run("show", one).fields["pinned"] == "yes"
    run("rm", one).refused(BadInput, one, "unpin it first")
    assert populated.row("one").status == "ACTIVE"
    assert run("unpin", one).succeeded().out == f"{one} unpinned\n"
    run("rm", one).succeeded()
    assert populated.row("one").status == "STALE"


def test_pinning_twice_and_unpinning_what_has_no_pin_are_no_errors(run, populated):
    one = populated.ids["one"]
    for command in ("pin", "pin", "unpin", "unpin"):
        run(command, one).succeeded()
    assert populated.row("one").pinned == 0


@pytest.mark.parametrize("command", ["pin", "unpin", "rm"])
def test_several_checkpoints_are_changed_at_once(run, populated, command):
    given = ids(populated, ["one", "two"])
    assert run(command, *given, "-q").succeeded().lines == given


def test_rm_makes_the_row_stale_and_leaves_the_file_to_gc(run, populated):
    removed = run("rm", populated.ids["one"]).succeeded()
    assert removed.out.startswith(populated.ids["one"])
    assert "gc deletes its file after the grace period" in removed.out
    row = populated.row("one")
    assert (row.status, row.stale_reason) == ("STALE", "removed")
    assert populated.path("one").exists()


def test_an_rm_that_fails_half_way_says_what_it_has_removed(run, populated):
    ran = run("rm", populated.ids["one"], "0" * 32)
    ran.failed(NotFound)
    assert populated.row("one").status == "ACTIVE" or populated.ids["one"] in ran.out


def test_an_rm_of_a_stale_checkpoint_says_the_reason_that_stands_in_the_row(run, populated):
    made_stale(populated, "one", StaleReason.CORRUPT)
    removed = run("rm", populated.ids["one"]).succeeded().out
    assert populated.row("one").stale_reason == "corrupt"
    assert "corrupt" in removed
