"""What members of a large group send besides the rows, seen from member 0."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dualdist.core.backends.base import Group, Work
from dualdist.core.collectives.wire import alltoall_rows
from dualdist.rooted_collectives import gather_rows

SIZE = 64


class Done(Work):
    """What has ended at once."""

    def wait(self) -> None:
        """Return."""

    def done(self) -> bool:
        return True


class FirstOfMany(Group):
    """Member 0 of a group whose other members send what this one sends to them."""

    def __init__(self) -> None:
        super().__init__(range(SIZE), 0)
        self.received: list[int] = []
        """How many bytes have arrived in each exchange."""

    def wire_device(self, device: torch.device) -> torch.device:
        return device

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        raise AssertionError("no reduction is expected")

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        raise AssertionError("no broadcast is expected")

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self.received.append(output.numel())
        return Done()

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        assert len(output) == sum(received) and len(tensor) == sum(sent)
        self.received.append(output.numel())
        if list(received) == list(sent):
            output.copy_(tensor)
        return Done()


@pytest.fixture
def group() -> FirstOfMany:
    return FirstOfMany()


def test_alltoall_sends_each_member_only_its_own_count(group: FirstOfMany) -> None:
    splits = [place % 2 for place in range(SIZE)]
    tensor = torch.arange(float(sum(splits)))
    rows, received = alltoall_rows(group, tensor, splits, [sum(splits)] * SIZE)
    torch.testing.assert_close(rows, tensor)
    assert received == splits
    assert group.received == [8 * SIZE, 4 * sum(splits)]


def test_an_alltoall_without_rows_on_any_member_sends_no_data(group: FirstOfMany) -> None:
    rows, received = alltoall_rows(group, torch.empty(0, 3), [0] * SIZE, [0] * SIZE)
    assert rows.shape == (0, 3) and received == [0] * SIZE
    assert group.received == [8 * SIZE]


@pytest.mark.parametrize("root", [0, 1])
def test_gather_needs_no_exchange_of_counts(group: FirstOfMany, root: int) -> None:
    counts = [2] * SIZE
    rows, received = gather_rows(group, torch.ones(2, 3), root, counts)
    expected = counts if root == 0 else [0] * SIZE
    assert received == expected and rows.shape == (sum(expected), 3)
    assert group.received == [sum(expected) * 3 * 4]
