"""Whether the script of a rank can make another call, judged by what its threads do."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.core.agreement.guard import is_blocked, waiting_for

ONE, OTHER = object(), object()


@pytest.fixture(autouse=True)
def main_thread_waits() -> Iterator[None]:
    with waiting_for(ONE):
        yield


def test_a_signal_handler_may_wait_for_another_call_inside() -> None:
    with waiting_for(OTHER):
        assert is_blocked({OTHER}) and not is_blocked({ONE})
    assert is_blocked({ONE})


def test_every_thread_must_wait_for_a_pending_call() -> None:
    began, go = threading.Event(), threading.Event()

    def wait() -> None:
        with waiting_for(OTHER):
            began.set()
            go.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait)
        began.wait()
        assert is_blocked({ONE, OTHER}) and not is_blocked({ONE})
        go.set()


def test_a_thread_that_has_made_a_call_may_make_another() -> None:
    def call() -> None:
        with waiting_for(OTHER):
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()
        assert not is_blocked({ONE})
    assert is_blocked({ONE})


def test_a_thread_in_backward_waits_for_the_threads_of_autograd() -> None:
    """With CUDA, hooks make their calls in threads that torch has started, while the main thread is in C++."""
    found: list[bool] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def hook() -> None:
        try:
            with waiting_for(OTHER):
                found.append(is_blocked({OTHER}))
            found.append(is_blocked({OTHER}))
        finally:
            ended.release()

    def _engine_run_backward() -> None:  # as in torch/autograd/graph.py
        ended.acquire()

    with waiting_for(None):
        _thread.start_new_thread(hook, ())
        _engine_run_backward()
    assert found == [True, False]
