"""Collectives are ordered with the streams of the thread that calls them. The device is a double that records."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist import accelerator
from dualdist.backends.base import Work
from dualdist.backends.through_host import ThroughHost
from dualdist.world.context import current

from ..helpers.recorded_streams import RecordedStreams, recorded_streams
from ..helpers.world import everywhere

COUNT = 5000
"""Too many numbers to be sent with the agreement."""


@contextlib.contextmanager
def device() -> Iterator[RecordedStreams]:
    """Record streams, and on which of them an allreduce starts."""
    group = current().channels[0].group
    allreduce = group.allreduce_
    with recorded_streams() as streams, pytest.MonkeyPatch.context() as patch:

        def recorded(tensor: torch.Tensor, op: int, tag: str = "") -> Work:
            streams.add("reduces", streams.current_stream(tensor.device))
            return allreduce(tensor, op, tag)

        patch.setattr(group, "allreduce_", recorded)
        yield streams


@everywhere
def test_an_asynchronous_call_has_its_own_stream_after_the_callers_and_before_the_next_work() -> None:
    mine = torch.ones(COUNT)
    with device() as streams:
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        total = hvd.synchronize(handle)
    assert total[0] == hvd.size()
    assert streams.made == [
        ("caller", "records", 1, "caller's stream"),
        ("worker", "waits for", 1, "own stream"),
        ("worker", "keeps", mine.data_ptr(), "own stream"),
        ("worker", "reduces", "own stream"),
        ("worker", "records", 2, "own stream"),
        ("caller", "waits for", 2, "caller's stream"),
        ("caller", "keeps", total.data_ptr(), "caller's stream"),
    ]


@everywhere
def test_a_call_from_a_side_stream_is_ordered_behind_that_stream() -> None:
    with device() as streams:
        with streams.use_stream("side stream"):
            handle = hvd.allreduce_async_(torch.ones(COUNT))
        hvd.synchronize(handle)
    assert streams.made[0] == ("caller", "records", 1, "side stream")
    assert streams.made[-2][2:] == (2, "caller's stream")


@everywhere
def test_poll_asks_the_device_and_does_not_wait() -> None:
    with device() as streams:
        streams.reached = False
        handle = hvd.allreduce_async(torch.ones(COUNT))
        hvd.barrier()  # in the same thread after the call
        assert not hvd.poll(handle)
        streams.reached = True
        assert hvd.poll(handle)
        hvd.synchronize(handle)


@everywhere
def test_a_synchronous_call_uses_the_callers_stream_in_either_thread() -> None:
    with device() as streams:
        hvd.allreduce(torch.ones(COUNT))
        assert streams.made == [("caller", "reduces", "caller's stream")]
        with streams.use_stream("side stream"):
            handles = [hvd.allreduce_async(torch.ones(COUNT), name=f"{name}") for name in range(3)]
            hvd.allreduce(torch.ones(COUNT), name="waits behind them")
        for handle in handles:
            hvd.synchronize(handle)
    reductions = [stream for _, what, stream, *_ in streams.made if what == "reduces"]
    assert sorted(reductions[1:]) == ["own stream"] * 3 + ["side stream"]


class Branch(torch.autograd.Function):
    """Let backward run on the stream on which forward has run, as autograd does on a GPU."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, streams: RecordedStreams) -> torch.Tensor:
        ctx.streams, ctx.stream = streams, streams.current_stream(tensor.device)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.streams.set_stream(ctx.stream)
        return grads[0], None


@pytest.mark.parametrize("style", ["module", "optimizer"])
@everywhere
def test_a_bucket_is_packed_after_the_streams_of_all_its_gradients(style: str) -> None:
    with device() as streams:
        layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
        model: Any = torch.nn.ModuleList(layers)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        if style == "module":
            model = hvd.DistributedDataParallel(model)
            model.module.forward = functools.partial(branches, layers, streams)
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            model.forward = functools.partial(branches, layers, streams)
        for _ in range(3):  # nothing is sent before the end of the first backward
            streams.set_stream("caller's stream")
            optimizer.zero_grad()
            loss = model(torch.ones(2))
            streams.made.clear()
            loss.backward()
            optimizer.step()
            orders = [entry for entry in streams.made if entry[1] in ("records", "waits for")]
            keeps = {stream for _, what, _, stream in streams.made if what == "keeps"}
    # Autograd goes from the last branch to the first, where the step before has ended.
    records = [stream for _, what, _, stream in orders if what == "records"]
    waits = [stream for _, what, _, stream in orders if what == "waits for"]
    assert records == ["branch 0", "branch 2", "branch 1"]
    assert waits == ["branch 2", "branch 1", "branch 0"]
    assert keeps == {"branch 0"}


def branches(layers: list[torch.nn.Linear], streams: RecordedStreams, inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum of the layers' outputs, each computed on a stream of its own."""
    outputs = []
    for number, layer in enumerate(layers):
        with streams.use_stream(f"branch {number}"):
            outputs.append(Branch.apply(layer(inputs), streams).sum())
    return torch.stack(outputs).sum()


def square(streams: RecordedStreams, bucket: Any) -> Any:
    """A communication hook that is no part of torch, so that it runs in a thread."""
    streams.add("runs", streams.current_stream(bucket.buffer().device))
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().square())
    return future


