"""Rules that no tool of the checks holds, or that must hold before the tools run: read from the syntax trees."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("registry", "cli", "migrations", "sql")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_COMMAND_LINES = 25
MAX_POSITIONAL = 5
MAX_ROOT_MODULES = 12
# Functions that are longer, or take more positional parameters. At most three: a migration that is published, and little else.
EXCEPTIONS: dict[str, list[str]] = {}
NATIVE_FILE_CALL = re.compile(r"llama_(state_(seq_)?|)(load|save)_(session_)?file")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- the rules: each gives the lines that break it ------------------------------------------------------------------------


def calls_of(tree: ast.AST, *names: str) -> list[int]:
    """Lines that call a function of this name, as `name(...)` or `module.name(...)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            called = function.id if isinstance(function, ast.Name) else None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                called = f"{function.value.id}.{function.attr}"
            if called in names:
                found.append(node.lineno)
    return found


def imports_of(tree: ast.AST, packages: tuple[str, ...]) -> list[int]:
    """Lines that import one of the packages or something in them, at any depth of the code, under any name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and called_import(node):
            names = [str(getattr(node.args[0], "value", ""))] if node.args else []
        else:
            continue
        found += [node.lineno for name in names if name.split(".")[0] in packages]
    return found


def called_import(node: ast.Call) -> bool:
    return getattr(node.func, "id", getattr(node.func, "attr", "")) in ("import_module", "__import__")


def swallowing_handlers(tree: ast.AST) -> list[int]:
    """Lines of a bare `except:`, and of an `except Exception:` that does nothing with it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(isinstance(k, ast.Name) and k.id in ("Exception", "BaseException") for k in kinds)
            if node.type is None or (broad and all(does_nothing(statement) for statement in node.body)):
                found.append(node.lineno)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "suppress":
            names = {argument.id for argument in node.args if isinstance(argument, ast.Name)}
            found += [node.lineno] if names & {"Exception", "BaseException"} else []
    return found


def does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue)


def native_file_calls(tree: ast.AST) -> list[int]:
    """Lines that name one of llama.cpp's own file functions as code does: by name, attribute, import or in a getattr."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                named = name
            case ast.Constant(value=str(text)):
                named = text  # all of it: a sentence that speaks of the function is no use of it
            case _:
                continue
        if NATIVE_FILE_CALL.fullmatch(named):
            found.append(node.lineno)
    return found


def sleeps(tree: ast.AST) -> list[int]:
    """Lines that call or import `sleep` of anything."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep")) | ast.Call(func=ast.Name(id="sleep")):
                found.append(node.lineno)
            case ast.ImportFrom(names=names) if any(alias.name == "sleep" for alias in names):
                found.append(node.lineno)
    return found


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def long_functions(tree: ast.AST, at_most: int = MAX_FUNCTION_LINES) -> list[str]:
    return [function.name for function in functions_of(tree) if length(function) > at_most]


def crowded_functions(tree: ast.AST, at_most: int = MAX_POSITIONAL) -> list[str]:
    """Functions that take more positional parameters, without `self` and `cls`."""
    crowded = []
    for function in functions_of(tree):
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if len([name for name in names if name not in ("self", "cls")]) > at_most:
            crowded.append(function.name)
    return crowded


def commands_of(tree: ast.AST) -> set[str]:
    """Functions that are registered as `command(app, "name")(function)`."""
    return {
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Call)
        and getattr(node.func.func, "id", None) == "command"
        and isinstance(node.args[0], ast.Name)
    }


def long_commands(tree: ast.AST, at_most: int = MAX_COMMAND_LINES) -> list[str]:
    names = commands_of(tree)
    return [f.name for f in functions_of(tree) if f.name in names and length(f) > at_most]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# -- the rules see what they are to see -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "code", "lines"),
    [
        (lambda t: calls_of(t, "print"), 'print("x")\nlog("print(")\nconsole.print("x")', [1]),
        (lambda t: calls_of(t, "sys.stdout.write", "print"), "def f():\n    print()", [2]),
        (lambda t: imports_of(t, ("pickle",)), "import pickle", [1]),
        (lambda t: imports_of(t, ("pickle",)), "import os, pickle as p", [1]),
        (lambda t: imports_of(t, ("pickle",)), "def f():\n    from pickle import loads", [2]),
        (lambda t: imports_of(t, ("sqlalchemy",)), "import sqlalchemy.orm\nfrom sqlalchemy.engine import URL", [1, 2]),
        (lambda t: imports_of(t, ("sqlalchemy",)), "import sqlalchemy_utils\nfrom . import sqlalchemy", []),
        (lambda t: imports_of(t, ("llama_cpp",)), 'importlib.import_module("llama_cpp.llama")\n__import__("os")', [1]),
        (swallowing_handlers, "try:\n    f()\nexcept:\n    raise", [3]),
        (swallowing_handlers, "try:\n    f()\nexcept Exception:\n    pass", [3]),
        (swallowing_handlers, "for x in y:\n  try:\n    f()\n  except (ValueError, BaseException):\n    continue", [4]),
        (swallowing_handlers, "try:\n    f()\nexcept Exception as e:\n    ...", [3]),
        (swallowing_handlers, "try:\n    f()\nexcept Exception:\n    raise\nexcept OSError:\n    pass", []),
        (swallowing_handlers, "with contextlib.suppress(Exception):\n    f()\nwith suppress(OSError):\n    f()", [1]),
        (native_file_calls, "llama_cpp.llama_state_seq_load_file(ctx)", [1]),
        (native_file_calls, "from llama_cpp import llama_state_save_file as f", [1]),
        (native_file_calls, 'getattr(llama_cpp, "llama_state_load_file")', [1]),
        (native_file_calls, "llama_load_session_file(ctx)\nllama_save_session_file(ctx)", [1, 2]),
        (native_file_calls, '"""llama_state_load_file aborts the process."""\nllama_state_seq_get_data(ctx)', []),
        (sleeps, "import time\ntime.sleep(1)\nfrom time import sleep\nsleep(1)\nawait_sleep(1)", [2, 3, 4]),
        (lambda t: long_functions(t, 2), "def f():\n    a\n    b\nasync def g():\n    a", ["f"]),
        (lambda t: crowded_functions(t, 1), "class C:\n  def f(self, a): ...\n  def g(self, a, b=1): ...", ["g"]),
        (lambda t: crowded_functions(t, 1), "def f(a, /, b): ...\ndef g(a, *, b): ...", ["f"]),
        (lambda t: long_commands(t, 1), "def f():\n  a\ndef g():\n  a\ncommand(app, 'f', group=X)(f)", ["f"]),
    ],
)  # fmt: skip
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule, code, lines):
    assert sorted(rule(ast.parse(code))) == lines


def test_the_rules_look_at_the_whole_project():
    names = {name_of(path) for path in modules(*SOURCES)}
    assert {
        "registry/llama_ckpt/store/store.py",
        "registry/llama_ckpt/engine/llamacpp.py",
        "cli/llama_ckpt_cli/app.py",
        "migrations/env.py",
    } <= names
    assert name_of(Path(__file__)) in {name_of(path) for path in modules("tests")}


# -- the project keeps them -----------------------------------------------------------------------------------------------


def broken(rule: Callable[[ast.AST], list], *folders: str, except_in: str = "\0") -> dict[str, list]:
    """What breaks a rule, by module: lines, or names of functions. Modules whose name begins with `except_in` are left out."""
    found = {name_of(path): rule(parsed(path)) for path in modules(*folders)}
    return {name: lines for name, lines in found.items() if lines and not name.startswith(except_in)}


def test_the_library_never_prints():
    assert broken(lambda tree: calls_of(tree, "print", "pprint", "pprint.pprint"), "registry") == {}


def test_nothing_of_a_file_is_ever_unpickled_or_run():
    unsafe = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    assert broken(lambda tree: imports_of(tree, unsafe), *SOURCES) == {}
    assert broken(lambda tree: calls_of(tree, "eval", "exec", "np.load", "numpy.load", "yaml.load"), *SOURCES) == {}


def test_no_error_is_swallowed_unseen():
    assert broken(swallowing_handlers, *SOURCES) == {}


def test_only_the_database_package_speaks_sql():
    rule = partial(imports_of, packages=("sqlalchemy", "alembic"))
    assert broken(rule, "registry", "cli", "sql", except_in="registry/llama_ckpt/db/") == {}
    assert broken(rule, "registry")


def test_only_the_engine_package_knows_llama_cpp_and_not_all_of_it():
    rule = partial(imports_of, packages=("llama_cpp",))
    modules_of_it = {f"registry/llama_ckpt/engine/{name}.py" for name in ("_llama", "tracking")}  # one import, one type
    assert set(broken(rule, *SOURCES)) == modules_of_it


def test_the_native_file_functions_which_abort_the_process_are_never_called():
    assert broken(native_file_calls, *SOURCES) == {}


def test_nothing_sleeps():
    # Who waits for another process has nothing but the database to ask, now and then.
    assert broken(sleeps, "tests", "registry", "cli", except_in="registry/llama_ckpt/warm/single_flight.py") == {}


def test_a_module_can_be_read_in_one_go():
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules(*SOURCES)}
    assert {name: n for name, n in lines.items() if n > MAX_MODULE_LINES} == {}


def excepted(name: str, found: list[str]) -> list[str]:
    return [function for function in found if function not in EXCEPTIONS.get(name, [])]


def test_a_function_can_be_read_and_called_without_counting():
    for rule in (long_functions, crowded_functions):
        found = {name: excepted(name, functions) for name, functions in broken(rule, *SOURCES).items()}
        assert {name: functions for name, functions in found.items() if functions} == {}


def test_no_exception_is_left_that_nothing_needs():
    assert sum(map(len, EXCEPTIONS.values())) <= 3
    broken_now = [broken(rule, *SOURCES) for rule in (long_functions, crowded_functions)]
    for name, functions in EXCEPTIONS.items():
        assert set(functions) <= {function for found in broken_now for function in found.get(name, [])}, name


def test_a_command_parses_calls_one_function_and_reports():
    assert sum(len(commands_of(parsed(path))) for path in modules("cli")) > 30
    assert broken(long_commands, "cli") == {}


def test_the_root_of_the_library_shows_its_plan():
    assert len(list((ROOT / "registry" / "llama_ckpt").glob("*.py"))) <= MAX_ROOT_MODULES


HOMES = {"registry": [], "cli": [], "migrations": ["llama_ckpt", "migrations"], "sql": ["llama_ckpt", "sql"]}


def packages_on_disk() -> dict[str, Path]:
    """Every folder that holds a file of the program, by the name under which it is shipped."""
    found = {}
    for source, above in HOMES.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                context = path.parent.relative_to(ROOT / source).parts
                found[".".join([*above, *context])] = path.parent
    return found


def setuptools_settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_the_packages_that_are_shipped_are_the_folders_on_disk():
    assert sorted(setuptools_settings()["packages"]) == sorted(packages_on_disk())


def test_every_package_is_where_the_settings_say():
    on_disk = packages_on_disk()
    for package, folder in setuptools_settings()["package-dir"].items():
        assert on_disk[package] == ROOT / folder


def test_every_folder_with_code_can_be_imported():
    for path in modules(*SOURCES):
        assert (path.parent / "__init__.py").is_file(), name_of(path)


def test_every_file_that_the_program_reads_beside_its_code_is_shipped():
    patterns = setuptools_settings()["package-data"]
    on_disk = packages_on_disk()
    shipped = {path for package in patterns for pattern in patterns[package] for path in on_disk[package].glob(pattern)}
    beside = {
        path for folder in on_disk.values() for path in folder.iterdir() if path.is_file() and path.suffix != ".py"
    }
    assert any(path.suffix == ".sql" for path in beside)
    assert {name_of(path) for path in beside} == {name_of(path) for path in shipped}


# The first commit of this layout: the rule for subjects holds from here on.
FIRST_RULED = "registry: move 54 modules into wings, checkpoints and pillars"


def subjects() -> list[str]:
    """The subjects of the commits since the rule holds, newest first."""
    done = subprocess.run(["git", "log", "--format=%s"], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if FIRST_RULED not in lines:
        pytest.skip("no git history that reaches back to the rule")
    return lines[: lines.index(FIRST_RULED) + 1]


def test_a_commit_says_which_area_does_what():
    wrong = [line for line in subjects() if len(line) > 72 or not re.match(r"[a-z_]+(, [a-z_]+)*: [a-z]", line)]
    assert wrong == []
    assert [line for line in subjects() if re.search(r"\b(wip|snapshot|merge)\b", line, re.IGNORECASE)] == []
