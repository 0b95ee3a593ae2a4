"""The texts of timers for systemd, cron, launchd and the Windows task scheduler. Pure: a job in, text out, quoted by the rules
of each.
"""

from __future__ import annotations

import itertools
import plistlib
import shlex
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_ckpt.humanize import is_visible

if TYPE_CHECKING:
    from llama_ckpt.collector.triggers import Cron, Trigger

NAME = "llama-ckpt"
LABEL = "llama-ckpt.collector"
CRON_BEGIN = "# llama-ckpt schedule: begin"
CRON_END = "# llama-ckpt schedule: end"
_DESCRIPTION = "Prune and gc of llama.cpp KV-cache checkpoints"
_MAX_LAUNCHD_TIMES = 1000
_MAX_WINDOWS_TRIGGERS = 48  # triggers of one task
_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command that runs once (`words`), the times to start it (`trigger`), and the longest random delay before it.

    Raises:
        BadInput: a word of the command has a character that no unit can contain.
    """

    words: Sequence[str]
    trigger: Trigger
    jitter_s: float
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        from llama_ckpt.errors import BadInput

        for word in (*self.words, *self.environment.values()):
            if not all(map(is_visible, word)):
                reason = "a timer cannot contain control characters or invalid text; choose another path"
                raise BadInput(what="command line", value=word, reason=reason)

    @property
    def delayed_words(self) -> list[str]:
        """The command with an option for the random delay, for timers that have none themselves."""
        return [*self.words, "--jitter", _seconds(self.jitter_s)] if self.jitter_s else list(self.words)


def _seconds(value: float) -> str:
    """Seconds without an exponent, which neither systemd nor the command reads."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


# -- systemd -------------------------------------------------------------------------------------------------------------


