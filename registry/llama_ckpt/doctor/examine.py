"""Examine whether everything is as llama-ckpt needs it: one line per check, with the measurement and advice.

It opens no registry, so that it works even if nothing else does. It creates and upgrades no folder, database or schema, changes
no row, and removes the one small file that it writes.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from llama_ckpt.config import policy_of
from llama_ckpt.db.schedules import ScheduleRow
from llama_ckpt.doctor.database import DatabaseReport, examine_database
from llama_ckpt.doctor.diagnosis import Diagnosis, Level, fail, guarded, not_checked, ok, warn
from llama_ckpt.doctor.model import NAME as MODEL_NAME
from llama_ckpt.doctor.model import WrappingEngine, check_state_reuse
from llama_ckpt.doctor.store import examine_store, is_folder
from llama_ckpt.errors import BadInput, LlamaCkptError
from llama_ckpt.humanize import bytes_, plural
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store import writers
from llama_ckpt.store.layout import Entry, EntryKind
from llama_ckpt.store.marker import MARKER
from llama_ckpt.store.store import Store
from llama_ckpt.store.writers import Owner

_LEFT_OVER_S = 3600.0  # no write takes longer
_MAX_COUNTED_FILES = 200_000  # counting more takes minutes on a network file system
_SHORT_GHOST_GRACE_S = 600.0  # a save of some gigabytes to a slow disk takes minutes


def examine(
    *,
    root: Path,
    database_url: str,
    database_password: str | None = None,
    settings: Mapping[str, str] | None = None,
    model: Callable[[], WrappingEngine] | None = None,
) -> list[Diagnosis]:
    """Makes every check, each after those that it depends on. A check that cannot be made says why. `settings` are the policy's,
    as text. `model` makes the engine to check, with `n_ctx` of 64 or more and `logits_all=True`; it is closed afterwards.

    Never raises for a problem that it finds: every failure is a line. If it is interrupted, it leaves nothing behind.
    """
    policy, of_settings = _policy(settings or {})
    of_store = examine_store(root, policy)
    report = examine_database(database_url, database_password, root)
    return [
        *_versions(),
        *of_store,
        *report.diagnoses,
        guarded("marker", lambda: _marker(Store(root), report)),
        *_files(Store(root), report),
        of_settings if of_settings.level is Level.FAIL else guarded("policy", lambda: _schedule(policy, report)),
        guarded("graces", lambda: _graces(policy))
        if of_settings.level is not Level.FAIL
        else not_checked("graces", "no policy"),
        *([] if model is None else [guarded(MODEL_NAME, lambda: _model(model))]),
    ]


# -- versions --------------------------------------------------------------------------------------------------------------


def _versions() -> list[Diagnosis]:
    return [
        ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ok("SQLite", sqlite3.sqlite_version),
        guarded("llama-cpp-python", _engine_version),
    ]


def _engine_version() -> Diagnosis:
    try:
        return ok("llama-cpp-python", importlib.metadata.version("llama-cpp-python"))
    except importlib.metadata.PackageNotFoundError:
        return ok("llama-cpp-python", "not installed, which all but warm, save and restore can do without")


# -- where rows and files meet ----------------------------------------------------------------------------------------------


def _marker(store: Store, report: DatabaseReport) -> Diagnosis:
    owner, facts = store.owner(), report.facts
    state = "contains no marker" if not (store.root / MARKER).exists() else "contains a marker that cannot be read"
    if facts is None and not report.has_none:
        return not_checked("marker", report.why)
    if facts is None:
        if owner is None:
            return ok("marker", "there is no registry yet: its first save marks the store")
        advice = "name the right --database-url, or restore the database from its backup"
        return fail("marker", f"the store belongs to registry {owner}, and {report.why}", advice)
    if owner == facts.registry_id:
        return ok("marker", f"store and database are registry {owner}")
    if owner is not None:
        advice = f"name the right database or store (to give this store to this database, delete {MARKER} in it)"
        return fail("marker", f"the store is of registry {owner}, the database of {facts.registry_id}", advice)
    if facts.n_named:
        summary = (
            f"the store {state}, and {plural(facts.n_named, 'row')} of registry {facts.registry_id} name files in it"
        )
        return fail("marker", summary, "is it mounted? Restores and saves refuse until it is")
    return ok("marker", f"the store {state}: the first save marks it")


def _files(store: Store, report: DatabaseReport) -> list[Diagnosis]:
    names = ("left-over writes", "files")
    if not is_folder(store.root):
        return [not_checked(name, "there is no store folder") for name in names]
    try:
        seen = list(islice(store.walk(), _MAX_COUNTED_FILES + 1))
    except LlamaCkptError as error:
        return [fail(names[0], str(error)), not_checked(names[1], "the store cannot be walked")]
    return [
        guarded(names[0], lambda: _left_over(seen)),
        guarded(names[1], lambda: _counted(seen, report)),
    ]


def _left_over(seen: list[Entry]) -> Diagnosis:
    now_s = time.time()
    left = [
        entry
        for entry in seen
        if entry.kind is EntryKind.TEMPORARY
        and now_s - entry.mtime_ns / 1e9 > _LEFT_OVER_S
        and writers.ask(entry.owner) is not Owner.ALIVE  # a slow write is not left over
    ]
    if not left:
        return ok("left-over writes", "none")
    summary = f"{plural(len(left), 'temporary file')} of over an hour ago, {bytes_(sum(e.size_bytes for e in left))}"
    return warn("left-over writes", summary, "interrupted saves; llama-ckpt gc frees them")


def _counted(seen: list[Entry], report: DatabaseReport) -> Diagnosis:
    if report.facts is None:
        return not_checked("files", report.why)
    n_active = report.facts.n_active
    if len(seen) > _MAX_COUNTED_FILES:
        return ok(
            "files", f"{plural(n_active, 'ACTIVE row')}, over {_MAX_COUNTED_FILES:,} files (no more were counted)"
        )
    n_files = sum(entry.kind is EntryKind.CHECKPOINT for entry in seen)
    summary = f"{plural(n_active, 'ACTIVE row')}, {plural(n_files, 'file')}"
    if n_files < n_active:
        return warn("files", summary, "files are missing: llama-ckpt verify --all names them")
    return ok("files", summary)


# -- policy ------------------------------------------------------------------------------------------------------------------


def _policy(settings: Mapping[str, str]) -> tuple[Policy, Diagnosis]:
    """The policy, and a diagnosis that is a FAIL if the settings cannot be read."""
    try:
        return policy_of(settings), ok("policy", "")
    except BadInput as error:
        return Policy(), fail("policy", str(error), "mend the setting; llama-ckpt config shows where it stands")


def _schedule(policy: Policy, report: DatabaseReport) -> Diagnosis:
    limits = policy.limit_names()
    summary = f"limits: {', '.join(limits)}" if limits else "no limit is set: what is saved stays until it is removed"
    if report.facts is None:
        return (
            not_checked("policy", report.why) if limits and not report.has_none else _unscheduled(summary, limits, ())
        )
    running = [row for row in report.facts.schedules if row.is_alive]
    if running:
        by = running[0]
        last = f", its last run: {by.last_result}" if by.last_result else ""
        return ok("policy", f"{summary}; {by.holder} collects ({by.spec}){last}")
    return _unscheduled(summary, limits, report.facts.schedules)


def _unscheduled(summary: str, limits: list[str], gone: tuple[ScheduleRow, ...]) -> Diagnosis:
    if gone:
        summary += f"; the schedule of {gone[0].holder} runs no more"
    if not limits:
        return ok("policy", summary)
    return warn("policy", summary, "nothing prunes: llama-ckpt schedule install (or a timer of your own)")


def _graces(policy: Policy) -> Diagnosis:
    summary = f"stale {policy.stale_grace_s:.0f} s, ghost {policy.ghost_grace_s:.0f} s"
    wrong = []
    if policy.ghost_grace_s < _SHORT_GHOST_GRACE_S:
        wrong.append(
            "a ghost_grace under 10 minutes is shorter than a slow save: its file may go before its row is there"
        )
    if policy.stale_grace_s <= 0:
        wrong.append("without a stale_grace a prune cannot be undone: the next gc frees what it marked")
    return warn("graces", summary, "; ".join(wrong)) if wrong else ok("graces", summary)


# -- the model ---------------------------------------------------------------------------------------------------------------


def _model(make: Callable[[], WrappingEngine]) -> Diagnosis:
    engine = make()
    try:
        diagnosis = check_state_reuse(engine)
    finally:
        engine.llama.close()
    return replace(diagnosis, detail=f"{engine.model_name}: {diagnosis.detail}")
