"""One process of a soak: `python -m support.soak_child ORDER-AS-JSON` works at random until its time is over.

It writes a line of JSON for each operation, [name and result, problems], so that a process that is killed leaves what it did.
A problem is whatever no documentation allows: a wrong state, an undocumented error, a missing or damaged file.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from support.causal_engine import CausalEngine, state_of

from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.collector import lease
from llama_ckpt.collector.collector import Collector
from llama_ckpt.collector.purge import Purge, Purger
from llama_ckpt.errors import (
    BadInput,
    Busy,
    Conflict,
    EngineStateMismatch,
    FileMissing,
    Incompatible,
    LlamaCkptError,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from llama_ckpt.gc_values import GcOutcome
from llama_ckpt.integrity.reconcile import Reconciler
from llama_ckpt.integrity.verify import Verifier
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Checkpoint, Outcome, Status

N_FAMILIES, N_LABELS = 6, 12
GHOST_GRACE_S = 6.0  # longer than any save takes here: a file whose row is on its way is no orphan
LEASE_S = 4.0  # of gc, so that a killed run does not block the others for most of the soak

# What a verb may raise since other processes remove, flatten and purge the same checkpoints.
_GONE = (NotFound, FileMissing, BadInput)
DOCUMENTED: dict[str, tuple[type[LlamaCkptError], ...]] = {
    "save": (StoreFull,),
    "merge": (*_GONE, Incompatible, EngineStateMismatch),
    "remove": (*_GONE, Conflict),
    "flatten": (*_GONE, Conflict, StoreFull),
    "pin": _GONE,
    "prune": (Busy,),
    "gc": (Busy,),
    "purge": (Busy, StoreUnavailable),  # it proves that nothing is left, and another process may have saved again
}


class WatchedEngine(CausalEngine):
    """Calls `wrong` when it is given a state that is not that of its tokens."""

    n_batch = 512

    def __init__(self, wrong: Callable[[str], None]):
        super().__init__()
        self._wrong = wrong

    def load(self, state, token_ids):
        if bytes(state) != state_of(token_ids):
            self._wrong(f"WRONG STATE of {len(token_ids)} tokens")
        super().load(state, token_ids)


def draw_input(choice: random.Random) -> list[int]:
    """Token ids of one family: many inputs share a prefix with others, at several depths."""
    family = choice.randrange(N_FAMILIES) * 10_000
    ids = [family + i for i in range(choice.choice([260, 300, 300, 300]))]
    for level in range(1, 1 + choice.randrange(4)):
        branch = family + 1000 * level + 100 * choice.randrange(3)
        ids += [branch + i for i in range(choice.choice([20, 40, 90]))]
    return ids


class Worker:
    """The verbs of a soak. Each gives a word for what became of it."""

    WEIGHTS = {
        "warm": 10.0,
        "save": 6.0,
        "restore": 10.0,
        "layers": 1.0,
        "merge": 2.0,
        "match": 4.0,
        "remove": 2.0,
        "pin": 0.5,
        "flatten": 2.0,
        "prune": 1.0,
        "unprune": 1.0,
        "gc": 1.5,
        "purge": 0.5,
        "repair": 0.7,
    }

    def __init__(self, registry: Registry, seed: int, max_bytes: int):
        self.registry, self.choice, self.max_bytes = registry, random.Random(seed), max_bytes
        self.problems: list[str] = []
        self.engine = WatchedEngine(self.problems.append)
        self.collector = Collector(registry.context)

    def step(self) -> tuple[str, list[str]]:
        """Does one operation; gives its name and result, and its problems."""
        self.problems.clear()
        verb = self.choice.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0]
        try:
            result = str(getattr(self, f"_{verb}")())
        except LlamaCkptError as error:
            result = type(error).__name__
            if not isinstance(error, DOCUMENTED.get(verb, ())):
                self.problems.append(f"{verb}: {result}: {error}")
        except Exception:  # noqa: BLE001 - any error is a result of the soak
            result = "undocumented error"
            self.problems.append(f"{verb}: {traceback.format_exc()[-1500:]}")
        return f"{verb}: {result}", [problem[:1500] for problem in self.problems]

    def _row(self, wanted: Callable[[Checkpoint], bool] = lambda _: True) -> Checkpoint | None:
        found = [row for row in self.registry.list(status=Status.ACTIVE, at_most=60) if wanted(row)]
        return self.choice.choice(found) if found else None

    def _label(self) -> str:
        return f"label {self.choice.randrange(N_LABELS)}"

    # -- use -----------------------------------------------------------------------------------------------------------

    def _warm(self) -> str:
        ids = draw_input(self.choice)
        if self.choice.random() < 0.5:
            self.engine.forget()
        expiry = self.choice.choice([None, None, 2.0])
        done = self.registry.warm(self.engine, ids, label=self._label(), wait_s=3, expires_in_s=expiry)
        if list(self.engine.held) != ids:
            self.problems.append("warm: the engine does not hold the input")
        if done.problem is not None:
            self.problems.append(f"warm: {type(done.problem).__name__}: {done.problem}")
        return "restored" if done.n_restored else "kept" if done.n_kept else "evaluated"

    def _save(self) -> str:
        ids = draw_input(self.choice)
        self.engine.evaluate(ids)
        return self.registry.save(self.engine, ids, label=self._label()).outcome.value

    def _restore(self) -> str:
        return self._restored(draw_input(self.choice))

    def _restored(self, ids: list[int], **options) -> str:
        done = self.registry.restore(self.engine, ids, **options)
        if done.outcome is Outcome.FAILED:
            self.problems.append(f"restore: {done.error}")
        return done.outcome.value

    def _layers(self) -> str:
        ids = draw_input(self.choice)
        self.engine.evaluate(ids)
        return self._restored(ids, layers=[0])

    def _merge(self) -> str:
        row = self._row()
        if row is None:
            return "none"
        ids = token_ids_of(self.registry.context, row)
        self.engine.evaluate(ids[: len(ids) // 2])
        self.registry.merge(self.engine, row)
        return "merged"

    def _match(self) -> str:
        return self.registry.match(draw_input(self.choice), fingerprint=self.engine.fingerprint).outcome.value

    # -- clean ---------------------------------------------------------------------------------------------------------

    def _remove(self) -> str:
        row = self._row()
        return "none" if row is None else self.registry.remove(row.id).status.value

    def _pin(self) -> str:
        row = self._row()
        if row is None:
            return "none"
        changed = self.registry.unpin(row.id) if row.pinned or self.choice.random() < 0.5 else self.registry.pin(row.id)
        return "pinned" if changed.pinned else "unpinned"

    def _flatten(self) -> str:
        row = self._row(lambda row: row.parent_no is not None)
        return "none" if row is None else self.registry.flatten(row.id).status.value

    def _prune(self) -> str:
        policy = Policy(max_idle_s=3.0, max_bytes=self.max_bytes // 2)
        return "some" if self.collector.prune(self.collector.plan_prune(policy)) else "none"

    def _unprune(self) -> str:
        reconciler = Reconciler(self.registry.context)
        pruned = reconciler.pruned_since(self.registry.clock_us() - 3_000_000)[:4]
        return ", ".join(sorted({result.outcome.value for result in reconciler.unprune(pruned)})) or "none"

    def _gc(self) -> str:
        policy = Policy(stale_grace_s=0.5, ghost_grace_s=GHOST_GRACE_S)
        report = self.collector.run(self.collector.plan(policy, skip_grace=self.choice.random() < 0.5))
        failed = [result for result in report.done if result.outcome is GcOutcome.FAILED]
        self.problems += [f"gc: {result.item.path}: {result}" for result in failed]
        return f"{len(failed)} failed"

    def _purge(self) -> str:
        Purger(self.registry.context).run(Purge(label=self._label()))
        return "purged"

    def _repair(self) -> str:
        findings = Verifier(self.registry.database, self.registry.store).findings()
        bad = [finding for finding in findings if finding.kind.value in ("missing", "corrupt")]
        self.problems += [f"finding: {finding.kind}: {finding.path}: {finding.detail}" for finding in bad]
        orphans = [finding for finding in findings if finding.kind.value == "orphan"]
        Reconciler(self.registry.context).apply(orphans[:2])
        return ", ".join(sorted({finding.kind.value for finding in findings})) or "nothing"


def main() -> None:
    order = json.loads(sys.argv[1])
    lease._LEASE_S = LEASE_S
    end, max_bytes = time.monotonic() + order["seconds"], order["max_bytes"]
    with (
        Path(order["log"]).open("w", encoding="utf-8") as lines,
        Registry.open(order["url"], order["store"], policy=Policy(max_bytes=max_bytes)) as registry,
    ):
        worker = Worker(registry, order["seed"], max_bytes)
        while time.monotonic() < end:
            lines.write(json.dumps(worker.step()) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
