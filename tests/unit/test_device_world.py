"""A whole world of one rank on a device. The device is a double, and so is NCCL: a backend of torch that records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

import dualdist as hvd
from dualdist.core import accelerator, process
from dualdist.core import world as world_module
from dualdist.core.world import current
from dualdist.devices import choice

DEVICE = torch.device("cuda", 0)
if not hasattr(dist.distributed_c10d, "_get_split_source"):
    pytest.skip("this torch calls other methods of a backend than the double of NCCL has", allow_module_level=True)


class Communicator(Backend):
    """What torch has of NCCL for one group. If `is_stuck`, its kernels end by `abort` alone, and `shutdown` raises."""

    made: ClassVar[list[Communicator]] = []
    order: ClassVar[list[str]] = []

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.splits = options.split_from is not None
        self.is_stuck, self.ended = False, threading.Event()
        self.made.append(self)
        self.order.append("made")

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        return False

    def getBackendName(self) -> str:
        return "ncclx"

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        assert device == DEVICE

    def _set_group_name(self, name: str) -> None:
        pass

    def abort(self) -> None:
        self.ended.set()

    def shutdown(self) -> None:
        if self.is_stuck:
            assert self.ended.wait(20), "waits for the other ranks"
            raise RuntimeError("NCCL communicator was aborted")


def create(options: Any, backend_options: Any = None) -> Communicator:
    return Communicator(options)


def visible(*, by_uuid: bool = False) -> tuple[str, ...]:
    if by_uuid:
        Communicator.order.append("named by UUID")
    return ("0",)


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicator]]:
    """Join a world of one rank, whose process groups have a double for the device. Yields the doubles."""
    if "NCCLX" not in dist.Backend._plugins:
        dist.Backend.register_backend("ncclx", create, extended_api=True, devices=["cuda"])
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", {"ncclx"}, raising=False)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "ncclx")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(choice, "visible", visible)
    monkeypatch.setattr(accelerator, "current_device", lambda: None)
    monkeypatch.setattr(accelerator, "synchronize", lambda device: Communicator.order.append("synchronized"))
    monkeypatch.setattr(accelerator, "bind", lambda device: Communicator.order.append(f"bound to {device}"))
    Communicator.made.clear()
    Communicator.order.clear()
    hvd.init(backend="torch")
    yield Communicator.made
    hvd.shutdown()


def test_a_world_has_three_communicators_of_which_two_are_split_from_that_of_torch(
    communicators: list[Communicator],
) -> None:
    """Torch's default group has one, which programs use at any time. Data and gradients have one each.

    Each of them has a mesh of Gloo. That of SyncBatchNorm needs none.
    """
    hvd.allreduce(torch.ones(2))
    model = torch.nn.Linear(2, 1)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [one.splits for one in communicators] == [False, True, True]
    current().channels[0].ahead._make_group()
    assert [one.splits for one in communicators] == [False, True, True, False]
    configs = [dist.get_backend_config(group) for group in dist.distributed_c10d._world.pg_map]
    assert configs == ["cpu:gloo,cuda:ncclx"] * 3 + ["cuda:ncclx"]


@pytest.mark.usefixtures("communicators")
def test_the_device_is_bound_in_each_thread_that_makes_communicators() -> None:
    """The ranks compare their devices before, by UUID. The first thread is that of `init`."""
    bound = "bound to cuda:0"
    done = "synchronized"  # before the second and the third are split from the first
    assert Communicator.order == ["named by UUID", bound, bound, "made", bound, done, "made", "made"]
    # It looks for lost ranks while the host waits for the device.
    assert "dualdist-peers" in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("in_process_set", [False, True])
def test_a_failure_ends_all_communicators_also_of_communication_hooks_and_other_process_sets(
    in_process_set: bool, communicators: list[Communicator]
) -> None:
    """NCCL may hold the abort of one until the kernel of another one ends."""
    context = current()
    failing = context.add_channel([0]) if in_process_set else 0
    assert len(communicators) == (5 if in_process_set else 3)
    for one in communicators:
        one.is_stuck = True
    context.channels[failing]._guard._abort()
    for one in communicators:
        assert one.ended.wait(20)
    if in_process_set:
        with pytest.raises(hvd.HorovodInternalError, match="cannot run: a call of another process set fail"):
            hvd.allreduce(torch.ones(2))
    hvd.shutdown()
    assert not dist.is_initialized()


@pytest.mark.only_ci
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_rank_that_an_error_ends_aborts_all_communicators_before_it_destroys_one(
    has_failed: bool, communicators: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destruction of one communicator may wait for a kernel of another one.

    The stream waits for a layer of SyncBatchNorm, say, or a bucket that the other ranks may never send.
    """
    monkeypatch.setattr(world_module, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(process, "has_failed", lambda: has_failed)
    monkeypatch.setattr(process, "world_has_failed", False)
    monkeypatch.setattr(accelerator, "synchronize", lambda device: communicators[0].ended.wait(20))
    current().add_channel([0])  # it is closed first
    for one in communicators:
        one.is_stuck = has_failed
    hvd.shutdown()
    assert not dist.is_initialized()
    assert [one.ended.is_set() for one in communicators] == [has_failed] * 5
