"""The command, run in this process, over a store that holds four checkpoints of two models."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
import typer.main
from support import samples
from support.sample_engine import SampleEngine

from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.registry import DATABASE_FILE, Registry
from llama_ckpt_cli.app import app, main

WEIGHTS = b"GGUF, and the weights of the model 'sample'"
CRLF_AND_BOM = b"\xef\xbb\xbfone\r\ntwo\r\n"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one run of the command came to."""

    code: int
    out: str
    err: str
    n_left_open: int = 0
    """Database connections that the command opened and did not close."""

    def json(self):
        """The result, which must be all that is on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def fields(self) -> dict[str, str]:
        """The names and values of a result that has one a line."""
        pairs = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in self.out.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def succeeded(self) -> Ran:
        assert (self.code, self.err) == (0, "")
        return self

    def refused(self, kind, *words: str) -> str:
        """One sentence on stderr, the exit code of the error's class, and nothing else anywhere. Gives the sentence."""
        return self.failed(kind, *words, out="")

    def failed(self, kind, *words: str, out: str | None = None) -> str:
        """As `refused`, for a failure that comes after a result."""
        assert self.code == kind.exit_code, self
        assert out is None or self.out == out, self
        assert self.err.startswith("llama-ckpt: ")
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err
        return self.err.strip()


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """Nothing of the terminal that runs the tests colours or cuts what a command prints."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    """Runs the command in this process: `run("ls", "--json")`."""
    log = logging.getLogger("llama_ckpt")
    before = log.handlers[:], log.propagate, log.level

    def command(*arguments) -> Ran:
        log.handlers[:] = []  # the handler of an earlier run writes to the stderr of then
        capsys.readouterr()
        with connections() as opened:
            code = main([str(a) for a in arguments])
            n_left_open = len(opened)
        return Ran(code, *capsys.readouterr(), n_left_open)

    yield command
    log.handlers[:], log.propagate = before[:2]
    log.setLevel(before[2])


@contextlib.contextmanager
def connections():
    """The database connections that are open, of those that were opened in this block. It closes what is left of them."""
    opened = []

    def on_connect(connection, _record):
        opened.append(connection)

    def on_close(connection, _record):
        if connection in opened:
            opened.remove(connection)

    sa.event.listen(sa.pool.Pool, "connect", on_connect)
    sa.event.listen(sa.pool.Pool, "close", on_close)
    try:
        yield opened
    finally:
        sa.event.remove(sa.pool.Pool, "connect", on_connect)
        sa.event.remove(sa.pool.Pool, "close", on_close)
        for connection in opened:
            connection.close()


@dataclasses.dataclass
class Populated:
    """A store with checkpoints: `ids` by name."""

    root: Path
    ids: dict[str, str]
    inputs: dict[str, bytes]

    @property
    def url(self) -> str:
        return sqlite_url(self.root / DATABASE_FILE)

    @property
    def exported(self) -> Path:
        """Where `export` writes."""
        return self.root.with_name("exported.llam")

    def path(self, name: str) -> Path:
        checkpoint_id = self.ids[name]
        return self.root / checkpoint_id[:2] / checkpoint_id[2:4] / f"{checkpoint_id}.llam"

    def hash_of(self, name: str) -> str:
        return hashlib.sha256(self.inputs[name]).hexdigest()

    def set_row(self, name: str, **values) -> None:
        with contextlib.closing(Database(self.url)) as database, database.write() as db:
            db.execute(sa.update(meta).where(meta.c.id == self.ids[name]).values(**values))

    def row(self, name: str):
        with contextlib.closing(Database(self.url)) as database, database.read() as db:
            return db.execute(sa.select(meta).where(meta.c.id == self.ids[name])).one_or_none()

    def made_older(self, name: str, column: str, seconds: float) -> None:
        """Takes one of a row's times back."""
        self.set_row(name, **{column: getattr(self.row(name), column) - int(seconds * 1_000_000)})

    def snapshot(self) -> tuple[list[str], dict[str, tuple[bytes, int]]]:
        """Every row of every table, and every file with its bytes and time."""
        with contextlib.closing(sqlite3.connect(self.root / DATABASE_FILE)) as db:
            rows = list(db.iterdump())
        files = {
            str(p.relative_to(self.root)): (p.read_bytes(), p.stat().st_mtime_ns)
            for p in sorted(self.root.rglob("*"))
            if p.is_file() and not p.name.startswith(DATABASE_FILE)
        }
        return rows, files


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Populated:
    """Made once, copied for each test. The input "one" is saved for both models."""
    root = tmp_path_factory.mktemp("cli") / "store"
    engines = {
        "sample": SampleEngine(weights=hashlib.sha256(WEIGHTS).hexdigest()),
        "other": SampleEngine(samples.F16_FLASH, weights="cd" * 32, model_name="other"),
    }
    for engine in engines.values():
        engine.evaluate(engine.ids)
    plan = [
        ("other", "other", b"one", None),
        ("one", "sample", b"one", "mine"),
        ("two", "sample", b"two", None),
        ("crlf", "sample", CRLF_AND_BOM, None),
    ]
    ids = {}
    with Registry.open(store=root) as registry:
        for name, model, data, label in plan:
            saved = registry.save(engines[model], data.decode(), label=label, prefill_ms=1500)
            ids[name] = saved.checkpoint.id
    return Populated(root, ids, {name: data for name, _, data, _ in plan})


