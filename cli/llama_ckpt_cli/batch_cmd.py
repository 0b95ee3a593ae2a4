"""The command that computes many inputs: batch. Inputs and results are JSON Lines."""

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

from llama_ckpt.humanize import bytes_, duration, number, plural
from llama_ckpt_cli.batch_files import Line, Results, read_lines
from llama_ckpt_cli.help_format import USE
from llama_ckpt_cli.invocation import Invocation, command
from llama_ckpt_cli.options import MAX_COUNT, ContextSize, FlashAttention, Gguf, KvType, Label, Threads
from llama_ckpt_cli.output import plain
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.engine import Engine
    from llama_ckpt.registry import Registry
    from llama_ckpt.warm.batch import BatchInput, BatchRecord
    from llama_ckpt_cli.output import Output

INTERRUPTED = 130
N_SHOWN = 10  # of the first and of the last inputs in the table

ReportProgress = Callable[["Totals"], None]

Inputs = Annotated[
    str,
    typer.Argument(help="JSON Lines: strings, or objects with a text or tokens; - reads stdin.", metavar="INPUTS"),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        help="File for the results, JSON Lines. Inputs that have a result in it are skipped, even if you changed the model or"
        " an option: use a new file then.",
        metavar="FILE",
    ),
]
Save = Annotated[
    str,
    typer.Option(
        "--save",
        help="What to save as a checkpoint: prefix (what several inputs share), full (every input) or none.",
        metavar="WHAT",
    ),
]
SharedPrefix = Annotated[
    str | None,
    typer.Option(
        "--shared-prefix",
        help="File with a text (UTF-8) that the inputs already start with: it is evaluated and saved once. It is not added to"
        " the inputs.",
        metavar="FILE",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, max=MAX_COUNT, help="Compute at most this many inputs.", metavar="N")
]
Embedding = Annotated[bool, typer.Option("--embedding", help="Write the embedding vectors of an embedding model.")]


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "batch", group=USE)(batch)


def batch(
    invocation: Invocation,
    *,
    inputs: Inputs,
    model: Gguf,
    output: OutputFile,
    save: Save = "prefix",
    shared_prefix: SharedPrefix = None,
    label: Label = None,
    limit: Limit = None,
    embedding: Embedding = False,
    n_ctx: ContextSize = 8192,
    flash_attn: FlashAttention = False,
    kv_type: KvType = "f16",
    threads: Threads = None,
) -> None:
    """Compute many inputs, each from its longest available prefix. If you run it again, it continues where it stopped."""
    from llama_ckpt_cli.inputs import load_engine

    run = Run(invocation.out, inputs, {"save": save, "label": label, "shared_prefix": _text_of(shared_prefix)})
    with Results(output) as results, invocation.registry() as registry:
        of_engine = {"n_ctx": n_ctx, "flash_attn": flash_attn, "kv_type": kv_type, "threads": threads}
        engine = load_engine(invocation.out, model, embedding=embedding, **of_engine)  # type: ignore[arg-type]
        run.compute(registry, engine, results, limit)
    run.report(output)


def _text_of(file: str | None) -> str | None:
    from llama_ckpt_cli.inputs import input_text

    return None if file is None else input_text(None, file)


_COLUMNS = (
    Column(name="line", right=True),
    Column(name="id", shorten=Shorten.MIDDLE, at_least=10),
    Column(name="outcome"),
    Column(name="kept", right=True, drop_rank=1),
    Column(name="restored", right=True, drop_rank=3),
    Column(name="evaluated", right=True),
    Column(name="time", right=True),
    Column(name="reuse", right=True),
    Column(name="next", shorten=Shorten.END, at_least=8, drop_rank=4),
    Column(name="confidence", right=True, drop_rank=2),
)


