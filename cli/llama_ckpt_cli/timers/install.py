"""Installs the timers that `units` makes where the system reads them, and removes them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llama_ckpt_cli.timers import units
from llama_ckpt_cli.timers.units import Job

_PATIENCE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One timer of the system: `texts` are its files by name, `advice` says how to install them by hand.

    `write` installs them and gives the places it wrote. `remove` gives the places it cleared, none if nothing was installed.
    """

    texts: Callable[[Job], dict[str, str]]
    advice: str
    write: Callable[[Mapping[str, str]], list[str]]
    remove: Callable[[], list[str]]


# -- shared --------------------------------------------------------------------------------------------------------


def _tool(name: str) -> str:
    from llama_ckpt.errors import Unsupported

    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed on this machine; without --write the timer is only printed"
        raise Unsupported(what="--write", reason=reason)
    return path


def _call(*words: str, given: bytes | None = None, may_fail: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Runs a tool of the system.

    Raises:
        LlamaCkptError: it failed, did not end in time, or cannot be run.
    """
    from llama_ckpt.errors import LlamaCkptError

    shown = " ".join([Path(words[0]).name, *words[1:]])
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - a list of words, no shell
            words, input=given, capture_output=True, env=environment, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LlamaCkptError(detail=f"{shown}: {error}") from error
    if done.returncode and not may_fail:
        message = done.stderr.decode(errors="replace").strip()
        raise LlamaCkptError(detail=f"{shown} ended with exit code {done.returncode}: {message or 'no message'}")
    return done


def _write_files(folder: Path, texts: Mapping[str, str]) -> list[str]:
    from llama_ckpt.errors import LlamaCkptError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LlamaCkptError(detail=f"{folder} cannot be written: {error.strerror}") from error
    return [str(folder / name) for name in texts]


def _delete(*paths: Path) -> list[str]:
    from llama_ckpt.errors import LlamaCkptError

    existing = [path for path in paths if path.exists()]
    try:
        for path in existing:
            path.unlink()
    except OSError as error:
        raise LlamaCkptError(detail=f"{path} cannot be deleted: {error.strerror}") from error
    return [str(path) for path in existing]


# -- systemd -------------------------------------------------------------------------------------------------------------


def _systemd_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def _write_systemd(texts: Mapping[str, str]) -> list[str]:
    systemctl = _tool("systemctl")
    written = _write_files(_systemd_folder(), texts)
    _call(systemctl, "--user", "daemon-reload")
    _call(systemctl, "--user", "enable", f"{units.NAME}.timer")
    _call(systemctl, "--user", "restart", f"{units.NAME}.timer")  # a timer that was active already gets its new times
    return written


def _remove_systemd() -> list[str]:
    paths = [_systemd_folder() / f"{units.NAME}.{kind}" for kind in ("timer", "service")]
    if not any(path.exists() for path in paths):
        return []
    systemctl = shutil.which("systemctl")
    if systemctl is not None:
        # Without a manager for the user (in a container, or after logout) no timer is active, and disabling it fails.
        _call(systemctl, "--user", "disable", "--now", f"{units.NAME}.timer", may_fail=True)
    removed = _delete(*paths)
    if systemctl is not None:
        _call(systemctl, "--user", "daemon-reload", may_fail=True)
    return removed


# -- cron ----------------------------------------------------------------------------------------------------------------


def _cron_texts(job: Job) -> dict[str, str]:
    import platformdirs

    lock_folder = str(platformdirs.user_cache_path("llama-ckpt"))
    return {"crontab": units.cron_block(job, shutil.which("flock"), lock_folder)}


def _crontab(tool: str) -> str:
    """The user's crontab; empty if there is none."""
    from llama_ckpt.errors import LlamaCkptError

    done = _call(tool, "-l", may_fail=True)
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode and "no crontab" not in message.lower() and "no such file" not in message.lower():
        raise LlamaCkptError(detail=f"crontab -l ended with exit code {done.returncode}: {message or 'no message'}")
    return "" if done.returncode else done.stdout.decode("utf-8", "surrogateescape")


def _set_crontab(tool: str, text: str) -> None:
    _call(tool, "-", given=text.encode("utf-8", "surrogateescape"))


def _write_cron(texts: Mapping[str, str]) -> list[str]:
    tool = _tool("crontab")
    kept = units.without_cron_block(_crontab(tool))
    if kept and not kept.endswith("\n"):
        kept += "\n"
    _set_crontab(tool, kept + texts["crontab"])
    return ["crontab"]


def _remove_cron() -> list[str]:
    tool = shutil.which("crontab")
    if tool is None:
        return []
    before = _crontab(tool)
    kept = units.without_cron_block(before)
    if kept == before:
        return []
    _set_crontab(tool, kept)
    return ["crontab"]


# -- launchd -------------------------------------------------------------------------------------------------------------


def _launchd_file() -> Path:
    return Path.home() / "Library" / "LaunchAgents" / f"{units.LABEL}.plist"


def _launchd_texts(job: Job) -> dict[str, str]:
    log_file = str(Path.home() / "Library" / "Logs" / f"{units.NAME}.log")
    return {_launchd_file().name: units.launchd_plist(job, log_file)}


def _launchd_domain() -> str:
    return f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"


def _write_launchd(texts: Mapping[str, str]) -> list[str]:
    launchctl = _tool("launchctl")
    _call(
        launchctl, "bootout", f"{_launchd_domain()}/{units.LABEL}", may_fail=True
    )  # the one installed before, if there is one
    written = _write_files(_launchd_file().parent, texts)
    _call(launchctl, "bootstrap", _launchd_domain(), written[0])
    return written


def _remove_launchd() -> list[str]:
    launchctl = shutil.which("launchctl")
    if launchctl is not None and _launchd_file().exists():
        _call(launchctl, "bootout", f"{_launchd_domain()}/{units.LABEL}", may_fail=True)
    return _delete(_launchd_file())


# -- Windows -------------------------------------------------------------------------------------------------------------


def _write_windows(texts: Mapping[str, str]) -> list[str]:
    import tempfile

    schtasks = _tool("schtasks")
    with tempfile.TemporaryDirectory() as folder:
        (file,) = _write_files(Path(folder), texts)
        _call(schtasks, "/Create", "/TN", units.NAME, "/XML", file, "/F")
    return [f"task {units.NAME}"]


def _remove_windows() -> list[str]:
    schtasks = shutil.which("schtasks")
    if schtasks is None or _call(schtasks, "/Query", "/TN", units.NAME, may_fail=True).returncode:
        return []
    _call(schtasks, "/Delete", "/TN", units.NAME, "/F")
    return [f"task {units.NAME}"]


TARGETS: Mapping[str, Target] = {
    "systemd": Target(
        texts=units.systemd_units,
        advice="put it into ~/.config/systemd/user, then: systemctl --user enable --now llama-ckpt.timer; to run it while you"
        " are not logged in: loginctl enable-linger",
        write=_write_systemd,
        remove=_remove_systemd,
    ),
    "cron": Target(
        texts=_cron_texts, advice="put it into the crontab, with: crontab -e", write=_write_cron, remove=_remove_cron
    ),
    "launchd": Target(
        texts=_launchd_texts,
        advice="put it into ~/Library/LaunchAgents, then: launchctl bootstrap gui/$(id -u) FILE",
        write=_write_launchd,
        remove=_remove_launchd,
    ),
    "windows": Target(
        texts=lambda job: {f"{units.NAME}.xml": units.windows_xml(job)},
        advice=f"put it into a file, then: schtasks /Create /TN {units.NAME} /XML FILE",
        write=_write_windows,
        remove=_remove_windows,
    ),
}
