"""Documents that cannot drift from the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llama_ckpt import errors
from llama_ckpt.config import DEFAULTS
from llama_ckpt.formats import container

ROOT = Path(__file__).parents[2]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def error_classes():
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.LlamaCkptError)]


def command_names():
    import typer.main

    from llama_ckpt_cli.app import app

    def names(group, before=""):
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                if one.invoke_without_command:
                    yield before + name
                yield from names(one, f"{before}{name} ")
            else:
                yield before + name

    return list(names(typer.main.get_command(app)))


@pytest.mark.parametrize("name", command_names())
def test_every_command_is_in_the_readme_and_in_the_reference(name):
    assert f"llama-ckpt {name}" in text_of("README.md")
    assert f"`{name}`" in text_of("docs/cli.md")


@pytest.mark.parametrize("kind", error_classes(), ids=lambda k: k.__name__)
def test_every_exit_code_is_in_the_reference(kind):
    assert re.search(rf"^\| {kind.exit_code} \| `{kind.__name__}`", text_of("docs/cli.md"), re.MULTILINE)


def test_every_setting_is_in_the_reference():
    for name in DEFAULTS:
        assert f"`{name}`" in text_of("docs/cli.md")


def test_the_byte_table_has_every_header_field_at_its_place():
    import struct
    from dataclasses import fields

    table = text_of("docs/file-format.md")
    names = ["magic", *(f.name for f in fields(container.Header))]
    formats = re.findall(r"\d*[sIHqQ]", container._LAYOUT.format.lstrip("<"))
    expanded = [f for code in formats for f in ([code] if code[-1] == "s" else [code[-1]] * int(code[:-1] or 1))]
    at = 0
    for name, code in zip(names, expanded, strict=True):
        size = struct.calcsize("<" + code)
        assert re.search(rf"^\| 0x{at:02X} \| {size} \| `{name}`", table, re.MULTILINE), (name, hex(at), size)
        at += size
    assert at == container.HEADER_SIZE == 128


def test_links_in_the_documents_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_step_of_a_save_is_in_the_crash_table():
    table = text_of("docs/crash-safety.md")
    of_save = ("created", "head", "written", "staged", "renamed", "inserted", "committed")
    of_budget, of_unprune = ("room promised", "room made"), ("checked", "reactivated")
    of_purge = ("rows condemned", "files deleted", "rows deleted")
    of_repair = ("written", "backed up", "replaced")
    of_gc = ("walked", "rows deleted", "file deleted")
    for step in (*of_save, *of_budget, "leased", "marked", *of_unprune, *of_gc, *of_purge, *of_repair):
        assert f"`{step}`" in table


def test_the_version_is_one():
    from importlib.metadata import version

    import llama_ckpt

    assert version("llama-ckpt") == llama_ckpt.__version__
    assert f"## {llama_ckpt.__version__}" in text_of("CHANGELOG.md")
