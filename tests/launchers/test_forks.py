"""A process that is forked from a rank ends in any way: it returns its exit code, and the ranks continue."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..helpers.script_launch import LAUNCHERS, finish, launch

SCRIPT = """\
import os, sys, torch, dualdist as hvd
hvd.init()
weight = torch.nn.Parameter(torch.zeros(3))
hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
weight.sum().backward()

def child(ending):
    try:
        hvd.allreduce(torch.ones(1))
    except hvd.NotInitializedError:
        if ending == "exit":
            sys.exit(3)
        if ending == "_exit":
            os._exit(4)
        if ending == "shutdown":
            hvd.shutdown()
            raise SystemExit(5)
        if ending == "raise":
            raise RuntimeError("the reason of the child")
        sys.exit()

codes = []
for ending in ["exit", "_exit", "shutdown", "raise", "return"] if hvd.rank() == 0 else []:
    forked = os.fork()
    if forked == 0:
        child(ending)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
for numel in (1, 5000):
    total = hvd.allreduce(torch.full((numel,), hvd.rank() + 1.0), op=hvd.Sum)
    assert total.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * numel
if hvd.rank() == 0:
    print("codes", *codes)
"""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_forked_process_ends_as_it_wants_and_the_ranks_continue(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = launch(name, str(script))
    assert ended.code == 0, ended.output
    assert "codes 3 4 5 1 0" in ended.output
    assert ended.output.count("RuntimeError: the reason of the child") == 1


DURING_INIT = """\
import os, threading, dualdist as hvd
from dualdist import lifecycle

join, waits, goes_on = lifecycle.join_world, threading.Event(), threading.Event()

def late(*arguments):
    waits.set()
    goes_on.wait()
    return join(*arguments)

lifecycle.join_world = late
thread = threading.Thread(target=hvd.init)
thread.start()
waits.wait()
child = os.fork()
goes_on.set()
if child == 0:
    hvd.init()
    os._exit(hvd.size())
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
print("sizes", code, hvd.size())
"""


def test_a_process_that_is_forked_while_another_thread_calls_init_can_call_init(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DURING_INIT)
    ended = finish([sys.executable, str(script)], forks=False)
    assert (ended.code, ended.output) == (0, "sizes 1 1\n"), ended.output
