"""When a schedule runs, and what each system's own timer is given; each checked by a reader of that system's format."""

from __future__ import annotations

import plistlib
import re
import shlex
import shutil
import stat
import subprocess
import time
import xml.etree.ElementTree as ET
from datetime import datetime, timedelta

import pytest

from llama_ckpt.collector.triggers import Trigger, parse_cron
from llama_ckpt.errors import BadInput
from llama_ckpt_cli.timers import units
from llama_ckpt_cli.timers.units import Job

NASTY = [
    "/a folder/with 'single' and \"double\" quotes",
    "/50% off/%h %n/$HOME/${x}/$$",
    "/back\\slash/trailing\\",
    "/größe/模型/☃",
    "a;b&&c|d>e<f`g`$(h)*?[i]~#j!",
    "",
    "--option=value",
    "&amp; <x> -->",
]
URL = "postgresql+psycopg://me@host/name?options=-c%20search_path%3Dx"


def job(*words, every="15m", cron=None, jitter_s=60.0, environment=None, program="/opt/llama ckpt/bin/llama-ckpt"):
    trigger = Trigger.of(cron=cron) if cron else Trigger.of(every=every)
    return Job(words=[program, *words], trigger=trigger, jitter_s=jitter_s, environment=environment or {})


@pytest.fixture(autouse=True)
def in_zone(monkeypatch):
    """`in_zone("Europe/Berlin")`: the machine is there; else it is in UTC."""

    def move(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    move("UTC")
    yield move
    monkeypatch.undo()
    time.tzset()


# -- when ----------------------------------------------------------------------------------------------------------------


def as_cron_would(expression, start, n):
    """The next `n` minutes that an expression names, by looking at each minute as cron does (crontab(5))."""
    minute, hour, day, month, weekday = (set(f.values) for f in vars_of(parse_cron(expression)))
    _, _, day_text, _, weekday_text = expression.split()
    at, found = start.replace(second=0, microsecond=0), []
    while len(found) < n:
        at += timedelta(minutes=1)
        by_day, by_weekday = at.day in day, at.isoweekday() % 7 in weekday
        either = not day_text.startswith("*") and not weekday_text.startswith("*")
        of_day = by_day or by_weekday if either else by_day and by_weekday
        if of_day and at.minute in minute and at.hour in hour and at.month in month:
            found.append(at)
    return found


def vars_of(cron):
    return cron.minute, cron.hour, cron.day, cron.month, cron.weekday


def as_scheduled(expression, start, n):
    timer, at, found = Trigger.of(cron=expression).build(0), start, []
    for _ in range(n):
        at = timer.get_next_fire_time(at, at)
        found.append(at)
    return found


@pytest.mark.parametrize(
    "expression",
    [
        "* * * * *",
        "*/15 * * * *",
        "5/20 8-18/2 * * *",
        "17 3 * * 0",  # Sunday, which APScheduler takes for Monday
        "17 3 * * 7",
        "17 3 * * mon-fri",
        "17 3 * * fri-sun",
        "0 0 * * 5-7",
        "0 0 * * */2",
        "0 0 13 * 5",  # the 13th, and each Friday
        "0 12 1,15 * sun",
        "0 0 */10 * 1",
        "30 4 29 feb *",
        "0 0 1 jan-mar,12 *",
    ],
)
def test_a_cron_expression_names_the_times_that_cron_would_take(expression):
    start = datetime.fromisoformat("2024-01-30T23:50:00+00:00")
    n = {"30 4 29 feb *": 1, "0 0 1 jan-mar,12 *": 2, "0 0 */10 * 1": 2}.get(expression, 12)
    assert as_scheduled(expression, start, n) == as_cron_would(expression, start, n)


@pytest.mark.parametrize(
    ("field", "values"),
    [("0", (0,)), ("7", (0,)), ("sun", (0,)), ("sat-sun", (0, 6)), ("1-3,5", (1, 2, 3, 5)), ("*", tuple(range(7)))],
)
def test_weekdays_count_from_sunday(field, values):
    assert parse_cron(f"0 0 * * {field}").weekday.values == values


@pytest.mark.parametrize(
    "expression",
    [
        "", "* * * *", "* * * * * *", "@daily", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *",
        "* * * * 8", "*/0 * * * *", "5-3 * * * *", "x * * * *", "* * last * *", "1,,2 * * * *", "-1 * * * *", "1.5 * * * *",
        "0 0 * * mon-", "0 0 * foo *", "0 0 31 2 *", "٣ * * * *",
    ],
)  # fmt: skip
def test_what_is_no_cron_expression_is_refused_by_its_text(expression):
    with pytest.raises(BadInput) as refused:
        Trigger.of(cron=expression)
    assert repr(expression) in str(refused.value)


@pytest.mark.parametrize("every", ["0s", "0.9s", "367d", "999999999w", "often", "", "-1m"])
def test_an_interval_that_cannot_be_meant_is_refused_by_its_text(every):
    with pytest.raises(BadInput) as refused:
        Trigger.of(every=every)
    assert repr(every) in str(refused.value)


@pytest.mark.parametrize(("every", "jitter_s"), [("1s", 0.1), ("5m", 30), ("15m", 60), ("7d", 60)])
def test_the_usual_jitter_is_a_tenth_and_at_most_a_minute(every, jitter_s):
    assert Trigger.of(every=every).jitter_s(None) == pytest.approx(jitter_s)


def test_a_time_zone_that_is_none_is_told_to_cron_and_no_matter_to_an_interval(in_zone):
    in_zone("Nowhere/Atlantis")
    with pytest.raises(BadInput, match="TZ=UTC"):
        Trigger.of(cron="0 0 * * *")
    Trigger.of(every="1h").build(0)


def test_times_are_those_of_the_machines_zone_over_a_change_of_the_clock(in_zone):
    in_zone("Europe/Berlin")
    start = datetime.fromisoformat("2026-03-28T12:00:00+00:00")
    found = as_scheduled("30 3 * * *", start, 2)
    assert [at.isoformat() for at in found] == ["2026-03-29T03:30:00+02:00", "2026-03-30T03:30:00+02:00"]


# -- systemd -------------------------------------------------------------------------------------------------------------


def systemd_words(line, doubled="%$"):
    """A line of words as systemd.syntax(7) and systemd.service(5) read it."""
    words = shlex.split(line)
    for character in doubled:
        assert all(len(run) % 2 == 0 for word in words for run in re.findall(f"[{re.escape(character)}]+", word))
        words = [word.replace(character * 2, character) for word in words]
    return words


def value_of(text, key):
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(key + "=")]


