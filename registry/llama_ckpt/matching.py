"""Which checkpoint serves an input: the decision, with its reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llama_ckpt.fingerprint import differences
from llama_ckpt.values import Checkpoint, Fingerprint, MatchResult, Outcome, RegisteredModel


def decide(
    of_input: bytes,
    usable: Sequence[Checkpoint],
    others: Sequence[tuple[Checkpoint, RegisteredModel]],
    wanted: Fingerprint | None,
) -> MatchResult:
    """The answer for one input.

    `usable` are the rows that may serve it, best first; `others` are rows of the same input under other fingerprints, which
    explain a miss: the one with the fewest differing fields is named as the nearest.
    """
    if usable:
        best = usable[0]
        return MatchResult(
            outcome=Outcome.HIT,
            reason="the same input, by SHA-256",
            input_hash=of_input,
            checkpoint=best,
            n_matching=best.n_tokens,
            n_reusable=max(0, best.n_tokens - 1),
        )
    if not others:
        return MatchResult(
            outcome=Outcome.NO_MATCH, reason="no checkpoint of this input is registered", input_hash=of_input
        )
    if wanted is None:
        row, model = others[0]
        reason = f"this input is registered only for other models, such as {model.model_name}"
        return MatchResult(outcome=Outcome.NO_MATCH, reason=reason, input_hash=of_input, nearest=row)
    gaps = [(differences(model.fingerprint.fields, wanted.fields), row) for row, model in others]
    gap, nearest = min(gaps, key=lambda pair: len(pair[0]))
    return MatchResult(
        outcome=Outcome.NO_MATCH,
        reason="this input is registered, but its state does not fit this engine: " + "; ".join(map(str, gap)),
        input_hash=of_input,
        nearest=nearest,
        differences=gap,
    )
