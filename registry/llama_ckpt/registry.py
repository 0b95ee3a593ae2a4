"""`Registry`: save, match, restore, warm, pin, remove. Files and rows meet here.

The order that keeps data safe: a save writes the file first (staged, durable, then under its name) and the row last, so a
crash leaves at most a file without a row. A delete takes the row first and the file after.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llama_ckpt import config
from llama_ckpt.catalogue import Catalogue
from llama_ckpt.checkpoints import restore as restoring
from llama_ckpt.checkpoints import save as saving
from llama_ckpt.checkpoints.register import SaveOptions
from llama_ckpt.checkpoints.restore import RestoreOptions
from llama_ckpt.config import Setting, policy_of
from llama_ckpt.context import DEFAULT_DELTA_DEPTH, DEFAULT_MIN_TOKENS, RegistryContext
from llama_ckpt.db import migrate, prefixes, rows
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.engine import Engine, Progress, no_progress
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
from llama_ckpt.warm.batch import Batch, BatchInput, BatchOptions, BatchRecord, What
from llama_ckpt.warm.single_flight import DEFAULT_WAIT_S
from llama_ckpt.warm.warm import WarmOptions

if TYPE_CHECKING:
    from llama_ckpt.collector.schedule import CollectorSchedule

DATABASE_FILE = "registry.sqlite3"


class Registry(Catalogue):
    """The registry of checkpoints: rows in a database, files in a store. `Registry.open` opens one, or `Registry.configured`."""

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
        """Opens a registry; creates store and schema where they are not there. An older schema is upgraded on SQLite, which
        is this program's own file; not on a server, where other hosts may still run the older program. `upgrade` says otherwise.

        Without arguments: the user's data folder, whatever the settings say, which `configured` reads. With a store alone:
        SQLite beside the files. `database_password` is used where the URL has none. `drop_page_cache` lets written pages go
        after the fsync. `policy` has the limits that saves keep to (`max_bytes`, `min_free`). A shared prefix of fewer than
        `min_match_tokens` tokens is no match. A save writes what is not stored yet, on top of at most `delta_depth` other
        checkpoints; 0 writes all. `hook` hears the name of each step of a save, for tests that stop there.

        Raises:
            BadInput: the URL or a number cannot be used.
            DatabaseUnavailable, StoreUnavailable: they cannot be reached, read or written; or the store is another registry's.
            SchemaTooNew, SchemaTooOld: another version of llama-ckpt made the database.
        """
        if min_match_tokens < 2:
            reason = "give 2 or more: one token in common spares nothing"
            raise BadInput(what="min_match_tokens", value=min_match_tokens, reason=reason)
        if delta_depth < 0:
            raise BadInput(what="delta_depth", value=delta_depth, reason="give 0 or more")
        root = Path(store).absolute() if store is not None else default_store()
        files = Store(root, drop_page_cache=drop_page_cache, hook=hook)
        files.create()
        database = Database(database_url or sqlite_url(root / DATABASE_FILE), database_password)
        try:
            migrate.prepare(database, upgrade_older=database.dialect == "sqlite" if upgrade is None else upgrade)
            with database.read() as db:
                registry_id = rows.registry_id(db)
                block_size = prefixes.block_size(db)
            files.require_owner(registry_id, unmarked=True)
        except BaseException:
            database.close()
            raise
        return cls(
            RegistryContext(
                database=database,
                store=files,
                registry_id=registry_id,
                metrics=metrics or NullSink(),
                hook=hook,
                policy=policy or Policy(),
                block_size=block_size,
                min_match_tokens=min_match_tokens,
                delta_depth=delta_depth,
            )
        )

    @classmethod
    def configured(cls, settings: Mapping[str, Setting] | None = None, *, upgrade: bool | None = None) -> Registry:
        """Opens the registry that the settings name, with the limits that they set: the one that the command `llama-ckpt` works
        on. Without `settings`: the environment's LLAMA_CKPT_…, then the settings file, then the defaults. `upgrade` as in `open`.

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
        """Starts prune and gc by a policy in the background, every so often (`every="15m"`) or by a cron expression in the
        machine's time zone (`cron="17 3 * * *"`), each run delayed by up to `jitter_s` seconds at random. Of all processes and
        hosts one runs at a time. It goes on until `stop()`, which is to be called before `close()`; it does not keep the
        interpreter alive, and a run that is cut off is finished by the next.

        Raises:
            BadInput: not one of both is given, or it cannot be read.
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
        engine: Engine,
        given: Input,
        *,
        label: str | None = None,
        expires_in_s: float | None = None,
        prefill_ms: int | None = None,
    ) -> SaveResult:
        """Saves the state of an input that the engine holds, once: if a usable checkpoint of it is registered, nothing is
        written, the engine is not looked at, and the outcome is `DEDUPLICATED` (label and expiry stay those of the first save).

        Interrupted at any point it leaves at most a file without a row, which gc collects; if it fails it leaves neither
        file nor row. `prefill_ms` records what computing the state took. Where the policy has a byte budget or a floor of free
        space, room is made before anything is written: from STALE checkpoints, then from what the policy would take first. A
        save that would itself be the first to go is `REFUSED`, and nothing is written or taken.

        Raises:
            EngineStateMismatch: the engine holds another input's state.
            Unsupported: the model's memory is not a plain attention cache.
            StoreFull, StoreUnavailable: the file cannot be written, or the store is another registry's by now.
            DatabaseUnavailable: the row cannot be written.
            BadInput: the input, the label or the expiry cannot be used.
        """
        return saving.save(
            self.context,
            engine,
            given,
            SaveOptions(label=label, expires_in_s=expires_in_s, prefill_ms=prefill_ms),
        )

    def restore(
        self,
        engine: Engine,
        given: Input,
        *,
        layers: Iterable[int] | None = None,
        check_values: bool = False,
        transpose_v: bool = False,
    ) -> RestoreResult:
        """Puts the engine into the state of an input, from its checkpoint. Everything is verified before the engine is
        touched: a restore that cannot work leaves the engine's live sequence as it was. A state that another version of
        llama.cpp wrote is translated; the logits are those of a fresh evaluation.

        A checkpoint that fails for good is made STALE and the answer is `NO_MATCH`; a fault of the moment (I/O, access)
        gives `FAILED` and changes nothing. If the engine itself refuses, it holds nothing afterwards, and the answer is
        `FAILED`.

        `layers` (`range(0, 12)`) loads K and V of these layers only, into the state of exactly this input that the engine
        holds; the other layers stay as they are, but for the last token, which is decoded again. `check_values` also looks for
        NaN and infinite numbers, which would reach every later prompt: such a checkpoint goes STALE. `transpose_v` also takes
        a checkpoint that differs in nothing but flash attention (unquantised V): its logits are close to, not equal to, those
        of a fresh evaluation, as the two modes round differently.

        Raises:
            BadInput: the input is empty or no input, or the model has not these layers.
        """
        options = RestoreOptions.of(engine, layers, check_values=check_values, transpose_v=transpose_v)
        return restoring.restore(self.context, engine, given, self.match, options)

    def merge(self, engine: Engine, checkpoint: Checkpoint | str) -> MergeResult:
        """Appends a stored continuation to what the engine holds, without computing it: the checkpoint (or its id) begins with
        the held tokens, and its cells behind them are loaded. The engine then holds all of its tokens.

        Whatever does not fit is refused before the engine is touched. If the engine itself refuses, it holds nothing afterwards.

        Raises:
            NotFound, BadInput: as `get`.
            EngineStateMismatch: the engine holds nothing.
            Incompatible, Unsupported: the checkpoint is of other tokens, no longer than what is held, longer than the
                context, of another model or layout, or STALE.
            CorruptFile, FileMissing, UnsafePath: its file is no good; it is STALE now.
            EngineFailed: the engine refused it; it is STALE now.
            StoreUnavailable, DatabaseUnavailable: they cannot be read now; nothing is changed.
        """
        row = self.get(checkpoint) if isinstance(checkpoint, str) else checkpoint
        return restoring.merge(self.context, engine, row)

    def warm(
        self,
        engine: Engine,
        given: Input,
        *,
        shared_prefix: Input | None = None,
        label: str | None = None,
        expires_in_s: float | None = None,
        wait_s: float = DEFAULT_WAIT_S,
        progress: Progress = no_progress,
    ) -> WarmResult:
        """Brings the engine to the state of an input: keeps or restores the longest beginning of it that the engine holds or the
        registry has, evaluates the rest, and saves the whole.

        Of many processes that lack the same block of tokens one evaluates it, and the others wait for what it saves, up to
        `wait_s` seconds (0: not at all); docs/single-flight.md has the rule. `shared_prefix`, text for a text or token ids for
        token ids, is what many inputs begin with: it becomes a checkpoint of its own first, unless its cells are there.

        The registry never stands in the way: if it, the store or the save fails, the input is evaluated all the same, and
        `WarmResult.problem` says what failed. `progress` hears tokens done and in all. Interrupted, the engine holds nothing or
        what it restored, and others wait no longer than the claim lasts: at least 60 s after the last sign of progress.

        Raises:
            BadInput: the input cannot be used, is longer than the context, or does not begin with the shared prefix.
            EngineFailed: the engine cannot evaluate it.
        """
        options = WarmOptions(
            save=SaveOptions(label=label, expires_in_s=expires_in_s),
            shared_prefix=shared_prefix,
            wait_s=wait_s,
            progress=progress,
        )
        return warming.warm(self.context, engine, given, functools.partial(self.match, vocabulary=engine), options)

    def autosave(
        self, engine: Engine, *, every: int, label: str | None = None, expires_in_s: float | None = None
    ) -> Autosave:
        """Saves what the engine generates while it does, every so many tokens and at the end of the `with` block. See `Autosave`
        for how it is told of the tokens, and what Ctrl-C does meanwhile.

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
        save: What = "prefix",
        label: str | None = None,
        expires_in_s: float | None = None,
        progress: Progress = no_progress,
    ) -> Generator[BatchRecord, None, None]:
        """Computes inputs one after the other and gives a `BatchRecord` of each, in order: the next token and its probability,
        or the embedding. No token is evaluated whose cell the engine holds from the input before, or a checkpoint has.

        `save` says what becomes a checkpoint: each input (`"full"`), nothing (`"none"`), or what inputs share (`"prefix"`): the
        beginning that an input has in common with `shared_prefix`; without one the longest that it has in common with any of
        the 32 inputs behind it, which are read ahead. It is saved when it is at least `min_match_tokens` tokens longer than
        what the registry has, or all of the input. A save runs beside the evaluation of the next input, in one thread, on a
        copy of the state.

        The registry never stands in the way: what fails of it is a record's `problem`. An input that cannot be used or computed
        is a record that FAILED, and the rest goes on. However the iterator ends, the save in flight is finished.

        Raises:
            BadInput: an argument cannot be used.
        """
        saved_as = SaveOptions(label=label, expires_in_s=expires_in_s)
        options = BatchOptions(save=save, shared_prefix=shared_prefix, saved_as=saved_as)
        return Batch(self.context, engine, self.match, options, progress).run(inputs)


def store_of(settings: Mapping[str, Setting]) -> Path:
    """The folder that the settings name, or else `default_store`.

    Raises:
        BadInput: it is the home folder of a user that there is not.
    """
    named = settings["store"].value
    try:
        return (Path(named).expanduser() if named else default_store()).absolute()
    except RuntimeError as error:
        raise BadInput(what="store", value=named, reason=str(error)) from error


def default_store() -> Path:
    """The folder of a registry that nobody named: the user's data folder, by the system's custom."""
    import platformdirs

    return platformdirs.user_data_path("llama-ckpt")
