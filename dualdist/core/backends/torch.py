"""torch.distributed as a backend: nccl, xccl, gloo, or MPI through mpi4py.

It guarantees that the collectives of one process group run in the order of the calls. dualdist adds two checks above
it: that ranks pass the same shapes (gloo), and call the same collectives (all).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ...errors import BackendUnavailableError, ConfigurationError, logger
from .. import accelerator
from ..executor import Patience, in_thread, wait_for
from ..extensions import extension, needed
from ..launch import NO_NVLINK, DeviceView, choose_devices, confined_hosts, shared_devices
from ..launch.environment import temporary_environment
from ..meeting.addresses import own_node
from ..meeting.member import Meeting
from ..types import Launch, Settings
from . import needs_gpus, transport_named
from .base import Backend, Exchange, Group
from .store import SharedStore, StoreBoard, connect_again, meet, open_store
from .torch_groups import (
    DefaultGroup,
    TorchGroups,
    adopted_config,
    allow_open_files,
    config_of,
    gloo_interface,
    wrapped,
)

# The transport that all ranks use, agreed before any of them chooses a device.

T = TypeVar("T")


_FALLBACK = "gloo"
"""Every host has it."""


@dataclass(frozen=True)
class Offer(DeviceView):
    """What a rank reports before the transport is chosen."""

    transport: str
    """The fastest transport of this rank, or the one that the user asks for."""
    is_asked: bool


def agreed_transport(offers: Sequence[Offer], rank: int) -> str:
    """Return the transport for all ranks. offers: of all ranks, in rank order. rank: of this process.

    It is the one that a user asks for, else the fastest of all ranks if it is the same, else gloo, of which rank 0
    warns. Raises ConfigurationError on every rank when users ask for different ones, or when processes would share a
    device with a transport that needs one for each.
    """
    asked = {offer.transport: other for other, offer in reversed(list(enumerate(offers))) if offer.is_asked}
    if len(asked) > 1:
        said = ", ".join(f"rank {other} asks for {name!r}" for name, other in asked.items())
        raise ConfigurationError(f"`transport` must be equal on all ranks, but {said}. Choose one of them.")
    transports = sorted(asked or {offer.transport for offer in offers})
    transport = transports[0] if len(transports) == 1 else _FALLBACK
    if len(transports) > 1 and rank == 0:
        said = "; ".join(f"{name} on {', '.join(_hosts(offers, name))}" for name in transports)
        logger.warning("All ranks use %s, because their fastest transports differ: %s.", transport, said)
    if needs_gpus(transport):
        check_devices(offers, transport)
        confined = confined_hosts(offers)
        if confined and rank == 0:
            logger.warning(NO_NVLINK, ", ".join(map(_shown, confined)))
    return transport


def check_devices(offers: Sequence[DeviceView], transport: str) -> None:
    """Raise ConfigurationError if `transport` needs a device for each process, and some have none, or share one."""
    chosen = choose_devices(offers)
    for other, index in enumerate(chosen):
        if index is None:
            raise ConfigurationError(
                f"`transport` is {transport!r}, but rank {other} on {_shown(offers[other].host)} sees no GPU. "
                "Choose gloo, or leave its host out."
            )
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return  # NCCL 2.30 and later lets processes share a device; older releases raise
    for host, ranks, devices in shared_devices(offers, chosen):
        raise ConfigurationError(
            f"`transport` is {transport!r}, which needs a GPU for each process, but the {ranks} processes on "
            f"{_shown(host)} share {devices}. Start fewer processes there, or set DUALDIST_TRANSPORT=gloo to let them "
            "share."
        )
    slices = Counter(offer.host for offer in offers if offer.devices[0].startswith("MIG-"))
    for host, ranks in slices.items():
        if ranks > 1:  # NVIDIA/nccl#1716
            raise ConfigurationError(
                f"`transport` must be gloo for MIG slices of a host, but is {transport!r} instead for {ranks} "
                f"processes on {_shown(host)}. Set DUALDIST_TRANSPORT=gloo."
            )


def _hosts(offers: Sequence[Offer], transport: str) -> list[str]:
    return sorted({_shown(offer.host) for offer in offers if offer.transport == transport})


def _shown(host: str) -> str:
    """Return the host's own name from that of `own_node`."""
    return host.rpartition("-")[0] or host


