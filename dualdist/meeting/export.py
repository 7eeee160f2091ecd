"""torchrun's environment for a process that any launcher has started, for scripts that do not use dualdist."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import ConfigurationError
from ..executor import in_time
from ..launch import nodes, topology
from ..launch.detect import detect
from ..launch.environment import (
    add_copies,
    agent_variables,
    names_of_copies,
    read_settings,
    torchrun_variables,
    without_copies,
)
from ..types import Launch, World
from . import find_board
from .addresses import find_addresses, interface_of, own_node, reserved_port
from .boards import Board, PublishedBoard
from .member import Meeting

_RUN = "TORCHELASTIC_RUN_ID"
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Its names for the numbers of World."""
_THREADS, _INTERFACE = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"
"""Variables that keep the user's value."""
_held = contextlib.ExitStack()
"""Keeps the port until this process ends."""


def export_environment(prepare: Callable[[World], Mapping[str, str]] | None = None) -> None:
    """Set torchrun's variables in `os.environ`, under any launcher. Collective over the launched processes.

    Afterwards `torch.distributed.init_process_group()` joins all processes that the launcher started. MASTER_ADDR and
    MASTER_PORT keep their values if both are set. Otherwise the port stays reserved as long as rank 0 runs. Under
    torchrun only `prepare` is called. After `dualdist exec` or another call, a call without `prepare` does nothing.
    Imports no torch, starts no MPI and uses no GPU.

    prepare: returns more variables for this process. Called when all have met, and before any goes on.

    Raises ConfigurationError when the environment is wrong or a process does not arrive, and on all ranks when
    `prepare` raises it on one of them.
    """
    env = without_copies(os.environ)
    with _job(env) as (launch, find):
        is_torchrun = _RUN in env and launch.sources.get("rank") == "RANK"
        # A process manager serves one meeting. A launcher that was started since then has not set the copies.
        place = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
        is_set = _RUN in names_of_copies(os.environ) and place == (f"{launch.rank}", f"{launch.size}")
        if is_torchrun and prepare is not None:
            numbers = [int(env[name]) for name in _OF_TORCHRUN]
            os.environ.update(prepare(World(*numbers)))
        if is_torchrun or (is_set and prepare is None):
            return
        seconds = read_settings(env).start_timeout_seconds
        with contextlib.ExitStack() as stack:
            gather = _alone
            if launch.size > 1:
                gather = stack.enter_context(Meeting(find(seconds), launch.rank, launch.size, seconds)).gather
            variables = _agreed(launch, env, gather, prepare)
    for name in (_THREADS, _INTERFACE):
        if value := variables.pop(name, ""):
            os.environ.setdefault(name, value)
    add_copies(variables, os.environ)


def _alone(text: str) -> list[str]:
    return [text]


@contextlib.contextmanager
def _job(env: Mapping[str, str]) -> Iterator[tuple[Launch, Callable[[float], Board]]]:
    """Yield this process's place in its job, and a function that returns where the ranks meet.

    Its argument: how many seconds to wait for other ranks.
    """
    kind = process_manager(env)
    with contextlib.ExitStack() as stack:

        def pmix_size() -> int:
            manager = None if kind is None else stack.enter_context(_connected(kind))
            return manager.job_size() if isinstance(manager, Pmix) else 0

        launch = detect(env, pmix_size)

        def find(seconds: float) -> Board:
            is_one_host = launch.local_size == launch.size
            if kind is not None and launch.init_method is None and launch.starts_mpi and not is_one_host:
                return PmiBoard(launch, env, stack.enter_context(_connected(kind)), seconds)
            return find_board(launch, env, may_start_mpi=False)

        yield launch, find


