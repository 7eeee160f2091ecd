"""What a job needs before its processes start: its options, its servers, and the processes of each host."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..launch import DUALDIST_RUN
from ..launch.environment import exportable, process_variables, without_launchers
from ..rendezvous import LOOPBACK
from ..rendezvous.keyvalue import KeyValueServer
from .agent_connection import AGENT_COMMAND, HostJob, Process
from .hosts import Host, assign
from .remote import address_of, address_towards, is_local
from .starters import DEFAULT_STARTER, agent_command
from .unchanged_scripts import serve_unchanged_scripts, with_alias

__all__ = ("RunOptions", "prepare")

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