def test_systemd_reads_the_words_as_they_were():
    texts = units.systemd_units(job(*NASTY, URL, environment={"FILE": "/a b/50%"}))
    (line,) = value_of(texts["llama-ckpt.service"], "ExecStart")
    assert systemd_words(line) == ["/opt/llama ckpt/bin/llama-ckpt", *NASTY, URL]
    (line,) = value_of(texts["llama-ckpt.service"], "Environment")
    assert systemd_words(line, "%") == ["FILE=/a b/50%"]
    assert value_of(texts["llama-ckpt.service"], "Type") == ["oneshot"]


def test_a_systemd_timer_runs_soon_after_the_start_and_then_so_often_with_a_random_delay():
    timer = units.systemd_units(job(every="6h"))["llama-ckpt.timer"]
    assert value_of(timer, "OnActiveSec") == ["1min"]
    assert value_of(timer, "OnUnitActiveSec") == ["21600s"]
    assert value_of(timer, "RandomizedDelaySec") == ["60s"]
    assert value_of(timer, "WantedBy") == ["timers.target"]


def test_a_systemd_timer_by_cron_makes_up_for_what_it_missed():
    timer = units.systemd_units(job(cron="*/30 8-9 * * mon-fri"))["llama-ckpt.timer"]
    assert value_of(timer, "OnCalendar") == ["Mon,Tue,Wed,Thu,Fri *-*-* 08,09:00,30:00"]
    assert value_of(timer, "Persistent") == ["true"]


@pytest.fixture
def systemd_analyze():
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze on this machine")
    return found