def systemd_units(job: Job) -> dict[str, str]:
    """The service and the timer, by file name. A timer does not start a service that is still active: no other lock is needed.

    Raises:
        BadInput: systemd does not accept the program's path.
    """
    from llama_ckpt.errors import BadInput

    program, *rest = job.words
    if any(character in program for character in "\"'\\"):
        reason = "systemd does not accept a quote or a backslash in the path of a program"
        raise BadInput(what="program", value=program, reason=reason)
    service = ["[Unit]", f"Description={_DESCRIPTION}", "", "[Service]", "Type=oneshot"]
    service += [f"Environment={_systemd_word(f'{name}={value}', '%')}" for name, value in job.environment.items()]
    # systemd expands no variable in the program's own path.
    service += ["ExecStart=" + " ".join([_systemd_word(program, "%"), *(_systemd_word(word, "%$") for word in rest)])]
    timer = ["[Unit]", f"Description={_DESCRIPTION}: {job.trigger.spec}", "", "[Timer]", *_systemd_times(job.trigger)]
    timer += [
        f"RandomizedDelaySec={_seconds(job.jitter_s)}",
        "AccuracySec=1s",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return {f"{NAME}.service": "\n".join(service) + "\n", f"{NAME}.timer": "\n".join(timer) + "\n"}


def _systemd_word(text: str, doubled: str) -> str:
    for character in doubled:
        text = text.replace(character, character * 2)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _systemd_times(trigger: Trigger) -> list[str]:
    if trigger.cron is None:
        # Soon after the machine starts: a machine that is off every night would never reach the end of a long interval.
        return ["OnActiveSec=1min", f"OnUnitActiveSec={_seconds(trigger.every_s or 0.0)}"]
    lines = []
    for days, weekdays in _day_rules(trigger.cron):
        week = ",".join(_DAYS[day][:3] for day in weekdays) + " " if weekdays else ""
        date = f"*-{_systemd_list(_restricted(trigger.cron.month.values, 12))}-{_systemd_list(days)}"
        hours = _systemd_list(_restricted(trigger.cron.hour.values, 24))
        minutes = _systemd_list(_restricted(trigger.cron.minute.values, 60))
        lines.append(f"OnCalendar={week}{date} {hours}:{minutes}:00")
    return [*lines, "Persistent=true"]


def _systemd_list(values: Sequence[int] | None) -> str:
    return ",".join(f"{value:02}" for value in values) if values else "*"


# -- what the fields of a cron expression restrict -------------------------------------------------------------------------


def _restricted(values: Sequence[int], n_all: int) -> Sequence[int] | None:
    """The values that a field allows; None if it allows all."""
    return None if len(values) == n_all else values


def _day_rules(cron: Cron) -> list[tuple[Sequence[int] | None, Sequence[int] | None]]:
    """Rules of days and weekdays. Both of one rule must match; of two rules, one must."""
    days, weekdays = _restricted(cron.day.values, 31), _restricted(cron.weekday.values, 7)
    if not cron.either_day:
        return [(days, weekdays)]
    return [(days, None), (None, weekdays)] if days and weekdays else [(None, None)]


# -- cron ----------------------------------------------------------------------------------------------------------------


def cron_block(job: Job, flock: str | None, lock_folder: str) -> str:
    """The line for a crontab, between two marker lines by which it is found again. `flock` is the program of that name, if it is
    installed; without it, only the collector's lease prevents two runs at a time.
    """
    settings = [f"{name}={value}" for name, value in job.environment.items()]
    command = shlex.join([*(["env", *settings] if settings else []), *job.delayed_words, "--quiet"])
    if flock is not None:
        lock = shlex.join([flock, "-n", f"{lock_folder}/schedule.lock"])
        command = f"mkdir -p {shlex.quote(lock_folder)} && {lock} {command}"
    # For cron an unescaped % ends the line; it removes the backslash before the shell reads the line.
    return f"{CRON_BEGIN}\n{cron_fields(job.trigger)} {command.replace('%', chr(92) + '%')}\n{CRON_END}\n"


def cron_fields(trigger: Trigger) -> str:
    """The five time fields of the line.

    Raises:
        BadInput: cron cannot express the interval. It must be minutes that divide an hour, hours that divide a day, a day or a
            week.
    """
    from llama_ckpt.errors import BadInput

    if (cron := trigger.cron) is not None:
        # Value by value, since crons differ in what else they read; but if a field of days starts with *, both must match.
        fields = (cron.minute, cron.hour, cron.day, cron.month, cron.weekday)
        pairs = zip(trigger.spec.split(), fields, strict=True)
        return " ".join(text if text.startswith("*") else ",".join(map(str, field.values)) for text, field in pairs)
    every_s = trigger.every_s or 0.0
    minutes, rest_s = divmod(every_s, 60)
    if not rest_s and 1 <= minutes < 60 and 60 % minutes == 0:
        return f"*/{minutes:.0f} * * * *"
    hours, rest_s = divmod(every_s, 3600)
    if not rest_s and 1 <= hours < 24 and 24 % hours == 0:
        return f"0 */{hours:.0f} * * *"
    if not rest_s and hours in (24, 168):
        return "0 0 * * *" if hours == 24 else "0 0 * * 0"
    reason = (
        "cron can only do minutes that divide an hour, hours that divide a day, 1d and 7d; or use --cron-expression"
    )
    raise BadInput(what="--every", value=trigger.spec.removeprefix("every "), reason=reason)


def without_cron_block(crontab: str) -> str:
    """A crontab without the lines of this program.

    Raises:
        BadInput: the marker line that ends them is missing.
    """
    from llama_ckpt.errors import BadInput

    lines = crontab.splitlines(keepends=True)
    bare = [line.rstrip("\r\n") for line in lines]
    while CRON_BEGIN in bare:
        begin = bare.index(CRON_BEGIN)
        if CRON_END not in bare[begin:]:
            raise BadInput(
                what="crontab", value=CRON_BEGIN, reason=f"no line {CRON_END!r} follows; delete the lines by hand"
            )
        end = bare.index(CRON_END, begin) + 1
        del lines[begin:end], bare[begin:end]
    return "".join(lines)


# -- launchd -------------------------------------------------------------------------------------------------------------


def launchd_plist(job: Job, log_file: str) -> str:
    """The property list of an agent. launchd does not start it while it is still active.

    Raises:
        BadInput: the cron expression has more times than an agent can have.
    """
    agent: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": job.delayed_words,
        "ProcessType": "Background",
        "StandardErrorPath": log_file,
    }
    if job.environment:
        agent["EnvironmentVariables"] = dict(job.environment)
    if job.trigger.cron is None:
        agent["StartInterval"] = round(job.trigger.every_s or 0)
    else:
        agent["StartCalendarInterval"] = _launchd_times(job.trigger.cron, job.trigger.spec)
    return plistlib.dumps(agent).decode().replace("\t", "  ")  # no word of a job has a tab


def _launchd_times(cron: Cron, spec: str) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    for days, weekdays in _day_rules(cron):
        fields = {
            "Minute": _restricted(cron.minute.values, 60),
            "Hour": _restricted(cron.hour.values, 24),
            "Day": days,
            "Month": _restricted(cron.month.values, 12),
            "Weekday": weekdays,
        }
        named = {name: values for name, values in fields.items() if values is not None}
        found += [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]
    if len(found) > _MAX_LAUNCHD_TIMES:
        raise _too_many(spec, len(found), "launchd")
    return found


def _too_many(spec: str, n: int, of: str) -> Exception:
    from llama_ckpt.errors import BadInput

    return BadInput(what="cron expression", value=spec, reason=f"it has {n:,} times, too many for {of}; use --every")


# -- Windows -------------------------------------------------------------------------------------------------------------


