"""How long a rank waits for a communication hook, and what is saved of its state."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd
from dualdist.comm_hooks import CommHook, GradBucket, HookedBucket
from dualdist.core.gradients.buckets import Bucket


class Ranks:
    """The other ranks. `deadline`: when a wait has stalled."""

    def __init__(self, deadline: float) -> None:
        self.reported: list[tuple[str, str]] = []
        self.gradient_observer, self.failures = self, dict[str, str]()
        self._deadline = deadline

    def report_failure(self, step: str, text: str) -> None:
        self.reported.append((step, text))

    def deadline(self) -> float:
        return self._deadline


def hook_work(hook: Any, ranks: Ranks) -> tuple[HookedBucket, torch.futures.Future[torch.Tensor]]:
    """Return the started work of a bucket with two elements, and the future that its hook has returned."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    bucket = GradBucket(3, torch.zeros(2), Bucket((), (), 2, torch.float32, torch.device("cpu")), True)
    work = HookedBucket(CommHook(hook, future), bucket, cast(Any, ranks), "step 7")
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


class Slotted:
    __slots__ = ("draws", "group")

    def __init__(self) -> None:
        self.draws, self.group = [random.Random(1), {"numpy": np.random.RandomState(2)}], object()


class Extended(Slotted):
    """It has a `__dict__`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, {1}


def numbers(state: Slotted) -> tuple[float, float]:
    """Return the next number of each generator."""
    python, others = state.draws
    return python.random(), others["numpy"].random_sample()  # type: ignore[attr-defined, index]


def test_the_state_of_a_hook_is_saved_with_the_attributes_of_all_its_classes(tmp_path: Path) -> None:
    saved, loaded = Extended(), Extended()
    saved.steps, saved.seen = 3, {1, 2}
    numbers(saved)
    torch.save(hvd.CommHookState(saved).state_dict(), tmp_path / "state")
    group = loaded.group
    hvd.CommHookState(loaded).load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert (loaded.steps, loaded.seen, loaded.group) == (3, {1, 2}, group)
    assert numbers(loaded) == numbers(saved)
