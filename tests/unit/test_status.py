"""The server that answers other ranks' questions at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.core.meeting import process_status
from dualdist.observation.status import Contact, StatusServer, ask

SECONDS = 20.0


@pytest.fixture
def server() -> Iterator[StatusServer]:
    made = StatusServer("127.0.0.1", lambda question: ["answer to", question])
    yield made
    made.close()


def test_questions_are_answered(server: StatusServer) -> None:
    for question in ("x", ["a", 1, None], "y" * 40_000):
        assert ask(server.contact, question, SECONDS) == ["answer to", question]


def test_a_server_that_is_closed_refuses(server: StatusServer) -> None:
    server.close()
    with pytest.raises(ConnectionError):
        ask(server.contact, "x", SECONDS)


def test_a_caller_without_the_token_gets_no_answer(server: StatusServer) -> None:
    with pytest.raises(ConnectionError, match="no rank answers"):
        ask(server.contact._replace(token="00" * 16), "x", SECONDS)
    for text in (b"\n", b"x\n", b"\xff\xfe\n", b"[" * 100_000, server.contact.token.encode() + b" {\n"):
        with socket.create_connection(server.contact[:2], SECONDS) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(text)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""
    assert ask(server.contact, "x", SECONDS) == ["answer to", "x"]


def test_silent_callers_delay_nobody(server: StatusServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(server.contact[:2], SECONDS)).sendall(b"x")
        assert ask(server.contact, "x", SECONDS) == ["answer to", "x"]


def test_another_program_that_answers_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        host, port = listener.getsockname()
        asked = pool.submit(ask, Contact(host, port, "token"), "x", SECONDS)
        with listener.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400\n")
            with pytest.raises(ConnectionError, match="another program answers"):
                asked.result()


def test_who_does_not_answer_in_time_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(Contact("127.0.0.1", listener.getsockname()[1], ""), "x", 0.2)
        assert time.monotonic() - start < SECONDS


def test_proc_tells_how_a_process_of_this_host_is(server: StatusServer) -> None:
    own = server.contact
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        contact = own._replace(process=process.pid, start=int(process_status(process.pid)[19]))
        assert contact.state(own).startswith("it runs: ")
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert contact.state(own) == "it is stopped"
        assert (
            contact._replace(start=contact.start + 1).state(own) == "its process has ended"
        )  # an ID that is used again
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert contact.state(own) == "its process has ended"  # its parent does not know yet
    assert contact.state(own) == "its process has ended"
    assert contact.state(own._replace(place="another host")) == ""


def test_another_program_at_the_port_is_no_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        contact = Contact("127.0.0.1", listener.getsockname()[1], "")

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"220 mail.example\n")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ConnectionError, match="another program"):
            ask(contact, "x", SECONDS)
        thread.join()
