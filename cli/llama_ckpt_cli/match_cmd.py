"""The command that finds the checkpoint for an input: match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llama_ckpt.humanize import bytes_, number, timestamp
from llama_ckpt_cli.help_format import USE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import Text, TextFile
from llama_ckpt_cli.policy_options import MATCHING

if TYPE_CHECKING:
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import MatchResult
    from llama_ckpt_cli.inputs import InputQuery
    from llama_ckpt_cli.output import Output

NO_MATCH_EXIT = 3

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Model to match: the name of a registered model, or a GGUF file.", metavar="MODEL"
    ),
]
Hash = Annotated[
    str | None,
    typer.Option("--hash", help="The input's SHA-256, 64 hex digits, instead of the input.", metavar="SHA256"),
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", help="File with the input's token ids as decimal numbers; - reads stdin.", metavar="FILE"),
]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "match", group=USE, policy=MATCHING)(match)


def match(
    invocation: Invocation,
    *,
    model: Model = None,
    text_file: TextFile = None,
    text: Text = None,
    hash_hex: Hash = None,
    tokens: Tokens = None,
) -> None:
    """Show which checkpoint matches an input, completely or by prefix. Exit code 3: no checkpoint matches.

    To find prefixes of a text, give a GGUF file as --model: only its vocabulary is loaded, by llama-cpp-python. Complete
    matches, --hash and --tokens need neither.
    """
    from llama_ckpt.values import MatchResult, Outcome
    from llama_ckpt_cli.inputs import input_query, weights_of

    query = input_query(text=text, text_file=text_file, hash_hex=hash_hex, tokens_file=tokens)
    weights = None if model is None else weights_of(model, invocation.out)
    answer = MatchResult(outcome=Outcome.NO_MATCH, reason="there is no registry yet", input_hash=query.input_hash)
    with invocation.existing_registry() as registry:
        if registry is not None:
            answer = _match(invocation.out, registry, query, model, weights)
    _report(invocation.out, answer)


def _match(out: Output, registry: Registry, query: InputQuery, model: str | None, weights: bytes | None) -> MatchResult:
    """Matches by hash if that is enough or all there is. Loads a vocabulary only for a text without a complete match."""
    from llama_ckpt.values import Outcome
    from llama_ckpt_cli.inputs import load_vocabulary

    name = model if weights is None else None
    if query.given is not None and not isinstance(query.given, str):
        return registry.match(query.given, model=name, weights=weights)
    answer = registry.match_hash(query.input_hash, model=name, weights=weights)
    if answer.outcome is not Outcome.NO_MATCH or query.given is None or weights is None:
        return answer
    vocabulary = load_vocabulary(str(model), out)
    return answer if vocabulary is None else registry.match(query.given, vocabulary=vocabulary, weights=weights)


def _report(out: Output, answer: MatchResult) -> None:
    from llama_ckpt.values import Outcome

    out.result(answer, lambda: _print(out, answer), [answer.checkpoint.id] if answer.checkpoint else [])
    if answer.error is not None:
        raise answer.error
    if answer.outcome is not Outcome.HIT:
        raise typer.Exit(NO_MATCH_EXIT)


def _print(out: Output, answer: MatchResult) -> None:
    pairs = {"outcome": answer.outcome.value, "reason": answer.reason, "input SHA-256": answer.input_hash.hex()}
    if answer.checkpoint is not None:
        c = answer.checkpoint
        of = f"of {number(answer.n_tokens)}" if answer.n_tokens is not None else ""
        pairs |= {
            "checkpoint": c.id,
            "model": c.model_name,
            "tokens matching": f"{number(answer.n_matching)} {of}; the checkpoint has {number(c.n_tokens)}",
            "tokens reusable": f"{number(answer.n_reusable)} {of}",
            "file": f"{c.file_path} ({bytes_(c.file_size)})",
            "saved": timestamp(c.created_us),
            "hits": number(c.hit_count),
        }
    elif answer.nearest is not None:
        pairs["nearest"] = f"{answer.nearest.id} ({answer.nearest.model_name})"
    if answer.divergence is not None:
        d = answer.divergence
        texts = {"text before": d.before, "input continues": d.in_input, "checkpoint continues": d.in_checkpoint}
        pairs["differs at token"] = number(d.at)
        pairs |= {name: repr(text) for name, text in texts.items() if text is not None}
    out.fields(pairs)
