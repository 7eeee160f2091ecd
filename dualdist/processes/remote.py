"""Other hosts: which names are this machine, how ssh is called, and by which address the others reach us."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

from ..errors import ConfigurationError
from ..rendezvous.interfaces import INTERFACE, candidates, own_address

__all__ = ("address_towards", "is_local", "ssh_command")

_SSH_SECONDS = 10.0


def is_local(host: str) -> bool:
    """Return whether `host` is this machine: one of its names or addresses."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)  # which only an address of this machine allows
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
    """Return what runs `command` on `host`. timeout: seconds for the connection.

    DUALDIST_SSH in `env` replaces the `ssh` in front, such as "ssh -F file". Passwords are never asked for; whether an
    unknown host key is accepted is left to the user's configuration, since the job's secret goes over the connection.
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
    """Return this machine's IPv4 address on `interface`, else that by which it reaches `host`.

    A name that only ssh's configuration knows is looked up there. Raises ConfigurationError when there is none.
    """
    if interface is not None:
        return candidates({INTERFACE: interface})[0]
    name = _bare(host).rpartition("@")[2]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [*_ssh(env), "-G", "--", _bare(host)]
        told = subprocess.run(
            asked, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=_SSH_SECONDS
        )
        name = next((line[9:] for line in told.stdout.splitlines() if line.startswith("hostname ")), name)
    try:
        return own_address(name)
    except OSError as error:
        raise ConfigurationError(
            f"`-H` must name hosts that can be reached, but {host!r} cannot: {error}. "
            "Check the name, or choose the way to it with --network-interface."
        ) from error


def _ssh(env: Mapping[str, str]) -> list[str]:
    return shlex.split(env.get("DUALDIST_SSH") or "ssh")


def _bare(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host.replace("[", "").replace("]", "")
