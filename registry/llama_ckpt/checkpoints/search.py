"""Finds the checkpoint that serves an input: by its input hash, else the one that shares the longest prefix with it.

Rows are read first, then the token ids at the start of a few files are compared; no payload is read (docs/matching.md has the
promise). A row that goes away meanwhile is skipped. One whose file is missing or damaged becomes STALE, as in a restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llama_ckpt.checkpoints import match as matching
from llama_ckpt.checkpoints.inputs import ResolvedInput
from llama_ckpt.checkpoints.match import CandidateTokens, TextOf
from llama_ckpt.context import RegistryContext
from llama_ckpt.db import prefixes, rows
from llama_ckpt.db.connect import Connection
from llama_ckpt.errors import (
    CorruptFile,
    DatabaseUnavailable,
    FileMissing,
    StoreUnavailable,
    UnsafePath,
    without_frames,
)
from llama_ckpt.fingerprint import TokenIds, common_prefix, end_hashes, prefix_hashes, tokens_hash, tokens_hashes
from llama_ckpt.formats import container
from llama_ckpt.values import Checkpoint, Fingerprint, MatchResult, Outcome, RegisteredModel

log = logging.getLogger("llama_ckpt")

MOST_HEADS = 16  # files whose token ids are compared, for one model
MOST_MODELS = 16
_HASHES_PER_QUERY = 16  # of a chain: on SQLite as fast as one at a time, on a server fewer round trips
_MOST_SHARING = 256  # rows to read of one prefix if some of the first 16 have expired
_HEAD_BYTES = 4096  # of a file before its token ids, seldom more

Unreadable = CorruptFile | FileMissing | UnsafePath


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchQuery:
    """What `Registry.match` is to find: an input, or only its hash, in one engine's model or in those that the other fields
    allow.

    `text_of` gives the text of token ids, for the explanation. Checkpoints that share fewer than `at_least` tokens need not be
    found; those whose id is in `excluded` are not found.
    """

    input_hash: bytes
    prompt: ResolvedInput | None = None
    text_of: TextOf | None = None
    fingerprint: Fingerprint | None = None
    model: str | None = None
    weights: bytes | None = None
    at_least: int = 0
    excluded: Collection[str] = ()

    def allows(self, model: RegisteredModel, model_name: str | None = None) -> bool:
        """Whether a model counts. A row may have another `model_name` for it."""
        if self.fingerprint is not None:
            return model.fingerprint.digest == self.fingerprint.digest
        names = (None, model.model_name, model_name)
        return self.model in names and self.weights in (None, model.fingerprint.weights_sha256)

    def is_served_by(self, row: Checkpoint) -> bool:
        """Whether a row of this input hash can serve the input."""
        return self.why_not(row) is None

    def why_not(self, row: Checkpoint) -> str | None:
        """Why a row of this input hash cannot serve the input, or None if it can."""
        required = None if self.prompt is None else self.prompt.required_tokens_hash
        return matching.why_not_same_input(row, required)

    def token_ids(self) -> TokenIds | None:
        """The token ids of the input, which may have to be computed; None if they cannot be had."""
        return self.prompt.token_ids if self.prompt is not None and self.prompt.has_token_ids else None


def match(context: RegistryContext, query: MatchQuery) -> MatchResult:
    """As `Registry.match`: by the input hash first, then by prefix if the token ids can be had. A miss is explained."""
    answer = find(context, query)
    return explain(context, query, answer) if answer.outcome is Outcome.NO_MATCH else answer


def find(context: RegistryContext, query: MatchQuery) -> MatchResult:
    """As `match`, but a miss for one engine is not explained by what other models have: that is one read less. `explain` does it
    later.
    """
    try:
        if query.fingerprint is None:
            return _match_any_model(context, query)
        return _match_engine(context, query, query.fingerprint)
    except (DatabaseUnavailable, StoreUnavailable) as error:
        return _failed(query, error)


def explain(context: RegistryContext, query: MatchQuery, miss: MatchResult) -> MatchResult:
    """A miss that `find` gave, with the explanation that `match` gives: which other models have this very input."""
    if query.fingerprint is None:
        return miss  # all models were looked at
    try:
        return _by_other_models(query, miss, *_rows_of_input(context, query))
    except (DatabaseUnavailable, StoreUnavailable) as error:
        return _failed(query, error)


def _failed(query: MatchQuery, error: DatabaseUnavailable | StoreUnavailable) -> MatchResult:
    return MatchResult(
        outcome=Outcome.FAILED, reason=str(error), input_hash=query.input_hash, error=without_frames(error)
    )


# -- one engine's model, or several --------------------------------------------------------------------------------------


def _match_engine(context: RegistryContext, query: MatchQuery, fingerprint: Fingerprint) -> MatchResult:
    """One read if the token ids are known already, else one for the input hash and one for the prefix."""
    search = None
    if query.prompt is not None and query.prompt.is_tokenized:
        search = _Search(context, query, fingerprint.digest, query.prompt.token_ids)

    def look(db: Connection) -> list[Checkpoint]:
        row = rows.find_active(db, fingerprint.digest, query.input_hash)
        same_input = [row] if row is not None and row.id not in query.excluded else []
        if search is not None and not any(map(query.is_served_by, same_input)):
            search.start(db)
        return same_input

    same_input = context.database.query(look)
    if usable := [row for row in same_input if query.is_served_by(row)]:
        return matching.decide(query.input_hash, usable, [], fingerprint)
    if search is None and (token_ids := query.token_ids()) is not None:
        search = _Search(context, query, fingerprint.digest, token_ids)
    return _miss_by_hash(query, same_input) if search is None else _by_prefix(context, query, [search])


def _match_any_model(context: RegistryContext, query: MatchQuery) -> MatchResult:
    of_input, models = _rows_of_input(context, query)
    same_input = [
        row
        for row in of_input
        if query.allows(models[row.fingerprint], row.model_name) and row.id not in query.excluded
    ]
    if usable := [row for row in same_input if query.is_served_by(row)]:
        return matching.decide(query.input_hash, usable, [], None)
    if (token_ids := query.token_ids()) is None:
        answer = _miss_by_hash(query, same_input)
    else:
        digests = [model.fingerprint.digest for model in models.values() if query.allows(model)]
        searches = [_Search(context, query, digest, token_ids) for digest in digests[:MOST_MODELS]]
        answer = _by_prefix(context, query, searches)
    return answer if answer.outcome is Outcome.HIT else _by_other_models(query, answer, of_input, models)


def _miss_by_hash(query: MatchQuery, same_input: Sequence[Checkpoint]) -> MatchResult:
    """The answer without token ids: there is no row of this input hash, or one that cannot serve it."""
    if not same_input:
        return matching.decide(query.input_hash, [], [], query.fingerprint)
    row = same_input[0]
    reason = query.why_not(row) or ""
    return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=query.input_hash, nearest=row)


def _by_other_models(
    query: MatchQuery, miss: MatchResult, of_input: Sequence[Checkpoint], models: dict[bytes, RegisteredModel]
) -> MatchResult:
    """A miss, explained by the rows that other models have of this very input, if there are any."""
    if query.token_ids() is None and miss.nearest is not None:
        return miss  # there is a row of this model, and the miss says why it cannot serve
    others = [
        (row, models[row.fingerprint]) for row in of_input if not query.allows(models[row.fingerprint], row.model_name)
    ]
    return matching.decide(query.input_hash, [], others, query.fingerprint) if others else miss


def _rows_of_input(
    context: RegistryContext, query: MatchQuery
) -> tuple[list[Checkpoint], dict[bytes, RegisteredModel]]:
    """The rows of this input hash under any fingerprint, and all models by their fingerprints (none if they are not needed)."""

    def look(db: Connection) -> tuple[list[Checkpoint], list[RegisteredModel]]:
        of_input = rows.find_by_input(db, query.input_hash)
        # Models after rows: a model is stored before the first row that names it.
        return of_input, rows.models(db) if of_input or query.fingerprint is None else []

    of_input, registered = context.database.query(look)
    models = {model.fingerprint.digest: model for model in registered}
    return [row for row in of_input if row.fingerprint in models], models


# -- by prefix ---------------------------------------------------------------------------------------------------------------


def _by_prefix(context: RegistryContext, query: MatchQuery, searches: Sequence[_Search]) -> MatchResult:
    candidates = [candidate for search in searches for candidate in search.candidates()]
    token_ids = query.token_ids()
    assert token_ids is not None  # noqa: S101 - narrows the type: a search has them
    answer = matching.by_prefix(query.input_hash, token_ids, candidates, context.min_match_tokens, query.text_of)
    troubles = [search.trouble for search in searches if search.trouble is not None]
    if answer.outcome is not Outcome.HIT and troubles:
        raise troubles[0]
    return answer


@dataclass(slots=True)
class _Search:
    """The search for one model's best checkpoints. `trouble` is an error of the store that made it skip a candidate."""

    context: RegistryContext
    query: MatchQuery
    digest: bytes
    token_ids: TokenIds
    trouble: StoreUnavailable | None = None
    _chain: list[bytes] = field(default_factory=list)
    _start: tuple[int, list[Checkpoint]] | None = None
    _seen: set[int] = field(default_factory=set)
    _found: list[CandidateTokens] = field(default_factory=list)
    _spare: list[Checkpoint] = field(default_factory=list)
    _n_best: int = 0

    def start(self, db: Connection) -> None:
        """Reads the deepest block that is linked, and the rows to look at first: none if they would be too short."""
        self._chain = prefix_hashes(self.digest, self.token_ids, self.context.block_size)
        deepest = prefixes.deepest(db, self._chain, _HASHES_PER_QUERY)
        self._start = deepest, [] if self._most(deepest) < self.query.at_least else self._rows_at(deepest, db)

    def candidates(self) -> list[CandidateTokens]:
        """Candidates, guaranteed to include the best match (or, for a miss, the nearest). Reads at most 16 files, starting from
        the deepest linked block, and moves up only if nothing there is usable: it cannot be truncated, has expired, or its
        file is missing or damaged.
        """
        if self._start is None:
            self.context.database.query(self.start)
        assert self._start is not None  # noqa: S101 - narrows the type
        deepest, at_deepest = self._start
        for depth in range(deepest, -1, -1):
            at_depth = at_deepest if depth == deepest else self.context.database.query(partial(self._rows_at, depth))
            self.context.hook("looked up")
            self._compare(at_depth, self._most(deepest))
            is_shorter = depth * self.context.block_size <= self.query.at_least
            if self._n_best or len(self._seen) >= MOST_HEADS or is_shorter:
                break
        if not self._found and self._spare and (nearest := self._candidate(self._spare[0])) is not None:
            return [nearest]
        return self._found

    def _compare(self, at_depth: Sequence[Checkpoint], most: int) -> None:
        """Adds the rows that may be better than the best one so far, until one is as good as can be: of `most` tokens."""
        n_tokens = len(self.token_ids)
        for row, is_prefix in self._in_order(at_depth, most):
            if not row.memory_kind.can_be_truncated and not (is_prefix and row.n_tokens < n_tokens):
                self._spare.append(row)
            elif row.n_tokens > self._n_best and (candidate := self._candidate(row)) is not None:
                self._found.append(candidate)
                self._n_best = max(self._n_best, matching.n_usable(row, candidate.n_matching, n_tokens))
                if self._n_best == most:
                    return

    def _most(self, depth: int) -> int:
        """The most tokens that a checkpoint can share with the input if it has its first `depth` blocks and not the next one."""
        return min(len(self.token_ids), (depth + 1) * self.context.block_size - 1)

    def _rows_at(self, depth: int, db: Connection) -> list[Checkpoint]:
        """Rows that begin with the first `depth` blocks of the input: those that end inside the next block and are a prefix of
        the input, and 16 others, smallest first. At depth 0, where nothing is shared yet, the others are the newest.
        """
        size, before = self.context.block_size, self._chain[depth - 1] if depth else self.digest
        start, end = depth * size, (depth + 1) * size
        if start:
            sharing, are_all = prefixes.sharing(db, before, MOST_HEADS)
            if len(sharing) < MOST_HEADS and not are_all:  # some have expired, and hide others
                sharing, are_all = prefixes.sharing(db, before, _MOST_SHARING)
                sharing, are_all = sharing[:MOST_HEADS], are_all and len(sharing) <= MOST_HEADS
            if are_all or (sharing and sharing[-1].n_tokens >= end):
                return sharing  # those that end inside the next block are among them
        else:
            sharing = prefixes.newest(db, self.digest, MOST_HEADS)
        ending = prefixes.ending_at(db, end_hashes(before, self.token_ids[start : end - 1]), MOST_HEADS)
        return list({row.ckpt_no: row for row in [*ending, *sharing]}.values())

    def _in_order(self, at_depth: Sequence[Checkpoint], most: int) -> list[tuple[Checkpoint, bool]]:
        """First the rows of up to `most` tokens that are a prefix of the input by their hash, longest first; then the others,
        shortest first. So the first that is as good as can be is the one to take. The bool says whether it is such a prefix.
        """
        hashes = tokens_hashes(self.token_ids, {row.n_tokens for row in at_depth if row.n_tokens <= most})
        are_prefix: list[tuple[Checkpoint, bool]] = []
        others: list[tuple[Checkpoint, bool]] = []
        for row in sorted(at_depth, key=lambda row: (row.n_tokens, row.ckpt_no)):
            is_prefix = row.tokens_hash == hashes.get(row.n_tokens)
            (are_prefix if is_prefix else others).append((row, is_prefix))
        return sorted(are_prefix, key=lambda entry: -entry[0].n_tokens) + others

    def _candidate(self, row: Checkpoint) -> CandidateTokens | None:
        """A row with its token ids; None if it is excluded or was looked at before, if 16 files were read, or if it is
        unreadable.
        """
        if row.ckpt_no in self._seen or row.id in self.query.excluded or len(self._seen) >= MOST_HEADS:
            return None
        self._seen.add(row.ckpt_no)
        try:
            token_ids = token_ids_of(self.context, row, self._condemn)
        except (CorruptFile, FileMissing, UnsafePath):
            return None  # `_condemn` has reported it
        except StoreUnavailable as error:
            log.warning("checkpoint %s cannot be looked at now: %s", row.id, error)
            self.trouble = error
            return None
        return CandidateTokens(row, token_ids, common_prefix(self.token_ids, token_ids))

    def _condemn(self, row: Checkpoint, error: Unreadable) -> None:
        """Makes a row STALE whose file is missing or damaged. If the database cannot be written, a restore will do it later."""
        if isinstance(error, FileMissing):
            self.context.require_store()
        try:
            self.context.condemn(row, error)
        except DatabaseUnavailable as lost:
            log.warning("what became of checkpoint %s was not recorded: %s", row.id, lost)


