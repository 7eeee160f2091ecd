"""What `dualdist install-horovod` repairs in Horovod, except its process sets (test_process_sets_of_hosts.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.script_launch import Script, launch

START_OF_MANY = """\
import os, sys, threading, torch, dualdist as hvd
import horovod.torch as horovod

hvd.init(backend="horovod", transport="gloo")
starts, ran = threading.Event(), []
tensors = [torch.tensor(float(hvd.rank())) for _ in range(5000)]


def run():
    starts.wait()
    ran.append(True)


thread = threading.Thread(target=run)
thread.start()
sys.setswitchinterval(1000)  # the other thread runs only if this one releases Python's global lock
starts.set()
handles = [horovod.broadcast_async_(tensor, 1, name=f"{number}") for number, tensor in enumerate(tensors)]
assert ran
assert [horovod.synchronize(handle).item() for handle in handles] == [1.0] * 5000
thread.join()
os.write(1, b"all right\\n")
"""

START_BESIDE_A_STOPPED_RANK = """\
import os, pathlib, signal, torch, dualdist as hvd
import horovod.torch as horovod

hvd.init(backend="horovod")
others = hvd.allgather_object(os.getpid())
tensors = [torch.tensor(1.0) for _ in range(5000)]


def start():
    return [horovod.allreduce_async_(tensor, op=horovod.Sum, name=f"{n}") for n, tensor in enumerate(tensors)]


if hvd.rank() == 0:
    while "T (stopped)" not in pathlib.Path(f"/proc/{others[1]}/status").read_text():
        pass
    handles = start()  # takes many cycles of Horovod
    os.kill(others[1], signal.SIGCONT)
else:
    os.kill(os.getpid(), signal.SIGSTOP)
    handles = start()
assert [horovod.synchronize(handle).item() for handle in handles] == [2.0] * 5000
os.write(1, b"all right\\n")
"""


@pytest.mark.only_ci
def test_other_threads_can_run_while_an_operation_starts(script: Script) -> None:
    """Otherwise a start that waits for an unreachable rank would stop them, too."""
    output = launch("torchrun-horovod", script(START_OF_MANY)).check()
    assert output.count("all right") == 2


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["torchrun-horovod", "mpirun"])
def test_an_operation_starts_while_horovod_waits_for_another_rank(script: Script, launcher: str) -> None:
    """Otherwise a rank that comes late waits for its start, because the others start nothing and only wait."""
    output = launch(launcher, script(START_BESIDE_A_STOPPED_RANK)).check()
    assert output.count("all right") == 2


DIFFERENT_BUILDS = """\
import importlib.metadata, os, dualdist as hvd

versions = {"horovod": f"0.28.1+patch{os.environ['RANK']}"}
version = importlib.metadata.version
importlib.metadata.version = lambda name: versions.get(name) or version(name)
try:
    hvd.init(backend="horovod")
except hvd.ConfigurationError as error:
    os.write(1, f"<{error}>\\n".encode())
"""


def test_ranks_with_different_builds_are_an_error_that_names_them(script: Script) -> None:
    """Here only the version differs: one machine has one build."""
    ended = launch("torchrun-horovod", script(DIFFERENT_BUILDS))
    told = "Horovod must be the same build on all ranks, but is 0.28.1+patch0 on rank 0 and 0.28.1+patch1 on rank 1"
    assert ended.output.count(f"<{told} instead.") == 2


@pytest.mark.only_ci
def test_a_source_that_is_not_of_horovod_is_an_error_before_the_build(tmp_path: Path) -> None:
    source = tmp_path / "horovod-0.28.1.tar.gz"
    source.write_text("not an archive")
    ended = subprocess.run(
        [sys.executable, "-m", "dualdist", "install-horovod"],
        env={
            **os.environ,
            "HOROVOD_SOURCE": str(source),
            "PYTHON": "/nonexistent/python",  # the build is for the interpreter that runs dualdist
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert f"HOROVOD_SOURCE={source} is not the source distribution of Horovod 0.28.1; set it to" in ended.stderr
    assert "/nonexistent/python" not in ended.stderr
