"""What the members of a process set tell each other, between threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from dualdist.agreement.connections import Mesh
from dualdist.errors import HorovodInternalError

T = TypeVar("T")


def each_of(size: int, member: Callable[[Mesh], T]) -> list[T]:
    """Return what `member` returns for each of `size` members."""
    store = HashStore()

    def run(rank: int) -> T:
        mesh = Mesh(store, "test", range(size), rank, "127.0.0.1", timeout=20)
        try:
            return member(mesh)
        finally:
            mesh.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_member_gets_all_messages_in_rank_order_whatever_their_lengths(size: int) -> None:
    messages = [bytes([rank]) * 1000 * rank for rank in range(size)]
    assert each_of(size, lambda mesh: mesh.exchange(messages[mesh.rank])) == [messages] * size


def test_messages_larger_than_a_connection_holds_arrive_whole() -> None:
    messages = [bytes([rank]) * (16 << 20) for rank in range(3)]
    assert each_of(3, lambda mesh: mesh.exchange(messages[mesh.rank])) == [messages] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_member_that_is_ahead_or_has_left_behind_its_last_message_disturbs_nobody(size: int) -> None:
    def member(mesh: Mesh) -> list[list[bytes]]:
        return [mesh.exchange(b"%d" % (number * size + mesh.rank)) for number in range(200)]

    expected = [[b"%d" % (number * size + rank) for rank in range(size)] for number in range(200)]
    assert each_of(size, member) == [expected] * size


def test_a_member_that_leaves_is_an_error_for_the_others() -> None:
    def member(mesh: Mesh) -> str:
        if mesh.rank == 1:
            return "left"
        with pytest.raises(HorovodInternalError, match=r"a rank has left|connection to a rank was lost"):
            mesh.exchange(b"here")
        return "noticed"

    assert each_of(2, member) == ["noticed", "left"]
