"""`dualdist run --start-with`: other hosts are reached through MPI or Slurm. On both kinds of hosts no ssh is used."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ..helpers.forks import MPI_FOLDER
from ..helpers.namespace_hosts import Network
from ..helpers.process_watch import Watched
from ..helpers.requirements import need_programs
from ..helpers.script_launch import Ended, finish
from ..helpers.slurm_cluster import Slurm
from ..helpers.world import ROOT

RUN = (sys.executable, "-m", "dualdist", "run", "--start-with")
SHOW = ("sh", "-c", "echo $DUALDIST_RANK of $WORLD_SIZE on $(hostname); env | grep -E '^(OMPI|PMI|SLURM_STEP)' || true")
JOIN = (
    sys.executable,
    "-c",
    "import dualdist as hvd; hvd.init(); print(hvd.rank(), 'of', hvd.size(), hvd.local_size())",
)
NO_SSH = {"DUALDIST_SSH": "false", "PYTHONPATH": str(ROOT)}


def on_two_hosts(network: Network, *command: str, folder: str = "") -> Ended:
    """Run a command on the first host. folder: where mpirun is, if not in the path.

    mpirun itself reaches the hosts over ssh here; on clusters it uses the resource manager.
    """
    need_programs(f"{folder}/mpirun" if folder else "mpirun")
    path = os.pathsep.join([*filter(None, [folder]), os.environ["PATH"]])
    return network.finish(*command, environment={**NO_SSH, "PATH": path})


@pytest.mark.only_ci
@pytest.mark.parametrize("folder", ["", f"{MPI_FOLDER}/mpich/bin"], ids=["Open MPI", "MPICH"])
def test_mpirun_reaches_the_other_host(network: Network, folder: str) -> None:
    output = on_two_hosts(network, *RUN, "mpirun", "-H", "alpha:1,beta:2", *SHOW, folder=folder).check()
    assert sorted(output.splitlines()) == [
        "[1,0]<stdout>:0 of 3 on alpha",
        "[1,1]<stdout>:1 of 3 on beta",
        "[1,2]<stdout>:2 of 3 on beta",
    ]


@pytest.mark.only_ci
def test_output_of_any_length_and_the_exit_code_arrive(network: Network) -> None:
    text = "[ $RANK = 0 ] || { head -c 3000000 /dev/zero | tr '\\0' x; printf end; exit 7; }; exec sleep 1000"
    ended = on_two_hosts(network, *RUN, "mpirun", "-H", "alpha:1,beta:1", "sh", "-c", text)
    assert ended.code == 7
    assert ended.output.count("x") >= 3000000 and "xend" in ended.output
    assert "rank 1 on beta ended with exit code 7; ending the others." in ended.output


@pytest.mark.only_ci
def test_no_process_survives_the_launcher(network: Network, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    wait = f"if [ $RANK = 0 ]; then echo >{tmp_path}/up; else read up <{tmp_path}/up; kill -9 $LAUNCHER; fi; wait"
    text = f"sleep 1000 & echo $! $$ >{tmp_path}/$RANK; {wait}"
    command = ("sh", "-c", 'export LAUNCHER=$$; exec "$@"', "sh", *RUN, "mpirun", "-H", "alpha:1,beta:1")
    ended = on_two_hosts(network, *command, "--env", "LAUNCHER", "sh", "-c", text)
    assert ended.code != 0
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(pids) == 4 and Watched(pids).left(30) == []


@pytest.mark.only_ci
def test_a_host_that_cannot_be_reached_is_named(network: Network) -> None:
    ended = on_two_hosts(network, *RUN, "mpirun", "-H", "alpha:1,gamma:1", *SHOW)
    assert ended.code != 0
    assert "gamma" in ended.output


@pytest.mark.parametrize("command", [SHOW, JOIN], ids=["prints", "joins"])
def test_srun_reaches_the_nodes_of_the_allocation(slurm: Slurm, command: tuple[str, ...]) -> None:
    output = slurm.finish(
        "salloc", "-N", "2", "--ntasks-per-node=2", *RUN, "srun", *command, environment=NO_SSH
    ).check()
    assert "dualdist run: the hosts are node1:2,node2:2, from SLURM_JOB_NODELIST." in output
    lines = sorted(line for line in output.splitlines() if line.startswith("[1,") and " of " in line)
    assert [" ".join(line.split(" ")[:3]) for line in lines] == [f"[1,{r}]<stdout>:{r} of 4" for r in range(4)]


def _pbsdsh(folder: Path) -> Mapping[str, str]:
    """Make a stand-in for pbsdsh: it runs the command here, with no variable of the caller, and forwards no input."""
    program = folder / "pbsdsh"
    program.write_text('#!/bin/sh\n[ "$1$2$3" = "-n2--" ] && shift 3 && exec env -i "$@" </dev/null\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "nodes").write_text("localhost\nlocalhost\nnowhere.invalid\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PBS_NODEFILE": str(folder / "nodes"), **NO_SSH}


def test_pbsdsh_gets_the_number_of_the_host_and_no_secret(tmp_path: Path) -> None:
    command = (*RUN, "pbsdsh", "--network-interface", "lo", *SHOW)
    output = finish(command, _pbsdsh(tmp_path)).check()
    assert "2 of 3 on" in output
    assert list(ROOT.glob(".dualdist-*")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pbsdsh", "-H", "192.0.2.1:1"), "`PBS_NODEFILE` must be a file that names 192.0.2.1"),
        (("mpirun", "-H", "user@192.0.2.1:1"), "`-H` must name hosts without a user for `--start-with mpirun`"),
        (("srun", "-H", "192.0.2.1:1"), "'srun' must be installed for `--start-with srun`"),
    ],
)
def test_what_cannot_start_there_is_an_error(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    need_programs(*["mpirun"] * ("mpirun" in arguments))
    environment = {} if arguments[0] != "srun" else {"PATH": str(tmp_path)}
    if arguments[0] == "pbsdsh":
        environment = {"PATH": _pbsdsh(tmp_path)["PATH"]}
    ended = finish((*RUN, *arguments, "true"), environment)
    assert ended.code == 2 and words in ended.output
