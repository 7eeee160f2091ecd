"""What usual scripts do: helpers that ask torch find the world under every launcher, and forks end as they want."""

from __future__ import annotations

import re
import sys

import pytest

from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, Ended, Script, finish, launch

HELPERS = """
import os
import sys
import torch
import torch.distributed as dist
import dualdist as hvd

def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()

def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1

def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0

hvd.init()
shard = list(torch.utils.data.DistributedSampler(range(8), get_world_size(), get_rank(), shuffle=False))
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
(weight * torch.tensor(shard)).mean().backward()
optimizer.step()
os.write(1, f"<{shard} {weight.item()}>\\n".encode())

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

ACCELERATE = """
import os
import torch
import accelerate
import dualdist as hvd

hvd.init()
accelerator = accelerate.Accelerator(cpu=True)
assert (accelerator.process_index, accelerator.num_processes) == (hvd.rank(), hvd.size())
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, hvd.rank())
rows = torch.arange(1.0, 9.0).view(8, 1)
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).mean())
    optimizer.step()
seen = accelerator.gather_for_metrics(torch.tensor([float(len(loader))]))
os.write(1, f"<{seen.tolist()} {model.module.weight.item()}>\\n".encode())
"""


def printed(output: str) -> list[str]:
    return sorted(re.findall(r"<(\[[^<>]*)>\n", output))


@pytest.fixture(scope="module", params=LAUNCHERS)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Ended]:
    """How the script HELPERS has ended, and the number of ranks."""
    path = tmp_path_factory.mktemp("helpers") / "script.py"
    path.write_text(HELPERS)
    return LAUNCHERS[request.param].size, launch(request.param, str(path))


@pytest.mark.only_ci(where=lambda ended: ended not in ("python", "torchrun"))
def test_helpers_that_ask_torch_give_each_rank_its_shard(ended: tuple[int, Ended]) -> None:
    size, ending = ended
    assert printed(ending.check()) == [f"{list(range(rank, 8, size))} -3.5" for rank in range(size)]


@pytest.mark.only_ci(where=lambda ended: ended not in ("python", "torchrun"))
def test_a_forked_process_ends_as_it_wants_and_the_ranks_continue(ended: tuple[int, Ended]) -> None:
    output = ended[1].check()
    assert "codes 3 4 5 1 0" in output
    assert output.count("RuntimeError: the reason of the child") == 1


DURING_INIT = """\
import os, threading, dualdist as hvd
from dualdist.core import lifecycle

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


@pytest.mark.only_ci
def test_a_process_that_is_forked_while_another_thread_calls_init_can_call_init(script: Script) -> None:
    ended = finish([sys.executable, script(DURING_INIT)], forks=False)
    assert (ended.code, ended.output) == (0, "sizes 1 1\n")


def test_a_script_of_dualdist_finds_the_group_also_if_something_else_imports_horovod(script: Script) -> None:
    expected = [f"{list(range(rank, 8, 2))} -3.5" for rank in range(2)]
    ended = launch("torchrun", "-m", "dualdist.compat", script(f"import horovod.torch\n{HELPERS}"))
    assert printed(ended.check()) == expected


@pytest.mark.only_ci
@pytest.mark.parametrize("name", ["horovodrun", "mpirun", "mpirun-torch"])
def test_accelerate_finds_the_world_of_launchers_that_it_does_not_know(name: str, script: Script) -> None:
    need_modules("accelerate")
    # Rank 0's weight, 0, less the mean of all eight rows.
    assert printed(launch(name, script(ACCELERATE)).check()) == ["[1.0, 1.0] -4.5"] * 2