@everywhere
def test_a_communication_hook_has_a_stream_of_its_own_so_that_backward_does_not_wait_for_it() -> None:
    with device() as streams:
        layer = torch.nn.Linear(2, 1, bias=False)
        optimizer: Any = torch.optim.SGD(layer.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, comm_hook=(streams, square))
        for _ in range(2):
            optimizer.zero_grad()
            streams.made.clear()
            layer(torch.tensor([2.0, 3.0])).backward()
            optimizer.step()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[4.0, 9.0]]
    (bucket, _), (result, _) = [rest for _, what, *rest in streams.made if what == "keeps"]
    assert bucket != result
    assert streams.made == [
        ("caller", "records", 3, "caller's stream"),
        ("caller", "keeps", bucket, "own stream"),
        ("worker", "waits for", 3, "own stream"),
        ("worker", "runs", "own stream"),
        ("caller", "records", 4, "own stream"),
        ("caller", "waits for", 4, "caller's stream"),
        ("caller", "keeps", result, "caller's stream"),
    ]


@everywhere
def test_backward_does_not_wait_for_the_copy_of_a_bucket_that_is_sent_from_host_memory() -> None:
    """A worker thread waits for it. The memory is the same in each step. The transport is a double that needs it."""
    hvd.shutdown()
    hvd.init()  # beside an optimizer of another test, nothing is sent before the end of backward
    channel = current().channels[0]
    gradients = channel.gradients
    allreduce, memory = gradients.allreduce_, list[torch.Tensor]()
    with device() as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "through_host", ThroughHost(gradients))

        def reduced(tensor: torch.Tensor, op: int, tag: str = "") -> Work:
            assert any(tensor is own for own in memory)
            streams.add("reduces")
            return allreduce(tensor, op, tag)

        def host_memory(tensor: torch.Tensor) -> torch.Tensor:
            memory.append(torch.empty_like(tensor))
            return memory[-1]

        patch.setattr(gradients, "allreduce_", reduced)
        patch.setattr(gradients, "wire_device", lambda device: torch.device("cpu", 0))
        patch.setattr(accelerator, "host_memory_like", host_memory)
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
        optimizer: Any = torch.optim.SGD(weights, lr=0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, groups=[[weight] for weight in weights])
        reduced_early: list[bool] = []

        def before_last_gradient(_: torch.Tensor) -> None:
            reduced_early.append("reduces" in [what for _, what, *_ in streams.made])
            streams.host_may_continue.set()

        weights[0].register_hook(before_last_gradient)
        for _ in range(3):
            optimizer.zero_grad()
            streams.host_may_continue.clear()
            streams.made.clear()
            (weights[0] * weights[1] * weights[2] * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
        channel.through_host.close(20)
    assert [weight.grad.item() for weight in weights] == [(hvd.size() + 1) / 2] * 3  # type: ignore[union-attr]
    assert len(memory) == 3 and reduced_early == [False] * 3
    callers, workers = ([rest for by, *rest in streams.made if by == who] for who in ("caller", "worker"))
    first = workers[1][1]  # the number of the event after the first copy
    assert workers == [
        entry
        for number in range(3)
        for entry in (
            ["binds", torch.device("cpu")],
            ["waits on the host for", first + 2 * number],
            ["reduces"],
        )
    ]
    sent = [address for what, address, *_ in callers if what == "keeps"]
    assert callers == [
        entry
        for number in range(3)
        for entry in (
            ["records", first + 2 * number - 1, "caller's stream"],
            ["waits for", first + 2 * number - 1, "own stream"],
            ["records", first + 2 * number, "own stream"],
            ["keeps", sent[number], "own stream"],
        )
    ]


@everywhere
def test_a_failed_call_orders_nothing() -> None:
    with device() as streams:
        handle = hvd.allreduce_async(torch.ones(COUNT + hvd.rank()))
        if hvd.size() > 1:
            with pytest.raises(hvd.CollectiveMismatchError):
                hvd.synchronize(handle)
            assert [what for _, what, *_ in streams.made] == ["records"]
        else:
            hvd.synchronize(handle)


@everywhere
def test_the_worker_thread_has_the_device_of_the_thread_that_made_the_first_call() -> None:
    channel = current().channels[0]
    bound: list[tuple[str, torch.device]] = []
    worker, channel._worker = channel._worker, None
    if worker is not None:  # one that another test has started
        channel._wake.put(False)
        worker.join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "current_device", lambda: torch.device("cuda", 3))
        patch.setattr(
            accelerator, "bind", lambda device: bound.append((threading.current_thread().name, device))
        )
        hvd.synchronize(hvd.allreduce_async(torch.ones(2)))
    assert bound == [("dualdist-set 0", torch.device("cuda", 3))]
