"""Real Horovod as a backend, with its Gloo or its MPI controller.

It guarantees that operations are matched by name, so that any order works, and its coordinator compares what the ranks
pass under one name. It lacks four things:
- It starts only under its own launchers. Under the others, `serve_rendezvous` provides what is missing.
- Its Gloo controller never detects a missing rank. Waiting has a deadline in group.py.
- It reduces only contiguous tensors of five dtypes. The caller converts all others.
- `horovod.torch.synchronize` spins. Waiting sleeps in group.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from ..copies import names_of_copies
from ..core import accelerator, needed, process
from ..core.backends import needs_gpus
from ..core.backends.base import Backend, Exchange, Group
from ..core.backends.torch_groups import (
    SharedStore,
    TorchGroups,
    allow_open_files,
    config_of,
    gloo_interface,
    meet,
    new_default_group,
    new_torch_groups,
    open_store,
)
from ..core.launch import Place, nodes, temporary_environment, topology
from ..core.meeting import Meeting, PublishedBoard
from ..core.meeting.links import LOOPBACK, check_interfaces, interface_of, own_node
from ..core.process import Patience, in_thread, wait_for
from ..core.types import DeviceView, Launch, Settings
from ..errors import BackendUnavailableError, ConfigurationError, HorovodInternalError
from . import horovod_variables, horovods_version, real_horovod
from .group import (
    HorovodGroup,
    check_process_set,
    forget_shutdown,
    known_process_sets,
    limited,
    make_process_set,
    never_shut_down,
    report_before_abort,
    shut_down_in_time,
    stuck,
    wrapped,
)
from .http_store import HttpStore, horovods_scopes

# The environment variables with which Horovod starts, besides those of its Gloo controller.

_FOR_MPI = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.25"}
"""Horovod's background thread exchanges messages with the other ranks once in each cycle.

While it waits for them, Open MPI polls, and takes the core from the thread that trains. The first variable lets it
yield, which it otherwise does only with more processes than slots. The second is the length of a cycle in milliseconds.
Horovod's own, 1, lets the gradients of several layers wait for each other; here they are in a bucket, which only waits
for the cycle. Over Gloo an exchange takes longer, and shorter cycles make steps slower.
"""
_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
_FUSED_BYTES = 8 << 20
"""Horovod copies tensors of one cycle into a buffer if they fit in it together, by default 128 MiB.

