"""Starting the agent of another host: over ssh, or by a resource manager or MPI, where ssh is not allowed."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..backends.horovod.installed import CHILDREN_FOLDER, is_installed
from ..errors import ConfigurationError
from ..launch import DUALDIST_RUN, nodes, topology
from ..launch.environment import (
    HOST_VARIABLES,
    copied_variables,
    exportable,
    process_variables,
    without_launchers,
)
from ..launch.launchers import is_open_mpi
from ..meeting import LOOPBACK, interface_of
from ..meeting.addresses import INTERFACE, candidates, own_address, reserved_port
from ..meeting.http_store import HttpStore, horovods_scopes
from ..meeting.keyvalue import KeyValueServer
from ..meeting.slurm import node_address
from . import relay
from .agent_connection import AGENT_COMMAND, HostJob, Process
from .hosts import Host, Slot, assign

# Other hosts: which names mean this machine, the ssh command, and the address at which they reach this machine.

_SSH_SECONDS = 10.0


def is_local(host: str) -> bool:
    """Return whether `host` is this machine: one of its names or addresses."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                # Only an address of this machine can be bound.
                probe.bind(address)
                return True
    return False


def ssh_command(
    host: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    port: int | None,
    identity: str | None,
    timeout: int,
) -> list[str]:
    """Return the command that runs `command` on `host`. timeout: seconds for the connection.

    DUALDIST_SSH in `env`, such as "ssh -F file", replaces `ssh`. ssh never asks for a password. The user's settings
    decide whether an unknown host key is accepted, because the job's secret goes over the connection.
    Raises ConfigurationError when there is no ssh.
    """
    if shutil.which(_ssh(env)[0]) is None:
        raise ConfigurationError(
            f"{_ssh(env)[0]!r} must be installed to reach {host!r}, but is not found. Install OpenSSH's client, "
            "or set DUALDIST_SSH."
        )
    options = ["-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout}"]
    options += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    options += ["-p", str(port)] if port is not None else []
    options += ["-i", identity] if identity is not None else []
    return [*_ssh(env), *options, "--", _bare(host), f"exec {shlex.join(command)}"]


def address_towards(host: str, env: Mapping[str, str], interface: str | None) -> str:
    """Return this machine's IPv4 address on `interface`, by default the one from which it reaches `host`.

    A host name may be an alias of ssh's configuration. Raises ConfigurationError when there is no such address.
    """
    if interface is not None:
        return candidates({INTERFACE: interface})[0]
    try:
        return own_address(node_address(_network_name(host, env)))
    except OSError as error:
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
        question = [*_ssh(env), "-G", "--", _bare(host)]
        answer = subprocess.run(
            question,
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=_SSH_SECONDS,
        )
        name = next((line[9:] for line in answer.stdout.splitlines() if line.startswith("hostname ")), name)
    return name


def _ssh(env: Mapping[str, str]) -> list[str]:
    return shlex.split(env.get("DUALDIST_SSH") or "ssh")


