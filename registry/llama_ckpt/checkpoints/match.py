"""Which checkpoint serves an input: the decisions, each with its reason. Pure.

The input hash finds a checkpoint of exactly this input; token ids find those that share a prefix with it. Where both are known,
the token ids decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llama_ckpt.fingerprint import TokenIds, differences
from llama_ckpt.values import Checkpoint, Divergence, Fingerprint, MatchResult, Outcome, RegisteredModel

_AROUND = 8  # tokens whose text is shown on either side of a divergence

TextOf = Callable[[TokenIds], str]


@dataclass(frozen=True, slots=True)
class CandidateTokens:
    """A checkpoint and all of its token ids, as stored in its file; shape `[n_tokens]`. The first `n_matching` of them are those
    of the input.
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

    `usable` are the rows that can serve it, best first. `others` are rows of the same input under other fingerprints; they
    explain a miss: the one with the fewest differing fields is reported as the nearest.
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


def why_not_same_input(row: Checkpoint, tokens_hash: bytes | None) -> str | None:
    """Why a row with the same input hash still cannot serve this input, or None if it can. `tokens_hash` is that of the input's
    token ids, None if they are not known or need not be compared.
    """
    if not row.memory_kind.can_be_truncated:
        return _cannot_be_cut(row)
    if tokens_hash is not None and row.tokens_hash != tokens_hash:
        return "the checkpoint of this input is of other token ids than it has now"
    return None


def n_usable(row: Checkpoint, n_matching: int, n_tokens: int) -> int:
    """The number of cells of a checkpoint that serve an input of `n_tokens` tokens, of which the first `n_matching` match. Only
    a full attention cache can be cut. Any other state serves as a whole or not at all, and must leave a token to evaluate.
    """
    if row.memory_kind.can_be_truncated:
        return n_matching
    return n_matching if n_matching == row.n_tokens < n_tokens else 0


def by_prefix(
    input_hash: bytes,
    token_ids: TokenIds,
    candidates: Sequence[CandidateTokens],
    min_tokens: int,
    text_of: TextOf | None = None,
) -> MatchResult:
    """The answer for an input's token ids: the candidate that shares the most tokens at its start and can be used.

    Among equals the shortest checkpoint is taken, then the one that was saved first. A shared prefix of fewer than `min_tokens`
    tokens is no match, unless the checkpoint has exactly the input's tokens and they are two or more. `text_of` gives the text
    of token ids, for the explanation.
    """
    n = len(token_ids)
    best = _best(candidates, n)
    if best is None:
        reason = "no checkpoint begins like this input"
        return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=input_hash, n_tokens=n)
    row, n_matching = best.row, best.n_matching
    is_hit = _is_useful(row, n_matching, n, min_tokens)
    return MatchResult(
        outcome=Outcome.HIT if is_hit else Outcome.NO_MATCH,
        reason=_why(row, n_matching, n) if is_hit else _why_not(row, n_matching, n, min_tokens),
        input_hash=input_hash,
        checkpoint=row if is_hit else None,
        nearest=None if is_hit else row,
        n_matching=n_matching,
        n_reusable=min(n_matching, n - 1) if is_hit else 0,
        n_tokens=n,
        divergence=_divergence(token_ids, best.token_ids, n_matching, text_of),
    )


def _best(candidates: Sequence[CandidateTokens], n_tokens: int) -> CandidateTokens | None:
    def rank(candidate: CandidateTokens) -> tuple[int, int, int, int]:
        row, n_matching = candidate.row, candidate.n_matching
        return (-n_usable(row, n_matching, n_tokens), -n_matching, row.n_tokens, row.ckpt_no)

    return min((candidate for candidate in candidates if candidate.n_matching), key=rank, default=None)


def _is_useful(row: Checkpoint, n_matching: int, n_tokens: int, min_tokens: int) -> bool:
    usable = n_usable(row, n_matching, n_tokens)
    return usable >= min_tokens or 1 < usable == n_tokens == row.n_tokens


def _why(row: Checkpoint, n_matching: int, n_tokens: int) -> str:
    if n_matching == row.n_tokens == n_tokens:
        return "the same token ids"
    if n_matching == n_tokens:
        return "a longer checkpoint starts with the complete input"
    if n_matching == row.n_tokens:
        return "the input starts with the complete checkpoint"
    return f"input and checkpoint begin with the same {n_matching} tokens"


def _why_not(row: Checkpoint, n_matching: int, n_tokens: int, min_tokens: int) -> str:
    if n_matching >= min_tokens and n_usable(row, n_matching, n_tokens) == 0:
        return _cannot_be_cut(row)
    tokens = "1 token" if n_matching == 1 else f"{n_matching} tokens"
    return f"the nearest checkpoint begins with {tokens} of the input; fewer than {min_tokens} are no match"


def _cannot_be_cut(row: Checkpoint) -> str:
    return (
        f"the nearest checkpoint is of {row.memory_kind} memory, which cannot be truncated: it serves only inputs that begin "
        "with all of it and go on"
    )


def _divergence(one: TokenIds, other: TokenIds, at: int, text_of: TextOf | None) -> Divergence | None:
    """Where two sequences differ first; None if one of them only ends earlier."""
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
