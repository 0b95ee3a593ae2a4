from __future__ import annotations

import os
import shutil
import time

import pytest

from llama_ckpt.errors import BadInput, Busy, StoreMismatch, StoreUnavailable, VerifyFailed
from llama_ckpt.registry import Registry
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import Store, path_of

DAY = 24 * 3600


def status(populated, name):
    row = populated.row(name)
    return None if row is None else row.status


def ghost(populated, checkpoint_id, suffix=".llam", age_s=0.0):
    """A file that no row names, of some age."""
    path = populated.root / path_of(checkpoint_id).replace(".llam", suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(populated.path("one"), path)
    made_at = time.time() - age_s
    os.utime(path, (made_at, made_at))
    return path


@pytest.fixture
def removed(run, populated):
    """The checkpoint "one" went STALE two days ago."""
    run("rm", populated.ids["one"])
    populated.made_older("one", "stale_us", 2 * DAY)


# -- prune --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "option"), [("created_us", "--max-age"), ("last_used_us", "--max-idle")], ids=["age", "idle"]
)
def test_prune_marks_what_is_older_than_the_limit_and_no_other(run, populated, column, option):
    populated.made_older("one", column, 40 * DAY)
    populated.made_older("two", column, 20 * DAY)
    assert run("prune", option, "30d", "--yes", "-q").succeeded().lines == [populated.ids["one"]]
    row = populated.row("one")
    assert (row.status, row.stale_reason) == ("STALE", "evicted")
    assert [status(populated, name) for name in ("two", "crlf", "other")] == ["ACTIVE"] * 3
    assert populated.path("one").exists()


def test_prune_without_a_limit_marks_what_has_outlived_its_own_expiry(run, populated):
    populated.made_older("two", "created_us", 400 * DAY)
    populated.set_row("one", expires_us=populated.row("one").created_us)
    assert run("prune", "--yes", "-q").succeeded().lines == [populated.ids["one"]]
    assert populated.row("one").stale_reason == "expired"


def test_pinned_checkpoints_and_those_that_a_reader_has_survive_prune(run, populated):
    run("pin", populated.ids["one"])
    populated.set_row("two", lease_until_us=int((time.time() + 60) * 1_000_000))
    marked = run("prune", "--max-age", "0s", "--yes", "-q").succeeded().lines
    assert set(marked) == {populated.ids["other"]}, "crlf is the newest"


def test_a_dry_prune_tells_the_rule_and_changes_nothing(run, populated):
    populated.made_older("one", "created_us", 40 * DAY)
    before = populated.snapshot()
    shown = run("prune", "--max-age", "30d", "--dry-run").succeeded()
    assert populated.ids["one"][:12] in shown.out
    assert "max_age" in shown.out
    assert shown.lines[-1].startswith("1 checkpoint would be marked STALE")
    assert run("prune", "--max-age", "30d", "--dry-run", "-q").lines == [populated.ids["one"]]
    (verdict,) = run("prune", "--max-age", "30d", "--dry-run", "--json").json()
    assert (verdict["row"]["id"], verdict["stale_reason"]) == (populated.ids["one"], "evicted")
    assert populated.snapshot() == before


def test_a_prune_that_finds_nothing_asks_nothing_and_changes_nothing(run, populated):
    before = populated.snapshot()
    assert run("prune", "--max-age", "30d").succeeded().lines[-1].startswith("0 checkpoints")
    assert populated.snapshot() == before


def test_the_limits_of_prune_come_from_the_settings_and_the_flag_goes_before(run, populated, monkeypatch):
    populated.made_older("one", "created_us", 40 * DAY)
    populated.made_older("two", "created_us", 20 * DAY)
    monkeypatch.setenv("LLAMA_CKPT_MAX_AGE", "10d")
    assert set(run("prune", "--dry-run", "-q").lines) == {populated.ids["one"], populated.ids["two"]}
    assert run("prune", "--dry-run", "-q", "--max-age", "30d").lines == [populated.ids["one"]]


