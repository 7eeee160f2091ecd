"""`dualdist doctor --world` under each launcher, on two hosts: a sound world, and faults that it must name."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..helpers.at_once import started_at_once
from ..helpers.forks import BIN
from ..helpers.namespace_hosts import OPEN_MPI, SUBNETS, Host, Network, mpirun
from ..helpers.requirements import need_modules, need_programs
from ..helpers.script_launch import Ended, finish
from ..helpers.slurm_cluster import Slurm, running_slurm
from ..helpers.world import ROOT

DOCTOR = ("-m", "tests.helpers.faulty_doctor")
PYTHON = (sys.executable, *DOCTOR)
HOSTS = "alpha:2,beta:1"


def _torchrun(node: int) -> tuple[str, ...]:
    first = ("--master-addr", f"{SUBNETS['net0']}.1", "--master-port", "29500")
    nodes = ("--nnodes", "2", "--node-rank", f"{node}", "--nproc-per-node", f"{2 - node}")
    return (f"{BIN}/torchrun", *nodes, *first, *DOCTOR)


COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": (_torchrun(0), _torchrun(1)),
    "mpirun": ((*mpirun(HOSTS), *PYTHON),),
    "srun": (("srun", "--kill-on-bad-exit=1", "-N", "2", "-n", "3", *PYTHON),),
    "dualdist run": ((sys.executable, "-m", "dualdist", "run", "-H", HOSTS, "-np", "3", *PYTHON),),
}
"""The commands to run on the hosts, in their order."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, and a Slurm whose nodes they are."""

    network: Network
    slurm: Slurm


@pytest.fixture(scope="module")
def hosts(network: Network) -> Iterator[Hosts]:
    with running_slurm(network) as slurm:
        yield Hosts(network, slurm)


