"""Which of torch's backends carries the tensors of which device, in a world of our own and in an adopted one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualdist.core import accelerator
from dualdist.core.backends import check_transport
from dualdist.core.backends import torch as backend_module
from dualdist.core.backends.torch import Offer, TorchBackend, agreed_transport
from dualdist.core.backends.torch_groups import adopted_config, config_of
from dualdist.core.types import Launch, Settings
from dualdist.devices import choice
from dualdist.devices.groups import DeviceGroups, carried_types

CUDA = {"cpu": "gloo", "cuda": "nccl"}
NCCLS = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy", "ncclx")
"""Names that torch 2.15 and torchcomms have for NCCL."""


@pytest.fixture
def adopted(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("adopted", [None, "gloo", "cpu:gloo"], indirect=True)
def test_a_group_is_adopted_however_it_was_named(adopted: None) -> None:
    config = adopted_config()
    assert config["cpu"] == "gloo"
    assert backend_module.adopted_transport(config) == "gloo"
    assert choice.adopted_device() is None


@pytest.mark.parametrize(
    ("kind", "config", "transport"),
    [
        ("cuda", CUDA, "nccl"),
        (None, CUDA, "gloo"),
        ("cuda", {"cpu": "gloo"}, "gloo"),
        (None, {"cpu": "mpi4py"}, "mpi"),
        ("xpu", {"cpu": "gloo", "xpu": "xccl"}, "xccl"),
        ("npu", {"cpu": "gloo", "npu": "hccl"}, "hccl"),
        *(("cuda", {"cpu": "gloo", "cuda": name}, "nccl") for name in NCCLS),
    ],
)
def test_the_transport_of_an_adopted_group_is_that_of_the_accelerator(
    kind: str | None, config: dict[str, str], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    assert backend_module.adopted_transport(config) == transport


@pytest.mark.parametrize("name", NCCLS)
def test_each_name_of_nccl_can_be_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    check_transport(name)
    assert config_of("mpi") == {"cpu": "mpi4py"}
    assert config_of(name) == {"cpu": "gloo", "cuda": name}
    assert agreed_transport([Offer("a", 0, ["gpu"], name, is_asked=True)], 0) == name


@pytest.mark.parametrize(
    ("config", "carried"),
    [
        (CUDA, {"cpu", "cuda"}),
        # Gloo and MPI accept tensors of a GPU, but dualdist copies them to the host itself.
        ({"cpu": "gloo", "cuda": "gloo"}, {"cpu"}),
        ({"cpu": "mpi4py", "cuda": "mpi4py"}, {"cpu"}),
    ],
)
def test_tensors_that_need_no_copy_to_the_host(config: dict[str, str], carried: set[str]) -> None:
    assert carried_types(config) == carried


@pytest.mark.parametrize("prefix", ["CUDA", "ASCEND_RT", "MLU"])
def test_devices_are_named_as_their_variables_say(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    assert choice.visible() == ("0", "1")
    monkeypatch.setenv(f"{prefix}_VISIBLE_DEVICES", "3,GPU-8932f937")
    assert choice.visible() == ("3", "GPU-8932f937")


@pytest.mark.parametrize(
    ("variable", "uuids", "names"),
    [
        (None, [], ()),
        # Processes that cgroups confine to one device each: all see number 0.
        ("0", ["8932f937-d72c-4106-c12f-20bd9faed9f6"], ("8932f937-d72c-4106-c12f-20bd9faed9f6",)),
        (None, ["8932f937-d72c", "1b7c0d2e-3f4a"], ("8932f937-d72c", "1b7c0d2e-3f4a")),
        ("MIG-x,MIG-y", ["8932f937-d72c", "8932f937-d72c"], ("MIG-x", "MIG-y")),
        # Drivers and releases of torch that know no UUID.
        ("2,3", ["00000000-0000", "00000000-0000"], ("2", "3")),
        ("2,3", [None, None], ("2", "3")),
    ],
)
def test_devices_that_a_process_is_confined_to_are_named_by_the_driver(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, uuids: list[str | None], names: tuple[str, ...]
) -> None:
    """The driver is a double: there is no GPU here."""
    properties = [SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid) for uuid in uuids]
    driver = SimpleNamespace(get_device_properties=properties.__getitem__)
    monkeypatch.setattr(accelerator, "count", lambda: len(uuids))
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: driver)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert choice.visible(by_uuid=True) == names


@pytest.mark.parametrize("adopted", ["gloo"], indirect=True)
def test_a_group_of_some_ranks_does_not_split_the_communicator_of_all(
    adopted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed's function that makes groups is a double: there is no NCCL here."""
    world: Any = dist.group.WORLD
    device = torch.device("cuda", 1)
    world.bound_device_id = device
    seen: list[object] = []

    def new_group(ranks: list[int], device_id: torch.device | None = None, **options: object) -> None:
        seen.extend([world.bound_device_id, device_id, options["use_local_synchronization"]])

    monkeypatch.setattr(dist, "new_group", new_group)
    groups = DeviceGroups(0, CUDA, device, ["a"], dist.HashStore(), timedelta(minutes=1), {})
    groups.make([0], 1, lambda text: [text], among_members=True)
    assert seen == [None, device, True]
    assert world.bound_device_id == device


@pytest.mark.parametrize("adopted", ["gloo"], indirect=True)
def test_a_group_has_the_same_name_on_all_members_whatever_other_groups_they_are_in(
    adopted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of torch are doubles. Up to torch 2.13, the name depends on the groups in which a rank is."""
    others, names = list[str](), list[str]()
    c10d: Any = dist.distributed_c10d
    monkeypatch.setattr(c10d, "_hash_ranks_to_str", lambda ranks: f"{ranks} {len(others)}")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: names.append(c10d._hash_ranks_to_str(ranks)))
    for _ in range(2):
        groups = DeviceGroups(0, CUDA, None, ["a"], dist.HashStore(), timedelta(minutes=1), {})
        groups.make([0], 2, lambda text: [text], among_members=True)
        others.append("of this rank and another one")
        dist.destroy_process_group()  # the next world may have processes that were not in this one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert names[:2] == names[2:] and len(set(names)) == 2


@pytest.mark.parametrize("adopted", ["gloo"], indirect=True)
@pytest.mark.parametrize(
    ("chosen", "device", "bound"), [(None, "cuda:0", ["cuda:0"]), (torch.device("cuda", 1), "cuda:1", [])]
)
def test_an_adopted_world_takes_the_device_that_the_program_has_chosen_else_chooses_one(
    adopted: None, chosen: torch.device | None, device: str, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group on Gloo, and a host with two devices that is a double: there is no GPU here."""
    variable, made = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.setattr(backend_module, "adopted_config", lambda: CUDA)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(choice, "visible", lambda by_uuid=False: ("0", "1"))
    monkeypatch.setattr(accelerator, "current_device", lambda: chosen)
    monkeypatch.setattr(accelerator, "bind", lambda device: made.append(str(device)))
    monkeypatch.delenv(variable, raising=False)
    backend = TorchBackend.start(Launch("torch", 0, 1), Settings(), {}, None)
    try:
        assert (str(backend.device), made) == (device, bound)
        assert os.environ[variable] == "2"
    finally:
        backend.shutdown()
    assert variable not in os.environ
