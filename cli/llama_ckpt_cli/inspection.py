"""Commands about files: inspect, verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt_cli.output import count, size, when
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_ckpt.values import Check, Finding


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "inspect")(inspect)
    command(app, "verify")(verify)


def inspect(
    session: Session, file: Annotated[Path, typer.Argument(help="A checkpoint file, whole or damaged.")]
) -> None:
    """Show a file's header and first bytes, and say what is wrong with it. Needs no database."""
    from llama_ckpt import formats
    from llama_ckpt.disk import map_file
    from llama_ckpt.errors import CorruptFile

    problem: CorruptFile | None = None
    with map_file(file) as view:
        value: dict[str, Any] = {"file": str(file), "size_bytes": len(view), "first_bytes": bytes(view[:16])}
        try:
            opened = formats.open_checkpoint(view, str(file))
            value |= _header(view) | _contents(opened)
            del opened
        except CorruptFile as error:
            problem = error
            value |= _header(view)
    fault = None if problem is None else f"{problem.values['check']}: {problem.values['reason']}"
    value["verdict"] = "whole: every check passed" if fault is None else f"DAMAGED: {fault}"
    session.out.result(value, lambda: session.out.fields(_for_people(value)), [value["verdict"]])
    if problem is not None:
        raise typer.Exit(problem.exit_code)


def hex_dump(data: bytes) -> str:
    """Bytes as hex and as printable characters."""
    return f"{data.hex(' ')}  |{''.join(chr(b) if 32 <= b < 127 else '.' for b in data)}|"


def _header(view: memoryview) -> dict[str, Any]:
    """The header's fields as they stand, checked or not; nothing where there is no magic."""
    from dataclasses import asdict

    from llama_ckpt.errors import CorruptFile
    from llama_ckpt.formats import container

    try:
        padding = container.find_magic(view, "")
    except CorruptFile:
        return {}
    if len(view) - padding < container.HEADER_SIZE:
        return {"padding": padding}
    return {"padding": padding, **asdict(container.unpack_header(view, padding))}


def _contents(opened: Any) -> dict[str, Any]:
    metadata, state = opened.contents.metadata, opened.state
    return {
        "model": metadata.get("model_name"),
        "engine": metadata.get("engine"),
        "dialect": state.dialect,
        "bytes_per_token": state.token_bytes,
        "first_token_ids": opened.contents.token_ids[:8].tolist(),
        "fingerprint_fields": dict(sorted(opened.fingerprint.fields.items())),
    }


def _for_people(value: dict[str, Any]) -> dict[str, Any]:
    """The same with units, hex and dates, nested values a line each."""
    shown: dict[str, Any] = {}
    for name, one in value.items():
        if name == "first_bytes":
            shown["first 16 bytes"] = hex_dump(one)
        elif name == "padding":
            shown["magic"] = f"LLAM at byte {one}"
        elif name in ("size_bytes", "payload_size"):
            shown[name] = f"{one} ({size(one)})"
        elif name == "created_ns":
            shown["created"] = _created(one)
        elif name.endswith("crc32"):
            shown[name] = f"{one:08x}"
        elif name == "flags":
            shown[name] = f"{one:#x}{' delta' if one & 1 else ''}{' sliceable' if one & 2 else ''}"
        elif isinstance(one, dict):
            shown |= {f"  {key}": inner for key, inner in one.items()}
        else:
            shown[name] = (
                one.hex() if isinstance(one, bytes) else " ".join(map(str, one)) if isinstance(one, list) else one
            )
    return shown


def _created(created_ns: int) -> str:
    try:
        return when(created_ns // 1000)
    except (ValueError, OverflowError, OSError):
        return f"{created_ns} ns (no date)"


def verify(
    session: Session,
    what: Annotated[str | None, typer.Argument(help="A checkpoint's id or a file.", metavar="[ID|FILE]")] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Every ACTIVE checkpoint, and the store's folders.")] = False,
) -> None:
    """Check a checkpoint, a file or everything, one line per check. Changes nothing. Exit code 12: something failed."""
    import re

    from llama_ckpt.errors import BadInput, FileMissing
    from llama_ckpt.verify import file_checks

    if (what is None) != all_rows:
        raise BadInput(what="verify", value=what or "nothing", reason="name a checkpoint's id or a file, or say --all")
    if what is None:
        return _verify_all(session)
    if _is_there(what):
        with session.existing_registry() as registry:
            return _report(session, [(what, file_checks(Path(what), registry.database if registry else None))])
    if not re.fullmatch(r"[0-9a-fA-F]{4,32}", what) and any(c in what for c in "/\\."):
        raise FileMissing(path=what)
    from llama_ckpt.verify import Verifier

    with session.registry() as registry:
        row = registry.get(what)
        return _report(session, [(row.id, Verifier(registry.database, registry.store).checkpoint(row))])


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a file's name can be, or with a NUL
        return False


def _verify_all(session: Session) -> None:
    from llama_ckpt.verify import Verifier

    with session.registry() as registry:
        verifier = Verifier(registry.database, registry.store)
        total = registry.stats().n_active
        checked = []
        with session.out.progress("verifying") as progress:
            for row, checks in verifier.everything():
                checked.append((row.id, checks))
                progress(len(checked), total)
        ghosts = list(verifier.ghosts())
    advice = {"foreign": "left alone by gc"}
    for ghost in ghosts:
        what = f"{ghost.kind}: {ghost.path}: {ghost.detail} ({size(ghost.size_bytes)})"
        session.out.note(f"{what}; {advice.get(ghost.kind, 'gc collects it after the grace')}")
    _report(session, checked, ghosts)


def _report(session: Session, checked: list[tuple[str, list[Check]]], ghosts: Sequence[Finding] = ()) -> None:
    from llama_ckpt.errors import VerifyFailed
    from llama_ckpt.verify import all_ok

    failed = [name for name, checks in checked if not all_ok(checks)]

    def human() -> None:
        for name, checks in checked:
            for check in checks:
                session.out.line(f"{name}: {check}" if len(checked) > 1 else str(check))
        if len(checked) != 1:
            session.out.line(f"{len(checked) - len(failed)} of {count(len(checked), 'checkpoint')} verified")

    session.out.result({"checkpoints": dict(checked), "ghosts": list(ghosts)}, human, failed)
    if failed:
        raise VerifyFailed(n_failed=len(failed), n_checked=len(checked))
