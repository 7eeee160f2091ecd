"""Collectives are ordered with the streams of the thread that calls them, and no stream waits longer than it must."""

from __future__ import annotations
import __future__

import contextlib
import functools
import importlib
import inspect
import math
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import dualdist as hvd
from dualdist.checkpoint.contents import HostCopy
from dualdist.core import accelerator
from dualdist.core.world import current
from dualdist.devices import streams

from ..accelerator import sleep_ms
from ..helpers.exchanges import reductions
from ..helpers.rejoining import rejoin
from ..helpers.stream_programs import differences, program, training
from ..helpers.world import World, everywhere

pytestmark = pytest.mark.world_kinds("npu-hccl", "npu-gloo")

COUNT = 5000
LONG = 1500
"""Milliseconds for which a stream is busy, in which the host goes on."""


@pytest.mark.world_kinds("npu-hccl")  # over gloo no device becomes the current one
@everywhere
def test_each_rank_takes_the_transport_of_its_device() -> None:
    assert hvd.device() == torch.device("npu", hvd.local_rank())
    assert torch.ones(1, device="npu").device == hvd.device()
    assert hvd.transport_name() == "hccl"


@pytest.mark.only_ci(where=lambda world: world == "npu-gloo-2")
@pytest.mark.parametrize("run", [program, training], ids=["calls", "trainings"])
def test_random_programs_give_the_numbers_of_the_cpu(world: World, run: Any) -> None:
    for seed in range(8):
        assert world.run(differences, run, [seed]) == [[]] * world.size


def says_done_too_early(seeds: range = range(0)) -> bool:
    """Return whether poll is True while the device computes. It does not wait, and is True afterwards."""
    hvd.allreduce(torch.ones(COUNT))  # the first call takes longer
    sleep_ms(LONG)
    busy = streams.record_event(hvd.device())
    handle = hvd.allreduce_async(torch.ones(COUNT))
    hvd.barrier()  # in the same thread after the call
    early = hvd.poll(handle)
    assert not busy.query()
    accelerator.synchronize(hvd.device())
    assert hvd.poll(handle)
    hvd.synchronize(handle)
    return early


@pytest.mark.world_kinds("npu-hccl")  # over gloo no device becomes the current one
@everywhere
def test_poll_asks_the_device_and_does_not_wait() -> None:
    assert not says_done_too_early()


@pytest.mark.world_kinds("npu-hccl")  # over gloo no device becomes the current one
@everywhere
def test_the_worker_thread_has_the_device_of_the_thread_that_made_the_first_call() -> None:
    torch.ones(1)  # starts to use the device
    seen: list[tuple[str, Any]] = []

    def record(_: torch.Tensor) -> None:
        seen.append((threading.current_thread().name, accelerator.current_device()))

    with reductions(current().channels[0].group, record):
        hvd.synchronize(hvd.allreduce_async(torch.ones(COUNT, device="cpu")))
    assert seen == [("dualdist-set 0", hvd.device())]


@pytest.mark.world_kinds("npu-hccl")  # over gloo no layer runs ahead
@everywhere
def test_a_world_ends_while_a_group_is_being_aborted() -> None:
    """NCCL must get no second abort meanwhile. The transport would end the process."""
    hvd.SyncBatchNorm(2)(torch.ones(4, 2))
    current().channels[0].ahead.forget()  # as after layers that only some ranks have run
    hvd.shutdown()
    hvd.init()


def weights_in_turn(**options: Any) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
    """Return four weights, whose gradients are sent one by one in backward, the last one first, and its function."""
    rejoin()  # beside an optimizer of another test, nothing is sent before the end of backward
    weights = [torch.nn.Parameter(torch.ones(())) for _ in range(4)]
    sgd = torch.optim.SGD(weights, lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, groups=[[weight] for weight in weights], **options)

    def backward() -> None:
        optimizer.zero_grad()
        product: Any = math.prod(weights)
        (product * (hvd.rank() + 1)).backward()

    backward()  # nothing is sent before the end of the first one
    return weights, backward


@everywhere
def test_backward_does_not_wait_for_the_device() -> None:
    """Also not for the copy of a bucket that is sent from the memory of the host."""
    weights, backward = weights_in_turn()
    busy: list[torch.Event] = []
    was_busy: list[bool] = []

    def at_first_gradient(_: torch.Tensor) -> None:
        sleep_ms(LONG)
        busy.append(streams.record_event(hvd.device()))

    weights[3].register_hook(at_first_gradient)
    weights[0].register_hook(lambda _: was_busy.append(not busy[-1].query()))
    backward()
    assert [weight.grad.item() for weight in weights] == [(hvd.size() + 1) / 2] * 4  # type: ignore[union-attr]
    assert was_busy == [True]


@everywhere
def test_the_stream_of_backward_does_not_wait_for_a_communication_hook() -> None:
    is_queued, busy = threading.Event(), list[torch.Event]()
    was_busy: list[bool] = []

    def square(state: object, bucket: Any) -> Any:
        """A hook that is no part of torch, so that it runs in a thread."""
        if bucket.index() == 0:
            sleep_ms(LONG)
            busy.append(streams.record_event(hvd.device()))
            is_queued.set()
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer().square())
        return future

    def at_last_gradient(_: torch.Tensor) -> None:
        assert is_queued.wait(20)
        streams.record_event(hvd.device()).synchronize()
        was_busy.append(not busy[-1].query())

    weights, backward = weights_in_turn(comm_hook=square)
    is_queued.clear()
    weights[0].register_hook(at_last_gradient)
    backward()
    assert [weight.grad.item() for weight in weights] == [(hvd.rank() + 1) ** 2] * 4  # type: ignore[union-attr]
    assert was_busy == [True]


