"""Other hosts: which names mean this machine, the ssh command, and the address at which they reach this machine."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

from ..errors import ConfigurationError
from ..rendezvous.interfaces import INTERFACE, candidates, own_address
from ..rendezvous.slurm import node_address

__all__ = ("address_of", "address_towards", "is_local", "ssh_command")

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
