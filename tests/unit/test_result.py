"""A result that another thread computes, waited for while signals arrive."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from dualdist.core.agreement.call import Call
from dualdist.core.agreement.channel import Request
from dualdist.core.agreement.connections import ACTIVE
from dualdist.core.collectives.join import BARRIER

Job = tuple[Request[object], Callable[[], object]]
jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()


def request() -> Request[object]:
    return Request(ACTIVE, Call(BARRIER))


def compute(function: Callable[[], object]) -> object:
    """Compute `function()` in the other thread."""
    made = request()
    jobs.put((made, function))
    return made.get()


@pytest.fixture(autouse=True)
def other_thread() -> object:
    def work() -> None:
        while (job := jobs.get()) is not None:
            made, function = job
            try:
                made.end(function())
            except ZeroDivisionError as error:
                made.end(error=error)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    jobs.put(None)
    thread.join()


def test_the_result_or_exception_reaches_the_waiting_thread() -> None:
    assert compute(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        compute(lambda: 1 // 0)
    result = request()
    assert not result.ended
    result.end(7)
    assert result.ended and (result.get(), result.get()) == (7, 7)
    result.end(error=ZeroDivisionError())
    assert result.get() == 7


@pytest.mark.timeout(60, method="thread")  # the other method is the timer that this test uses
def test_a_signal_handler_may_wait_for_another_result_at_any_moment() -> None:
    answers = []
    is_over = False

    def handle(number: int, frame: object) -> None:
        answers.append(compute(lambda: "handler"))
        if not is_over:
            signal.setitimer(signal.ITIMER_REAL, 0.0002)

    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0002)
    try:
        while len(answers) < 500:
            assert compute(lambda: "main") == "main"
    finally:
        is_over = True  # a handler that runs from here on does not start the timer again
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert set(answers) == {"handler"}


@pytest.mark.timeout(60)
def test_the_handler_of_a_signal_that_another_thread_received_runs_during_the_wait() -> None:
    result, ended = request(), threading.Event()
    main = threading.get_ident()

    def receive() -> None:
        while sys._current_frames()[main].f_code is not Request.get.__code__:
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        ended.wait()

    former = signal.signal(signal.SIGUSR2, lambda number, frame: result.end(7))
    thread = threading.Thread(target=receive)
    thread.start()
    try:
        assert result.get() == 7
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR2, former)