# The device of this process, and the transport that torch has for it.

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def error_handling(device: torch.device | None, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with which NCCL's watchdog aborts its communicators without ending the process.

    2 is `CleanUpOnly` in ProcessGroupNCCL.hpp. The calls of this package then raise, and elastic training can continue
    in the process. A variable that the user has set stays.
    """
    return {} if device is None or env.get(_ERROR_HANDLING) else {_ERROR_HANDLING: "2"}


def device_transport() -> str | None:
    """Return the transport that torch has for this machine's accelerator; None without either."""
    kind = accelerator.kind()
    transport = dist.Backend.default_device_backend_map.get(kind) if kind else None
    is_usable = transport is not None and needs_gpus(transport) and dist.is_backend_available(transport)
    return transport if is_usable else None


def bind_device(transport: str, views: Sequence[DeviceView], rank: int) -> torch.device | None:
    """Choose this rank's device, and make it the current one. None if `transport` needs no devices."""
    index = choose_devices(views)[rank] if needs_gpus(transport) else None
    if index is None:
        return None
    device = torch.device(str(accelerator.kind()), index)
    accelerator.bind(device)
    return device


def adopted_transport(config: Mapping[str, str]) -> str:
    """Return the transport that carries the tensors of this machine's accelerator; without one, of the CPU."""
    return transport_named(config.get(accelerator.kind() or "cpu", config["cpu"]))


def adopted_device(transport: str) -> torch.device | None:
    """Return the device to which the adopted group is bound, else the one that the program has chosen.

    None if it needs no devices, or if the program has not used any.
    """
    if not needs_gpus(transport):
        return None
    bound: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    return bound or accelerator.current_device()


class TorchBackend(Backend):
    name = "torch"

    def __init__(
        self,
        transport: str,
        config: Mapping[str, str],
        device: torch.device | None,
        shared: SharedStore,
        settings: Settings,
        meeting: Meeting,
        adopted: bool,
    ) -> None:
        """adopted: whether the program has initialized torch.distributed."""
        self.rank, self.size = meeting.rank, meeting.size
        self.transport = transport_named(transport)
        self.device = device
        self.runs_ahead = device is not None
        self._config = config
        self.address = shared.addresses.own
        self.store, self.listener = shared.store, shared.listener
        self._settings = settings
        self._timeout = timedelta(seconds=settings.start_timeout_seconds)
        self._adopted = adopted
        self._default_group = DefaultGroup()
        self._groups = TorchGroups(
            self.rank,
            config,
            device,
            shared.addresses.nodes,
            shared.store,
            self._timeout,
            settings.env,
        )
        self._meeting = meeting
        self._on_shutdown = contextlib.ExitStack()
        """What `shutdown` undoes."""

    @classmethod
    def is_running(cls) -> bool:
        return dist.is_initialized()

    @classmethod
    def start(
        cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None
    ) -> TorchBackend:
        if cls.is_running():
            return cls._adopt(transport, env, settings)
        if transport is not None:
            cls.check(transport, launch)
        mpi = "mpi" if launch.starts_mpi and extension("mpi") is not None else _FALLBACK
        chosen = transport or device_transport() or mpi
        if chosen == "mpi":
            mpi_transport = needed("mpi_transport")
            if transport is not None:
                mpi_transport.require(launch)
            elif not mpi_transport.start(launch):
                chosen = _FALLBACK
        views, numbers = accelerator.visible(by_uuid=needs_gpus(chosen)), accelerator.visible()
        offer = Offer(own_node(), launch.local_rank, views, chosen, transport is not None, numbers=numbers)
        seconds = settings.start_timeout_seconds
        with contextlib.ExitStack() as undo, wrapped():
            meeting = meet(launch, env, seconds)
            undo.callback(meeting.close, started=False)
            shared = open_store(meeting, env, seconds, asdict(offer))
            undo.callback(shared.listener.close)
            offers = [Offer(**found) for found in shared.messages]
            chosen = agreed_transport(offers, launch.rank)
            device, config = bind_device(chosen, offers, launch.rank), config_of(chosen)
            variables = gloo_interface(shared.addresses.own, env) | error_handling(device, env)
            undo.enter_context(temporary_environment(variables))
            if "gloo" in config.values():
                allow_open_files(launch.size)
            started = cls(chosen, config, device, shared, settings, meeting, adopted=False)
            if device is not None:  # torch makes no other groups for accelerators without the default group
                started.open_process_group()
            started._on_shutdown.push(undo.pop_all())
        return started

    @classmethod
    def _adopt(cls, asked: str | None, env: Mapping[str, str], settings: Settings) -> TorchBackend:
        """Use the process group that torch.distributed has already. Collective."""
        config = adopted_config()
        transport = adopted_transport(config)
        if asked is not None and transport_named(asked) != transport:
            raise ConfigurationError(
                f"`transport` must be {transport!r}, but is {asked!r} instead: torch.distributed runs already."
            )
        place = (dist.get_rank(), dist.get_world_size())
        board = StoreBoard(Launch("torch", *place), env, dist.distributed_c10d._get_default_store())
        seconds = settings.start_timeout_seconds
        device = adopted_device(transport)
        views = accelerator.visible(by_uuid=needs_gpus(transport))
        offer = Offer(own_node(), None, views, transport, is_asked=False)
        with contextlib.ExitStack() as undo:
            meeting = Meeting(board, *place, seconds)
            undo.callback(meeting.close, started=False)
            shared = open_store(meeting, env, seconds, asdict(offer))
            undo.callback(shared.listener.close)
            if needs_gpus(transport) and device is None:
                offers = [Offer(**found) for found in shared.messages]
                device = bind_device(transport, offers, dist.get_rank())
            # For the groups that the adopted world makes from now on.
            undo.enter_context(temporary_environment(error_handling(device, env)))
            adopted = cls(transport, config, device, shared, settings, meeting, adopted=True)
            adopted._on_shutdown.push(undo.pop_all())
        return adopted

    @classmethod
    def check(cls, transport: str, launch: Launch) -> None:
        family = transport_named(transport)
        if needs_gpus(family) and device_transport() != family:
            built = (
                "" if dist.is_backend_available(transport) else f", since torch is built without {transport}"
            )
            kinds = dist.Backend.backend_capability.get(family)
            kind = kinds[0].upper() if kinds else "fitting"
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
                "Install MPI and mpi4py (pip install mpi4py), or choose gloo."
            )

    def new_groups(
        self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool = False
    ) -> list[Group]:
        def make() -> list[Group]:
            if self.device is not None:  # ncclCommSplit: no collective of the parent may be in progress
                accelerator.synchronize(self.device)
            return self._groups.make(ranks, count, exchange, among_members)

        return self.start_step(make)

    def new_device_group(self, ranks: Sequence[int]) -> Group:
        return self.start_step(lambda: self._groups.make_for_device(ranks))

    def start_step(self, step: Callable[[], T]) -> T:
        def run() -> T:
            if self.device is not None:  # each thread has a current device of its own
                accelerator.bind(self.device)
            return step()

        if self._meeting is None:
            if self.transport == "mpi":
                return step()
            # After its timeout, torch's store asks the server once more, and waits for the answer without a timeout
            # (TCPStore::doWait). Through a link that is cut, no answer arrives.
            longest = self._timeout.total_seconds() + self._settings.start_timeout_seconds
            return wait_for(in_thread(run), Patience(self.has_lost_rank, longest))
        # torch has timeouts of its own, but MPI has none for a new communicator.
        seconds = self._settings.start_timeout_seconds if self.transport == "mpi" else None
        return self._meeting.wait_for(in_thread(run), seconds)

    def finish_start(self, report: str) -> list[str]:
        reports = super().finish_start(report)
        timeout = timedelta(seconds=self._settings.stall_timeout_seconds)
        if timeout != self._timeout:
            self._timeout = timeout
            self.store.set_timeout(timeout)
            self._default_group.set_timeout(timeout)
            self._groups.set_timeout(timeout)
        return reports

    def open_process_group(self) -> None:
        if dist.is_initialized():
            return
        # NCCL has threads that wait in a store. Otherwise one connection is enough, and each takes time.
        store = self.store if self.device is None else connect_again(self.store)
        place = self.rank, self.size, self._timeout, self.device
        self.start_step(lambda: self._default_group.open(self._config, store, *place))

    def abort_default_group(self) -> None:
        self._default_group.abort()

    def shutdown(self) -> None:
        with self._on_shutdown:
            if self._adopted:
                self._groups.close()
            self._default_group.close()

    def abandon(self) -> None:
        super().abandon()
        self._groups.abandon()

    def transport_of(self, device: str) -> str:
        return adopted_transport({"cpu": self._config["cpu"]}) if device == "cpu" else self.transport