@pytest.mark.parametrize("cron", [None, "0 0 13 * 5", "*/15 * * * *"])
def test_systemd_itself_finds_nothing_wrong_with_the_units(systemd_analyze, tmp_path, cron):
    program = tmp_path / "a program of 50% größe (in $HOME; $$ & <more>)"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    texts = units.systemd_units(
        job(*[word for word in NASTY if word], cron=cron, program=str(program), environment={"A": "b c"})
    )
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    checked = subprocess.run(
        [systemd_analyze, "verify", "--man=no", *(tmp_path / name for name in texts)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    complaints = [line for line in checked.stderr.splitlines() if "llama-ckpt" in line or str(tmp_path) in line]
    assert complaints == []
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", ["it's", 'a "b"', "a\\b"])
def test_a_program_whose_path_systemd_does_not_take_is_refused(name):
    with pytest.raises(BadInput, match="systemd"):
        units.systemd_units(job(program=f"/opt/{name}/llama-ckpt"))


@pytest.mark.parametrize(
    "expression", ["17 3 * * 0", "0 0 13 * 5", "*/20 6-8 * jan-mar *", "5 4 1,15 * *", "* * * * *", "0 0 * * fri-sun"]
)
def test_systemds_calendar_names_the_times_that_cron_would_take(systemd_analyze, expression):
    start, n = datetime.fromisoformat("2024-01-30T23:50:00+00:00"), 6
    found = set()
    for calendar in value_of(units.systemd_units(job(cron=expression))["llama-ckpt.timer"], "OnCalendar"):
        told = subprocess.run(
            [systemd_analyze, "calendar", f"--iterations={n}", f"--base-time={start:%Y-%m-%d %H:%M:%S UTC}", calendar],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        found |= {datetime.fromisoformat(f"{at}+00:00") for at in re.findall(r"\w{3} (\d{4}-\S+ \S+) UTC", told)}
    assert sorted(found)[:n] == as_cron_would(expression, start, n)


# -- cron ----------------------------------------------------------------------------------------------------------------


def as_cron_runs(block, tmp_path, monkeypatch):
    """Executes the line of a block as cron does: `%` unescaped, then /bin/sh. Gives what the shell said."""
    _, line, _ = block.splitlines()
    command = line.split(None, 5)[5]
    assert not re.search(r"(?<!\\)%", command)
    return subprocess.run(
        ["/bin/sh", "-c", command.replace("\\%", "%")], cwd="/", capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip


@pytest.fixture
def program(tmp_path):
    """A program with a difficult name, that writes its words and its setting down."""
    folder = tmp_path / "50% of 'größe' \"$x\""
    folder.mkdir()
    made = folder / "llama ckpt"
    made.write_text(f'#!/bin/sh\nprintf "%s\\0" "$FILE" "$@" > {shlex.quote(str(tmp_path / "words"))}\n')
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


@pytest.mark.parametrize("flock", [False, True], ids=["without flock", "with flock"])
def test_the_shell_that_cron_starts_gets_the_words_as_they_were(program, tmp_path, monkeypatch, flock):
    if flock and shutil.which("flock") is None:
        pytest.skip("there is no flock on this machine")
    lock_folder = tmp_path / "locks % 'here'"
    wanted = job(*NASTY, URL, program=str(program), environment={"FILE": "/a b/50%"})
    block = units.cron_block(wanted, shutil.which("flock") if flock else None, str(lock_folder))
    ran = as_cron_runs(block, tmp_path, monkeypatch)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words == ["/a b/50%", *NASTY, URL, "--jitter", "60s", "--quiet"]
    assert lock_folder.exists() == flock


def test_a_run_that_is_still_at_work_keeps_crons_next_one_away(program, tmp_path, monkeypatch):
    flock = shutil.which("flock")
    if flock is None:
        pytest.skip("there is no flock on this machine")
    block = units.cron_block(job(program=str(program)), flock, str(tmp_path / "locks"))
    (tmp_path / "locks").mkdir()
    with subprocess.Popen(
        [flock, tmp_path / "locks" / "schedule.lock", "sh", "-c", "echo held; read end"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holding:  # fmt: skip
        assert holding.stdout.readline() == "held\n"
        assert as_cron_runs(block, tmp_path, monkeypatch).returncode == 1
        assert not (tmp_path / "words").exists()
    assert as_cron_runs(block, tmp_path, monkeypatch).returncode == 0
    assert (tmp_path / "words").exists()


@pytest.mark.parametrize(
    ("every", "fields"),
    [
        ("1m", "*/1 * * * *"), ("15m", "*/15 * * * *"), ("900s", "*/15 * * * *"), ("60m", "0 */1 * * *"),
        ("6h", "0 */6 * * *"), ("24h", "0 0 * * *"), ("1d", "0 0 * * *"), ("1w", "0 0 * * 0"),
    ],
)  # fmt: skip
def test_an_interval_in_crons_words_comes_as_often(every, fields):
    assert units.cron_fields(Trigger.of(every=every)) == fields
    first, second = as_cron_would(fields, datetime.fromisoformat("2026-01-05T00:00:00+00:00"), 2)
    assert (second - first).total_seconds() == Trigger.of(every=every).every_s


@pytest.mark.parametrize("every", ["30s", "450s", "90s", "7m", "25m", "90m", "5h", "2d", "30d"])
def test_an_interval_that_cron_cannot_say_is_refused_with_what_it_can(every):
    with pytest.raises(BadInput, match="--cron-expression"):
        units.cron_fields(Trigger.of(every=every))


def test_our_lines_are_taken_out_of_a_crontab_and_no_others():
    block = units.cron_block(job(), None, "/x")
    mine = "MAILTO=me\n# a comment\r\n1 2 * * * mine"
    assert units.without_cron_block(f"{mine}\n{block}{mine}") == f"{mine}\n{mine}"
    assert units.without_cron_block(block + block) == ""
    assert units.without_cron_block(mine) == mine
    with pytest.raises(BadInput, match="by hand"):
        units.without_cron_block(f"{units.CRON_BEGIN}\n1 2 * * * whose?\n")


# -- launchd -------------------------------------------------------------------------------------------------------------


def test_launchd_reads_the_words_as_they_were():
    agent = plistlib.loads(units.launchd_plist(job(*NASTY, URL, environment={"FILE": "/a b"}), "/log").encode())
    assert agent["ProgramArguments"] == ["/opt/llama ckpt/bin/llama-ckpt", *NASTY, URL, "--jitter", "60s"]
    assert agent["EnvironmentVariables"] == {"FILE": "/a b"}
    assert agent["StartInterval"] == 900
    assert "StartCalendarInterval" not in agent


def test_launchd_gets_each_time_of_a_cron_expression():
    agent = plistlib.loads(units.launchd_plist(job(cron="0,30 8 * * sat-sun"), "/log").encode())
    times = {(t["Weekday"], t["Hour"], t["Minute"]) for t in agent["StartCalendarInterval"]}
    assert times == {(6, 8, 0), (6, 8, 30), (0, 8, 0), (0, 8, 30)}
    agent = plistlib.loads(units.launchd_plist(job(cron="0 0 13 * 5"), "/log").encode())
    assert agent["StartCalendarInterval"] == [
        {"Minute": 0, "Hour": 0, "Day": 13},
        {"Minute": 0, "Hour": 0, "Weekday": 5},
    ]


def test_more_times_than_launchd_can_hold_are_refused():
    with pytest.raises(BadInput, match="launchd"):
        units.launchd_plist(job(cron="1-59 1-23 * * *"), "/log")


# -- Windows -------------------------------------------------------------------------------------------------------------

SPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def windows_task(made):
    text = units.windows_xml(made)
    assert text.isascii()  # right in whatever encoding a shell writes it to a file
    return ET.fromstring(text)


def texts(task, *path):
    return [element.text for element in task.findall("/".join(SPACE + name for name in path))]


def windows_words(line):
    """A command line as CommandLineToArgvW splits it."""
    words, current, in_quotes, started = [], "", False, False
    for backslashes, character in re.findall(r"(\\*)([^\\]|$)", line):
        if character == '"':
            current, started = current + "\\" * (len(backslashes) // 2), True
            if len(backslashes) % 2:
                current += '"'
            else:
                in_quotes = not in_quotes
        elif character in ("", " ", "\t") and not in_quotes:
            current += backslashes
            if current or started:
                words.append(current)
            current, started = "", False
        else:
            current += backslashes + character
    return words


def test_windows_reads_the_words_as_they_were():
    task = windows_task(job(*NASTY, URL, program=r"C:\Program Files\größe\llama-ckpt.exe"))
    assert texts(task, "Actions", "Exec", "Command") == [r"C:\Program Files\größe\llama-ckpt.exe"]
    (line,) = texts(task, "Actions", "Exec", "Arguments")
    assert windows_words(line) == [*NASTY, URL]


def test_a_windows_task_runs_so_often_with_a_random_delay_and_never_twice_at_once():
    task = windows_task(job(every="6h"))
    assert texts(task, "Triggers", "TimeTrigger", "Repetition", "Interval") == ["PT21600S"]
    assert texts(task, "Triggers", "TimeTrigger", "RandomDelay") == ["PT60S"]
    assert texts(task, "Settings", "MultipleInstancesPolicy") == ["IgnoreNew"]
    assert texts(task, "Settings", "StartWhenAvailable") == ["true"]


@pytest.mark.parametrize(
    ("cron", "starts", "ways"),
    [
        ("17 3 * * *", ["03:17"], ["ScheduleByDay"]),
        ("0,30 * * * *", ["00:00", "00:30"], ["ScheduleByDay"] * 2),
        ("0 8,20 * * mon-fri", ["08:00", "20:00"], ["ScheduleByWeek"] * 2),
        ("0 0 1 * *", ["00:00"], ["ScheduleByMonth"]),
        ("0 0 * jan *", ["00:00"], ["ScheduleByMonth"]),
        ("0 0 * jan mon", ["00:00"], ["ScheduleByMonthDayOfWeek"]),
        ("0 0 13 * 5", ["00:00", "00:00"], ["ScheduleByMonth", "ScheduleByWeek"]),
    ],
)
def test_windows_gets_a_trigger_for_each_time_of_a_cron_expression(cron, starts, ways):
    triggers = list(windows_task(job(cron=cron)).find(SPACE + "Triggers"))
    assert [t.find(SPACE + "StartBoundary").text[11:16] for t in triggers] == starts
    assert [t[-1].tag.removeprefix(SPACE) for t in triggers] == ways
    each_hour = " * * * *" in cron
    assert [t.find(SPACE + "Repetition") is not None for t in triggers] == [each_hour] * len(triggers)


def test_windows_days_and_months_are_those_of_the_expression():
    (trigger,) = windows_task(job(cron="0 0 1,15 feb *")).find(SPACE + "Triggers")
    by_month = trigger.find(SPACE + "ScheduleByMonth")
    assert [day.text for day in by_month.find(SPACE + "DaysOfMonth")] == ["1", "15"]
    assert [month.tag for month in by_month.find(SPACE + "Months")] == [SPACE + "February"]
    (trigger,) = windows_task(job(cron="0 0 * * sat-sun")).find(SPACE + "Triggers")
    days = trigger.find(f"{SPACE}ScheduleByWeek/{SPACE}DaysOfWeek")
    assert [day.tag.removeprefix(SPACE) for day in days] == ["Sunday", "Saturday"]


@pytest.mark.parametrize(
    "made", [{"cron": "* * * * *"}, {"cron": "0 0 */2 * 1"}, {"every": "30s"}, {"every": "40d"}], ids=str
)
def test_what_windows_cannot_say_is_refused(made):
    with pytest.raises(BadInput):
        units.windows_xml(job(**made))


# -- all -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["a\nb", "a\tb", "\x1b[0m", "\udcff", "\u2028"], ids=ascii)
def test_a_path_that_no_unit_can_hold_is_refused(word):
    with pytest.raises(BadInput, match="control character"):
        job(word)


# -- what a reader once misread ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["2w", "12d", "366d", "1.5s"])
def test_a_long_interval_is_said_without_an_exponent(every):
    timer = units.systemd_units(job(every=every))["llama-ckpt.timer"]
    seconds = Trigger.of(every=every).every_s
    assert f"OnUnitActiveSec={seconds:.1f}".removesuffix(".0") + "s\n" in timer
    assert "e+" not in timer


@pytest.mark.parametrize("cron", ["0 3 1-31 * mon", "0 3 1 * 0-6"])
def test_where_either_day_does_and_one_is_any_it_is_every_day(cron):
    assert "OnCalendar=*-*-* 03:00:00" in units.systemd_units(job(cron=cron))["llama-ckpt.timer"]


@pytest.mark.parametrize(
    ("cron", "fields"),
    [
        ("5/20 * * * *", "5,25,45 * * * *"),
        ("*/15 0 */2 * fri-sun", "*/15 0 */2 * 0,5,6"),
        ("17 3 1-31/2 * mon", "17 3 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31 * 1"),
    ],
)
def test_to_cron_a_field_is_said_by_its_values(cron, fields):
    assert units.cron_fields(Trigger.of(cron=cron)) == fields


def test_a_blank_of_another_script_can_stand_in_a_unit():
    assert "データ　1" in units.systemd_units(job("--store", "/データ　1"))["llama-ckpt.service"]
