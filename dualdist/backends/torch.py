"""torch.distributed as a backend: nccl, xccl, gloo, or MPI through mpi4py.

It guarantees that the collectives of one process group run in the order of the calls. It lacks two checks, which
dualdist adds above the backends: gloo does not detect that ranks pass different shapes, and no transport detects that
they call different collectives.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import accelerator
from ..errors import BackendUnavailableError, ConfigurationError
from ..process_exit import never_delete, skip_destructors_at_exit
from ..rendezvous import INTERFACE, check_interfaces, interface_of, own_node
from ..types import Launch, Settings
from .base import Backend, Group
from .default_group import forget_default_group
from .direct_group import DirectGroup, can_connect
from .open_files import allow_open_files
from .shared_memory import HostGroup, share_host
from .start_step import start_step
from .start_watch import StartWatch
from .store import SharedStore, open_store, share_store
from .temporary_environment import temporary_environment
from .torch_build import built_into_torch
from .torch_devices import (
    adopted_config,
    adopted_device,
    adopted_transport,
    bind_device,
    carried_types,
    config_of,
    device_transport,
    error_handling,
    transport_timeout,
)
from .torch_group import TorchGroup, abort_process_group, set_timeout, wrapped
from .transport_choice import Offer, agreed_transport
from .transports import TRANSPORTS

__all__ = ("TorchBackend",)

T = TypeVar("T")

_members_groups_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made among the members alone, for each tuple of ranks."""
_FIRST_MEMBERS_GROUP = 1_000_000
"""Above the numbers of all groups that all ranks make together."""


