"""MPI through mpi4py: whether it is usable here, how it starts, and how it ends.

mpi4py's own exit handler waits in MPI_Finalize for all other processes, even if this one ends by an exception and the
others wait for it. The handler here replaces it: it finalizes MPI only if the process ends without an exception and
with exit code 0. Otherwise mpirun ends the job at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from ..core import needed, process
from ..core.checks import shown_ranks
from ..core.launch import is_one_host, temporary_environment
from ..core.meeting import ADVICE, PublishedBoard, process_status, rising
from ..core.meeting.server import connected, listener_at, own_peer
from ..core.process import at_exit, in_time
from ..core.types import Launch
from ..errors import logger

_ALGORITHM = {"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "3"}
"""Reduce-scatter, then allgather (Rabenseifner). Without it, Open MPI's MPI_Iallreduce of numbers in place sends all of
them to rank 0 and back (nbc_allreduce_init in ompi/mca/coll/libnbc/nbc_iallreduce.c): between two hosts, where the link
takes the time, a step then took up to 1.7 times as long. It applies to the script's own calls, too."""


@functools.cache
def library() -> Any:
    """Return mpi4py's MPI module with MPI initialised, or None when it is not usable here."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    ours = "mpi4py.MPI" not in sys.modules
    import mpi4py

    initialize = mpi4py.rc.initialize
    if ours:
        mpi4py.rc.finalize = mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        # The MPI library is absent, or not the one for which mpi4py was built.
        return None
    finally:
        mpi4py.rc.initialize = initialize
    if not MPI.Is_initialized():  # also if the script has set mpi4py.rc.initialize = False, as for Horovod
        if _open_mpi_would_abort(os.environ) and MPI.get_vendor()[0] == "Open MPI":
            return None
        defaults = {name: value for name, value in _ALGORITHM.items() if not os.environ.get(name)}
        with ending_late_calls("MPI_Init"), temporary_environment(defaults):
            _initialize(MPI, mpi4py.rc)
        ours = True
    if ours:
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
_LAST_SECONDS = 5.0
"""How long the end of MPI may take after a failed collective or with unfinished ones: it waits for all ranks."""
has_unfinished = False
"""Whether this process has given up collectives of MPI that have not ended."""


def is_failing() -> bool:
    """Return whether MPI must not be finalized: this process has failed, or some operations of MPI do not end."""
    return bool(_failures or getattr(sys, "last_value", None))


def never_finalize(reason: object) -> None:
    """Do not finalize MPI at the end of this process, and keep `reason`: some operations of MPI do not end."""
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
    """Replace mpi4py's exit handler. Record exit codes, which an exit handler cannot see."""
    leave = sys.exit

    def recording_exit(code: Any = None, /) -> NoReturn:
        if code not in (None, 0):
            _failures.append(code)
        leave(code)

    sys.exit = recording_exit

    def finalize() -> None:
        if is_failing() or library.Is_finalized():
            return
        if not (process.world_has_failed or has_unfinished):
            library.Finalize()
            return
        try:
            # mpi4py's own function holds Python's global lock meanwhile.
            in_time(getattr(ctypes.CDLL(library.__file__), "MPI_Finalize", library.Finalize), _LAST_SECONDS)
        except TimeoutError:  # a rank has stopped; without the end of MPI, mpirun ends the job
            process.skip_destructors_at_exit()

    at_exit(finalize)


def has_started() -> bool:
    """Return whether MPI runs in this process. Does not start it."""
    started = sys.modules.get("mpi4py.MPI")
    return started is not None and started.Is_initialized() and not started.Is_finalized()


@functools.cache
def warn_of_smaller_world(rank: int, size: int, launcher: str) -> None:
    """Log a warning, once on rank 0 of `size`, if the script has started MPI and its world is smaller. Local."""
    if rank == 0 and has_started() and (own := world_size()) < size:
        logger.warning(
            "mpi4py's world has size %d, but %s has set size %d. Code that asks mpi4py for rank and size does the same "
            "in each process: take them from dualdist or torch.distributed, or start with the mpirun of mpi4py's MPI.",
            *(own, launcher, size),
        )


def world_size() -> int:
    """Return the size of MPI's world, 0 when MPI is not usable here. Starts MPI."""
    mpi = library()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def world_size_within(env: Mapping[str, str], seconds: float) -> int:
    """Do what `world_size` does, within a limited start."""
    with limited_start(env, seconds):
        return world_size()


# How long calls of MPI may take while a world starts, and which ranks of this host have not begun to start.
#
# MPI has no timeouts: its calls wait for ranks that never arrive or are stopped, and it cannot report for whom. A board
# polls for its messages. MPI_Init and the creation of a communicator have no such form; there a thread ends the
# process. Each rank listens at an abstract Unix address (unix(7)) with its job and local rank, which ends with it.

_OTHER_HOSTS_SECONDS = 2.0
"""How much longer a process waits if none of its own host is missing."""
_CONNECT_SECONDS = 1.0
_own: list[socket.socket] = []
"""The sockets of this process."""


