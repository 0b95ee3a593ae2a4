"""Finding: which checkpoint begins most like an input. Rows are asked for, then the token ids at the head of a few files are
compared; no payload is read.

docs/matching.md has the promise. A row that goes while it is looked at is passed over; one whose file is found missing or
damaged goes STALE, as by a restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llama_ckpt.checkpoints import match as matching
from llama_ckpt.checkpoints.match import CandidateTokens
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import prefixes, rows
from llama_ckpt.db.connect import Connection
from llama_ckpt.engine import Vocabulary
from llama_ckpt.errors import (
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    StoreUnavailable,
    UnsafePath,
    without_frames,
)
from llama_ckpt.fingerprint import Input, TokenIds, as_token_ids, end_hashes, prefix_hashes, tokens_hash, tokens_hashes
from llama_ckpt.formats import container
from llama_ckpt.values import Checkpoint, Fingerprint, MatchResult, MemoryKind, Outcome, RegisteredModel

log = logging.getLogger("llama_ckpt")

MOST_HEADS = 16  # whose token ids are compared for one model
MOST_MODELS = 16
_WIDE = 16  # points of a chain in one statement: as quick as one by one on SQLite, and fewer round trips elsewhere
_MOST_SHARING = 256  # that are looked over where some of the first have expired
_GUESS = 4096  # bytes of a file before its token ids, seldom more

Unreadable = CorruptFile | FileMissing | UnsafePath


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchQuery:
    """What `Registry.match` was asked: an input hash, and where they are known the input or its token ids. The rest says which
    models count, as there. What begins with fewer than `at_least` tokens of the input need not be looked for.
    """

    input_hash: bytes
    given: Input | None = None
    token_ids: TokenIds | None = None
    vocabulary: Vocabulary | None = None
    fingerprint: Fingerprint | None = None
    model: str | None = None
    weights: bytes | None = None
    at_least: int = 0

    def fits(self, model: RegisteredModel, model_name: str | None = None) -> bool:
        """Whether a model counts, which a row may call by another name."""
        if self.fingerprint is not None:
            return model.fingerprint.digest == self.fingerprint.digest
        names = (None, model.model_name, model_name)
        return self.model in names and self.weights in (None, model.fingerprint.weights_sha256)

    def known_ids(self) -> TokenIds | None:
        """The token ids if nobody must be asked. A text with NUL characters may have the bytes of token ids: its hash does not
        say which it is, so its ids are asked for as well.
        """
        if self.token_ids is not None:
            return self.token_ids
        if isinstance(self.given, str):
            return self.ids() if "\0" in self.given else None
        return None if self.given is None else as_token_ids(self.given)

    def ids(self) -> TokenIds | None:
        """The token ids, of the vocabulary if need be; None where nobody knows them."""
        if isinstance(self.given, str) and self.token_ids is None:
            return None if self.vocabulary is None else self.vocabulary.token_ids(self.given)
        return self.known_ids()


def match(context: RegistryContext, question: MatchQuery) -> MatchResult:
    """As `Registry.match`: the same input by its hash first, then by prefix where token ids are known."""
    try:
        return _match(context, question)
    except (DatabaseUnavailable, StoreUnavailable) as error:
        told = without_frames(error)
        return MatchResult(outcome=Outcome.FAILED, reason=str(error), input_hash=question.input_hash, error=told)


def _match(context: RegistryContext, question: MatchQuery) -> MatchResult:
    known, input_hash, wanted = question.known_ids(), question.input_hash, question.fingerprint
    models: dict[bytes, RegisteredModel] = {}
    found_rows: list[Checkpoint] = []
    if wanted is None:
        found_rows, models = _of_this_input(context, question)
        mine = [r for r in found_rows if question.fits(models[r.fingerprint], r.model_name)]
    else:
        row = context.database.query(lambda db: rows.find_active(db, wanted.digest, input_hash))
        mine = [] if row is None else [row]
    if usable := [row for row in mine if matching.why_not_whole(row, known) is None]:
        return matching.decide(input_hash, usable, [], wanted)
    token_ids, found = question.ids(), None
    if token_ids is not None:
        digests = (
            [m.fingerprint.digest for m in models.values() if question.fits(m)] if wanted is None else [wanted.digest]
        )
        found = _by_prefix(context, question, token_ids, digests)
        if found.outcome is Outcome.HIT:
            return found
    elif mine:
        reason = matching.why_not_whole(mine[0], None) or ""
        return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=input_hash, nearest=mine[0])
    if wanted is not None:
        found_rows, models = _of_this_input(context, question)
    others = [(r, models[r.fingerprint]) for r in found_rows if not question.fits(models[r.fingerprint], r.model_name)]
    return found if found is not None and not others else matching.decide(input_hash, [], others, wanted)


def _of_this_input(
    context: RegistryContext, question: MatchQuery
) -> tuple[list[Checkpoint], dict[bytes, RegisteredModel]]:
    """The rows of this input hash under any fingerprint, and all models by their fingerprints."""
    found_rows = context.database.query(lambda db: rows.find_by_input(db, question.input_hash))
    if not found_rows and question.fingerprint is not None:
        return [], {}
    # Models after rows: a row's model is there before the row is.
    models = {m.fingerprint.digest: m for m in context.database.query(rows.models)}
    return [row for row in found_rows if row.fingerprint in models], models


def _by_prefix(
    context: RegistryContext, question: MatchQuery, token_ids: TokenIds, digests: Sequence[bytes]
) -> MatchResult:
    heads: list[CandidateTokens] = []
    trouble: StoreUnavailable | None = None
    for digest in digests[:MOST_MODELS]:
        search = _Search(context, digest, token_ids, question.at_least)
        heads += search.heads()
        trouble = trouble or search.trouble
    text_of = None if question.vocabulary is None else question.vocabulary.text_of
    found = matching.by_prefix(question.input_hash, token_ids, heads, context.min_match_tokens, text_of)
    if found.outcome is not Outcome.HIT and trouble is not None:
        raise trouble
    return found


@dataclass(slots=True)
class _Search:
    """The look for one model's best checkpoints. `trouble` is a fault of the moment for which a candidate was passed over."""

    context: RegistryContext
    digest: bytes
    token_ids: TokenIds
    at_least: int
    trouble: StoreUnavailable | None = None
    _seen: set[int] = field(default_factory=set)

    def heads(self) -> list[CandidateTokens]:
        """Checkpoints among which is the best one, or the nearest; at most 16 files were looked at.

        From the deepest block that is linked down: what lies deeper begins with more tokens of the input. It goes further down
        only where nothing of a block can be used: it cannot be cut, has expired, or its file turned out to be of no use.
        """
        size = self.context.block_size
        chain = prefix_hashes(self.digest, self.token_ids, size)
        deepest, rows = self.context.database.query(partial(self._deepest, chain))
        most = self._most(deepest)
        heads: list[CandidateTokens] = []
        spare: list[Checkpoint] = []
        best = 0
        for depth in range(deepest, -1, -1):
            if depth < deepest:
                rows = self.context.database.query(partial(self._rows_at, chain, depth))
            self.context.hook("looked up")
            for row, is_prefix in self._in_order(rows, most):
                if row.memory_kind is not MemoryKind.FULL and not (is_prefix and row.n_tokens < len(self.token_ids)):
                    spare.append(row)
                elif row.n_tokens > best and (head := self._head(row)) is not None:
                    heads.append(head)
                    best = max(best, matching.n_usable(row, head.n_matching, len(self.token_ids)))
                    if best == most:
                        return heads
            if best or len(self._seen) >= MOST_HEADS or depth * size <= self.at_least:
                break
        return heads or [head for row in spare[:1] if (head := self._head(row)) is not None]

    def _most(self, depth: int) -> int:
        """With how many tokens of the input a checkpoint begins at most, if it has its first `depth` blocks and not the next."""
        return min(len(self.token_ids), (depth + 1) * self.context.block_size - 1)

    def _deepest(self, chain: Sequence[bytes], db: Connection) -> tuple[int, list[Checkpoint]]:
        """How many blocks of the input are linked, and the rows to look at first; none if they would be too short."""
        deepest = prefixes.deepest(db, chain, _WIDE)
        return deepest, [] if self._most(deepest) < self.at_least else self._rows_at(chain, deepest, db)

    def _rows_at(self, chain: Sequence[bytes], depth: int, db: Connection) -> list[Checkpoint]:
        """Rows that begin with the first `depth` blocks of the input: whatever ends inside the next block and is a beginning of
        the input, and 16 others, smallest first; of no block, where nothing is shared yet, those that were saved last.
        """
        size, before = self.context.block_size, chain[depth - 1] if depth else self.digest
        start, end = depth * size, (depth + 1) * size
        if start:
            rows, are_all = prefixes.sharing(db, before, MOST_HEADS)
            if len(rows) < MOST_HEADS and not are_all:  # some have expired, and stand before others
                rows, are_all = prefixes.sharing(db, before, _MOST_SHARING)
                rows, are_all = rows[:MOST_HEADS], are_all and len(rows) <= MOST_HEADS
            if are_all or (rows and rows[-1].n_tokens >= end):
                return rows  # what ends inside the next block is among them
        else:
            rows = prefixes.newest(db, self.digest, MOST_HEADS)
        ending = prefixes.ending_at(db, end_hashes(before, self.token_ids[start : end - 1]), MOST_HEADS)
        return list({row.ckpt_no: row for row in [*ending, *rows]}.values())

    def _in_order(self, rows: Sequence[Checkpoint], most: int) -> list[tuple[Checkpoint, bool]]:
        """First the rows of up to `most` tokens that by their hash are a beginning of the input, longest first; then the others,
        shortest first: the first to be as good as can be is the one to take. With each, whether it is such a beginning.
        """
        beginnings = tokens_hashes(self.token_ids, {row.n_tokens for row in rows if row.n_tokens <= most})
        whole: list[tuple[Checkpoint, bool]] = []
        others: list[tuple[Checkpoint, bool]] = []
        for row in sorted(rows, key=lambda row: (row.n_tokens, row.ckpt_no)):
            is_whole = row.tokens_hash == beginnings.get(row.n_tokens)
            (whole if is_whole else others).append((row, is_whole))
        return sorted(whole, key=lambda told: -told[0].n_tokens) + others

    def _head(self, row: Checkpoint) -> CandidateTokens | None:
        """A row with its token ids, if it was not looked at already and its files are in order."""
        if row.ckpt_no in self._seen or len(self._seen) >= MOST_HEADS:
            return None
        self._seen.add(row.ckpt_no)
        try:
            token_ids = token_ids_of(self.context, row, self._broken)
        except (CorruptFile, FileMissing, UnsafePath):
            return None  # told by `_broken`
        except StoreUnavailable as error:
            log.warning("checkpoint %s cannot be looked at now: %s", row.id, error)
            self.trouble = error
            return None
        return CandidateTokens(row, token_ids, matching.common_prefix(self.token_ids, token_ids))

    def _broken(self, row: Checkpoint, error: Unreadable) -> None:
        """Makes a row STALE whose file is missing or damaged. One that the database cannot be told of stays for a restore."""
        if isinstance(error, FileMissing):
            self.context.require_store()
        try:
            self.context.condemn(row, error)
        except DatabaseUnavailable as lost:
            log.warning("what became of checkpoint %s was not recorded: %s", row.id, lost)


