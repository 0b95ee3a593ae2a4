"""`Trigger`: when a schedule runs, by an interval or a five-field cron expression.

The cron fields are parsed here, by cron's own rules. APScheduler counts weekdays from Monday and joins day and weekday by "and";
cron counts them from Sunday and joins them by "or".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from llama_ckpt.config import seconds
from llama_ckpt.errors import BadInput

# A run reads every row and lists every file: with a shorter interval a process would do nothing else.
MIN_EVERY_S = 1.0
MAX_EVERY_S = 366 * 86_400.0
MAX_JITTER_S = 86_400.0
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_STEP = re.compile(r"(\*|[0-9a-z]{1,3}(?:-[0-9a-z]{1,3})?)(?:/([0-9]{1,2}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CronField:
    """One field: the values it allows, in order, and whether it starts with `*`, which for cron is no restriction."""

    values: tuple[int, ...]
    star: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """The five fields of a cron expression. Weekdays count from 0, which is Sunday."""

    minute: CronField
    hour: CronField
    day: CronField
    month: CronField
    weekday: CronField

    @property
    def either_day(self) -> bool:
        """Whether day and weekday are both restricted. Then it runs on the days that one of them allows."""
        return not self.day.star and not self.weekday.star


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """When to run: every `every_s` seconds, or by `cron` in the machine's time zone. `spec` is the user's text."""

    spec: str
    every_s: float | None = None
    cron: Cron | None = None

    @classmethod
    def of(cls, *, every: str | None = None, cron: str | None = None) -> Trigger:
        """A trigger by a duration such as `15m`, or by a cron expression such as `17 3 * * mon-fri`. Give one of them.

        Raises:
            BadInput: both or neither is given, or it cannot be parsed, or no date ever matches it.
        """
        if every is not None and cron is None:
            every_s = seconds(every, "--every")
            if not MIN_EVERY_S <= every_s <= MAX_EVERY_S:
                raise BadInput(what="--every", value=every, reason="give a time from 1s to 366d")
            return cls(spec=f"every {every.strip()}", every_s=every_s)
        if cron is not None and every is None:
            made = cls(spec=" ".join(cron.split()), cron=parse_cron(cron))
            if made.build(0).get_next_fire_time(None, datetime.now().astimezone()) is None:
                raise BadInput(what="cron expression", value=cron, reason="there is no such day")
            return made
        raise BadInput(
            what="schedule", value=f"every={every}, cron={cron}", reason="give one: every so often, or by cron"
        )

    def jitter_s(self, wanted_s: float | None) -> float:
        """The longest random delay of a run in seconds: `wanted_s`, or if it is None a tenth of the interval, at most a minute.

        Raises:
            BadInput: it is longer than the interval or a day.
        """
        longest = min(self.every_s or MAX_JITTER_S, MAX_JITTER_S)
        if wanted_s is None:
            return min(60.0, longest / 10)
        if not 0 <= wanted_s <= longest:
            raise BadInput(what="--jitter", value=f"{wanted_s:g} s", reason="give at most the interval, or a day")
        return wanted_s

    def build(self, jitter_s: float) -> Any:
        """The same trigger as an object of APScheduler.

        Raises:
            BadInput: the machine's time zone is not known.
        """
        from apscheduler.triggers.combining import OrTrigger
        from apscheduler.triggers.cron import CronTrigger
        from apscheduler.triggers.interval import IntervalTrigger

        if self.every_s is not None:
            return IntervalTrigger(seconds=self.every_s, jitter=jitter_s, timezone=UTC)
        assert self.cron is not None  # noqa: S101 - narrows the type
        zone = local_zone()
        names = ("minute", "hour", "day", "month")
        fields = {name: _listed(getattr(self.cron, name)) for name in names}
        week = {"day_of_week": _listed(self.cron.weekday, WEEKDAYS)}
        alternatives = [{**fields, **week}]
        if self.cron.either_day:
            alternatives = [fields, {**fields, **week, "day": "*"}]
        return OrTrigger([CronTrigger(**each, timezone=zone) for each in alternatives], jitter=jitter_s)


def local_zone() -> Any:
    """The machine's time zone, by the variable TZ or the system's setting.

    Raises:
        BadInput: it names a zone that is not known.
    """
    from tzlocal import reload_localzone

    try:
        with warnings.catch_warnings():
            # Without a setting, as in many containers, it is UTC, for cron as well.
            warnings.filterwarnings("ignore", message="Can not find any timezone")
            return reload_localzone()
    except (LookupError, ValueError, OSError) as error:
        reason = f"{str(error.args[0]).splitlines()[0]} Set TZ, e.g. TZ=UTC"
        raise BadInput(what="time zone", value="of this machine", reason=reason) from error


def parse_cron(text: str) -> Cron:
    """The fields of a cron expression: minute, hour, day, month, weekday; each `*`, numbers, ranges, steps, lists, names.

    Raises:
        BadInput: it is no cron expression.
    """
    fields = text.lower().split()
    if len(fields) != 5:
        raise BadInput(what="cron expression", value=text, reason="expected five fields, e.g. 17 3 * * mon-fri")
    minute, hour, day, month, weekday = fields
    return Cron(
        minute=_field(text, minute, 0, 59),
        hour=_field(text, hour, 0, 23),
        day=_field(text, day, 1, 31),
        month=_field(text, month, 1, 12, _MONTHS),
        weekday=_field(text, weekday, 0, 7, WEEKDAYS),
    )


def _field(text: str, field: str, low: int, high: int, names: Sequence[str] = ()) -> CronField:
    """The values of one field, whose numbers go from `low` to `high`; `text` is the complete expression."""
    values: set[int] = set()
    for part in field.split(","):
        allowed = _values(part, low, high, names)
        if not allowed:
            reason = f"{part!r} is no minute, hour, day, month or weekday in its place"
            raise BadInput(what="cron expression", value=text, reason=reason)
        values.update(allowed)
    if names is WEEKDAYS:
        values = {value % 7 for value in values}
    return CronField(tuple(sorted(values)), field.startswith("*"))


def _values(part: str, low: int, high: int, names: Sequence[str]) -> range:
    """The values of one part of a field, such as `*/15`, `5`, `mon-fri`; an empty range if it cannot be parsed."""
    nothing = range(0)
    match = _STEP.fullmatch(part)
    if match is None or (step := int(match[2] or 1)) < 1:
        return nothing
    first, last = _ends(match[1], low, high, names)
    if "-" not in match[1] and match[1] != "*" and match[2]:
        last = high  # 5/15 is 5-59/15
    return range(first, last + 1, step) if low <= first <= last <= high else nothing


def _ends(span: str, low: int, high: int, names: Sequence[str]) -> tuple[int, int]:
    """The first and the last value of `*`, a value or a range."""
    if span == "*":
        return low, 6 if names is WEEKDAYS else high
    first, *rest = (_number(end, low, names) for end in span.split("-"))
    last = rest[0] if rest else first
    if names is WEEKDAYS and rest and last == 0 < first:
        last = 7  # fri-sun: Sunday is the last day of a week as well as the first
    return first, last


def _number(text: str, low: int, names: Sequence[str]) -> int:
    """A number or a name as a number; -1 if it is neither."""
    if text in names:
        return names.index(text) + low
    return int(text) if text.isdecimal() else -1


def _listed(field: CronField, names: Sequence[str] = ()) -> str:
    return ",".join(names[value] if names else str(value) for value in field.values)
