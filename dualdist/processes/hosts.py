"""The hosts of a job: host lists, the host of each rank, and starting the agent of another host.

The formats of lists are those of horovodrun, `-H host1:4,host2:4` and lines of `host slots=4`, and of the host files of
Open MPI and MPICH. Ranks fill the hosts in the given order, as in
horovod/runner/common/util/hosts.py:get_host_assignments.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.backends import TRANSPORTS, transport_named
from ..core.meeting.links import INTERFACE, candidates, own_address
from ..errors import ConfigurationError
from ..slurm import host_names, node_address, node_counts, numbers_in
from . import relay

# The variables by which the processes of `dualdist run` and `spawn` choose their backend, transport and network.


def backend_variables(
    backend: str | None, transport: str | None, interfaces: Sequence[str] = (), *, option: str, launcher: str
) -> dict[str, str]:
    """Return the variables that choose `backend`, `transport` and `interfaces`; None leaves the choice to `init`.

    option, launcher: the names, for an error, of the transport's option and of what starts the processes.
    Raises ConfigurationError for a transport that needs MPI, which only other launchers start.
    """
    if transport is not None and TRANSPORTS[transport_named(transport)].needs_mpi:
        possible = [name for name, needs in TRANSPORTS.items() if not needs.needs_mpi]
        raise ConfigurationError(
            f"`{option}` must be {' or '.join(possible)}, but is {transport} instead: {launcher} does not start MPI. "
            "Start with mpirun."
        )
    chosen = {"DUALDIST_BACKEND": backend, "DUALDIST_TRANSPORT": transport, INTERFACE: ",".join(interfaces)}
    return {name: value for name, value in chosen.items() if value}


_NAME = r"(?P<name>(?:[A-Za-z0-9_.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\]))"
"""A host name or address, IPv6 in brackets, with an optional USER@ before it. It cannot be an option of ssh."""
_ITEM = re.compile(rf"{_NAME}(?::(?P<slots>\d{{1,9}}))?", re.ASCII)
_WORD = re.compile(r"(?P<key>[a-z_-]+)\s*=\s*(?P<value>\d{1,9})\b", re.ASCII)
MOST_PROCESSES = 1 << 16
"""A job has fewer processes."""


class Host(NamedTuple):
    """A host and the number of processes that may run on it."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `-H host1:4,host2:4`; a host without a number has one slot, as in Open MPI.

    Raises ConfigurationError for any other form.
    """
    return merged(parse_host(item.strip(), "-H") for item in text.split(","))


def read_hostfile(path: Path, option: str) -> list[Host]:
    """Return the hosts of the file `path`. Raises ConfigurationError, which names `option`, if it cannot be read."""
    try:
        return parse_hostfile(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"`{option}` must be a readable file, but is not: {error}.") from error


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of a host file: `host slots=4`, `host:4` or `host` per line; `#` starts a comment.

    max_slots and max-slots are ignored: a host never runs more processes than its slots.
    Raises ConfigurationError, with the number of the line, for any other form, and when there is no host.
    """
    lines = [(f"{path}:{number}", line.partition("#")[0]) for number, line in enumerate(text.splitlines(), 1)]
    hosts = [_parse_line(content.strip(), where) for where, content in lines if content.strip()]
    if not hosts:
        raise ConfigurationError(f"The host file {path} must name a host, but names none. Write `host slots=4` lines.")
    return merged(hosts)


def assign(hosts: Sequence[Host], size: int | None) -> list[str]:
    """Return the host of each of `size` ranks, or of as many ranks as there are slots. They fill the hosts in order.

    Raises ConfigurationError when there are fewer slots than processes, or no processes.
    """
    total = sum(host.slots for host in hosts)
    if size is not None and size < 1:
        raise ConfigurationError(f"`-np` must be at least 1, but is {size} instead.")
    size = total if size is None else size
    if size >= MOST_PROCESSES:
        raise ConfigurationError(f"`-np` must be less than {MOST_PROCESSES}, but is {size} instead.")
    if not 1 <= size <= total:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigurationError(
            f"`-np` must be between 1 and the {total} slots of {listed}, but is {size} instead. "
            "Give the hosts more slots, or start fewer processes."
        )
    return list(itertools.islice((host.name for host in hosts for _ in range(host.slots)), size))


def parse_host(item: str, where: str) -> Host:
    """Return the host of `host1:4` or `host1`. Raises ConfigurationError, which names `where`, for any other form."""
    found = _ITEM.fullmatch(item)
    if found is None:
        raise ConfigurationError(
            f"`{where}` must hold host names with numbers of slots, such as node1:4,node2:4, but has {item!r} instead. "
            "Names are letters, digits, '.', '-' and '_'; an IPv6 address is in brackets."
        )
    return Host(found["name"], int(found["slots"] or 1))


