"""The device of a rank if Horovod has NCCL. Doubles replace Horovod's answer and the accelerator."""

from __future__ import annotations

import contextlib
import re
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import dualdist as hvd
from dualdist.core import accelerator, process
from dualdist.core.world import current
from dualdist.devices import choice
from dualdist.devices.groups import DefaultGroup

from ..helpers.world import World

pytestmark = [pytest.mark.world_kinds("horovod-gloo"), pytest.mark.ranks(2)]


def bound_device(
    current_index: int | None, is_adopted: bool, devices: tuple[str, ...] = ("0", "1")
) -> tuple[str, list[str]]:
    """Return the device of this rank on a host with `devices`, and which of them it made the current one."""
    import horovod.torch

    backend: Any = current().backend
    chosen = None if current_index is None else torch.device("cuda", current_index)
    bound: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod.torch, "nccl_built", lambda: True)
        patch.setattr(backend, "transport", "nccl")
        patch.setattr(backend, "_adopted", is_adopted)
        patch.setattr(accelerator, "kind", lambda: "cuda")
        patch.setattr(choice, "visible", lambda by_uuid: devices)
        patch.setattr(accelerator, "current_device", lambda: chosen)
        patch.setattr(accelerator, "bind", lambda device: bound.append(str(device)))
        device = backend._bind_device(current().launch)
    return str(device), bound


def shutdown_after_a_failure() -> bool:
    """Return whether Horovod may still be shut down at exit, after its shutdown has not ended."""
    import horovod.torch

    from dualdist.horovod import backend, group

    never = threading.Event()
    world: Any = SimpleNamespace(
        _on_shutdown=contextlib.ExitStack(),
        _default_group=DefaultGroup(torch.device("cuda", 0)),
        _adopted=False,
        _elastic=False,
        _is_stuck=False,
        _rendezvous=None,
        _controller=lambda: "gloo",
    )
    gave_up: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "world_has_failed", True)
        patch.setattr(group, "_SHUTDOWN_SECONDS", 0.1)
        patch.setattr(group, "stuck", threading.Event())
        patch.setattr(backend, "stuck", group.stuck)
        patch.setattr(group, "never_shut_down", lambda: gave_up.append(True))
        # Its thread joins one that waits for the GPU (GPUContext::Finalize in cuda_operations.cc).
        patch.setattr(horovod.torch, "shutdown", lambda: never.wait(20))
        backend.HorovodBackend.shutdown(world)
        assert group.stuck.is_set()
    never.set()
    return gave_up == [True]


def refused_device() -> str:
    with pytest.raises(hvd.ConfigurationError) as caught:
        bound_device(None, False, ("0",))
    return str(caught.value)


def test_two_ranks_that_share_a_device_are_refused(world: World) -> None:
    for error in world.run(refused_device):
        assert re.search(r"needs a GPU for each process, but the 2 processes on \S+ share 1\.", error)


def aborts_default_group() -> bool:
    """Return whether a failure ends what communication hooks have in progress on a device."""
    group, backend = mock.Mock(), current().backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_default_group", group)
        backend.abort_default_group()
    return bool(group.abort.called)


def test_a_failure_aborts_the_default_group_beside_horovod(world: World) -> None:
    assert world.run(aborts_default_group) == [True, True]


def test_a_shutdown_of_horovod_that_is_stuck_after_a_failure_is_left_alone(world: World) -> None:
    assert world.run(shutdown_after_a_failure) == [True, True]


def test_each_rank_takes_its_device_unless_the_script_has_started_horovod_and_chosen_one(world: World) -> None:
    own = [("cuda:0", ["cuda:0"]), ("cuda:1", ["cuda:1"])]
    assert world.run(bound_device, None, False) == own
    assert world.run(bound_device, 0, False) == own
    assert world.run(bound_device, None, True) == own
    assert world.run(bound_device, 0, True) == [("cuda:0", [])] * 2
