"""Starting the agent of another host: over ssh, or by a resource manager or MPI, where ssh is not allowed."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.environment import HOST_VARIABLES
from ..launch.mpirun import is_open_mpi
from . import relay
from .agent_connection import AGENT_COMMAND
from .remote import ssh_command

__all__ = ("DEFAULT_STARTER", "STARTERS", "agent_command")

DEFAULT_STARTER = "ssh"


def agent_command(
    starter: str,
    host: str,
    env: Mapping[str, str],
    *,
    address: str,
    port: int | None,
    identity: str | None,
    timeout: int,
) -> Sequence[str]:
    """Return the command that starts the agent of `host`, and is connected to it by its standard input and output.

    starter: a key of STARTERS. address: of this machine, for an agent that connects back. port, identity: of ssh.
    timeout: seconds for the connection of ssh.
    Raises ConfigurationError when the starter is not installed, or cannot start a process on `host`.
    """
    started_by = STARTERS[starter]
    if started_by is None:
        return ssh_command(host, AGENT_COMMAND, env, port=port, identity=identity, timeout=timeout)
    if shutil.which(starter) is None:
        raise ConfigurationError(
            f"{starter!r} must be installed for `--start-with {starter}`, but is not found. Choose another one of "
            f"{', '.join(STARTERS)}."
        )
    if "@" in host:
        raise ConfigurationError(
            f"`-H` must name hosts without a user for `--start-with {starter}`, but has {host!r} instead."
        )
    how, command = started_by(host, env)
    program = (sys.executable, "-E", "-s", "-S", relay.__file__)
    return [*program, address, HOST_VARIABLES, how, *command]


def _srun(host: str, _: Mapping[str, str]) -> tuple[str, list[str]]:
    """A step of one task, which may use the CPUs and GPUs of the other steps of the job (srun(1))."""
    size = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
    return relay.VARIABLE, ["srun", "--overlap", *size, "--mpi=none", "--cpu-bind=none", "--export=ALL", "--"]


def _mpirun(host: str, _: Mapping[str, str]) -> tuple[str, list[str]]:
    """mpirun starts processes through the resource manager for which it was built, else over ssh."""
    if not _has_open_mpi():
        # Hydra passes on the environment.
        return relay.VARIABLE, ["mpirun", "-n", "1", "-hosts", host]
    options = ["--bind-to", "none", "-x", "DUALDIST_AGENT", *["--allow-run-as-root"] * (os.getuid() == 0)]
    return relay.VARIABLE, ["mpirun", "-np", "1", "-H", host, *options]


def _pbsdsh(host: str, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """pbsdsh takes the number of a line of PBS_NODEFILE, and passes on no environment (pbsdsh(1B))."""
    try:
        lines = Path(env.get("PBS_NODEFILE", "")).read_text().split()
        return relay.FILE, ["pbsdsh", "-n", str(lines.index(host)), "--"]
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"`PBS_NODEFILE` must be a file that names {host} for `--start-with pbsdsh`, but is "
            f"{env.get('PBS_NODEFILE', 'absent')!r} instead: {error}."
        ) from error


@functools.cache
def _has_open_mpi() -> bool:
    return is_open_mpi("mpirun")


STARTERS: Mapping[str, Callable[[str, Mapping[str, str]], tuple[str, list[str]]] | None] = {
    DEFAULT_STARTER: None,
    "srun": _srun,
    "pbsdsh": _pbsdsh,
    "mpirun": _mpirun,
}
"""name -> function of host and environment that returns how the agent finds the relay, and the command before it. None:
ssh, which needs no relay."""