# -- the token ids of one checkpoint -------------------------------------------------------------------------------------------


def _ignore(_row: Checkpoint, _error: Unreadable) -> None:
    """The caller gets the error anyway."""


def token_ids_of(
    context: RegistryContext, row: Checkpoint, on_unreadable: Callable[[Checkpoint, Unreadable], None] = _ignore
) -> TokenIds:
    """All token ids of a checkpoint, from the start of its file, checked against their CRC and the row; those of a delta with
    the ones before it, from its parents' files. Shape `[n_tokens]`. `on_unreadable` is called with the row whose file is
    missing or damaged, which may be a parent's.

    Raises:
        FileMissing, CorruptFile, UnsafePath: a file is missing or damaged, or is not that of its row.
        StoreUnavailable: a file cannot be read now, so nothing is known of it.
        DatabaseUnavailable: a delta's parent cannot be looked up.
    """
    try:
        start, token_ids = _own_ids(context, row)
    except (CorruptFile, FileMissing, UnsafePath) as error:
        on_unreadable(row, error)
        raise
    if start and row.parent_no is not None:
        parent_no = row.parent_no
        parent = context.database.query(lambda db: rows.by_number(db, parent_no))
        if parent is None:
            raise FileMissing(path=f"{row.file_path} (the checkpoint that it is a delta of)")
        token_ids = np.concatenate([token_ids_of(context, parent, on_unreadable)[:start], token_ids])
    if tokens_hash(token_ids) != row.tokens_hash:
        mismatch = CorruptFile(path=row.file_path, check="Row", reason="its token ids are not those of the row")
        on_unreadable(row, mismatch)
        raise mismatch
    return token_ids


def _own_ids(context: RegistryContext, row: Checkpoint) -> tuple[int, TokenIds]:
    """The position of the first token in a checkpoint's own file, and the token ids that the file contains."""
    if row.is_covered:
        return row.start_token, np.empty(0, dtype=np.int32)
    data, size = context.store.beginning(row.file_path, _HEAD_BYTES + 4 * row.n_tokens)
    header, padding = container.read_header(memoryview(data), row.file_path, size)
    if padding + header.payload_offset > len(data):
        data, size = context.store.beginning(row.file_path, padding + header.payload_offset)
        header, padding = container.read_header(memoryview(data), row.file_path, size)
    if header.fingerprint != row.fingerprint:
        raise CorruptFile(path=row.file_path, check="Row", reason="its fingerprint is not that of the row")
    return header.start_token, container.read_token_ids(memoryview(data), header, padding, row.file_path)
