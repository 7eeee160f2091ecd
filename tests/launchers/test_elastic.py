"""Elastic jobs for real: processes are killed and hosts come and go, and training ends as if nothing had happened.

The events come from the training itself, at given steps of the first epoch; see helpers/disturbed_elastic_example.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ..helpers.script_launch import SECONDS, Ended, finish
from ..helpers.world import BIN

EXAMPLE, DISTURBED = "examples/elastic.py", "tests/helpers/disturbed_elastic_example.py"
SAMPLES, EPOCHS = 480, 3  # of the example
NOISE = 0.05
"""By how much the final loss of the example may differ between worlds of 1 and of 2, relatively."""

KILLED = (19, 20)
"""Where training may go on after a kill in step 20: one rank has not committed it, the others may have."""

QUICK = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
"""Agents soon believe that a host is gone and that no more will come. This process holds the store where they meet."""


STARTS = 4
"""How often the processes of a job are started, or at least join anew: each may take as long as a launch."""

long = pytest.mark.timeout(STARTS * SECONDS + 60)


@pytest.fixture(scope="module")
def undisturbed() -> float:
    """The final loss of the example in one process."""
    return final_loss(finish([sys.executable, EXAMPLE]))


def final_loss(ended: Ended) -> float:
    assert ended.code == 0, ended.output
    (loss,) = re.findall(r"processes at the end, loss ([\d.]+)", ended.output)
    return float(loss)


def began(folder: Path) -> list[tuple[int, int]]:
    """Return the step and the size of the world for each time that training began."""
    lines = (folder / "began").read_text().splitlines()
    return [(int(step), int(size)) for step, size in map(str.split, lines)]


def assert_every_sample_is_seen_once(folder: Path) -> None:
    assert sorted(json.loads((folder / "seen.json").read_text())) == list(range(SAMPLES * EPOCHS))


@long
def test_horovodrun(tmp_path: Path, undisturbed: float) -> None:
    discovery = tmp_path / "discovery"
    (tmp_path / "hosts").write_text("localhost:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discovery.chmod(0o755)
    ended = finish(
        [
            f"{BIN}/horovodrun",
            "--gloo",
            "--network-interfaces",
            "lo",
            "-np",
            "1",
            "--min-np",
            "1",
            "--max-np",
            "2",
            "--host-discovery-script",
            str(discovery),
            sys.executable,
            DISTURBED,
            str(tmp_path),
            "10:add:localhost:1,127.0.0.1:1",
            "20:kill",
            # The host of a process that was killed is not used again, so that the next one has another name.
            "25:add:localhost:1,127.1:1",
            "30:remove:localhost:1",
        ],
        seconds=STARTS * SECONDS,
    )
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 1), (10, 2), (step, 1), (25, 2), (30, 1)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)


@long
def test_torchrun_with_two_agents(tmp_path: Path, undisturbed: float) -> None:
    os.mkfifo(tmp_path / "start")
    meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = shlex.join(
        [
            f"{BIN}/torchrun",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "3",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "job",
            "--rdzv-conf",
            QUICK,
            "--rdzv-endpoint",
            f"localhost:{meeting.port}",
            DISTURBED,
            str(tmp_path),
            "10:add",
            "20:kill",
            "30:remove",
        ]
    )
    # The second one gets the lower process id, and with it the lower ranks.
    ended = finish(
        ["sh", "-c", f"(read _ < {tmp_path}/start; SECOND=1 exec {agent}) & exec {agent}"],
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        seconds=STARTS * SECONDS,
    )
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 1), (10, 2), (step, 2), (30, 1)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)


def test_torchrun_with_one_agent(tmp_path: Path, undisturbed: float) -> None:
    ended = finish(
        [
            f"{BIN}/torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            DISTURBED,
            str(tmp_path),
            "20:kill",
        ],
        {"DUALDIST_ELASTIC_DIR": str(tmp_path / "commits")},
    )
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 2), (step, 2)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)
