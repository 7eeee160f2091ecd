"""The device of a rank if Horovod has NCCL. Doubles replace Horovod's answer and the accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist import accelerator
from dualdist.world.context import current

from ..helpers.world import WORLDS, started


def bound_device(current_index: int | None, is_adopted: bool) -> tuple[str, list[str]]:
    """Return the device of this rank on a host with two, and which devices it made the current one."""
    import horovod.torch

    backend: Any = current().backend
    chosen = None if current_index is None else torch.device("cuda", current_index)
    bound: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod.torch, "nccl_built", lambda: True)
        patch.setattr(backend, "transport", "nccl")
        patch.setattr(backend, "_adopted", is_adopted)
        patch.setattr(accelerator, "kind", lambda: "cuda")
        patch.setattr(accelerator, "visible", lambda by_uuid: ("0", "1"))
        patch.setattr(accelerator, "current_device", lambda: chosen)
        patch.setattr(accelerator, "bind", lambda device: bound.append(str(device)))
        device = backend._bind_device(current().launch)
    return str(device), bound


def test_each_rank_takes_its_device_unless_the_script_has_started_horovod_and_chosen_one() -> None:
    own = [("cuda:0", ["cuda:0"]), ("cuda:1", ["cuda:1"])]
    with started(*WORLDS["horovod-gloo-2"]) as world:
        assert world.run(bound_device, None, False) == own
        assert world.run(bound_device, 0, False) == own
        assert world.run(bound_device, None, True) == own
        assert world.run(bound_device, 0, True) == [("cuda:0", [])] * 2