# -- gc -----------------------------------------------------------------------------------------------------------------


def test_gc_frees_what_has_been_stale_for_longer_than_the_grace(run, populated, removed):
    run("rm", populated.ids["two"])
    size = populated.path("one").stat().st_size
    assert run("gc", "--yes", "-q").succeeded().lines == [str(size)]
    assert not populated.path("one").exists()
    assert [status(populated, name) for name in ("one", "two", "crlf", "other")] == [None, "STALE", "ACTIVE", "ACTIVE"]
    assert populated.path("two").exists()


def test_a_grace_of_nothing_frees_what_was_removed_just_now(run, populated):
    run("rm", populated.ids["one"])
    report = run("gc", "--stale-grace", "0s", "--yes").succeeded()
    assert any(populated.ids["one"] in line and "deleted" in line for line in report.lines)
    assert report.lines[-1].startswith("run 1: freed ")
    assert not populated.path("one").exists()
    assert "no checkpoint" in run("show", populated.ids["one"]).err


def test_a_checkpoint_that_was_pinned_after_it_went_stale_survives_gc(run, populated, removed):
    run("pin", populated.ids["one"])
    assert run("gc", "--yes", "-q").succeeded().lines == ["0"]
    assert populated.path("one").exists()
    run("unpin", populated.ids["one"])
    run("gc", "--yes").succeeded()
    assert not populated.path("one").exists()


def test_files_without_a_row_go_when_they_are_older_than_the_grace(run, populated):
    old = [ghost(populated, "ab" * 16, age_s=2 * 3600), ghost(populated, "ac" * 16, ".tmp", age_s=2 * 3600)]
    young = [ghost(populated, "ad" * 16, age_s=1800), ghost(populated, "ae" * 16, ".tmp", age_s=1800)]
    told = run("gc", "--yes")
    assert told.code == 0
    assert "2 ghosts left for a later run" in told.err
    assert [path.exists() for path in old + young] == [True] * 4, "no run had seen them before"
    plan = run("gc", "--dry-run", "--json").succeeded().json()
    assert sorted(item["kind"] for item in plan["items"]) == ["orphan", "temporary"]
    run("gc", "--yes").succeeded()
    assert [path.exists() for path in old + young] == [False, False, True, True]
    run("gc", "--yes", "--ghost-grace", "10m", "--now").succeeded()
    assert [path.exists() for path in young] == [False, False]
    run("verify", "--all").succeeded()


def test_a_row_whose_file_is_gone_is_marked(run, populated):
    populated.path("one").unlink()
    report = run("gc", "--yes", "--json").succeeded().json()
    assert [(item["kind"], result) for item, result in report["done"]] == [("missing", "marked")]
    assert populated.row("one").stale_reason == "missing"


def test_foreign_things_in_the_store_are_named_and_left_alone(run, populated):
    foreign = populated.path("one").with_name("notes \x1b[31m.txt")
    foreign.write_text("mine")
    os.utime(foreign, (0, 0))
    ran = run("gc", "--yes", "--ghost-grace", "0s")
    assert ran.code == 0
    assert "left alone" in ran.err
    assert r"notes \x1b[31m.txt" in ran.err
    assert "\x1b" not in ran.err
    assert foreign.read_text() == "mine"


def test_a_dry_gc_shows_the_plan_and_changes_nothing(run, populated, removed):
    orphan = ghost(populated, "ab" * 16, age_s=2 * 3600)
    before = populated.snapshot()
    shown = run("gc", "--dry-run", "--now").succeeded()
    for path in (populated.path("one"), orphan):
        assert str(path.relative_to(populated.root)) in shown.out
    assert shown.lines[-1].startswith("2 items, ")
    assert "compared 4 rows with 5 files" in shown.lines[-1]
    assert len(run("gc", "--dry-run", "--now", "-q").succeeded().lines) == 2
    assert len(run("gc", "--dry-run", "--now", "--json").succeeded().json()["items"]) == 2
    assert populated.snapshot() == before


