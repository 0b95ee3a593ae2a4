"""What `doctor` says of one thing it looked at: a level, what was measured, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from llama_ckpt.errors import LlamaCkptError

CLOCK_WARN_S = 5.0  # from here on ages and expiries are visibly off
CLOCK_FAIL_S = 300.0  # from here on gc refuses to run


class Level(StrEnum):
    """How well it is with one thing."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line: what was looked at, how it is, what was measured, and what to do about it ("" where nothing is to be done)."""

    name: str
    level: Level
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        told = f"{self.level:<5} {self.name}: {self.detail}" + (f": {self.advice}" if self.advice else "")
        return told.replace("\n", "\\n")  # one line, whatever stands in a path or in another program's message


def ok(name: str, detail: str) -> Diagnosis:
    """Nothing to do."""
    return Diagnosis(name, Level.OK, detail)


def warn(name: str, detail: str, advice: str = "") -> Diagnosis:
    """It works, and there is something that somebody should know."""
    return Diagnosis(name, Level.WARN, detail, advice)


def fail(name: str, detail: str, advice: str = "") -> Diagnosis:
    """It does not work."""
    return Diagnosis(name, Level.FAIL, detail, advice)


def not_checked(name: str, why: str) -> Diagnosis:
    """Nothing is known, because something before it is not as it should be; that one's line says what to do."""
    return warn(name, f"not checked: {why}")


def worst(found: Iterable[Diagnosis]) -> Level:
    """The worst level there is; OK when there is none."""
    return max((diagnosis.level for diagnosis in found), key=list(Level).index, default=Level.OK)


def guarded(name: str, check: Callable[[], Diagnosis]) -> Diagnosis:
    """The check's own answer, or a FAIL that tells how it failed: one broken check must not hide what the others find."""
    try:
        return check()
    except LlamaCkptError as error:
        return fail(name, str(error))
    except OSError as error:
        return fail(name, f"the system refuses: {error}")
    except Exception as error:  # noqa: BLE001 - what is broken here is broken in ways that nobody foresaw
        return fail(name, f"the check itself failed: {type(error).__name__}: {error}", "report it")


def of_clocks(name: str, what: str, ahead_s: float) -> Diagnosis:
    """A clock that is `ahead_s` seconds before this host's (negative: behind it)."""
    apart = abs(ahead_s)
    if apart <= CLOCK_WARN_S:
        # Below a tenth of a second it is the time that asking took, or a tick of the clock.
        return ok(name, f"{what} and this host's agree" if apart < 0.1 else f"{what} is {apart:.1f} s off this host's")
    detail = f"{what} is {apart:.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    advice = "set both by NTP; ages, expiries and graces are measured by them"
    if apart > CLOCK_FAIL_S:
        return fail(name, detail, f"{advice}, and gc refuses to run")
    return warn(name, detail, advice)


def apart_s(there: float, before: float, after: float) -> float:
    """How far a clock that showed `there` is from one that showed `before` and `after` around it; 0 where it lies between."""
    return there - after if there > after else min(0.0, there - before)
