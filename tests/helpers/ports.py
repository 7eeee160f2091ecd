"""Ports for servers that a test starts later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_ports(number: int) -> list[int]:
    """Return ports that are free. The kernel gives none of them to others that ask for any port, as tests beside do."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])  # from this one on
    chooser = random.SystemRandom()  # tests beside set the same seed of the other one
    with contextlib.ExitStack() as stack:
        found: dict[int, socket.socket] = {}
        while len(found) < number:
            port = chooser.choice(range(10_000, given) or [0])
            with contextlib.suppress(OSError):  # it is taken
                server = stack.enter_context(socket.create_server(("", port)))
                found[server.getsockname()[1]] = server
        return list(found)
