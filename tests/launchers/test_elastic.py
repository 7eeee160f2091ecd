"""An elastic job of horovodrun: a host joins, a process dies, and training goes on."""

from __future__ import annotations

import sys
from pathlib import Path

from ..world import BIN
from .launch import finish

SCRIPT = """\
import os, sys, time, torch, dualdist as hvd

hosts, batches = sys.argv[1], 40
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
state = hvd.elastic.TorchState(model, optimizer, batch=0, worlds=[])


@hvd.elastic.run
def train(state):
    state.worlds.append(hvd.size())
    began = state.batch
    while state.batch < batches:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.worlds == [1] and state.batch == 3:
            with open(hosts, "a") as file:
                file.write("127.0.0.1:1\\n")
        if hvd.size() == 2 and state.batch == began + 3 and hvd.rank() == 1:
            os._exit(7)
        while state.worlds == [1] and state.batch == batches - 10:
            time.sleep(0.05)
            state.check_host_updates()
        state.commit()


train(state)
print(f"rank {hvd.rank()} of {hvd.size()}: worlds {state.worlds}, weight {model.weight.item()}")
"""


def test_a_host_joins_and_a_process_dies(tmp_path: Path) -> None:
    script, hosts, discovery = tmp_path / "script.py", tmp_path / "hosts", tmp_path / "discovery"
    script.write_text(SCRIPT)
    hosts.write_text("localhost:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o755)
    ended = finish(
        [
            f"{BIN}/horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "1", "--min-np", "1", "--max-np", "2",
            "--host-discovery-script", str(discovery), sys.executable, str(script), str(hosts),
        ]
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert "rank 0 of 1: worlds [1, 2, 1], weight -40.0" in ended.output, ended.output
