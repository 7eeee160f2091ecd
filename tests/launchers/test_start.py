"""A rank that dies before or during `init`: the others raise soon, and name it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from ..helpers.at_once import started_at_once
from ..helpers.ports import free_ports
from ..helpers.requirements import need, need_modules, need_programs, need_root
from ..helpers.script_launch import Script, finish

SCRIPT = """\
import multiprocessing, os, pathlib, signal, sys
import torch.distributed
import dualdist as hvd
from dualdist import shared_memory
from dualdist.core.meeting import Meeting
from dualdist.core import world

def end(*arguments, **options):
    os._exit(1)

def stop(*arguments, **options):
    os.kill(os.getpid(), signal.SIGSTOP)

def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

def connect_of(rank, folder, is_last):
    connections = world.Connections
    def connect(*arguments, **options):
        (folder / str(rank)).touch()
        if rank == 1:
            while not all((folder / other).exists() for other in "02"):
                pass
            end()
        while rank == 2 and is_last and is_alive(processes[0].pid):
            pass
        return connections(*arguments, **options)
    return connect

def join(rank, backend, address, moment, folder):
    if rank == 1:
        if moment == "before":
            end()
        elif moment == "while all arrive":
            Meeting._send = end
        elif moment == "while torch connects":
            torch.distributed.init_process_group = end
        elif moment == "while Horovod connects":
            import horovod.torch
            horovod.torch.init = end
        elif moment == "stopped":
            import horovod.torch
            horovod.torch.init = stop
        elif moment == "while ranks share memory":
            shared_memory.share_host = end
    if moment.startswith("while ranks connect"):
        world.Connections = connect_of(rank, pathlib.Path(folder), moment.endswith("before rank 2"))
    try:
        hvd.init(backend=backend, init_method=address, rank=rank, world_size=3)
    except Exception as error:
        os.write(1, f"<{rank}: {type(error).__name__}: {error}>\\n".encode())
    os._exit(0)

fork = multiprocessing.get_context("fork")
processes = [fork.Process(target=join, args=(rank, *sys.argv[1:])) for rank in range(3)]
for process in processes:
    process.start()
processes[0].join()
processes[2].join()
processes[1].kill()
processes[1].join()
"""
"""Three ranks, of which rank 1 dies or stops at a moment."""

Outputs = Mapping[tuple[str, ...], Future[str]]
START_TIMEOUT = "DUALDIST_START_TIMEOUT_SECONDS"
SECONDS, MANY_SECONDS = 10, 200
"""Longer than a busy machine needs for a start; and so long that the test fails, unless a death is noticed before."""


ABSENT = "ConfigurationError: Rank [02] waited 10 s for rank 1, which did not arrive"
NOT_CONNECTED = "HorovodInternalError: Rank . could not connect to "
ENDED = f"{NOT_CONNECTED}the other ranks: rank 1 has ended"
EITHER = f"{NOT_CONNECTED}(rank 1 of|the other ranks: rank 1 has ended)"
CASES = [
    ("torch", "tcp", "before", ABSENT),
    ("torch", "file", "before", ABSENT),
    ("horovod", "tcp", "while all arrive", ABSENT),
    ("horovod", "tcp", "stopped", f"{NOT_CONNECTED}the other ranks: rank 1 .* is stopped"),
    ("torch", "tcp", "while torch connects", ENDED),
    ("torch", "file", "while ranks share memory", ENDED),
    ("horovod", "tcp", "while Horovod connects", ENDED),
    ("torch", "file", "while ranks connect", EITHER),
    ("horovod", "tcp", "while ranks connect", EITHER),
    ("torch", "tcp", "while ranks connect, rank 0 before rank 2", ENDED),
    ("horovod", "tcp", "while ranks connect, rank 0 before rank 2", ENDED),
]
"""Backend, how the ranks meet, when rank 1 dies or stops, and the error of the others. Four wait for a limit."""


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest) -> Iterator[Outputs]:
    def output_of(case: tuple[str, ...], folder: Path) -> str:
        backend, method, moment, _ = case
        need_modules(*["horovod.torch"] * (backend == "horovod"))
        address = f"file://{folder}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
        timeout = SECONDS if moment in ("before", "while all arrive", "stopped") else MANY_SECONDS
        command = [sys.executable, "-c", SCRIPT, backend, address, moment, str(folder)]
        return finish(command, {START_TIMEOUT: str(timeout)}, seconds=0.9 * MANY_SECONDS).output

    with started_at_once(request, "case", output_of, 4) as futures:
        yield futures


@pytest.mark.only_ci(where=lambda case: case[:3] == ("torch", "tcp", "before"))
@pytest.mark.only_ci(where=lambda case: case[0] == "horovod" and case[2] != "stopped")
@pytest.mark.only_all(where=lambda case: case[:3] == ("torch", "file", "before"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_a_rank_that_dies_or_stops_during_the_start_is_named_by_all_others(
    case: tuple[str, ...], outputs: Outputs
) -> None:
    output = outputs[case].result()
    found = dict(re.findall(r"<(\d): (.*)>", output))
    assert found.keys() == {"0", "2"}, output
    for text in found.values():
        assert re.match(case[-1], text), output


@pytest.mark.only_ci
def test_a_server_that_is_stopped_ends_the_start() -> None:
    """A stopped process still accepts connections: the kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"tcp://127.0.0.1:{stopped.getsockname()[1]}"
        script = f"import dualdist\ndualdist.init(init_method={address!r}, rank=1, world_size=2)"
        ended = finish([sys.executable, "-c", script], {START_TIMEOUT: "2"}, seconds=MANY_SECONDS)
    assert "could not reach the server of the job, which rank 0" in ended.output


