"""How the processes of a job find each other before any backend runs. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.environment import RENDEZVOUS, secret_in
from ..types import Launch
from . import mpi, slurm
from .addresses import (
    INTERFACE,
    LOOPBACK,
    Addresses,
    check_interfaces,
    connected,
    find_addresses,
    interface_of,
    own_node,
)
from .gather import (
    ADVICE,
    Gather,
    gather_through,
    gather_through_files,
    gather_through_http,
    gather_through_server,
    not_arrived,
    reporting_errors,
)
from .keyvalue import KeyValueClient
from .launcher_process import LauncherProcess, find_launcher_process, job_digest
from .mpi import gather_through_mpi

__all__ = (
    "ADVICE",
    "INTERFACE",
    "LOOPBACK",
    "Addresses",
    "Gather",
    "LauncherProcess",
    "check_interfaces",
    "connected",
    "find_addresses",
    "find_launcher_process",
    "gather_through",
    "interface_of",
    "not_arrived",
    "own_node",
    "reporting_errors",
    "share_server_address",
)

# The first contact: before any backend runs, rank 0 starts a server and all processes learn its address.
#
# torchrun and `init_method` give an address, which backends/store.py uses. Under the other launchers, rank 0 sends it
# to the others through what the launcher provides: the key-value server of `dualdist run` and `spawn`, horovodrun's
# HTTP server, files when all processes share a node, MPI, or a key-value server of rank 0 on the first host of a Slurm
# step.


@contextlib.contextmanager
def share_server_address(
    launch: Launch, env: Mapping[str, str], serve: Callable[[str], int], timeout: float
) -> Iterator[tuple[str, int]]:
    """Start a server on rank 0 and yield its (host, port) on all ranks. Collective over the launched processes.

    serve: starts the server. Called on rank 0 with the address that the others will use; returns the port.
    timeout: seconds to wait for another process.
    When the `with` block ends, the address is removed, so that a later program of the same job does not find it. Every
    process must have connected to the server by then.
    Raises ConfigurationError when this launcher provides no way to send the address.
    """
    with contextlib.ExitStack() as cleanup:
        gather = _gather(launch, env, timeout, cleanup)
        single_node = launch.size in (1, launch.local_size)
        host = LOOPBACK if single_node else find_addresses(launch.rank, gather, env).first
        port = gather(str(serve(host)) if launch.rank == 0 else "none")[0]
        yield host, int(port)


def _gather(launch: Launch, env: Mapping[str, str], timeout: float, cleanup: contextlib.ExitStack) -> Gather:
    """Return the Gather for the processes of `launch`."""
    source = launch.sources.get("rank")
    if source == "DUALDIST_RANK" and env.get(RENDEZVOUS):
        host, _, port = env[RENDEZVOUS].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigurationError(
                f"`{RENDEZVOUS}` must be 'host:port', but is {env[RENDEZVOUS]!r} instead. The launcher sets it; "
                "look at what overwrites it."
            )
        client = cleanup.enter_context(KeyValueClient(host, int(port), secret_in(env)))
        return gather_through_server(launch, client, timeout, cleanup)
    if source == "HOROVOD_RANK" and env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        address = f"{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        return gather_through_http(launch, address, timeout, cleanup)
    if launch.starts_mpi and mpi.has_started() and mpi.world_size() == launch.size:
        return functools.partial(gather_through_mpi, seconds=timeout)
    if launch.size in (1, launch.local_size):
        return gather_through_files(launch, _job_folder(launch, env), timeout, cleanup)
    if launch.starts_mpi and mpi.world_size() == launch.size:
        return functools.partial(gather_through_mpi, seconds=timeout)
    if slurm.has_first_host(env):
        client = cleanup.enter_context(slurm.connect(launch.rank, env, timeout))
        return gather_through_server(launch, client, timeout, cleanup)
    raise ConfigurationError(
        f"World size is {launch.describe('size')}, but no address of rank 0 is known, and nothing shows that all "
        "processes are on one node. Set MASTER_ADDR and MASTER_PORT for every process, or install mpi4py (pip install "
        "'dualdist[mpi]') and use a launcher that starts MPI (mpirun, or srun --mpi=pmix)."
    )


def _job_folder(launch: Launch, env: Mapping[str, str]) -> Path:
    """Return a folder whose name is the same for all processes of this job, and different for other jobs."""
    return Path(tempfile.gettempdir()) / f"dualdist-{os.getuid()}-{job_digest(launch, env)}"