def _tell_nobody(_row: Checkpoint, _error: Unreadable) -> None:
    """The caller hears of the error anyway."""


def token_ids_of(
    context: RegistryContext, row: Checkpoint, broken: Callable[[Checkpoint, Unreadable], None] = _tell_nobody
) -> TokenIds:
    """All token ids of a checkpoint, as the head of its file has them, checked against their CRC and the row; of a delta with
    those before it, from its parents' files. Shape `[n_tokens]`. `broken` hears which row's file is of no use.

    Raises:
        FileMissing, CorruptFile, UnsafePath: a file is missing or damaged, or is not that of its row.
        StoreUnavailable: a file cannot be read now; nothing is known of it.
        DatabaseUnavailable: a delta's parent cannot be looked up.
    """
    try:
        start, token_ids = _own_ids(context, row)
    except (CorruptFile, FileMissing, UnsafePath) as error:
        broken(row, error)
        raise
    if start and row.parent_no is not None:
        parent_no = row.parent_no
        parent = context.database.query(lambda db: rows.by_number(db, parent_no))
        if parent is None:
            raise FileMissing(path=f"{row.file_path} (the checkpoint that it is a delta of)")
        token_ids = np.concatenate([token_ids_of(context, parent, broken)[:start], token_ids])
    if tokens_hash(token_ids) != row.tokens_hash:
        wrong = CorruptFile(path=row.file_path, check="Row", reason="its token ids are not those of the row")
        broken(row, wrong)
        raise wrong
    return token_ids


def _own_ids(context: RegistryContext, row: Checkpoint) -> tuple[int, TokenIds]:
    """The token ids in a checkpoint's own file, and the position of the first."""
    if row.is_covered:
        return row.start_token, np.empty(0, dtype=np.int32)
    data, size = context.store.beginning(row.file_path, _GUESS + 4 * row.n_tokens)
    header, padding = container.read_header(memoryview(data), row.file_path, size)
    if padding + header.payload_offset > len(data):
        data, size = context.store.beginning(row.file_path, padding + header.payload_offset)
        header, padding = container.read_header(memoryview(data), row.file_path, size)
    if header.fingerprint != row.fingerprint:
        raise CorruptFile(path=row.file_path, check="Row", reason="its fingerprint is not that of the row")
    return header.start_token, container.read_token_ids(memoryview(data), header, padding, row.file_path)
