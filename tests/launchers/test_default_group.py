"""The helpers of usual scripts find the world under every launcher; unchanged scripts of Horovod find no group."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ..helpers.namespace_hosts import Network
from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, finish, launch

HELPERS = """
import os
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
"""

OWN_GROUP = """
import os
import torch
import torch.distributed as dist
import horovod.torch as hvd

assert os.environ["HOROVOD_HOSTNAME"]
hvd.init()
assert not dist.is_initialized()
dist.init_process_group("gloo")  # finds torchrun's variables
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
dist.all_reduce(total)
assert total.item() == hvd.size() ** 2
dist.destroy_process_group()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
hvd.shutdown()
hvd.init()
assert not dist.is_initialized()
assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
os.write(1, b"<done>\\n")
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


def printed(name: str, folder: Path, text: str, *before: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(text)
    ended = launch(name, *before, str(script))
    assert ended.code == 0, ended.output
    return sorted(re.findall("<([^<>]*)>\n", ended.output))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_helpers_that_ask_torch_give_each_rank_its_shard(name: str, tmp_path: Path) -> None:
    size = LAUNCHERS[name].size
    expected = [f"{list(range(rank, 8, size))} -3.5" for rank in range(size)]
    assert printed(name, tmp_path, HELPERS) == expected


def test_a_script_of_dualdist_finds_the_group_also_if_something_else_imports_horovod(tmp_path: Path) -> None:
    expected = [f"{list(range(rank, 8, 2))} -3.5" for rank in range(2)]
    assert (
        printed("torchrun", tmp_path, f"import horovod.torch\n{HELPERS}", "-m", "dualdist.compat") == expected
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_script_of_horovod_finds_no_group_and_may_make_its_own(name: str, tmp_path: Path) -> None:
    assert printed(name, tmp_path, OWN_GROUP, "-m", "dualdist.compat") == ["done"] * LAUNCHERS[name].size


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_a_script_of_horovod_finds_no_group_and_may_make_its_own_on_two_hosts(
    backend: str, network: Network, tmp_path: Path
) -> None:
    need_modules(backend)
    script = tmp_path / "script.py"
    script.write_text(OWN_GROUP)
    run = [sys.executable, "-m", "dualdist", "run", "-H", "alpha:2,beta:2", "-np", "4", "--env"]
    command = [*run, f"DUALDIST_BACKEND={backend}", sys.executable, "-m", "dualdist.compat", str(script)]
    ended = finish(network.hosts[0].command(*command))
    assert (ended.code, ended.output.count("<done>")) == (0, 4), ended.output


@pytest.mark.parametrize("name", ["horovodrun", "mpirun", "mpirun-torch"])
def test_accelerate_finds_the_world_of_launchers_that_it_does_not_know(name: str, tmp_path: Path) -> None:
    need_modules("accelerate")
    # Rank 0's weight, 0, less the mean of all eight rows.
    assert printed(name, tmp_path, ACCELERATE) == ["[1.0, 1.0] -4.5"] * 2
