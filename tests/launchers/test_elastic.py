"""Elastic jobs with real launchers: killed processes, added and removed hosts, and the result of an undisturbed run.

The training script causes the events itself, at given steps of the first epoch: helpers/disturbed_elastic_example.py.
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

from ..helpers.forks import BIN
from ..helpers.requirements import need_modules
from ..helpers.script_launch import SECONDS, Ended, finish

EXAMPLE, DISTURBED = "examples/elastic.py", "tests/helpers/disturbed_elastic_example.py"
SAMPLES, EPOCHS = 480, 3  # of the example
NOISE = 0.05
"""The relative difference of the example's final loss that is allowed between worlds of 1 and of 2."""

KILLED = (19, 20)
"""The steps from which training may resume after a kill in step 20, which the surviving ranks may have committed."""

QUICK = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"
"""Agents soon decide that a host is gone, and that no host will join; they look for each other once a second. This
process holds their rendezvous store."""

STARTS = 4
"""How often the processes of a job start, or join the world again. Each time may take as long as a launch."""

long = pytest.mark.timeout(STARTS * SECONDS + 60)


@pytest.fixture(scope="module")
def undisturbed() -> float:
    """The final loss of the example in one process."""
    return final_loss(finish([sys.executable, EXAMPLE]))


def final_loss(ended: Ended) -> float:
    assert ended.code == 0
    (loss,) = re.findall(r"processes at the end, loss ([\d.]+)", ended.output)
    return float(loss)


def began(folder: Path) -> list[tuple[int, int]]:
    """Return the step and the world size for each time that the training function was called."""
    lines = (folder / "began").read_text().splitlines()
    return [(int(step), int(size)) for step, size in map(str.split, lines)]


def assert_every_sample_is_seen_once(folder: Path) -> None:
    assert sorted(json.loads((folder / "seen.json").read_text())) == list(range(SAMPLES * EPOCHS))


def horovodrun(folder: Path, most: int, *program: str) -> list[str]:
    """Return the command of an elastic job, whose hosts are in a file of `folder`: at first one for one process."""
    discovery = folder / "discovery"
    (folder / "hosts").write_text("localhost:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discovery.chmod(0o755)
    sizes = ("-np", "1", "--min-np", "1", "--max-np", str(most))
    hosts = ("--network-interfaces", "lo", "--host-discovery-script", str(discovery))
    return [f"{BIN}/horovodrun", "--gloo", *sizes, *hosts, sys.executable, *program]


@pytest.mark.only_ci
@long
@pytest.mark.parametrize("runner", [(), ("-m", "dualdist.compat")], ids=["plain", "compat"])
def test_horovodrun_survives_a_kill_and_changes_of_hosts(
    runner: tuple[str, ...], tmp_path: Path, undisturbed: float
) -> None:
    events = (
        "10:add:localhost:1,127.0.0.1:1",
        "20:kill",
        # horovodrun does not reuse the host of a killed process, so the next host has another name.
        "25:add:localhost:1,127.1:1",
        "30:remove:localhost:1",
    )
    need_modules("horovod.torch")
    program = (*runner, DISTURBED, str(tmp_path), *events)
    ended = finish(horovodrun(tmp_path, 2, *program), seconds=STARTS * SECONDS)
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 1), (10, 2), (step, 1), (25, 2), (30, 1)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)


@pytest.mark.only_ci
@long
def test_all_survivors_of_a_kill_join_the_next_world_of_horovodrun(tmp_path: Path, undisturbed: float) -> None:
    need_modules("horovod.torch")
    # With four ranks, some wait in Horovod for others than the killed one, until Gloo's timeout.
    events = ("10:add:localhost:1,127.0.0.1:1,127.0.1:1,127.1:1", "20:kill")
    command = horovodrun(tmp_path, 4, DISTURBED, str(tmp_path), *events)
    ended = finish(command, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "12"}, seconds=STARTS * SECONDS)
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 1), (10, 4), (step, 3)] for step in KILLED)


def test_a_backend_that_cannot_follow_horovodrun_is_refused(tmp_path: Path) -> None:
    need_modules("horovod.torch")
    ended = finish(horovodrun(tmp_path, 1, EXAMPLE), {"DUALDIST_BACKEND": "torch"})
    assert ended.code != 0
    assert "Elastic training under horovodrun must run on backend 'horovod', but runs on 'torch'" in ended.output


@pytest.mark.only_ci
@long
def test_torchrun_with_two_agents_survives_a_kill_and_changes_of_hosts(tmp_path: Path, undisturbed: float) -> None:
    os.mkfifo(tmp_path / "start")
    meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id job --rdzv-conf {QUICK}"
    options += f" --rdzv-endpoint localhost:{meeting.port}"
    agent = shlex.join(
        [f"{BIN}/torchrun", *options.split(), DISTURBED, str(tmp_path), "10:add", "20:kill", "30:remove"]
    )
    # The second agent gets the lower process id, and with it the lower ranks.
    ended = finish(
        ["sh", "-c", f"(read _ < {tmp_path}/start; SECOND=1 exec {agent}) & exec {agent}"],
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        seconds=STARTS * SECONDS,
    )
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 1), (10, 2), (step, 2), (30, 1)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)


@pytest.mark.only_ci
def test_torchrun_with_one_agent_survives_a_kill(tmp_path: Path, undisturbed: float) -> None:
    options = "--standalone --nproc-per-node 2 --max-restarts 1"
    command = [f"{BIN}/torchrun", *options.split(), DISTURBED, str(tmp_path), "20:kill"]
    ended = finish(command, {"DUALDIST_ELASTIC_DIR": str(tmp_path / "commits")})
    assert final_loss(ended) == pytest.approx(undisturbed, rel=NOISE)
    assert began(tmp_path) in ([(0, 2), (step, 2)] for step in KILLED)
    assert_every_sample_is_seen_once(tmp_path)