def _interfaces(address: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that make Gloo use the interface of `address`, except those that the user has set.

    By default, Gloo uses the address of the host's name, which other hosts may not reach (127.0.1.1 on Debian). NCCL
    finds the best connection between GPUs itself, so its variable is set only if the user chose an interface.
    """
    names = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * bool(env.get(INTERFACE))
    return {name: interface_of(address) for name in names if not env.get(name)}


def _step_seconds(transport: str, settings: Settings) -> float | None:
    """Return how long a step of the start may take; None if torch has a timeout. MPI has none for a communicator."""
    return settings.start_timeout_seconds if transport == "mpi" else None


def _text_of(config: Mapping[str, str]) -> str:
    """Return `config` as torch's argument `backend`."""
    return ",".join(f"{kind}:{name}" for kind, name in config.items()) if len(config) > 1 else config["cpu"]


def _preferred_transport(launch: Launch) -> str:
    """Return the fastest transport that the machine and the launcher offer. Starts nothing."""
    return device_transport() or ("mpi" if launch.starts_mpi else "gloo")


def _start_mpi(launch: Launch, required: bool) -> bool:
    """Start MPI and return whether it can be used. Raises BackendUnavailableError when it is `required` but cannot."""
    from . import mpi

    if required:
        mpi.require(launch)
    return required or mpi.start(launch)


class TorchBackend(Backend):
    name = "torch"

    def __init__(
        self,
        transport: str,
        config: Mapping[str, str],
        device: torch.device | None,
        shared: SharedStore,
        settings: Settings,
        adopted: bool,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.transport = transport
        self.device = device
        self.runs_ahead = device is not None
        self._config = config
        self.address = shared.addresses.own
        self._nodes = shared.addresses.nodes
        self._store = shared.store
        self._settings = settings
        self._timeout = timedelta(seconds=settings.start_timeout_seconds)
        self._adopted = adopted
        self._groups: list[TorchGroup] = []
        self._members_groups: list[TorchGroup] = []
        self._direct_groups: list[DirectGroup] = []
        self._host_groups: list[HostGroup] = []
        self._start_watch: StartWatch | None = None
        """Until `finish_start`."""
        self._on_shutdown = contextlib.ExitStack()
        """What `shutdown` undoes."""

    @classmethod
    def is_running(cls) -> bool:
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def start(
        cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None
    ) -> TorchBackend:
        if cls.is_running():
            return cls._adopt(transport, env, settings)
        if transport is not None:
            cls.check(transport, launch)
        chosen = transport or _preferred_transport(launch)
        if chosen == "mpi" and not _start_mpi(launch, required=transport is not None):
            chosen = "gloo"
        check_interfaces("GLOO_SOCKET_IFNAME", env)
        views = accelerator.visible()
        offer = Offer(own_node(), launch.local_rank, views, chosen, is_asked=transport is not None)
        shared = open_store(launch, env, settings.start_timeout_seconds, offer.to_text())
        offers = [Offer.from_text(text) for text in shared.messages]
        chosen = agreed_transport(offers, launch.rank)
        device, config = bind_device(chosen, offers, launch.rank), config_of(chosen)
        with contextlib.ExitStack() as undo, wrapped():
            variables = _interfaces(shared.addresses.own, env) | error_handling(device, env)
            undo.enter_context(temporary_environment(variables))
            watch = None
            if device is None:  # a GPU is current in one thread only, and `watch` connects in another
                seconds = settings.start_timeout_seconds
                watch = StartWatch(shared.store, launch.rank, launch.size, shared.addresses.own, seconds)
                undo.callback(watch.close, started=False)
            if "gloo" in config.values():
                allow_open_files(launch.size)  # watched, so that its error ends the start of all ranks
            connect = functools.partial(
                dist.init_process_group,
                _text_of(config),
                # While a thread waits in a store, others cannot use it. NCCL has threads that wait. Without NCCL, one
                # connection is enough. Each takes time: c10d's server looks up the peers' names one by one.
                store=shared.store if device is None else shared.store.clone(),
                rank=launch.rank,
                world_size=launch.size,
                timeout=transport_timeout(timedelta(seconds=settings.start_timeout_seconds), device),
                device_id=device,
            )
            limit = _step_seconds(chosen, settings)
            start_step(connect, shared.store, "process group", launch.rank, launch.size, watch, limit)
            started = cls(chosen, config, device, shared, settings, adopted=False)
            started._start_watch = watch
            started._on_shutdown.push(undo.pop_all())
        return started

    @classmethod
    def _adopt(cls, asked: str | None, env: Mapping[str, str], settings: Settings) -> TorchBackend:
        """Use the process group that torch.distributed has already. Collective."""
        config = adopted_config()
        transport = adopted_transport(config)
        if asked not in (None, transport):
            raise ConfigurationError(
                f"`transport` must be {transport!r}, but is {asked!r} instead: torch.distributed runs already."
            )
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        shared = share_store(store, rank, size, env, settings.start_timeout_seconds)
        return cls(transport, config, adopted_device(transport), shared, settings, adopted=True)

    @classmethod
    def check(cls, transport: str, launch: Launch) -> None:
        if TRANSPORTS[transport].needs_gpus and device_transport() != transport:
            built = (
                "" if dist.is_backend_available(transport) else f", since torch is built without {transport}"
            )
            kind = dist.Backend.backend_capability[transport][0].upper()
            raise BackendUnavailableError(
                f"`transport` is {transport!r}, but no {kind} device is usable{built}. Choose gloo."
            )
        if transport == "mpi" and not launch.starts_mpi and launch.size > 1:
            raise BackendUnavailableError(
                f"`transport` must be gloo or nccl under {launch.launcher}, but is 'mpi' instead. "
                "Start with a launcher that starts MPI (mpirun, srun --mpi=pmix), or choose gloo."
            )
        if transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            raise BackendUnavailableError(
                "`transport` is 'mpi', but mpi4py is not installed. "
                "Install MPI and mpi4py (pip install 'dualdist[mpi]'), or choose gloo."
            )

    def new_groups(self, ranks: Sequence[int], count: int) -> list[Group]:
        def connect() -> list[Group]:
            for _ in range(count):
                self._groups.append(self._new_group(ranks))
            return self._on_host(self._groups[-count:])

        return self.start_step(connect, f"groups {len(self._groups)}")

    def start_step(self, step: Callable[[], T], name: str) -> T:
        limit = _step_seconds(self.transport, self._settings)
        return start_step(step, self._store, name, self.rank, self.size, self._start_watch, limit)

    def new_members_group(self, ranks: Sequence[int]) -> Group:
        # torch numbers the groups of a process, and names each by its number. Other ranks do not count this one.
        torch_world, key = dist.distributed_c10d._world, tuple(ranks)
        before = torch_world.group_count
        _members_groups_made[key] += 1
        torch_world.group_count = _FIRST_MEMBERS_GROUP + _members_groups_made[key]
        try:
            self._members_groups.append(self._new_group(ranks, among_members=True))
        finally:
            torch_world.group_count = before
        return self._on_host(self._members_groups[-1:])[0]

    def _new_group(self, ranks: Sequence[int], among_members: bool = False) -> TorchGroup:
        with wrapped():
            process_group = dist.new_group(
                list(ranks),
                backend=_text_of(self._config),
                timeout=transport_timeout(self._timeout, self.device),
                use_local_synchronization=among_members,
            )
        own = process_group if self.rank in ranks else None
        return TorchGroup(ranks, self.rank, own, carried_types(self._config), self.device)

    def _on_host(self, groups: Sequence[TorchGroup]) -> list[Group]:
        """Return `groups`, or groups that do the same in shared memory within each host. Collective over the members.

        groups: they have the same members.
        """
        if not self._settings.shared_memory:
            return [*groups]
        connect = self._connect if can_connect(self._config) else None
        with wrapped():
            host_groups = share_host(groups, self._nodes, self._timeout.total_seconds(), connect)
        self._host_groups += host_groups
        return [*(host_groups or groups)]

    def _connect(self, name: str, ranks: Sequence[int]) -> Group:
        """Return a group over `ranks`, for tensors on the CPU. Collective over `ranks` alone."""
        kind, store = self._config["cpu"], self._store.clone()
        self._direct_groups.append(DirectGroup(kind, store, name, ranks, self.rank, self._timeout))
        return self._direct_groups[-1]

    def check_start(self, cause: BaseException | None = None) -> None:
        if self._start_watch is not None:
            self._start_watch.check(cause)

    def finish_start(self) -> None:
        if self._start_watch is not None:
            self._start_watch.close(started=True)
            self._start_watch = None
        timeout = timedelta(seconds=self._settings.stall_timeout_seconds)
        if timeout == self._timeout:
            return
        self._timeout = timeout
        self._store.set_timeout(timeout)
        if not self._adopted:
            dist.distributed_c10d._get_default_store().set_timeout(timeout)
            set_timeout(transport_timeout(timeout, self.device), None)
        for group in self._groups:
            group.set_timeout(transport_timeout(timeout, self.device))
        for direct_group in self._direct_groups:
            direct_group.set_timeout(timeout)
        for host_group in self._host_groups:
            host_group.set_timeout(timeout.total_seconds())

    def open_process_group(self) -> None:
        return  # it is the world

    def abort_process_groups(self) -> None:
        for group in list(dist.distributed_c10d._world.pg_map):
            group.abort()

    def keep_process_groups(self) -> None:
        # Gloo's destructor waits for the collective. When it fails later, its thread must not find a process that ends.
        for group in list(dist.distributed_c10d._world.pg_map):
            never_delete(group)
        skip_destructors_at_exit()

    def shutdown(self) -> None:
        with self._on_shutdown:
            if not dist.is_initialized():
                return
            if not self._adopted:
                forget_default_group()
                is_aborted = any(group.is_aborted for group in [*self._groups, *self._members_groups])
                (abort_process_group if is_aborted else dist.destroy_process_group)()
                return
            for group in [*self._groups, *self._members_groups]:
                group.close()

    def abandon(self) -> None:
        for group in self._host_groups:
            group.abandon()

    @property
    def store(self) -> dist.Store | None:
        return self._store

    def transport_of(self, device: str) -> str:
        return adopted_transport({"cpu": self._config["cpu"]}) if device == "cpu" else self.transport

    @classmethod
    def built(cls) -> Mapping[str, bool | int]:
        return built_into_torch()

    def facts(self) -> Mapping[str, bool | int]:
        mpi, threads = self.transport == "mpi", False
        if mpi and importlib.util.find_spec("mpi4py") is not None:
            from mpi4py import MPI

            threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        return {**self.built(), "mpi_enabled": mpi, "gloo_enabled": not mpi, "mpi_threads_supported": threads}
