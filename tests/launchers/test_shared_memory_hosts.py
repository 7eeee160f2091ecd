"""Shared memory of ranks on two hosts: values, the groups that are chosen, and what happens when a rank is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..helpers.namespace_hosts import Network, mpirun, size_of
from ..helpers.requirements import need_modules
from ..helpers.script_launch import Script
from .test_shared_memory import kill_a_rank

VALUES = """\
import sys, torch, dualdist as hvd
from dualdist.core.world import channel_of

hvd.init(backend="torch", transport=sys.argv[1])
rank, size = hvd.rank(), hvd.size()
whole, of_one_host, across = hvd.global_process_set, hvd.add_process_set([0, 1]), hvd.add_process_set([0, size - 1])
for members, name in ((whole, "HierarchicalGroup"), (of_one_host, "HostGroup"), (across, "TorchGroup")):
    if rank in members.ranks:
        assert type(channel_of(members).group).__name__ == name
        total = hvd.allreduce(torch.full((300_001,), rank + 1.0), op=hvd.Sum, process_set=members)
        assert torch.equal(total, torch.full((300_001,), sum(members.ranks) + members.size() + 0.0))

for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
    for length in (1, 80_001):
        rows = torch.stack([((torch.arange(length) + 3 * other) % 3 + 1).to(dtype) for other in range(size)])
        own = rows[rank].clone()
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), rows.sum(0, dtype=dtype))
        assert torch.equal(hvd.allreduce(own, op=hvd.Max), rows.amax(0))
        assert torch.equal(hvd.allreduce(own, op=hvd.Min), rows.amin(0))
        assert torch.equal(hvd.allreduce(own, op=hvd.Product), rows.prod(0, dtype=dtype))

rounded = hvd.allreduce(torch.randn(5_000_003, generator=torch.Generator().manual_seed(rank)), op=hvd.Sum)
assert all(torch.equal(row, rounded) for row in hvd.allgather(rounded.view(1, -1)))

model = torch.nn.Linear(3000, 1500, bias=False)
wrapped = hvd.DistributedDataParallel(model)
for step in range(2):
    model.zero_grad()
    wrapped(torch.full((1, 3000), (rank + 1.0) * size)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1500, 3000), size * (size + 1) / 2))

if rank == 0:
    large = torch.full((3_000_001,), 2.0)
    assert torch.equal(hvd.allreduce(large, op=hvd.Sum), large)  # the others have joined
hvd.join()
print("all right")
"""

WITHOUT_MEMORY = """\
import sys, torch, dualdist as hvd
from dualdist import shared_memory
from dualdist.core.meeting.links import own_node
from dualdist.core.world import channel_of

def make_memory(size):
    raise OSError("no memory")

if own_node().startswith("beta"):
    shared_memory.make_memory = make_memory
hvd.init(backend="torch", transport=sys.argv[1])
assert type(channel_of(hvd.global_process_set).group).__name__ == "TorchGroup"
assert torch.equal(hvd.allreduce(torch.ones(300_001), op=hvd.Sum), torch.full((300_001,), hvd.size() + 0.0))
print("all right")
"""


def run(network: Network, hosts: str, program: str, transport: str) -> None:
    """Run a program on both hosts. It must succeed on every rank."""
    launcher: tuple[str, ...] = (sys.executable, "-m", "dualdist", "run", "-H", hosts)
    if transport == "mpi":
        need_modules("mpi4py")
        launcher = mpirun(hosts)
    output = network.finish(*launcher, sys.executable, program, transport).check()
    assert output.count("all right") == size_of(hosts)


@pytest.mark.only_ci(where=lambda hosts, transport: (hosts, transport) != ("alpha:2,beta:2", "gloo"))
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
@pytest.mark.parametrize("hosts", ["alpha:2,beta:2", "alpha:2,beta:1"])
def test_ranks_of_two_hosts_share_memory_within_each(
    hosts: str, transport: str, network: Network, script: Script
) -> None:
    run(network, hosts, script(VALUES), transport)


@pytest.mark.only_ci
def test_all_ranks_use_the_network_if_one_host_has_no_memory(network: Network, script: Script) -> None:
    run(network, "alpha:2,beta:2", script(WITHOUT_MEMORY), "gloo")


@pytest.mark.only_ci
def test_a_killed_rank_is_an_error_of_all_others_on_both_hosts(network: Network, tmp_path: Path) -> None:
    kill_a_rank(tmp_path, 5_000_003, *(network.hosts[rank // 2].command() for rank in range(4)))
