"""Shared memory of the ranks of one host: what happens when a rank is killed, and how it is switched off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.script_launch import SECONDS, launch

KILLED = """\
import os, signal, sys, torch, dualdist as hvd
hvd.init(init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
large = torch.ones(1 << 20)
hvd.allreduce(large)
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(large)
except hvd.HorovodInternalError as error:
    sys.exit(f"raised {error}")
"""

TYPES = """\
import torch, dualdist as hvd
from dualdist.world.process_sets import channel_of
hvd.init()
print(type(channel_of(hvd.global_process_set).group).__name__)
assert hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum)[0].item() == hvd.size()
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_killed_rank_is_an_error_of_the_others_and_leaves_no_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, script(tmp_path, KILLED), str(tmp_path / "store")]
    with (
        subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1"]) as killed,
    ):
        _, errors = first.communicate(timeout=SECONDS)
    assert (first.returncode, killed.returncode) == (1, -signal.SIGKILL)
    assert "raised" in errors
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "dualdist" in name}


@pytest.mark.parametrize(("switch", "name"), [("0", "TorchGroup"), ("1", "HostGroup")])
def test_a_variable_switches_shared_memory_off(switch: str, name: str, tmp_path: Path) -> None:
    ended = launch("torchrun", script(tmp_path, TYPES), environment={"DUALDIST_SHARED_MEMORY": switch})
    assert ended.code == 0, ended.output
    assert ended.output.count(name) == 2
