"""SyncBatchNorm on devices: the ranks agree on each layer once, and compare all layers at the end of a step.

The device is a double: a group whose collectives return at once, as those of NCCL do, and which records them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist import sync_batch_norm
from dualdist.core.agreement.channel import Channel
from dualdist.core.backends.base import Group, Work
from dualdist.core.collectives.reduction import Compressor
from dualdist.core.world import current
from dualdist.devices.ahead import Ahead

from ..helpers.exchanges import exchanges
from ..helpers.files import wait_for
from ..helpers.styles import sgd
from ..helpers.world import WORLDS, everywhere, started


class Done(Work):
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class Device(Group):
    """A group that never waits for the other ranks: each of them seems to send what this rank sends."""

    reduce_dtypes = frozenset({torch.float32, torch.float64})

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks, hvd.rank())
        self.calls: list[str] = []

    def wire_device(self, device: torch.device) -> torch.device:
        return device

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        self.calls.append("allreduce")
        tensor.mul_(self.size)
        return Done()

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self.calls.append("allgather")
        output.copy_(tensor.repeat(self.size))
        return Done()

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        raise NotImplementedError

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        raise NotImplementedError

    def abort(self) -> None:
        self.calls.append("abort")


@contextlib.contextmanager
def devices(channel: Channel | None = None, ranks: Sequence[int] = ()) -> Iterator[list[Device]]:
    """Let SyncBatchNorm of a channel run on doubles in the `with` block. Yields those that were made."""
    made: list[Device] = []

    def make() -> Device:
        made.append(Device(ranks or range(hvd.size())))
        return made[-1]

    world = current().channels[0]
    channel = channel or world
    with pytest.MonkeyPatch.context() as patch:
        for one in (world, channel):
            guard = functools.partial(one._guard.run, one.gradient_observer)
            patch.setattr(one, "ahead", Ahead(one.run, guard, make))
        patch.setattr(sync_batch_norm, "has_streams", lambda wire: True)
        patch.setattr(sync_batch_norm, "payload_capacity", lambda size, most: 0)
        yield made
        channel.ahead.forget()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(hvd.SyncBatchNorm(4) for _ in range(3))

    def forward(self, x: torch.Tensor, count: int = 3) -> torch.Tensor:
        for layer in self.layers[:count]:
            x = layer(x)
        return x


def prepared() -> tuple[Network, torch.optim.Optimizer]:
    model = Network()
    return model, sgd(model.parameters(), lr=0.1, named_parameters=model.named_parameters())


def step(model: Network, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 4, requires_grad=True), count).square().sum().backward()
    optimizer.step()


@everywhere
def test_a_regular_step_has_one_agreement_whatever_the_number_of_layers() -> None:
    model, optimizer = prepared()
    with devices() as made:
        step(model, optimizer)
        for _ in range(3):
            with exchanges() as messages:
                step(model, optimizer)
            assert len(messages) == 1
    (device,) = made
    assert device.calls == [*["allgather"] * 3, *["allreduce"] * 3] * 4 + ["abort"]


@everywhere
def test_another_order_on_all_ranks_is_agreed_on_again() -> None:
    model, optimizer = prepared()
    with devices():
        for count in (3, 2, 2, 3, 3):
            step(model, optimizer, count)
        with exchanges() as messages:
            step(model, optimizer)
        assert len(messages) == 1


@pytest.mark.ranks(3)
@everywhere
def test_layers_of_some_ranks_are_agreed_on_once_too() -> None:
    """As with statistics per host: the step ends with the gradients of all ranks."""
    pair = hvd.add_process_set([0, 1])
    model = nn.Sequential(*(hvd.SyncBatchNorm(4, process_set=pair) for _ in range(3)))
    if not pair.included():
        model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    optimizer = sgd(model.parameters(), lr=0.1, named_parameters=model.named_parameters())
    with devices(current().channels[pair.process_set_id or 0], pair.ranks or []):
        for _ in range(3):
            with exchanges() as messages:
                optimizer.zero_grad()
                model(torch.randn(5, 4)).square().sum().backward()
                optimizer.step()
        assert len(messages) == (2 if pair.included() else 1)
        error = pytest.raises(hvd.CollectiveMismatchError, match="different layers before")
        with error if pair.included() else contextlib.nullcontext():
            model.train(hvd.rank() != 1)(torch.randn(5, 4)).square().sum().backward()


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_that_skips_a_layer_raises_on_all_ranks_which_can_then_continue() -> None:
    model, optimizer = prepared()
    with devices() as made:
        for _ in range(2):
            step(model, optimizer)
        # All but the last layer: without it, the calls of the forward pass are those of the last step.
        with pytest.raises(
            hvd.CollectiveMismatchError, match=r"calls_before=|different layers before|different collectives"
        ):
            step(model, optimizer, 3 if hvd.rank() == 0 else 2)
        assert made[0].calls[-1] == "abort"
        for _ in range(2):
            step(model, optimizer)
        assert len(made) == 2


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_call_that_fails_on_one_rank_does_not_change_which_calls_need_an_agreement() -> None:
    model, optimizer = prepared()
    with devices() as made:
        for _ in range(2):
            step(model, optimizer)
        wrong = hvd.rank() == 0
        with pytest.raises(ValueError if wrong else hvd.CollectiveMismatchError):
            hvd.allreduce(torch.ones(2), op=99 if wrong else hvd.Sum)
        hvd.barrier()
        with exchanges() as messages:
            step(model, optimizer)
        assert len(messages) == len(made) == 1


@pytest.mark.ranks(2, 3)
@everywhere
def test_ranks_continue_together_after_one_called_something_else_asynchronously() -> None:
    model, optimizer = prepared()
    with devices():
        for _ in range(2):
            step(model, optimizer)
        with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched name"):
            if hvd.rank() == 0:
                hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="a"))
            else:
                hvd.allreduce(torch.ones(2), name="b")
        for _ in range(2):
            step(model, optimizer)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_that_runs_no_layer_raises_on_all_ranks() -> None:
    model, optimizer = prepared()
    with devices():
        step(model, optimizer)
        with pytest.raises(hvd.CollectiveMismatchError, match=r"different layers .* 0: no calls, 1: 6 calls"):
            step(model.eval() if hvd.rank() == 0 else model, optimizer)
        for _ in range(2):
            step(model.train(), optimizer)


class Remembering(Compressor):
    """A compressor of a user, which remembers what it compresses."""

    seen: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        cls.seen.append(tensor.clone())
        return tensor, None


@everywhere
def test_a_compressor_of_the_user_gets_gradients_alone() -> None:
    """Not the zeros with which the ranks connect."""
    Remembering.seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current().backend, "runs_ahead", True)
        weight = nn.Parameter(torch.ones(2))
        optimizer = sgd([weight], compression=Remembering)
        weight.sum().backward()
        optimizer.step()
    assert [gradient.tolist() for gradient in Remembering.seen] == [[1.0, 1.0]]


def wait_for_device(folder: Path) -> str:
    """Be in no call, as while the host waits for its device, until the last rank has died. Return the next error."""
    context, aborted, ended = current(), threading.Event(), [folder / f"{rank}" for rank in range(2)]
    hvd.allreduce(torch.ones(1), name="before")
    if hvd.rank() == 2:  # what the others see of a death
        context.channels[0].abandon()
        context.observation.leave()
        wait_for(ended)
        return ""
    gradients = context.channels[0].gradients
    abort = gradients.abort
    gradients.abort = lambda: (abort(), aborted.set())  # type: ignore[assignment, method-assign, func-returns-value]
    while not aborted.is_set():  # as in a world with devices
        context.check_peers()
        aborted.wait(0.1)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="after")
    ended[hvd.rank()].touch()
    return str(caught.value)


def test_a_rank_that_dies_while_the_others_wait_for_their_devices_is_noticed(tmp_path: Path) -> None:
    with started(*WORLDS["torch-gloo-3"], {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}) as world:
        for error in world.run(wait_for_device, tmp_path)[:2]:
            assert re.search(r"^allreduce cannot run: allreduce\(.*name='before'\) at \S+ failed: .* rank 2; ", error)
