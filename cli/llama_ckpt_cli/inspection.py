"""The command that shows a file: inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llama_ckpt_cli.output import size, when
from llama_ckpt_cli.session import Session, command


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "inspect")(inspect)


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
