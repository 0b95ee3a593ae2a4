"""The steps of the demo. Each is checked, and the figures are measured in this run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ckpt.humanize import bytes_, duration, number, plural
from llama_ckpt_cli.demo_model import N_CONTINUED, continuation
from llama_ckpt_cli.tables import Column, Shorten

if TYPE_CHECKING:
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.gc_values import GcPlan
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Checkpoint, RestoreResult
    from llama_ckpt_cli.output import Output

_FIGURES = (
    Column(name="what", shorten=Shorten.END, at_least=20),
    Column(name="cold", right=True),
    Column(name="restored", right=True),
    Column(name="ratio", right=True),
    Column(name="size", right=True),
)


@dataclass
class Story:
    """One run of the demo: what it works on and what it measured."""

    out: Output
    registry: Registry
    engine: LlamaCppEngine
    model: Path
    prompt: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    cold_tokens: list[int] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Runs all steps, then prints the table.

        Raises:
            VerifyFailed: a step failed.
        """
        self.save_once()
        self.restore_elsewhere()
        self.read_padded()
        self.refuse_damaged()
        self.collect()
        self.share_prefix()
        self.report()

    def check(self, what: str, holds: bool, detail: str) -> None:
        """Records one step and whether its result was as expected."""
        self.steps.append({"step": what, "ok": holds, "detail": detail})
        self.out.note(f"  {'ok    ' if holds else 'FAILED'}  {what}: {detail}")

    def save_once(self) -> None:
        """The prompt is evaluated and saved. Saved again, nothing is written."""
        from llama_ckpt.values import SaveOutcome

        with self.out.progress("evaluating the prompt") as progress:
            warm = self.registry.warm(self.engine, self.prompt, label="demo", progress=progress)
        saved = warm.save
        self.check(
            "evaluated and saved",
            saved is not None and saved.outcome is SaveOutcome.SAVED,
            f"{plural(warm.n_evaluated, 'token')} in {duration(warm.elapsed_s)}",
        )
        again = self.registry.save(self.engine, self.prompt)
        row = again.checkpoint
        self.check(
            "saved again",
            again.outcome is SaveOutcome.DEDUPLICATED and again.bytes_written == 0,
            f"{again.outcome}, nothing written, {duration(again.elapsed_s)}",
        )
        self.cold_tokens = continuation(self.engine, self.prompt)
        self.figures |= {
            "n_tokens": warm.n_evaluated,
            "cold_s": (row.prefill_ms or 0) / 1000 if row else None,
            "save_s": saved.elapsed_s if saved else None,
            "deduplicated_s": again.elapsed_s,
            "bytes": row.file_size if row else None,
        }

    def restore_elsewhere(self) -> None:
        """Another process finds the checkpoint, restores it, and continues with the same tokens."""
        order = {
            "store": str(self.registry.store.root),
            "model": str(self.model),
            "prompt": self.prompt,
            "n_ctx": self.engine.n_ctx,
        }
        child = subprocess.run(
            [sys.executable, "-m", "llama_ckpt_cli.demo_restore"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            return self.check("restored by a new process", False, child.stderr.strip()[-300:])
        answer = json.loads(child.stdout)
        self.figures["restored_s"] = answer["elapsed_s"]
        self.check("restored by a new process", answer["outcome"] == "hit", _restored(**answer))
        self.check("continued with the same tokens", answer["tokens"] == self.cold_tokens, repr(answer["text"][:60]))
        return None

    def read_padded(self) -> None:
        """A file with some zero bytes before its header is still read."""
        from llama_ckpt.values import Outcome

        path = self._file()
        data = path.read_bytes()
        for n_zeros in (4, 1):
            _replace(path, bytes(n_zeros) + data)
            result = self.registry.restore(self.engine, self.prompt)
            same = result.outcome is Outcome.HIT and continuation(self.engine, self.prompt) == self.cold_tokens
            self.check(
                f"a file shifted by {plural(n_zeros, 'zero byte')}",
                same,
                f"read all the same, {duration(result.elapsed_s)}",
            )
        _replace(path, data)

    def refuse_damaged(self) -> None:
        """A flipped bit is found before the engine loads the file. The row becomes STALE, and the next save writes again."""
        from llama_ckpt.values import Outcome, SaveOutcome, Status

        self.registry.restore(self.engine, self.prompt)
        row = self._row()
        data = bytearray(self._file().read_bytes())
        data[len(data) // 2] ^= 0x01
        _replace(self._file(), bytes(data))
        refused: RestoreResult = self.registry.restore(self.engine, self.prompt)
        now = self.registry.get(row.id)
        refusal = refused.outcome is Outcome.NO_MATCH and now.status is Status.STALE
        self.check("a file with a flipped bit", refusal, f"refused, row {now.status} ({now.stale_reason})")
        saved = self.registry.save(self.engine, self.prompt)
        self.check(
            "saved again after the damage",
            saved.outcome is SaveOutcome.SAVED,
            "the refusal did not change the engine's state",
        )

    def collect(self) -> None:
        """An orphan and the STALE row's file are planned in a dry run, then deleted. Then everything verifies."""
        from llama_ckpt.collector.collector import Collector
        from llama_ckpt.gc_values import GcKind
        from llama_ckpt.integrity.verify import Verifier, all_ok
        from llama_ckpt.store.store import path_of

        orphan = self.registry.store.root / path_of("0123456789abcdef" * 2)
        orphan.parent.mkdir(parents=True, exist_ok=True)
        orphan.write_bytes(self._file().read_bytes())
        collector = Collector(self.registry.context)
        plan = _plan_now(collector)
        kinds = sorted(item.kind for item in plan.items)
        self.check(
            "gc, dry run",
            kinds == [GcKind.ORPHAN, GcKind.UNREADABLE] and orphan.exists(),
            f"{plural(len(plan.items), 'item')}, {bytes_(plan.size_bytes)}",
        )
        # The damaged file goes to the quarantine first, and from there with the second run.
        reports = [collector.run(plan), collector.run(_plan_now(collector))]
        clean = not any(r.n_failed for r in reports) and not orphan.exists() and not _plan_now(collector).items
        self.check("gc", clean, f"freed {bytes_(sum(r.freed_bytes for r in reports))}")
        verifier = Verifier(self.registry.database, self.registry.store)
        checked = list(verifier.everything())
        intact = len(checked) == 1 and all(all_ok(checks) for _, checks in checked) and not verifier.findings()
        self.check("verify", intact, ", ".join(str(check) for _, checks in checked for check in checks))

    def share_prefix(self) -> None:
        """Another question about the same document: the document is restored, and only the question is evaluated and written."""
        document = self.prompt.rpartition("Question:")[0]
        other = f"{document}Question: on which days did it rain?\nAnswer:"
        self.engine.evaluate(self.engine.token_ids("Good morning."))  # so that the engine no longer holds the document
        warm = self.registry.warm(self.engine, other, label="demo")
        row = warm.save.checkpoint if warm.save else None
        self.check(
            "another question, prefix shared",
            warm.n_restored > warm.n_evaluated,
            _restored(n_restored=warm.n_restored, n_evaluated=warm.n_evaluated, elapsed_s=warm.elapsed_s),
        )
        is_delta = row is not None and row.parent_no is not None
        self.check(
            "saved as a delta",
            is_delta,
            f"{bytes_(row.file_size)} for {plural(row.n_tokens, 'token')}" if row else "not saved",
        )
        tokens = continuation(self.engine, other)
        self.engine.evaluate(self.engine.token_ids(other))
        self.check("continued as a cold run", tokens == continuation(self.engine, other), f"{N_CONTINUED} tokens")
        self.figures |= {"shared_s": warm.elapsed_s, "delta_bytes": row.file_size if row else 0}

    def report(self) -> None:
        """Prints the table.

        Raises:
            VerifyFailed: a step failed.
        """
        from llama_ckpt.errors import VerifyFailed

        f = self.figures
        cold, restored = f["cold_s"], f.get("restored_s")
        ratio = cold / restored if restored else 0.0
        shared, size = f"{cold / f['shared_s']:.0f} x", bytes_(f["bytes"])
        rows = [
            [f"state of {plural(f['n_tokens'], 'token')}", duration(cold), _or_dash(restored), f"{ratio:.0f} x", size],
            ["save, durable", duration(f["save_s"] or 0), "-", "-", size],
            ["save again, deduplicated", "-", duration(f["deduplicated_s"]), "-", bytes_(0)],
            ["another question about it", "-", duration(f["shared_s"]), shared, bytes_(f["delta_bytes"])],
        ]
        value = {"figures": {**f, "ratio": ratio}, "steps": self.steps}
        self.out.result(value, lambda: self.out.table(_FIGURES, rows), [f"{ratio:.0f}"])
        failed = [s for s in self.steps if not s["ok"]]
        if failed:
            raise VerifyFailed(n_failed=len(failed), n_checked=len(self.steps))

    def _row(self) -> Checkpoint:
        found = self.registry.match(self.prompt, fingerprint=self.engine.fingerprint)
        assert found.checkpoint is not None  # noqa: S101 - the step before saw it
        return found.checkpoint

    def _file(self) -> Path:
        return self.registry.store.root / self._row().file_path


def _restored(*, n_restored: int, n_evaluated: int, elapsed_s: float, **_others: object) -> str:
    return f"{plural(n_restored, 'token')} restored, {number(n_evaluated)} evaluated, {duration(elapsed_s)}"


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _plan_now(collector: Collector) -> GcPlan:
    """A plan without grace periods: the demo's registry has no other user."""
    from llama_ckpt.retention.policy import Policy

    return collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True)


def _replace(path: Path, data: bytes) -> None:
    """Replaces the bytes of a file, as a damaged disk would."""
    temporary = path.with_suffix(".demo")
    temporary.write_bytes(data)
    os.replace(temporary, path)  # noqa: PTH105
