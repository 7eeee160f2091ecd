"""What scripts that do not use dualdist need to join the world of `dualdist run` and `spawn`.

A script with `import horovod.torch` needs an HTTP server where Horovod's controllers meet; without Horovod installed,
dualdist.compat replaces it. A script with torch.distributed needs an address for rank 0's store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence

from ..backends.horovod.installed import CHILDREN_FOLDER, is_installed
from ..launch import nodes, topology
from ..launch.copies import copied_variables
from ..rendezvous import LOOPBACK, interface_of
from ..rendezvous.http_store import HttpStore, horovods_scopes
from ..rendezvous.ports import reserved_port
from .hosts import Slot

__all__ = ("serve_unchanged_scripts", "with_alias")

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
