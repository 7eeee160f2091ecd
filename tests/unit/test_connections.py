"""What the members of a process set send to each other; here the members are threads of one process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from dualdist.core.agreement.channel import News
from dualdist.core.agreement.connections import Connections
from dualdist.errors import HorovodInternalError

T = TypeVar("T")


def each_of(size: int, member: Callable[[Connections], T]) -> list[T]:
    """Return what `member` returns for each of `size` members."""
    store = HashStore()

    def run(rank: int) -> T:
        peers = Connections(store, "test", range(size), rank, "127.0.0.1", timeout=20)
        try:
            return member(peers)
        finally:
            peers.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_member_gets_all_messages_in_rank_order_whatever_their_lengths(size: int) -> None:
    messages = [bytes([rank]) * 1000 * rank for rank in range(size)]
    received = each_of(size, lambda peers: peers.allgather_messages(messages[peers.rank]))
    assert received == [messages] * size


def test_messages_larger_than_the_socket_buffers_arrive_whole() -> None:
    messages = [bytes([rank]) * (16 << 20) for rank in range(3)]
    received = each_of(3, lambda peers: peers.allgather_messages(messages[peers.rank]))
    assert received == [messages] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_member_may_be_ahead_and_may_leave_after_its_last_message(size: int) -> None:
    def member(peers: Connections) -> list[list[bytes]]:
        return [peers.allgather_messages(b"%d" % (number * size + peers.rank)) for number in range(200)]

    expected = [[b"%d" % (number * size + rank) for rank in range(size)] for number in range(200)]
    assert each_of(size, member) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_members_that_wait_are_woken_by_one_with_news(size: int) -> None:
    def member(peers: Connections) -> list[int]:
        with contextlib.closing(News()) as news, news.listening() as signal:
            for number in range(20):
                while peers.rank != number % size and not peers.wait_for_peers(signal, 20):
                    pass
                peers.alert()
                received = peers.allgather_messages(b"%d" % number)
        return [int(message) for message in received]

    assert each_of(size, member) == [[19] * size] * size


def test_news_of_the_member_itself_end_its_wait() -> None:
    def member(peers: Connections) -> bool:
        with contextlib.closing(News()) as news, news.listening() as signal:
            news.give()
            has_peer = peers.wait_for_peers(signal, 20)
            news.clear()
            return has_peer or peers.wait_for_peers(signal, 0)

    assert each_of(1, member) == [False]


@pytest.mark.parametrize("waits", [True, False])
def test_a_member_that_leaves_is_an_error_for_the_others_and_wakes_those_that_wait(waits: bool) -> None:
    def member(peers: Connections) -> str:
        if peers.rank == 1:
            return "left"
        if waits:
            with contextlib.closing(News()) as news, news.listening() as signal:
                assert peers.wait_for_peers(signal, 20)
        with pytest.raises(HorovodInternalError, match=r"a rank has left|connection to a rank was lost"):
            peers.alert() if waits else peers.allgather_messages(b"here")
        return "noticed"

    assert each_of(2, member) == ["noticed", "left"]


def test_a_member_that_closes_without_a_goodbye_is_lost() -> None:
    closed = threading.Barrier(3)

    def member(peers: Connections) -> list[bool]:
        found = [peers.has_lost_peer()]
        for farewell in (True, False):
            closed.wait()
            if peers.rank == int(farewell):
                if farewell:
                    peers.say_goodbye()
                peers.close()
            closed.wait()
            found.append(peers.has_lost_peer())
        return found

    assert each_of(3, member)[2] == [False, False, True]


@pytest.mark.parametrize("handled", [None, RuntimeError()])
def test_a_member_that_leaves_because_of_an_exception_has_not_succeeded(handled: Exception | None) -> None:
    def member(peers: Connections) -> list[int]:
        if peers.rank == 1:
            try:
                if handled is not None:
                    raise handled
                peers.say_goodbye()
            except RuntimeError:
                peers.say_goodbye()
            return []
        with pytest.raises(HorovodInternalError):
            peers.allgather_messages(b"here")
        assert not peers.has_lost_peer()
        return peers.peers_that_succeeded()

    assert each_of(2, member)[0] == ([1] if handled is None else [])


def test_members_accept_calls_while_their_own_are_unanswered() -> None:
    """Otherwise each of n members would wait for the next one: n steps at the start of a world."""
    store, token = HashStore(), b"t" * 16

    def close_at_once(rank: int) -> None:
        Connections(store, "test", range(3), rank, "127.0.0.1", timeout=20).close()

    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as last:
        last.settimeout(20)
        host, port = last.getsockname()
        store.set("connections/test/2", json.dumps([host, port, token.hex()]))
        others = [pool.submit(close_at_once, rank) for rank in range(2)]
        callers = [last.accept()[0] for _ in others]
        assert {caller.recv(20, socket.MSG_WAITALL)[16] for caller in callers} == {0, 1}
        for caller in callers:
            caller.sendall(b"\1")
        for other in others:
            other.result()
        for caller in callers:
            caller.close()
