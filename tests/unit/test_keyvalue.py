"""The key-value server: only clients that know the secret can use it."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dualdist.errors import ConfigurationError
from dualdist.meeting.keyvalue import LONGEST_KEY, LONGEST_VALUE, KeyValueClient, KeyValueServer

SECRET = b"s" * 32
TIMEOUT = 0.3
"""Seconds that the server here waits for a client. Short, because tests wait until it is over."""


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer("127.0.0.1", secret=SECRET, timeout=TIMEOUT) as server:
        yield server


def connected(server: KeyValueServer) -> KeyValueClient:
    return KeyValueClient(server.host, server.port, SECRET)


def stranger(server: KeyValueServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=20)


def rest(connection: socket.socket) -> bytes:
    """Return everything that arrives until the other end closes."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_a_value_that_one_client_sets_is_read_by_another(server: KeyValueServer) -> None:
    with connected(server) as one, connected(server) as other:
        one.set("a", b"\0\xff")
        assert other.get("a", 0) == b"\0\xff"
        other.set("a", b"x" * LONGEST_VALUE)
        assert one.get("a", 0) == b"x" * LONGEST_VALUE
        other.set("a", b"")
        with pytest.raises(TimeoutError):
            one.get("a", 0)


def test_one_server_listens_on_several_addresses() -> None:
    with KeyValueServer("127.0.0.1", "127.0.0.2", secret=SECRET) as server:
        with (
            KeyValueClient("127.0.0.1", server.port, SECRET) as one,
            KeyValueClient("127.0.0.2", server.port, SECRET) as other,
        ):
            one.set("a", b"1")
            assert other.get("a", 0) == b"1"
        with pytest.raises(ConfigurationError):
            KeyValueClient("127.0.0.3", server.port, SECRET)


def test_get_waits_until_the_value_is_set(server: KeyValueServer) -> None:
    got: list[bytes] = []
    with connected(server) as one, connected(server) as other:
        waiting = threading.Thread(target=lambda: got.append(other.get("late", 20)))
        waiting.start()
        one.set("other", b"no")
        one.set("late", b"value")
        waiting.join(20)
    assert got == [b"value"]


def test_get_of_what_nobody_sets_times_out_and_the_connection_stays_good(server: KeyValueServer) -> None:
    with connected(server) as store:
        for seconds in (0, 0.01):
            with pytest.raises(TimeoutError, match="'never'"):
                store.get("never", seconds)
        store.set("a", b"1")
        assert store.get("a", 0) == b"1"


def test_a_wrong_secret_gets_nothing(server: KeyValueServer) -> None:
    with pytest.raises(ConfigurationError, match="DUALDIST_SECRET"):
        KeyValueClient(server.host, server.port, b"t" * 32)


def test_a_server_without_the_secret_is_refused_by_the_client() -> None:
    with (
        KeyValueServer("127.0.0.1", secret=SECRET) as honest,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        def relay() -> None:
            # Passes on the greeting and accepts every client.
            connection, _ = listener.accept()
            with connection, stranger(honest) as real:
                connection.sendall(real.recv(1 << 16))
                connection.recv(1 << 16)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(ConfigurationError, match="its proof is wrong"):
            KeyValueClient("127.0.0.1", listener.getsockname()[1], SECRET)
        thread.join(20)


def test_a_client_cannot_use_one_connection_to_answer_the_challenge_of_another(
    server: KeyValueServer,
) -> None:
    with stranger(server) as one, stranger(server) as other:
        challenge = one.recv(1 << 16)[-32:]
        other.recv(1 << 16)
        other.sendall(challenge + bytes(32))
        one.sendall(challenge + bytes(32))
        assert (rest(one), rest(other)) == (b"", b"")


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 63], ids=["silence", "http", "short"]
)
def test_silent_and_wrong_clients_are_disconnected_and_do_not_delay_others(
    words: bytes, server: KeyValueServer
) -> None:
    with stranger(server) as other, connected(server) as store:
        other.sendall(words)
        store.set("a", b"1")
        assert store.get("a", 0) == b"1"
        greeting = rest(other)  # until the server closes the connection
        assert len(greeting) == len(b"dualdist-kv-1\n") + 32


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("!cHId", b"S", LONGEST_KEY + 1, 0, 0),
        struct.pack("!cHId", b"S", 1, LONGEST_VALUE + 1, 0),
        struct.pack("!cHId", b"X", 1, 0, 0) + b"k",
        struct.pack("!cHId", b"S", 1, 9, 0) + b"k",
    ],
    ids=["long key", "long value", "unknown", "half"],
)
def test_a_wrong_request_ends_only_its_own_connection(request_: bytes, server: KeyValueServer) -> None:
    with connected(server) as bad, connected(server) as good:
        bad._socket.settimeout(20)
        bad._socket.sendall(request_)
        assert rest(bad._socket) == b""
        good.set("a", b"1")
        with pytest.raises(TimeoutError):
            good.get("k", 0)


CROWDED = """
import resource, sys
from dualdist.meeting.keyvalue import KeyValueServer
with KeyValueServer("127.0.0.1", secret=b"s" * 32, timeout=600) as server:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    print(server.port, flush=True)
    sys.stdin.read()
"""
"""A server that may open 20 files, until its standard input ends."""


def test_a_server_at_its_limit_of_files_reports_it_in_one_line_and_serves_again_later() -> None:
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", CROWDED]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        )
        assert process.stdin and process.stdout and process.stderr
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            assert "cannot accept connections: Too many open files" in process.stderr.readline()
        with KeyValueClient("127.0.0.1", port, SECRET, timeout=20) as client:
            client.set("a", b"1")
            assert client.get("a", 0) == b"1"
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_too_long_keys_and_values_are_refused_before_they_are_sent(server: KeyValueServer) -> None:
    with connected(server) as store:
        with pytest.raises(ValueError, match=str(LONGEST_VALUE)):
            store.set("a", bytes(LONGEST_VALUE + 1))
        with pytest.raises(ValueError, match=str(LONGEST_KEY)):
            store.get("a" * (LONGEST_KEY + 1), 0)
        store.set("a", b"1")


def test_the_server_listens_only_on_its_address(server: KeyValueServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=20)


def test_the_error_after_the_server_closed_names_its_address(server: KeyValueServer) -> None:
    with connected(server) as store:
        server.close()
        with pytest.raises(OSError):
            store.get("a", 20)
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{server.port}"):
        KeyValueClient(server.host, server.port, SECRET)
