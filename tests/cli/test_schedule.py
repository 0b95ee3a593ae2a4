"""`schedule run`, as a process of its own, and the commands about timers of the system, which are played by small scripts."""

from __future__ import annotations

import contextlib
import itertools
import os
import plistlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from llama_ckpt.collector.collector import Collector
from llama_ckpt.db import coordination
from llama_ckpt.db import schedules as rows
from llama_ckpt.db.connect import Database
from llama_ckpt.errors import BadInput, LlamaCkptError, StoreMismatch, StoreUnavailable, Unsupported
from llama_ckpt.gc_values import CollectionSummary
from llama_ckpt.registry import Registry
from llama_ckpt.store.marker import MARKER

KINDS = ["systemd", "cron", "launchd", "windows"]
PATIENCE_S = 60
DAY = 24 * 3600


# -- run -----------------------------------------------------------------------------------------------------------------


class Process:
    """A `schedule run` of its own."""

    def __init__(self, *options):
        words = [sys.executable, "-m", "llama_ckpt_cli", "schedule", "run", "--every", "1s", "--jitter", "0s", *options]
        self._popen = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._watchdog = threading.Timer(PATIENCE_S, self._popen.kill)
        self._watchdog.start()
        self.lines = []

    def ran(self, n=1):
        """Waits until `n` more runs that did something have told their line."""
        while n:
            self.lines.append(self._popen.stderr.readline())
            assert self.lines[-1], self.lines
            n -= "marked STALE" in self.lines[-1]

    def told(self, number, n=1):
        """Sends a signal, and gives exit code, stdout and the rest of stderr."""
        for _ in range(n):
            self._popen.send_signal(number)
        return self.ended()

    def ended(self):
        out, err = self._popen.communicate(timeout=PATIENCE_S)
        self._watchdog.cancel()
        return self._popen.returncode, out, err


@pytest.fixture
def started():
    """`started()`: a process that runs the schedule; none is left over."""
    made = []

    def start(*options):
        made.append(Process(*options))
        return made[-1]

    yield start
    for process in made:
        process._popen.kill()
        process.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_schedule_tells_a_line_a_run_and_ends_cleanly_when_it_is_asked_to(run, populated, started, number):
    process = started("--max-count", "3", "--order", "oldest")
    process.ran(2)
    code, out, err = process.told(number)
    assert (code, out) == (0, "")
    assert re.match(r"llama-ckpt: schedule every 1s: next run \d{4}-", process.lines[0])
    assert re.search(r"1 marked STALE, 0 collected, 0 bytes freed; next run \d{4}-\S+ \S+ UTC\n", process.lines[1])
    assert "0 marked STALE" in process.lines[2]
    assert re.match(r"stopped after \d+ runs", err.splitlines()[-1])
    (shown,) = run("schedule", "status", "--json").succeeded().json()
    assert (shown["spec"], shown["standing"], shown["next_us"]) == ("every 1s", "stopped", None)
    assert shown["last_result"].endswith("0 bytes freed")


@pytest.fixture
def asked_to_stop(monkeypatch):
    """SIGTERM comes in the middle of the first run of a schedule in this process."""

    def collect(*_):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return CollectionSummary(n_marked=0, n_items=0, n_failed=0, freed_bytes=0)

    monkeypatch.setattr(Collector, "collect", collect)


def test_a_schedule_gives_its_result_as_json_when_it_ends(run, populated, asked_to_stop):
    ran = run("schedule", "run", "--every", "1h", "--json")
    assert (ran.code, ran.json(), ran.n_left_open) == (0, {"n_runs": 1}, 0)


def test_a_quiet_schedule_says_nothing_and_has_the_name_it_was_given(run, populated, asked_to_stop):
    assert run("schedule", "run", "--every", "1h", "--name", "mine", "-q").succeeded().out == ""
    assert run("schedule", "status", "-q").lines == ["stopped mine"]


def test_the_signals_are_as_they_were_when_a_schedule_has_ended(run, populated, asked_to_stop):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run("schedule", "run", "--every", "1h")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_two_processes_never_run_at_the_same_time(populated, started):
    first, second = started(), started()
    first.ran(3)
    second.ran(3)
    assert first.told(signal.SIGTERM)[0] == second.told(signal.SIGTERM)[0] == 0
    with Registry.open(store=populated.root) as registry:
        runs = sorted(Collector(registry.context).runs(100), key=lambda run: run.started_us)
    assert len({run.host for run in runs}) > 1
    for earlier, later in itertools.pairwise(runs):
        assert earlier.ended_us <= later.started_us


