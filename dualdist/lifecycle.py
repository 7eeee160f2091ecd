"""init, shutdown, start_timeline and stop_timeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .checks import configuration, flag, integer, items, path, text
from .collectives.join import stand_in
from .errors import ConfigurationError
from .launch.copies import without_copies
from .world.context import current, is_forked, is_initialized, join_world, leave_world
from .world.process_sets import ProcessSet, forget_world, register_world

__all__ = ("init", "shutdown", "start_timeline", "stop_timeline")


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    backend: str | None = None,
    transport: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join the world. Collective: every launched process must call it. A second call does nothing.

    Args:
        comm: an mpi4py communicator of all ranks, or the list of all ranks. None: the ranks that the launcher started.
        process_sets: process sets to register, or "dynamic" (sets can always be added later).
        backend: "torch", "horovod" or "local". None: DUALDIST_BACKEND, else a backend that already runs in this
            process, else the usual backend of the launcher.
        transport: "nccl", "gloo" or "mpi". None: DUALDIST_TRANSPORT, else the best one on this machine.
        init_method, rank, world_size: as in torch.distributed.init_process_group: "tcp://host:port", "file:///path" or
            "env://".

    Raises:
        ConfigurationError: an argument or the environment is wrong, or the backend is not installed.
        WorldMismatchError: the backend joined a different world from the one that the launcher started.
        NotInitializedError: this process was forked from one that had joined a world.
    """
    if is_initialized() and not is_forked():
        return
    with configuration():
        _check(comm, process_sets, backend, transport)
    arguments = {
        "comm": comm,
        "process_sets": process_sets,
        "backend": backend,
        "transport": transport,
        "init_method": init_method,
        "rank": rank,
        "world_size": world_size,
    }
    override: dict[str, Any] = {"init_method": init_method, "rank": rank, "size": world_size}
    if hasattr(comm, "Get_rank"):
        override |= {"rank": comm.Get_rank(), "size": comm.Get_size()}
    context = join_world(stand_in, backend, transport, override, without_copies(os.environ))
    context.arguments = arguments
    try:
        _check_comm(comm, context.world.size)
        register_world([] if process_sets is None or process_sets == "dynamic" else process_sets)  # type: ignore[arg-type]
        context.backend.finish_start()
    except BaseException:
        shutdown()
        raise


def _check(comm: Any, process_sets: Any, backend: Any, transport: Any) -> None:
    """Raise TypeError or ValueError for an argument that no world accepts. launch/arguments.py checks the others."""
    fix = "Pass a list of all ranks or an mpi4py communicator."
    if comm is not None and not (hasattr(comm, "Get_rank") and hasattr(comm, "Get_size")):
        for place, rank in enumerate(items("comm", comm, "a communicator, a list of ranks or None", fix)):
            integer(f"comm[{place}]", rank, least=0, fix=fix)
    if process_sets is not None and process_sets != "dynamic":
        fix = "Pass a list such as [[0, 1], [2, 3]]."
        for process_set in items("process_sets", process_sets, 'a list of process sets, or "dynamic"', fix):
            if not isinstance(process_set, ProcessSet) and not hasattr(process_set, "Get_group"):
                items("process_sets", process_set, "a list of process sets or of lists of ranks", fix)
    for name, value in (("backend", backend), ("transport", transport)):
        if value is not None:
            text(name, value)


def _check_comm(comm: Any, size: int) -> None:
    if comm is not None and not hasattr(comm, "Get_rank") and sorted(comm) != list(range(size)):
        raise ConfigurationError(
            f"`comm` must name all {size} ranks, but is {sorted(comm)} instead. "
            "Use init(process_sets=) for collectives over some of the ranks."
        )


def shutdown() -> None:
    """Leave the world. Runs automatically when the process ends.

    Does nothing if none is joined, or if this process was forked from one that had joined it.
    """
    if not is_forked():
        forget_world()
        leave_world()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start writing a Chrome trace of all collectives, as HOROVOD_TIMELINE does from `init()` on. Local.

    Only rank 0 writes; the call does nothing on other ranks. Unlike in Horovod, HOROVOD_TIMELINE need not be set.
    chrome://tracing and ui.perfetto.dev can read the file at any time, also after a crash.

    Args:
        file_path: overwritten, unless it is the open timeline. A timeline that is open under another path is closed.
        mark_cycles: write an event CYCLE_START whenever ranks begin to agree on a collective.

    Raises:
        ConfigurationError: the file cannot be written.
        NotInitializedError: before `init()`.
    """
    current().timeline.open(str(path("file_path", file_path)), flag("mark_cycles", mark_cycles))


def stop_timeline() -> None:
    """Close the file that `start_timeline` or HOROVOD_TIMELINE opened, if any. Local.

    Raises NotInitializedError before `init()`.
    """
    current().timeline.close()