@pytest.fixture
def populated(template, tmp_path, monkeypatch) -> Populated:
    """A store with four checkpoints, which the commands of this test use unless they name another."""
    root = tmp_path / "store"
    shutil.copytree(template.root, root)
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(root))
    return Populated(root, template.ids, template.inputs)


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    """A store without checkpoints."""
    root = tmp_path / "empty"
    Registry.open(store=root).close()
    monkeypatch.setenv("LLAMA_CKPT_STORE", str(root))
    return root


@pytest.fixture
def gguf(tmp_path) -> Path:
    """A file with the weights that the rows of "sample" name. It is called otherwise than the model."""
    path = tmp_path / "downloaded.gguf"
    path.write_bytes(WEIGHTS)
    return path


class Terminal(io.StringIO):
    """A stdin on which a person answers."""

    def isatty(self) -> bool:
        return True


class Interrupting(Terminal):
    """A stdin on which a person presses Ctrl-C."""

    def readline(self, *_) -> str:
        raise KeyboardInterrupt


@pytest.fixture
def answer(monkeypatch):
    """`answer("y")`: a person at a terminal who types this when asked; `answer(None)`: who presses Ctrl-C."""

    def typed(text: str | None) -> None:
        monkeypatch.setattr("sys.stdin", Interrupting() if text is None else Terminal(f"{text}\n"))

    return typed


NEEDS_A_MODEL = {("demo",), ("warm",), ("batch",)}  # test_demo_warm.py and test_batch.py run them


def leaves(group=None, path=()) -> dict[tuple[str, ...], object]:
    """Every command that does something, by its words: ("ls",), ("db", "upgrade")."""
    found = {}
    for name, one in (group or typer.main.get_command(app)).commands.items():
        if hasattr(one, "commands"):
            found |= leaves(one, (*path, name))
        if not hasattr(one, "commands") or one.invoke_without_command:
            found[*path, name] = one
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `leaf` runs for every command there is; with `complete`, for each that needs no model."""
    if "leaf" in metafunc.fixturenames:
        left_out = NEEDS_A_MODEL if "complete" in metafunc.fixturenames else set()
        metafunc.parametrize("leaf", [leaf for leaf in leaves() if leaf not in left_out], ids=" ".join)


@pytest.fixture(scope="session")
def all_leaves() -> list[tuple[str, ...]]:
    return list(leaves())


@pytest.fixture
def click_command(leaf):
    """The parsed form of the command `leaf`."""
    return leaves()[leaf]


@pytest.fixture
def complete(populated):
    """`complete(leaf)`: the command's words with arguments that make it succeed on the populated store."""
    arguments = {
        ("match",): ["--text", "one", "--model", "sample"],
        ("show",): [populated.ids["one"]],
        ("pin",): [populated.ids["one"], populated.ids["two"]],
        ("unpin",): [populated.ids["one"]],
        ("rm",): [populated.ids["one"]],
        ("flatten",): [populated.ids["one"]],
        ("adopt",): [str(populated.path("one"))],
        ("export",): [populated.ids["one"], "--format", "llam", "-o", str(populated.exported), "--force"],
        ("inspect",): [str(populated.path("one"))],
        ("verify",): [populated.ids["one"]],
        ("repair",): [str(populated.path("one"))],
        ("prune",): ["--max-age", "0s", "--yes"],
        ("unprune",): ["--since", "1h"],
        ("explain",): [populated.ids["one"]],
        ("purge",): ["--label", "no such label", "--yes"],
        ("schedule", "run"): ["--once"],
        ("schedule", "install"): ["--systemd"],
        ("schedule", "uninstall"): ["--systemd"],
        ("gc",): ["--yes"],
        ("db", "downgrade"): ["0001", "--yes"],
        ("db", "sql"): ["--dialect", "postgresql"],
    }

    def words(leaf) -> list[str]:
        return [*leaf, *arguments.get(leaf, [])]

    return words
