"""Every exception of llama-ckpt. The docstring is the message, `exit_code` is what the command returns."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class LlamaCkptError(Exception):
    """llama-ckpt failed: {detail}"""

    exit_code: ClassVar[int] = 1

    def __init__(self, **values: Any) -> None:
        self.values = values
        # Under `python -OO` there are no docstrings: the values alone still show what happened.
        template = inspect.cleandoc(type(self).__doc__ or "")
        message = template.format(**values) if template else f"{type(self).__name__}: {values}"
        super().__init__(message)

    @property
    def reason(self) -> str:
        """Why it failed, without the rest of the message; the complete message of an error that has no such part."""
        return str(self.values.get("reason", self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.values))


def _rebuild(kind: type[LlamaCkptError], values: dict[str, Any]) -> LlamaCkptError:
    return kind(**values)


class NotFound(LlamaCkptError):
    """no {what} {name!r}. {hint}"""

    exit_code = 3


class MissingParent(NotFound):
    """no {what} {name!r}. {hint}"""

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint that the delta needs."""
        return str(self.values["name"])


class Incompatible(LlamaCkptError):
    """this checkpoint cannot be used with this engine: {reason}"""

    exit_code = 4


class CorruptFile(LlamaCkptError):
    """{path}: {check} FAILED: {reason}"""

    exit_code = 5

    @property
    def check(self) -> str:
        """The name of the check that failed (`values.CheckName`)."""
        return str(self.values["check"])


class DatabaseUnavailable(LlamaCkptError):
    """the database {url} cannot be used: {reason}"""

    exit_code = 6


class CommitOutcomeUnknown(DatabaseUnavailable):
    """lost the connection to {url} during a commit; the change may or may not have been saved: {reason}. Run the command again: it checks first."""

    exit_code = 23


class Busy(LlamaCkptError):
    """another {what} is running: {holder}, for at most {seconds_left} s more. Try again when it has finished."""

    exit_code = 7


class StoreFull(LlamaCkptError):
    """no room for {needed} bytes under {path}: {reason}. Nothing was saved. Free some space (llama-ckpt prune, then llama-ckpt gc) or choose another --store."""

    exit_code = 8


class StoreUnavailable(LlamaCkptError):
    """the store cannot be used: {path}: {reason}"""

    exit_code = 9


class EngineMissing(LlamaCkptError, ImportError):
    """this needs llama-cpp-python, which is not installed ({reason}). Install it with: pip install 'llama-ckpt[llama]'"""

    exit_code = 10


class EngineFailed(LlamaCkptError):
    """the engine failed: {reason}"""

    exit_code = 11


class VerifyFailed(LlamaCkptError):
    """{n_failed} of {n_checked} checks failed"""

    exit_code = 12


class SchemaTooNew(LlamaCkptError):
    """the database {url} has schema {found}, but this llama-ckpt only supports schemas up to {known}. Install a newer llama-ckpt. Nothing was changed."""

    exit_code = 13


class StoreMismatch(LlamaCkptError):
    """gc refuses to run: {evidence} If you are sure that store and database belong together, repeat with --force {registry_id}"""

    exit_code = 14


class BadInput(LlamaCkptError):
    """{what}: {value!r} cannot be used: {reason}"""

    exit_code = 15


class EngineStateMismatch(LlamaCkptError):
    """the engine does not contain the state of this input: {reason}. Evaluate the input first, or call warm()."""

    exit_code = 16


class UnsafePath(LlamaCkptError):
    """refused: {path}: {reason}. Nothing outside the store is opened or deleted."""

    exit_code = 17


class FileMissing(LlamaCkptError):
    """the file {path} does not exist"""

    exit_code = 18


class Unsupported(LlamaCkptError):
    """{what} is not supported: {reason}"""

    exit_code = 19


class Conflict(LlamaCkptError):
    """another process changed the same data first: {what}. Try again."""

    exit_code = 20


class SchemaTooOld(LlamaCkptError):
    """the database {url} has schema {found}, but this llama-ckpt needs schema {known}. Run llama-ckpt db upgrade when no older llama-ckpt uses the database any more."""

    exit_code = 21


class DoctorFailed(LlamaCkptError):
    """{n_failed} of {n_checks} checks failed"""

    exit_code = 22


def without_frames(error: LlamaCkptError) -> LlamaCkptError:
    """The error without the tracebacks of itself and its causes: one that is kept in a result must not keep a state in memory."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error