@dataclass
class Totals:
    """The figures of a run so far."""

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
        """Counts the save of a record, which has ended."""
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
    """One run of the command: reads, computes, writes, and keeps the lines that the table shows."""

    def __init__(self, out: Output, inputs: str, options: dict[str, Any]) -> None:
        self.out = out
        self.inputs = inputs
        self.options = options
        self.totals = Totals()
        self.interrupted = False
        self._first: list[list[str]] = []
        self._last: deque[list[str]] = deque(maxlen=N_SHOWN)

    def compute(self, registry: Registry, engine: Engine, results: Results, limit: int | None) -> None:
        """Computes the inputs that have no result yet, and writes a result for each. After SIGINT it finishes the current input.

        Raises:
            BadInput: the inputs cannot be read, or the results file belongs to other inputs.
        """
        started = time.perf_counter()
        in_flight: list[BatchRecord] = []
        lines, waiting = itertools.islice(self._to_compute(results), limit), deque[Line]()
        given = self._given(lines, waiting)
        with (
            _first_interrupt(self) as interrupted,
            _bar(self.out, self.inputs) as report,
            closing(registry.batch(engine, given, **self.options)) as records,
        ):
            for record in records:
                line = waiting.popleft()
                result = _result(line, record, engine)
                results.write(result)
                self._record(line, record, result["next_text"])
                in_flight = self._count_saves([*in_flight, record])
                self.totals.elapsed_s = time.perf_counter() - started
                report(self.totals)
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
        """The inputs for the library. A line that is not a valid input is not valid for the library either, and gets a record."""
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

    def _record(self, line: Line, record: BatchRecord, next_text: str | None) -> None:
        self.totals.add(record)
        row = _row(line, record, next_text)
        if len(self._first) < N_SHOWN:
            self._first.append(row)
        else:
            self._last.append(row)

    def report(self, output: Path) -> None:
        """Prints the table and the totals. Failures then decide the exit code.

        Raises:
            BadInput: an input failed.
            typer.Exit: it was interrupted.
        """
        from llama_ckpt.errors import BadInput

        totals = self.totals
        self.out.result(totals.value(), self._table, [str(totals.n_computed)])
        if totals.problem is not None:
            problems = plural(totals.n_problems, "problem")
            self.out.note(f"{problems} with checkpoints, which affect no result; the first: {totals.problem}")
        if self.interrupted:
            self.out.note("interrupted; run the same command again to continue")
            raise typer.Exit(INTERRUPTED)
        if n_failed := totals.outcomes["failed"]:
            reason = f"{plural(n_failed, 'line')} could not be computed; {output} has the reasons"
            raise BadInput(what="inputs", value=self.inputs, reason=reason)

    def _table(self) -> None:
        totals = self.totals
        n_between = totals.n_computed - len(self._first) - len(self._last)
        between = [["…", f"({number(n_between)} more)", *[""] * (len(_COLUMNS) - 2)]] if n_between else []
        self.out.table(_COLUMNS, [*self._first, *between, *self._last])
        outcomes = ", ".join(f"{number(totals.outcomes[name])} {name}" for name in ("hit", "partial", "miss", "failed"))
        self.out.fields(
            {
                "inputs": f"{number(totals.n_computed)}: {outcomes}; {number(totals.n_there)} already had a result",
                "tokens evaluated": number(totals.n_evaluated),
                "tokens restored": number(totals.n_restored),
                "tokens kept": number(totals.n_kept),
                "reuse": f"{totals.reuse:.1%}",
                "saved": f"{plural(totals.n_saved, 'checkpoint')}, {bytes_(totals.saved_bytes)}",
                "took": duration(totals.elapsed_s),
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
        number(line.number),
        str(line.label if line.id is None else line.id) if line.id is not None or line.label else "-",
        record.outcome.value,
        number(record.n_kept),
        number(record.n_restored),
        number(record.n_evaluated),
        duration(record.elapsed_s),
        f"{spared / n_tokens:.1%}" if n_tokens else "-",
        "-" if next_text is None else repr(next_text),
        "-" if record.confidence is None else f"{record.confidence:.3f}",
    ]


@contextmanager
def _first_interrupt(run: Run) -> Iterator[Callable[[], bool]]:
    """Records the first SIGINT without stopping anything; gives a function that says whether it came. The second one stops the
    process immediately.
    """

    def on_interrupt(_number: int, _frame: object) -> None:
        run.interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: run.interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(out: Output, inputs: str) -> Iterator[ReportProgress]:
    """A progress bar with rate, reuse and bytes saved."""
    with out.progress("batch") as progress:
        n_lines = _n_lines(inputs)

        def report(totals: Totals) -> None:
            rate = totals.n_computed / max(totals.elapsed_s, 1e-9)
            figures = f"{rate:,.1f}/s, {totals.reuse:.0%} reused, {bytes_(totals.saved_bytes)} saved"
            progress(totals.n_there + totals.n_computed, n_lines, figures)

        yield report


def _n_lines(inputs: str) -> int | None:
    """How many inputs there are, if that can be counted before they are read."""
    if inputs == "-" or not Path(inputs).is_file():
        return None
    with Path(inputs).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
