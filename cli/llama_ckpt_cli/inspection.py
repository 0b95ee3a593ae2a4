"""The command that shows files and folders: inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.output import when
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from llama_ckpt.exchange.foreign import ForeignFolder
    from llama_ckpt.exchange.survey import Surveyed
    from llama_ckpt.formats import CheckpointFile, Identified


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "inspect")(inspect)


def inspect(
    session: Session,
    paths: Annotated[list[Path], typer.Argument(help="Files, whole or damaged, or folders of them.", metavar="PATH")],
) -> None:
    """Show what files are, what is wrong with them, and which engines load them. Needs no database, changes nothing.

    Exit code 5: a checkpoint among them is not whole.
    """
    from llama_ckpt.errors import CorruptFile

    values = [_folder(session, path) if _is_folder(path) else _file(path) for path in paths]

    def human() -> None:
        for i, value in enumerate(values):
            if i:
                session.out.line("")
            _show(session, value)

    bare = [line for value in values for line in _bare(value)]
    session.out.result(values[0] if len(values) == 1 else values, human, bare)
    if not all(value["whole"] for value in values):
        raise typer.Exit(CorruptFile.exit_code)


def hex_dump(data: bytes) -> str:
    """Bytes as hex and as printable characters."""
    return f"{data.hex(' ')}  |{''.join(chr(b) if 32 <= b < 127 else '.' for b in data)}|"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:  # longer than a file's name can be: reading it says so
        return False


# -- a file ---------------------------------------------------------------------------------------------------------------


def _file(path: Path) -> dict[str, Any]:
    from llama_ckpt import formats
    from llama_ckpt.store.disk import map_file

    with map_file(path) as view:
        opened = formats.open_file(view, str(path))
        found = opened.identified
        value: dict[str, Any] = {"file": str(path), "size_bytes": len(view), "first_bytes": bytes(view[:16])}
        value |= _identified(found)
        if found.format == "LLAM" and found.version != 1:
            value |= _header(view)
        if isinstance(opened.content, formats.CheckpointFile):
            value |= _contents(opened.content)
        value["engines"] = formats.engine_verdicts(view, found)
    return value | {"whole": found.whole, "restorable": found.restorable, "verdict": _verdict(found)}


def _identified(found: Identified) -> dict[str, Any]:
    """What was told of a file by its content, without what it does not have."""
    from dataclasses import asdict

    shown_otherwise = ("n_bytes", "whole", "restorable", "why_not")
    told = {name: value for name, value in asdict(found).items() if value not in (None, (), "")}
    return {name: value for name, value in told.items() if name not in shown_otherwise}


def _header(view: memoryview) -> dict[str, Any]:
    """The header's fields as they stand, checked or not."""
    from dataclasses import asdict

    from llama_ckpt.formats import container

    padding = container.padding_of(view)
    if padding is None or len(view) - padding < container.HEADER_SIZE:
        return {}
    return asdict(container.unpack_header(view, padding))


def _contents(opened: CheckpointFile) -> dict[str, Any]:
    metadata = opened.contents.metadata
    return {
        "model": metadata.get("model_name"),
        "engine": metadata.get("engine"),
        "bytes_per_token": opened.state.token_bytes,
        "first_token_ids": opened.contents.token_ids[:8].tolist(),
        "fingerprint_fields": dict(sorted(opened.fingerprint.fields.items())),
    }


def _verdict(found: Identified) -> str:
    if found.format == "unknown":
        return f"NO CHECKPOINT: {found.why_not}"
    if not found.whole:
        damaged = found.format != "LLAM" or found.version != 1
        return f"{'DAMAGED' if damaged else 'NEVER RESTORED'}: {found.why_not}"
    every = "every check passed" if found.format == "LLAM" else "every byte is where it has to be; no checksum"
    return f"whole: {every}" if found.restorable else f"whole: {every}; not restored: {found.why_not}"


# -- a folder -------------------------------------------------------------------------------------------------------------