def _bare(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host.replace("[", "").replace("]", "")


# What scripts that do not use dualdist need to join the world of `dualdist run` and `spawn`.
#
# A script with `import horovod.torch` needs an HTTP server where Horovod's controllers meet; without Horovod installed,
# dualdist.compat replaces it. A script with torch.distributed needs an address for rank 0's store.

_LOWEST_PORT, _PORTS = 20000, 10000
"""Ports on other hosts are drawn from these: they are below those that Linux itself assigns."""


@contextlib.contextmanager
def serve_unchanged_scripts(
    slots: Sequence[Slot], host: str, first: str | None, given: Mapping[str, str]
) -> Iterator[list[dict[str, str]]]:
    """Yield the variables of each rank, while the block runs.

    host: the address of this machine at which all processes reach it. first: the address of rank 0's host; None if it
    is this machine. given: variables that the user has set for the processes.
    """
    names = nodes([(slot.host, slot.local_rank) for slot in slots])
    worlds = topology([(slot.host, slot.local_rank) for slot in slots])
    with contextlib.ExitStack() as stack:
        if first is None:
            first, port = host, stack.enter_context(reserved_port())
        else:
            port = _LOWEST_PORT + secrets.randbelow(_PORTS)
        rendezvous = None
        if is_installed():
            store = stack.enter_context(HttpStore(host, horovods_scopes(names, worlds)))
            rendezvous = store.host, store.port
        yield [
            copied_variables(
                world,
                host=name,
                master=(first, port),
                rendezvous=rendezvous,
                interface=interface_of(host) if host == LOOPBACK else None,
                given=given,
            )
            for name, world in zip(names, worlds, strict=True)
        ]


def with_alias(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env`, in which `import horovod` imports dualdist.compat if Horovod is not installed."""
    found = dict(env)
    if not is_installed():
        folders = [*filter(None, [env.get("PYTHONPATH")]), CHILDREN_FOLDER]
        found["PYTHONPATH"] = os.pathsep.join(folders)
    return found


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


# What a job needs before its processes start: its options, its servers, and the processes of each host.

_ALL_WINDOWS, _LARGEST_WINDOW, _SMALLEST_WINDOW = 64 << 20, 1 << 20, 64 << 10
"""Bytes of output that may be sent before any is read: by all hosts together, and by one host at most and at least."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a job of `dualdist run`, `run` or `spawn`."""

    command: Sequence[str]
    hosts: Sequence[Host]
    size: int | None = None
    """None: all slots of the hosts."""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables to set for the processes, in addition to the environment or instead of its values."""
    output: Path | None = None
    timestamps: bool = False
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    start_with: str = DEFAULT_STARTER
    """What starts the agents of other hosts: a key of STARTERS."""
    start_timeout: float = 30.0
    """How many seconds to wait for each host to answer."""
    verbose: bool = False
    launcher: str = DUALDIST_RUN
    """What DUALDIST_LAUNCHER is in the processes."""
    task: bytes | None = None
    """See HostJob."""
    descriptors: tuple[int, int] | None = None
    """The open files for the processes' output on this host; None: it is sent to the launcher."""


@contextlib.contextmanager
def prepare(options: RunOptions, env: Mapping[str, str]) -> Iterator[list[HostJob]]:
    """Run the servers of a job while the block runs, and yield the part of each host. env: of this process.

    Raises ConfigurationError when the options do not fit the hosts.
    """
    slots = assign(options.hosts, options.size)
    names = list(dict.fromkeys(slot.host for slot in slots))
    remote = [name for name in names if not is_local(name)]
    address = address_towards(remote[0], env, options.interface) if remote else LOOPBACK
    first = address_of(slots[0].host, env) if slots[0].host in remote else None
    secret = secrets.token_bytes(32)
    with (
        KeyValueServer(address, secret=secret) as server,
        serve_unchanged_scripts(slots, address, first, options.variables) as copies,
    ):
        processes: dict[str, list[Process]] = {name: [] for name in names}
        for slot in slots:
            numbers = (slot.rank, len(slots), slot.local_rank, slot.local_size)
            own = process_variables(options.launcher, *numbers, f"{server.host}:{server.port}", secret)
            processes[slot.host].append(Process(slot.rank, options.command, {**copies[slot.rank], **own}))
        yield [
            _host_job(
                options, name, processes[name], name in remote, address if remote else None, len(names), env
            )
            for name in names
        ]


def _host_job(
    options: RunOptions,
    host: str,
    processes: Sequence[Process],
    is_remote: bool,
    launcher: str | None,
    num_hosts: int,
    env: Mapping[str, str],
) -> HostJob:
    common = with_alias(without_launchers(env))
    if options.descriptors is None:
        # Python's buffer delays the output, so horovodrun sets PYTHONUNBUFFERED too.
        common = {"PYTHONUNBUFFERED": "1"} | common
    return HostJob(
        host,
        _remote_agent(host, options, env, launcher) if is_remote else AGENT_COMMAND,
        processes,
        (exportable(common) if is_remote else common) | dict(options.variables),
        local=not is_remote,
        launcher=launcher,
        task=options.task,
        output=None if is_remote else options.descriptors,
        window=max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, _ALL_WINDOWS // num_hosts)),
    )


def _remote_agent(
    host: str, options: RunOptions, env: Mapping[str, str], launcher: str | None
) -> Sequence[str]:
    assert launcher is not None  # there is a remote host
    return agent_command(
        options.start_with,
        host,
        env,
        address=launcher,
        port=options.ssh_port,
        identity=options.ssh_identity,
        timeout=max(1, int(options.start_timeout) - 1),
    )
