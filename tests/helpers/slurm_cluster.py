"""A real Slurm for one session of tests: munged, slurmctld, and a slurmd for each of two nodes.

Everything is in one folder, and every server listens on a port that is free. The nodes share this host, or each is a
host of namespace_hosts.py. Each claims eight cores, whatever the machine has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .namespace_hosts import Network
from .ports import free_ports
from .requirements import need_programs, need_root, program
from .script_launch import SECONDS, Ended, environment, finish

START_SECONDS, END_SECONDS = 100.0, 30.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller_host}
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued starts when its first credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=15
RequeueExit=75
# No cgroups: neither to hold tasks together, nor to count or bind them.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
# A job that waits, such as one that was requeued, is looked at every 60 s otherwise.
SchedulerParameters=sched_interval=2
# More cores than the machine has may be claimed.
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# PMIx would make the same folder for both nodes.
TmpFS={folder}/tmp-%n
{nodes}
PartitionName=test Nodes=ALL Default=YES
"""


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    name: str
    host: str
    """The name of the host that it is on."""
    address: str
    enter: tuple[str, ...] = ()
    """What must stand before a command, so that it runs on that host."""


def _nodes_here() -> tuple[Node, ...]:
    host = socket.gethostname().partition(".")[0]
    return tuple(Node(name, host, "127.0.0.1") for name in ("node1", "node2"))


def _nodes_on(network: Network) -> tuple[Node, ...]:
    return tuple(Node(host.name, host.name, host.address(), host.command()) for host in network.hosts)


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up."""

    folder: Path
    enter: tuple[str, ...] = ()
    """What must stand before a command, so that it runs on the host of the first node."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def finish(self, *command: str, environment: Mapping[str, str] | None = None, forks: bool = True) -> Ended:
        """Run one of Slurm's commands to its end; see script_launch.finish. If it fails, print what the servers say."""
        ended = None
        try:
            ended = finish([*self.enter, *command], {**self.environment, **(environment or {})}, forks=forks)
        finally:
            if ended is None or ended.code != 0:
                print(self.logs())
        return ended

    def ask(self, *command: str) -> str:
        """Return what one of Slurm's commands says, or '' when it fails."""
        done = subprocess.run(
            [*self.enter, *command],
            env={**environment(), **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def wait_for_success(self, job: str) -> None:
        """Wait until a job, which may be requeued before, has ended with exit code 0."""
        question = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
        _wait(self, question, "COMPLETED", SECONDS)

    @staticmethod
    def free_port() -> int:
        """Return a port that is free."""
        return free_ports(1)[0]

    def logs(self) -> str:
        """Return the last lines of every server."""
        return "\n".join(
            f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def running_slurm(network: Network | None = None) -> Iterator[Slurm]:
    """Start Slurm, wait until all nodes are idle, and end it with every job afterwards.

    network: the hosts that are its nodes; without, two nodes are on this host.
    """
    need_root()
    need_programs("munged", "slurmctld", "slurmd", "srun")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        nodes = _nodes_here() if network is None else _nodes_on(network)
        slurm = Slurm(folder, nodes[0].enter)
        _configure(folder, nodes)
        for name, command in _servers(folder, nodes).items():
            output = stack.enter_context(open(folder / f"{name}.log", "wb"))
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                env={**os.environ, **slurm.environment},
            )
            stack.callback(_end, server)
        _wait(slurm, ["sinfo", "--noheader", "--format=%T %D"], f"idle {len(nodes)}")
        stack.callback(_end_jobs, slurm)
        yield slurm


def _configure(folder: Path, nodes: Sequence[Node]) -> None:
    for name in ("state", *(f"{kind}-{node.name}" for kind in ("spool", "tmp") for node in nodes)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    controller, *ports = free_ports(1 + len(nodes))
    lines = (
        f"NodeName={node.name} NodeHostname={node.host} NodeAddr={node.address} Port={port} CPUs=8"
        for node, port in zip(nodes, ports, strict=True)
    )
    host = f"{nodes[0].host}({nodes[0].address})"
    text = CONFIGURATION.format(folder=folder, controller_host=host, controller=controller, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)


def _servers(folder: Path, nodes: Sequence[Node]) -> dict[str, list[str]]:
    munged = [program("munged"), "--foreground", "--force", "--num-threads=2", f"--key-file={folder}/munge.key"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    return {
        "munged": [*munged, f"--socket={folder}/munge.socket"],
        "slurmctld": [*nodes[0].enter, program("slurmctld"), "-D"],
        **{f"slurmd-{node.name}": [*node.enter, program("slurmd"), "-D", "-N", node.name] for node in nodes},
    }


def _wait(slurm: Slurm, question: list[str], answer: str, seconds: float = START_SECONDS) -> None:
    """Ask until the answer is right, with pauses: every question is a process."""
    deadline = time.monotonic() + seconds
    while (told := slurm.ask(*question)) != answer:
        assert time.monotonic() < deadline, f"{question} must say {answer!r}, but says {told!r}.\n{slurm.logs()}"
        time.sleep(0.1)


def _end_jobs(slurm: Slurm) -> None:
    slurm.ask("scancel", "--user=root")
    _wait(slurm, ["squeue", "--noheader"], "")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
