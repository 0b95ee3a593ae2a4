"""The result of one check of `doctor`: a level, the measurement, and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from llama_ckpt.errors import LlamaCkptError

CLOCK_WARN_S = 5.0  # above this, ages and expiries are visibly wrong
CLOCK_FAIL_S = 300.0  # above this, gc refuses to run


class Level(StrEnum):
    """How serious the result of a check is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report: what was checked, the level, the measurement, and advice ("" if there is nothing to do)."""

    name: str
    level: Level
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.name}: {self.detail}" + (f": {self.advice}" if self.advice else "")
        return line.replace("\n", "\\n")  # paths and other programs' messages may contain line ends


def ok(name: str, detail: str) -> Diagnosis:
    """The check passed; there is nothing to do."""
    return Diagnosis(name, Level.OK, detail)


def warn(name: str, detail: str, advice: str = "") -> Diagnosis:
    """It works, but you should know something."""
    return Diagnosis(name, Level.WARN, detail, advice)


def fail(name: str, detail: str, advice: str = "") -> Diagnosis:
    """It does not work."""
    return Diagnosis(name, Level.FAIL, detail, advice)


def not_checked(name: str, why: str) -> Diagnosis:
    """The check could not be made because an earlier one failed; that one's line has the advice."""
    return warn(name, f"not checked: {why}")


def worst(diagnoses: Iterable[Diagnosis]) -> Level:
    """The most serious level; OK if there is no diagnosis."""
    return max((diagnosis.level for diagnosis in diagnoses), key=list(Level).index, default=Level.OK)


def guarded(name: str, check: Callable[[], Diagnosis]) -> Diagnosis:
    """The result of the check, or a FAIL with its error: one broken check must not hide the results of the others."""
    try:
        return check()
    except LlamaCkptError as error:
        return fail(name, str(error))
    except OSError as error:
        return fail(name, f"the system refuses: {error}")
    except Exception as error:  # noqa: BLE001 - doctor runs where things fail in unforeseen ways
        return fail(name, f"the check itself failed: {type(error).__name__}: {error}", "report it")


def of_clocks(name: str, what: str, ahead_s: float) -> Diagnosis:
    """The diagnosis of a clock that is `ahead_s` seconds ahead of this host's (negative: behind it). `what` names the clock."""
    apart = abs(ahead_s)
    if apart <= CLOCK_WARN_S:
        # A difference below 0.1 s is the duration of the query, or one tick of the clock.
        return ok(name, f"{what} and this host's agree" if apart < 0.1 else f"{what} is {apart:.1f} s off this host's")
    detail = f"{what} is {apart:.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    advice = "set both by NTP; ages, expiries and graces are measured by them"
    if apart > CLOCK_FAIL_S:
        return fail(name, detail, f"{advice}, and gc refuses to run")
    return warn(name, detail, advice)


def clock_ahead_s(reading: float, before: float, after: float) -> float:
    """How many seconds a clock that showed `reading` is ahead of this host's, which showed `before` and `after` around it;
    negative if it is behind, 0 if the reading lies between.
    """
    return reading - after if reading > after else min(0.0, reading - before)
