"""The one door: every public name comes from `llama_ckpt`, from one sorted table, and loads only what it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import llama_ckpt

SOURCE = Path(llama_ckpt.__file__).read_text(encoding="utf-8")


def names_for_type_checkers() -> dict[str, str]:
    """What a type checker imports, each name with its module below llama_ckpt."""
    (block,) = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module).removeprefix("llama_ckpt.") for node in imports for alias in node.names}


def test_the_table_is_sorted_and_says_what_type_checkers_see():
    assert list(llama_ckpt._HOMES) == sorted(llama_ckpt._HOMES)
    assert llama_ckpt.__all__ == sorted([*llama_ckpt._HOMES, "__version__"])
    assert names_for_type_checkers() == llama_ckpt._HOMES


@pytest.mark.parametrize("name", llama_ckpt.__all__)
def test_every_name_is_there_and_is_listed(name):
    assert getattr(llama_ckpt, name) is not None
    assert name in dir(llama_ckpt)


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'Mender'"):
        llama_ckpt.Mender  # noqa: B018


@pytest.mark.parametrize("name", ["", "Policy", "LlamaCkptError"])
def test_what_needs_no_database_and_no_numpy_loads_neither(name):
    code = (
        f"import sys, llama_ckpt; {name and f'llama_ckpt.{name};'} print({{'numpy', 'sqlalchemy'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
