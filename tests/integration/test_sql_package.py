"""The scripts for a PostgreSQL DBA, run for real: each in a schema of its own, twice, as `psql -f` would."""

from __future__ import annotations

import hashlib
import threading
import uuid
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files

import pytest
import sqlalchemy as sa

from llama_ckpt.db import collecting, coordination, leases, marks, migrate, prefixes, rows
from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import checkpoint_prefix, gc_run, llama_model, metadata
from llama_ckpt.db.tables import llama_checkpoint_meta as meta
from llama_ckpt.errors import Conflict, DatabaseUnavailable
from llama_ckpt.fingerprint import active_key
from llama_ckpt.gc_values import RowVersion
from llama_ckpt.store.store import path_of
from llama_ckpt.values import MemoryKind, NewCheckpoint, PrefixLink, StaleReason

MODEL = bytes(range(32))
SCRIPTS = ("llama_checkpoint_pkg.sql", "roles.sql", "job_pg_cron.sql")
DAY_US = 86_400 * 1_000_000


def run_script(database, name):
    script = (files("llama_ckpt.sql") / "postgresql" / name).read_text(encoding="utf-8")
    with database.write() as db:
        db.connection.driver_connection.execute(script)


@contextmanager
def schema(url, name):
    """A database whose search_path is a fresh schema with our tables."""
    server = Database(url)
    with server.write() as db:
        db.exec_driver_sql(f"CREATE SCHEMA {name}")
    there = sa.make_url(url).update_query_dict({"options": f"-csearch_path={name}"})
    database = Database(there.render_as_string(hide_password=False))
    migrate.upgrade(database)
    try:
        yield database
    finally:
        database.close()
        with server.write() as db:
            db.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
        server.close()


@pytest.fixture(scope="module")
def installed(postgresql_url):
    with schema(postgresql_url, "of_the_dba") as database:
        for name in SCRIPTS * 2:
            run_script(database, name)
        yield database
        run_script(database, "drop.sql")  # roles are the cluster's


@pytest.fixture
def database(installed):
    """The scripts' schema with one model and no checkpoint."""
    with installed.write() as db:
        for table in (meta, llama_model, gc_run):
            db.execute(sa.delete(table))
        row = {"model_name": "sample", "weights_sha256": MODEL, "n_layer": 2, "n_kv_head": 1, "kv_token_bytes": 64}
        db.execute(sa.insert(llama_model).values(fingerprint=MODEL, fields_json="{}", created_us=1, **row))
    return installed


def new(input_hash="one", **values):
    made = uuid.uuid4().hex
    digest = hashlib.sha256(input_hash.encode()).digest()
    given = {
        "id": made, "model_name": "sample", "fingerprint": MODEL, "input_hash": digest, "tokens_hash": digest[::-1],
        "n_tokens": 300, "memory_kind": MemoryKind.FULL, "file_path": path_of(made), "file_size": 5_000_000_000,
        "payload_crc32": 0xFFFFFFFF, "prefill_ms": None, "expires_in_s": None, "label": None,
    }  # fmt: skip
    return NewCheckpoint(**given | values)


def save(db, row):
    """As a caller of the function: the number of the new row, and the id of the one it replaced."""
    names = NewCheckpoint.__dataclass_fields__
    values = {name: getattr(row, name) for name in names}
    values["memory_kind"] = str(row.memory_kind)
    arguments = ", ".join(f"p_{name} => :{name}" for name in names)
    return db.execute(sa.text(f"SELECT * FROM llama_save_checkpoint({arguments})"), values).one()


def link(db, ckpt_no, n_links=2):
    prefixes.link(
        db,
        [
            PrefixLink(prefix_hash=uuid.uuid4().bytes, n_tokens=256 * i, file_tokens=300, ckpt_no=ckpt_no)
            for i in range(1, n_links + 1)
        ],
    )


def plant(database, input_hash, parent_no=None, **values):
    """A committed row with two links, changed afterwards as a test needs it; gives its number."""
    with database.write() as db:
        row = new(input_hash, parent_no=parent_no, start_token=256 if parent_no else 0)
        ckpt_no = save(db, row).p_ckpt_no
        link(db, ckpt_no)
        if values:
            db.execute(sa.update(meta).where(meta.c.ckpt_no == ckpt_no).values(**values))
    return ckpt_no