def test_a_dry_run_with_yes_is_a_dry_run(run, populated, removed):
    before = populated.snapshot()
    run("gc", "--dry-run", "--yes").succeeded()
    run("prune", "--max-age", "0s", "--dry-run", "--yes").succeeded()
    assert populated.snapshot() == before


@pytest.mark.parametrize("words", [["prune", "--max-age", "0s"], ["gc"]], ids=" ".join)
def test_a_dry_run_where_no_registry_is_makes_none(run, tmp_path, monkeypatch, words):
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(tmp_path / "nothing"))
    run(*words, "--dry-run")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("words", [["prune", "--max-age", "0s"], ["gc"]], ids=" ".join)
def test_a_dry_run_does_not_upgrade_an_older_schema(run, populated, removed, words):
    run("db", "downgrade", "0001", "--yes").succeeded()
    before = populated.snapshot()
    run(*words, "--dry-run")
    assert populated.snapshot() == before


def test_a_file_that_cannot_be_deleted_is_told_and_the_rest_goes(run, populated, removed, monkeypatch):
    orphan = ghost(populated, "ab" * 16, age_s=2 * 3600)
    real = Store.remove

    def remove(self, relative, **options):
        if relative.endswith(populated.path("one").name):
            raise StoreUnavailable(path=relative, reason="Permission denied (errno EACCES)")
        return real(self, relative, **options)

    monkeypatch.setattr(Store, "remove", remove)
    ran = run("gc", "--yes", "--now")
    assert any(populated.ids["one"] in line and "EACCES" in line for line in ran.lines)
    assert "1 file could not be deleted" in ran.lines[-1]
    assert (populated.path("one").exists(), orphan.exists()) == (True, False)


# -- who is asked -------------------------------------------------------------------------------------------------------

ACTING = [["prune", "--max-age", "0s"], ["gc"]]


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
@pytest.mark.parametrize("form", [[], ["--json"], ["--quiet"]], ids=["", "json", "quiet"])
def test_without_a_terminal_nothing_is_done_unless_yes_was_said(run, populated, removed, words, form):
    before = populated.snapshot()
    ran = run(*words, *form)
    ran.failed(BadInput, "there is no terminal to ask on", "--yes", "--dry-run", out="" if form else None)
    assert populated.snapshot() == before


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
@pytest.mark.parametrize("said", ["n", "", "no"])
def test_a_person_who_does_not_agree_changes_nothing(run, populated, removed, answer, words, said):
    before = populated.snapshot()
    answer(said)
    ran = run(*words)
    assert ran.code == 0
    assert "[y/N]" in ran.err
    assert "nothing was changed" in ran.err
    assert populated.snapshot() == before


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
def test_a_person_sees_the_plan_before_the_question(run, populated, removed, answer, words):
    answer("n")
    shown = run(*words).out
    assert populated.ids["two" if words[0] == "prune" else "one"][:12] in shown


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
def test_a_person_who_agrees_gets_the_json_alone_on_stdout(run, populated, removed, answer, words):
    answer("y")
    ran = run(*words, "--json")
    assert ran.code == 0
    assert ran.json()
    assert status(populated, "two" if words[0] == "prune" else "one") in ("STALE", None)


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
def test_a_person_who_agrees_gets_the_bare_values_alone_on_stdout(run, populated, removed, answer, words):
    answer("y")
    lines = run(*words, "--quiet").lines
    active = {populated.ids[name] for name in ("two", "other")}  # and crlf, the newest, stays
    assert set(lines) == ({str(populated.path("two").stat().st_size)} if words[0] == "gc" else active)


@pytest.mark.parametrize("words", ACTING, ids=" ".join)
def test_ctrl_c_at_the_question_changes_nothing(run, populated, removed, answer, words):
    before = populated.snapshot()
    answer(None)
    assert run(*words).code == 130
    assert populated.snapshot() == before