def on_hosts(
    hosts: Hosts, launcher: str, faults: Mapping[str, object], *options: str, seconds: str = "60"
) -> tuple[list[int], str]:
    """Run a launcher's commands to their end; return their exit codes and all output, without dualdist's prefix."""
    need_modules(*["mpi4py"] * (launcher == "mpirun"))
    environment = {**OPEN_MPI, "PYTHONPATH": str(ROOT), "DUALDIST_START_TIMEOUT_SECONDS": seconds}
    environment |= hosts.slurm.environment
    commands = [
        host.command(*command, json.dumps(faults), *options)
        for host, command in zip(hosts.network.hosts, COMMANDS[launcher], strict=False)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        ended: list[Ended] = list(pool.map(lambda command: finish(command, environment), commands))
    return [one.code for one in ended], _without_prefix("".join(one.output for one in ended))


def _without_prefix(output: str) -> str:
    return re.sub(r"^\[1,\d+\]<\w+>:", "", output, flags=re.MULTILINE)


SLOW_RATE = 4.0
"""MB/s. The measured rate is lower on a busy machine."""
BURST = 0.262144
"""MB that a slowed host may send at once, if it has sent nothing before. The rate is measured over 0.1 s or longer."""


@contextlib.contextmanager
def slowed(host: Host, rate: float = SLOW_RATE) -> Iterator[None]:
    """Let the host send at most `rate` MB/s over net0 meanwhile."""
    limit = f"rate {rate * 8}mbit burst {BURST * 1e6:.0f}"
    host.run(*f"tc qdisc add dev net0 root tbf {limit} latency 400ms".split())
    try:
        yield
    finally:
        host.run(*"tc qdisc del dev net0 root".split())


@pytest.fixture
def other_numpy(tmp_path: Path) -> str:
    """Return a folder with the metadata of another version of numpy."""
    (tmp_path / "numpy-0.0.1.dist-info").mkdir()
    (tmp_path / "numpy-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    return str(tmp_path)


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda launcher: launcher in ("srun", "dualdist run"))
@pytest.mark.parametrize("launcher", COMMANDS)
def test_a_slow_link_another_version_and_a_wrong_clock_are_named(launcher: str, hosts: Hosts, other_numpy: str) -> None:
    need_programs("tc")
    with slowed(hosts.network.hosts[1]):
        codes, output = on_hosts(hosts, launcher, {"host": "beta", "clock": 90, "path": other_numpy})
    assert 0 not in codes
    wrong = [line for line in output.splitlines() if line.startswith("WRONG: ")]
    assert len(wrong) == 3
    assert re.search(r"numpy must be .* but is 0\.0\.1 on beta \(rank 2\) and [1-9]\S+ on the others", wrong[0])
    assert re.search(r"The clock of beta is (89\.9|90\.\d) s ahead of that of alpha\.", wrong[1])
    slow = re.search(r"The link from beta to alpha \(net0 to net0\) is slow: (\S+) MB/s", wrong[2])
    assert slow is not None and 0 < float(slow[1]) < SLOW_RATE + BURST / 0.1
    assert output.count("World of 3 processes on 2 hosts, started by ") == 1
    assert output.count("3 problems must be solved first.") == 1


@pytest.mark.only_ci
def test_a_sound_world_of_two_hosts_can_train(hosts: Hosts) -> None:
    need_programs("tc")
    with contextlib.ExitStack() as stack:
        for host in hosts.network.hosts:  # the same rate for both, whatever else this machine does meanwhile
            stack.enter_context(slowed(host, 20.0))
        codes, output = on_hosts(hosts, "dualdist run", {}, "--json")
    assert codes == [0]
    report = json.loads(output[output.index("{\n") :])
    assert (report["can_train"], report["problems"]) == (True, [])
    assert (report["launcher"], report["size"]) == ("dualdist run", 3)
    assert [(host["host"], host["ranks"], host["interface"]) for host in report["hosts"]] == [
        ("alpha", [0, 1], "net0"),
        ("beta", [2], "net0"),
    ]
    assert [host["address"] for host in report["hosts"]] == [host.address() for host in hosts.network.hosts]
    assert {(link["source"], link["target"]) for link in report["links"]} == {("alpha", "beta"), ("beta", "alpha")}
    assert all(link["bandwidth"] > 10e6 and 0 < link["round_trip"] < 5e-3 for link in report["links"])


def test_the_cores_of_each_rank_are_reported_and_too_few_are_named() -> None:
    need_programs("taskset")
    core, *more = sorted(os.sched_getaffinity(0))
    if not more:
        pytest.skip("a machine with one core cannot bind a process to fewer")
    command = (*COMMANDS["dualdist run"][0][:4], "-np", "2", "taskset", "-c", f"{core}", *PYTHON, "{}")
    output = finish(command, forks=False).check()
    assert re.search(rf"  0-1 +{core} +\d+ ", output)
    assert f"rank 0 to {core} of {os.cpu_count()} cores" in output


NAMED = r"^WRONG: Rank 0 waited 10 s for rank 1, which did not arrive\."
"""Rank 0 prints it, and all others leave."""
NAMED_IN_MPI = (
    r"Rank 0 waited 10 s for another rank in MPI_Init\. On alpha, local rank 1 did not arrive or is stopped\."
)
"""MPI_Init waits for it. Only the processes of its own host can see that it is missing."""


@pytest.fixture(scope="module")
def with_an_absent_rank(
    request: pytest.FixtureRequest, hosts: Hosts
) -> Iterator[Mapping[str, Future[tuple[list[int], str]]]]:
    """The exit codes and the output under each launcher, while rank 1 never arrives."""

    def ended(without: str, folder: Path) -> tuple[list[int], str]:
        return on_hosts(hosts, without, {"absent": 1, "begun": str(folder)}, seconds="10")

    with started_at_once(request, "without", ended, 4) as futures:
        yield futures


@pytest.mark.only_ci
@pytest.mark.only_all(where=lambda without: without in ("srun", "dualdist run"))
@pytest.mark.parametrize("without", COMMANDS)
def test_a_process_that_never_arrives_is_named(
    without: str, with_an_absent_rank: Mapping[str, Future[tuple[list[int], str]]]
) -> None:
    codes, output = with_an_absent_rank[without].result()
    assert 0 not in codes, output
    named = NAMED_IN_MPI if without == "mpirun" else NAMED
    assert len(re.findall(named, output, re.MULTILINE)) == 1, output
