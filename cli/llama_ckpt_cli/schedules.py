"""The commands of `schedule`: run prune and gc by a clock of our own, or have the system's do it; and say what became of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.output import when
from llama_ckpt_cli.session import GRACES, LIMITS, Session, command

if TYPE_CHECKING:
    from llama_ckpt.collector.schedule import ScheduledRun, ScheduleStatus
    from llama_ckpt_cli.schedule_install import Target
    from llama_ckpt_cli.schedule_units import Job

_PASSWORD_FILE = "LLAMA_CKPT_DATABASE_PASSWORD_FILE"  # noqa: S105 - the name of a variable
_EVERY = "15m"

Every = Annotated[str | None, typer.Option(help="Run every so often, e.g. 15m or 1d.", show_default=False)]
CronTimes = Annotated[str | None, typer.Option(help="Run by a cron expression, e.g. '17 3 * * *'.", show_default=False)]
Name = Annotated[
    str | None, typer.Option(help="What status calls it. Default: the names of host and store.", show_default=False)
]
Jitter = Annotated[
    str | None,
    typer.Option(
        help="Longest random delay of a run. Default: a tenth of the interval, 1m at most.", show_default=False
    ),
]
Systemd = Annotated[bool, typer.Option("--systemd", help="A timer of systemd, of this user.")]
Cron = Annotated[bool, typer.Option("--cron", help="A line of this user's crontab.")]
Launchd = Annotated[bool, typer.Option("--launchd", help="An agent of launchd (macOS).")]
Windows = Annotated[bool, typer.Option("--windows", help="A task of the Windows task scheduler.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(help="Prune and gc by the clock.", no_args_is_help=True, rich_markup_mode=None)
    command(group, "run", policy=LIMITS + GRACES)(run)
    command(group, "install", policy=LIMITS + GRACES)(install)
    command(group, "uninstall")(uninstall)
    command(group, "status")(status)
    app.add_typer(group, name="schedule")


# -- run -----------------------------------------------------------------------------------------------------------------


def run(
    session: Session,
    every: Every = None,
    cron: CronTimes = None,
    jitter: Jitter = None,
    once: Annotated[bool, typer.Option("--once", help="Run once, now, and end: for a timer of the system.")] = False,
    name: Name = None,
) -> None:
    """Prune by the policy and free what is due, again and again, until SIGTERM or Ctrl-C. One run at a time over all hosts."""
    from llama_ckpt.collector.schedule import CollectorSchedule
    from llama_ckpt.collector.triggers import Trigger

    if once:
        return _run_once(session, every or cron, jitter, name)
    trigger, policy = Trigger.of(every=every, cron=cron), session.policy()
    runs: list[int] = []
    with _stop_signals() as stop, session.registry() as registry:
        schedule = CollectorSchedule(
            registry.context, policy, trigger, jitter_s=_seconds(jitter), name=name, on_run=lambda _: runs.append(1)
        )
        schedule.run_forever(stop)
    told = f"stopped after {count(len(runs), 'run')}"
    return session.out.result({"n_runs": len(runs)}, lambda: session.out.note(told), [])


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set. A second one ends the process at once: it need not wait for a long run."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def on_signal(_number: int, _frame: object) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, on_signal)
    if before[signal.SIGINT] == signal.SIG_IGN:  # a job that a shell put into the background
        before[signal.SIGINT] = signal.default_int_handler
    try:
        yield stop
    finally:
        restore()


def _run_once(session: Session, times: str | None, jitter: str | None, name: str | None) -> None:
    from llama_ckpt.collector.schedule import random_delay_s, run_once
    from llama_ckpt.errors import BadInput, LlamaCkptError, StoreUnavailable

    if times is not None:
        raise BadInput(what="--once", value=times, reason="leave --every and --cron away")
    policy = session.policy()
    if jitter is not None:
        threading.Event().wait(random_delay_s(_seconds(jitter) or 0.0))
    with session.registry() as registry:
        ran = run_once(registry.context, policy, name=name)
        root = registry.store.root
    if ran.problem is not None and not ran.busy:
        raise ran.problem
    if ran.summary is None and not ran.busy:
        raise LlamaCkptError(detail=ran.result)
    value = {"result": ran.result, "sweep": ran.summary, "problem": ran.problem, "next_us": ran.next_us}
    session.out.result(value, lambda: _tell_run(session, ran), [])
    if ran.summary is not None and ran.summary.n_failed:  # the timer must notice
        reason = f"{count(ran.summary.n_failed, 'file')} could not be deleted; the next run tries again"
        raise StoreUnavailable(path=root, reason=reason)


def _tell_run(session: Session, ran: ScheduledRun) -> None:
    if ran.summary is None:
        session.out.line("nothing done: another run is under way")
    else:
        did = (
            f"{count(ran.summary.n_marked, 'checkpoint')} marked STALE, {count(ran.summary.n_items, 'item')} collected"
        )
        session.out.line(f"{did}, {size(ran.summary.freed_bytes)} freed")


def _seconds(jitter: str | None) -> float | None:
    from llama_ckpt.collector.triggers import MAX_JITTER_S
    from llama_ckpt.config import seconds
    from llama_ckpt.errors import BadInput

    found = None if jitter is None else seconds(jitter, "--jitter")
    if found is not None and found > MAX_JITTER_S:
        raise BadInput(what="--jitter", value=jitter, reason="give a day at most")
    return found


# -- install, uninstall --------------------------------------------------------------------------------------------------


CronExpression = Annotated[
    str | None, typer.Option(help="Run by a cron expression instead, e.g. '17 3 * * *'.", show_default=False)
]


def install(
    session: Session,
    systemd: Systemd = False,
    cron: Cron = False,
    launchd: Launchd = False,
    windows: Windows = False,
    every: Every = None,
    cron_expression: CronExpression = None,
    jitter: Jitter = None,
    write: Annotated[bool, typer.Option("--write", help="Install it. Without: only print it.")] = False,
) -> None:
    """Print what the system's timer needs to run prune and gc; with --write, install it. Default: every 15 minutes."""
    kind, target = _target(systemd=systemd, cron=cron, launchd=launchd, windows=windows)
    texts = target.texts(_job(session, every, cron_expression, jitter))
    if kind == "windows" and os.environ.get(_PASSWORD_FILE):
        session.out.note(f"a task has no environment: give the account {_PASSWORD_FILE}")
    written = target.write(texts) if write else []
    shown = [f"installed: {place}" for place in written]
    shown = shown or [_with_comment(name, text, target.advice) for name, text in texts.items()]
    bare = written or [text.rstrip("\n") for text in texts.values()]
    result = {"kind": kind, "texts": texts, "written": written}
    session.out.result(result, lambda: session.out.line("\n".join(shown)), bare)