def _agreed(
    launch: Launch,
    env: Mapping[str, str],
    gather: Callable[[str], list[str]],
    prepare: Callable[[World], Mapping[str, str]] | None,
) -> dict[str, str]:
    """Return the variables of this process. Collective over the launched processes."""
    addresses = find_addresses(launch.rank, gather, env)
    port = _held.enter_context(reserved_port(stays_after_exec=True)) if launch.rank == 0 else None
    own = [own_node(), launch.local_rank, port, secrets.token_hex(8)]
    answers = [json.loads(text) for text in gather(json.dumps(own))]
    places = [(node, local_rank) for node, local_rank, _, _ in answers]
    world = topology(places)[launch.rank]
    more, problem = {}, ""
    try:
        more = {} if prepare is None else dict(prepare(world))
    except ConfigurationError as error:
        problem = f"Rank {launch.rank}: {error}"
    problems = [text for text in gather(problem) if text]
    if problems:
        raise ConfigurationError(problems[0])
    names = nodes(places)
    order = list(dict.fromkeys(names))
    _, _, port, run_id = answers[0]
    agent = agent_variables(world, order.index(names[launch.rank]), len(order), run_id)
    variables = {**torchrun_variables(world, (addresses.first, port)), **agent, **more}
    if world.local_size > 1:
        variables[_THREADS] = "1"  # as torchrun does
    if len(set(addresses.nodes)) > 1:
        variables[_INTERFACE] = interface_of(addresses.own)  # Gloo takes that of the host's name
    if launch.init_method is not None:
        variables |= {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}
    return variables


# What MPI's launchers offer their processes without MPI: a place where rank 0 leaves a text for the others.
#
# MPI can start only once in a process, also if another program runs in it afterwards. So a process that will become
# another program meets the others by means of the process manager alone, and leaves MPI to that program. Open MPI,
# PRRTE, Slurm and jsrun have PMIx (https://pmix.org), hydra (MPICH, Intel MPI) and Flux have PMI-1 (src/pmi/simple of
# MPICH).


class ProcessManager(ABC):
    """The connection of this process to its process manager."""

    waits_for_all = False
    """Whether a process can read only when all have arrived."""

    @abstractmethod
    def publish(self, text: str, seconds: float) -> None:
        """Let all processes of the job read `text`, which has no blanks. Raises TimeoutError."""

    @abstractmethod
    def read(self, seconds: float) -> str:
        """Return what rank 0 has published. Raises TimeoutError."""

    @abstractmethod
    def close(self) -> None:
        """Let another program in this process connect anew."""


_NAMESPACE, _DESCRIPTOR = "PMIX_NAMESPACE", "PMI_FD"
"""Variables that show which of the two a launcher serves."""


def process_manager(env: Mapping[str, str]) -> type[ProcessManager] | None:
    """Return the class for the process manager of this process, None if it has none."""
    if env.get(_NAMESPACE):
        return Pmix
    return Pmi1 if env.get(_DESCRIPTOR) else None


@contextlib.contextmanager
def _connected(kind: type[ProcessManager]) -> Iterator[ProcessManager]:
    """Within the block, this process is a client of its process manager.

    After an error it stays one: the process ends, and the launcher sees that it has failed.
    """
    manager = kind()
    yield manager
    manager.close()


class PmiBoard(PublishedBoard):
    """What rank 0 publishes with its process manager."""

    def __init__(
        self, launch: Launch, env: Mapping[str, str], manager: ProcessManager, seconds: float
    ) -> None:
        """seconds: to wait for the other processes."""
        super().__init__(launch, env)
        self._rank, self._manager, self._seconds = launch.rank, manager, seconds

    def write(self, text: str) -> None:
        try:
            self._manager.publish(text, self._seconds)
        except TimeoutError:
            raise self._error() from None

    def read(self, seconds: float) -> str | None:
        try:
            return self._manager.read(seconds)
        except TimeoutError:
            if self._manager.waits_for_all:
                raise self._error() from None
        return None

    def _error(self) -> ConfigurationError:
        return ConfigurationError(
            f"Rank {self._rank} waited {self._seconds:g} s for the other processes, of which some did not "
            f"arrive. {self.advice}"
        )


