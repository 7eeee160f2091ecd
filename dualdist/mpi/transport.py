"""A process group for torch.distributed over mpi4py. It works with a PyTorch that was built without MPI.

    import dualdist.mpi.transport
    torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")    # rank and size are MPI's

Every collective is non-blocking, on a communicator of its process group alone. A progress thread moves the data while
Python computes, and ends collectives that exceed the group's timeout. Only tensors on the CPU are supported.

group.py has the process group and what remains of destroyed groups, communicator.py the collectives as MPI requests,
and work.py the objects that calls return, with the thread that tests them.
"""

from __future__ import annotations

import functools
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..core.backends.torch_groups import open_store
from ..core.launch import detect
from ..core.meeting import Meeting
from ..core.types import Launch
from ..errors import BackendUnavailableError
from . import meeting as mpi
from .group import NAME, MpiProcessGroup, closed_communicators
from .work import FORKED, progress

__all__ = ("NAME", "create", "register", "require", "start")

# The start of MPI, torch.distributed's rendezvous through MPI, and the creation of process groups.


def start(launch: Launch) -> bool:
    """Start MPI. Return whether it joins the processes of `launch` and allows calls from any thread."""
    return mpi.world_size() == launch.size and not _is_single_threaded(mpi.library())


def require(launch: Launch) -> None:
    """Start MPI. Raises BackendUnavailableError unless it joins the processes of `launch`."""
    library = mpi.library()
    if library is None:
        raise BackendUnavailableError(
            "`transport` is 'mpi', but mpi4py is not usable here. "
            "Install MPI and mpi4py (pip install mpi4py), or choose gloo."
        )
    if _is_single_threaded(library):
        raise BackendUnavailableError(
            "MPI must allow calls from any thread, but was started for a single thread instead. "
            "Leave mpi4py.rc.threads and thread_level alone, or use an MPI with thread support, or choose gloo."
        )
    if start(launch):
        return
    version = library.Get_library_version().split(",")[0].splitlines()[0].strip()
    raise BackendUnavailableError(
        f"`transport` is 'mpi', but MPI's world has {mpi.world_size()} processes while the world size is "
        f"{launch.describe('size')}: mpi4py runs on {version}, which {launch.launcher} did not start. Start with the "
        "mpirun of that library, build mpi4py for the launcher's library (pip install --force-reinstall --no-binary "
        "mpi4py mpi4py), or choose gloo."
    )


def _meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
    """Yield (store, rank, size) once, as a rendezvous handler does. Collective over MPI's world."""
    launch = detect(os.environ, mpi.world_size)
    require(launch if launch.by_launcher else Launch("MPI", size=max(1, mpi.world_size())))
    world = mpi.library().COMM_WORLD  # type: ignore[union-attr]
    rank, size = world.Get_rank(), world.Get_size()
    board, seconds = mpi.MpiBoard(Launch("MPI", rank, size), os.environ), timeout.total_seconds()
    with Meeting(board, rank, size, seconds) as meeting:
        shared = open_store(meeting, os.environ, seconds)
        shared.listener.close()
    yield shared.store, rank, size
    raise RuntimeError("A process can join MPI's world only once.")


def create(options: Any, backend_options: object = None) -> MpiProcessGroup:
    """Make a process group. Collective over its members, which exchange their MPI ranks through the store.

    options: c10d's DistributedBackendOptions, or an object with the same attributes.

    Raises BackendUnavailableError when MPI is not usable, or does not allow calls from the progress thread.
    """
    if progress.forked:
        raise RuntimeError(FORKED)
    library: Any = mpi.library()
    require(Launch("MPI", size=max(1, mpi.world_size())))
    if library.Query_thread() < library.THREAD_MULTIPLE and isinstance(progress.calls, nullcontext):
        progress.calls = threading.RLock()
    store, world = options.store, library.COMM_WORLD
    store.set(f"mpi/{options.group_rank}", closed_communicators.message(world.Get_rank()))
    messages = [store.get(f"mpi/{place}") for place in range(options.group_size)]
    with progress.calls:
        label = closed_communicators.meet(messages)
    if len(set(label.ranks)) < len(messages):
        raise BackendUnavailableError(
            f"Every member must have an MPI rank of its own, but they have {[*label.ranks]} instead. Start with mpirun."
        )
    with progress.calls:
        all_ranks = world.Get_group()
        members = all_ranks.Incl(label.ranks)
        tag = zlib.crc32(str(options.group_id).encode()) & 0x7FFF
        with mpi.unfinished():
            communicator = world.Create_group(members, tag=tag)
        members.Free()
        all_ranks.Free()
    return MpiProcessGroup(communicator, label, str(options.group_id), options.timeout)


def _is_single_threaded(library: Any) -> bool:
    return bool(library.Query_thread() < library.THREAD_SERIALIZED)


# torch 2.15 attaches its flight recorder to groups with devices, which ends the process if the group is in Python.
_not_recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_not_recorded.add(NAME)


@functools.cache
def register() -> None:
    """Register the backend and its rendezvous. The import of this module does it. torch >= 2.14 calls it by itself."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler(NAME, _meet)


register()