def _parse_line(content: str, where: str) -> Host:
    name, *more = content.split(None, 1)
    host, rest = parse_host(name, where), "".join(more)
    words = {found["key"]: int(found["value"]) for found in _WORD.finditer(rest)}
    unknown = _WORD.sub("", rest).strip() or ", ".join(words.keys() - {"slots", "max_slots", "max-slots"})
    if unknown:
        raise ConfigurationError(f"`{where}` must be `host slots=4`, but has {unknown!r} instead.")
    return Host(host.name, words.get("slots", host.slots))


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, with the sum of its slots."""
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.name] += host.slots
    return list(itertools.starmap(Host, slots.items()))


# The hosts that a resource manager has allocated to the job in which `dualdist run` was started.

_FLUX_SECONDS = 30.0
_SLURM_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
"""Slurm's variables with a number for each node: of tasks, else of CPUs."""


def find_allocation(env: Mapping[str, str]) -> tuple[str, list[Host]]:
    """Return the variable that names the hosts of a job, or the job, and its hosts; none outside a job.

    Each host has the number of processes for which it was allocated. Raises ConfigurationError if it cannot be read.
    """
    for variable, read in _READERS.items():
        text = env.get(variable, "")
        if text:
            try:
                hosts = merged(read(text, env))
                if not hosts:
                    raise ValueError("it names none")
            except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                raise ConfigurationError(
                    f"`{variable}` must name the hosts of this job, but is {text!r} instead: {error}. "
                    "Give the hosts with -H or --hostfile."
                ) from error
            for host in hosts:
                parse_host(host.name, variable)
            return variable, hosts
    return "", []


def _slurm(nodes: str, env: Mapping[str, str]) -> list[Host]:
    """Read node[1-2], with the tasks of each node, or its CPUs (sbatch(1), output environment variables)."""
    names = host_names(nodes)
    counts = next(filter(None, (node_counts(env.get(name, "")) for name in _SLURM_COUNTS)), [1] * len(names))
    if len(counts) != len(names):
        raise ValueError(f"there are {len(counts)} numbers of tasks for {len(names)} nodes")
    return list(map(Host, names, counts))


def _host_per_slot(file: str, _: Mapping[str, str]) -> list[Host]:
    """Read a file with a line for each slot (pbs_environment(7); LSF's documentation of LSB_DJOB_HOSTFILE)."""
    return [Host(name, 1) for name in Path(file).read_text().split()]


def _pairs(text: str, _: Mapping[str, str]) -> list[Host]:
    """Read host1 4 host2 2 (LSF's documentation of LSB_MCPU_HOSTS)."""
    words = text.split()
    return [Host(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]


def _grid_engine(file: str, _: Mapping[str, str]) -> list[Host]:
    """Read lines of host, slots, queue and processors (sge_pe(5))."""
    rows = [line.split() for line in Path(file).read_text().splitlines() if line.strip()]
    if any(len(row) < 2 for row in rows):
        raise ValueError("a line has no number of slots")
    return [Host(row[0], int(row[1])) for row in rows]


def _flux(_: str, env: Mapping[str, str]) -> list[Host]:
    """Return the hosts of the Flux instance of `env` with their numbers of cores (flux-resource(1), Flux RFC 20)."""
    command = ["flux", "resource", "R"]
    ended = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FLUX_SECONDS
    )
    if ended.returncode:
        raise ValueError(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
    execution = json.loads(ended.stdout)["execution"]
    rows = [(row["rank"], len(_numbers(row["children"]["core"]))) for row in execution["R_lite"]]
    cores = sorted((rank, count) for ranks, count in rows for rank in _numbers(ranks))
    names = [name for entry in execution["nodelist"] for name in host_names(entry)]
    # The nodes are in the order of their brokers' ranks (flux/resource/Rv1Set.py of flux-core 0.88).
    return [Host(name, count) for name, (_, count) in zip(names, cores, strict=True)]


def _numbers(idset: str) -> list[int]:
    """Read 0-2,5 (Flux RFC 22)."""
    return [int(number) for number in numbers_in(idset.strip("[]"))]


_READERS: Mapping[str, Callable[[str, Mapping[str, str]], Iterable[Host]]] = {
    "SLURM_JOB_NODELIST": _slurm,
    "PBS_NODEFILE": _host_per_slot,
    "LSB_DJOB_HOSTFILE": _host_per_slot,
    "LSB_MCPU_HOSTS": _pairs,
    "PE_HOSTFILE": _grid_engine,
    "COBALT_NODEFILE": _host_per_slot,
    "FLUX_URI": _flux,
}
"""The variable that names the hosts -> what reads it."""


# Starting the agent of another host: over ssh, or by a resource manager or MPI, where ssh is not allowed. First: which
# names mean this machine, the ssh command, and the address at which other hosts reach this machine.

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


def ssh_command(host: str, command: Sequence[str], env: Mapping[str, str], options: Sequence[str] = ()) -> list[str]:
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
    always = "-T -x -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3".split()
    return [*_ssh(env), *always, *options, "--", _bare(host), f"exec {shlex.join(command)}"]


def address_towards(host: str, env: Mapping[str, str], interface: str | None) -> str:
    """Return this machine's IPv4 address on `interface`, by default the one from which it reaches `host`.

    Raises ConfigurationError when there is no such address.
    """
    if interface is not None:
        return candidates({INTERFACE: interface})[0]
    try:
        return own_address(address_of(host, env))
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"`-H` must name hosts that can be reached, but {host!r} cannot: {error}. "
            "Check the name, or choose the network with --network-interface."
        ) from error


