"""`dualdist run` and `spawn` with scripts that do not use dualdist: real Horovod and plain torch.distributed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import dualdist

from ..helpers import spawn_functions
from ..helpers.namespace_hosts import Network
from ..helpers.requirements import need_modules
from ..helpers.run_command import Run, python
from ..helpers.script_launch import finish
from ..helpers.world import ROOT
from .test_compat import HIDE_HOROVOD

HOROVOD_SCRIPT = """
import torch
import horovod.torch as hvd
for _ in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    hvd.shutdown()
print(*numbers, total, hvd.init.__module__.partition(".")[0])
"""

TORCH_SCRIPT = """
import os
import torch
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], total.item())
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)


@pytest.mark.only_ci(where=lambda cross_size: cross_size == 2)
@pytest.mark.usefixtures("hosts", "python")
@pytest.mark.parametrize(
    ("where", "local_size", "cross_size"),
    [("localhost:2", 2, 1), ("localhost:1,hostA:1", 1, 2), ("hostA:1,hostB:1", 1, 2)],
)
def test_scripts_of_horovod_and_of_torch_join_one_world_and_can_join_it_again(
    where: str, local_size: int, cross_size: int, run: Run
) -> None:
    need_modules("horovod.torch")
    ended = run("-H", where, *python(HOROVOD_SCRIPT + TORCH_SCRIPT))
    assert ended.code == 0
    for rank in range(2):
        local, cross = (rank, 0) if cross_size == 1 else (0, rank)
        assert ended.written(rank).decode().splitlines() == [
            f"{rank} 2 {local} {local_size} {cross} {cross_size} 3.0 horovod",
            f"{rank} 2 {local} {local_size} 3.0",
        ]


FABRIC_SCRIPT = """
import os, torch
from lightning.fabric import Fabric
devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=devices, num_nodes=nodes)
fabric.launch()
total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum")
print("rank", fabric.global_rank, "of", fabric.world_size, "on", fabric.node_rank, total.item())
"""


@pytest.mark.only_ci
def test_fabric_joins_all_processes_of_two_hosts(network: Network) -> None:
    need_modules("lightning")
    command = (sys.executable, "-m", "dualdist", "run", "-H", "alpha:1,beta:1", *python(FABRIC_SCRIPT))
    output = network.finish(*command).check()
    found = sorted(re.findall(r"rank .*", output))
    assert found == ["rank 0 of 2 on 0 3.0", "rank 1 of 2 on 1 3.0"]


def test_dualdist_replaces_a_horovod_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_HOROVOD)
    hidden = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = [sys.executable, "-m", "dualdist", "run", "-np", "2"]
    output = finish([*run, *python(HOROVOD_SCRIPT)], hidden, forks=False).check()
    assert sorted(output.splitlines()) == [
        "[1,0]<stdout>:0 2 0 2 0 1 3.0 dualdist",
        "[1,1]<stdout>:1 2 1 2 0 1 3.0 dualdist",
    ]


def test_variables_that_the_user_sets_are_kept(run: Run) -> None:
    names = ("MASTER_ADDR", "RANK", "HOROVOD_CONTROLLER")
    options = f"-np 1 --env {names[0]}=node7 --env {names[2]}=mpi"
    ended = run(*options.split(), *python(f"import os; print([os.environ.get(name) for name in {names}])"))
    assert ended.written(0) == b"['node7', None, 'mpi']\n"


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("stack", ["horovod", "torch"])
def test_functions_of_spawn_join_one_world_without_dualdist(stack: str) -> None:
    if stack == "horovod":
        need_modules("horovod.torch")
    results = dualdist.spawn(getattr(spawn_functions, f"use_{stack}"), nprocs=2, timeout=100)
    assert results == [(0, 2, 3.0), (1, 2, 3.0)]
