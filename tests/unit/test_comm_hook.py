"""How long a rank waits for a communication hook."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd
from dualdist.gradients.comm_hook import CommHook, GradBucket, HookWork


class Ranks:
    """The other ranks. `deadline`: when a wait has stalled."""

    def __init__(self, deadline: float) -> None:
        self.reported: list[tuple[str, str]] = []
        self._deadline = deadline

    def report_failure(self, step: str, text: str) -> None:
        self.reported.append((step, text))

    def failure(self, step: str) -> str | None:
        return None

    def deadline(self) -> float:
        return self._deadline


def hook_work(hook: Any, ranks: Ranks) -> tuple[HookWork, torch.futures.Future[torch.Tensor]]:
    """Return the started work of a bucket with two elements, and the future that its hook has returned."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    work = HookWork(
        CommHook(hook, future), GradBucket(3, torch.zeros(2), (), (), True), cast(Any, ranks), "step 7"
    )
    work.start()
    return work, future


def returned(state: Any, bucket: Any) -> Any:
    return state


def only_starts(state: Any, bucket: Any) -> Any:
    return state


only_starts.__module__, only_starts.__qualname__ = allreduce_hook.__module__, allreduce_hook.__qualname__


def test_a_hook_that_does_not_set_its_future_is_an_error_after_the_stall_timeout() -> None:
    ranks = Ranks(deadline=time.monotonic() - 60)
    work, _ = hook_work(returned, ranks)
    text = "communication hook returned has not set its future of bucket 3 before the stall timeout"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        work.wait()
    assert ranks.reported == [("step 7", f"3 HorovodInternalError: {text}")]


def test_a_hook_that_has_set_its_future_ends_also_after_the_stall_timeout() -> None:
    work, future = hook_work(only_starts, Ranks(deadline=time.monotonic() - 60))
    future.set_result(torch.tensor([1.0, 2.0]))
    work.wait()
    assert work.result is not None and work.result.tolist() == [1.0, 2.0]


def test_waiting_for_a_while_returns_without_an_error_when_there_is_none() -> None:
    work, future = hook_work(only_starts, Ranks(deadline=math.inf))
    work.wait_for(0.01)
    assert not work.done() and work.error is None
    future.set_result(torch.tensor([1.0, 2.0]))
    work.wait_for(60.0)
    assert work.done()