def state(database, ckpt_no):
    """What became of a row: its reason (None while ACTIVE) and the number of its links."""
    with database.read() as db:
        row = db.execute(sa.select(meta).where(meta.c.ckpt_no == ckpt_no)).one()
        links = sa.select(sa.func.count()).where(checkpoint_prefix.c.ckpt_no == ckpt_no)
        assert (row.status == "ACTIVE") == (row.stale_reason is None) == (row.stale_us is None)
        return row.stale_reason, db.execute(links).scalar_one()


KEPT = (None, 2)
SUPERSEDED, EVICTED, EXPIRED = ("superseded", 0), ("evicted", 0), ("expired", 0)


def mark_stale(database, age=None, idle=None, batch=1000):
    with database.write() as db:
        given = {"age": age, "idle": idle, "batch": batch}
        return db.execute(sa.text("SELECT llama_mark_stale(:age, :idle, :batch)"), given).scalar_one()


def sweep(database, arguments):
    """As a scheduler calls it: outside of a transaction, since it commits by itself."""
    connection = sa.create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect()
    with connection as db:
        db.exec_driver_sql(f"CALL llama_sweep({arguments})")


@contextmanager
def refused(database, sqlstate, words):
    """A transaction in which the database refuses a statement."""
    with pytest.raises((Conflict, DatabaseUnavailable), match=words) as told, database.read() as db:
        yield db
    assert told.value.__cause__.orig.sqlstate == sqlstate


# -- save -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prefill_ms": 12_345, "expires_in_s": 90.5, "label": "'; DROP TABLE gc_run; -- %s :x & ü"},
        {"start_token": 256},
    ],
    ids=["the least", "everything", "a delta"],
)
def test_a_row_of_the_function_is_the_row_that_the_program_makes(database, values):
    if "start_token" in values:
        values = values | {"parent_no": plant(database, "parent")}
    row = new("one", **values)

    def made_by(insert):
        with database.read() as db:  # nothing done on it is kept: both make the very same row
            insert(db, row)
            return dict(db.execute(sa.select(meta).where(meta.c.id == row.id)).one()._mapping)

    ours, theirs = made_by(rows.insert_checkpoint), made_by(save)
    for made in (ours, theirs):
        del made["ckpt_no"]  # the next number, as it comes
        created, used = made.pop("created_us"), made.pop("last_used_us")
        assert abs(used - created) < 1_000_000
        if row.expires_in_s is not None:
            assert abs(made.pop("expires_us") - created - 90_500_000) < 1_000_000
    assert theirs == ours
    assert ours["active_key"] == active_key(row.fingerprint, row.input_hash)


def test_saving_an_input_again_supersedes_the_row_with_its_links_and_all_that_need_it(database):
    parent = plant(database, "parent")
    old = plant(database, "one", parent)
    child = plant(database, "child", old)
    pinned = plant(database, "grandchild", child, pinned=1)
    with database.write() as db:
        again = save(db, new("one"))
        link(db, again.p_ckpt_no)
    assert [state(database, n) for n in (old, child, pinned)] == [SUPERSEDED] * 3
    assert [state(database, n) for n in (parent, again.p_ckpt_no)] == [KEPT] * 2
    with database.read() as db:
        assert db.execute(sa.select(meta.c.ckpt_no).where(meta.c.id == again.p_replaced_id)).scalar_one() == old


def test_a_first_save_replaces_nothing(database):
    with database.write() as db:
        assert save(db, new("one")).p_replaced_id is None


def test_eight_that_save_one_input_at_once_leave_one_active_row(database):
    n_threads, n_rounds = 8, 20
    barrier, results, errors = threading.Barrier(n_threads, timeout=60), [], []

    def saves():
        try:
            for i in range(n_rounds):
                row = new(f"round {i}")
                barrier.wait()
                with database.write() as db:
                    saved = save(db, row)
                    link(db, saved.p_ckpt_no)
                results.append((i, row.id, saved.p_replaced_id))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=saves) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with database.read() as db:
        rows = db.execute(sa.select(meta.c.id, meta.c.ckpt_no, meta.c.input_hash, meta.c.stale_reason)).all()
        linked = set(db.scalars(sa.select(checkpoint_prefix.c.ckpt_no)))
    active = [r for r in rows if r.stale_reason is None]
    assert (len(rows), len(active), len({r.input_hash for r in active})) == (n_threads * n_rounds, n_rounds, n_rounds)
    assert {r.stale_reason for r in rows} == {None, "superseded"}
    assert linked == {r.ckpt_no for r in active}
    for i in range(n_rounds):  # each replaced another; the first of a round replaced none
        replaced = [old for at, _, old in results if at == i]
        assert replaced.count(None) == 1
        assert len(set(replaced)) == n_threads


