"""`Registry`: save, match, restore, warm, pin, remove. Files and rows meet here.

The order that keeps data safe: a save writes the file first (staged, durable, then under its name) and the row last, so a
crash leaves at most a file without a row. A delete takes the row first and the file after.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llama_ckpt import finding, restoring, saving, warming
from llama_ckpt.autosave import Autosave
from llama_ckpt.db import migrate, prefixes, queries
from llama_ckpt.db.connect import Database, sqlite_url
from llama_ckpt.engine import Engine, Progress, Vocabulary, no_progress
from llama_ckpt.errors import BadInput, NotFound
from llama_ckpt.files import StepHook, Store, no_hook
from llama_ckpt.finding import Question
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, input_hash
from llama_ckpt.matching import DEFAULT_MIN_TOKENS
from llama_ckpt.metrics import MetricsSink, NullSink
from llama_ckpt.parts import Parts
from llama_ckpt.restoring import RestoreOptions
from llama_ckpt.retention import Policy
from llama_ckpt.saving import SaveOptions
from llama_ckpt.single_flight import DEFAULT_WAIT_S
from llama_ckpt.values import (
    Checkpoint,
    Fingerprint,
    MatchResult,
    MergeResult,
    RegisteredModel,
    RestoreResult,
    SaveResult,
    StaleReason,
    Stats,
    Status,
    WarmResult,
)
from llama_ckpt.warming import WarmOptions

if TYPE_CHECKING:
    from llama_ckpt.schedule import CollectorSchedule

DATABASE_FILE = "registry.sqlite3"
_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")


class Registry:
    """The registry of checkpoints: rows in a database, files in a store. Open one with `Registry.open`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.database = parts.database
        self.store = parts.store
        self.registry_id = parts.registry_id

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
        metrics: MetricsSink | None = None,
        hook: StepHook = no_hook,
    ) -> Registry:
        """Opens a registry; creates store and schema where they are not there. An older schema is upgraded on SQLite, which
        is this program's own file; not on a server, where other hosts may still run the older program. `upgrade` says otherwise.

        Without arguments: the user's data folder. With a store alone: SQLite beside the files. `database_password` is used
        where the URL has none. `drop_page_cache` lets written pages go after the fsync. `policy` has the limits that saves keep
        to (`max_bytes`, `min_free`). A shared prefix of fewer than `min_match_tokens` tokens is no match. `hook` hears the name
        of each step of a save, for tests that stop there.

        Raises:
            BadInput: the URL or a number cannot be used.
            DatabaseUnavailable, StoreUnavailable: they cannot be reached, read or written; or the store is another registry's.
            SchemaTooNew, SchemaTooOld: another version of llama-ckpt made the database.
        """
        if min_match_tokens < 2:
            reason = "give 2 or more: one token in common spares nothing"
            raise BadInput(what="min_match_tokens", value=min_match_tokens, reason=reason)
        root = Path(store).absolute() if store is not None else default_store()
        files = Store(root, drop_page_cache=drop_page_cache, hook=hook)
        files.create()
        database = Database(database_url or sqlite_url(root / DATABASE_FILE), database_password)
        try:
            migrate.prepare(database, upgrade_older=database.dialect == "sqlite" if upgrade is None else upgrade)
            with database.read() as db:
                registry_id = queries.registry_id(db)
                block_size = prefixes.block_size(db)
            files.require_owner(registry_id, unmarked=True)
        except BaseException:
            database.close()
            raise
        return cls(
            Parts(
                database=database,
                store=files,
                registry_id=registry_id,
                metrics=metrics or NullSink(),
                hook=hook,
                policy=policy or Policy(),
                block_size=block_size,
                min_match_tokens=min_match_tokens,
            )
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
        from llama_ckpt.schedule import CollectorSchedule
        from llama_ckpt.triggers import Trigger

        schedule = CollectorSchedule(self.parts, policy, Trigger.of(every=every, cron=cron), jitter_s=jitter_s)
        schedule.start()
        return schedule

    # -- find ----------------------------------------------------------------------------------------------------------

    def match(
        self,
        given: Input,
        *,
        fingerprint: Fingerprint | None = None,
        token_ids: Sequence[int] | TokenIds | None = None,
        vocabulary: Vocabulary | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """Says which checkpoint serves an input: the same input, by its hash; else, where its token ids are at hand, the one
        that begins with the most tokens like it. They are at hand if they are the input, if `token_ids` gives them, or
        `vocabulary` (an engine is one) can; it also gives the text where an input and the checkpoint part.

        The state must fit `fingerprint` (an engine's); or belong to a registered model's name, or to `weights` (SHA-256);
        without any of them every model counts, by prefix the first 16. The same input is found in the database alone. By prefix
        the heads of at most 16 files a model are read, and a checkpoint whose file is found missing or damaged goes STALE. A
        database or store that fails gives `FAILED`, never an exception. docs/matching.md has the promise.

        Raises:
            BadInput: the input is empty or no input.
        """
        question = Question(
            of_input=input_hash(given),
            given=given,
            token_ids=None if token_ids is None else as_token_ids(token_ids),
            vocabulary=vocabulary,
            fingerprint=fingerprint,
            model=model,
            weights=weights,
        )
        return finding.match(self.parts, question)

    def match_hash(
        self,
        of_input: bytes,
        *,
        fingerprint: Fingerprint | None = None,
        model: str | None = None,
        weights: bytes | None = None,
    ) -> MatchResult:
        """As `match`, for an input of which only the SHA-256 is known (32 raw bytes): the same input or nothing.

        Raises:
            BadInput: not 32 bytes.
        """
        if len(of_input) != 32:
            raise BadInput(what="input hash", value=of_input.hex(), reason="a SHA-256 has 32 bytes (64 hex digits)")
        question = Question(of_input=of_input, fingerprint=fingerprint, model=model, weights=weights)
        return finding.match(self.parts, question)

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
            self.parts,
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
        match = functools.partial(self.match, vocabulary=engine)
        return restoring.restore(self.parts, engine, given, match, options)

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
        return restoring.merge(self.parts, engine, row)

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
        return warming.warm(self.parts, engine, given, functools.partial(self.match, vocabulary=engine), options)

    def autosave(
        self, engine: Engine, *, every: int, label: str | None = None, expires_in_s: float | None = None
    ) -> Autosave:
        """Saves what the engine generates while it does, every so many tokens and at the end of the `with` block. See `Autosave`
        for how it is told of the tokens, and what Ctrl-C does meanwhile.

        Raises:
            BadInput: `every`, the label or the expiry cannot be used.
        """
        return Autosave(self.parts, engine, every, SaveOptions(label=label, expires_in_s=expires_in_s))

    # -- care ----------------------------------------------------------------------------------------------------------

    def get(self, checkpoint_id: str) -> Checkpoint:
        """One checkpoint, by its id or the beginning of it (at least 4 hex digits).

        Raises:
            NotFound: there is none.
            BadInput: no id, or several begin like this.
        """
        wanted = checkpoint_id.lower()
        if not _ID_PREFIX.fullmatch(wanted):
            raise BadInput(what="checkpoint id", value=checkpoint_id, reason="expected 4 to 32 hex digits")
        with self.database.read() as db:
            ids = queries.ids_like(db, wanted, 2)
            row = queries.get(db, ids[0]) if len(ids) == 1 else None
        if len(ids) > 1:
            raise BadInput(
                what="checkpoint id",
                value=checkpoint_id,
                reason="several ids begin like this; give more digits",
            )
        if row is None:
            raise NotFound(what="checkpoint", name=checkpoint_id, hint="llama-ckpt ls shows the ids.")
        return row

    def list(
        self,
        *,
        status: Status | None = None,
        model_name: str | None = None,
        label: str | None = None,
        at_most: int | None = None,
    ) -> list[Checkpoint]:
        """Checkpoints, newest first."""
        if any(text is not None and saving.clean_name(text) != text for text in (model_name, label)):
            return []  # no row can have such a name
        return self.database.query(
            lambda db: queries.list_checkpoints(db, status=status, model_name=model_name, label=label, at_most=at_most)
        )

    def clock_us(self) -> int:
        """The database's clock, by which all times of rows are told: microseconds since 1970."""
        return self.database.query(queries.clock_us)

    def models(self) -> tuple[RegisteredModel, ...]:
        """The models that were ever saved for."""
        return tuple(self.database.query(queries.models))

    def stats(self) -> Stats:
        """Totals, recounted from the rows."""
        return self.database.query(queries.stats)

    def pin(self, checkpoint_id: str) -> Checkpoint:
        """Shields a checkpoint from prune, gc and remove.

        Raises:
            NotFound, BadInput: as `get`.
        """
        return self._set_pinned(checkpoint_id, True)

    def unpin(self, checkpoint_id: str) -> Checkpoint:
        """Takes a pin away.

        Raises:
            NotFound, BadInput: as `get`.
        """
        return self._set_pinned(checkpoint_id, False)

    def _set_pinned(self, checkpoint_id: str, pinned: bool) -> Checkpoint:
        row = self.get(checkpoint_id)
        with self.database.write() as db:
            queries.set_pinned(db, row.id, pinned)
        return self.get(row.id)

    def remove(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE, so that it is offered no more; gc frees its file after the grace.

        Raises:
            NotFound, BadInput: as `get`; or it is pinned.
        """
        row = self.get(checkpoint_id)
        with self.database.write() as db:
            now = queries.get(db, row.id)
            if now is not None and now.pinned:
                raise BadInput(what="checkpoint", value=row.id, reason="it is pinned; unpin it first")
            if queries.has_active_child(db, row):
                raise BadInput(what="checkpoint", value=row.id, reason="a delta needs it; remove that first")
            queries.mark_stale(db, row, StaleReason.REMOVED)
        return self.get(row.id)

    def report_bad(self, checkpoint_id: str) -> Checkpoint:
        """Makes a checkpoint STALE that passed every check but did not work, so that it is not offered again and the next
        save of its input writes a new one.

        Raises:
            NotFound, BadInput: as `get`.
        """
        row = self.get(checkpoint_id)
        self.parts.make_stale(row, StaleReason.CORRUPT, "it was reported bad")
        return self.get(row.id)

    def invalidate(self, fingerprint: Fingerprint | bytes) -> int:
        """Makes all checkpoints of a fingerprint STALE in one transaction, and says how many."""
        digest = fingerprint if isinstance(fingerprint, bytes) else fingerprint.digest
        with self.database.write() as db:
            return queries.mark_model_stale(db, digest, StaleReason.INCOMPATIBLE)


def default_store() -> Path:
    """The folder of a registry that nobody named: the user's data folder, by the system's custom."""
    import platformdirs

    return platformdirs.user_data_path("llama-ckpt")
