"""Ranks that meet before any backend runs. Without one rank, all others raise an error that names it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from dualdist.core import accelerator
from dualdist.core.backends.torch import TorchBackend
from dualdist.core.backends.torch_groups import StoreBoard
from dualdist.core.meeting import Board, KnownBoard, LaunchersBoard, Meeting, ServerAddress, links
from dualdist.core.meeting.server import TEXT, MeetingServer, connected, listener_at, reach
from dualdist.core.types import Launch, Settings
from dualdist.errors import ConfigurationError, HorovodInternalError, StallError
from dualdist.exec import pmi
from dualdist.horovod.http_store import HttpBoard, HttpStore
from dualdist.local_boards import FileBoard, HostBoard
from dualdist.mpi import meeting as mpi

from ..helpers.ports import free_ports
from ..helpers.requirements import need_programs, need_root
from ..helpers.world import ROOT

SIZE = 3
LAUNCH = Launch("x", 0, SIZE, local_size=SIZE)
SECONDS = 60.0
HOST = "127.0.0.1"


MakeBoard = Callable[[], Board]


@contextlib.contextmanager
def launchers() -> Iterator[MakeBoard]:
    secret = secrets.token_bytes(32)
    with MeetingServer(SIZE, [HOST], secret) as server:
        env = {"DUALDIST_RENDEZVOUS": f"{HOST}:{server.port}", "DUALDIST_SECRET": secret.hex()}
        yield lambda: LaunchersBoard(env)


@pytest.fixture(params=["launcher's", "file", "host", "horovodrun's", "store", "given"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBoard]:
    shared, address = HashStore(), ServerAddress([HOST], free_ports(1), b"")
    with launchers() as of_launcher, HttpStore(HOST, {}) as values:  # which answers as horovodrun's server
        boards: dict[str, MakeBoard] = {
            "launcher's": of_launcher,
            "file": lambda: FileBoard(LAUNCH, {}, tmp_path / "job"),
            "host": lambda: HostBoard(f"{tmp_path}"),
            "horovodrun's": lambda: HttpBoard(LAUNCH, {}, f"{HOST}:{values.port}"),
            "store": lambda: StoreBoard(LAUNCH, {}, shared),
            "given": lambda: KnownBoard(address, "there", "Look."),
        }
        yield boards[request.param]


def error_of(board: MakeBoard, timeout: float, rank: int) -> str:
    """Gather without some ranks, and return the error."""
    with pytest.raises(ConfigurationError) as caught, Meeting(board(), rank, SIZE, timeout) as meeting:
        meeting.gather("here")
    return str(caught.value)


def test_all_ranks_get_all_texts_at_each_start(board: MakeBoard) -> None:
    def start(rank: int, number: int) -> list[list[str]]:
        with Meeting(board(), rank, SIZE, SECONDS) as meeting:
            return [meeting.gather(f"{number} {part} {rank}") for part in range(2)]

    def run(rank: int) -> list[list[list[str]]]:
        return [start(rank, number) for number in range(3)]

    expected = [[[f"{number} {part} {rank}" for rank in range(SIZE)] for part in range(2)] for number in range(3)]
    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(run, range(SIZE))) == [expected] * SIZE


class Announced(Meeting):
    """A meeting that says when it has sent its text: a rank that comes to the server afterwards is later."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_sent = threading.Event()

    def _send(self, *message: Any) -> None:
        super()._send(*message)
        if message[0] == TEXT:
            self.has_sent.set()


def errors_of(
    board: MakeBoard, first: int, last: int, seconds: float = 0.0
) -> tuple[list[str], list[tuple[int, bool]]]:
    """Let rank `first` arrive, and then rank `last`, which waits for so many seconds.

    Return the errors of `last` and `first`, and the ranks in the order in which they know the error, each with whether
    it reports the error.
    """
    noted: list[tuple[int, bool]] = []
    meetings = {}
    for rank in sorted((first, last)):  # rank 0 starts the server

        def on_error(error: str, is_own: bool, rank: int = rank) -> None:
            noted.append((rank, is_own))

        meetings[rank] = Announced(board(), rank, SIZE, 600.0 if rank == first else seconds, on_error)

    def gather(rank: int) -> str:
        with pytest.raises(ConfigurationError) as caught, meetings[rank] as meeting:
            meeting.gather("here")
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, first)
        assert meetings[first].has_sent.wait(SECONDS)
        return [gather(last), waiting.result()], noted