@pytest.mark.parametrize("taken", ["id", "file_path"])
def test_a_clash_on_anything_else_is_raised_and_supersedes_nothing(database, taken):
    first = new("one")
    with database.write() as db:
        save(db, first)
    for input_hash in ("one", "two"):
        with refused(database, "23505", "duplicate key value violates") as db:
            save(db, replace(new(input_hash), **{taken: getattr(first, taken)}))
    with database.read() as db:
        assert db.execute(sa.select(meta.c.id, meta.c.status)).all() == [(first.id, "ACTIVE")]


def test_a_delta_of_a_parent_that_is_not_active_is_refused(database):
    gone = plant(database, "parent")
    mark_stale(database, age=-1)
    for parent_no in (gone, gone + 1_000_000):
        with refused(database, "23503", f"no ACTIVE parent {parent_no}") as db:
            save(db, new("one", start_token=256, parent_no=parent_no))


def test_the_functions_of_an_earlier_schema_are_replaced_and_every_call_stays_clear(database):
    earlier = (
        "text, text, bytea, bytea, bytea, integer, text, text, bigint, bigint, bigint, float8, text, integer, bigint"
    )
    with database.write() as db:
        db.exec_driver_sql(
            f"CREATE FUNCTION llama_save_checkpoint({earlier}) RETURNS integer LANGUAGE sql AS 'SELECT 1'"
        )
    run_script(database, "llama_checkpoint_pkg.sql")
    row = new()
    names = [name for name in NewCheckpoint.__dataclass_fields__ if not name.startswith("extend")]
    arguments = ", ".join(f"p_{name} => :{name}" for name in names)
    values = {name: getattr(row, name) for name in names} | {"memory_kind": "full"}
    with database.write() as db:
        assert db.execute(sa.text(f"SELECT p_ckpt_no FROM llama_save_checkpoint({arguments})"), values).scalar_one()


def test_a_row_between_two_others_is_what_the_longer_one_goes_on_from(database):
    first, longer = plant(database, "first"), plant(database, "longer")
    with database.write() as db:
        db.execute(sa.update(meta).where(meta.c.ckpt_no == longer).values(extends_no=first))
        between = save(db, new("between", extends_no=first, extended_by_no=longer)).p_ckpt_no
        save(db, new("elsewhere", extends_no=None, extended_by_no=longer))
        rows = dict(db.execute(sa.select(meta.c.ckpt_no, meta.c.extends_no)).all())
    assert (rows[between], rows[longer]) == (first, between)


def test_a_row_that_would_supersede_its_own_parent_is_refused(database):
    parent = plant(database, "one")
    with refused(database, "23503", "no ACTIVE parent") as db:
        save(db, new("one", start_token=256, parent_no=parent))
    assert state(database, parent) == KEPT


@pytest.mark.parametrize("name", ["fingerprint", "input_hash", "tokens_hash"])
@pytest.mark.parametrize("value", [None, b"", bytes(31), bytes(33)], ids=["none", "empty", "31 bytes", "33 bytes"])
def test_a_hash_of_a_wrong_length_is_refused(database, name, value):
    with refused(database, "22023", "must have 32 bytes") as db:
        save(db, replace(new(), **{name: value}))


def test_an_empty_text_is_none_as_on_oracle(database):
    with database.write() as db:
        ckpt_no = save(db, new(label="")).p_ckpt_no
        assert db.execute(sa.select(meta.c.label).where(meta.c.ckpt_no == ckpt_no)).scalar_one() is None
    with refused(database, "23502", "model_name") as db:
        save(db, new("two", model_name=""))