# PMI-1: a line of text for each question, over a connection that the process inherits.


class Pmi1(ProcessManager):
    """hydra's or Flux's. The program that follows in this process uses the same connection, and starts over."""

    waits_for_all = True

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(int(os.environ[_DESCRIPTOR])))
        self._unread = b""
        self._has_met = False
        self._ask("init pmi_version=1 pmi_subversion=1", _ANSWER_SECONDS)
        self._space = self._ask("get_my_kvsname", _ANSWER_SECONDS)["kvsname"]

    def publish(self, text: str, seconds: float) -> None:
        self._ask(f"put kvsname={self._space} key={_KEY} value={text}", seconds)
        self._meet(seconds)

    def read(self, seconds: float) -> str:
        self._meet(seconds)
        return self._ask(f"get kvsname={self._space} key={_KEY}", seconds)["value"]

    def close(self) -> None:
        self._socket.setblocking(True)  # also for the program's own descriptor
        self._socket.close()

    def _meet(self, seconds: float) -> None:
        """Wait for all processes of the job: only then can they read what has been put on other hosts."""
        if not self._has_met:
            self._ask("barrier_in", seconds)
            self._has_met = True

    def _ask(self, command: str, seconds: float) -> dict[str, str]:
        self._socket.settimeout(max(1e-3, seconds))
        self._socket.sendall(f"cmd={command}\n".encode())
        while b"\n" not in self._unread:
            part = self._socket.recv(4096)
            if not part:
                raise ConfigurationError(
                    f"The process manager must answer {command!r}, but has closed. {_INSTEAD}"
                )
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer = dict(part.split("=", 1) for part in line.decode().split() if "=" in part)
        if answer.get("rc", "0") != "0":
            raise ConfigurationError(
                f"The process manager must accept {command!r}, but answers {line!r}. {_INSTEAD}"
            )
        return answer


_ANSWER_SECONDS = 10.0
_INSTEAD = "Set MASTER_ADDR and MASTER_PORT for every process: then it is not needed."

# PMIx: a library.

_STORE = "PMIX_MCA_gds"
"""Where a client keeps data. Only with "hash" can a second one start in the same process, with the same value."""
_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_KEY = "dualdist.rank0"
_KEY_BYTES, _SIZE_KEY = 512, "pmix.job.size"
_STRING, _UINT32 = 3, 14
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


class Pmix(ProcessManager):
    """The PMIx server of Open MPI and others."""

    def __init__(self) -> None:
        """Raises ConfigurationError without a library or a server."""
        self._library = _library()
        self._own = _Process()
        os.environ[_STORE] = "hash"
        self._check("PMIx_Init", ctypes.byref(self._own), None, ctypes.c_size_t(0))

    def close(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def job_size(self) -> int:
        """Return the number of processes of the job."""
        value = self._get(_ANY_RANK, _SIZE_KEY)
        return int(value.data.uint32) if value.type == _UINT32 else 0

    def publish(self, text: str, seconds: float) -> None:
        value = _Value(_STRING, _Data(string=text.encode()))
        self._check("PMIx_Put", _EVERYBODY, _key(_KEY), ctypes.byref(value))
        self._check("PMIx_Commit")

    def read(self, seconds: float) -> str:
        return in_time(lambda: str(self._get(0, _KEY).data.string.decode()), seconds)

    def _get(self, rank: int, key: str) -> _Value:
        process, found = _Process(self._own.namespace, rank), ctypes.POINTER(_Value)()
        self._check(
            "PMIx_Get", ctypes.byref(process), _key(key), None, ctypes.c_size_t(0), ctypes.byref(found)
        )
        return found.contents

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise ConfigurationError(
                f"{name} must succeed where a launcher serves PMIx, but returns {status}. {_INSTEAD}"
            )


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
