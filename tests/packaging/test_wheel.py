"""What is shipped is what was tested: the wheel, from elsewhere, with nothing of the checkout in reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llama_ckpt.db import migrate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What git tracks or would track: no left-over of an earlier build can put a file into a wheel."""
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if names.returncode != 0:
        pytest.skip("not a git checkout")
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """The wheel."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """An environment in which the wheel's files come before all else, and the checkout is not there."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return {**os.environ, "PYTHONPATH": str(site)}


def run(installed, cwd, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], env=installed, cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_every_package_the_migrations_and_the_sql(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for source, target in (
        ("registry", ""),
        ("cli", ""),
        ("migrations", "llama_ckpt/migrations/"),
        ("sql", "llama_ckpt/sql/"),
    ):
        for path in (ROOT / source).rglob("*"):
            if path.suffix in (".py", ".sql", ".mako", ".typed") and "egg-info" not in str(path):
                assert target + path.relative_to(ROOT / source).as_posix() in names
    assert {n.split("/")[0] for n in names} == {"llama_ckpt", "llama_ckpt_cli", "llama_ckpt-0.1.0.dist-info"}


def test_the_wheel_alone_makes_a_registry_and_answers(installed, tmp_path):
    where = run(installed, tmp_path, "-c", "import llama_ckpt; print(llama_ckpt.__file__)")
    assert where.stdout.startswith(installed["PYTHONPATH"])
    store = ["--store", str(tmp_path / "store")]
    upgraded = run(installed, tmp_path, "-m", "llama_ckpt_cli", "db", "upgrade", *store)
    assert (upgraded.returncode, f"schema {migrate.HEAD} created" in upgraded.stdout) == (0, True), upgraded.stderr
    matched = run(installed, tmp_path, "-m", "llama_ckpt_cli", "match", "--text", "hello", *store)
    assert (matched.returncode, "no checkpoint of this input is registered" in matched.stdout) == (3, True), (
        matched.stderr
    )


def test_a_script_beside_files_named_registry_and_cli_is_not_disturbed(installed, tmp_path):
    for name in ("registry.py", "cli.py", "migrations.py", "sql.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    done = run(installed, tmp_path, "-c", "from llama_ckpt import Registry; import llama_ckpt_cli.app; print('fine')")
    assert done.stdout == "fine\n", done.stderr


def test_importing_the_package_loads_neither_engine_nor_database_nor_numpy(installed, tmp_path):
    code = "import sys, llama_ckpt; print(sorted({'llama_cpp', 'sqlalchemy', 'numpy', 'alembic', 'typer'} & set(sys.modules)))"
    assert run(installed, tmp_path, "-c", code).stdout == "[]\n"


def test_a_type_checker_finds_the_package_of_an_editable_install(source, tmp_path):
    # What pip does with `--editable`; mypy reads a .pth file that names folders, and runs no import hook.
    build = "import sys, build_backend; print(build_backend.build_editable(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        named = {n for n in archive.namelist() if n.endswith(".pth")}
        folders = archive.read("llama_ckpt_folders.pth").decode().splitlines()
        record = archive.read("llama_ckpt-0.1.0.dist-info/RECORD").decode()
    assert named <= {line.split(",")[0] for line in record.splitlines()}, "pip removes them with the package"
    program = tmp_path / "program.py"
    program.write_text("from llama_ckpt import Registry\nreveal_type(Registry.open)\n")
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(program),
    ]
    checked = subprocess.run(
        mypy,
        env={**os.environ, "MYPYPATH": os.pathsep.join(folders)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "-> llama_ckpt.registry.Registry" in checked.stdout, checked.stdout + checked.stderr