def test_a_killed_process_is_told_as_gone_and_started_again_it_goes_on(run, populated, started):
    process = started()
    process.ran()
    assert process.told(signal.SIGKILL)[0] == -signal.SIGKILL
    (row,) = run("schedule", "status", "--json").json()
    with contextlib.closing(Database(populated.url)) as database, database.write() as db:  # an hour later
        rows.set_next(db, row["holder"], row["spec"], row["started_us"], -3600)
    shown = run("schedule", "status").succeeded().out
    assert "overdue: the process seems gone (due 2" in shown
    again = started()
    again.ran()
    assert "overdue" not in run("schedule", "status").out
    assert again.told(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("words", [[], ["--every", "15m", "--cron", "* * * * *"]], ids=["neither", "both"])
def test_a_schedule_needs_its_times_by_one_of_two_options(run, populated, words):
    run("schedule", "run", *words).refused(BadInput, "schedule", "give one")


@pytest.mark.parametrize(
    "words",
    [
        ["--every", "0s"], ["--every", "often"], ["--cron", "@daily"], ["--cron", "0 0 31 2 *"],
        ["--every", "1m", "--jitter", "2m"], ["--every", "1d", "--jitter", "soon"], ["--every", "30d", "--jitter", "2d"],
        ["--once", "--every", "1m"], ["--once", "--jitter", "2d"], ["--every", "1m", "--max-bytes", "many"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_refused_before_anything_runs(run, populated, words):
    run("schedule", "run", *words).refused(BadInput)
    assert run("schedule", "status", "--json").json() == []


# -- run --once ------------------------------------------------------------------------------------------------------------


def test_a_single_run_prunes_and_frees_by_the_policy_and_is_seen_in_status(run, populated, monkeypatch):
    populated.made_older("one", "created_us", 40 * DAY)
    monkeypatch.setenv("LLAMA_CKPT_MAX_AGE", "30d")
    ran = run("schedule", "run", "--once", "--stale-grace", "0s", "--jitter", "0.001s").succeeded()
    assert ran.out.startswith("1 checkpoint marked STALE, 1 item collected, ")
    assert not populated.path("one").exists()
    (shown,) = run("schedule", "status", "--json").json()
    assert (shown["standing"], shown["next_us"]) == ("by another timer", None)
    assert shown["last_result"].startswith("1 marked STALE, 1 collected, ")


def test_a_single_run_while_another_one_is_under_way_is_a_success(run, populated):
    with contextlib.closing(Database(populated.url)) as database, database.write() as db:
        assert coordination.take_lease(db, "gc", "another host", 300) is not None
    assert run("schedule", "run", "--once").succeeded().lines == ["nothing done: another run is active"]
    assert run("schedule", "run", "--once", "-q").succeeded().out == ""
    assert "another host" in run("schedule", "run", "--once", "--json").succeeded().json()["problem"]
    assert "another run was under way" in run("schedule", "status").out


def test_a_single_run_that_fails_ends_with_the_errors_code_and_is_seen_in_status(run, populated):
    (populated.root / MARKER).unlink()
    run("schedule", "run", "--once").refused(StoreMismatch, "is it mounted")
    assert "is it mounted" in run("schedule", "status").out


def test_a_single_run_that_leaves_a_file_behind_fails_after_its_result(run, populated, monkeypatch):
    left = CollectionSummary(n_marked=0, n_items=2, n_failed=1, freed_bytes=10)
    monkeypatch.setattr(Collector, "collect", lambda _self, _policy, _stopped: left)
    run("schedule", "run", "--once").failed(StoreUnavailable, "1 file could not be deleted", out=None)
    assert "1 could not be deleted" in run("schedule", "status").out


def test_a_fault_in_a_single_run_is_a_failure(run, populated, monkeypatch):
    def collect(*_):
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(Collector, "collect", collect)
    ran = run("schedule", "run", "--once")
    assert (ran.code, ran.out) == (LlamaCkptError.exit_code, "")
    assert "ZeroDivisionError: no such luck" in ran.err.splitlines()[-1]


# -- status --------------------------------------------------------------------------------------------------------------


def test_status_of_nothing_is_nothing_and_makes_nothing(run, tmp_path):
    assert run("schedule", "status", "--store", tmp_path / "new").succeeded().lines == ["0 schedules"]
    assert not (tmp_path / "new").exists()


def test_status_shows_each_host(run, populated):
    with contextlib.closing(Database(populated.url)) as database, database.write() as db:
        rows.put(db, "a:/store", "every 15m", 600)
        rows.put(db, "b:/store", "17 3 * * *", -600)
    shown = run("schedule", "status").succeeded()
    assert shown.lines[-1] == "2 schedules"
    (a,) = [line for line in shown.lines if "a:/store" in line]
    (b,) = [line for line in shown.lines if "b:/store" in line]
    assert "every 15m" in a
    assert "overdue" not in a
    assert "17 3 * * *" in b
    assert "overdue: the process seems gone" in b
    assert run("schedule", "status", "-q").lines == ["waiting a:/store", "overdue: the process seems gone b:/store"]


# -- install: print --------------------------------------------------------------------------------------------------------


def texts_of(run, kind, *words):
    return run("schedule", "install", f"--{kind}", *words, "--json").succeeded().json()["texts"]


def words_of(kind, texts):
    """The command that a unit starts."""
    if kind == "systemd":
        (line,) = [line for line in texts["llama-ckpt.service"].splitlines() if line.startswith("ExecStart=")]
        return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.partition("=")[2])]
    if kind == "cron":
        words = shlex.split(texts["crontab"].splitlines()[1].replace("\\%", "%"))
        return words[
            next(i for i, word in enumerate(words) if "llama-ckpt" in word and word.endswith("bin/llama-ckpt")) :
        ]
    if kind == "launchd":
        return plistlib.loads(texts["llama-ckpt.collector.plist"].encode())["ProgramArguments"]
    space = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
    task = ET.fromstring(texts["llama-ckpt.xml"])
    return [task.find(f".//{space}Command").text, *shlex.split(task.find(f".//{space}Arguments").text)]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The program as it stands in an installation: its name is known wherever the tests run."""
    made = tmp_path / "venv" / "bin" / "llama-ckpt"
    made.parent.mkdir(parents=True)
    made.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llama_ckpt_cli "$@"\n')
    made.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(made.with_name("python")))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_of_a_unit_names_program_store_and_database_in_full_and_carries_the_policy(
    run, populated, script, monkeypatch, kind
):
    monkeypatch.setenv("LLAMA_CKPT_MAX_BYTES", "50GB")
    monkeypatch.chdir(populated.root.parent)
    words = words_of(kind, texts_of(run, kind, "--store", "store", "--max-idle", "7d"))
    expected = [
        str(script),
        "schedule",
        "run",
        "--once",
        "--store",
        str(populated.root),
        "--database-url",
        populated.url,
    ]
    assert words[: len(expected)] == expected
    assert words[len(expected) :][:4] == ["--max-idle", "7d", "--max-bytes", "50GB"]


@pytest.mark.parametrize("kind", ["systemd", "cron", "launchd"])
def test_the_command_of_a_unit_does_its_work_on_a_store_with_a_difficult_name(run, populated, script, kind):
    odd = populated.root.with_name("50% of 'größe' $HOME")
    populated.root.rename(odd)
    words = words_of(kind, texts_of(run, kind, "--store", odd, "--max-count", "1", "--jitter", "0s"))
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    (shown,) = run("schedule", "status", "--store", odd, "--json").json()
    assert shown["last_result"].startswith("3 marked STALE")


def test_a_relative_database_is_named_in_full(run, populated, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = words_of("systemd", texts_of(run, "systemd", "--database-url", "sqlite:///rows.sqlite3"))
    assert f"sqlite:///{tmp_path}/rows.sqlite3" in words


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_says_where_it_goes_and_nothing_is_written(run, populated, kind, tmp_path):
    before = populated.snapshot()
    shown = run("schedule", "install", f"--{kind}").succeeded().out
    assert re.search(r"(#|<!--) \S+: put it into .*(systemctl|crontab -e|launchctl|schtasks)", shown)
    assert populated.snapshot() == before
    assert not (tmp_path / "xdg_config_home").exists()
    if kind in ("launchd", "windows"):
        ET.fromstring(shown)
    bare = run("schedule", "install", f"--{kind}", "-q").succeeded().out
    assert "into" not in bare


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_those_that_were_asked_for(run, populated, kind):
    shown = run("schedule", "install", f"--{kind}", "--cron-expression", "17 3 * * 1-5").succeeded().out
    expected = {"systemd": "Mon,Tue,Wed,Thu,Fri *-*-* 03:17:00", "cron": "17 3 * * 1,2,3,4,5 ", "windows": "T03:17:00"}
    assert expected.get(kind, "<integer>17</integer>") in shown
    shown = run("schedule", "install", f"--{kind}", "--every", "6h").succeeded().out
    expected = {"systemd": "=21600s", "cron": "0 */6 * * * ", "windows": "PT21600S", "launchd": "<integer>21600<"}
    assert expected[kind] in shown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "url",
    ["postgresql://me:geheim@host/db", "postgresql://me@host/db?password=geheim"],
    ids=["in its place", "in the query"],
)
def test_a_password_never_gets_into_a_unit(run, populated, kind, url):
    told = run("schedule", "install", f"--{kind}", "--database-url", url).refused(BadInput, "DATABASE_PASSWORD_FILE")
    assert "geheim" not in told


@pytest.mark.parametrize("kind", ["systemd", "cron", "launchd"])
def test_the_file_of_a_password_is_named_in_the_unit(run, populated, monkeypatch, tmp_path, kind):
    file = tmp_path / "pass word"
    file.write_text("geheim\n")
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_PASSWORD_FILE", str(file))
    shown = run("schedule", "install", f"--{kind}", "--database-url", "postgresql://me@host/db").succeeded().out
    assert "LLAMA_CKPT_DATABASE_PASSWORD_FILE" in shown
    assert str(file) in shown
    assert "geheim" not in shown


def test_what_a_unit_cannot_have_of_a_password_is_said(run, populated, monkeypatch):
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_PASSWORD", "geheim")
    ran = run("schedule", "install", "--systemd", "--database-url", "postgresql://me@host/db")
    assert ran.code == 0
    assert "LLAMA_CKPT_DATABASE_PASSWORD_FILE" in ran.err
    assert "geheim" not in ran.out + ran.err
    monkeypatch.delenv("LLAMA_CKPT_DATABASE_PASSWORD")
    monkeypatch.setenv("LLAMA_CKPT_DATABASE_PASSWORD_FILE", "/file")
    assert "LLAMA_CKPT_DATABASE_PASSWORD_FILE" in run("schedule", "install", "--windows").err


@pytest.mark.parametrize("action", ["install", "uninstall"])
@pytest.mark.parametrize("words", [[], ["--cron", "--systemd"]], ids=["none", "two"])
def test_one_timer_must_be_named(run, populated, action, words):
    run("schedule", action, *words).refused(BadInput, "give exactly one of")


def test_settings_of_a_named_file_get_into_the_unit_and_those_of_the_users_own_are_left_there(
    run, populated, script, tmp_path, monkeypatch
):
    own = tmp_path / "xdg_config_home" / "llama-ckpt" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('max_age = "30d"\n')
    assert "--max-age" not in words_of("systemd", texts_of(run, "systemd"))
    monkeypatch.setenv("LLAMA_CKPT_CONFIG", str(own))
    assert "--max-age" in words_of("systemd", texts_of(run, "systemd"))


# -- install --write, uninstall --------------------------------------------------------------------------------------------

TOOLS = {
    "systemctl": 'echo "$@" >> "$TOOLS/calls"',
    "launchctl": 'echo "$@" >> "$TOOLS/calls"',
    "schtasks": """echo "$@" >> "$TOOLS/calls"
case $1 in
/Create) cp "$5" "$TOOLS/task" ;;
/Query) test -e "$TOOLS/task" ;;
/Delete) rm "$TOOLS/task" ;;
esac""",
    "crontab": """case $1 in
