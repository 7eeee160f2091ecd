"""Three processes on two hosts with several interfaces each, under every launcher for this, on both backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..helpers.at_once import chosen
from ..helpers.forks import BIN
from ..helpers.namespace_hosts import OPEN_MPI, SUBNETS, Network, mpirun
from ..helpers.requirements import need_modules
from ..helpers.task_launch import PROGRAM, WORKER, Launches, Report, Start, check_joined, reports_of, run_tasks
from ..helpers.task_worker import Task

HOSTS = "alpha:2,beta:1"


def _torchrun(node: int, processes: int) -> tuple[str, ...]:
    nodes = ("--nnodes", "2", "--node-rank", f"{node}", "--nproc-per-node", f"{processes}")
    # All ports of these hosts are free.
    first = ("--master-addr", f"{SUBNETS['net0']}.1", "--master-port", "29500")
    return (f"{BIN}/torchrun", *nodes, *first, *WORKER)


def _step(node: int, ranks: str) -> tuple[str, ...]:
    """Start ranks with the variables of a step: a real Slurm would need the host's /run and a controller."""
    variables = (
        f"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_NODEID={node} "
        "SLURM_STEP_NODELIST=alpha,beta"
    )
    each = 'SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" &'
    return ("sh", "-c", f"export {variables}; for rank in {ranks}; do {each} done; wait", "sh", *PROGRAM)


COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": (_torchrun(0, 2), _torchrun(1, 1)),
    **{f"mpirun {number}": ((*mpirun(HOSTS), *PROGRAM),) for number in (1, 2, 3, 4)},
    "srun's variables": (_step(0, "0 1"), _step(1, "2")),
    "horovodrun": ((f"{BIN}/horovodrun", "--gloo", "-H", HOSTS, "-np", "3", "--network-interfaces", "net0", *PROGRAM),),
    "dualdist run": ((PROGRAM[0], "-m", "dualdist", "run", "-H", HOSTS, "-np", "3", *PROGRAM),),
}
"""The commands to run on the hosts, in their order."""

_NET1 = {"DUALDIST_INTERFACE": "net1"}
_SHORT = {"DUALDIST_STALL_TIMEOUT_SECONDS": "3", "DUALDIST_STALL_WARN_SECONDS": "2"}
"""Horovod's Gloo waits 7 s longer than we do. Until then, Horovod can block a rank that starts an operation."""
TASKS: Mapping[str, Mapping[str, Task]] = {
    "torchrun": {
        "torch+gloo": Task("torch", "gloo"),
        "horovod+gloo": Task("horovod", "gloo"),
        "torch+gloo over net1": Task("torch", "gloo", _NET1),
        "horovod+gloo over net1": Task("horovod", "gloo", _NET1),
        "torch+gloo cut off": Task("torch", "gloo", _SHORT, trains=True),
        "horovod+gloo cut off": Task("horovod", "gloo", _SHORT, trains=True),
    },
    # On several hosts, ranks under mpirun find each other by MPI, which starts once in a launch.
    "mpirun 1": {"torch+gloo": Task("torch", "gloo")},
    "mpirun 2": {"horovod+gloo": Task("horovod", "gloo")},
    "mpirun 3": {"torch+mpi": Task("torch", "mpi")},
    "mpirun 4": {"horovod+mpi": Task("horovod", "mpi")},
    "srun's variables": {"torch+gloo": Task("torch", "gloo"), "horovod+gloo": Task("horovod", "gloo")},
    "horovodrun": {"torch+gloo": Task("torch", "gloo"), "horovod+gloo": Task("horovod", "gloo")},
    "dualdist run": {"torch+gloo": Task("torch", "gloo"), "horovod+gloo": Task("horovod", "gloo")},
}
"""What each launch tries in turn."""

CASES = [(launcher, name) for launcher, tasks in TASKS.items() for name in tasks]
JOINED = [case for case in CASES if not TASKS[case[0]][case[1]].trains]
CUT = [case for case in CASES if case not in JOINED]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, network: Network) -> Iterator[Launches]:
    """Every launch that the chosen tests are about. That which cuts the links runs when the others have ended."""
    wanted = set(chosen(request, "case"))
    launches: Launches = {}
    with ThreadPoolExecutor(1) as pool:
        for launcher, commands in COMMANDS.items():
            names = [name for name in TASKS[launcher] if (launcher, name) in wanted]
            if not names:
                continue
            hosts = network.hosts[: len(commands)]
            start = Start(
                tuple(host.command(*command) for host, command in zip(hosts, commands, strict=True)), 3, OPEN_MPI
            )
            future = pool.submit(run_tasks, start, [TASKS[launcher][name] for name in names], network)
            launches.update({(launcher, name): (future, place) for place, name in enumerate(names)})
        yield launches


@pytest.fixture
def reports(launches: Launches, case: tuple[str, str]) -> tuple[list[Report], str]:
    need_modules("mpi4py", "horovod")
    return reports_of(launches, case)


@pytest.mark.only_ci
@pytest.mark.parametrize("case", JOINED, ids=" with ".join)
def test_launchers_join_two_uneven_hosts(reports: tuple[list[Report], str], case: tuple[str, str]) -> None:
    ranks, output = reports
    backend, _, interface = case[1].partition(" over ")
    check_joined(ranks, backend, output, nodes=2)
    others = {peer for one in ranks for peer in one["peers"] if not peer.startswith("127.")}
    networks = {name for name, subnet in SUBNETS.items() if any(peer.startswith(subnet) for peer in others)}
    assert networks | {"net0"} == {"net0", interface or "net0"}  # torchrun itself is always reached over net0


@pytest.mark.only_ci
@pytest.mark.parametrize("case", CUT, ids=" with ".join)
def test_a_cut_link_ends_every_process_with_an_error(reports: tuple[list[Report], str], case: tuple[str, str]) -> None:
    ranks, output = reports
    assert [one.get("rank") for one in ranks] == [0, 1, 2], output
    for one in ranks:
        assert "error" in one and "still ran" not in one["error"], f"{one}\n{output}"
        assert one["ended"] == 0, f"{one}\n{output}"


def test_every_launcher_has_its_tasks() -> None:
    assert TASKS.keys() == COMMANDS.keys()