def uninstall(
    session: Session, systemd: Systemd = False, cron: Cron = False, launchd: Launchd = False, windows: Windows = False
) -> None:
    """Take away what install --write put there. What is not there is no error."""
    kind, target = _target(systemd=systemd, cron=cron, launchd=launchd, windows=windows)
    removed = target.remove()

    def human() -> None:
        for line in [f"removed: {place}" for place in removed] or [f"nothing of ours is in {kind}"]:
            session.out.line(line)

    session.out.result({"kind": kind, "removed": removed}, human, removed)


def _target(**wanted: bool) -> tuple[str, Target]:
    from llama_ckpt.errors import BadInput
    from llama_ckpt_cli.schedule_install import TARGETS

    named = [kind for kind, yes in wanted.items() if yes]
    if len(named) != 1:
        reason = "name one: --systemd, --cron, --launchd or --windows"
        raise BadInput(what="timer", value=", ".join(named) or "none", reason=reason)
    return named[0], TARGETS[named[0]]


def _job(session: Session, every: str | None, cron: str | None, jitter: str | None) -> Job:
    from llama_ckpt.collector.triggers import Trigger
    from llama_ckpt_cli.schedule_units import Job

    trigger = Trigger.of(every=every or (None if cron else _EVERY), cron=cron)
    session.policy()  # what it refuses is told now, not at night
    words = [*_program(), "schedule", "run", "--once", "--store", str(session.root)]
    words += ["--database-url", _shareable_url(session), *_policy_words(session)]
    password_file = os.environ.get(_PASSWORD_FILE)
    return Job(
        words=words,
        trigger=trigger,
        jitter_s=trigger.jitter_s(_seconds(jitter)),
        environment={_PASSWORD_FILE: str(Path(password_file).absolute())} if password_file else {},
    )