Here gradients are in buckets already. Two large ones that happened to be in one cycle would be copied again, into
memory that Horovod keeps: with two of 52 MB, a peak of 1.08 instead of 1.00 times that of torch's DDP.
"""


def start_variables(env: Mapping[str, str], transport: str | None, *, uses_mpi: bool) -> dict[str, str | None]:
    """Return the variables to set before Horovod starts, and None for those to unset.

    Args:
        env: the environment of the process. What it sets for MPI or the fusion of tensors is kept.
        transport: as in `init`; with None, Horovod chooses its controller.
        uses_mpi: whether that is its MPI controller.
    """
    variables: dict[str, str | None] = dict.fromkeys(names_of_copies(env))
    variables |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": None}
    if uses_mpi:
        variables |= {name: value for name, value in _FOR_MPI.items() if not env.get(name)}
    if not (env.get(_FUSION_THRESHOLD) or env.get("HOROVOD_AUTOTUNE")):  # autotuning leaves alone what is set
        variables[_FUSION_THRESHOLD] = str(_FUSED_BYTES)
    if transport == "mpi":
        variables |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    return variables


# Horovod's messages about changed hosts, also while `dualdist.compat` has the names of Horovod's modules.

with real_horovod():
    import horovod.torch as hvd
    from horovod.runner.common.util import network
    from horovod.runner.elastic.worker import WorkerNotificationManager


class Notifications(WorkerNotificationManager):  # type: ignore[misc]
    """Receives the messages, and passes them to the listeners."""

    def init(self) -> None:
        """Listen, and send the address to horovodrun, which sends a test message at once. Local."""
        inside = real_horovod()  # pickles name the modules of classes, which dualdist.compat replaces
        network.cloudpickle = SimpleNamespace(dumps=inside(cloudpickle.dumps), loads=inside(cloudpickle.loads))
        super().init()


# The rendezvous of Horovod's Gloo controller, which horovodrun provides, for every other launcher.
#
# Rank 0 serves it on the one address that the other processes use. Its port goes to all ranks through the meeting,
# and every rank sets the variables that hvd.init() reads.

_ERROR_SECONDS = 7
"""How long a rank may need to ask the others what they do, and to raise its error."""


class Rendezvous(NamedTuple):
    """What a process needs for hvd.init() with the Gloo controller."""

    meeting: Meeting
    shared: SharedStore
    variables: Mapping[str, str]
    server: HttpStore | None
    """On rank 0."""


def serve_rendezvous(meeting: Meeting, launch: Launch, env: Mapping[str, str], settings: Settings) -> Rendezvous:
    """Serve Horovod's rendezvous from rank 0, and return the variables that hvd.init() reads. Collective."""
    own_part = [horovods_version(), launch.local_rank]
    shared = open_store(meeting, env, settings.start_timeout_seconds, own_part)
    check_interfaces("HOROVOD_GLOO_IFACE", env)
    versions, local_ranks = zip(*shared.messages, strict=True)
    for rank, version in enumerate(versions):  # different builds would wait for each other
        if version != versions[0]:
            raise ConfigurationError(
                f"Horovod must be the same build on all ranks, but is {versions[0]} on rank 0 and {version} on rank "
                f"{rank} instead. Install the same on every host, with dualdist install-horovod for example."
            )
    places: list[Place] = list(zip(shared.addresses.nodes, local_ranks, strict=True))
    names, worlds = nodes(places), topology(places)
    is_first = launch.rank == 0
    server = HttpStore(shared.addresses.first, horovods_scopes(names, worlds)) if is_first else None
    port = meeting.gather(str(server.port if server else None))[0]
    interface = env.get("HOROVOD_GLOO_IFACE") or interface_of(shared.addresses.own)
    rendezvous = shared.addresses.first, int(port)
    variables = horovod_variables(worlds[launch.rank], rendezvous, names[launch.rank], interface)
    timeout = "HOROVOD_GLOO_TIMEOUT_SECONDS"
    variables[timeout] = env.get(timeout) or _gloo_timeout(settings)
    return Rendezvous(meeting, shared, variables, server)


class HorovodsBoard(PublishedBoard):
    """Horovod itself, where it runs already. It carries one text."""

    _text: str | None = None

    def write(self, text: str) -> None:
        hvd.broadcast_object(text, root_rank=0, name="dualdist.rank 0")

    def read(self, seconds: float) -> str:
        if self._text is None:
            self._text = str(hvd.broadcast_object(None, root_rank=0, name="dualdist.rank 0"))
        return self._text


def _gloo_timeout(settings: Settings) -> str:
    """Return how long Horovod's Gloo waits for an unreachable host: a bit longer than we do, and 37 s at most.

    Its timeout ends the process, if it happens in `hvd.init()` or while there are process sets: Horovod does not catch
    Gloo's exception (horovod/common/operations.cc:439, 727). Our error must be raised before. After our error,
    `hvd.shutdown()` waits for it.
    """
    return str(math.ceil(min(settings.stall_timeout_seconds, 30) + _ERROR_SECONDS))


T = TypeVar("T")


