"""The command that shows what files and folders contain: inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import bytes_, number, plural, timestamp
from llama_ckpt_cli.help_format import LOOK
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.exchange.foreign import ForeignFolder
    from llama_ckpt.exchange.survey import Surveyed
    from llama_ckpt.formats import CheckpointFile, Identified
    from llama_ckpt_cli.output import Output

Paths = Annotated[
    list[Path], typer.Argument(help="Files, complete or damaged, or folders of files.", metavar="PATH...")
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "inspect", group=LOOK)(inspect)


def inspect(invocation: Invocation, paths: Paths) -> None:
    """Show the format of files, what is wrong with them, and which engines load them. Needs no database, changes nothing.

    Exit code 5: at least one checkpoint file is damaged or incomplete.
    """
    from llama_ckpt.errors import CorruptFile

    out = invocation.out
    values = [_folder(out, path) if _is_folder(path) else _file(path) for path in paths]

    def human() -> None:
        for i, value in enumerate(values):
            if i:
                out.line("")
            _print(out, value)

    bare = [line for value in values for line in _bare(value)]
    out.result(values[0] if len(values) == 1 else values, human, bare)
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
    """What the content of a file says about it, without the fields that it does not have."""
    from dataclasses import asdict

    shown_otherwise = ("n_bytes", "whole", "restorable", "why_not")
    fields = {name: value for name, value in asdict(found).items() if value not in (None, (), "")}
    return {name: value for name, value in fields.items() if name not in shown_otherwise}


def _header(view: memoryview) -> dict[str, Any]:
    """The header's fields as they are in the file, checked or not."""
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


def _folder(out: Output, path: Path) -> dict[str, Any]:
    from llama_ckpt.exchange.survey import survey

    entries = []
    with out.progress(f"reading {path}") as progress:
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
    """A line of a folder. `whole` is None for a file that is not a checkpoint, and so is not counted."""
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
        return "could not be read"
    entries = plural(folder.n_entries, "entry", "entries")
    lost = f", {number(folder.n_missing)} of them without a file" if folder.n_missing else ""
    return f"{folder.what}: {entries}{lost}, {bytes_(folder.entry_bytes)}; {folder.why_not}"


# -- for people -----------------------------------------------------------------------------------------------------------


def _bare(value: dict[str, Any]) -> list[str]:
    """A file's verdict; of a folder the files that are damaged or incomplete."""
    if "folder" not in value:
        return [value["verdict"]]
    return [str(Path(value["folder"]) / entry["file"]) for entry in value["files"] if entry["whole"] is False]


_FILES = (
    Column(name="file", shorten=Shorten.MIDDLE, at_least=16),
    Column(name="format"),
    Column(name="version", right=True, drop_rank=2),
    Column(name="tokens", right=True),
    Column(name="cells", right=True, drop_rank=1),
    Column(name="size", right=True),
    Column(name="verdict", shorten=Shorten.WRAP, at_least=20),
)


def _print(out: Output, value: dict[str, Any]) -> None:
    if "folder" not in value:
        out.fields(_for_people(value))
        return
    if value["files"]:
        out.table(_FILES, [_row(entry) for entry in value["files"]])
    totals = value["totals"]
    n_whole, n_not_whole, n_other = (number(totals[name]) for name in ("whole", "not_whole", "no_checkpoints"))
    judged = f"{n_whole} complete, {n_not_whole} damaged or incomplete, {n_other} not checkpoints"
    out.line(f"{plural(totals['files'], 'file')}, {bytes_(totals['size_bytes'])}: {judged}")


def _row(entry: dict[str, Any]) -> list[str]:
    numbers = ["-" if entry.get(name) is None else number(entry[name]) for name in ("version", "n_tokens", "n_cells")]
    verdict = _verdict_for_people(entry["verdict"])
    return [entry["file"], entry.get("format", "-"), *numbers, bytes_(entry["size_bytes"]), verdict]


def _verdict_for_people(verdict: str) -> str:
    """JSON and --quiet keep the word that scripts compare."""
    return "complete" + verdict.removeprefix("whole") if verdict.startswith("whole") else verdict


def _for_people(value: dict[str, Any]) -> dict[str, Any]:
    """A file's fields with units, hex and dates; nested values one a line."""
    shown: dict[str, Any] = {}
    for name, field in value.items():
        if name == "engines":
            shown |= {f"  {verdict.engine}": verdict for verdict in field}
        elif isinstance(field, dict):
            shown |= {f"  {key}": inner for key, inner in field.items()}
        else:
            new_name, text = _field_for_people(name, field)
            shown[new_name] = text
    return shown


_NAMES = {"first_bytes": "first 16 bytes", "padding": "magic", "created_ns": "created", "whole": "complete"}


def _field_for_people(name: str, field: Any) -> tuple[str, Any]:
    shown = _NAMES.get(name, name)
    match name:
        case "first_bytes":
            return shown, hex_dump(field)
        case "padding":
            return shown, f"at byte {field}"
        case "size_bytes" | "payload_size":
            return shown, f"{number(field)} ({bytes_(field)})"
        case "created_ns":
            return shown, _created(field)
        case "flags":
            return shown, f"{field:#x}{' delta' if field & 1 else ''}{' sliceable' if field & 2 else ''}"
        case "verdict":
            return shown, _verdict_for_people(field)
        case _ if name.endswith("crc32"):
            return shown, f"{field:08x}"
        case _ if name.startswith("n_") and isinstance(field, int):
            return shown, number(field)
        case _:
            return shown, _plain_text(field)


def _plain_text(field: Any) -> Any:
    if isinstance(field, bytes):
        return field.hex()
    if isinstance(field, tuple):
        return "; ".join(field)
    return " ".join(map(str, field)) if isinstance(field, list) else field


def _created(created_ns: int) -> str:
    try:
        return timestamp(created_ns // 1000)
    except (ValueError, OverflowError, OSError):
        return f"{created_ns} ns (not a valid date)"
