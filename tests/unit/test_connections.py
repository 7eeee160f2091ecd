"""What the members of a process set send to each other; here the members are threads of one process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from dualdist.core.agreement.channel import News
from dualdist.core.agreement.connections import Connections
from dualdist.core.meeting.links import Address, Links, Listener
from dualdist.core.meeting.server import connected
from dualdist.errors import HorovodInternalError

T = TypeVar("T")


def each_of(size: int, member: Callable[[Connections], T]) -> list[T]:
    """Return what `member` returns for each of `size` members."""

    def run(listener: Listener, rank: int) -> T:
        with contextlib.closing(Connections(listener, "test", range(size), rank, timeout=20)) as peers:
            return member(peers)

    with listeners(size) as made, ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, made, range(size)))


@contextlib.contextmanager
def listeners(size: int) -> Iterator[list[Listener]]:
    """Yield one for each of `size` members, with the addresses of all."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(Listener("127.0.0.1"))) for _ in range(size)]
        for listener in made:
            listener.ranks = [other.address for other in made]
        yield made


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
                peers.allgather_messages(b"")
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
        assert peers.has_failed_peer() == (handled is not None)
        return peers.peers_that_succeeded()

    assert each_of(2, member)[0] == ([1] if handled is None else [])


def test_members_accept_calls_while_their_own_are_unanswered() -> None:
    """Otherwise each of n members would wait for the next one: n steps at the start of a world."""

    def close_at_once(listener: Listener, rank: int) -> None:
        Connections(listener, "test", range(3), rank, timeout=20).close()

    with listeners(2) as made, ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as last:
        last.settimeout(20)
        for listener in made:
            listener.ranks = [*listener.ranks, Address("127.0.0.1", last.getsockname()[1], "token")]
        others = [pool.submit(close_at_once, listener, rank) for rank, listener in enumerate(made)]
        callers = [last.accept()[0] for _ in others]
        assert {caller.recv(100) for caller in callers} == {b"token %d connections/test" % rank for rank in (0, 1)}
        for caller in callers:
            caller.sendall(b"\1")
        for other in others:
            other.result()
        for caller in callers:
            caller.close()


@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["TCP", "Unix"])
def test_a_call_waits_until_it_is_wanted_and_strangers_get_nothing(host: str) -> None:
    """A member may connect for the next set before this one, and strangers may be silent, or do not know the token."""

    def link(name: str, rank: int) -> Links:
        links = Links((0, 1), rank)
        links.connect(made[rank], addresses, name, 20)
        return links

    made = [Listener(host) for _ in range(2)]
    addresses = [listener.address for listener in made]
    strangers = [connected(*addresses[1][:2], 20) for _ in range(3)]
    strangers[1].sendall(b"GET / HTTP/1.1")
    strangers[2].sendall(f"{'0' * 32} 0 second".encode())
    with ThreadPoolExecutor(2) as pool:
        ahead = [pool.submit(link, name, 0) for name in ("first", "second")]
        behind = [link(name, 1) for name in ("second", "first")]
        for one, other in zip(ahead, reversed(behind), strict=True):
            one.result().sockets[1].send(b"here")
            assert other.sockets[0].recv(4) == b"here"
    assert [stranger.recv(1) for stranger in strangers[1:]] == [b"", b""]
    for stranger in strangers:
        stranger.close()
    for links in (*behind, *(one.result() for one in ahead)):
        links.close()
    for listener in made:
        listener.close()


def test_a_peer_that_is_gone_is_named() -> None:
    with listeners(3) as made:
        made[2].close()
        with pytest.raises(HorovodInternalError, match=r"Rank 0 could not connect to rank 2 of \[0, 2\]: .*refused"):
            Connections(made[0], "test", (0, 2), 0, timeout=20)
        with pytest.raises(HorovodInternalError, match=r"rank 0 of \[0, 1\]: nothing arrived for 0.1 s"):
            Connections(made[1], "test", (0, 1), 1, timeout=0.1)
