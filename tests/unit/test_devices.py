"""The device of each rank, and the transport of all, chosen from what every rank reports."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from dualdist.core.backends.torch import Offer, agreed_transport
from dualdist.core.types import DeviceView
from dualdist.devices.choice import NO_NVLINK, choose_devices, shared_devices
from dualdist.errors import ConfigurationError


def view(host: str, local_rank: int | None, *devices: str) -> DeviceView:
    return DeviceView(host, local_rank, devices)


FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("views", "chosen"),
    [
        ([view("a", 0, *FOUR), view("a", 1, *FOUR), view("b", 0, *FOUR)], [0, 1, 0]),
        # The launcher does not give local ranks.
        ([view("a", None, *FOUR), view("b", None, *FOUR), view("a", None, *FOUR)], [0, 0, 1]),
        # The launcher gives each process one device (Slurm's --gpus-per-task, MIG slices).
        ([view("a", 0, "MIG-x"), view("a", 1, "MIG-y")], [0, 0]),
        # Two agents on a host, with devices of their own.
        ([view("a", 0, "0", "1"), view("a", 1, "0", "1"), view("a", 0, "2", "3"), view("a", 1, "2", "3")], [0, 1] * 2),
        # Two agents on a host that see the same devices.
        ([view("a", 0, *FOUR), view("a", 1, *FOUR), view("a", 0, *FOUR), view("a", 1, *FOUR)], [0, 1, 2, 3]),
        # Local rank 0 on every process, as Spark's TorchDistributor sets it.
        ([view("a", 0, *FOUR), view("a", 0, *FOUR)], [0, 1]),
        # Hosts with different numbers of devices, and one without.
        ([view("a", 0, "0"), view("b", 0, "0", "1"), view("b", 1, "0", "1"), view("c", 0)], [0, 0, 1, None]),
        # More ranks than devices.
        ([view("a", rank, "0", "1") for rank in range(3)], [0, 1, 0]),
    ],
)
def test_each_rank_gets_a_device(views: Sequence[DeviceView], chosen: Sequence[int | None]) -> None:
    assert choose_devices(views) == chosen


def test_hosts_with_fewer_devices_than_ranks_are_found() -> None:
    views = [view("a", 0, "0", "1"), view("a", 1, "1", "0"), view("b", 0, "0"), view("b", 1, "0")]
    # Rank 1 sees the devices in another order, so its second is rank 0's first.
    assert list(shared_devices(views, choose_devices(views))) == [("a", 2, 1), ("b", 2, 1)]
    apart = [view("a", 0, "0"), view("a", 1, "1"), view("b", 0, "0")]
    assert list(shared_devices(apart, choose_devices(apart))) == []


def offer(host: str, local_rank: int, transport: str, devices: int = 0, is_asked: bool = False) -> Offer:
    return Offer(f"{host}-12345678", local_rank, list(map(str, range(devices))), transport, is_asked)


@pytest.mark.parametrize(
    ("offers", "transport"),
    [
        ([offer("a", 0, "nccl", 2), offer("a", 1, "nccl", 2)], "nccl"),
        ([offer("a", 0, "mpi"), offer("b", 0, "mpi")], "mpi"),
        # One rank asks for it, by DUALDIST_TRANSPORT on its host alone.
        ([offer("a", 0, "gloo", 1, is_asked=True), offer("b", 0, "nccl", 1)], "gloo"),
    ],
)
def test_all_ranks_agree_without_a_warning(
    offers: Sequence[Offer], transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [agreed_transport(offers, rank) for rank in range(len(offers))] == [transport] * len(offers)
    assert not caplog.records


def test_a_host_without_a_gpu_makes_all_use_gloo_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    offers = [offer("a", 0, "nccl", 1), offer("b", 0, "gloo"), offer("b", 1, "gloo")]
    with caplog.at_level(logging.WARNING, "dualdist"):
        assert [agreed_transport(offers, rank) for rank in range(3)] == ["gloo"] * 3
    (record,) = caplog.records
    assert record.getMessage() == ("All ranks use gloo, because their fastest transports differ: gloo on b; nccl on a.")


@pytest.mark.parametrize(
    ("numbers", "hosts"),
    [
        ([["0"], ["0"]], ["a"]),  # each in a cgroup of its own
        ([["0"], ["1"]], []),  # by CUDA_VISIBLE_DEVICES alone, which hides nothing from NCCL
    ],
)
def test_processes_that_see_one_gpu_each_are_warned_once_that_nccl_finds_no_nvlink(
    numbers: Sequence[Sequence[str]], hosts: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    offers = [
        Offer("a-1", rank, [f"uuid of {rank}"], "nccl", False, numbers=names) for rank, names in enumerate(numbers)
    ]
    with caplog.at_level(logging.WARNING, "dualdist"):
        assert [agreed_transport(offers, rank) for rank in range(2)] == ["nccl"] * 2
    assert [record.getMessage() for record in caplog.records] == [NO_NVLINK % host for host in hosts]


def test_ranks_share_a_device_with_nccl_if_nccl_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert agreed_transport([offer("a", 0, "nccl", 1), offer("a", 1, "nccl", 1)], 0) == "nccl"


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        (
            [offer("a", 0, "nccl", 1), offer("a", 1, "nccl", 1)],
            "needs a GPU for each process, but the 2 processes on a share 1. Start fewer",
        ),
        (
            [offer("a", 0, "nccl", 1, is_asked=True), offer("b", 0, "gloo", 0)],
            "`transport` is 'nccl', but rank 1 on b sees no GPU",
        ),
        (
            [offer("a", 0, "nccl", 1, is_asked=True), offer("a", 0, "gloo", 1, is_asked=True)],
            "`transport` must be equal on all ranks, but rank . asks for .*rank . asks for",
        ),
        (
            [Offer("a-1", rank, [name], "nccl", False) for rank, name in enumerate(["MIG-x", "MIG-y"])],
            "must be gloo for MIG slices of a host, but is 'nccl' instead for 2 processes on a. Set",
        ),
    ],
)
def test_what_cannot_work_is_an_error_on_every_rank(offers: Sequence[Offer], words: str) -> None:
    for rank in range(len(offers)):
        with pytest.raises(ConfigurationError, match=words):
            agreed_transport(offers, rank)