def address_of(host: str, env: Mapping[str, str]) -> str:
    """Return an IPv4 address of `host`, or the name that ssh uses for it if this machine cannot resolve it.

    A host name may be an alias of ssh's configuration.
    """
    name = _bare(host).rpartition("@")[2]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # timeout(1) also ends what a script in place of ssh has started.
        question = ["timeout", "-s", "KILL", _SSH_SECONDS, *_ssh(env), "-G", "--", _bare(host)]
        answer = subprocess.run(
            question, capture_output=True, text=True, errors="replace", check=True, stdin=subprocess.DEVNULL
        )
        name = next((line[9:] for line in answer.stdout.splitlines() if line.startswith("hostname ")), name)
    return node_address(name)


def _ssh(env: Mapping[str, str]) -> list[str]:
    given = env.get("DUALDIST_SSH") or "ssh"
    try:
        return shlex.split(given)
    except ValueError as error:
        raise ConfigurationError(f"`DUALDIST_SSH` must be a command, but is {given!r} instead: {error}.") from None


def _bare(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host.replace("[", "").replace("]", "")


_READ_SOURCE = "import sys;del sys.path[0];i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
AGENT_COMMAND = (sys.executable, "-E", "-s", "-S", "-c", _READ_SOURCE)
"""Starts an agent, which reads its own source from its standard input. It imports nothing from the current
folder, where a file can have the name of a module of Python."""
DEFAULT_STARTER = "ssh"
HOST_VARIABLES = (
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY"  # horovod/runner/common/util/env.py:24
    r"|HOME|USER|LOGNAME|SHELL|MAIL|PWD|SHLVL|_|HOSTNAME|DISPLAY|XAUTHORITY|TMPDIR|SSH_.*|XDG_.*|DBUS_.*"
)
"""A regular expression of variables that are valid only on this host or in this login session."""


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
    how = relay.FILE if started_by is _pbsdsh else relay.VARIABLE
    command = [sys.executable, "-E", "-s", "-S", relay.__file__, address, HOST_VARIABLES, how]
    return [*command, *started_by(host, env)]


def _srun(host: str, _: Mapping[str, str]) -> list[str]:
    """A step of one task, which may use the CPUs and GPUs of the other steps of the job (srun(1))."""
    size = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
    return ["srun", "--overlap", *size, "--mpi=none", "--cpu-bind=none", "--export=ALL", "--"]


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in version.stdout


def mpirun_command(size: int, command: Sequence[str]) -> list[str] | None:
    """Return the command line that runs `command` in `size` processes of this host; None if mpirun is not on PATH.

    Open MPI's mpirun is allowed to start more processes than there are cores, and to run as root.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    options = ["--oversubscribe", *_as_root()] if _is_open_mpi(mpirun) else []
    return [mpirun, "-np", str(size), *options, *command]


def _as_root() -> list[str]:
    return ["--allow-run-as-root"] * (os.getuid() == 0)


def _mpirun(host: str, _: Mapping[str, str]) -> list[str]:
    """mpirun starts processes through the resource manager for which it was built, else over ssh."""
    if not _is_open_mpi("mpirun"):
        # Hydra passes on the environment.
        return ["mpirun", "-n", "1", "-hosts", host]
    return ["mpirun", "-np", "1", "-H", host, "--bind-to", "none", "-x", "DUALDIST_AGENT", *_as_root()]


def _pbsdsh(host: str, env: Mapping[str, str]) -> list[str]:
    """pbsdsh takes the number of a line of PBS_NODEFILE, and passes on no environment (pbsdsh(1B))."""
    try:
        lines = Path(env.get("PBS_NODEFILE", "")).read_text().split()
        return ["pbsdsh", "-n", str(lines.index(host)), "--"]
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"`PBS_NODEFILE` must be a file that names {host} for `--start-with pbsdsh`, but is "
            f"{env.get('PBS_NODEFILE', 'absent')!r} instead: {error}."
        ) from error


STARTERS: Mapping[str, Callable[[str, Mapping[str, str]], list[str]] | None] = {
    DEFAULT_STARTER: None,
    "srun": _srun,
    "pbsdsh": _pbsdsh,
    "mpirun": _mpirun,
}
"""name -> function that returns what starts an agent, which connects to a relay. None: ssh, without one."""
