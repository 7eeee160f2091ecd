"""Process sets of some ranks of two hosts, and groups of torch."""

from __future__ import annotations

import sys

import pytest

from ..helpers.forks import BIN
from ..helpers.namespace_hosts import Network
from ..helpers.requirements import need_modules
from ..helpers.script_launch import Script

SCRIPT = """\
import itertools, os, sys, torch, torch.distributed as dist, dualdist as hvd

hvd.init(backend=sys.argv[1], transport="gloo")
for size in (2, 3):
    for ranks in itertools.combinations(range(4), size):
        members, group = hvd.add_process_set(ranks), dist.new_group(ranks)
        if hvd.rank() in ranks:
            total = torch.tensor(10.0 ** dist.get_rank())
            dist.all_reduce(total, group=group)
            assert total.item() == sum(10.0**rank for rank in ranks), (ranks, total)
            total = hvd.allreduce(torch.tensor(10.0 ** hvd.rank()), op=hvd.Sum, process_set=members)
            assert total.item() == sum(10.0**rank for rank in ranks), (ranks, total)
hvd.barrier()  # a rank that leaves ends Horovod on all ranks
os.write(1, b"all right\\n")
"""


@pytest.mark.only_all(where=lambda launcher, backend: (launcher, backend) != ("dualdist run", "horovod"))
@pytest.mark.parametrize(
    ("launcher", "backend"), [("dualdist run", "torch"), ("dualdist run", "horovod"), ("horovodrun", "horovod")]
)
def test_any_ranks_of_two_hosts_are_a_process_set_and_a_group_of_torch(
    launcher: str, backend: str, network: Network, script: Script
) -> None:
    need_modules(backend)
    command = {
        "dualdist run": [sys.executable, "-m", "dualdist", "run"],
        "horovodrun": [f"{BIN}/horovodrun", "--gloo", "--network-interfaces", "net0"],
    }[launcher]
    hosts = ["-H", "alpha:2,beta:2", "-np", "4"]
    output = network.finish(*command, *hosts, sys.executable, script(SCRIPT), backend).check()
    assert output.count("all right") == 4
