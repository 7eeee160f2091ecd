"""A signal handler that makes a collective while its thread waits until Horovod accepts a gradient."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import dualdist as hvd

from ..behaviours.test_mismatch import check_next_calls_work
from ..behaviours.test_signal_handlers import interrupted
from ..helpers.world import WORLDS, started

LONGER_THAN_A_WAIT = 1.0
"""Seconds. A thread waits 0.1 s at a time until Horovod accepts an operation."""


@contextlib.contextmanager
def busy_until(event: threading.Event) -> Iterator[None]:
    """Let Horovod's mutex be locked until `event` is set, as while it connects a new process set."""
    import horovod.torch

    from dualdist.backends.horovod import group

    basics = horovod.torch.mpi_ops._basics
    library: Any = basics.MPI_LIB_CTYPES
    basics.MPI_LIB_CTYPES = SimpleNamespace(horovod_number_of_process_sets=event.wait)
    try:
        with group.closed():
            yield
    finally:
        basics.MPI_LIB_CTYPES = library


def sums_where_a_handler_interrupts() -> tuple[list[float], list[float]]:
    """On rank 0 a handler makes the allreduce, inside of its wait in `backward`. Return its result and the gradient."""
    weight = nn.Parameter(torch.zeros(3000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    handled, sums = threading.Event(), []

    def allreduce() -> None:
        handled.set()
        sums.append(hvd.allreduce(torch.full((5000,), 2.0), op=hvd.Sum, name="in a handler"))
        while time.monotonic() < begun + LONGER_THAN_A_WAIT:
            pass

    begun = time.monotonic()
    if hvd.rank() == 0:
        with busy_until(handled), interrupted("has_answered", allreduce):
            weight.sum().backward()
    else:
        handle = hvd.allreduce_async(torch.full((5000,), 2.0), op=hvd.Sum, name="in a handler")
        weight.sum().backward()
        sums.append(hvd.synchronize(handle))
    optimizer.step()
    assert weight.grad is not None
    (total,) = sums
    check_next_calls_work()
    return sorted(set(total.tolist())), sorted(set(weight.grad.tolist()))


def test_a_handler_may_call_a_collective_while_its_thread_waits_for_horovod() -> None:
    with started(*WORLDS["horovod-gloo-2"]) as world:
        assert world.run(sums_where_a_handler_interrupts) == [([4.0], [2.0])] * 2
