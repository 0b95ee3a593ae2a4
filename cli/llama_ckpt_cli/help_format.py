"""How help is laid out: commands in groups with their complete first sentence, options in sections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click.core import Context, Parameter
    from typer._click.formatting import HelpFormatter

USE = "Use checkpoints"
LOOK = "Inspect and diagnose"
CLEAN = "Clean up"
OPERATE = "Operate"
DATABASES = "Databases"
COMMAND_GROUPS = (USE, LOOK, CLEAN, OPERATE, DATABASES)

POLICY_PANEL = "Policy (an option not given here comes from the settings)"
COMMON_PANEL = "Options of every command"

_WIDEST_NAME = 26  # of an option; a longer one gets a line of its own
_NO_LIMIT = 10_000  # of the first sentence in a list of commands: it is wrapped instead


class HelpCommand(TyperCommand):
    """A command whose help shows its options in sections."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes arguments, then each section of options."""
        _write_parameters(self.get_params(ctx), ctx, formatter)


class HelpGroup(TyperGroup):
    """A group whose help lists its commands in groups, each with its complete first sentence."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes commands, after arguments and options."""
        _write_parameters(self.get_params(ctx), ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes one section for each group of commands."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in COMMAND_GROUPS}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                section = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(section, []).append((name, command.get_short_help_str(_NO_LIMIT)))
        _write_sections(sections, formatter)


def _write_parameters(parameters: Iterable[Parameter], ctx: Context, formatter: HelpFormatter) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], POLICY_PANEL: [], COMMON_PANEL: []}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if parameter.name == "help" and sections[COMMON_PANEL]:
                usual = COMMON_PANEL
            sections[getattr(parameter, "rich_help_panel", None) or usual].append(record)
    _write_sections(sections, formatter)


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: HelpFormatter) -> None:
    """Each section that has lines. The first column is as wide in all of them."""
    width = max(
        (len(first) for rows in sections.values() for first, _ in rows if len(first) <= _WIDEST_NAME), default=0
    )
    for name, rows in sections.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl([(f"{first:<{width}}", text) for first, text in rows], col_max=_WIDEST_NAME)
