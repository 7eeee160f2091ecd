"""Allreduces of tensors on a device over a transport that sends memory of the host. The device is a double."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist import accelerator
from dualdist.backends.base import Work
from dualdist.backends.through_host import ThroughHost
from dualdist.errors import HorovodInternalError
from dualdist.types import Sum

from ..helpers.recorded_streams import recorded_streams
from .test_movement import Done

SECONDS = 20.0


class Doubling:
    """Two ranks with the same tensors. Two numbers cannot be reduced."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.has_lost_member = lambda: False

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        self.started.append(tag)
        if tensor.numel() == 2:
            raise HorovodInternalError("a rank has left")
        tensor.mul_(2)
        return Done()


def test_allreduces_start_in_the_order_of_the_calls_also_those_that_need_no_copy() -> None:
    group: Any = Doubling()
    sender = ThroughHost(group)
    tensors = [torch.full((1,), value) for value in (1.0, 2.0)]
    with recorded_streams() as streams:
        streams.host_may_continue.clear()
        works = [sender.allreduce_(tensors[0], Sum, "on the device", torch.empty(1))]
        works.append(sender.allreduce_(tensors[1], Sum, "on the host", None))
        assert group.started == [] and not any(work.done() for work in works)
        streams.host_may_continue.set()
        for work in works:
            work.wait()
        sender.close(SECONDS)
    assert group.started == ["on the device", "on the host"]
    assert [tensor.item() for tensor in tensors] == [2.0, 4.0]
    assert all(work.done() for work in works) and not sender.waiting


def test_what_cannot_start_raises_where_it_is_waited_for_and_the_next_one_runs() -> None:
    group: Any = Doubling()
    sender = ThroughHost(group)
    two, one = torch.ones(2), torch.ones(1)
    with recorded_streams():
        fails = sender.allreduce_(two, Sum, "fails", torch.empty(2))
        works = sender.allreduce_(one, Sum, "works", torch.empty(1))
        with pytest.raises(HorovodInternalError, match="a rank has left"):
            fails.wait()
        works.wait()
        sender.close(SECONDS)
    assert fails.done() and two.tolist() == [1.0, 1.0] and one.item() == 2.0


def test_a_copy_lies_in_pageable_memory_where_the_runtime_of_the_device_pins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty_like = torch.empty_like

    def without_pins(tensor: torch.Tensor, *, device: str, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("no pinned memory")
        return empty_like(tensor, device=device)

    asked: list[bool] = []
    monkeypatch.setattr(accelerator, "kind", lambda: "meta")
    monkeypatch.setattr(torch, "empty_like", without_pins)
    memory = accelerator.host_memory_like(torch.ones(3, dtype=torch.float16, device="meta"))
    assert asked == [True, False]
    assert (memory.is_cpu, memory.shape, memory.dtype) == (True, (3,), torch.float16)
