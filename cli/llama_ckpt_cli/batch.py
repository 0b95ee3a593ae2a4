"""`llama-ckpt batch`: a file of inputs, each computed from the longest beginning that is at hand; results as JSON Lines."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import count, size
from llama_ckpt_cli.batch_files import Line, Results, read_lines
from llama_ckpt_cli.inputs import ContextSize, FlashAttention, Gguf, KvType, Threads
from llama_ckpt_cli.output import plain, span
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from llama_ckpt.engine import Engine
    from llama_ckpt.registry import Registry
    from llama_ckpt.warm.batch import BatchInput, BatchRecord
    from llama_ckpt_cli.output import Output

INTERRUPTED = 130
N_SHOWN = 10  # of the first and of the last inputs in the table

Tell = Callable[["Totals"], None]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "batch")(batch)


def batch(
    session: Session,
    inputs: Annotated[str, typer.Argument(help="JSON Lines: strings, or objects with text or tokens; - reads stdin.")],
    model: Gguf,
    output: Annotated[Path, typer.Option("--output", "-o", help="The results, JSON Lines; what stands in it is kept.")],
    save: Annotated[str, typer.Option(help="What becomes a checkpoint: prefix, full or none.")] = "prefix",
    shared_prefix: Annotated[str | None, typer.Option(help="File with the text that the inputs begin with.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Label of what is saved.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Compute at most this many.")] = None,
    embedding: Annotated[bool, typer.Option("--embedding", help="Give the vectors of an embedding model.")] = False,
    n_ctx: ContextSize = 8192,
    flash_attn: FlashAttention = False,
    kv_type: KvType = "f16",
    threads: Threads = None,
) -> None:
    """Compute many inputs, each from the longest beginning that is at hand. Started again, it goes on where it ended."""
    from llama_ckpt_cli.inputs import load_engine

    run = Run(session.out, inputs, {"save": save, "label": label, "shared_prefix": _text_of(shared_prefix)})
    with Results(output) as results, session.registry() as registry:
        options = {"n_ctx": n_ctx, "flash_attn": flash_attn, "kv_type": kv_type, "threads": threads}
        engine = load_engine(session.out, model, embedding=embedding, **options)  # type: ignore[arg-type]
        run.compute(registry, engine, results, limit)
    run.tell(output)


def _text_of(file: str | None) -> str | None:
    from llama_ckpt_cli.inputs import input_text

    return None if file is None else input_text(None, file)


@dataclass
class Totals:
    """What a run came to so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    n_there: int = 0
    n_kept: int = 0
    n_restored: int = 0
    n_evaluated: int = 0
    n_saved: int = 0
    saved_bytes: int = 0
    n_problems: int = 0
    problem: str | None = None
    elapsed_s: float = 0.0

    @property
    def n_computed(self) -> int:
        """Inputs that were computed, or failed."""
        return self.outcomes.total()

    @property
    def reuse(self) -> float:
        """The share of tokens that were not evaluated."""
        spared = self.n_kept + self.n_restored
        return spared / max(spared + self.n_evaluated, 1)

    def add(self, record: BatchRecord) -> None:
        """Counts a record; its save may be in flight."""
        self.outcomes[record.outcome.value] += 1
        self.n_kept += record.n_kept
        self.n_restored += record.n_restored
        self.n_evaluated += record.n_evaluated

    def add_save(self, record: BatchRecord) -> None:
        """Counts what a record says of its save, which has ended."""
        if record.save is not None and record.save.bytes_written:
            self.n_saved += 1
            self.saved_bytes += record.save.bytes_written
        if record.problem is not None:
            self.n_problems += 1
            self.problem = self.problem or str(record.problem)

    def value(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **{name: self.outcomes[name] for name in ("hit", "partial", "miss", "failed")},
            "already_there": self.n_there,
            "n_evaluated": self.n_evaluated,
            "n_kept": self.n_kept,
            "n_restored": self.n_restored,
            "reuse": self.reuse,
            "n_saved": self.n_saved,
            "saved_bytes": self.saved_bytes,
            "n_problems": self.n_problems,
            "problem": self.problem,
            "elapsed_s": self.elapsed_s,
        }


