"""Saving while an engine generates, and what Ctrl-C does to it: real signals to a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest
from support import child
from support.causal_engine import CausalEngine, state_of

from llama_ckpt.errors import BadInput, StoreFull
from llama_ckpt.values import Outcome, SaveOutcome

PROMPT = list(range(1, 21))

posix = pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT can be sent to one process")


@pytest.fixture
def engine():
    made = CausalEngine()
    made.evaluate(PROMPT)
    return made


def generate(engine, n_tokens):
    """Tokens as `Llama.generate` yields them: the one that is yielded is not evaluated yet."""
    for token in range(1000, 1000 + n_tokens):
        yield token
        engine.evaluate([*engine.held, token], n_kept=len(engine.held))


def lengths(registry):
    return sorted(row.n_tokens for row in registry.list())


# -- every so many tokens ------------------------------------------------------------------------------------------------------


def test_generated_tokens_are_saved_every_so_many_and_at_the_end(registry, engine):
    with registry.autosave(engine, every=4, label="chat") as autosave:
        assert list(autosave.along(generate(engine, 10))) == list(range(1000, 1010))
    assert lengths(registry) == [24, 28, 30]
    assert autosave.saved.checkpoint.n_tokens == 30
    assert {row.label for row in registry.list()} == {"chat"}
    other = CausalEngine()
    back = registry.restore(other, engine.held)
    assert back.outcome is Outcome.HIT
    assert other.state == state_of([*PROMPT, *range(1000, 1010)])


def test_it_is_a_stopping_criterion_that_never_stops_by_itself(registry, engine):
    with registry.autosave(engine, every=1000) as autosave:
        for _ in generate(engine, 3):
            assert autosave(engine.held, None) is False
    assert lengths(registry) == [23], "at the end"


def test_another_prompt_within_the_block_starts_the_count_anew(registry, engine):
    with registry.autosave(engine, every=4) as autosave:
        list(autosave.along(generate(engine, 5)))
        engine.evaluate(PROMPT[:8])
        list(autosave.along(generate(engine, 5)))
    assert lengths(registry) == [12, 13, 24]


def test_an_exception_in_the_block_goes_on_and_the_tokens_so_far_are_saved(registry, engine):
    def fails_at_the_third(token):
        return token // (1002 - token)

    with pytest.raises(ZeroDivisionError), registry.autosave(engine, every=1000) as autosave:
        list(map(fails_at_the_third, autosave.along(generate(engine, 5))))
    assert lengths(registry) == [22]


def test_an_engine_that_holds_nothing_at_the_end_saves_nothing(registry):
    with registry.autosave(CausalEngine(), every=4) as autosave:
        pass
    assert (autosave.saved, autosave.problem, lengths(registry)) == (None, None, [])


def test_a_save_that_fails_does_not_end_the_generation_and_is_told(registry, engine, monkeypatch, caplog):
    def full(*_):
        raise StoreFull(needed=1, path="store", reason="none")

    with registry.autosave(engine, every=4) as autosave:
        stream = autosave.along(generate(engine, 10))
        monkeypatch.setattr(type(registry.store), "write", full)
        for token in stream:
            if token == 1006:
                monkeypatch.undo()
    assert isinstance(autosave.problem, StoreFull)
    assert "24 tokens were not saved, the generation continues" in caplog.text
    assert (lengths(registry), autosave.saved.outcome) == ([28, 30], SaveOutcome.SAVED)


@pytest.mark.parametrize("every", [0, -1])
def test_a_distance_that_is_none_is_refused(registry, engine, every):
    with pytest.raises(BadInput, match=f"every: {every} cannot be used: give the tokens between two saves"):
        registry.autosave(engine, every=every)


# -- Ctrl-C --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(registry):
    """Starts a generating process; its answers are read line by line."""
    running = []

    def started(**order):
        order = {"every": 1000, "n_tokens": 50, **order}
        url = registry.database.url.render_as_string(hide_password=False)
        line = json.dumps({"database_url": url, "store": str(registry.store.root), **order})
        process = subprocess.Popen(
            [sys.executable, "-m", "support.generating", line],
            env=child.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


def up_to(process, token):
    """Lets it go on until it has told this token."""
    while (line := process.stdout.readline().strip()) != str(token):
        assert line, process.stderr.read()
        process.stdin.write("\n")


def ended(process):
    """Its exit code as a shell tells it, and what it wrote yet."""
    out, err = process.communicate("\n" * 60, timeout=60)
    code = process.returncode
    return (128 - code if code < 0 else code), out.splitlines(), err


@posix
def test_at_ctrl_c_the_token_in_flight_is_finished_the_state_saved_and_the_terminal_says_where(registry, start):
    process = start()
    up_to(process, 1004)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    (row,) = registry.list()
    assert (code, out, row.n_tokens) == (130, ["handler is back"], 24)
    assert f"interrupted: 24 tokens are saved as checkpoint {row.id} in {registry.store.root / row.file_path}" in err
    engine = CausalEngine()
    assert registry.restore(engine, [*PROMPT, *range(1000, 1004)]).outcome is Outcome.HIT


@posix
def test_a_second_ctrl_c_stops_at_once_and_what_was_saved_before_stays(registry, start):
    process = start(every=2)
    up_to(process, 1005)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 130
    assert "went on" not in out
    assert {22, 24} <= set(lengths(registry)) <= {22, 24, 25}
    assert "KeyboardInterrupt" in err


@posix
def test_a_handler_of_the_programs_own_hears_the_signal_after_the_state_is_saved_and_is_put_back(registry, start):
    process = start(handler="own")
    up_to(process, 1004)
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    assert (code, out) == (0, ["own handler", "went on", "handler is back"])
    assert lengths(registry) == [24]


@posix
def test_a_process_that_ignores_ctrl_c_goes_on_to_its_end(registry, start):
    process = start(handler="ignore", n_tokens=8)
    up_to(process, 1004)
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    assert (code, out) == (0, ["1005", "1006", "1007", "went on", "handler is back"])
    assert lengths(registry) == [28]


def test_outside_the_main_thread_signals_are_left_alone(registry, engine):
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with registry.autosave(engine, every=4) as autosave:
            seen.append(signal.getsignal(signal.SIGINT))
            list(autosave.along(generate(engine, 4)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert lengths(registry) == [24]