def test_the_clock_is_the_programs(database):
    with database.read() as db:
        before, between, after = (
            rows.clock_us(db),
            db.exec_driver_sql("SELECT llama_now_us()").scalar_one(),
            rows.clock_us(db),
        )
    assert before <= between <= after


# -- prune ------------------------------------------------------------------------------------------------------------


def test_what_is_idle_aged_or_expired_goes_stale_with_its_links(database):
    with database.read() as db:
        ago = rows.clock_us(db) - 2 * DAY_US
    fresh = plant(database, "fresh")
    idle = plant(database, "idle", last_used_us=ago)
    aged = plant(database, "aged", created_us=ago)
    expired = plant(database, "expired", expires_us=ago, last_used_us=ago)
    assert mark_stale(database) == 1
    assert [state(database, n) for n in (fresh, idle, aged, expired)] == [KEPT, KEPT, KEPT, EXPIRED]
    assert mark_stale(database, idle=3 * 86_400, age=3 * 86_400) == 0
    assert mark_stale(database, idle=86_400) == 1
    assert [state(database, n) for n in (fresh, idle, aged)] == [KEPT, EVICTED, KEPT]
    assert mark_stale(database, age=86_400.5) == 1
    assert [state(database, n) for n in (fresh, aged)] == [KEPT, EVICTED]
    with database.read() as db:
        found = db.execute(sa.select(meta.c.stale_us).where(meta.c.ckpt_no == aged)).scalar_one()
        assert 0 <= rows.clock_us(db) - found < 60_000_000


def test_what_is_pinned_leased_or_needed_by_a_living_delta_is_spared(database):
    later = 2**62
    pinned = plant(database, "pinned", pinned=1)
    leased = plant(database, "leased", lease_until_us=later)
    was_leased = plant(database, "was leased", lease_until_us=1)
    parent = plant(database, "parent")
    child = plant(database, "child", parent, pinned=1)
    while mark_stale(database, age=-1, idle=-1):
        pass
    assert [state(database, n) for n in (pinned, leased, was_leased, parent, child)] == [
        KEPT,
        KEPT,
        EVICTED,
        KEPT,
        KEPT,
    ]


def test_deltas_go_before_their_parents_batch_by_batch(database):
    numbers = [plant(database, "root")]
    for i in range(4):
        numbers.append(plant(database, f"delta {i}", numbers[-1]))
    for n_left in (4, 3, 2, 1, 0):
        assert mark_stale(database, age=-1, batch=3) == 1
        assert [state(database, n) for n in numbers] == [KEPT] * n_left + [EVICTED] * (5 - n_left)
    assert mark_stale(database, age=-1) == 0


def test_a_row_that_another_works_on_is_passed_over(database):
    held, free = plant(database, "held"), plant(database, "free")
    with database.write() as db:
        db.execute(sa.update(meta).where(meta.c.ckpt_no == held).values(hit_count=1))
        assert mark_stale(database, age=-1) == 1
    assert [state(database, n) for n in (held, free)] == [KEPT, EVICTED]


def test_a_parent_is_spared_while_its_delta_is_being_saved(database):
    parent = plant(database, "parent")
    with database.write() as db:
        child = save(db, new("child", start_token=256, parent_no=parent)).p_ckpt_no
        link(db, child)
        assert mark_stale(database, age=-1) == 0
    assert [state(database, n) for n in (parent, child)] == [KEPT, KEPT]


def test_saving_a_delta_tells_a_prune_that_was_planned_before(database):
    parent = plant(database, "parent")
    with database.write() as db:
        before = db.execute(sa.select(meta.c.last_used_us).where(meta.c.ckpt_no == parent)).scalar_one()
        save(db, new("child", start_token=256, parent_no=parent))
        assert db.execute(sa.select(meta.c.last_used_us).where(meta.c.ckpt_no == parent)).scalar_one() > before


def test_a_batch_of_none_is_refused(database):
    for batch in (0, -1, None):
        with refused(database, "22023", "p_batch must be at least 1") as db:
            db.execute(sa.text("SELECT llama_mark_stale(1, 1, :batch)"), {"batch": batch})