# Numbers are wrong without any of the waits and records.


def copies_late_numbers(seeds: range) -> bool:
    """Return whether a copy of a state is not what the state was when it was taken, while the device computes."""
    numbers = torch.zeros(COUNT)
    sleep_ms(50)
    numbers.fill_(1)
    copy = HostCopy().take({"numbers": numbers}, "state")["numbers"].clone()
    accelerator.synchronize(hvd.device())
    return bool((copy != 1).any())


def has_late_results(run: Any, seeds: range) -> bool:
    return differences(run, seeds) != []


PROGRAMS = functools.partial(has_late_results, program)
TRAININGS = functools.partial(has_late_results, training)


class Line(NamedTuple):
    """A line of the package: its function, its text, what shows that it is missing, what takes its place."""

    function: str
    text: str
    shown_by: Callable[[range], bool]
    replacement: str = "pass"


CALL, HOOK = "devices.streams:Started", "comm_hooks:HookedBucket"
COPY = "devices.through_host:_QueuedWork"
LINES = {
    "a call waits for the stream": Line(f"{CALL}._run", "wait_event(device, event)", PROGRAMS),
    "a call records inputs": Line(f"{CALL}._run", "keep_until_done(tensor, stream)", PROGRAMS),
    "synchronize waits": Line(f"{CALL}.get", "wait_event(device, event)", PROGRAMS),
    "synchronize records results": Line(
        f"{CALL}.get", "keep_until_done(leaf, torch_accelerator.current_stream(leaf.device))", PROGRAMS
    ),
    "poll asks the device": Line(
        f"{CALL}.ended",
        "return self._request.ended and all(event.query() for event in self._after.values())",
        says_done_too_early,
        "return self._request.ended",
    ),
    "a call in another thread has the caller's streams": Line(
        "devices.streams:on_streams_of_caller", "stack.enter_context(use_stream(stream))", PROGRAMS
    ),
    "the stream waits for the transport": Line(
        "core.backends.torch_groups:_TorchWork.wait", "self._work.wait()", PROGRAMS
    ),
    "a bucket waits for all its streams": Line(
        "devices.streams:StreamOrder.follow",
        "wait_event(self._device, record_event(self._device, self._stream))",
        TRAININGS,
    ),
    "a bucket of several streams is recorded": Line(
        "devices.streams:StreamOrder.follow", "keep_until_done(tensor, stream)", TRAININGS
    ),
    "a hook waits for its bucket": Line(f"{HOOK}.start", "streams.wait_event(self.device, self._packed)", TRAININGS),
    "backward waits for a hook": Line(
        f"{HOOK}.wait", "streams.wait_event(self.device, streams.record_event(self.device, self._stream))", TRAININGS
    ),
    "a state waits for its copy": Line(
        "checkpoint.contents:HostCopy.take", "accelerator.synchronize(device)", copies_late_numbers
    ),
}
LINES_THROUGH_HOST = {
    "a copy waits for its bucket": Line(f"{COPY}.copy_on", "streams.wait_event(device, packed)", TRAININGS),
    "the host waits for the copy": Line(f"{COPY}.start", "self._copied.synchronize()", TRAININGS),
}


@contextlib.contextmanager
def without(line: Line) -> Iterator[None]:
    """Take a line out of the package in the `with` block."""
    module, _, name = line.function.partition(":")
    owner: Any = importlib.import_module(f"dualdist.{module}")
    *outer, name = name.split(".")
    owner = functools.reduce(getattr, outer, owner)
    function = getattr(owner, name)
    function = getattr(function, "fget", function)  # of a property
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(f" {line.text}\n") == 1, f"{line.function} must have this line once: {line.text}"
    made: dict[str, Any] = {}
    changed = source.replace(f" {line.text}\n", f" {line.replacement}\n")
    code = compile(changed, line.function, "exec", __future__.annotations.compiler_flag)
    exec(code, sys.modules[function.__module__].__dict__, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, made[name])
        yield


def is_wrong_without(name: str, seeds: range) -> bool:
    line = (LINES | LINES_THROUGH_HOST)[name]
    with without(line):
        return line.shown_by(seeds)


def check_without(world: World, name: str) -> None:
    found = (any(world.run(is_wrong_without, name, range(seed, seed + 1))) for seed in range(60))
    assert any(found), f"all numbers are right, whether or not {name}"


@pytest.mark.only_all
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("npu-hccl")
@pytest.mark.parametrize("name", LINES)
def test_numbers_are_wrong_unless(world: World, name: str) -> None:
    check_without(world, name)


@pytest.mark.only_all
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("npu-gloo")
@pytest.mark.parametrize("name", LINES_THROUGH_HOST)
def test_numbers_that_are_sent_through_the_host_are_wrong_unless(world: World, name: str) -> None:
    check_without(world, name)
