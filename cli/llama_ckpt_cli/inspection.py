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
    from llama_ckpt.errors import CorruptFile
    from llama_ckpt.files import map_file

    problem: CorruptFile | None = None
    with map_file(file) as view:
        pairs: dict[str, Any] = {"file": str(file), "size": f"{len(view)} bytes ({size(len(view))})"}
        pairs["first 16 bytes"] = hex_dump(bytes(view[:16]))
        try:
            opened = formats.open_checkpoint(view, str(file))
            pairs |= _header(view) | _contents(opened)
            del opened
        except CorruptFile as error:
            problem = error
            pairs |= _header(view)
    pairs["verdict"] = (
        "whole: every check passed"
        if problem is None
        else f"DAMAGED: {problem.values['check']}: {problem.values['reason']}"
    )
    session.out.result(pairs, lambda: session.out.fields(pairs), [pairs["verdict"]])
    if problem is not None:
        raise typer.Exit(problem.exit_code)


def hex_dump(data: bytes) -> str:
    """Bytes as hex and as printable characters."""
    return f"{data.hex(' ')}  |{''.join(chr(b) if 32 <= b < 127 else '.' for b in data)}|"


def _header(view: memoryview) -> dict[str, Any]:
    """The header's fields as they stand, checked or not; nothing where there is no magic."""
    from llama_ckpt.errors import CorruptFile
    from llama_ckpt.formats import container

    try:
        padding = container.find_magic(view, "")
    except CorruptFile:
        return {}
    if len(view) - padding < container.HEADER_SIZE:
        return {"zero bytes before the magic": padding}
    header = container.unpack_header(view, padding)
    return {
        "magic": f"{container.MAGIC.decode()} at byte {padding}",
        "version": header.version,
        "flags": f"{header.flags:#x}{' sliceable' if header.flags & container.FLAG_SLICEABLE else ''}",
        "header CRC-32": f"{header.header_crc32:08x}",
        "tokens": f"{header.start_token} to {header.seq_len}",
        "layers": header.n_layer,
        "KV heads": header.n_kv_head or "unknown",
        "metadata": f"{header.metadata_size} bytes",
        "fingerprint": header.fingerprint.hex(),
        "input SHA-256": header.input_hash.hex(),
        "created": _created(header.created_ns),
        "head CRC-32": f"{header.head_crc32:08x}",
        "payload CRC-32": f"{header.payload_crc32:08x}",
        "payload": f"{header.payload_size} bytes at {header.payload_offset}",
    }


def _created(created_ns: int) -> str:
    try:
        return when(created_ns // 1000)
    except (ValueError, OverflowError, OSError):
        return f"{created_ns} ns (no date)"


def _contents(opened: Any) -> dict[str, Any]:
    metadata, state = opened.contents.metadata, opened.state
    return {
        "model": metadata.get("model_name"),
        "engine": metadata.get("engine"),
        "K / V": f"{state.type_k} / {state.type_v}{', V transposed' if state.v_transposed else ''}",
        "bytes per token": state.token_bytes,
        "first token ids": " ".join(map(str, opened.contents.token_ids[:8])) + (" …" if state.n_cells > 8 else ""),
        **{f"fingerprint: {k}": v for k, v in sorted(opened.fingerprint.fields.items())},
    }


def verify(
    session: Session,
    what: Annotated[str | None, typer.Argument(help="A checkpoint's id or a file.", metavar="[ID|FILE]")] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Every ACTIVE checkpoint, and the store's folders.")] = False,
) -> None:
    """Check a checkpoint, a file or everything, one line per check. Changes nothing. Exit code 12: something failed."""
    from llama_ckpt.errors import BadInput
    from llama_ckpt.verify import file_checks

    if (what is None) != all_rows:
        raise BadInput(what="verify", value=what or "nothing", reason="name a checkpoint's id or a file, or say --all")
    if what is None:
        return _verify_all(session)
    if _is_there(what):
        registry = session.existing_registry()
        return _report(session, [(what, file_checks(Path(what), registry.database if registry else None))])
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