def test_a_sweep_takes_all_that_is_due_and_is_recorded_as_a_run(database):
    numbers = [plant(database, "root")]
    for i in range(3):
        numbers.append(plant(database, f"delta {i}", numbers[-1]))
    pinned = plant(database, "pinned", pinned=1)
    sweep(database, "p_max_age_s => -1, p_batch => 2")
    assert [state(database, n) for n in (*numbers, pinned)] == [*[EVICTED] * 4, KEPT]
    with database.read() as db:
        run = db.execute(sa.select(gc_run)).one()
    assert (run.kind, run.n_items, run.n_failed, run.freed_bytes) == ("prune", 4, 0, 0)
    assert run.started_us <= run.ended_us
    assert run.host.startswith("postgresql:")


# -- roles ------------------------------------------------------------------------------------------------------------


def act_as(db, role):
    """From here to the end of the transaction under a role's rights alone."""
    db.exec_driver_sql(f"SET LOCAL ROLE {role}")


def denied(database, role, statement):
    """Whether a role is refused a statement for want of a right."""
    try:
        with database.read() as db:
            act_as(db, role)
            db.exec_driver_sql(statement)
    except DatabaseUnavailable as error:
        return error.__cause__.orig.sqlstate == "42501"
    return False


def test_the_reader_reads_everything_and_writes_nothing(database):
    names = [*(t.name for t in metadata.sorted_tables), "llama_checkpoint_v", "llama_ckpt_schema"]
    for name in names:
        assert not denied(database, "llama_ckpt_reader", f"SELECT * FROM {name}")
    for table in metadata.sorted_tables:
        column = table.columns.keys()[0]
        for statement in (
            f"INSERT INTO {table.name} DEFAULT VALUES",
            f"UPDATE {table.name} SET {column} = {column}",
            f"DELETE FROM {table.name}",
            f"TRUNCATE {table.name}",
            f"SELECT {column} FROM {table.name} FOR UPDATE",
        ):
            assert denied(database, "llama_ckpt_reader", statement), statement


def test_the_writer_saves_and_marks_but_deletes_no_checkpoint(database):
    old = plant(database, "one")
    with database.read() as db:
        act_as(db, "llama_ckpt_writer")
        again = save(db, new("one"))
        link(db, again.p_ckpt_no)
        assert db.execute(sa.select(meta.c.status).where(meta.c.ckpt_no == old)).scalar_one() == "STALE"
        rows.insert_checkpoint(db, new("two"))
        row = rows.find_active(db, MODEL, new("two").input_hash)
        leases.release(db, row, leases.lease(db, row, 60), hit=True)
        assert marks.mark_stale(db, row, StaleReason.REMOVED)
    for name in ("llama_checkpoint_meta", "llama_model", "registry_info", "gc_run"):
        assert denied(database, "llama_ckpt_writer", f"DELETE FROM {name}")
    assert denied(database, "llama_ckpt_writer", "UPDATE registry_lease SET fence = 1")


def test_the_collector_prunes_and_deletes_but_adds_no_checkpoint(database):
    plant(database, "one")
    with database.read() as db:
        act_as(db, "llama_ckpt_collector")
        fence = coordination.take_lease(db, "gc", "me", 60)
        run_no = coordination.start_run(db, "gc", "me")
        row = rows.find_active(db, MODEL, new("one").input_hash)
        assert db.exec_driver_sql("SELECT llama_mark_stale(-1)").scalar_one() == 1
        assert collecting.delete_untouched(db, [RowVersion.of(row)]) == {row.ckpt_no}
        coordination.end_run(db, run_no, n_items=1, n_failed=0, freed_bytes=1)
        coordination.drop_lease(db, "gc", fence)
        db.exec_driver_sql("SELECT * FROM llama_checkpoint_v")
    with refused(database, "42501", "permission denied for table llama_checkpoint_meta") as db:
        act_as(db, "llama_ckpt_collector")
        save(db, new("two"))


# -- the job, and the end ---------------------------------------------------------------------------------------------