def _program() -> list[str]:
    """The absolute words that start this program again, from this very installation."""
    script = Path(sys.executable).with_name("llama-ckpt.exe" if sys.platform == "win32" else "llama-ckpt")
    return [str(script)] if script.is_file() else [str(Path(sys.executable).absolute()), "-m", "llama_ckpt_cli"]


def _shareable_url(session: Session) -> str:
    """The database's URL, which must not have a password: a unit can be read by others, and shows in the process list."""
    from llama_ckpt.db.connect import Database, hide_password, sqlite_url
    from llama_ckpt.errors import BadInput

    database = Database(session.database_url)
    database.close()
    url = database.url.render_as_string(hide_password=False)
    if database.url.password is not None or database.shown_url != url:
        reason = f"a unit would show its password; put it into a file, and the file's name into {_PASSWORD_FILE}"
        raise BadInput(what="database URL", value=hide_password(session.database_url), reason=reason)
    if os.environ.get("LLAMA_CKPT_DATABASE_PASSWORD") is not None:
        session.out.note(f"LLAMA_CKPT_DATABASE_PASSWORD will not be set there; use {_PASSWORD_FILE}")
    # A timer starts its command in another folder than this one.
    return sqlite_url(Path(database.url.database or "").absolute()) if database.dialect == "sqlite" else url


def _policy_words(session: Session) -> list[str]:
    """The policy as options, but for what the timer's run will find itself, in the user's settings file."""
    from llama_ckpt.config import config_file

    found_there = "default", *(() if "LLAMA_CKPT_CONFIG" in os.environ else (f"file {config_file(os.environ)}",))
    words = []
    for name in LIMITS + GRACES:
        setting = session.settings[name]
        if setting.origin not in found_there:
            words += ["--" + name.replace("_", "-"), setting.value]
    return words


def _with_comment(name: str, text: str, advice: str) -> str:
    if not text.startswith("<?xml"):
        return f"# {name}: {advice}\n{text}".rstrip("\n")
    head, _, rest = text.partition("\n")  # nothing may stand before an XML declaration
    return f"{head}\n<!-- {name}: {advice} -->\n{rest}".rstrip("\n")


# -- status --------------------------------------------------------------------------------------------------------------


def status(session: Session) -> None:
    """Show every schedule of this registry: when it ran, what came of it, when it runs next."""
    from llama_ckpt.collector.schedule import statuses

    with session.existing_registry(upgrade=False) as there:
        found = statuses(there.context) if there else []

    def human() -> None:
        rows = [[s.holder, s.spec, when(s.last_us), s.last_result or "-", _next(s)] for s in found]
        if rows:
            session.out.table(["host and store", "schedule", "last run", "result", "next run"], rows)
        session.out.line(count(len(found), "schedule"))

    names = ("holder", "spec", "started_us", "last_us", "last_result", "next_us")
    value = [{**{name: getattr(s, name) for name in names}, "standing": s.state} for s in found]
    session.out.result(value, human, [f"{s.state} {s.holder}" for s in found])


def _next(found: ScheduleStatus) -> str:
    from llama_ckpt.gc_values import ScheduleState

    if found.state is ScheduleState.WAITING:
        return when(found.next_us)
    due = f" (due {when(found.next_us)})" if found.state is ScheduleState.OVERDUE else ""
    return f"{found.state}{due}"
