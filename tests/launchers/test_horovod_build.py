"""What ci/install-horovod repairs in Horovod, except its process sets, which test_process_sets_of_hosts.py tests."""

from __future__ import annotations

from pathlib import Path

from ..helpers.script_launch import launch

SCRIPT = """\
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


def test_other_threads_can_run_while_an_operation_starts(tmp_path: Path) -> None:
    """Otherwise a start that waits for an unreachable rank would stop them, too."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = launch("torchrun-horovod", str(script))
    assert ended.code == 0, ended.output
    assert ended.output.count("all right") == 2, ended.output
