from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.databases import POSTGRESQL, empty, temporary_database
from support.links import wrong_links
from support.required import missing
from support.sample_engine import SampleEngine

from llama_ckpt.db import migrate
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.errors import DatabaseUnavailable
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.metrics import Counters
from llama_ckpt.registry import Registry

# A schema of its own, e.g. oracle+oracledb://user:password@host/?service_name=FREEPDB1: the tests delete every row of ours in it.
ORACLE = os.environ.get("LLAMA_CKPT_TEST_ORACLE_URL")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting and no folder of the person who runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith("LLAMA_CKPT_"):
            monkeypatch.delenv(name)
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.fixture(scope="session")
def postgresql_url():
    """A database of this test run, with the schema; dropped at the end."""
    with contextlib.ExitStack() as at_end:
        try:
            url = at_end.enter_context(temporary_database(POSTGRESQL))
        except sa.exc.OperationalError as error:
            shown = sa.make_url(POSTGRESQL).render_as_string(hide_password=True)
            missing("postgresql", f"no PostgreSQL at {shown}: {str(error.orig).splitlines()[0]}")
        database = Database(url)
        migrate.upgrade(database)
        database.close()
        yield url


@pytest.fixture(scope="session")
def oracle_url():
    """A real Oracle, where one is named."""
    if not ORACLE:
        pytest.skip("no Oracle is named by LLAMA_CKPT_TEST_ORACLE_URL")
    database = Database(ORACLE)
    migrate.upgrade(database)
    database.close()
    return ORACLE


@pytest.fixture(params=["sqlite", "postgresql", "oracle"] if ORACLE else ["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without rows: a test that takes it runs on every kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "registry.sqlite3")
    url = request.getfixturevalue(f"{request.param}_url")
    empty(url)
    return url


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def left_in_store() -> set[str]:
    """Kinds of findings that a test leaves on purpose; it adds to the set what it leaves."""
    return set()


@pytest.fixture
def registry(database_url: str, tmp_path: Path, counters: Counters, left_in_store: set[str]):
    """An empty registry over each database. At the end rows and files must agree."""
    opened = Registry.open(database_url, tmp_path / "store", metrics=counters)
    yield opened
    try:
        found = {f.kind.value for f in Verifier(opened.database, opened.store).findings()}
        assert found <= left_in_store
        assert left_in_store or wrong_links(opened) == []
    except DatabaseUnavailable:
        assert "no database" in left_in_store
    finally:
        opened.close()


@pytest.fixture
def engine() -> SampleEngine:
    """An engine that holds the recorded state of three tokens."""
    made = SampleEngine()
    made.evaluate(made.ids)
    return made


@pytest.fixture
def saved(registry: Registry, engine: SampleEngine):
    """A checkpoint of the input "one"."""
    return registry.save(engine, "one").checkpoint
