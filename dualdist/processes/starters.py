"""Starting the agent of another host: over ssh, or by a resource manager or MPI, where ssh is not allowed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.environment import HOST_VARIABLES
from ..launch.launchers import is_open_mpi
from ..meeting.addresses import INTERFACE, candidates, own_address
from ..meeting.boards import node_address
from . import relay
from .agent_connection import AGENT_COMMAND

# Other hosts: which names mean this machine, the ssh command, and the address at which they reach this machine.

_SSH_SECONDS = "5"


def is_local(host: str) -> bool:
    """Return whether `host` is this machine: one of its names or addresses."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: the name is too long
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                # Only an address of this machine can be bound.
                probe.bind(address)
                return True
    return False


def ssh_command(
    host: str, command: Sequence[str], env: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs `command` on `host`. options: more options of ssh.

    DUALDIST_SSH in `env`, such as "ssh -F file", replaces `ssh`. ssh never asks for a password. The user's settings
    decide whether an unknown host key is accepted, because the job's secret goes over the connection.
    Raises ConfigurationError when there is no ssh.
    """
    if shutil.which(_ssh(env)[0]) is None:
        raise ConfigurationError(
            f"{_ssh(env)[0]!r} must be installed to reach {host!r}, but is not found. Install OpenSSH's client, "
            "or set DUALDIST_SSH."
        )
    always = [
        "-T",
        "-x",
        "-o",
        "BatchMode=yes",
        "-o",
        "ServerAliveInterval=10",
        "-o",
        "ServerAliveCountMax=3",
    ]
    return [*_ssh(env), *always, *options, "--", _bare(host), f"exec {shlex.join(command)}"]


def address_towards(host: str, env: Mapping[str, str], interface: str | None) -> str:
    """Return this machine's IPv4 address on `interface`, by default the one from which it reaches `host`.

    A host name may be an alias of ssh's configuration. Raises ConfigurationError when there is no such address.
    """
    if interface is not None:
        return candidates({INTERFACE: interface})[0]
    try:
        return own_address(node_address(_network_name(host, env)))
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"`-H` must name hosts that can be reached, but {host!r} cannot: {error}. "
            "Check the name, or choose the network with --network-interface."
        ) from error


def address_of(host: str, env: Mapping[str, str]) -> str:
    """Return an IPv4 address of `host`, or the name that ssh uses for it if this machine cannot resolve it."""
    return node_address(_network_name(host, env))


def _network_name(host: str, env: Mapping[str, str]) -> str:
    """Return the name or address to which ssh connects for `host`, which may be an alias of its configuration."""
    name = _bare(host).rpartition("@")[2]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # timeout(1) also ends what a script in place of ssh has started.
        question = ["timeout", "-s", "KILL", _SSH_SECONDS, *_ssh(env), "-G", "--", _bare(host)]
        answer = subprocess.run(
            question, capture_output=True, text=True, errors="replace", check=True, stdin=subprocess.DEVNULL
        )
        name = next((line[9:] for line in answer.stdout.splitlines() if line.startswith("hostname ")), name)
    return name


def _ssh(env: Mapping[str, str]) -> list[str]:
    given = env.get("DUALDIST_SSH") or "ssh"
    try:
        return shlex.split(given)
    except ValueError as error:
        raise ConfigurationError(
            f"`DUALDIST_SSH` must be a command, but is {given!r} instead: {error}."
        ) from None


def _bare(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host.replace("[", "").replace("]", "")


DEFAULT_STARTER = "ssh"


def agent_command(
    starter: str, host: str, env: Mapping[str, str], address: str, ssh_options: Sequence[str]
) -> Sequence[str]:
    """Return the command that starts the agent of `host`, and is connected to it by its standard input and output.

    starter: a key of STARTERS. address: of this machine, for an agent that connects back.
    Raises ConfigurationError when the starter is not installed, or cannot start a process on `host`.
    """
    started_by = STARTERS[starter]
    if started_by is None:
        return ssh_command(host, AGENT_COMMAND, env, ssh_options)
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
    return [sys.executable, "-E", "-s", "-S", relay.__file__, address, HOST_VARIABLES, how, *command]


def _srun(host: str, _: Mapping[str, str]) -> tuple[str, list[str]]:
    """A step of one task, which may use the CPUs and GPUs of the other steps of the job (srun(1))."""
    size = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
    return relay.VARIABLE, ["srun", "--overlap", *size, "--mpi=none", "--cpu-bind=none", "--export=ALL", "--"]


def _mpirun(host: str, _: Mapping[str, str]) -> tuple[str, list[str]]:
    """mpirun starts processes through the resource manager for which it was built, else over ssh."""
    if not is_open_mpi("mpirun"):
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


STARTERS: Mapping[str, Callable[[str, Mapping[str, str]], tuple[str, list[str]]] | None] = {
    DEFAULT_STARTER: None,
    "srun": _srun,
    "pbsdsh": _pbsdsh,
    "mpirun": _mpirun,
}
"""name -> function of host and environment that returns how the agent finds the relay, and the command before it. None:
ssh, which needs no relay."""
