"""Shared memory of the ranks of one host: what happens when a rank is killed, and how it is switched off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.script_launch import SECONDS, launch
from ..helpers.world import ROOT

TYPES = """\
import torch, dualdist as hvd
from dualdist.world.process_sets import channel_of
hvd.init()
print(type(channel_of(hvd.global_process_set).group).__name__)
assert hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum)[0].item() == hvd.size()
"""

WITHOUT_MEMORY = """\
import os, sys
if sys.argv[1] == "switched off on one rank":
    os.environ["DUALDIST_SHARED_MEMORY"] = str(int(os.environ["RANK"] == "0"))
import torch, dualdist as hvd
from dualdist.backends import shared_memory
from dualdist.world.process_sets import channel_of

def make_memory(size):
    raise OSError("no memory")

if sys.argv[1] == "no memory":
    shared_memory.make_memory = make_memory
hvd.init(backend="torch", transport="gloo")
assert type(channel_of(hvd.global_process_set).group).__name__ == "DirectGroup"
own = torch.arange(3.0) + hvd.rank()
assert torch.equal(hvd.allreduce(own, op=hvd.Sum), 2 * torch.arange(3.0) + 1)
assert torch.equal(hvd.allgather(own), torch.cat([torch.arange(3.0), torch.arange(3.0) + 1]))
os.write(1, b"all right\\n")
"""

EXCHANGES = """\
import os, dualdist as hvd
from dualdist.agreement.connections import Connections
gather, number = Connections.allgather_messages, 0
def counted(connections, message, seconds=None):
    global number
    number += 1
    return gather(connections, message, seconds)
Connections.allgather_messages = counted
hvd.init(backend="torch", transport="gloo")
os.write(1, f"exchanges {number}\\n".encode())
"""


def test_a_killed_rank_is_an_error_of_the_others_and_leaves_no_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "tests.helpers.killed_rank", str(tmp_path / "store")]
    with (
        subprocess.Popen(
            [*command, "0", "2", f"{1 << 20}"], cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as first,
        subprocess.Popen([*command, "1", "2", f"{1 << 20}"], cwd=ROOT) as killed,
    ):
        _, errors = first.communicate(timeout=SECONDS)
    assert (first.returncode, killed.returncode) == (1, -signal.SIGKILL)
    assert "raised" in errors
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "dualdist" in name}


@pytest.mark.parametrize(("switch", "name"), [("0", "DirectGroup"), ("1", "HostGroup")])
def test_a_variable_switches_shared_memory_off(switch: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(TYPES)
    ended = launch("torchrun", str(path), environment={"DUALDIST_SHARED_MEMORY": switch})
    assert ended.code == 0, ended.output
    assert ended.output.count(name) == 2


@pytest.mark.parametrize("why", ["no memory", "switched off on one rank"])
def test_all_ranks_use_the_network_if_one_has_no_shared_memory(why: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(WITHOUT_MEMORY)
    ended = launch("torchrun", str(path), why)
    assert ended.code == 0, ended.output
    assert ended.output.count("all right\n") == 2, ended.output


def test_a_start_needs_two_exchanges_for_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(EXCHANGES)
    ended = launch("torchrun", str(path))
    assert ended.code == 0, ended.output
    assert ended.output.count("exchanges 2\n") == 2