def _folder(session: Session, path: Path) -> dict[str, Any]:
    from llama_ckpt.exchange.survey import survey

    entries = []
    with session.out.progress(f"reading {path}") as progress:
        for entry in survey(path):
            entries.append(_entry(path, entry))
            progress(len(entries), len(entries) + 1)
    totals = {
        "files": len(entries),
        "whole": sum(entry["whole"] is True for entry in entries),
        "not_whole": sum(entry["whole"] is False for entry in entries),
        "no_checkpoints": sum(entry["whole"] is None for entry in entries),
        "size_bytes": sum(entry["size_bytes"] for entry in entries),
    }
    return {"folder": str(path), "files": entries, "totals": totals, "whole": totals["not_whole"] == 0}


def _entry(folder: Path, entry: Surveyed) -> dict[str, Any]:
    """A line of a folder. `whole` is None for what is no checkpoint, and so does not count."""
    shown = str(entry.path.relative_to(folder)) if entry.path != folder else str(entry.path)
    value: dict[str, Any] = {"file": shown, "size_bytes": entry.size_bytes, "whole": None}
    found = entry.found
    if found is None:
        return value | {"verdict": entry.problem or _foreign(entry.folder), "other_program": entry.folder}
    if found.format != "unknown" or entry.path.suffix == ".llam":
        value["whole"] = found.whole
    names = ("format", "version", "padding", "n_tokens", "n_cells", "restorable")
    return value | {name: getattr(found, name) for name in names} | {"verdict": _verdict(found)}


def _foreign(folder: ForeignFolder | None) -> str:
    if folder is None:
        return "could not be looked at"
    entries = count(folder.n_entries, "entry").replace("entrys", "entries")
    lost = f", {folder.n_missing} of them without a file" if folder.n_missing else ""
    return f"{folder.what}: {entries}{lost}, {size(folder.entry_bytes)}; {folder.why_not}"


# -- for people -----------------------------------------------------------------------------------------------------------


def _bare(value: dict[str, Any]) -> list[str]:
    """A file's verdict; of a folder the files that are not whole."""
    if "folder" not in value:
        return [value["verdict"]]
    return [str(Path(value["folder"]) / entry["file"]) for entry in value["files"] if entry["whole"] is False]


def _show(session: Session, value: dict[str, Any]) -> None:
    if "folder" not in value:
        session.out.fields(_for_people(value))
        return
    columns = ("file", "format", "version", "tokens", "cells", "size", "verdict")
    rows = []
    for entry in value["files"]:
        numbers = [str(entry.get(name) if entry.get(name) is not None else "-") for name in _NUMBERS]
        rows.append([entry["file"], entry.get("format", "-"), *numbers, size(entry["size_bytes"]), entry["verdict"]])
    session.out.table(columns, rows, right=("version", "tokens", "cells", "size"))
    totals = value["totals"]
    judged = f"{totals['whole']} whole, {totals['not_whole']} not whole, {totals['no_checkpoints']} no checkpoints"
    session.out.line(f"{count(totals['files'], 'file')}, {size(totals['size_bytes'])}: {judged}")


_NUMBERS = ("version", "n_tokens", "n_cells")


def _for_people(value: dict[str, Any]) -> dict[str, Any]:
    """The same with units, hex and dates, nested values a line each."""
    shown: dict[str, Any] = {}
    for name, one in value.items():
        if name == "first_bytes":
            shown["first 16 bytes"] = hex_dump(one)
        elif name == "padding":
            shown["magic"] = f"at byte {one}"
        elif name == "engines":
            shown |= {f"  {verdict.engine}": verdict for verdict in one}
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
            shown[name] = _said(one)
    return shown


def _said(one: Any) -> Any:
    if isinstance(one, bytes):
        return one.hex()
    if isinstance(one, tuple):
        return "; ".join(one)
    return " ".join(map(str, one)) if isinstance(one, list) else one


def _created(created_ns: int) -> str:
    try:
        return when(created_ns // 1000)
    except (ValueError, OverflowError, OSError):
        return f"{created_ns} ns (no date)"
