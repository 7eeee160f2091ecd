"""The order in which gradients arrive, and when buckets are complete."""

from __future__ import annotations

import torch

from dualdist.arrival_order import ArrivalOrder
from dualdist.core.gradients.buckets import TrackedParameter, lay_out


def order_of(groups: list[list[int]], length: int = 1) -> ArrivalOrder:
    """Return the order of four parameters of a length; the last group is the first bucket."""
    params = [TrackedParameter("", torch.empty(length, device="cpu")) for _ in range(4)]
    return ArrivalOrder(lay_out(params, set(), groups))


def test_a_bucket_is_complete_when_all_its_gradients_have_arrived() -> None:
    order = order_of([[0, 1], [2, 3]])
    order.mark([3, 1])
    assert not order.is_complete(0) and not order.is_complete(1)
    order.mark([2])
    assert order.is_complete(0) and not order.is_complete(1) and not order.is_complete(2)
    order.start_over()
    assert not order.is_complete(0)


def test_it_stops_where_the_next_bucket_can_be_sent() -> None:
    order = order_of([[0, 1], [2, 3]])
    order.learn([3, 2, 1, 0])
    assert (order.expected, order.stops) == ([3, 2, 1, 0], [2, 4])
    order.learn([3, 1, 0, 2])  # the second bucket must wait for the first one
    assert (order.expected, order.stops) == ([3, 1, 0, 2], [4])


def test_only_an_order_of_all_gradients_is_learned() -> None:
    order = order_of([[0, 1], [2, 3]])
    for incomplete in ([3, 2, 1], [3, 2, 1, 1], [3, 2, 1, 0, 0]):
        order.learn(incomplete)
        assert not order.expected


def test_large_gradients_move_while_their_bucket_is_incomplete() -> None:
    order = order_of([[0, 1, 2], [3]], length=1 << 17)  # half of 1 MiB
    assert order.take_waiting([3, 2], 1) == {1: [2]}
    assert order.take_waiting([1], 1) == {}
    order.learn([3, 2, 1, 0])
    assert order.stops == [1, 2, 4]
