"""The command that checks files: verify."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import bytes_, number, plural
from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_ckpt.gc_values import Finding
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Check
    from llama_ckpt_cli.output import Output

_ID = re.compile(r"[0-9a-fA-F]{4,32}")

Names = Annotated[
    list[str] | None, typer.Argument(help="Ids of checkpoints, or files of any format.", metavar="ID|FILE...")
]
AllRows = Annotated[
    bool, typer.Option("--all", help="Verify every ACTIVE checkpoint, and look for ghosts in the store.")
]
Deep = Annotated[bool, typer.Option("--deep", help="Also read every number of K and V: NaN or infinity is a failure.")]
MaxAge = Annotated[
    str | None,
    typer.Option("--max-age", help="With --all: skip what was verified within this time, e.g. 7d.", metavar="TIME"),
]
MaxDuration = Annotated[
    str | None,
    typer.Option("--max-duration", help="With --all: start no more checks after this time, e.g. 10m.", metavar="TIME"),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="With --all: correct the database, not the files. Mark damaged checkpoints STALE (gc deletes their files later),"
        " register intact ghosts again, and index checkpoints that older versions of llama-ckpt saved for prefix matches.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "verify", group=LOOK)(verify)


def verify(
    invocation: Invocation,
    *,
    what: Names = None,
    all_rows: AllRows = False,
    deep: Deep = False,
    max_age: MaxAge = None,
    max_duration: MaxDuration = None,
    repair: Repair = False,
) -> None:
    """Verify checkpoints, files or the complete store, one line for each check. Exit code 12: a check failed.

    --all starts with what was verified least recently and records what passed; without --repair it changes nothing else.
    """
    from llama_ckpt.errors import BadInput

    named = " ".join(what or ["nothing"])
    if bool(what) == all_rows:
        raise BadInput(what="verify", value=named, reason="give either ids and files, or --all")
    if what and (max_age or max_duration or repair):
        raise BadInput(what="verify", value=named, reason="use --max-age, --max-duration and --repair only with --all")
    if what:
        return _verify_named(invocation, what, deep=deep)
    return _verify_all(invocation, max_age, max_duration, repair=repair, deep=deep)


def _verify_named(invocation: Invocation, names: list[str], *, deep: bool) -> None:
    """Verifies files and checkpoints. All of them must exist before the first is read."""
    files = _files_of(names)
    needs_registry = len(files) < len(set(names))
    with invocation.registry() if needs_registry else invocation.existing_registry() as registry:
        _report(invocation.out, _checks_of(names, files, registry, deep=deep))


def _files_of(names: list[str]) -> dict[str, Path]:
    """The names that are files.

    Raises:
        FileMissing: a name can only be a path, and there is no such file.
    """
    from llama_ckpt.errors import FileMissing

    files = {name: Path(name) for name in names if _exists(name)}
    for name in names:
        if name not in files and not _ID.fullmatch(name) and any(c in name for c in "/\\."):
            raise FileMissing(path=name)
    return files


def _checks_of(
    names: list[str], files: dict[str, Path], registry: Registry | None, *, deep: bool
) -> list[tuple[str, list[Check]]]:
    from llama_ckpt.integrity.verify import Verifier, file_checks

    rows = {name: registry.get(name) for name in names if name not in files} if registry else {}
    checked = []
    for name in names:
        if name in files:
            checked.append((name, file_checks(files[name], registry.database if registry else None, deep=deep)))
        elif registry:
            verifier = Verifier(registry.database, registry.store, deep=deep)
            checked.append((rows[name].id, verifier.checkpoint(rows[name])))
    return checked


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        return False


def _verify_all(
    invocation: Invocation, max_age: str | None, max_duration: str | None, *, repair: bool, deep: bool
) -> None:
    from llama_ckpt.config import seconds
    from llama_ckpt.integrity.verify import Verifier, findings_of

    older_than_s = seconds(max_age, "--max-age") if max_age else 0.0
    max_duration_s = seconds(max_duration, "--max-duration") if max_duration else None
    checked: list[tuple[str, list[Check]]] = []
    damaged: list[Finding] = []
    with invocation.registry() as registry:
        verifier = Verifier(registry.database, registry.store, deep=deep)
        total = registry.stats().n_active
        with invocation.out.progress("verifying") as progress:
            for row, checks in verifier.everything(older_than_s=older_than_s, max_duration_s=max_duration_s):
                checked.append((row.id, checks))
                damaged += findings_of(row, checks)
                progress(len(checked), total)
        ghosts = list(verifier.ghosts())
        if repair:
            _repair(invocation.out, registry, [*damaged, *ghosts])
        else:
            _note_ghosts(invocation.out, ghosts)
    _report(invocation.out, checked, ghosts, n_left=total - len(checked))


def _repair(out: Output, registry: Registry, findings: list[Finding]) -> None:
    from llama_ckpt.integrity.reconcile import Reconciler

    reconciler = Reconciler(registry.context)
    for result in reconciler.apply(findings):
        out.note(f"{result.finding.kind}: {result.finding.path}: {result}")
    if n_linked := reconciler.link():
        out.note(f"{plural(n_linked, 'checkpoint')} of an older version can now be found by prefix")


def _note_ghosts(out: Output, ghosts: Sequence[Finding]) -> None:
    advice = {"foreign": "gc leaves it alone"}
    for ghost in ghosts:
        what = f"{ghost.kind}: {ghost.path}: {ghost.detail} ({bytes_(ghost.size_bytes)})"
        out.note(f"{what}; {advice.get(ghost.kind, 'gc deletes it after the grace period')}")


def _report(
    out: Output, checked: list[tuple[str, list[Check]]], ghosts: Sequence[Finding] = (), n_left: int = 0
) -> None:
    from llama_ckpt.errors import VerifyFailed
    from llama_ckpt.integrity.verify import all_ok

    failed = [name for name, checks in checked if not all_ok(checks)]

    def human() -> None:
        for name, checks in checked:
            for check in checks:
                out.line(f"{name}: {check}" if len(checked) > 1 else str(check))
        if len(checked) != 1:
            left = f"; {number(n_left)} not due, or left for the next run" if n_left > 0 else ""
            out.line(f"{number(len(checked) - len(failed))} of {plural(len(checked), 'checkpoint')} verified{left}")

    out.result({"checkpoints": dict(checked), "ghosts": list(ghosts)}, human, failed)
    if failed:
        raise VerifyFailed(n_failed=len(failed), n_checked=len(checked))