# -- what gc refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [[], ["--force", "wrong"]], ids=["unforced", "wrong id"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_a_store_that_looks_unmounted_is_refused_and_the_registrys_id_is_told(run, populated, removed, force, dry):
    with Registry.open(store=populated.root) as registry:
        registry_id = registry.registry_id
    (populated.root / MARKER).unlink()
    before = populated.snapshot()
    run("gc", "--yes", *force, *dry).refused(StoreMismatch, f"--force {registry_id}")
    assert populated.snapshot() == before


def test_force_with_the_right_id_goes_on(run, populated, removed):
    with Registry.open(store=populated.root) as registry:
        registry_id = registry.registry_id
    (populated.root / MARKER).unlink()
    run("gc", "--yes", "--force", registry_id).succeeded()
    assert not populated.path("one").exists()


def test_a_second_run_is_told_who_holds_the_first(run, populated, removed):
    import sqlalchemy as sa

    from llama_ckpt.db.tables import registry_lease

    with Registry.open(store=populated.root) as registry, registry.database.write() as db:
        until = int((time.time() + 100) * 1_000_000)
        db.execute(sa.update(registry_lease).values(holder="another host", fence=7, expires_us=until))
    for words in (["gc", "--yes"], ["prune", "--max-age", "0s", "--yes"]):
        run(*words).refused(Busy, "another host")
    assert populated.path("one").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "--max-age", "soon"],
        ["prune", "--max-idle", "-1d"],
        ["prune", "--max-age", "1 month"],
        ["gc", "--stale-grace", "soon"],
        ["gc", "--ghost-grace", "1y"],
    ],
    ids=" ".join,
)
def test_a_duration_that_is_none_is_told_with_the_option_that_has_it(run, populated, words):
    run(*words, "--yes").refused(BadInput, words[1], repr(words[2]), "24h")


def test_after_prune_and_gc_everything_verifies(run, populated):
    run("prune", "--max-age", "0s", "--yes").succeeded()
    run("gc", "--stale-grace", "0s", "--yes").succeeded()
    assert run("verify", "--all").code != VerifyFailed.exit_code
    assert [path.stem for path in populated.root.rglob("*.llam")] == [populated.ids["crlf"]], "the newest stays"


# -- the rest of gc ----------------------------------------------------------------------------------------------------------


def test_only_some_kinds_are_taken_when_they_are_named(run, populated, removed):
    orphan = ghost(populated, "ab" * 16, age_s=2 * 3600)
    run("gc", "--yes", "--now", "--only", "orphan").succeeded()
    assert (populated.path("one").exists(), orphan.exists()) == (True, False)
    run("gc", "--yes", "--only", "nonsense").refused(BadInput, "nonsense", "stale, orphan, unreadable")


def test_a_run_of_limited_size_says_what_it_left(run, populated, removed):
    ghost(populated, "ab" * 16, age_s=2 * 3600)
    ran = run("gc", "--yes", "--now", "--max-delete", "1").succeeded()
    assert ran.lines[-1].endswith("1 item left for the next run")
    assert run("gc", "--yes", "--now", "--max-duration", "0s").succeeded().lines[-1].endswith("left for the next run")


def test_the_runs_are_listed_the_last_first(run, populated, removed):
    run("gc", "--yes").succeeded()
    run("prune", "--max-age", "0s", "--yes").succeeded()
    shown = run("gc", "runs").succeeded()
    assert [line.split()[:2] for line in shown.lines if line.strip()[:1].isdigit()] == [["2", "prune"], ["1", "gc"]]
    assert [r["kind"] for r in run("gc", "runs", "-n", "1", "--json").json()] == ["prune"]


# -- policy ------------------------------------------------------------------------------------------------------------------


def test_a_policy_stands_in_its_section_of_the_settings_file(run, populated, monkeypatch, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('[policy]\nmax_count = 1\norder = "oldest"\n')
    monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(file))
    marked = run("prune", "--yes", "-q").succeeded().lines
    assert set(marked) == {populated.ids[name] for name in ("other", "one", "two")}
    assert "max_count" in run("config", "--json").out


