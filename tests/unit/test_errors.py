"""Every error: its message, its exit code, and that it survives the way to another process."""

from __future__ import annotations

import copy
import inspect
import string
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
from support.words import refused_words

from llama_ckpt import errors
from llama_ckpt.errors import BadInput, CorruptFile, EngineMissing, FileMissing, LlamaCkptError, MissingParent, NotFound

KINDS = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, LlamaCkptError)]
SUBCLASSES = [kind for kind in KINDS if kind is not LlamaCkptError]


def placeholders(kind: type[LlamaCkptError]) -> set[str]:
    template = inspect.cleandoc(kind.__doc__)
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def made(kind: type[LlamaCkptError]) -> LlamaCkptError:
    return kind(**{name: f"<the {name}>" for name in placeholders(kind)})


def test_there_are_errors_to_test():
    assert len(KINDS) > 15
    assert CorruptFile in SUBCLASSES


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_the_message_is_the_docstring_with_every_value_in_it(kind):
    error = made(kind)
    message = str(error)
    for name in placeholders(kind):
        assert f"the {name}" in message
    assert "{" not in message
    assert "}" not in message
    assert message == message.strip()
    assert "\n" not in message


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_shows_what_happened_with_at_least_one_value(kind):
    assert placeholders(kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_is_in_plain_words(kind):
    assert refused_words(inspect.cleandoc(kind.__doc__)) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_an_error_with_a_value_missing_is_a_mistake_of_the_caller(kind):
    with pytest.raises(KeyError):
        kind()


def test_no_two_errors_have_the_same_exit_code():
    codes = {kind.__name__: kind.exit_code for kind in KINDS if kind is not MissingParent}
    assert len(set(codes.values())) == len(codes)


def test_a_missing_parent_is_a_missing_checkpoint_to_a_shell_and_names_it():
    error = MissingParent(what="ACTIVE checkpoint", name="0" * 32, hint="Bring it back first.")
    assert (error.checkpoint_id, error.exit_code) == ("0" * 32, NotFound.exit_code)
    assert str(error) == str(NotFound(**error.values))


def test_the_reason_of_an_error_is_a_part_of_its_message_or_all_of_it():
    assert BadInput(what="label", value="", reason="it is empty").reason == "it is empty"
    assert FileMissing(path="a.llam").reason == str(FileMissing(path="a.llam"))


@pytest.mark.parametrize("kind", SUBCLASSES, ids=lambda k: k.__name__)
def test_an_exit_code_is_the_errors_own_and_means_nothing_else_to_a_shell(kind):
    assert "exit_code" in vars(kind) or kind is MissingParent
    assert 3 <= kind.exit_code <= 63  # 1: any failure, 2: wrong usage; from 64 on others give a meaning


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_an_error_survives_a_copy(kind):
    error = made(kind)
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert (type(twin), str(twin), twin.values, twin.exit_code) == (kind, str(error), error.values, kind.exit_code)
        assert twin is not error


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_an_error_survives_the_way_from_a_worker_process(kind):
    error = made(kind)
    twin = ForkingPickler.loads(ForkingPickler.dumps(error))  # as multiprocessing sends it
    assert (type(twin), str(twin), twin.values) == (kind, str(error), error.values)


def test_values_with_braces_and_quotes_are_told_as_they_are():
    reason = "{path} {0} {{}} 'quoted' \"twice\" %s"
    assert str(CorruptFile(path="{x}", check="Header", reason=reason)) == f"{{x}}: Header FAILED: {reason}"


def test_a_value_given_by_a_user_is_shown_with_its_control_characters_visible():
    assert str(BadInput(what="label", value="a\nb\x1b[31m", reason="no")) == r"label: 'a\nb\x1b[31m' cannot be used: no"
    assert str(NotFound(what="checkpoint", name="\x1b[2J", hint="")).startswith(r"no checkpoint '\x1b[2J'.")


def test_every_error_is_caught_as_one_of_ours():
    for kind in KINDS:
        with pytest.raises(LlamaCkptError):
            raise made(kind)


def test_a_missing_engine_is_an_import_error_as_python_knows_it():
    with pytest.raises(ImportError, match="pip install 'llama-ckpt\\[llama\\]'"):
        raise EngineMissing(reason="No module named 'llama_cpp'")


def test_without_docstrings_an_error_still_tells_its_values():
    """`python -OO` strips them."""
    code = "from llama_ckpt.errors import CorruptFile; print(CorruptFile(path='p', check='CRC32', reason='bad'))"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "CorruptFile: {'path': 'p', 'check': 'CRC32', 'reason': 'bad'}\n"
