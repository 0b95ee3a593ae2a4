"""Work in several threads: all of it is done, or what was done is known."""

from __future__ import annotations

import threading

import pytest

from llama_ckpt.threads import run_parallel


def test_every_item_is_worked_on_once_by_several_threads_at_once():
    meeting = threading.Barrier(4, timeout=30)
    done = {}
    run_parallel(lambda item: (meeting.wait(), item * 2)[1], range(8), 4, done)
    assert done == {item: item * 2 for item in range(8)}


def test_a_failure_is_raised_when_all_is_at_rest_and_what_was_done_is_known():
    begun, done = [], {}

    def work(item):
        begun.append(item)
        if item == 3:
            raise OSError("no disk")
        return item

    with pytest.raises(OSError, match="no disk"):
        run_parallel(work, range(1000), 4, done)
    assert set(done) == set(begun) - {3}
    assert len(begun) < 1000


def test_an_interruption_ends_the_work_and_what_was_done_is_known():
    done = {}

    def work(item):
        if item == 2:
            raise KeyboardInterrupt
        return item

    with pytest.raises(KeyboardInterrupt):
        run_parallel(work, range(5), 1, done)
    assert done == {0: 0, 1: 1}


def test_where_no_thread_can_be_started_the_caller_does_all(monkeypatch):
    def no_more(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    done = {}
    run_parallel(str, range(3), 8, done)
    assert done == {0: "0", 1: "1", 2: "2"}


def test_no_thread_is_left_and_none_keeps_the_interpreter_alive():
    kinds, before = [], threading.active_count()
    meeting = threading.Barrier(3, timeout=30)
    run_parallel(lambda _: (meeting.wait(), kinds.append(threading.current_thread())), range(3), 3, {})
    assert threading.active_count() == before
    assert all(thread.daemon for thread in kinds if thread is not threading.main_thread())


def test_nothing_to_do_is_done():
    run_parallel(str, [], 8, done := {})
    assert done == {}
