"""The values of an adoption: options, outcome, result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llama_ckpt.checkpoints.inputs import SaveOptions
from llama_ckpt.errors import LlamaCkptError, MissingParent, without_frames
from llama_ckpt.exchange.convert import EngineMaker
from llama_ckpt.values import Checkpoint


class AdoptOutcome(StrEnum):
    """What became of a file. `LEFT`: it is in a folder that was named, and is no checkpoint. `ADOPTABLE`: the dry run would
    have adopted it.
    """

    ADOPTED = "adopted"
    ADOPTABLE = "adoptable"
    REGISTERED = "already registered"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A file, or another program's folder, and what became of it. `error` is set if it was `REFUSED`. `checkpoint` is the row;
    None if there is none.
    """

    path: Path
    outcome: AdoptOutcome
    reason: str = ""
    format: str | None = None
    n_tokens: int | None = None
    checkpoint: Checkpoint | None = None
    error: LlamaCkptError | None = None

    @property
    def missing_parent(self) -> str | None:
        """The id of the checkpoint that a delta was refused for; None if it was not refused for that."""
        return self.error.checkpoint_id if isinstance(self.error, MissingParent) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """How files are adopted.

    `engine_for` makes the model's engine for files that name no model (ggsq, ggsn); `n_ctx` is the context size with which
    such files were written. `link` shares a file's bytes instead of copying them. `text` is the text of a single file's
    tokens. `dry_run` changes nothing.

    Raises:
        BadInput: the label is not valid.
    """

    engine_for: EngineMaker | None = None
    n_ctx: int | None = None
    link: bool = False
    label: str | None = None
    text: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        SaveOptions(label=self.label)  # raises if the label is not valid

    @property
    def save_options(self) -> SaveOptions:
        """The options of the save that an adoption is."""
        return SaveOptions(label=self.label)


def adopted(path: Path, row: Checkpoint, kind: str) -> Adoption:
    """The file was adopted as `row`; `kind` is its format."""
    return Adoption(path=path, outcome=AdoptOutcome.ADOPTED, format=kind, n_tokens=row.n_tokens, checkpoint=row)


def adoptable(path: Path, n_tokens: int, kind: str) -> Adoption:
    """A dry run found no reason to refuse the file."""
    return Adoption(path=path, outcome=AdoptOutcome.ADOPTABLE, format=kind, n_tokens=n_tokens)


def already_registered(path: Path, row: Checkpoint) -> Adoption:
    """`row` is ACTIVE and has the file's input."""
    return Adoption(path=path, outcome=AdoptOutcome.REGISTERED, n_tokens=row.n_tokens, checkpoint=row)


def left(path: Path, reason: str) -> Adoption:
    """The file is no checkpoint and was not named itself."""
    return Adoption(path=path, outcome=AdoptOutcome.LEFT, reason=reason)


def refused(path: Path, error: LlamaCkptError) -> Adoption:
    """The file cannot be adopted."""
    return Adoption(path=path, outcome=AdoptOutcome.REFUSED, reason=str(error), error=without_frames(error))
