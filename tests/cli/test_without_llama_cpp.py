"""The engine is an extra: all that needs none of it works where it cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from llama_ckpt.errors import EngineMissing

WITHOUT = """
import sys
sys.modules['llama_cpp'] = None
from llama_ckpt_cli.app import main
sys.exit(main(sys.argv[1:]))
"""
MANY_WITHOUT = """
import contextlib, io, json, sys
sys.modules['llama_cpp'] = None
from llama_ckpt_cli.app import main
answers = {}
for name, words in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    answers[name] = code, out.getvalue()
print(json.dumps(answers))
"""


@pytest.fixture
def without(populated):
    """Runs the command in a process of its own that cannot import llama_cpp."""

    def command(*arguments) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    return command


def test_every_command_that_needs_no_model_works_without_llama_cpp(populated, complete, all_leaves, gguf):
    order = {
        " ".join(leaf): [*complete(leaf), "--json"]
        for leaf in all_leaves
        if leaf not in {("demo",), ("warm",), ("batch",)}
    }
    order |= {
        "match by a file's bytes": ["match", "--text", "one", "--model", str(gguf), "--json"],
        "match by hash": ["match", "--hash", populated.hash_of("two"), "--json"],
        "verify a file": ["verify", str(populated.path("crlf")), "--json"],
        "verify all": ["verify", "--all", "--json"],
        "gc, dry": ["gc", "--dry-run", "--json"],
    }
    # What takes rows or tables away comes last.
    last = ["rm", "prune", "gc", "db downgrade"]
    order = {name: order[name] for name in sorted(order, key=lambda n: last.index(n) if n in last else -1)}
    child = subprocess.run(
        [sys.executable, "-c", MANY_WITHOUT], input=json.dumps(order), capture_output=True, text=True, check=True
    )
    assert child.stderr == ""
    answers = json.loads(child.stdout)
    assert {name: code for name, (code, _) in answers.items()} == dict.fromkeys(order, 0)
    for name, (_, out) in answers.items():
        assert json.loads(out) is not None, name
    assert json.loads(answers["match by a file's bytes"][1])["checkpoint"]["id"] == populated.ids["one"]


def test_match_by_a_registered_name_works_as_the_command_line_runs_it(without, populated):
    ran = without("match", "--model", "sample", "--text", "one", "--quiet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, populated.ids["one"] + "\n", "")


@pytest.mark.parametrize("words", [["warm", "--text", "one"], ["demo"]], ids=lambda w: w[0])
def test_what_needs_the_engine_says_how_to_install_it(without, gguf, words):
    ran = without(*words, "--model", gguf)
    assert (ran.returncode, ran.stdout) == (EngineMissing.exit_code, "")
    assert ran.stderr.startswith("llama-ckpt: ")
    assert ran.stderr.count("\n") == 1
    assert "pip install 'llama-ckpt[llama]'" in ran.stderr


def test_the_package_itself_can_be_imported_without_it():
    program = "import sys; sys.modules['llama_cpp'] = None; from llama_ckpt import Registry; print(Registry.__name__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ)
    assert (ran.returncode, ran.stdout) == (0, "Registry\n")