-l) cat "$TOOLS/crontab" 2> /dev/null || { echo "no crontab for me" >&2; exit 1; } ;;
-) cat > "$TOOLS/crontab" ;;
esac""",
}
TOOL_OF = {"systemd": "systemctl", "cron": "crontab", "launchd": "launchctl", "windows": "schtasks"}


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """The systems' own commands, played by scripts in `bin` that keep what they are given in this folder."""
    folder = tmp_path / "tools"
    (folder / "bin").mkdir(parents=True)
    for name, text in TOOLS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o700)
    monkeypatch.setenv("TOOLS", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


def calls(tools):
    return (tools / "calls").read_text().splitlines() if (tools / "calls").exists() else []


@pytest.mark.parametrize("kind", KINDS)
def test_what_install_wrote_uninstall_takes_away_and_both_can_be_repeated(run, populated, tools, tmp_path, kind):
    def files():
        return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and p != tools / "calls"}

    before = files()
    for _ in range(2):
        shown = run("schedule", "install", f"--{kind}", "--write").succeeded()
        assert all(line.startswith("installed: ") for line in shown.lines)
    assert files() > before
    assert all(line.startswith("removed: ") for line in run("schedule", "uninstall", f"--{kind}").succeeded().lines)
    assert files() - {"tools/crontab"} == before
    assert run("schedule", "uninstall", f"--{kind}").succeeded().lines == [f"{kind} has no timer of this program"]
    assert run("schedule", "uninstall", f"--{kind}", "--json").json() == {"kind": kind, "removed": []}


