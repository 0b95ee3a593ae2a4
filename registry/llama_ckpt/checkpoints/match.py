"""Which checkpoint serves an input: the decisions, each with its reason. Pure.

By input hash a whole input is recognised; by token ids, which have the last word, whatever begins like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llama_ckpt.fingerprint import TokenIds, differences, tokens_hash
from llama_ckpt.values import (
    Checkpoint,
    Divergence,
    Fingerprint,
    MatchResult,
    MemoryKind,
    Outcome,
    RegisteredModel,
)

_AROUND = 8  # tokens whose text is shown on either side of a divergence

TextOf = Callable[[TokenIds], str]


@dataclass(frozen=True, slots=True)
class CandidateTokens:
    """A checkpoint and all of its token ids, as its file has them; shape `[n_tokens]`. The input begins with the first
    `n_matching` of them.
    """

    row: Checkpoint
    token_ids: TokenIds
    n_matching: int


def decide(
    input_hash: bytes,
    usable: Sequence[Checkpoint],
    others: Sequence[tuple[Checkpoint, RegisteredModel]],
    wanted: Fingerprint | None,
) -> MatchResult:
    """The answer for one input hash.

    `usable` are the rows that may serve it, best first; `others` are rows of the same input under other fingerprints, which
    explain a miss: the one with the fewest differing fields is named as the nearest.
    """
    if usable:
        best = usable[0]
        return MatchResult(
            outcome=Outcome.HIT,
            reason="the same input, by SHA-256",
            input_hash=input_hash,
            checkpoint=best,
            n_matching=best.n_tokens,
            n_reusable=max(0, best.n_tokens - 1),
            n_tokens=best.n_tokens,
        )
    if not others:
        return MatchResult(
            outcome=Outcome.NO_MATCH, reason="no checkpoint of this input is registered", input_hash=input_hash
        )
    if wanted is None:
        row, model = others[0]
        reason = f"this input is registered only for other models, such as {model.model_name}"
        return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=input_hash, nearest=row)
    gaps = [(differences(model.fingerprint.fields, wanted.fields), row) for row, model in others]
    gap, nearest = min(gaps, key=lambda pair: len(pair[0]))
    return MatchResult(
        outcome=Outcome.NO_MATCH,
        reason="this input is registered, but its state does not fit this engine: " + "; ".join(map(str, gap)),
        input_hash=input_hash,
        nearest=nearest,
        differences=gap,
    )


def why_not_whole(row: Checkpoint, token_ids: TokenIds | None) -> str | None:
    """Why the row of an input's own hash cannot serve it all the same; None when it can. `token_ids` are the input's, None
    where they are not known.
    """
    if row.memory_kind is not MemoryKind.FULL:
        return _uncuttable(row)
    if token_ids is not None and row.tokens_hash != tokens_hash(token_ids):
        return "the checkpoint of this input is of other token ids than it has now"
    return None


def common_prefix(one: TokenIds, other: TokenIds) -> int:
    """How many token ids two sequences begin with alike."""
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def n_usable(row: Checkpoint, n_matching: int, n_tokens: int) -> int:
    """How many cells of a checkpoint serve an input of `n_tokens` that begins with `n_matching` tokens like it. Only a full
    attention cache can be cut; any other is used whole or not at all, and must leave a token to evaluate.
    """
    if row.memory_kind is MemoryKind.FULL:
        return n_matching
    return n_matching if n_matching == row.n_tokens < n_tokens else 0


def by_prefix(
    input_hash: bytes,
    token_ids: TokenIds,
    heads: Sequence[CandidateTokens],
    min_tokens: int,
    text_of: TextOf | None = None,
) -> MatchResult:
    """The answer for an input's token ids: of `heads` the one that begins with the most tokens like the input and can be used.

    Of equal ones the shortest checkpoint is taken, and of equally long ones the one that was saved first. Fewer tokens than
    `min_tokens` are no match, except of a checkpoint of the very same two or more tokens. `text_of` gives the text of
    token ids, for the explanation.
    """
    n = len(token_ids)
    found = [head for head in heads if head.n_matching]
    if not found:
        reason = "no checkpoint begins like this input"
        return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=input_hash, n_tokens=n)

    def rank(head: CandidateTokens) -> tuple[int, int, int, int]:
        return (-n_usable(head.row, head.n_matching, n), -head.n_matching, head.row.n_tokens, head.row.ckpt_no)

    best = min(found, key=rank)
    n_matching = best.n_matching
    told = MatchResult(
        outcome=Outcome.NO_MATCH,
        reason=_why_not(best.row, n_matching, n, min_tokens),
        input_hash=input_hash,
        nearest=best.row,
        n_matching=n_matching,
        n_tokens=n,
        divergence=_divergence(token_ids, best.token_ids, n_matching, text_of),
    )
    if not _useful(best.row, n_matching, n, min_tokens):
        return told
    return MatchResult(
        outcome=Outcome.HIT,
        reason=_why(best.row, n_matching, n),
        input_hash=input_hash,
        checkpoint=best.row,
        n_matching=n_matching,
        n_reusable=min(n_matching, n - 1),
        n_tokens=n,
        divergence=told.divergence,
    )


def _useful(row: Checkpoint, n_matching: int, n_tokens: int, min_tokens: int) -> bool:
    usable = n_usable(row, n_matching, n_tokens)
    return usable >= min_tokens or 1 < usable == n_tokens == row.n_tokens


def _why(row: Checkpoint, n_matching: int, n_tokens: int) -> str:
    if n_matching == row.n_tokens == n_tokens:
        return "the same token ids"
    if n_matching == n_tokens:
        return "a longer checkpoint begins with the whole input"
    if n_matching == row.n_tokens:
        return "the input begins with the whole checkpoint"
    return f"input and checkpoint begin with the same {n_matching} tokens"


def _why_not(row: Checkpoint, n_matching: int, n_tokens: int, min_tokens: int) -> str:
    if n_matching >= min_tokens and n_usable(row, n_matching, n_tokens) == 0:
        return _uncuttable(row)
    tokens = "1 token" if n_matching == 1 else f"{n_matching} tokens"
    return f"the nearest checkpoint begins with {tokens} of the input; fewer than {min_tokens} are no match"


def _uncuttable(row: Checkpoint) -> str:
    return (
        f"the nearest checkpoint is of {row.memory_kind} memory, which cannot be cut: it serves only inputs that begin with "
        "all of it and go on"
    )


def _divergence(one: TokenIds, other: TokenIds, at: int, text_of: TextOf | None) -> Divergence | None:
    """Where two sequences part; None where one of them only ends earlier."""
    if at == min(len(one), len(other)):
        return None
    if text_of is None:
        return Divergence(at=at)
    return Divergence(
        at=at,
        before=text_of(one[max(0, at - _AROUND) : at]),
        in_input=text_of(one[at : at + _AROUND]),
        in_checkpoint=text_of(other[at : at + _AROUND]),
    )