CRON = """
CREATE SCHEMA cron;
CREATE TABLE cron.job (jobid bigserial, jobname text UNIQUE, schedule text, command text, active boolean DEFAULT TRUE);
CREATE TABLE cron.job_run_details (jobid bigint, status text, return_message text, start_time timestamptz);
CREATE FUNCTION cron.schedule(job_name text, schedule text, command text) RETURNS bigint LANGUAGE sql AS $$
  INSERT INTO cron.job (jobname, schedule, command) VALUES ($1, $2, $3)
  ON CONFLICT (jobname) DO UPDATE SET schedule = $2, command = $3 RETURNING jobid $$;
CREATE FUNCTION cron.unschedule(job_id bigint) RETURNS boolean LANGUAGE sql AS $$
  DELETE FROM cron.job WHERE jobid = $1 RETURNING TRUE $$;
"""


def test_without_pg_cron_the_job_is_refused_in_words_and_dropping_it_does_no_harm(database):
    with refused(database, "42704", "pg_cron is not installed in database") as db:
        db.exec_driver_sql("SELECT llama_job_create('17 * * * *', NULL, 2592000)")
    with database.read() as db:
        assert db.exec_driver_sql("SELECT llama_job_drop()").scalar_one() is False
        assert db.exec_driver_sql("SELECT * FROM llama_job_status()").all() == []


def test_over_pg_crons_functions_the_job_is_made_replaced_shown_and_dropped(database):
    """Over a stand-in with the signatures and tables of pg_cron: it says nothing of pg_cron itself."""
    old = plant(database, "one", last_used_us=1)
    with database.read() as db:
        db.connection.driver_connection.execute(CRON)
        name = db.exec_driver_sql("SELECT current_database()").scalar_one()
        for schedule in ("17 * * * *", "23 * * * *"):
            jobid = db.exec_driver_sql("SELECT llama_job_create(%s, NULL, 2592000)", (schedule,)).scalar_one()
        assert list(db.exec_driver_sql("SELECT jobname FROM cron.job").scalars()) == [f"llama_ckpt_sweep_{name}"]
        db.exec_driver_sql("INSERT INTO cron.job_run_details VALUES (%s, 'succeeded', 'CALL', now())", (jobid,))
        shown = db.exec_driver_sql("SELECT * FROM llama_job_status()").one()
        command = shown.command
        assert (shown.schedule, shown.active, shown.last_status) == ("23 * * * *", True, "succeeded")
        assert db.exec_driver_sql("SELECT llama_job_drop()").scalar_one() is True
        assert db.exec_driver_sql("SELECT llama_job_drop()").scalar_one() is False
    assert command == "CALL llama_sweep(NULL, 2592000)"
    sweep(database, command.removeprefix("CALL llama_sweep(").removesuffix(")"))
    assert state(database, old) == EVICTED


def left_in_schema(database):
    with database.read() as db:
        return sorted(
            db.exec_driver_sql(
                "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
                " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
            ).scalars()
        )


def test_drop_removes_everything_and_may_be_run_again(database, postgresql_url):
    with schema(postgresql_url, "to_be_dropped") as other:
        run_script(other, "drop.sql")  # without roles, functions and job: nothing of them is missed
        assert left_in_schema(other) == []
        migrate.upgrade(other)
        for name in SCRIPTS:
            run_script(other, name)
        assert left_in_schema(other) != []
        for _ in range(2):
            run_script(other, "drop.sql")
            assert left_in_schema(other) == []
    # The roles served another schema too: they were kept for it.
    assert not denied(database, "llama_ckpt_reader", "SELECT * FROM llama_checkpoint_v")


def test_the_last_drop_takes_the_roles(database):
    ours = "FROM pg_roles WHERE rolname IN ('llama_ckpt_reader', 'llama_ckpt_writer', 'llama_ckpt_collector')"
    elsewhere = "SELECT count(*) FROM pg_shdepend WHERE dbid <> (SELECT oid FROM pg_database WHERE datname = current_database())"
    script = (files("llama_ckpt.sql") / "postgresql" / "drop.sql").read_text(encoding="utf-8")
    with database.read() as db:  # nothing done on it is kept
        if db.exec_driver_sql(f"{elsewhere} AND refobjid IN (SELECT oid {ours})").scalar_one():
            pytest.skip("another database of this cluster needs the roles")
        assert db.exec_driver_sql(f"SELECT count(*) {ours}").scalar_one() == 3
        db.connection.driver_connection.execute(script)
        assert db.exec_driver_sql(f"SELECT count(*) {ours}").scalar_one() == 0
