"""A rank that stops in `add_process_set`, after the ranks have agreed. Horovod itself waits for it without an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..helpers.script_launch import launch

SCRIPT = """\
import os, signal, dualdist as hvd
from dualdist.world.context import current

hvd.init()
other = hvd.allgather_object(os.getpid())[1]
if hvd.rank() == 1:
    current().backend.new_groups = lambda ranks, count, exchange: signal.raise_signal(signal.SIGSTOP)
try:
    hvd.add_process_set([0])
except hvd.StallError as error:
    os.write(1, f"{error}\\n".encode())
os.kill(other, signal.SIGKILL)
os._exit(1)
"""


@pytest.mark.parametrize("launcher", ["torchrun-horovod", "mpirun"])
def test_the_others_raise_an_error_that_names_it(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = launch(launcher, str(script), environment={"DUALDIST_STALL_TIMEOUT_SECONDS": "3"})
    assert "stalled; missing ranks: [1].\n" in ended.output, ended.output
    assert "rank 1: no answer: stopped, or cut off from the network\n" in ended.output
