"""Shared memory of the ranks of one host: when a rank is killed, switched off, or missing; and what a start needs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..helpers import killed_rank
from ..helpers.script_launch import Script, finish, launch
from ..helpers.world import ROOT

STARTS = """\
import os, psutil, torch, dualdist as hvd
from dualdist.core.agreement.connections import Connections
from dualdist import shared_memory
from dualdist.core.world import channel_of

gather, make_memory, exchanges = Connections.allgather_messages, shared_memory.make_memory, []

def counted(*arguments, **options):
    exchanges.append(None)
    return gather(*arguments, **options)

def no_memory(size):
    raise OSError("no memory")

def start(name, switch, group, make=make_memory):
    os.environ["DUALDIST_SHARED_MEMORY"] = switch
    shared_memory.make_memory = make
    exchanges.clear()
    hvd.init(backend="torch", transport="gloo")
    assert type(channel_of(hvd.global_process_set).group).__name__ == group, name
    if name == "on":
        assert len(exchanges) == 2, exchanges
    store = int(os.environ["MASTER_PORT"])
    hvd.barrier()
    peers = [connection.raddr for connection in psutil.Process().net_connections()]
    assert sum(peer[1:] == (store,) for peer in peers) == 1, peers
    own = torch.arange(3.0) + hvd.rank()
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), 2 * torch.arange(3.0) + 1)
    assert torch.equal(hvd.allgather(own), torch.cat([torch.arange(3.0), torch.arange(3.0) + 1]))
    assert hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum)[0].item() == 2
    hvd.barrier()
    hvd.shutdown()
    os.write(1, f"{name}\\n".encode())

Connections.allgather_messages = counted
start("on", "1", "HostGroup")
start("off", "0", "TorchGroup")
start("off on one rank", "1" if os.environ["RANK"] == "0" else "0", "TorchGroup")
start("no memory", "1", "TorchGroup", no_memory)
"""


def kill_a_rank(folder: Path, length: int, *earlier: Sequence[str]) -> None:
    """Kill one of the ranks, which start after `earlier`: that is an error of all others, and leaves no memory."""
    there = set(os.listdir("/dev/shm"))
    command = (sys.executable, killed_rank.__file__, str(folder / "store"))
    size, path = len(earlier), {"PYTHONPATH": str(ROOT)}
    with ThreadPoolExecutor(size) as pool:
        ends = [
            pool.submit(finish, [*before, *command, str(rank), str(size), str(length)], path)
            for rank, before in enumerate(earlier)
        ]
    for rank, end in enumerate(ends):
        assert end.result().code == (-signal.SIGKILL if rank == 1 else 1)
        assert "raised" in end.result().output or rank == 1
    assert not {name for name in set(os.listdir("/dev/shm")) - there if "dualdist" in name}


def test_a_killed_rank_is_an_error_of_the_others_and_leaves_no_memory(tmp_path: Path) -> None:
    kill_a_rank(tmp_path, 1 << 20, (), ())


def test_each_start_shares_memory_if_all_ranks_can_and_has_one_connection_to_the_store(script: Script) -> None:
    """It needs two exchanges for shared memory; the store is that of the launcher."""
    lines = launch("torchrun", script(STARTS)).check().splitlines()
    assert [lines.count(name) for name in ("on", "off", "off on one rank", "no memory")] == [2] * 4
