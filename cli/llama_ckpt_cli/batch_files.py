"""What `batch` reads and writes: inputs and results as JSON Lines. An input that has a result is not computed again."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_ckpt.fingerprint import Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the inputs, counted from 1: an input, or why it cannot be used. `id` and `label` are the user's."""

    number: int
    given: Input | None = None
    id: str | int | None = None
    label: str | None = None
    error: str | None = None

    @property
    def input_hash(self) -> str | None:
        """The input hash in hex; None if the line is not a valid input."""
        from llama_ckpt.errors import BadInput
        from llama_ckpt.fingerprint import hash_input

        try:
            return None if self.given is None else hash_input(self.given).hex()
        except BadInput:
            return None


def read_lines(file: str) -> Iterator[Line]:
    """The lines of a JSON Lines file, `-` for stdin; blank ones are skipped.

    Raises:
        BadInput: the file cannot be read.
    """
    from llama_ckpt.errors import BadInput

    try:
        with open(file, "rb") if file != "-" else _kept_open(sys.stdin.buffer) as lines:  # noqa: PTH123 - `-` is not a path
            for number, data in enumerate(lines, 1):
                if data.strip():
                    yield _line(number, data)
    except OSError as error:
        raise BadInput(what="input file", value=file, reason=error.strerror or str(error)) from error


@contextmanager
def _kept_open(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    yield stream


def _line(number: int, data: bytes) -> Line:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Line(number=number, error=f"it is not valid JSON: {error}")
    if isinstance(value, str):
        return Line(number=number, given=value)
    if not isinstance(value, dict):
        return Line(number=number, error="it must be a string or an object")
    reason = _why_unusable(value)
    return Line(
        number=number,
        given=None if reason else value.get("text", value.get("tokens")),
        id=value["id"] if _is_id(value.get("id")) else None,
        label=value["label"] if isinstance(value.get("label"), str) else None,
        error=reason,
    )


def _is_id(value: object) -> bool:
    return isinstance(value, str) or type(value) is int


def _why_unusable(value: dict[str, Any]) -> str | None:
    """What is wrong with an object, if anything is."""
    if ("text" in value) == ("tokens" in value):
        return "an object must have either 'text' or 'tokens'"
    if not isinstance(value.get("text", ""), str):
        return "'text' must be a string"
    tokens = value.get("tokens", [])
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        return "'tokens' must be a list of integers"
    if value.get("id") is not None and not _is_id(value["id"]):
        return "'id' must be a string or an integer"
    if not isinstance(value.get("label"), str | None):
        return "'label' must be a string"
    return None


class Results:
    """The results file. Opening it keeps the results of an earlier run, but drops an incomplete last line, and failures, so that
    those inputs are tried again. Each result is flushed when it is written: a kill loses no result that was reported.

    Raises:
        BadInput: the file contains something other than results, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._done: dict[int, str] = {}
        from llama_ckpt.errors import BadInput

        try:
            if self.path.is_file():
                self._keep_results()
            self._file = self.path.open("ab")
        except OSError as error:
            raise BadInput(what="results file", value=str(path), reason=error.strerror or str(error)) from error

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, line: Line) -> bool:
        """Whether the file has a result for this line.

        Raises:
            BadInput: the file has a result for another input under the line's number.
        """
        from llama_ckpt.errors import BadInput

        if line.number not in self._done:
            return False
        if self._done[line.number] != line.input_hash:
            reason = f"its line {line.number} belongs to another input; give another file, or delete this one"
            raise BadInput(what="results file", value=str(self.path), reason=reason)
        return True

    def write(self, result: dict[str, Any]) -> None:
        """Adds a result."""
        self._file.write(_encoded(result))
        self._file.flush()

    def _keep_results(self) -> None:
        """Removes everything but complete results from the file. If it is interrupted, the file stays as it was."""
        kept, dropped = [], False
        with self.path.open("rb") as old:
            for number, data in enumerate(old):
                if (result := self._result(data)) is None:
                    dropped = True
                else:
                    self._done[result["line"]] = result["input_hash"]
                    kept.append(number)
        if dropped:
            self._rewrite(set(kept))

    def _rewrite(self, kept: set[int]) -> None:
        """Replaces the file by one with only these of its lines, which is durable before it gets the name."""
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name[:100]}.", suffix=".tmp", dir=self.path.parent)
        temporary = Path(name)
        try:
            with self.path.open("rb") as old, os.fdopen(descriptor, "wb") as new:
                new.writelines(data for number, data in enumerate(old) if number in kept)
                new.flush()
                os.fsync(new.fileno())
            temporary.chmod(self.path.stat().st_mode)
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _result(self, data: bytes) -> dict[str, Any] | None:
        """A result of the file; None for a failure and for an incomplete line, which only the last one can be."""
        from llama_ckpt.errors import BadInput

        if not data.endswith(b"\n"):
            return None
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not {"line", "input_hash", "error"} <= value.keys():
            reason = "it contains lines that are not results of batch; give another file"
            raise BadInput(what="results file", value=str(self.path), reason=reason)
        return value if value["error"] is None else None


def _encoded(result: dict[str, Any]) -> bytes:
    # JSON's own escapes: exact for any text, and harmless on any terminal.
    return json.dumps(result).encode() + b"\n"