class HorovodBackend(Backend):
    name = "horovod"

    _kept = False
    """Whether Horovod still runs after a shutdown: its MPI controller cannot be started twice in a process."""

    _group_numbers = itertools.count()
    """A new number for each group since Horovod was started. After a stall, operations of an earlier world may still be
    pending; the number in their names keeps them apart from new ones."""

    _launchers_server_used = False
    """Whether a world of this process has used horovodrun's rendezvous server. It cannot serve a second one, since it
    keeps the addresses of the first: it forgets which ranks have finished in one scope as soon as another scope is
    complete (horovod/runner/http/http_server.py:132)."""

    _notifications = Notifications()
    """Receives horovodrun's messages about changed hosts. It listens on one port for the life of the process."""

    def __init__(
        self, launch: Launch, settings: Settings, env: Mapping[str, str], rendezvous: Rendezvous | None, adopted: bool
    ) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()
        self.transport = "nccl" if hvd.nccl_built() and torch.cuda.is_available() else self._controller()
        self._adopted = adopted
        self.device = self._bind_device(launch)
        self._settings = settings
        self._timeout = settings.start_timeout_seconds
        self._is_stuck = False
        self._default_group = new_default_group(self.device)
        self._on_shutdown = contextlib.ExitStack()
        """What `shutdown` undoes."""
        self._groups: list[HorovodGroup] = []
        self._rendezvous = rendezvous
        self._elastic = launch.elastic
        self._sets = known_process_sets()
        self.address = LOOPBACK
        self._nodes: tuple[str, ...] = (own_node(),)
        if rendezvous is not None:
            self._meeting = rendezvous.meeting
            self._on_shutdown.callback(rendezvous.meeting.close, started=False)
        if self.size > 1:
            if rendezvous is None:
                shared = limited(lambda: self._open_store(env), self.rank, self._timeout)
            else:
                shared = rendezvous.shared
            self.store, self.address, self.listener = shared.store, shared.addresses.own, shared.listener
            self._on_shutdown.callback(shared.listener.close)
            self._nodes = shared.addresses.nodes
        # For the default group, and those that programs make.
        variables = gloo_interface(self.address, os.environ)
        if self.device is not None:
            variables |= needed("devices").error_handling(self.device, os.environ)
        self._on_shutdown.enter_context(temporary_environment(variables))

    def _bind_device(self, launch: Launch) -> torch.device | None:
        """Choose this rank's device and make it the current one, if NCCL transfers the data. Else return None.

        Collective if Horovod has NCCL. An adopted Horovod keeps the device that the script has made the current one.
        """
        if not hvd.nccl_built():
            return None
        devices = needed("devices")
        chosen = accelerator.current_device() if self._adopted and self.transport == "nccl" else None
        view = DeviceView(own_node(), launch.local_rank, devices.visible(by_uuid=True))
        views = hvd.allgather_object(view, name="dualdist.devices")
        if not self._adopted and needs_gpus(self.transport):
            devices.check_devices(views, self.transport)
        return chosen or devices.bind_device(self.transport, views, self.rank)

    @staticmethod
    def _controller() -> str:
        return "mpi" if hvd.mpi_enabled() else "gloo"

    @classmethod
    def is_running(cls) -> bool:
        return bool(hvd.is_initialized()) and not cls._kept

    @classmethod
    def can_start(cls, launch: Launch, env: Mapping[str, str]) -> bool:
        if _has_mpi_controller(launch):
            return bool(hvd.mpi_built())
        return _has_launchers_server(env)

    @classmethod
    def start(cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None) -> HorovodBackend:
        cls._check_build()
        if stuck.is_set():
            raise HorovodInternalError(
                "Horovod cannot start: it still waits for a rank that has stopped, or has crashed. Start this process "
                "again."
            )
        if cls.is_running():
            if env.get("HOROVOD_TIMELINE", "") not in ("", "DYNAMIC"):  # Horovod writes to the same file
                hvd.stop_timeline()
            return cls(launch, settings, env, None, adopted=True)
        if transport is not None:
            cls.check(transport, launch)
        if cls._kept:
            if launch.is_part:
                raise ConfigurationError(
                    "`comm` must be all ranks, but is a part: MPI keeps Horovod in its first world. Use process sets."
                )
            cls._kept = False
            return cls(launch, settings, env, None, adopted=False)
        with contextlib.ExitStack() as undo:
            chooses_mpi = transport is None and _has_mpi_controller(launch) and hvd.mpi_built()
            uses_mpi = transport == "mpi" or chooses_mpi
            variables = start_variables(os.environ, transport, uses_mpi=uses_mpi)
            meeting = rendezvous = None
            if cls._needs_rendezvous(launch, env, transport):
                meeting = meet(launch, env, settings.start_timeout_seconds)
                undo.callback(meeting.close, started=False)
                # After an error it stays open: Horovod may still wait, and aborts a process that gets no answer.
                rendezvous = serve_rendezvous(meeting, launch, env, settings)
                undo.callback(rendezvous.shared.listener.close)
                variables |= rendezvous.variables
            elif transport != "mpi" and _has_launchers_server(env):
                cls._launchers_server_used = True
            with temporary_environment(variables), wrapped():
                cls._connect(hvd.init, meeting, launch.rank, settings.start_timeout_seconds)
            cls._group_numbers = itertools.count()
            with wrapped():
                started = cls(launch, settings, env, rendezvous, adopted=False)
            undo.pop_all()
        return started

    @classmethod
    def _connect(cls, step: Callable[[], T], meeting: Meeting | None, rank: int, seconds: float) -> T:
        """Return `step()`, in which Horovod connects to the other ranks.

        If one of them ends, Horovod itself waits for it, also when the process exits.
        """
        if meeting is None:
            return limited(step, rank, seconds)
        try:
            return meeting.wait_for(in_thread(step), seconds)
        except BaseException:  # KeyboardInterrupt, too
            never_shut_down()
            raise

    @classmethod
    def _needs_rendezvous(cls, launch: Launch, env: Mapping[str, str], transport: str | None) -> bool:
        """Return whether rank 0 must serve Horovod's rendezvous, because the launcher does not."""
        if transport == "mpi":
            return False
        if _has_mpi_controller(launch):
            return transport == "gloo" or not cls.can_start(launch, env)
        if launch.elastic:  # the launcher prepares its server for the new world
            return False
        usable = cls.can_start(launch, env) and not cls._launchers_server_used
        return (launch.size > 1 or launch.is_part or transport == "gloo") and not usable

    @classmethod
    def _check_build(cls) -> None:
        if not hasattr(hvd, "init"):  # without its library, importing horovod.torch only warns
            raise BackendUnavailableError(
                "`backend` is 'horovod', but Horovod is installed without its PyTorch library. "
                "Build it with dualdist install-horovod."
            )

    @classmethod
    def check(cls, transport: str, launch: Launch) -> None:
        cls._check_build()
        if transport not in ("nccl", "gloo", "mpi"):
            raise BackendUnavailableError(
                f"`transport` must be nccl, gloo or mpi for Horovod, but is {transport!r} instead. Choose the backend "
                "torch."
            )
        if transport == "mpi" and not (hvd.mpi_built() and (launch.starts_mpi or launch.size == 1)):
            lacking = f"{launch.launcher} does not start it" if hvd.mpi_built() else "Horovod was built without it"
            raise BackendUnavailableError(
                f"`transport` must be gloo for Horovod here, but is 'mpi' instead: it needs MPI, and {lacking}. Start "
                "with a launcher that starts MPI (mpirun, srun --mpi=pmix) and a Horovod built for it, or choose gloo."
            )
        options = {"gloo": "", "nccl": "HOROVOD_GPU_OPERATIONS=NCCL "}
        if transport in options and not cls.built()[f"{transport}_built"]:
            raise BackendUnavailableError(
                f"`transport` is {transport!r}, but Horovod was built without it. Rebuild it with "
                f"{options[transport]}dualdist install-horovod."
            )

    def _open_store(self, env: Mapping[str, str]) -> SharedStore:
        """Meet, and open a store. Collective."""
        board = HorovodsBoard(Launch("Horovod", self.rank, self.size), env)
        self._meeting = Meeting(board, self.rank, self.size, self._timeout)
        self._on_shutdown.callback(self._meeting.close, started=False)
        return open_store(self._meeting, env, self._settings.stall_timeout_seconds)

    def add_host_listener(self, listener: Any) -> None:
        if self._elastic:
            self._notifications.init()
            self._notifications.register_listener(listener)

    def remove_host_listener(self, listener: Any) -> None:
        if self._elastic:
            self._notifications.remove_listener(listener)

    def new_groups(
        self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool = False
    ) -> list[Group]:
        if among_members:  # Horovod makes a process set with all ranks alone
            return self._groups_beside.make(ranks, count, exchange, among_members)
        return [self._new_group(ranks) for _ in range(count)]

    @functools.cached_property
    def _groups_beside(self) -> TorchGroups:
        """Groups of torch beside Horovod, for ranks of which it has no process set."""
        assert self.store is not None, "a world of one rank has no other set of ranks"
        timeout = timedelta(seconds=self._timeout)
        others = self._nodes, self.store, timeout, self._settings.env
        made = new_torch_groups(self.rank, self._config, self.device, *others)
        self._on_shutdown.callback(made.close)
        return made

    @property
    def _config(self) -> dict[str, str]:
        """Which of torch's backends carries the tensors of which device, in groups beside Horovod."""
        return config_of(self.transport if self.device else "gloo")

    def _new_group(self, ranks: Sequence[int]) -> Group:
        key = tuple(ranks)
        if key not in self._sets:
            check_process_set(ranks, self._nodes)
        # Horovod reads the variables again for every process set (gloo_context.cc:InitializeForProcessSet).
        variables = {} if self._rendezvous is None else self._rendezvous.variables
        with temporary_environment(variables), wrapped():
            if key not in self._sets:
                self._sets[key] = self._new_process_set(ranks)
            prefix = f"dualdist.{next(self._group_numbers)}"
            group = HorovodGroup(ranks, self.rank, self._sets[key], prefix, self._timeout)
        self._groups.append(group)
        return group

    def _new_process_set(self, ranks: Sequence[int]) -> Any:
        make = functools.partial(make_process_set, ranks)
        made = None if self._meeting is not None else in_thread(make)  # None: before `finish_start`
        try:
            if made is None:
                return self.start_step(make)
            return wait_for(made, Patience(self.has_lost_rank, self._timeout))
        except BaseException:  # KeyboardInterrupt, too
            if made is None or not made.done():  # Horovod may still wait
                self._is_stuck = True
                never_shut_down()
            raise

    def start_step(self, step: Callable[[], T]) -> T:
        return self._connect(step, self._meeting, self.rank, self._timeout)

    def finish_start(self, report: str) -> list[str]:
        try:
            reports = super().finish_start(report)
        except BaseException:  # KeyboardInterrupt, too
            never_shut_down()
            raise
        if self._controller() == "gloo" and self.size > 1:
            report_before_abort(lambda: f"rank {self.rank}: {self._groups[0].find_cause()}")
        self._timeout = self._settings.stall_timeout_seconds
        timeout = timedelta(seconds=self._timeout)
        self._default_group.set_timeout(timeout)
        for group in self._groups:
            group.set_timeout(timeout)
        return reports

    def open_process_group(self) -> None:
        if dist.is_initialized():
            return
        store = dist.HashStore() if self.store is None else self.store
        allow_open_files(self.size)
        place = self.rank, self.size, timedelta(seconds=self._timeout)
        self.start_step(lambda: self._default_group.open(self._config, store, *place))

    def abort_default_group(self) -> None:
        self._default_group.abort()

    def shutdown(self) -> None:
        with self._on_shutdown:
            self._default_group.close()
        self.store = None
        if self._adopted or not hvd.is_initialized():
            return
        if self._controller() == "mpi":
            HorovodBackend._kept = True
            return
        if not self._is_stuck and not stuck.is_set():
            report_before_abort(None)
            # An elastic job starts Horovod again, for which its shutdown must end: at the latest, at Gloo's timeout.
            limits = process.world_has_failed and (process.has_failed() or not self._elastic)
            (shut_down_in_time if limits else hvd.shutdown)()
        if self._rendezvous is not None and self._rendezvous.server is not None:
            self._rendezvous.server.close()

    def abandon(self) -> None:
        super().abandon()
        forget_shutdown()  # it waits for a thread that only the parent has

    def transport_of(self, device: str) -> str:
        return self._controller() if device == "cpu" else self.transport

    @classmethod
    def built(cls) -> Mapping[str, bool | int]:
        libraries = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
        return {f"{name}_built": getattr(hvd, f"{name}_built")() for name in libraries}

    def facts(self) -> Mapping[str, bool | int]:
        mpi = bool(hvd.mpi_enabled())
        enabled = {"mpi_enabled": mpi, "gloo_enabled": hvd.gloo_enabled()}
        return {**self.built(), **enabled, "mpi_threads_supported": mpi and hvd.mpi_threads_supported()}


def _has_mpi_controller(launch: Launch) -> bool:
    """Return whether Horovod uses its MPI controller under this launcher by default."""
    return launch.starts_horovod and launch.starts_mpi


def _has_launchers_server(env: Mapping[str, str]) -> bool:
    """Return whether the launcher serves Horovod's rendezvous."""
    return bool(env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"))