@dataclass
class _Limit:
    """The environment of a start, and how many seconds it may wait for other ranks."""

    env: Mapping[str, str]
    seconds: float
    launch: Launch | None = None
    """This process's place in the job, as far as it is known without MPI."""

    def announce(self, launch: Launch) -> None:
        """Let the other ranks on this host see that this rank has begun to start, if MPI may start. Never raises."""
        if launch.starts_mpi:
            self.launch = launch
            # OSError: this or another process of this rank has announced it, or the system is not Linux.
            with contextlib.suppress(OSError):
                if launch.local_rank is not None:
                    _own.append(listener_at(_address(launch, self.env, launch.local_rank), 0))

    def missing(self) -> list[int]:
        """Return the local ranks of this host that have not begun to start, have ended or are stopped. Local."""
        launch = self.launch
        with contextlib.suppress(OSError):  # its launcher is not visible: nobody has announced itself
            if launch is not None:
                ranks = range(launch.local_size or 0)
                return [rank for rank in ranks if not _runs(_address(launch, self.env, rank))]
        return []


def _address(launch: Launch, env: Mapping[str, str], local_rank: int) -> str:
    digest = needed("host_board").job_digest(launch, env)
    return f"\0dualdist-{os.getuid()}-{digest}-{local_rank}"


def _runs(address: str) -> bool:
    """Return whether a process listens at `address` and is not stopped."""
    with contextlib.suppress(OSError), connected(address, 0, _CONNECT_SECONDS) as probe:
        process = own_peer(probe)
        # A process that was forked from a dead rank keeps its socket.
        return process is not None and process_status(process)[0] not in "TtZX"
    return False


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@contextlib.contextmanager
def limited_start(env: Mapping[str, str], seconds: float) -> Iterator[_Limit]:
    """Within the block, calls of MPI, if there are any, wait for other ranks for at most `seconds`."""
    limit = _Limit(env, seconds)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


@contextlib.contextmanager
def ending_late_calls(call: str) -> Iterator[None]:
    """Print an error and end this process with exit code 1 if the block takes too long. The launcher ends the others.

    call: the function of MPI that the block calls. It must release Python's global lock.
    """
    limit = _limit.get()
    if limit is None:
        yield
        return
    returned = threading.Event()

    def watch() -> None:
        if returned.wait(limit.seconds):
            return
        # When this process ends, so do the others: the host of a missing one reports first.
        if not limit.missing() and returned.wait(_OTHER_HOSTS_SECONDS):
            return
        rank = None if limit.launch is None else limit.launch.rank
        os.write(2, f"dualdist: {waited(rank, call, limit.seconds, limit)}\n".encode())
        os._exit(1)

    watcher = threading.Thread(target=watch, name="dualdist-mpi-start", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        returned.set()
        watcher.join()


def waited(rank: int | None, call: str, seconds: float, limit: _Limit | None = None) -> str:
    """Return the text of the error of `rank` after waiting in `call`. It names the missing ranks of this host.

    limit: of the start; None: of that which this thread runs, if any.
    """
    limit = limit or _limit.get()
    missing = [] if limit is None else limit.missing()
    gone = f"did not arrive or {'are' if len(missing) > 1 else 'is'} stopped"
    others = f"another rank in {call}."
    if limit is not None and limit.launch is not None and missing:
        if is_one_host(limit.launch):
            others = f"{shown_ranks(missing)}, which {gone}, in {call}."
        else:
            others += f" On {socket.gethostname()}, local {shown_ranks(missing)} {gone}."
    return f"{'This process' if rank is None else f'Rank {rank}'} waited {seconds:.0f} s for {others} {ADVICE}"


# The address of rank 0's server, as a message from rank 0 to each other rank.

_PAUSE_SECONDS = (0.00005, 0.005)
"""The first and the longest pause between two polls."""
_TAG = 29_313
"""Of the messages. MPI allows tags up to 32767 at least."""


class MpiBoard(PublishedBoard):
    """Messages of MPI. For hosts without a common file system, or where MPI has started already."""

    def __init__(self, launch: Launch, env: Mapping[str, str], communicator: Any = None) -> None:
        """communicator: of all ranks, in their order; by default MPI's world."""
        super().__init__(launch, env)
        self._mpi = library()
        self._world = self._mpi.COMM_WORLD if communicator is None else communicator
        self._requests: list[Any] = []
        self._cleared = threading.Event()

    def write(self, text: str) -> None:
        others = range(1, self._world.Get_size())
        data = text.encode()
        self._requests = [self._world.Isend([data, self._mpi.BYTE], rank, _TAG) for rank in others]
        # MPI moves data only in its calls. A rank that is missing may never receive its message.
        self._sender = threading.Thread(target=self._send, name="dualdist-mpi-board", daemon=True)
        self._sender.start()

    def _send(self) -> None:
        pauses = rising(*_PAUSE_SECONDS)
        while not self._mpi.Request.Testall(self._requests) and not self._cleared.wait(next(pauses)):
            pass

    def read(self, seconds: float) -> str | None:
        deadline, status = time.monotonic() + seconds, self._mpi.Status()
        for pause in rising(*_PAUSE_SECONDS):
            if self._world.Iprobe(0, _TAG, status):
                data = bytearray(status.Get_count(self._mpi.BYTE))
                self._world.Recv([data, self._mpi.BYTE], 0, _TAG)
                return data.decode()
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
        return None

    def clear(self) -> None:
        self._cleared.set()
        self._sender.join()
        # The last poll may have completed them, although it has returned that some are not complete.
        if not self._mpi.Request.Testall(self._requests):
            never_finalize(self)  # which keeps the requests, on which MPI may still work
