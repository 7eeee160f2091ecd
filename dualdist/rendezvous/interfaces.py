"""The network interfaces of this host and their addresses. DUALDIST_INTERFACE can select some of them.

Only IPv4, as in Horovod and in Gloo's own choice. The ioctl requests are specific to Linux, see netdevice(7).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigurationError

__all__ = (
    "INTERFACE",
    "LOOPBACK",
    "addresses",
    "candidates",
    "check_interfaces",
    "connected",
    "interface_of",
    "own_address",
    "own_node",
)

LOOPBACK = "127.0.0.1"
INTERFACE = "DUALDIST_INTERFACE"
_SIOCGIFADDR = 0x8915


def addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # It has no IPv4 address.
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def candidates(env: Mapping[str, str]) -> list[str]:
    """Return the addresses at which other hosts may reach this one, in the order in which to try them.

    DUALDIST_INTERFACE selects interfaces by their names, separated by commas; names that do not exist here
    are skipped. Raises ConfigurationError when it names no interface of this host.
    """
    found = addresses()
    wanted = [name.strip() for name in env.get(INTERFACE, "").split(",") if name.strip()]
    if wanted:
        chosen = [found[name] for name in wanted if name in found]
        if not chosen:
            raise ConfigurationError(
                f"`{INTERFACE}` must name a network interface of {socket.gethostname()} that has an IPv4 address "
                f"({', '.join(found)}), but is {env[INTERFACE]!r} instead. Choose one of these, or unset it."
            )
        return chosen
    return [address for address in found.values() if not address.startswith("127.")]


def check_interfaces(variable: str, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError if `variable` names a network interface that this host does not have.

    Its names are separated by commas. Gloo itself fails later, with an error of C++ that does not name the variable.
    """
    names = [name.strip() for name in env.get(variable, "").split(",") if name.strip()]
    existing = [name for _, name in socket.if_nameindex()]
    if not set(names) <= set(existing):
        raise ConfigurationError(
            f"`{variable}` must name network interfaces of {socket.gethostname()} ({', '.join(existing)}), but is "
            f"{env[variable]!r} instead. Choose one of these, or unset it: dualdist finds one by itself."
        )


def interface_of(address: str) -> str:
    """Return the name of the network interface with `address`. Raises ConfigurationError when there is none."""
    for name, own in addresses().items():
        if own == address or (own.startswith("127.") and address.startswith("127.")):
            return name
    raise ConfigurationError(
        f"No network interface has the address {address}. Set {INTERFACE} to the right one of {', '.join(addresses())}."
    )


def own_address(host: str) -> str:
    """Return the IPv4 address from which this machine reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def connected(address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to an IPv4 address, which has the timeout `seconds`. Raises OSError.

    socket.create_connection imports encodings.idna, which takes several ms of the start of each rank.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        connection.settimeout(seconds)
        connection.connect((address, port))
        stack.pop_all()
    return connection


def own_node() -> str:
    """Return a name that no other host has, even if several hosts have the same host name."""
    # A container with its own network namespace counts as a host.
    network = os.stat("/proc/self/ns/net").st_ino
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{socket.gethostname()[:100]}-{hashlib.sha256(f'{boot}{network}'.encode()).hexdigest()[:8]}"
