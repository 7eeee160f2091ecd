"""A bucket that a communication hook combines, and how a rank waits for it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from dualdist.gradients.comm_hook import CommHook, HookQueue, HookWork
from dualdist.gradients.grad_bucket import GradBucket


class NoFailures:
    """No rank reports a failure."""

    def report_failure(self, step: str, text: str) -> None:
        raise AssertionError(text)

    def failure(self, step: str) -> str | None:
        return None


def test_a_limited_wait_ends_with_the_hook_or_with_its_time() -> None:
    may_end = threading.Event()

    def hook(state: Any, bucket: GradBucket) -> Any:
        may_end.wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    bucket = GradBucket(0, torch.ones(3), [], [], is_last=True)
    work = HookWork(CommHook(hook), bucket, NoFailures(), "first")
    HookQueue().submit(work)
    work.wait_for(0.001)
    assert not work.done()
    may_end.set()
    work.wait_for(60.0)
    assert work.done()
    work.wait()
    assert work.result is not None and work.result.tolist() == [2.0] * 3
