"""`Registry`: the door of the library. It saves, finds and restores checkpoints, and brings inputs through an engine.

The order that keeps data safe: a save writes the file first (staged, durable, then under its name) and the row last, so a
crash leaves at most a file without a row. A delete removes the row first and the file after.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llama_ckpt import config
from llama_ckpt.catalogue import Catalogue
from llama_ckpt.checkpoints import restore as restoring
from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.inputs import ResolvedInput, SaveOptions
from llama_ckpt.checkpoints.restore import RestoreOptions
from llama_ckpt.config import Setting, policy_of
from llama_ckpt.context import DEFAULT_DELTA_DEPTH, DEFAULT_MIN_TOKENS, RegistryContext
from llama_ckpt.db import migrate, prefixes, rows
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.engine import Engine, HeldState, Progress, no_progress
from llama_ckpt.errors import BadInput
from llama_ckpt.fingerprint import Input
from llama_ckpt.metrics import MetricsSink, NullSink
from llama_ckpt.retention.policy import Policy
from llama_ckpt.store.store import StepHook, Store, no_hook
from llama_ckpt.values import (
    Checkpoint,
    MergeResult,
    RestoreResult,
    SaveResult,
    WarmResult,
)
from llama_ckpt.warm import warm as warming
from llama_ckpt.warm.autosave import Autosave
from llama_ckpt.warm.batch import Batch, BatchInput, BatchOptions, BatchRecord, SaveMode
from llama_ckpt.warm.single_flight import DEFAULT_WAIT_S
from llama_ckpt.warm.warm import WarmOptions

if TYPE_CHECKING:
    from llama_ckpt.collector.schedule import CollectorSchedule

DATABASE_FILE = "registry.sqlite3"


class Registry(Catalogue):
    """A registry of checkpoints: rows in a database, files in a store. Open one with `Registry.open` or `Registry.configured`.

    A prompt is a text, or token ids. `with` closes the registry at the end of its block.
    """

    @classmethod
    def open(
        cls,
        database_url: str | None = None,
        store: str | Path | None = None,
        *,
        database_password: str | None = None,
        upgrade: bool | None = None,
        drop_page_cache: bool = False,
        policy: Policy | None = None,
        min_match_tokens: int = DEFAULT_MIN_TOKENS,
        delta_depth: int = DEFAULT_DELTA_DEPTH,
        metrics: MetricsSink | None = None,
        hook: StepHook = no_hook,
    ) -> Registry:
        """Opens a registry; creates its store and its schema if they do not exist.

        Without arguments it is in the user's data folder (settings are not read: see `configured`). With a `store` alone, the
        database is an SQLite file in it. `database_password` is used if the URL contains none. By default an older schema is
        upgraded on SQLite but not on a server, where other hosts may still run the older version; `upgrade` overrides that.

        Saves keep to the limits of `policy` (`max_bytes`, `min_free`). A shared prefix of fewer than `min_match_tokens` tokens
        is no match. A save writes only cells that are not stored yet, as a delta on at most `delta_depth` other checkpoints; 0
        writes all. `drop_page_cache` drops written pages from the page cache after the fsync. `hook` is called with the name of
        each step of a save, for tests.

        Raises:
            BadInput: the URL or a number cannot be used.
            DatabaseUnavailable, StoreUnavailable: they cannot be reached, read or written; or the store is another registry's.
            SchemaTooNew, SchemaTooOld: another version of llama-ckpt made the database.
        """
        _require_limits(min_match_tokens, delta_depth)
        root = default_store() if store is None else _absolute(Path(store))
        files = Store(root, drop_page_cache=drop_page_cache, hook=hook)
        context = _context(files, database_url or sqlite_url(root / DATABASE_FILE), database_password, upgrade)
        context = replace(context, metrics=metrics or NullSink(), hook=hook, policy=policy or Policy())
        return cls(replace(context, min_match_tokens=min_match_tokens, delta_depth=delta_depth))

    @classmethod
    def configured(cls, settings: Mapping[str, Setting] | None = None, *, upgrade: bool | None = None) -> Registry:
        """Opens the registry that the settings name, with the limits that they set. The command `llama-ckpt` opens the same.
        Without `settings`: the LLAMA_CKPT_… environment variables, then the settings file, then the defaults. `upgrade` as in
        `open`.

        Raises:
            BadInput: a setting cannot be read or used.
            DatabaseUnavailable, StoreUnavailable, SchemaTooNew, SchemaTooOld: as `open`.
        """
        environment = os.environ
        if settings is None:
            settings = config.settings({}, environment, config.config_file(environment))
        values = {name: setting.value for name, setting in settings.items()}
        return cls.open(
            values["database_url"] or None,
            store_of(settings),
            database_password=config.database_password(environment),
            upgrade=upgrade,
            drop_page_cache=config.flag(values["drop_page_cache"], "drop_page_cache"),
            policy=policy_of(values),
            min_match_tokens=config.count(values["min_match_tokens"], "min_match_tokens"),
            delta_depth=config.count(values["delta_depth"], "delta_depth"),
        )

    def close(self) -> None:
        """Closes the database connections."""
        self.database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- collect -------------------------------------------------------------------------------------------------------

    def start_collector(
        self, policy: Policy, *, every: str | None = None, cron: str | None = None, jitter_s: float | None = None
    ) -> CollectorSchedule:
        """Starts prune and gc by a policy in a background thread: at intervals (`every="15m"`) or by a cron expression in the
        machine's time zone (`cron="17 3 * * *"`). Each run is delayed at random by up to `jitter_s` seconds. Of all processes and
        hosts, one runs at a time. Call `stop()` before `close()`. The thread does not keep the interpreter alive, and the next
        run finishes a run that was interrupted.

        Raises:
            BadInput: neither or both of `every` and `cron` are given, or it cannot be read.
            DatabaseUnavailable: the schedule cannot be stored.
        """
        from llama_ckpt.collector.schedule import CollectorSchedule
        from llama_ckpt.collector.triggers import Trigger

        schedule = CollectorSchedule(self.context, policy, Trigger.of(every=every, cron=cron), jitter_s=jitter_s)
        schedule.start()
        return schedule

    # -- save and restore ------------------------------------------------------------------------------------------------

    def save(
        self,
        engine: HeldState,
        prompt: Input,
        *,
        label: str | None = None,
        expires_in_s: float | None = None,
        prefill_ms: int | None = None,
    ) -> SaveResult:
        """Saves the state of a prompt that the engine holds, once. If a usable checkpoint of it is registered, nothing is
        written, the engine is not read, and the outcome is `DEDUPLICATED`: the checkpoint keeps its label and expiry.

        If the policy has a byte budget or a minimum of free space, room is made before anything is written: first by deleting
        files of STALE checkpoints, then by pruning what the policy would prune first. If the new checkpoint itself would be
        pruned first, the outcome is `REFUSED`, and nothing is written or pruned. `prefill_ms` records how long the state took
        to compute.

        A save that fails leaves neither file nor row. A save that is interrupted leaves at most a file without a row, which gc
        deletes.

        Raises:
            EngineStateMismatch: the engine holds another state than that of the prompt.
            Unsupported: the model's memory is not a plain attention cache.
            StoreFull, StoreUnavailable: the file cannot be written, or the store is another registry's by now.
            DatabaseUnavailable: the row cannot be written.
            BadInput: the prompt, the label or the expiry cannot be used.
        """
        options = SaveOptions(label=label, expires_in_s=expires_in_s, prefill_ms=prefill_ms)
        return saving.save(self.context, engine, ResolvedInput(prompt, engine), options)

    def restore(
        self,
        engine: Engine,
        prompt: Input,
        *,
        layers: Iterable[int] | None = None,
        check_values: bool = False,
        transpose_v: bool = False,
    ) -> RestoreResult:
        """Puts the engine into the state of a prompt, from the best checkpoint for it. If that one is damaged or does not fit the
        engine, the next best is tried, up to 4 in all. Everything is verified before the engine is touched. A state from
        another version of llama.cpp is translated; the logits are those of a fresh evaluation.

        The outcome is `NO_MATCH` if there is no usable checkpoint; one that is damaged or missing is made STALE. It is `FAILED`
        if something may work again later (I/O, access), and then no row changes. In both cases the engine keeps the state it
        has; only if the engine itself refuses a state does it hold nothing afterwards, and the outcome is `FAILED`.

        `layers` (`range(0, 12)`) loads K and V of these layers only. The engine must hold the state of exactly this prompt; its
        other layers stay as they are, except that the last token is decoded again. `check_values` also looks for NaN and
        infinite numbers, which would reach every later prompt; such a checkpoint is made STALE. `transpose_v` also accepts a
        checkpoint that differs only in flash attention (with unquantised V). Its logits are close to those of a fresh
        evaluation but not equal, because the two modes round differently.

        Raises:
            BadInput: the prompt is empty or neither text nor token ids, or the model does not have these layers.
        """
        options = RestoreOptions.for_engine(engine, layers, check_values=check_values, transpose_v=transpose_v)
        return restoring.restore(self.context, engine, ResolvedInput(prompt, engine), options)

    def merge(self, engine: Engine, checkpoint: Checkpoint | str) -> MergeResult:
        """Appends a stored continuation to what the engine holds, without computing it. The checkpoint (or its id) must start
        with the held tokens; its cells behind them are loaded. The engine then holds all of its tokens.

        A checkpoint that does not fit is refused before the engine is touched. If the engine itself refuses the state, it holds
        nothing afterwards.

        Raises:
            NotFound, BadInput: as `get`.
            EngineStateMismatch: the engine holds nothing.
            Incompatible, Unsupported: the checkpoint does not start with the held tokens, is not longer than them, is longer than
                the context, is of another model or layout, or is STALE.
            CorruptFile, FileMissing, UnsafePath: its file is damaged or missing; it is STALE now.
            EngineFailed: the engine refused the state; the checkpoint is STALE now.
            StoreUnavailable, DatabaseUnavailable: they cannot be read now; nothing has changed.
        """
        row = self.get(checkpoint) if isinstance(checkpoint, str) else checkpoint
        return restoring.merge(self.context, engine, row)

    def warm(
        self,
        engine: Engine,
        prompt: Input,
        *,
        shared_prefix: Input | None = None,
        label: str | None = None,
        expires_in_s: float | None = None,
        wait_s: float = DEFAULT_WAIT_S,
        progress: Progress = no_progress,
    ) -> WarmResult:
        """Brings the engine to the state of a prompt: keeps or restores the longest prefix that the engine holds or the registry
        has, evaluates the rest, and saves the state.

        Of many processes that lack the same block of tokens, one evaluates it, and the others wait for its save, up to `wait_s`
        seconds (0: not at all); docs/single-flight.md has the rule. `shared_prefix` is a prefix that many prompts share: a text
        if the prompt is a text, else token ids. It becomes a checkpoint of its own first, unless its cells are stored already.

        If registry, store or save fail, the prompt is evaluated all the same, and `WarmResult.problem` says what failed.
        `progress` is called with the number of tokens done and the total. Interrupted, the engine holds nothing or what it
        restored, and other processes wait no longer than the claim lasts: at least 60 s after the last progress.

        Raises:
            BadInput: the prompt cannot be used, is longer than the context, or does not start with the shared prefix.
            EngineFailed: the engine cannot evaluate it.
        """
        options = WarmOptions(
            save=SaveOptions(label=label, expires_in_s=expires_in_s),
            shared_prefix=None if shared_prefix is None else ResolvedInput(shared_prefix, engine),
            wait_s=wait_s,
            progress=progress,
        )
        return warming.warm(self.context, engine, ResolvedInput(prompt, engine), options)

    def autosave(
        self, engine: Engine, *, every: int, label: str | None = None, expires_in_s: float | None = None
    ) -> Autosave:
        """Saves what the engine generates inside a `with` block: every `every` tokens, and at the end. `Autosave` says how to
        report the tokens to it, and what Ctrl-C does.

        Raises:
            BadInput: `every`, the label or the expiry cannot be used.
        """
        return Autosave(self.context, engine, every, SaveOptions(label=label, expires_in_s=expires_in_s))

    def batch(
        self,
        engine: Engine,
        inputs: Iterable[Input | BatchInput],
        *,
        shared_prefix: Input | None = None,
        save: SaveMode = "prefix",
        label: str | None = None,
        expires_in_s: float | None = None,
        progress: Progress = no_progress,
    ) -> Generator[BatchRecord, None, None]:
        """Computes inputs one after the other and yields a `BatchRecord` for each, in order: the next token and its
        probability, or the embedding. Tokens of a prefix that the engine still holds from the input before, or that a
        checkpoint has, are not evaluated again (from `min_match_tokens` tokens on).

        `save` says what becomes a checkpoint: each input (`"full"`), nothing (`"none"`), or the prefix that inputs share
        (`"prefix"`): with `shared_prefix`, what an input has in common with it; without, the longest prefix that it has in
        common with any of the next 32 inputs, which are read ahead. A prefix is saved if it is at least `min_match_tokens`
        tokens longer than what the registry has, or is the whole input. A save runs in one thread beside the evaluation of the
        next input, on a copy of the state.

        What fails of the registry is a record's `problem`; the input is computed all the same. An input that cannot be used or
        computed gives a record with the outcome FAILED, and the batch continues. However the iterator ends, the save in flight
        is finished.

        Raises:
            BadInput: an argument cannot be used.
        """
        options = BatchOptions(
            save=save,
            shared_prefix=None if shared_prefix is None else ResolvedInput(shared_prefix, engine),
            saved_as=SaveOptions(label=label, expires_in_s=expires_in_s),
        )
        return Batch(self.context, engine, options, progress).run(inputs)


def _require_limits(min_match_tokens: int, delta_depth: int) -> None:
    if min_match_tokens < 2:
        reason = "give 2 or more: one token in common spares nothing"
        raise BadInput(what="min_match_tokens", value=min_match_tokens, reason=reason)
    if delta_depth < 0:
        raise BadInput(what="delta_depth", value=delta_depth, reason="give 0 or more")


def _context(files: Store, url: str, password: str | None, upgrade: bool | None) -> RegistryContext:
    """The context of a store and a database, with default settings. Creates the store and the schema if they do not exist."""
    files.create()
    database = Database(url, password)
    try:
        migrate.prepare(database, upgrade_older=database.dialect == "sqlite" if upgrade is None else upgrade)
        with database.read() as db:
            registry_id = rows.registry_id(db)
            block_size = prefixes.block_size(db)
        files.require_owner(registry_id, unmarked=True)
    except BaseException:
        database.close()
        raise
    return RegistryContext(database=database, store=files, registry_id=registry_id, block_size=block_size)


def store_of(settings: Mapping[str, Setting]) -> Path:
    """The folder that the settings name, else `default_store`.

    Raises:
        BadInput: it starts with `~name`, and there is no such user; or it is relative, and the working folder is deleted.
    """
    named = settings["store"].value
    try:
        return _absolute(Path(named).expanduser()) if named else default_store()
    except RuntimeError as error:
        raise BadInput(what="store", value=named, reason=str(error)) from error


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError as error:
        reason = "the working folder is deleted; give an absolute path"
        raise BadInput(what="store", value=str(path), reason=reason) from error


def default_store() -> Path:
    """The folder of the store if none is named: in the user's data folder, where the operating system has it.

    Raises:
        BadInput: the user has no home folder.
    """
    import platformdirs

    try:
        return _absolute(platformdirs.user_data_path("llama-ckpt"))
    except RuntimeError as error:
        reason = "this user has no home folder for the default: set LLAMA_CKPT_STORE, or give a store"
        raise BadInput(what="store", value="", reason=reason) from error