def test_systemd_is_told_of_the_units_that_were_written(run, populated, tools, tmp_path):
    run("schedule", "install", "--systemd", "--write").succeeded()
    folder = tmp_path / "xdg_config_home" / "systemd" / "user"
    assert {path.name for path in folder.iterdir()} == {"llama-ckpt.service", "llama-ckpt.timer"}
    expected = ["--user daemon-reload", "--user enable llama-ckpt.timer", "--user restart llama-ckpt.timer"]
    assert calls(tools) == expected
    run("schedule", "uninstall", "--systemd").succeeded()
    assert calls(tools)[3:] == ["--user disable --now llama-ckpt.timer", "--user daemon-reload"]


def test_other_lines_of_a_crontab_stay_byte_for_byte(run, populated, tools):
    mine = b"MAILTO=me\n# Gr\xfc\xdfe\n1 2 * * * mine"
    (tools / "crontab").write_bytes(mine)
    for every in ("15m", "6h"):
        run("schedule", "install", "--cron", "--every", every, "--write").succeeded()
    installed = (tools / "crontab").read_bytes()
    assert installed.startswith(mine + b"\n# llama-ckpt schedule: begin\n0 */6 * * * ")
    assert installed.count(b"schedule run --once") == 1
    run("schedule", "uninstall", "--cron").succeeded()
    assert (tools / "crontab").read_bytes() == mine + b"\n"


