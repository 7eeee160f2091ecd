"""A real Slurm on this host, for one session of tests: munged, slurmctld, and a slurmd for each of two nodes.

Everything is in one folder, and every server listens on a port that is free. The nodes share the host, so that two
tasks may be on one node and a third on the other; each claims eight cores, whatever the machine has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .requirements import need_programs, need_root, program
from .script_launch import Ended, finish

__all__ = ("Slurm", "running_slurm")

START_SECONDS, END_SECONDS = 30.0, 10.0
NODES = ("node1", "node2")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
# No cgroups: neither to hold tasks together, nor to count or bind them.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
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
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=8
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=8
PartitionName=test Nodes=ALL Default=YES
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def finish(self, *command: str, environment: Mapping[str, str] | None = None) -> Ended:
        """Run one of Slurm's commands to its end; see launch.finish."""
        try:
            return finish(command, {**self.environment, **(environment or {})})
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def ask(self, *command: str) -> str:
        """Return what one of Slurm's commands says, or '' when it fails."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    @staticmethod
    def free_port() -> int:
        """Return a port that is free now."""
        return _free_ports(1)[0]

    def logs(self) -> str:
        """Return the last lines of every server."""
        return "\n".join(
            f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Start Slurm, wait until both nodes are idle, and end it with every job afterwards."""
    need_root()
    need_programs("munged", "slurmctld", "slurmd", "srun")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        slurm = Slurm(folder)
        _configure(folder)
        for name, command in _servers(folder).items():
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
        _wait(slurm, ["sinfo", "--noheader", "--format=%T %D"], f"idle {len(NODES)}")
        stack.callback(_end_jobs, slurm)
        yield slurm


def _configure(folder: Path) -> None:
    for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    host = socket.gethostname().partition(".")[0]
    ports = dict(zip(("controller", *NODES), _free_ports(1 + len(NODES)), strict=True))
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, **ports))


def _servers(folder: Path) -> dict[str, list[str]]:
    munged = [
        program("munged"),
        "--foreground",
        "--force",
        "--num-threads=2",
        f"--key-file={folder}/munge.key",
    ]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    nodes = {f"slurmd-{node}": [program("slurmd"), "-D", "-N", node] for node in NODES}
    return {
        "munged": [*munged, f"--socket={folder}/munge.socket"],
        "slurmctld": [program("slurmctld"), "-D"],
        **nodes,
    }


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [made.getsockname()[1] for made in sockets]


def _wait(slurm: Slurm, question: list[str], answer: str) -> None:
    """Ask until the answer is right; every question is a process, so that this is no busy loop."""
    deadline = time.monotonic() + START_SECONDS
    while (told := slurm.ask(*question)) != answer:
        assert time.monotonic() < deadline, (
            f"{question} must say {answer!r}, but says {told!r}.\n{slurm.logs()}"
        )


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
