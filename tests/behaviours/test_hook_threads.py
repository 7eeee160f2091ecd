"""Autograd runs the hooks of parameters on different devices in different threads."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import torch
from torch import nn

import dualdist as hvd
from dualdist.collectives.compression import Compressor
from dualdist.gradients import grad_sync

from ..helpers.world import everywhere


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
    small, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([large, small], lr=1.0), groups=[[large], [small]], compression=OtherThread
    )
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    small.grad, large.grad = torch.full((2,), mine), torch.full((3,), mine)
    sync: Any = optimizer._combiner
    OtherThread.sent = []
    OtherThread.thread = threading.Thread(target=sync._on_gradient, args=(0, large))
    with mock.patch.object(grad_sync, "_queue_callback"):
        sync._on_gradient(1, small)
        OtherThread.thread.join()
    assert OtherThread.sent == [2, 3]
    optimizer.synchronize()
    assert small.grad.tolist() == [mean] * 2 and large.grad.tolist() == [mean] * 3
