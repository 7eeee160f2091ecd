"""What MPI's launchers offer their processes without MPI: a place where rank 0 leaves a text for the others.

MPI can start only once in a process, also if another program runs in it afterwards. So a process that will become
another program meets the others by its process manager alone. Open MPI, PRRTE, Slurm and jsrun have PMIx
(https://pmix.org), hydra (MPICH, Intel MPI) and Flux have PMI-1 (src/pmi/simple of MPICH).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from ..core.meeting import PublishedBoard
from ..core.meeting.links import LOOPBACK
from ..core.meeting.server import connected
from ..core.process import in_time
from ..core.types import Launch
from ..errors import ConfigurationError
from . import pmi_relay

_held = contextlib.ExitStack()
"""Keeps the connection to PMIx's server until this process ends."""


class ProcessManager(ABC):
    """The connection of this process to its process manager, which keeps a text for each key."""

    @abstractmethod
    def put(self, key: str, text: str, seconds: float) -> None:
        """Let all processes of the job read `text`, which has no blanks. Raises TimeoutError."""

    @abstractmethod
    def get(self, rank: int, key: str, seconds: float) -> str | None:
        """Return what `rank` has put, None if that is not known yet. Raises TimeoutError if it waits for all processes.

        seconds: to wait for it. 0: return what an earlier program in the place of this one, `rank`, has put. Then
            TimeoutError means that the manager does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Let another program in this process connect anew."""


_NAMESPACE, _DESCRIPTOR = "PMIX_NAMESPACE", "PMI_FD"
"""Variables that show which of the two a launcher serves."""


def process_manager(env: Mapping[str, str]) -> type[ProcessManager] | None:
    """Return the class for the process manager of this process, None if it has none."""
    if env.get(_NAMESPACE):
        return Pmix
    # Slurm's own PMI answers one "init" of a place, which it leaves to MPI. Its steps meet without it.
    is_slurms = env.get("PMI_JOBID") == "{SLURM_JOB_ID}.{SLURM_STEP_ID}".format_map(defaultdict(str, env))
    return Pmi1 if env.get(_DESCRIPTOR) and not is_slurms else None


@contextlib.contextmanager
def connected_to(kind: type[ProcessManager]) -> Iterator[ProcessManager]:
    """Within the block, this process is a client of its process manager.

    After an error it stays one: the process ends, and the launcher sees that it has failed.
    """
    try:
        manager = kind()
    except OSError as error:
        raise ConfigurationError(
            f"The process manager must be reachable from this process, but is not: {error}. {_INSTEAD}"
        ) from error
    yield manager
    manager.close()


class PmiBoard(PublishedBoard):
    """What rank 0 publishes with its process manager.

    Several programs may meet in turn in the same place of a job. Each rank counts its meetings, by a key for each.
    """

    def __init__(self, launch: Launch, env: Mapping[str, str], manager: ProcessManager, seconds: float) -> None:
        """seconds: to wait for the other processes."""
        super().__init__(launch, env)
        self._rank, self._manager, self._seconds = launch.rank, manager, seconds
        own = (_key_of(self._rank, number) for number in itertools.count())
        self._number = next(n for n, key in enumerate(own) if manager.get(self._rank, key, 0.0) is None)
        if self._rank != 0:
            self.write("-")

    def write(self, text: str) -> None:
        try:
            self._manager.put(_key_of(self._rank, self._number), text, self._seconds)
        except TimeoutError:
            raise self._error() from None

    def read(self, seconds: float) -> str | None:
        try:
            return self._manager.get(0, _key_of(0, self._number), seconds)
        except TimeoutError:
            raise self._error() from None

    def _error(self) -> ConfigurationError:
        return ConfigurationError(
            f"Rank {self._rank} waited {self._seconds:g} s for the other processes, of which some did not "
            f"arrive. {self.advice}"
        )


def _key_of(rank: int, number: int) -> str:
    return f"dualdist.{rank}.{number}"


# PMI-1: a line of text for each question, over a connection that the process inherits.


class Pmi1(ProcessManager):
    """hydra's or Flux's. Afterwards a relay connects this process to it, where the next program can begin again."""

    def __init__(self) -> None:
        self._descriptor = int(os.environ[_DESCRIPTOR])
        self._socket = socket.socket(fileno=os.dup(self._descriptor))
        self._unread = b""
        self._has_met = False
        self._ask("init pmi_version=1 pmi_subversion=1", _MANAGER_SECONDS)
        self._space = self._ask("get_my_kvsname", _MANAGER_SECONDS)["kvsname"]

    def put(self, key: str, text: str, seconds: float) -> None:
        self._ask(f"put kvsname={self._space} key={key} value={text}", seconds)
        self._meet(seconds)

    def get(self, rank: int, key: str, seconds: float) -> str | None:
        if seconds:
            self._meet(seconds)
        return self._ask(f"get kvsname={self._space} key={key}", seconds or _MANAGER_SECONDS).get("value")

    def close(self) -> None:
        self._socket.setblocking(True)
        pmi_relay.start(self._socket, self._descriptor)
        self._socket.close()

    def _meet(self, seconds: float) -> None:
        """Wait for all processes of the job: only then can they read what has been put on other hosts."""
        if not self._has_met:
            self._ask("barrier_in", seconds)
            self._has_met = True

    def _ask(self, command: str, seconds: float) -> dict[str, str]:
        self._socket.settimeout(max(1e-3, seconds))
        try:
            self._socket.sendall(f"cmd={command}\n".encode())
            while b"\n" not in self._unread:
                part = self._socket.recv(4096)
                if not part:
                    raise ConnectionResetError
                self._unread += part
        except ConnectionError as error:
            raise ConfigurationError(
                f"The process manager must answer {command!r}, but has closed. {_INSTEAD}"
            ) from error
        line, _, self._unread = self._unread.partition(b"\n")
        answer = dict(part.split("=", 1) for part in line.decode().split() if "=" in part)
        if answer.get("rc", "0") != "0":
            if command.startswith("get "):  # the key is absent
                return {}
            raise ConfigurationError(f"The process manager must accept {command!r}, but answers {line!r}. {_INSTEAD}")
        return answer


