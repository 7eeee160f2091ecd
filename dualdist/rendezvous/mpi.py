"""MPI through mpi4py: whether it is usable here, how it starts, and how it ends.

mpi4py's own exit handler waits in MPI_Finalize for all other processes, even if this one ends by an exception and the
others wait for it. The handler here replaces it: it finalizes MPI only if the process ends without an exception and
with exit code 0. Otherwise mpirun ends the job at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from .mpi_start import ending_late_calls

__all__ = (
    "LAUNCHER_VARIABLES",
    "has_started",
    "is_failing",
    "library",
    "local_size",
    "record_failure",
    "unfinished",
    "world_size",
)

LAUNCHER_VARIABLES = frozenset({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
"""Variables that MPI launchers set. Without any of them, starting MPI fails or makes a world of one process."""


@functools.cache
def library() -> Any | None:
    """Return mpi4py's MPI module with MPI initialised, or None when it is not usable here."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    already = sys.modules.get("mpi4py.MPI")
    import mpi4py

    initialize = mpi4py.rc.initialize
    if already is None:
        mpi4py.rc.finalize = mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        # The MPI library is absent, or not the one for which mpi4py was built.
        return None
    finally:
        mpi4py.rc.initialize = initialize
    if already is None and initialize and not MPI.Is_initialized():
        if _open_mpi_would_abort(os.environ) and MPI.get_vendor()[0] == "Open MPI":
            return None
        with ending_late_calls("MPI_Init"):
            _initialize(MPI, mpi4py.rc)
    if already is None and MPI.Is_initialized():
        _finalize_unless_failed(MPI)
    return MPI


def _initialize(library: Any, rc: Any) -> None:
    """Start MPI as mpi4py does when it is imported, but without Python's global lock."""
    level = getattr(library, f"THREAD_{rc.thread_level.upper()}") if rc.threads else library.THREAD_SINGLE
    # The module is linked with MPI.
    start = getattr(ctypes.CDLL(library.__file__), "MPI_Init_thread", None)
    if start is None or rc.errors != "exception":
        library.Init_thread(level)
        return
    start(None, None, level, ctypes.byref(ctypes.c_int()))
    for communicator in (library.COMM_WORLD, library.COMM_SELF):
        communicator.Set_errhandler(library.ERRORS_RETURN)


def _open_mpi_would_abort(env: Mapping[str, str]) -> bool:
    """Return whether Open MPI would abort the process when it starts: in a step of Slurm without PMIx.

    Debian's Open MPI knows neither PMI-1 nor PMI-2, and starts no single process there. MPICH knows them.
    """
    return "SLURM_STEP_ID" in env and "PMIX_RANK" not in env and "OMPI_COMM_WORLD_RANK" not in env


_failures: list[object] = []


def is_failing() -> bool:
    """Return whether MPI must not be finalized: this process ends by an exception or with an exit code other than 0, or
    some operations of MPI do not end."""
    return bool(_failures)


def record_failure(reason: object) -> None:
    """Do not finalize MPI at the end of this process: some of its operations do not end."""
    _failures.append(reason)


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """Do not finalize MPI while the block runs, which another thread may wait for in vain."""
    call = object()
    _failures.append(call)
    try:
        yield
    finally:
        _failures.remove(call)


def _finalize_unless_failed(library: Any) -> None:
    """Replace mpi4py's exit handler. Record exceptions and exit codes, which an exit handler cannot see."""
    hook, leave = sys.excepthook, sys.exit

    def recording_hook(*exception: Any) -> None:
        _failures.append(exception[0])
        hook(*exception)

    def recording_exit(code: Any = None, /) -> NoReturn:
        if code not in (None, 0):
            _failures.append(code)
        leave(code)

    sys.excepthook, sys.exit = recording_hook, recording_exit
    process = os.getpid()

    def finalize() -> None:
        # A forked process must not finalize MPI.
        if os.getpid() == process and not _failures and not library.Is_finalized():
            library.Finalize()

    atexit.register(finalize)


def has_started() -> bool:
    """Return whether MPI runs in this process. Does not start it."""
    started = sys.modules.get("mpi4py.MPI")
    return started is not None and started.Is_initialized() and not started.Is_finalized()


def world_size() -> int:
    """Return the size of MPI's world, 0 when MPI is not usable here. Starts MPI."""
    mpi = library()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def local_size() -> int:
    """Return how many processes of MPI's world run on this node. Collective over MPI's world."""
    mpi: Any = library()
    neighbours = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        return int(neighbours.Get_size())
    finally:
        neighbours.Free()