def test_a_crontab_that_cannot_be_read_is_not_written_over(run, populated, tools):
    refusing = 'test "$1" = - && cat > "$TOOLS/crontab"\necho "you may not use cron" >&2\nexit 1'
    (tools / "bin" / "crontab").write_text(f"#!/bin/sh\n{refusing}\n")
    for words in (["install", "--cron", "--write"], ["uninstall", "--cron"]):
        run("schedule", *words).refused(LlamaCkptError, "you may not use cron")
    assert not (tools / "crontab").exists()


def test_a_crontab_in_which_the_end_of_our_lines_is_gone_is_left_alone(run, populated, tools):
    (tools / "crontab").write_text("# llama-ckpt schedule: begin\n1 2 * * * whose\n")
    for words in (["install", "--cron", "--write"], ["uninstall", "--cron"]):
        run("schedule", *words).refused(BadInput, "by hand")
    assert (tools / "crontab").read_text().endswith("whose\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_that_refuses_is_told_as_it_says(run, populated, tools, kind):
    tool = tools / "bin" / TOOL_OF[kind]
    tool.write_text("#!/bin/sh\necho 'computer says no' >&2\nexit 5\n")
    run("schedule", "install", f"--{kind}", "--write").refused(LlamaCkptError, tool.name, "computer says no")


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_systems_own_command_nothing_is_written_and_nothing_is_there_to_remove(
    run, populated, tmp_path, monkeypatch, kind
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run("schedule", "install", f"--{kind}", "--write").refused(Unsupported, TOOL_OF[kind], "without --write")
    assert not (tmp_path / "home").exists()
    assert run("schedule", "uninstall", f"--{kind}").succeeded().lines == [f"{kind} has no timer of this program"]


def test_a_folder_that_cannot_be_written_is_told(run, populated, tools, tmp_path):
    (tmp_path / "xdg_config_home").mkdir()
    (tmp_path / "xdg_config_home" / "systemd").write_text("in the way")
    run("schedule", "install", "--systemd", "--write").refused(LlamaCkptError, "systemd/user")
