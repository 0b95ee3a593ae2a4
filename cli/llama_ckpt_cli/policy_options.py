"""The options that set the policy of one run: one for each setting that `Policy` declares, with its help text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from llama_ckpt.retention.policy import SETTINGS, Kind, Step
from llama_ckpt_cli.help_format import POLICY_PANEL

GRACES = tuple(declared.name for declared in SETTINGS if declared.step is Step.GC)
LIMITS = tuple(declared.name for declared in SETTINGS if declared.step is Step.PRUNE)
MATCHING = ("min_match_tokens",)

_HELP = {declared.name: declared.help for declared in SETTINGS} | {
    "min_match_tokens": "Shortest common prefix, in tokens, that counts as a match (default: 16)."
}
_METAVARS = {Kind.DURATION: "TIME", Kind.SIZE: "SIZE", Kind.COUNT: "N", Kind.SHARE: "SHARE", Kind.ORDER: "ORDER"}
_METAVAR = {declared.name: _METAVARS[declared.forms[0][0]] for declared in SETTINGS} | {"min_match_tokens": "N"}


def policy_options(names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The annotation and the default of an option for each of these settings."""
    return {name: (Annotated[str | None, _option(name)], None) for name in names}


def _option(name: str) -> Any:
    return typer.Option(help=_HELP[name], show_default=False, metavar=_METAVAR[name], rich_help_panel=POLICY_PANEL)
