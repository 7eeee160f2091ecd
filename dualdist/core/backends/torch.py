"""torch.distributed as a backend: nccl, xccl, gloo, or MPI through mpi4py.

It guarantees that the collectives of one process group run in the order of the calls. dualdist adds two checks above
it: that ranks pass the same shapes (gloo), and call the same collectives (all).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import BackendUnavailableError, ConfigurationError, logger
from .. import accelerator, extension, needed
from ..launch import temporary_environment
from ..meeting import Meeting
from ..meeting.links import own_node, shown_host
from ..process import Patience, in_thread, wait_for
from ..types import DeviceView, Launch, Settings
from . import needs_gpus, transport_named
from .base import Backend, Exchange, Group
from .torch_groups import (
    SharedStore,
    StoreBoard,
    adopted_config,
    allow_open_files,
    config_of,
    connect_again,
    gloo_interface,
    meet,
    new_default_group,
    new_torch_groups,
    open_store,
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
        needed("devices").check_devices(offers, transport)
        if rank == 0:
            needed("devices").warn_of_confined_hosts(offers)
    return transport


def _hosts(offers: Sequence[Offer], transport: str) -> list[str]:
    return sorted({shown_host(offer.host) for offer in offers if offer.transport == transport})


def _offer(local_rank: int | None, transport: str, *, is_asked: bool) -> Offer:
    devices, seen = extension("devices") if accelerator.kind() else None, ((), ())
    if devices is not None:
        seen = devices.visible(by_uuid=needs_gpus(transport)), devices.visible()
    return Offer(own_node(), local_rank, seen[0], transport, is_asked, numbers=seen[1])


def adopted_transport(config: Mapping[str, str]) -> str:
    """Return the transport that carries the tensors of this machine's accelerator; without one, of the CPU."""
    return transport_named(config.get(accelerator.kind() or "cpu", config["cpu"]))


def _checked_adopted(config: Mapping[str, str], asked: str | None) -> str:
    transport = adopted_transport(config)
    if asked is not None and transport_named(asked) != transport:
        raise ConfigurationError(
            f"`transport` must be {transport!r}, but is {asked!r} instead: torch.distributed runs already."
        )
    return transport


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
        self._default_group = new_default_group(device)
        others = shared.addresses.nodes, shared.store, self._timeout, settings.env
        self._groups = new_torch_groups(self.rank, config, device, *others)
        self._meeting = meeting
        self._on_shutdown = contextlib.ExitStack()
        """What `shutdown` undoes."""

    @classmethod
    def is_running(cls) -> bool:
        return dist.is_initialized()

    @classmethod
    def start(cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None) -> TorchBackend:
        adopted, device, seconds = cls.is_running(), None, settings.start_timeout_seconds
        if adopted:  # the process group that torch.distributed has already
            config = adopted_config()
            chosen = _checked_adopted(config, transport)
            launch = Launch("torch", dist.get_rank(), dist.get_world_size())
            device = needed("devices").adopted_device() if needs_gpus(chosen) else None
        else:
            chosen = cls._own_transport(launch, transport)
        offer = _offer(launch.local_rank, chosen, is_asked=transport is not None)
        with contextlib.ExitStack() as undo, wrapped():
            if adopted:
                board = StoreBoard(launch, env, dist.distributed_c10d._get_default_store())
                meeting = Meeting(board, launch.rank, launch.size, seconds)
            else:
                meeting = meet(launch, env, seconds)
            undo.callback(meeting.close, started=False)
            shared = open_store(meeting, env, seconds, asdict(offer))
            undo.callback(shared.listener.close)
            offers, variables = [Offer(**found) for found in shared.messages], {}
            if not adopted:
                chosen = agreed_transport(offers, launch.rank)
                config, variables = config_of(chosen), gloo_interface(shared.addresses.own, env)
                if "gloo" in config.values():
                    allow_open_files(launch.size)
            if needs_gpus(chosen):
                device = device or needed("devices").bind_device(chosen, offers, launch.rank)
                variables |= needed("devices").error_handling(device, env)
            # Also for the groups that an adopted world makes from now on.
            undo.enter_context(temporary_environment(variables))
            started = cls(chosen, config, device, shared, settings, meeting, adopted)
            if device is not None:  # torch makes no other groups for accelerators without the default group
                started.open_process_group()
            started._on_shutdown.push(undo.pop_all())
        return started

    @classmethod
    def _own_transport(cls, launch: Launch, asked: str | None) -> str:
        """Return the fastest transport of this rank, or the one that the user asks for."""
        if asked is not None:
            cls.check(asked, launch)
        mpi = "mpi" if launch.starts_mpi and extension("mpi") is not None else _FALLBACK
        devices = extension("devices") if accelerator.kind() else None
        chosen = asked or (devices and devices.device_transport()) or mpi
        if chosen == "mpi":
            mpi_transport = needed("mpi_transport")
            if asked is not None:
                mpi_transport.require(launch)
            elif not mpi_transport.start(launch):
                chosen = _FALLBACK
        return chosen

    @classmethod
    def check(cls, transport: str, launch: Launch) -> None:
        family = transport_named(transport)
        if needs_gpus(family) and needed("devices").device_transport() != family:
            built = "" if dist.is_backend_available(transport) else f", since torch is built without {transport}"
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
        groups: Any = self._groups  # those of devices/groups.py, as the transport is bound to a device
        return self.start_step(lambda: groups.make_for_device(ranks))  # type: ignore[no-any-return]

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
        place = self.rank, self.size, self._timeout
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