def test_over_a_limit_of_bytes_as_much_goes_as_is_too_much(run, populated):
    size = populated.row("one").file_size
    shown = run("prune", "--max-bytes", str(3 * size), "--order", "lru", "--dry-run").succeeded()
    assert shown.lines[-1].startswith("1 checkpoint would be marked STALE")
    assert "over max_bytes" in shown.out


@pytest.mark.parametrize(
    "words",
    [
        ["--max-bytes", "much"],
        ["--max-count", "-1"],
        ["--order", "newest"],
        ["--min-free", "150%"],
        ["--low-water", "0.5"],
        ["--half-life", "soon"],
    ],
    ids=" ".join,
)
def test_a_value_of_the_policy_that_is_none_is_told_with_its_option(run, populated, words):
    run("prune", "--yes", *words).refused(BadInput, words[0].strip("-").split("-")[0], words[1])


def test_explain_says_which_rule_keeps_or_condemns(run, populated):
    populated.made_older("one", "created_us", 40 * DAY)
    shown = run("explain", populated.ids["one"], "--max-age", "30d").succeeded()
    assert "max_age" in shown.out
    assert run("explain", populated.ids["one"], "--max-age", "30d", "-q").lines == ["condemns"]
    run("pin", populated.ids["one"])
    assert run("explain", populated.ids["one"], "--max-age", "30d", "-q").lines == ["keeps"]
    assert "pinned" in run("explain", populated.ids["one"], "--max-age", "30d").out


def test_explain_of_a_stale_checkpoint_says_where_to_look(run, populated, removed):
    ran = run("explain", populated.ids["one"])
    assert ran.code == 3
    assert "show" in ran.err


# -- unprune and purge -------------------------------------------------------------------------------------------------------


def test_what_prune_marked_by_mistake_comes_back(run, populated):
    run("prune", "--max-age", "0s", "--yes").succeeded()
    assert run("unprune", "--since", "1h").succeeded().lines[-1] == "3 of 3 checkpoints ACTIVE again"
    assert status(populated, "one") == "ACTIVE"
    assert run("unprune", "--since", "2020-01-01").succeeded().lines[-1] == "0 of 0 checkpoints ACTIVE again"


def test_what_cannot_come_back_is_told_with_the_reason(run, populated):
    run("rm", populated.ids["one"]).succeeded()
    populated.path("one").unlink()
    ran = run("unprune", populated.ids["one"])
    assert ran.code == VerifyFailed.exit_code
    assert "its file is freed already" in ran.out
    run("unprune").refused(BadInput, "give either ids or --since")
    run("unprune", "--since", "yesterday").refused(BadInput, "yesterday")


def test_a_purge_deletes_at_once_and_proves_it(run, populated):
    run("pin", populated.ids["one"]).succeeded()
    input_hash = populated.row("one").input_hash.hex()
    planned = run("purge", "--input-hash", input_hash, "--dry-run", "-q").succeeded().lines
    assert set(planned) == {populated.ids["one"], populated.ids["other"]}, "of every model"
    assert populated.path("one").exists()
    shown = run("purge", "--input-hash", input_hash, "--yes").succeeded()
    assert "a second look found none of them" in shown.lines[-1]
    assert (populated.path("one").exists(), status(populated, "one")) == (False, None)


def test_a_purge_of_everything_leaves_nothing(run, populated):
    run("purge", "--all", "--yes").succeeded()
    assert list(populated.root.rglob("*.llam")) == []
    assert run("ls", "-q").lines == []


@pytest.mark.parametrize(
    "words", [[], ["--all", "--label", "x"], ["--input-hash", "zz"], ["--input-hash", "abcd"]], ids=" ".join
)
def test_a_purge_that_is_not_said_exactly_is_refused(run, populated, words):
    run("purge", "--yes", *words).refused(BadInput)
    assert status(populated, "one") == "ACTIVE"