_MANAGER_SECONDS = 10.0
_INSTEAD = "Set MASTER_ADDR and MASTER_PORT for every process: then it is not needed."

# PMIx: a library.

_STORE = "PMIX_MCA_gds"
"""Where a client keeps data. Only with "hash" can a second one start in the same process, with the same value."""
_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_KEY_BYTES, _SIZE_KEY = 512, "pmix.job.size"
_STRING, _UINT32 = 3, 14
_ABSENT = (-24, -46)
"""PMIX_ERR_TIMEOUT and PMIX_ERR_NOT_FOUND, of a key that a process has not put yet."""
_EVERYBODY = ctypes.c_uint8(3)
"""The scope PMIX_GLOBAL."""
_ANY_RANK = 0xFFFFFFFE
"""PMIX_RANK_WILDCARD: facts about the whole job."""


class _Process(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("uint32", ctypes.c_uint32), ("other", ctypes.c_char * 64))


class _Value(ctypes.Structure):
    """pmix_value_t."""

    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    """pmix_info_t. Without a value, it means "true"."""

    _fields_ = (("key", ctypes.c_char * _KEY_BYTES), ("flags", ctypes.c_uint32), ("value", _Value))


class Pmix(ProcessManager):
    """The PMIx server of Open MPI and others."""

    def __init__(self) -> None:
        """Raises ConfigurationError without a library or a server."""
        self._library = _library()
        self._own = _Process()
        os.environ[_STORE] = "hash"
        with contextlib.nullcontext() if self._library.PMIx_Initialized() else _relayed(os.environ):
            self._check("PMIx_Init", ctypes.byref(self._own), None, ctypes.c_size_t(0))

    def close(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def job_size(self) -> int:
        """Return the number of processes of the job."""
        value = self._get(_ANY_RANK, _SIZE_KEY)
        return int(value.data.uint32) if value is not None and value.type == _UINT32 else 0

    def put(self, key: str, text: str, seconds: float) -> None:
        value = _Value(_STRING, _Data(string=text.encode()))
        self._check("PMIx_Put", _EVERYBODY, _key(key), ctypes.byref(value))
        self._check("PMIx_Commit")

    def get(self, rank: int, key: str, seconds: float) -> str | None:
        # Without "immediate", the server waits for a key that is absent.
        try:
            value = in_time(lambda: self._get(rank, key, not seconds), seconds or _MANAGER_SECONDS)
        except TimeoutError:
            if not seconds:
                raise
            return None
        return None if value is None else str(value.data.string.decode())

    def _get(self, rank: int, key: str, immediate: bool = False) -> _Value | None:
        process, found = _Process(self._own.namespace, rank), ctypes.POINTER(_Value)()
        how = _Info(b"pmix.immediate") if immediate else None
        options = (how and ctypes.byref(how), ctypes.c_size_t(immediate))
        arguments = (ctypes.byref(process), _key(key), *options, ctypes.byref(found))
        return None if self._check("PMIx_Get", *arguments, allowed=_ABSENT) else found.contents

    def _check(self, name: str, *arguments: Any, allowed: Sequence[int] = ()) -> int:
        status = int(getattr(self._library, name)(*arguments))
        if status and status not in allowed:
            raise ConfigurationError(
                f"{name} must succeed where a launcher serves PMIx, but returns {status}. {_INSTEAD}"
            )
        return status


@contextlib.contextmanager
def _relayed(env: MutableMapping[str, str]) -> Iterator[None]:
    """Within the block, the library connects to the server by a relay, which stays connected until this process ends.

    A server that loses a client just after it has confirmed its end may expect one process less from then on (PMIx
    4.2.2, op_cbfunc2 and lost_connection). MPI, which connects again, then hangs when it starts, or misses addresses.
    """
    direct = {name: uri for name, uri in env.items() if name.startswith("PMIX_SERVER_URI")}
    place = next(filter(None, map(_PLACE.search, direct.values())), None)
    if place is None:  # not TCP: an old server
        yield
        return
    server = _held.enter_context(connected(place[1], int(place[2]), _MANAGER_SECONDS))
    server.set_inheritable(True)
    listener = socket.create_server((LOOPBACK, 0))
    threading.Thread(target=_relay, args=(listener, server), name="dualdist-pmix", daemon=True).start()
    relay = f"{LOOPBACK}:{listener.getsockname()[1]}"
    env.update({name: uri.replace(f"{place[1]}:{place[2]}", relay) for name, uri in direct.items()})
    try:
        yield
    finally:
        env.update(direct)


_PLACE = re.compile(r"tcp4://([\d.]+):(\d+)")


def _relay(listener: socket.socket, server: socket.socket) -> None:
    """Pass bytes between `server` and the first client of `listener`, until one of the two closes."""
    with listener:
        client, _ = listener.accept()
    with client, contextlib.suppress(OSError):
        pmi_relay.relay(server, client)


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise ConfigurationError(
        f"{_LIBRARIES[0]} must be installed where the processes of several hosts meet through PMIx, but is not found. "
        f"Load the module of your MPI or PMIx. {_INSTEAD}"
    )


def _key(name: str) -> Any:
    return ctypes.create_string_buffer(name.encode(), _KEY_BYTES)