def test_a_host_without_an_address_is_named() -> None:
    script = "import dualdist\ndualdist.init(init_method='tcp://no-such-host.invalid:1', rank=1, world_size=2)"
    ended = finish([sys.executable, "-c", script], {START_TIMEOUT: "2"}, seconds=MANY_SECONDS)
    assert "the host 'no-such-host.invalid' has no address" in ended.output


@pytest.mark.only_ci
def test_a_name_server_that_does_not_answer_does_not_lengthen_the_start(tmp_path: Path) -> None:
    """In a network of its own, with a name server that only listens."""
    alone = ["unshare", "--net", "--mount"]
    need_root()
    need_programs("unshare", "ip", "mount")
    allowed = subprocess.run([*alone, "true"], capture_output=True)
    need(allowed.returncode == 0, f"needs namespaces: {allowed.stderr.decode().strip()}")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:2\n")
    source = (
        "import socket, time, torch, dualdist\n"
        "server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "server.bind(('127.0.0.1', 53))\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    dualdist.init(init_method='tcp://no-such-host.example:1', rank=1, world_size=2)\n"
        "finally:\n"
        "    print('after', time.monotonic() - start)\n"
    )
    setup = f'ip link set lo up && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
    command = [*alone, "sh", "-c", setup, "sh", sys.executable, "-c", source]
    ended = finish(command, {START_TIMEOUT: "2"}, seconds=MANY_SECONDS)
    assert "the host 'no-such-host.example' has no address" in ended.output
    assert float(ended.output.split("after ")[1].split()[0]) < 30


@pytest.mark.only_all
def test_a_wait_after_the_start_may_be_longer_than_the_start(script: Script) -> None:
    path = script(
        "import os, time, torch, torch.distributed as dist, dualdist as hvd\n"
        "hvd.init()  # the first time, a rank may be late by seconds\n"
        "hvd.shutdown()\n"
        "os.environ['DUALDIST_START_TIMEOUT_SECONDS'] = '3'\n"
        "hvd.init()\n"
        "for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: hvd.add_process_set([0, 2])):\n"
        "    if hvd.rank() == 0:\n"
        "        time.sleep(4)\n"
        "    call()\n"
        "hvd.barrier()\n"
        "hvd.shutdown()\n"
    )
    run = [sys.executable, "-m", "dualdist", "run", "-np", "3", "--backend", "torch"]
    finish([*run, sys.executable, path]).check()


HOROVODS = """\
import multiprocessing, os, signal, sys, threading
import horovod.torch
import dualdist as hvd
from dualdist.horovod.http_store import Handler
from dualdist.core.meeting import Meeting

address, event = sys.argv[1:]
asked = threading.Event()
get = Handler.do_GET
Handler.do_GET = lambda handler: asked.set() or get(handler)

def join(rank):
    if rank == 1:
        horovod.torch.init = signal.pause if event == "exit" else lambda: os._exit(1)
    hvd.init(backend="horovod", init_method=address, rank=rank, world_size=3)

def leave(*arguments):
    asked.wait()  # Horovod waits for rank 1
    sys.exit(7)

fork = multiprocessing.get_context("fork")
others = [fork.Process(target=join, args=(rank,)) for rank in (1, 2)]
for process in others:
    process.start()
if event == "exit":
    Meeting.wait_for = leave
try:
    join(0)
except hvd.HorovodInternalError:
    for _ in range(9):  # Horovod aborts a process that gets no answer
        asked.clear()
        asked.wait()
finally:
    for process in others:
        process.kill()
"""
"""Rank 0, and as forks of it ranks 1 and 2. Rank 1 does not connect to Horovod."""


@pytest.mark.parametrize(("event", "code"), [("death", 0), ("exit", 7)])
def test_a_start_of_horovod_that_fails_on_rank_0_does_not_abort_it(event: str, code: int, tmp_path: Path) -> None:
    need_modules("horovod.torch")
    command = [sys.executable, "-c", HOROVODS, f"file://{tmp_path}/meeting", event]
    environment = {START_TIMEOUT: str(MANY_SECONDS)}
    assert finish(command, environment, seconds=0.9 * MANY_SECONDS, forks=False).code == code
