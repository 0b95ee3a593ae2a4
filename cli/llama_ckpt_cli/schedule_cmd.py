"""The commands that run prune and gc regularly: schedule run, schedule install, schedule uninstall, schedule status."""

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

from llama_ckpt.humanize import bytes_, plural, timestamp
from llama_ckpt_cli.help_format import OPERATE, HelpGroup
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.policy_options import GRACES, LIMITS
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.collector.schedule import ScheduledRun, ScheduleStatus
    from llama_ckpt_cli.output import Output
    from llama_ckpt_cli.timers.install import Target
    from llama_ckpt_cli.timers.units import Job

_PASSWORD_FILE = "LLAMA_CKPT_DATABASE_PASSWORD_FILE"  # noqa: S105 - the name of a variable
_EVERY = "15m"

Every = Annotated[
    str | None,
    typer.Option("--every", help="Run at this interval, e.g. 15m or 1d.", show_default=False, metavar="TIME"),
]
CronTimes = Annotated[
    str | None,
    typer.Option(
        "--cron", help="Run at the times of a cron expression, e.g. '17 3 * * *'.", show_default=False, metavar="CRON"
    ),
]
CronExpression = Annotated[
    str | None,
    typer.Option(
        "--cron-expression",
        help="Run at the times of a cron expression instead of an interval, e.g. '17 3 * * *'.",
        show_default=False,
        metavar="CRON",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of this schedule in `schedule status` (default: host and store).",
        show_default=False,
        metavar="NAME",
    ),
]
Jitter = Annotated[
    str | None,
    typer.Option(
        "--jitter",
        help="Longest random delay before a run (default: a tenth of the interval, at most 1m).",
        show_default=False,
        metavar="TIME",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Run once, now, and exit: for a timer of the system.")]
Write = Annotated[
    bool,
    typer.Option(
        "--write", help="Install the timer, in place of an earlier one. Without this option it is only printed."
    ),
]
Systemd = Annotated[bool, typer.Option("--systemd", help="Use a systemd timer of this user.")]
Cron = Annotated[bool, typer.Option("--cron", help="Use a line in this user's crontab.")]
Launchd = Annotated[bool, typer.Option("--launchd", help="Use a launchd agent (macOS).")]
Windows = Annotated[bool, typer.Option("--windows", help="Use a task of the Windows task scheduler.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    help_text = "Run prune and gc regularly: by this program itself, or by a timer of the system."
    group = typer.Typer(cls=HelpGroup, help=help_text, no_args_is_help=True, rich_markup_mode=None)
    command(group, "run", policy=LIMITS + GRACES)(run)
    command(group, "install", policy=LIMITS + GRACES)(install)
    command(group, "uninstall")(uninstall)
    command(group, "status")(status)
    app.add_typer(group, name="schedule", rich_help_panel=OPERATE)


# -- run -----------------------------------------------------------------------------------------------------------------


def run(
    invocation: Invocation,
    *,
    every: Every = None,
    cron: CronTimes = None,
    jitter: Jitter = None,
    once: Once = False,
    name: Name = None,
) -> None:
    """Run prune and gc at intervals, without asking, until SIGTERM or Ctrl-C. Only one run is active at a time over all hosts."""
    from llama_ckpt.collector.schedule import CollectorSchedule
    from llama_ckpt.collector.triggers import Trigger

    if once:
        return _run_once(invocation, every or cron, jitter, name)
    trigger, policy = Trigger.of(every=every, cron=cron), invocation.policy()
    runs: list[int] = []
    with _stop_signals() as stop, invocation.registry() as registry:
        schedule = CollectorSchedule(
            registry.context, policy, trigger, jitter_s=_seconds(jitter), name=name, on_run=lambda _: runs.append(1)
        )
        schedule.run_forever(stop)
    ended = f"stopped after {plural(len(runs), 'run')}"
    return invocation.out.result({"n_runs": len(runs)}, lambda: invocation.out.note(ended), [])


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set. A second signal ends the process immediately, without waiting for a long run."""
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


def _run_once(invocation: Invocation, times: str | None, jitter: str | None, name: str | None) -> None:
    from llama_ckpt.collector.schedule import random_delay_s, run_once
    from llama_ckpt.errors import BadInput, LlamaCkptError, StoreUnavailable

    if times is not None:
        raise BadInput(what="--once", value=times, reason="do not use it with --every or --cron")
    policy = invocation.policy()
    if jitter is not None:
        threading.Event().wait(random_delay_s(_seconds(jitter) or 0.0))
    with invocation.registry() as registry:
        ran = run_once(registry.context, policy, name=name)
        root = registry.store.root
    if ran.problem is not None and not ran.busy:
        raise ran.problem
    if ran.summary is None and not ran.busy:
        raise LlamaCkptError(detail=ran.result)
    value = {"result": ran.result, "sweep": ran.summary, "problem": ran.problem, "next_us": ran.next_us}
    invocation.out.result(value, lambda: _print_run(invocation.out, ran), [])
    if ran.summary is not None and ran.summary.n_failed:  # the timer must notice
        reason = f"{plural(ran.summary.n_failed, 'file')} could not be deleted; the next run tries again"
        raise StoreUnavailable(path=root, reason=reason)


def _print_run(out: Output, ran: ScheduledRun) -> None:
    if ran.summary is None:
        out.line("nothing done: another run is active")
    else:
        did = f"{plural(ran.summary.n_marked, 'checkpoint')} marked STALE, {plural(ran.summary.n_items, 'item')} collected"
        out.line(f"{did}, {bytes_(ran.summary.freed_bytes)} freed")


def _seconds(jitter: str | None) -> float | None:
    from llama_ckpt.collector.triggers import MAX_JITTER_S
    from llama_ckpt.config import seconds
    from llama_ckpt.errors import BadInput

    jitter_s = None if jitter is None else seconds(jitter, "--jitter")
    if jitter_s is not None and jitter_s > MAX_JITTER_S:
        raise BadInput(what="--jitter", value=jitter, reason="give at most one day")
    return jitter_s


# -- install, uninstall --------------------------------------------------------------------------------------------------


def install(
    invocation: Invocation,
    *,
    systemd: Systemd = False,
    cron: Cron = False,
    launchd: Launchd = False,
    windows: Windows = False,
    every: Every = None,
    cron_expression: CronExpression = None,
    jitter: Jitter = None,
    write: Write = False,
) -> None:
    """Print what a timer of the system needs to run prune and gc, or install it with --write. Give exactly one of --systemd,
    --cron, --launchd and --windows. The runs delete files without asking. Default: every 15 minutes.
    """
    kind, target = _target(systemd=systemd, cron=cron, launchd=launchd, windows=windows)
    texts = target.texts(_job(invocation, every, cron_expression, jitter))
    if kind == "windows" and os.environ.get(_PASSWORD_FILE):
        invocation.out.note(f"a Windows task has no environment: set {_PASSWORD_FILE} for the user account")
    written = target.write(texts) if write else []
    shown = [f"installed: {place}" for place in written]
    shown = shown or [_with_comment(name, text, target.advice) for name, text in texts.items()]
    bare = written or [text.rstrip("\n") for text in texts.values()]
    result = {"kind": kind, "texts": texts, "written": written}
    invocation.out.result(result, lambda: invocation.out.line("\n".join(shown)), bare)


def uninstall(
    invocation: Invocation,
    *,
    systemd: Systemd = False,
    cron: Cron = False,
    launchd: Launchd = False,
    windows: Windows = False,
) -> None:
    """Remove what `schedule install --write` installed. It is not an error if nothing is installed."""
    kind, target = _target(systemd=systemd, cron=cron, launchd=launchd, windows=windows)
    removed = target.remove()
    lines = [f"removed: {place}" for place in removed] or [f"{kind} has no timer of this program"]
    invocation.out.result({"kind": kind, "removed": removed}, lambda: invocation.out.line("\n".join(lines)), removed)


def _target(**wanted: bool) -> tuple[str, Target]:
    from llama_ckpt.errors import BadInput
    from llama_ckpt_cli.timers.install import TARGETS

    named = [kind for kind, yes in wanted.items() if yes]
    if len(named) != 1:
        reason = "give exactly one of --systemd, --cron, --launchd and --windows"
        raise BadInput(what="timer", value=", ".join(named) or "none", reason=reason)
    return named[0], TARGETS[named[0]]


def _job(invocation: Invocation, every: str | None, cron: str | None, jitter: str | None) -> Job:
    from llama_ckpt.collector.triggers import Trigger
    from llama_ckpt_cli.timers.units import Job

    trigger = Trigger.of(every=every or (None if cron else _EVERY), cron=cron)
    invocation.policy()  # an invalid policy is reported now, not at the first run
    words = [*_program(), "schedule", "run", "--once", "--store", str(invocation.root)]
    words += ["--database-url", _shareable_url(invocation), *_policy_words(invocation)]
    password_file = os.environ.get(_PASSWORD_FILE)
    return Job(
        words=words,
        trigger=trigger,
        jitter_s=trigger.jitter_s(_seconds(jitter)),
        environment={_PASSWORD_FILE: str(Path(password_file).absolute())} if password_file else {},
    )


def _program() -> list[str]:
    """The absolute command that starts this program again, from this installation."""
    script = Path(sys.executable).with_name("llama-ckpt.exe" if sys.platform == "win32" else "llama-ckpt")
    return [str(script)] if script.is_file() else [str(Path(sys.executable).absolute()), "-m", "llama_ckpt_cli"]


def _shareable_url(invocation: Invocation) -> str:
    """The database's URL, which must not have a password: other users can read a unit and the process list."""
    from llama_ckpt.db.connect import Database, hide_password, sqlite_url
    from llama_ckpt.errors import BadInput

    database = Database(invocation.database_url)
    database.close()
    url = database.url.render_as_string(hide_password=False)
    if database.url.password is not None or database.shown_url != url:
        reason = (
            f"a unit would show its password; put the password into a file, and the file's name into {_PASSWORD_FILE}"
        )
        raise BadInput(what="database URL", value=hide_password(invocation.database_url), reason=reason)
    if os.environ.get("LLAMA_CKPT_DATABASE_PASSWORD") is not None:
        invocation.out.note(f"LLAMA_CKPT_DATABASE_PASSWORD will not be set in the timer's runs; use {_PASSWORD_FILE}")
    # A timer starts its command in another folder than this one.
    return sqlite_url(Path(database.url.database or "").absolute()) if database.dialect == "sqlite" else url


def _policy_words(invocation: Invocation) -> list[str]:
    """The policy as options, without what the timer's run reads itself from the user's settings file."""
    from llama_ckpt.config import config_file

    read_there = "default", *(() if "LLAMA_CKPT_CONFIG" in os.environ else (f"file {config_file(os.environ)}",))
    words = []
    for name in LIMITS + GRACES:
        setting = invocation.settings[name]
        if setting.origin not in read_there:
            words += ["--" + name.replace("_", "-"), setting.value]
    return words


def _with_comment(name: str, text: str, advice: str) -> str:
    if not text.startswith("<?xml"):
        return f"# {name}: {advice}\n{text}".rstrip("\n")
    head, _, rest = text.partition("\n")  # nothing may come before an XML declaration
    return f"{head}\n<!-- {name}: {advice} -->\n{rest}".rstrip("\n")


# -- status --------------------------------------------------------------------------------------------------------------


_SCHEDULES = (
    Column(name="host and store", shorten=Shorten.MIDDLE, at_least=14),
    Column(name="schedule", shorten=Shorten.END, at_least=10),
    Column(name="last run", drop_rank=1),
    Column(name="result", shorten=Shorten.END, at_least=12),
    Column(name="next run", shorten=Shorten.END, at_least=23),
)


def status(invocation: Invocation) -> None:
    """Show every schedule of this registry: its last run, the result, and the next run."""
    from llama_ckpt.collector.schedule import statuses

    with invocation.existing_registry(upgrade=False) as registry:
        schedules = statuses(registry.context) if registry else []

    def human() -> None:
        rows = [[s.holder, s.spec, timestamp(s.last_us), s.last_result or "-", _next(s)] for s in schedules]
        if rows:
            invocation.out.table(_SCHEDULES, rows)
        invocation.out.line(plural(len(schedules), "schedule"))

    names = ("holder", "spec", "started_us", "last_us", "last_result", "next_us")
    value = [{**{name: getattr(s, name) for name in names}, "standing": s.state} for s in schedules]
    invocation.out.result(value, human, [f"{s.state} {s.holder}" for s in schedules])


def _next(schedule: ScheduleStatus) -> str:
    from llama_ckpt.gc_values import ScheduleState

    if schedule.state is ScheduleState.WAITING:
        return timestamp(schedule.next_us)
    due = f" (due {timestamp(schedule.next_us)})" if schedule.state is ScheduleState.OVERDUE else ""
    return f"{schedule.state}{due}"
