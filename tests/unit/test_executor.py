"""Steps in other threads: their results, their limits of time, and a thread that repeats a step."""

from __future__ import annotations

import threading

import pytest

from dualdist.core.process import Worker, in_thread, in_time

SECONDS = 30.0


def test_a_step_in_another_thread_returns_or_raises_there() -> None:
    assert in_thread(threading.get_ident).result(SECONDS) != threading.get_ident()
    assert in_time(lambda: 3, SECONDS) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        in_time(lambda: int("x"), SECONDS)


def test_a_step_that_takes_too_long_is_abandoned() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not end in 0\.05 s"):
        in_time(never.wait, 0.05)
    never.set()


def test_a_worker_repeats_its_step_after_each_wake_and_starts_again_after_a_stop() -> None:
    work, done = [3, 2, 1], threading.Semaphore(0)

    def step() -> float | None:
        if not work:
            return None
        work.pop()
        done.release()
        return 0.0

    worker = Worker(step, "test")
    worker.wake()
    for _ in range(2):
        for _ in range(3):
            assert done.acquire(timeout=SECONDS)
        work.extend([2, 1, 0])
        worker.wake()
    for _ in range(3):
        assert done.acquire(timeout=SECONDS)
    worker.stop(SECONDS)
    assert "test" not in [thread.name for thread in threading.enumerate()]
    work.append(1)
    worker.wake()
    assert done.acquire(timeout=SECONDS)
    worker.stop(SECONDS)
