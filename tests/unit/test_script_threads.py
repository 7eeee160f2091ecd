"""Whether the script of a rank can make another call, judged by what its threads do."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.core.agreement.guard import awaited, is_blocked, waiting_for

ONE, OTHER = object(), object()


@pytest.fixture(autouse=True)
def main_thread_waits() -> Iterator[None]:
    with waiting_for(ONE):
        yield


class Held:
    """A thread that runs code of this file, until `end`. request: what it waits for."""

    def __init__(self, request: object | None = None) -> None:
        self._request = request
        self._began, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._began.wait()

    def _run(self) -> None:
        if self._request is None:
            self._hold()
        else:
            with waiting_for(self._request):
                self._hold()

    def _hold(self) -> None:
        self._began.set()
        self._go.wait()

    def end(self) -> None:
        self._go.set()
        self._thread.join()


def test_a_script_is_blocked_while_its_only_thread_waits_for_a_pending_call() -> None:
    assert is_blocked({ONE}) and is_blocked({ONE, OTHER}) and not is_blocked({OTHER})
    assert awaited() == {ONE}


def test_a_signal_handler_may_wait_for_another_call_inside() -> None:
    with waiting_for(OTHER):
        assert is_blocked({OTHER}) and not is_blocked({ONE})
    assert is_blocked({ONE})


def test_a_thread_that_runs_code_of_the_script_can_make_a_call_until_it_ends() -> None:
    held = Held()
    assert not is_blocked({ONE})
    held.end()
    assert is_blocked({ONE})


def test_every_thread_must_wait_for_a_pending_call() -> None:
    held = Held(OTHER)
    assert is_blocked({ONE, OTHER}) and not is_blocked({ONE})
    held.end()


def test_idle_threads_of_a_pool_make_no_calls() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert is_blocked({ONE})


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
