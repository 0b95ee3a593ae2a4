"""Documents that cannot drift from the program."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from support.words import refused_words

import llama_ckpt
from llama_ckpt import Registry, errors
from llama_ckpt.config import DEFAULTS
from llama_ckpt.formats import container

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))
FOLDER_PAGES = (
    "migrations/README.md",
    "sql/oracle/README.md",
    "sql/postgresql/README.md",
    "tests/samples/README.md",
)
GENERATED = "docs/benchmarks.md"
WIDTH = 130
PUBLIC_MODULES = {"engine", "errors", "formats", "metrics", "migrations", "sql", "values"}
DEFINED_WORDS = """checkpoint, input, input hash, fingerprint, prefix, block, prefix link, match, hit, miss, delta, parent,
extends, chain, flatten, ACTIVE, STALE, supersede, prune, gc, grace, ghost, orphan, temporary, quarantine, lease, claim,
single flight, marker, store, registry, pin, budget, policy, adopt, restore, warm"""


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links_of(name):
    """The targets of a page's links inside the project: the path from the root, and the anchor or None."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text_of(name)):
        path = (ROOT / name).parent / target if target else ROOT / name
        yield path.resolve().relative_to(ROOT).as_posix(), anchor or None


def anchors_of(name):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)


def imports_of(name):
    """(module, name) of every import from llama_ckpt that a page shows, in an example or in a sentence."""
    for block in python_blocks(name):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "llama_ckpt":
                yield from ((node.module, alias.name) for alias in node.names)
    for module, names in re.findall(r"`from (llama_ckpt[\w.]*) import ([\w, ]+)`", text_of(name)):
        yield from ((module, each.strip()) for each in names.split(","))


def prose_lines(name):
    """(number, line) of a page without code blocks, tables, images and what the benchmarks write."""
    text = re.sub(
        r"^```.*?^```|^<!-- benchmarks:.*?^<!-- /benchmarks",
        lambda m: "\n" * m[0].count("\n"),
        text_of(name),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = enumerate(text.splitlines(), 1)
    return [(number, line) for number, line in lines if not line.lstrip().startswith(("|", "![", "<!--", "#"))]


def error_classes():
    """Every error with an exit code of its own."""
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.LlamaCkptError)]
    return [kind for kind in kinds if "exit_code" in vars(kind)]


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


@pytest.mark.parametrize("name", [*PAGES, *FOLDER_PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_in_the_documents_lead_somewhere(name):
    for target, anchor in links_of(name):
        assert (ROOT / target).exists(), f"{name}: {target}"
        assert anchor is None or anchor in anchors_of(target), f"{name}: {target}#{anchor}"


def test_every_page_can_be_reached_from_the_readme():
    reached, to_read = set(), ["README.md"]
    while to_read:
        name = to_read.pop()
        if name not in reached and name.endswith(".md"):
            reached.add(name)
            to_read += [target for target, _ in links_of(name)]
    assert set(PAGES) - reached == set()
    assert "docs/glossary.md" in {target for target, _ in links_of("CONTRIBUTING.md")}


@pytest.mark.parametrize("name", [*PAGES, *FOLDER_PAGES, "CONTRIBUTING.md"])
def test_no_page_teaches_a_path_inside_the_package(name):
    for path in re.findall(r"\bllama_ckpt((?:\.\w+)+)", text_of(name)):
        first, *deeper = path.strip(".").split(".")
        if first in llama_ckpt.__all__:
            continue
        assert first in PUBLIC_MODULES, f"{name}: llama_ckpt{path}"
        assert first == "engine" or not deeper, f"{name}: llama_ckpt{path}"


@pytest.mark.parametrize("name", PAGES)
def test_every_import_in_a_page_works(name):
    for module, imported in imports_of(name):
        if module == "llama_ckpt":
            assert imported in llama_ckpt.__all__, f"{name}: from llama_ckpt import {imported}"
        else:
            spec = importlib.util.find_spec(module)
            assert spec is not None, f"{name}: {module}"
            source = Path(spec.origin).read_text(encoding="utf-8")
            assert re.search(rf"^(?:class|def) {imported}\b", source, re.MULTILINE), f"{name}: {module}.{imported}"


@pytest.mark.parametrize("name", PAGES)
def test_every_method_of_a_registry_that_a_page_calls_exists(name):
    for method in re.findall(r"\bregistry\.(\w+)\(", text_of(name)):
        assert hasattr(Registry, method), f"{name}: registry.{method}"


@pytest.mark.parametrize("name", [*PAGES, *FOLDER_PAGES, "CONTRIBUTING.md"])
def test_pages_use_plain_words(name):
    assert refused_words(text_of(name)) == []


@pytest.mark.parametrize("name", [*(n for n in PAGES if n != GENERATED), *FOLDER_PAGES])
def test_prose_has_one_width(name):
    assert [f"{number}: {line}" for number, line in prose_lines(name) if len(line) > WIDTH] == []


def test_the_glossary_defines_each_word_once_in_at_most_three_sentences():
    entries = re.findall(
        r"^- \*\*(.+?)\*\*: (.+?)(?=\n- |\n\n|\Z)", text_of("docs/glossary.md"), re.MULTILINE | re.DOTALL
    )
    words = [word for word, _ in entries]
    assert len(words) == len(set(words))
    assert {word.strip() for word in DEFINED_WORDS.split(",")} <= set(words)
    for word, meaning in entries:
        assert 1 <= len(re.findall(r"[.!?](?:\s|\Z)", meaning.strip())) <= 3, word


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

    assert version("llama-ckpt") == llama_ckpt.__version__
    assert f"## {llama_ckpt.__version__}" in text_of("CHANGELOG.md")
