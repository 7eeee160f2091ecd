"""MPI as mpi4py sees it: whether it is usable here, and the end of it.

mpi4py's own exit handler waits in MPI_Finalize for every other process, also when this one dies of an exception and
the others are blocked on it. So the handler is replaced: a clean exit finalizes; an exit by exception or with a code
other than 0 does not, and mpirun then ends the job at once.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
from typing import Any, NoReturn

__all__ = ("MARKS", "gather", "has_started", "is_failing", "library", "local_size", "world_size")

MARKS = frozenset({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
"""What an MPI launcher leaves in the environment; without one, starting MPI makes a world of one or fails."""


@functools.cache
def library() -> Any | None:
    """Return mpi4py's MPI module with MPI initialised, or None when it is not usable here."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    already = sys.modules.get("mpi4py.MPI")
    import mpi4py

    if already is None:
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # the MPI library is absent, or not the one that mpi4py was built for
        return None
    if already is None and MPI.Is_initialized():
        _finalize_unless_failed(MPI)
    return MPI


_failures: list[object] = []


def is_failing() -> bool:
    """Return whether this process is about to end by an exception or with an exit code other than 0."""
    return bool(_failures)


def _finalize_unless_failed(library: Any) -> None:
    """Replace mpi4py's exit handler; note exceptions and exit codes, which an exit handler cannot see."""
    hook, leave = sys.excepthook, sys.exit

    def noting_hook(*exception: Any) -> None:
        _failures.append(exception[0])
        hook(*exception)

    def noting_exit(code: Any = None, /) -> NoReturn:
        if code not in (None, 0):
            _failures.append(code)
        leave(code)

    sys.excepthook, sys.exit = noting_hook, noting_exit
    process = os.getpid()

    def finalize() -> None:
        if os.getpid() == process and not _failures and not library.Is_finalized():  # a fork leaves MPI alone
            library.Finalize()

    atexit.register(finalize)


def has_started() -> bool:
    """Return whether MPI runs in this process already. Starts nothing."""
    started = sys.modules.get("mpi4py.MPI")
    return started is not None and started.Is_initialized() and not started.Is_finalized()


def world_size() -> int:
    """Return the size of MPI's world, 0 when MPI is not usable here. Starts MPI."""
    mpi = library()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def gather(text: str) -> list[str]:
    """Return every process's `text`, in rank order. Collective over MPI's world."""
    return list(library().COMM_WORLD.allgather(text))  # type: ignore[union-attr]


def local_size() -> int:
    """Return how many processes of MPI's world share this one's node. Collective over MPI's world."""
    mpi: Any = library()
    neighbours = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        return int(neighbours.Get_size())
    finally:
        neighbours.Free()
