"""The command that checks files: verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_ckpt.gc_values import Finding
    from llama_ckpt.values import Check


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "verify")(verify)


def verify(
    session: Session,
    what: Annotated[
        list[str] | None, typer.Argument(help="Ids of checkpoints, or files of any format.", metavar="ID|FILE")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Every ACTIVE checkpoint, and the store's folders.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Look at every number of K and V: NaN or Inf fails.")] = False,
    max_age: Annotated[
        str | None, typer.Option(help="With --all: only what was not checked for so long, e.g. 7d.")
    ] = None,
    max_duration: Annotated[
        str | None, typer.Option(help="With --all: begin no check after so long, e.g. 10m.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="With --all: mark the bad STALE, register sound orphans again, link old ones."),
    ] = False,
) -> None:
    """Check checkpoints, files or everything, one line per check. Exit code 12: something failed.

    --all begins with what was checked least recently and notes what passed; without --repair nothing else is changed.
    """
    from llama_ckpt.errors import BadInput

    if bool(what) == all_rows:
        told = " ".join(what or ["nothing"])
        raise BadInput(what="verify", value=told, reason="name checkpoints' ids or files, or say --all")
    if what and (max_age or max_duration or repair):
        told = " ".join(what)
        raise BadInput(what="verify", value=told, reason="--max-age, --max-duration and --repair go with --all")
    if what:
        return _verify_named(session, what, deep)
    return _verify_all(session, max_age, max_duration, repair, deep)


def _verify_named(session: Session, names: list[str], deep: bool) -> None:
    """Files and checkpoints, each of which has to be there before the first is read."""
    import re

    from llama_ckpt.errors import FileMissing
    from llama_ckpt.integrity.verify import Verifier, file_checks

    files = {name: Path(name) for name in names if _is_there(name)}
    for name in names:
        if name not in files and not re.fullmatch(r"[0-9a-fA-F]{4,32}", name) and any(c in name for c in "/\\."):
            raise FileMissing(path=name)
    with session.existing_registry() if len(files) == len(set(names)) else session.registry() as registry:
        rows = {name: registry.get(name) for name in names if name not in files} if registry else {}
        checked = []
        for name in names:
            if name in files:
                checks = file_checks(files[name], registry.database if registry else None, deep=deep)
                checked.append((name, checks))
            elif registry:
                verifier = Verifier(registry.database, registry.store, deep=deep)
                checked.append((rows[name].id, verifier.checkpoint(rows[name])))
        _report(session, checked)


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        return False


def _verify_all(session: Session, max_age: str | None, max_duration: str | None, repair: bool, deep: bool) -> None:
    from llama_ckpt.config import seconds
    from llama_ckpt.integrity.reconcile import Reconciler
    from llama_ckpt.integrity.verify import Verifier, findings_of

    older_than_s = seconds(max_age, "--max-age") if max_age else 0.0
    longest = seconds(max_duration, "--max-duration") if max_duration else None
    with session.registry() as registry:
        verifier = Verifier(registry.database, registry.store, deep=deep)
        total = registry.stats().n_active
        checked: list[tuple[str, list[Check]]] = []
        bad: list[Finding] = []
        with session.out.progress("verifying") as progress:
            for row, checks in verifier.everything(older_than_s=older_than_s, max_duration_s=longest):
                checked.append((row.id, checks))
                bad += findings_of(row, checks)
                progress(len(checked), total)
        ghosts = list(verifier.ghosts())
        reconciler = Reconciler(registry.context)
        mended = reconciler.apply([*bad, *ghosts]) if repair else []
        n_linked = reconciler.link() if repair else 0
    _tell_ghosts(session, [] if repair else ghosts)
    for result in mended:
        session.out.note(f"{result.finding.kind}: {result.finding.path}: {result}")
    if n_linked:
        session.out.note(f"{count(n_linked, 'checkpoint')} of an older version can now be found by prefix")
    _report(session, checked, ghosts, n_left=total - len(checked))


def _tell_ghosts(session: Session, ghosts: Sequence[Finding]) -> None:
    advice = {"foreign": "left alone by gc"}
    for ghost in ghosts:
        what = f"{ghost.kind}: {ghost.path}: {ghost.detail} ({size(ghost.size_bytes)})"
        session.out.note(f"{what}; {advice.get(ghost.kind, 'gc collects it after the grace')}")


def _report(
    session: Session, checked: list[tuple[str, list[Check]]], ghosts: Sequence[Finding] = (), n_left: int = 0
) -> None:
    from llama_ckpt.errors import VerifyFailed
    from llama_ckpt.integrity.verify import all_ok

    failed = [name for name, checks in checked if not all_ok(checks)]

    def human() -> None:
        for name, checks in checked:
            for check in checks:
                session.out.line(f"{name}: {check}" if len(checked) > 1 else str(check))
        if len(checked) != 1:
            left = f"; {n_left} not due, or left for the next time" if n_left > 0 else ""
            session.out.line(f"{len(checked) - len(failed)} of {count(len(checked), 'checkpoint')} verified{left}")

    session.out.result({"checkpoints": dict(checked), "ghosts": list(ghosts)}, human, failed)
    if failed:
        raise VerifyFailed(n_failed=len(failed), n_checked=len(checked))