@pytest.mark.parametrize("missing", range(SIZE))
def test_the_rank_that_waited_longest_ends_the_wait_of_all_and_reports_first_who_is_missing(
    board: MakeBoard, missing: int
) -> None:
    one, other = (rank for rank in range(SIZE) if rank != missing)
    named = f"waited 0 s for rank {missing}, which did not arrive. Look at its output; "
    if missing == 0 and not board().is_launchers:  # it would run the server; at a known address, nobody answers
        for error in (error_of(board, 0.0, rank) for rank in (one, other)):
            assert named in error or "Connection refused. Look." in error
        return
    for first, last in ((one, other), (other, one)):
        errors, noted = errors_of(board, first, last)
        assert errors[0].startswith(f"Rank {last} {named}") and errors == [errors[0]] * 2
        assert "DUALDIST_START_TIMEOUT_SECONDS" in errors[0]
        assert noted == [(last, True), (first, False)]


def test_the_error_names_the_whole_timeout_of_a_rank_that_found_the_server_late(
    board: MakeBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Meeting._connect
    monkeypatch.setattr(Meeting, "_connect", lambda self, left: not 0.1 < left < 1 and connect(self, left))
    error, _ = errors_of(board, 0, 2, 0.6)[0]
    assert error.startswith("Rank 2 waited 1 s for rank 1, which did not arrive")  # 0.1 s would be 0 s


def test_an_address_that_an_earlier_start_has_left_disturbs_nobody(tmp_path: Path) -> None:
    board = FileBoard(LAUNCH, {}, tmp_path / "job")
    left = board.serve(SIZE)
    left.close()
    test_all_ranks_get_all_texts_at_each_start(lambda: FileBoard(LAUNCH, {}, tmp_path / "job"))
    assert not list(tmp_path.iterdir())


def test_a_second_rank_0_of_a_host_is_refused(tmp_path: Path) -> None:
    first = HostBoard(f"{tmp_path}").serve(SIZE)
    with pytest.raises(ConfigurationError, match=r"must be free for rank 0, but is not \(Address already in use\)"):
        HostBoard(f"{tmp_path}").serve(SIZE)
    first.close()
    HostBoard(f"{tmp_path}").serve(SIZE).close()


def test_a_process_of_another_user_takes_no_part_in_the_meeting_of_a_host(tmp_path: Path) -> None:
    need_root()
    with HostBoard(f"{tmp_path}").serve(SIZE):
        place = HostBoard(f"{tmp_path}").find(0.0)
        assert place is not None
        reach([(place.hosts[0], 0)], place.secret, SECONDS).close()
        code = (
            "import os, socket, sys; os.setuid(65534); one = socket.socket(socket.AF_UNIX); one.settimeout(60); "
            "one.connect('\\0' + sys.argv[1]); assert one.recv(1) == b''"
        )
        subprocess.run([sys.executable, "-c", code, f"{tmp_path}"], check=True, timeout=SECONDS)


def test_a_process_that_accepts_nobody_holds_up_no_rank_of_a_host(tmp_path: Path) -> None:
    with listener_at(f"\0{tmp_path}", 0) as listener, contextlib.ExitStack() as stack:
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{tmp_path}")  # nobody else has room
        assert "rank 0, which did not arrive" in error_of(lambda: HostBoard(f"{tmp_path}"), 0.0, 1)


def test_process_ids_of_another_namespace_identify_no_job() -> None:
    need_root()
    need_programs("unshare")
    code = (
        "from dualdist.local_boards import host_board; from dualdist.core.types import Launch; "
        "host_board(Launch('x', sources={'rank': 'A_RANK'}), {})"
    )
    # Beneath a shell, which would be taken for the first process of the host: both have the number 1.
    command = ("unshare", "--pid", "--fork", "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code)
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert ended.returncode == 1
    assert "The process that set A_RANK must be visible" in ended.stderr


@pytest.mark.parametrize("content", ["a text\n", '{"a": 1}\n', b"\xff\x00"])
def test_a_file_with_other_content_is_refused_and_stays(content: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_bytes(data := content if isinstance(content, bytes) else content.encode())
    for rank in range(2):
        error = error_of(lambda: FileBoard(LAUNCH, {}, file), 0.0, rank)
        assert "must be a new file, or one that an earlier start has left" in error
    assert file.read_bytes() == data


def test_a_rank_that_ends_before_all_have_arrived_can_come_again(board: MakeBoard) -> None:
    def run(rank: int) -> list[str]:
        with Meeting(board(), rank, SIZE, SECONDS) as meeting:
            return meeting.gather(str(rank))

    with ThreadPoolExecutor(SIZE) as pool:
        error_of(board, 0.0, 1)
        assert list(pool.map(run, range(SIZE))) == [["0", "1", "2"]] * SIZE


def test_all_can_meet_after_a_rank_has_died_while_it_reported_who_is_missing() -> None:
    def die(error: str, is_own: bool) -> None:
        raise KeyboardInterrupt

    with launchers() as board:
        with pytest.raises(KeyboardInterrupt), Meeting(board(), 1, SIZE, 0.0, die) as meeting:
            meeting.gather("here")
        test_all_ranks_get_all_texts_at_each_start(board)


@contextlib.contextmanager
def gathered() -> Iterator[list[Meeting]]:
    """Yield the meetings of all ranks, which have arrived."""
    shared = HashStore()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(SIZE) as pool:

        def arrive(rank: int) -> Meeting:
            meeting = Meeting(StoreBoard(LAUNCH, {}, shared), rank, SIZE, SECONDS)
            stack.callback(meeting.close, started=False)
            meeting.gather("")
            return meeting

        yield list(pool.map(arrive, range(SIZE)))


def test_a_rank_that_ends_while_nccl_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own function has no timeout. It runs in a thread with the device of this rank."""
    device, bound = torch.device("cuda", 1), []
    connects, never = threading.Event(), threading.Event()
    monkeypatch.setattr(accelerator, "bind", lambda device: bound.append((threading.current_thread(), device)))

    def connect() -> None:
        bound.append((threading.current_thread(), "connects"))
        connects.set()
        never.wait(20)

    with gathered() as meetings, ThreadPoolExecutor(1) as pool:
        backend = SimpleNamespace(
            _meeting=meetings[0], device=device, transport="nccl", _settings=Settings(start_timeout_seconds=SECONDS)
        )
        start: Any = TorchBackend.start_step
        step = pool.submit(start, backend, connect)
        assert connects.wait(SECONDS)
        meetings[1].close(started=False)
        with pytest.raises(HorovodInternalError, match="rank 1 has ended, is stopped"):
            step.result()
    never.set()
    thread = bound[0][0]
    assert bound == [(thread, device), (thread, "connects")]


def test_a_rank_that_ends_while_later_groups_connect_ends_the_wait() -> None:
    never = threading.Event()
    backend = SimpleNamespace(
        _meeting=None,
        device=None,
        transport="gloo",
        has_lost_rank=lambda: True,
        _timeout=timedelta(minutes=10),
        _settings=Settings(),
    )
    start: Any = TorchBackend.start_step
    with pytest.raises(HorovodInternalError, match="a rank has left"):
        start(backend, lambda: never.wait(20))
    never.set()


def test_a_step_that_takes_too_long_while_all_are_alive_has_stalled() -> None:
    step: Future[int] = Future()
    with gathered() as meetings, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(meeting.wait_for, step, SECONDS) for meeting in meetings[1:]]
        with pytest.raises(
            StallError, match=r"Rank 0 could not connect to the other ranks in 0\.1 s\. Look at their output"
        ):
            meetings[0].wait_for(Future(), 0.1)
        step.set_result(7)
        assert [other.result() for other in others] == [7, 7]


def test_a_rank_that_has_started_may_leave() -> None:
    with gathered() as meetings:
        meetings[1].close(started=True)
        meetings[2].check()
        meetings[0].close(started=True)
        meetings[2].check()


SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    with MeetingServer(1, [HOST], SECRET) as server:
        yield server


def rest(connection: socket.socket) -> bytes:
    """Return everything that arrives until the other end closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def test_a_wrong_secret_gets_nothing(server: MeetingServer) -> None:
    with pytest.raises(OSError, match="did not prove that it knows this job's secret"):
        reach([(HOST, server.port)], b"t" * 32, SECONDS)


def test_a_server_without_the_secret_is_refused() -> None:
    with MeetingServer(1, [HOST], SECRET) as honest, socket.create_server((HOST, 0)) as listener:

        def relay() -> None:
            # Passes on the greeting and accepts every client.
            connection, _ = listener.accept()
            with connection, connected(HOST, honest.port, SECONDS) as real:
                connection.sendall(real.recv(1 << 16))
                connection.recv(1 << 16)
                connection.sendall(bytes(32))

        with ThreadPoolExecutor(1) as pool:
            relayed = pool.submit(relay)
            with pytest.raises(OSError, match="did not prove"):
                reach([(HOST, listener.getsockname()[1])], SECRET, SECONDS)
            relayed.result()


def test_a_client_cannot_use_one_connection_to_answer_the_challenge_of_another(server: MeetingServer) -> None:
    with connected(HOST, server.port, SECONDS) as one, connected(HOST, server.port, SECONDS) as other:
        challenge = one.recv(1 << 16)[-32:]
        other.recv(1 << 16)
        other.sendall(challenge + bytes(32))
        one.sendall(challenge + bytes(32))
        assert (rest(one), rest(other)) == (b"", b"")


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 63])
def test_silent_and_wrong_clients_do_not_delay_others(words: bytes, server: MeetingServer) -> None:
    board = KnownBoard(ServerAddress([HOST], [server.port], SECRET), "there", "Look.")
    with connected(HOST, server.port, SECONDS) as other:
        other.sendall(words)
        board.serve = lambda size: None  # type: ignore[method-assign]
        with Meeting(board, 0, 1, SECONDS) as meeting:
            assert meeting.gather("here") == ["here"]


def test_a_port_that_is_taken_on_one_address_is_not_chosen() -> None:
    need_programs("unshare", "ip")
    need_root()
    source = """
import contextlib, socket
from dualdist.core.meeting.server import MeetingServer

with contextlib.ExitStack() as stack:
    taken = [stack.enter_context(socket.create_server(("127.0.0.2", 0))) for _ in range(9)]
    with MeetingServer(1, ["127.0.0.1", "127.0.0.2"], bytes(32)) as server:
        ports = {place.getsockname()[1] for place in taken}
        print({server.port} | ports == set(range(40000, 40010)))
"""
    ports = 'ip link set lo up; echo 40000 40009 > /proc/sys/net/ipv4/ip_local_port_range; exec $0 -c "$1"'
    command = ["unshare", "--net", "sh", "-c", ports, sys.executable, source]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_host_of_rank_0_without_an_ipv4_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "candidates", lambda env: [])
    other = iter(['["other", "", null]', '["", 0, []]', "{}"])
    with pytest.raises(ConfigurationError, match=r"\(which has none\), but other reached none instead"):
        links.find_addresses(0, lambda text: [text, next(other)], {})


