"""The rules of averaging and scaling, on a group of any size that computes the sum itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from dualdist.core.agreement.connections import payload_capacity
from dualdist.core.backends.base import Group, Work
from dualdist.core.collectives.reduction import Reduction, payload_of, reduce_payloads, reduce_tensors
from dualdist.core.types import Average, Sum

from .test_movement import Done

SIZES = (1, 2, 3, 7, 49, 98, 103, 107, 161)
"""For some of them, size * (1 / size) is less than 1 in double precision."""


class EqualRanks:
    """A group of `size` ranks that have equal tensors: every sum is `size` times the tensor."""

    reduce_dtypes = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

    def __init__(self, size: int) -> None:
        self.size = size

    def wire_device(self, device: torch.device) -> torch.device:
        return device

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        tensor.mul_(self.size if op == Sum else 1)
        return Done()


def reduced(size: int, values: Sequence[float], reduction: Reduction, dtype: torch.dtype) -> list[float]:
    tensor = torch.tensor(values, dtype=dtype)
    reduce_tensors(cast(Group, EqualRanks(size)), [tensor], reduction)
    return tensor.tolist()


def reduced_as_payload(size: int, rows: Sequence[Sequence[int]], reduction: Reduction) -> list[float]:
    tensors = [torch.tensor(row) for row in rows]
    group = cast(Group, EqualRanks(size))
    payloads = [payload_of(group, [tensor], reduction) for tensor in tensors]
    reduce_payloads(group, payloads, tensors[:1], reduction)
    return tensors[0].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_average_of_equal_integers_is_that_integer(size: int) -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        assert reduced(size, [1, 0, 7], Reduction(Average), dtype) == [1, 0, 7]
    assert reduced_as_payload(size, [[1, -1, 5]] * size, Reduction(Average)) == [1, -1, 5]


def test_what_does_not_fit_travels_by_itself() -> None:
    group = cast(Group, EqualRanks(2))
    fits = payload_capacity(2) // 4
    assert len(payload_of(group, [torch.zeros(fits)], Reduction())) == 4 * fits
    assert payload_of(group, [torch.zeros(fits + 1)], Reduction()) == b""
    assert payload_of(group, [torch.zeros(1), torch.zeros(1, dtype=torch.int32)], Reduction()) == b""