def windows_xml(job: Job) -> str:
    """The task as `schtasks /Create /XML` reads it, in ASCII. A start while the task is still active is ignored.

    Raises:
        BadInput: an interval below a minute or above 31 days; a cron expression that needs more than 48 triggers.
    """
    task = ET.Element("Task", version="1.2", xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task")
    _add(_add(task, "RegistrationInfo"), "Description", f"{_DESCRIPTION}: {job.trigger.spec}")
    triggers = _add(task, "Triggers")
    if job.trigger.cron is None:
        _windows_interval(triggers, job)
    else:
        _windows_calendar(triggers, job.trigger.cron, job)
    settings = _add(task, "Settings")
    for name, value in (
        ("MultipleInstancesPolicy", "IgnoreNew"),
        ("DisallowStartIfOnBatteries", "false"),
        ("StopIfGoingOnBatteries", "false"),
        ("StartWhenAvailable", "true"),
        ("ExecutionTimeLimit", "PT0S"),
    ):
        _add(settings, name, value)
    action = _add(_add(task, "Actions"), "Exec")
    program, *rest = job.words
    _add(action, "Command", program)
    _add(action, "Arguments", subprocess.list2cmdline(rest))
    ET.indent(task)
    # No encoding is declared, and none is needed: characters beyond ASCII are written as references.
    text: str = ET.tostring(task, encoding="us-ascii", xml_declaration=False).decode()
    return f'<?xml version="1.0"?>\n{text}\n'


def _add(parent: ET.Element, name: str, text: str | None = None) -> ET.Element:
    child = ET.SubElement(parent, name)
    child.text = text
    return child


def _windows_interval(triggers: ET.Element, job: Job) -> None:
    from llama_ckpt.errors import BadInput

    every_s = job.trigger.every_s or 0
    if not 60 <= every_s <= 31 * 86_400:
        value = job.trigger.spec.removeprefix("every ")
        raise BadInput(what="--every", value=value, reason="Windows accepts 1m to 31d")
    _windows_trigger(triggers, "TimeTrigger", "00:00", job, repeated=(f"PT{every_s:.0f}S", None))


def _windows_trigger(
    triggers: ET.Element, kind: str, at: str, job: Job, repeated: tuple[str, str | None] | None = None
) -> ET.Element:
    """A trigger that starts at a time of day. The elements are in the order in which Windows writes them."""
    trigger = _add(triggers, kind)
    if repeated is not None:
        repetition = _add(trigger, "Repetition")
        _add(repetition, "Interval", repeated[0])
        if repeated[1] is not None:
            _add(repetition, "Duration", repeated[1])
    _add(trigger, "StartBoundary", f"2024-01-01T{at}:00")
    _add(trigger, "Enabled", "true")
    if job.jitter_s >= 1:
        _add(trigger, "RandomDelay", f"PT{job.jitter_s:.0f}S")
    return trigger


def _windows_calendar(triggers: ET.Element, cron: Cron, job: Job) -> None:
    hours = _restricted(cron.hour.values, 24)
    times = [f"{hour:02}:{minute:02}" for hour in hours or (0,) for minute in cron.minute.values]
    repeated = None if hours else ("PT1H", "P1D")  # each hour of the day
    rules = _day_rules(cron)
    if len(times) * len(rules) > _MAX_WINDOWS_TRIGGERS:
        raise _too_many(job.trigger.spec, len(times) * len(rules), "Windows")
    months = [_MONTHS[month - 1] for month in cron.month.values]
    for (days, weekdays), at in itertools.product(rules, times):
        trigger = _windows_trigger(triggers, "CalendarTrigger", at, job, repeated)
        _windows_days(trigger, days, weekdays, months, job.trigger.spec)


def _windows_days(
    trigger: ET.Element, days: Sequence[int] | None, weekdays: Sequence[int] | None, months: Sequence[str], spec: str
) -> None:
    from llama_ckpt.errors import BadInput

    if days is not None and weekdays is not None:
        raise BadInput(
            what="cron expression", value=spec, reason="Windows cannot combine a day of the month with a weekday"
        )
    if weekdays is not None and len(months) == 12:
        week = _add(trigger, "ScheduleByWeek")
        _names(_add(week, "DaysOfWeek"), (_DAYS[day] for day in weekdays))
        _add(week, "WeeksInterval", "1")
    elif weekdays is not None:
        month = _add(trigger, "ScheduleByMonthDayOfWeek")
        weeks = _add(month, "Weeks")
        for week_of_month in ("1", "2", "3", "4", "Last"):
            _add(weeks, "Week", week_of_month)
        _names(_add(month, "DaysOfWeek"), (_DAYS[day] for day in weekdays))
        _names(_add(month, "Months"), months)
    elif days is not None or len(months) < 12:
        month = _add(trigger, "ScheduleByMonth")
        of_month = _add(month, "DaysOfMonth")
        for day in days or range(1, 32):
            _add(of_month, "Day", str(day))
        _names(_add(month, "Months"), months)
    else:
        _add(_add(trigger, "ScheduleByDay"), "DaysInterval", "1")


def _names(parent: ET.Element, names: Sequence[str] | Iterator[str]) -> None:
    for name in names:
        _add(parent, name)
