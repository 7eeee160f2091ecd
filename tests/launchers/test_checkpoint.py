"""How a run with checkpoints ends: on a signal with the scheduler's exit code, and only after its last save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..helpers.script_launch import launch

PREEMPTED = """\
import os, signal, sys, dualdist as hvd
hvd.init()
manager = hvd.checkpoint.CheckpointManager(sys.argv[1], {"value": 5}, exit_code=75)
if hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), signal.SIGUSR1)
manager.step()
print("went on")
"""

LEFT_EARLY = """\
import concurrent.futures.thread, os, sys, threading, dualdist as hvd

ended, replace = threading.Event(), os.replace
threading._register_atexit(ended.set)  # called first when the script has ended

def replace_late(source, target):
    ended.wait()
    replace(source, target)

hvd.init()
state = {"value": 5}
manager = hvd.checkpoint.CheckpointManager(sys.argv[1], state, asynchronous=True)
manager.steps = 1
os.replace = replace_late
manager.save()
sys.exit("the end")
"""


@pytest.mark.parametrize("name", ["python", "mpirun"])
def test_a_signal_ends_the_job_with_the_code_that_was_set(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PREEMPTED)
    ended = launch(name, str(tmp_path / "script.py"), str(tmp_path / "saved"))
    assert ended.code == 75, ended.output
    assert "went on" not in ended.output and "Traceback" not in ended.output
    assert torch.load(tmp_path / "saved" / "step-000000001.pt", weights_only=True)["value"] == 5


def test_a_running_save_is_finished_before_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEFT_EARLY)
    ended = launch("python", str(tmp_path / "script.py"), str(tmp_path / "saved"))
    assert (ended.code, ended.output) == (1, "the end\n")
    assert torch.load(tmp_path / "saved" / "step-000000001.pt", weights_only=True)["value"] == 5
