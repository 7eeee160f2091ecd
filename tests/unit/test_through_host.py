"""Allreduces of tensors on a device over a transport that sends memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist.core import accelerator
from dualdist.core.backends.base import Work
from dualdist.core.types import Sum
from dualdist.devices import streams
from dualdist.devices.through_host import ThroughHost
from dualdist.errors import HorovodInternalError

from .test_movement import Done

SECONDS = 20.0


class Doubling:
    """Two ranks with the same tensors. Two numbers cannot be reduced."""

    def __init__(self) -> None:
        self.has_lost_member = lambda: False

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.numel() == 2:
            raise HorovodInternalError("a rank has left")
        tensor.mul_(2)
        return Done()


def test_what_cannot_start_raises_where_it_is_waited_for_and_the_next_one_runs() -> None:
    group: Any = Doubling()
    sender = ThroughHost(group)
    two, one = torch.ones(2), torch.ones(1)
    fails = sender.allreduce_(two, Sum, "fails", None)
    works = sender.allreduce_(one, Sum, "works", None)
    with pytest.raises(HorovodInternalError, match="a rank has left"):
        fails.wait()
    works.wait()
    sender.close(SECONDS)
    assert fails.done() and two.tolist() == [1.0, 1.0] and one.item() == 2.0


def test_a_copy_lies_in_pageable_memory_where_the_runtime_of_the_device_pins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty

    def without_pins(length: int, *, dtype: torch.dtype, device: str, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("no pinned memory")
        return empty(length, dtype=dtype, device=device)

    asked: list[bool] = []
    monkeypatch.setattr(accelerator, "kind", lambda: "meta")
    monkeypatch.setattr(torch, "empty", without_pins)
    memory = streams.host_memory(3, torch.float16, torch.device("meta"))
    assert asked == [True, False]
    assert (memory.is_cpu, memory.shape, memory.dtype) == (True, (3,), torch.float16)
