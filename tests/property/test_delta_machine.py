"""A registry under random saves, restores, removals, prunes, collections, interrupts and reopenings: what holds at every step."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.links import wrong_links
from support.sample_engine import TokenEngine

from llama_ckpt.collector.collector import Collector
from llama_ckpt.errors import BadInput
from llama_ckpt.integrity.verify import Verifier, all_ok
from llama_ckpt.registry import Registry
from llama_ckpt.retention.policy import Policy
from llama_ckpt.values import Outcome, SaveOutcome, Status

FLOOR = 3
STEMS = st.sampled_from([[1] * 6, [1, 2, 2, 1, 1, 2, 1, 2, 2], [2] * 12])
SEQUENCES = st.tuples(STEMS, st.lists(st.sampled_from([1, 2]), min_size=1, max_size=8)).map(lambda p: p[0] + p[1])
STEPS = st.sampled_from(["created", "written", "staged", "renamed", "inserted", "committed"])


class Machine(RuleBasedStateMachine):
    @initialize()
    def open(self):
        self.folder = Path(tempfile.mkdtemp(prefix="llama-ckpt-machine-"))
        self.engine = TokenEngine()
        self.registry = self.opened()

    def opened(self):
        return Registry.open(store=self.folder / "store", min_match_tokens=FLOOR)

    def teardown(self):
        if hasattr(self, "registry"):
            self.registry.close()
            shutil.rmtree(self.folder)

    def active(self):
        return self.registry.list(status=Status.ACTIVE)

    @rule(ids=SEQUENCES)
    def save(self, ids):
        self.engine.evaluate(ids)
        assert self.registry.save(self.engine, ids).outcome in (SaveOutcome.SAVED, SaveOutcome.DEDUPLICATED)
        again = self.registry.save(self.engine, ids)
        assert (again.outcome, again.bytes_written) == (SaveOutcome.DEDUPLICATED, 0)

    @rule(ids=SEQUENCES)
    def restore(self, ids):
        """The engine refuses a state that is not byte for byte its own."""
        known = {tuple(self.ids_of(row)) for row in self.active()}
        self.engine.evaluate([9])
        back = self.registry.restore(self.engine, ids)
        assert back.outcome in (Outcome.HIT, Outcome.NO_MATCH), back.reason
        assert back.outcome is Outcome.HIT or tuple(ids) not in known
        if back.outcome is Outcome.HIT:
            assert self.engine.held.tolist() == ids[: len(self.engine.held)]

    def ids_of(self, row):
        from llama_ckpt.checkpoints.search import token_ids_of

        return token_ids_of(self.registry.context, row).tolist()

    @precondition(lambda self: self.active())
    @rule(which=st.integers(0, 99))
    def remove(self, which):
        rows = self.active()
        row = rows[which % len(rows)]
        needed = any(other.parent_no == row.ckpt_no for other in rows)
        try:
            self.registry.remove(row.id)
            assert not needed
        except BadInput:
            assert needed

    @precondition(lambda self: self.active())
    @rule(which=st.integers(0, 99))
    def flatten(self, which):
        rows = self.active()
        whole = self.registry.flatten(rows[which % len(rows)].id)
        assert (whole.parent_no, whole.start_token, whole.status) == (None, 0, Status.ACTIVE)

    @rule(most=st.integers(1, 4))
    def prune(self, most):
        collector = Collector(self.registry.context)
        collector.prune(collector.plan_prune(Policy(max_count=most)))

    @rule()
    def collect(self):
        collector = Collector(self.registry.context)
        force = self.registry.registry_id
        report = collector.run(collector.plan(Policy(stale_grace_s=0, ghost_grace_s=0), skip_grace=True, force=force))
        assert report.n_failed == 0
        assert list(Verifier(self.registry.database, self.registry.store).ghosts()) == []

    @rule(ids=SEQUENCES, step=STEPS)
    def interrupt(self, ids, step):
        """A save that Ctrl-C ends leaves nothing behind: neither a temporary nor a file without a row."""

        def hook(now):
            if now == step:
                raise KeyboardInterrupt

        dying = Registry(replace(self.registry.context, hook=hook))
        self.registry.store._hook = hook
        self.engine.evaluate(ids)
        try:
            dying.save(self.engine, ids)
        except KeyboardInterrupt:
            pass
        finally:
            self.registry.store._hook = lambda _step: None
        assert list(Verifier(self.registry.database, self.registry.store).ghosts()) == []
        self.reopen()

    @rule()
    def reopen(self):
        self.registry.close()
        self.registry = self.opened()

    @invariant()
    def every_active_row_is_whole_and_stands_on_active_ones(self):
        if not hasattr(self, "registry"):
            return
        verifier = Verifier(self.registry.database, self.registry.store)
        assert all(all_ok(verifier.checkpoint(row)) for row in self.active())
        assert wrong_links(self.registry) == []


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
