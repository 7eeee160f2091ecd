"""Autograd runs the hooks of parameters on different devices in different threads, which it starts in C++."""

from __future__ import annotations

import _thread
import linecache
import re
import sys
import threading
from collections.abc import Callable
from itertools import starmap
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.collectives.reduction import Compressor
from dualdist.core.gradients import arrivals

from ..helpers.ranks import check_next_calls_work
from ..helpers.styles import sgd
from ..helpers.world import everywhere

pytestmark = pytest.mark.only_all(where=lambda world: "mpi" in world)


class OtherThread(Compressor):
    """While the first bucket is sent, another thread completes the gradient of the second one."""

    thread: threading.Thread
    sent: list[int]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> Any:
        cls.sent.append(tensor.numel())
        if len(cls.sent) == 1:
            cls.thread.start()
            cls.thread.join(0.2)
        return tensor, None


@everywhere
def test_each_bucket_is_sent_once_and_in_order() -> None:
    params = [nn.Parameter(torch.zeros(length)) for length in (4, 3, 2)]
    optimizer = sgd(params, groups=[[param] for param in params], compression=OtherThread)
    OtherThread.sent, OtherThread.thread = [], threading.Thread()
    params[2].sum().backward()  # the first backward sends nothing before its end
    optimizer.step()
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for param in params:
        param.grad = torch.full_like(param, mine)
    sync: Any = optimizer._combiner
    OtherThread.sent = []

    @torch.no_grad()  # as autograd calls hooks
    def arrive(number: int) -> None:
        sync._arrivals.hook_of(number)(params[number])

    OtherThread.thread = threading.Thread(target=arrive, args=(0,))
    with mock.patch.object(arrivals, "_queue_callback"):
        arrive(2)
        arrive(1)  # so that the first bucket can be sent
        OtherThread.thread.join()
    assert OtherThread.sent == [2, 3]
    optimizer.synchronize()
    assert [param.grad.tolist() for param in params] == [[mean] * 4, [mean] * 3, [mean] * 2]  # type: ignore[union-attr]


def _engine_run_backward(function: Callable[[], object]) -> None:
    """Run `function`, which raises, in a thread started in C, and wait as the function of this name in torch does."""
    running = _thread.allocate_lock()
    running.acquire()
    with mock.patch.object(sys, "unraisablehook", lambda failed: running.release()):
        _thread.start_new_thread(list, (starmap(function, [()]),))
        assert running.acquire(timeout=20)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_an_error_in_such_a_thread_names_a_line_of_the_training_loop(style: str) -> None:
    layer: Any = nn.Linear(1, 1, bias=False)
    wrapper: Any
    if style == "optimizer":
        wrapper = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
        layer(torch.ones(1)).backward()
        wrapper.step()  # remembered
    else:
        wrapper = hvd.DistributedDataParallel(layer)
        wrapper(torch.ones(1)).backward()  # remembered
    sync = wrapper._combiner
    if hvd.rank() == 0:
        with mock.patch.object(arrivals, "_queue_callback"), torch.no_grad():
            sync._arrivals.hook_of(0)(layer.weight)
            _engine_run_backward(sync._end_of_backward)
    else:
        with pytest.raises(hvd.CollectiveMismatchError) as raised:
            hvd.barrier()
        site = re.search(r"at (.*\.py):(\d+)", str(raised.value))  # of rank 0
        assert site is not None and site[1] == __file__
        assert linecache.getline(__file__, int(site[2])).rstrip().endswith("# remembered")
    check_next_calls_work()