class Run:
    """One run of the command: reads, computes, writes, and keeps the few lines that the table shows."""

    def __init__(self, out: Output, inputs: str, options: dict[str, Any]) -> None:
        self.out = out
        self.inputs = inputs
        self.options = options
        self.totals = Totals()
        self.interrupted = False
        self._first: list[list[str]] = []
        self._last: deque[list[str]] = deque(maxlen=N_SHOWN)

    def compute(self, registry: Registry, engine: Engine, results: Results, limit: int | None) -> None:
        """Computes the inputs that have no result yet, and writes a result of each. After SIGINT it ends with the input at hand.

        Raises:
            BadInput: the inputs cannot be read, or the results are of others.
        """
        started = time.perf_counter()
        in_flight: list[BatchRecord] = []
        lines, waiting = itertools.islice(self._to_compute(results), limit), deque[Line]()
        given = self._given(lines, waiting)
        with (
            _first_interrupt(self) as interrupted,
            _bar(self.out, self.inputs) as tell,
            closing(registry.batch(engine, given, **self.options)) as records,
        ):
            for record in records:
                line = waiting.popleft()
                result = _result(line, record, engine)
                results.write(result)
                self._note(line, record, result["next_text"])
                in_flight = self._count_saves([*in_flight, record])
                self.totals.elapsed_s = time.perf_counter() - started
                tell(self.totals)
                if interrupted():
                    break
        self._count_saves(in_flight)
        self.totals.elapsed_s = time.perf_counter() - started

    def _to_compute(self, results: Results) -> Iterator[Line]:
        for line in read_lines(self.inputs):
            if results.has(line):
                self.totals.n_there += 1
            else:
                yield line

    def _given(self, lines: Iterable[Line], waiting: deque[Line]) -> Iterator[BatchInput]:
        """What the library is asked for. A line that is no input is none for the library either, and so has a record."""
        from llama_ckpt.warm.batch import BatchInput

        for line in lines:
            waiting.append(line)
            yield BatchInput(prompt="" if line.given is None else line.given, label=line.label)

    def _count_saves(self, records: list[BatchRecord]) -> list[BatchRecord]:
        """Counts the saves that have ended, and gives the records whose save has not."""
        running = [record for record in records if record.saving is not None and not record.saving.done()]
        for record in records:
            if record not in running:
                self.totals.add_save(record)
        return running

    def _note(self, line: Line, record: BatchRecord, next_text: str | None) -> None:
        self.totals.add(record)
        row = _row(line, record, next_text)
        if len(self._first) < N_SHOWN:
            self._first.append(row)
        else:
            self._last.append(row)

    def tell(self, output: Path) -> None:
        """The table and the totals; then what did not go well, by the exit code.

        Raises:
            BadInput: an input failed.
            typer.Exit: it was interrupted.
        """
        from llama_ckpt.errors import BadInput

        totals = self.totals
        self.out.result(totals.value(), self._table, [str(totals.n_computed)])
        if totals.problem is not None:
            self.out.note(
                f"{count(totals.n_problems, 'problem')}, which no result suffered from; the first: {totals.problem}"
            )
        if self.interrupted:
            self.out.note("interrupted; the same command goes on from here")
            raise typer.Exit(INTERRUPTED)
        if n_failed := totals.outcomes["failed"]:
            reason = f"{count(n_failed, 'line')} could not be computed; {output} says why"
            raise BadInput(what="inputs", value=self.inputs, reason=reason)

    def _table(self) -> None:
        totals = self.totals
        columns = ["line", "id", "outcome", "kept", "restored", "evaluated", "time", "reuse", "next", "confidence"]
        n_between = totals.n_computed - len(self._first) - len(self._last)
        between = [["…", f"({n_between} more)", *[""] * (len(columns) - 2)]] if n_between else []
        right = ["line", "kept", "restored", "evaluated", "time", "reuse", "confidence"]
        self.out.table(columns, [*self._first, *between, *self._last], right=right)
        outcomes = ", ".join(f"{totals.outcomes[name]} {name}" for name in ("hit", "partial", "miss", "failed"))
        self.out.fields(
            {
                "inputs": f"{totals.n_computed}: {outcomes}; {totals.n_there} were there already",
                "tokens evaluated": totals.n_evaluated,
                "tokens restored": totals.n_restored,
                "tokens kept": totals.n_kept,
                "reuse": f"{totals.reuse:.1%}",
                "saved": f"{count(totals.n_saved, 'checkpoint')}, {size(totals.saved_bytes)}",
                "took": span(totals.elapsed_s),
            }
        )


def _result(line: Line, record: BatchRecord, engine: Engine) -> dict[str, Any]:
    """A line of the results."""
    token, vector = record.next_token, record.embedding
    return {
        "line": line.number,
        "id": line.id,
        "label": line.label,
        "input_hash": line.input_hash,
        "outcome": record.outcome.value,
        "n_kept": record.n_kept,
        "n_restored": record.n_restored,
        "n_evaluated": record.n_evaluated,
        "elapsed_s": record.elapsed_s,
        "checkpoint_id": record.checkpoint_id,
        "next_token": token,
        "next_text": None if token is None else engine.text_of(_one(token)),
        "confidence": record.confidence,
        "embedding": None if vector is None else vector.tolist(),
        "problem": plain(record.problem),
        "error": f"line {line.number}: {line.error or record.error}" if record.error else None,
    }


def _one(token: int) -> Any:
    import numpy as np

    return np.array([token], dtype=np.int32)


def _row(line: Line, record: BatchRecord, next_text: str | None) -> list[str]:
    """A row of the table."""
    spared = record.n_kept + record.n_restored
    n_tokens = spared + record.n_evaluated
    return [
        str(line.number),
        str(line.label if line.id is None else line.id) if line.id is not None or line.label else "-",
        record.outcome.value,
        str(record.n_kept),
        str(record.n_restored),
        str(record.n_evaluated),
        span(record.elapsed_s),
        f"{spared / n_tokens:.1%}" if n_tokens else "-",
        "-" if next_text is None else repr(next_text),
        "-" if record.confidence is None else f"{record.confidence:.3f}",
    ]


@contextmanager
def _first_interrupt(run: Run) -> Iterator[Callable[[], bool]]:
    """Hears the first SIGINT without stopping anything, and says whether it came. The second one stops at once."""

    def heard(_number: int, _frame: object) -> None:
        run.interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield lambda: run.interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(out: Output, inputs: str) -> Iterator[Tell]:
    """A progress bar with rate, reuse and bytes saved."""
    with out.progress("batch") as progress:
        n_lines = _n_lines(inputs)

        def tell(totals: Totals) -> None:
            rate = totals.n_computed / max(totals.elapsed_s, 1e-9)
            told = f"{rate:.1f}/s, {totals.reuse:.0%} reused, {size(totals.saved_bytes)} saved"
            progress(totals.n_there + totals.n_computed, n_lines, told)

        yield tell


def _n_lines(inputs: str) -> int | None:
    """How many inputs there are, where that can be told before they are read."""
    if inputs == "-" or not Path(inputs).is_file():
        return None
    with Path(inputs).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