# The connection stays open until the process ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reads", [False, True])
def test_a_process_manager_that_has_closed_is_an_error(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    own, other = socket.socketpair()
    if reads:
        other.shutdown(socket.SHUT_WR)
    else:
        other.close()
    with own, other:
        monkeypatch.setenv("PMI_FD", str(own.fileno()))
        with pytest.raises(ConfigurationError, match=r"must answer 'init .*', but has closed"):
            pmi.Pmi1()


def test_the_server_listens_only_on_its_addresses() -> None:
    with MeetingServer(1, [HOST, "127.0.0.2"], SECRET) as server:
        for host in (HOST, "127.0.0.2"):
            reach([(host, server.port)], SECRET, SECONDS).close()
        with pytest.raises(ConnectionRefusedError):
            connected("127.0.0.3", server.port, SECONDS)


class FakeRequest:
    """MPI's requests: a poll of one that is open completes it, but returns that it is open, as Open MPI may do."""

    is_complete = False

    @staticmethod
    def Testall(requests: list[FakeRequest]) -> bool:
        are_complete = all(request.is_complete for request in requests)
        for request in requests:
            request.is_complete = True
        return are_complete


def test_mpi_ends_as_usual_after_messages_that_the_last_poll_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[object] = []
    monkeypatch.setattr(mpi, "never_finalize", reasons.append)
    monkeypatch.setattr(mpi, "library", lambda: SimpleNamespace(Request=FakeRequest, BYTE=None))
    monkeypatch.setattr(mpi, "rising", lambda *_: itertools.repeat(SECONDS))  # no second poll
    world = SimpleNamespace(Get_size=lambda: SIZE, Isend=lambda *_: FakeRequest())
    board = mpi.MpiBoard(LAUNCH, {}, world)
    board.write("an address")
    board.clear()
    assert not reasons


def test_a_rank_that_runs_is_never_missing_however_often_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[socket.socket] = []
    monkeypatch.setattr(mpi, "_own", own)
    env = {"PMIX_SERVER_URI": secrets.token_hex(8)}
    launch = Launch("x", 0, 2, local_rank=0, local_size=2, starts_mpi=True)
    with mpi.limited_start(env, SECONDS) as limit:
        limit.announce(launch)
    with own[0]:
        assert [limit.missing() for _ in range(100)] == [[1]] * 100
