"""A world of one process. Every collective returns its input, so no other file needs a branch for size 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import ConfigurationError
from ..checks import wrong
from ..launch import temporary_environment
from ..meeting.links import LOOPBACK, interface_of
from ..types import Launch, Settings
from .base import Backend, CombinedWork, Exchange, Group, Work
from .torch_groups import DefaultGroup


class _LocalGroup(Group):
    def wire_device(self, device: torch.device) -> torch.device:
        return device

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        return CombinedWork(())

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return CombinedWork(())

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        output.copy_(tensor)
        return CombinedWork(())

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        output.copy_(tensor)
        return CombinedWork(())


class LocalBackend(Backend):
    name = "local"
    transport = "local"
    rank = 0
    size = 1
    address = LOOPBACK

    def __init__(self, settings: Settings) -> None:
        self._default_group = DefaultGroup()
        self._timeout = timedelta(seconds=settings.stall_timeout_seconds)

    @classmethod
    def start(cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None) -> LocalBackend:
        if launch.size != 1:
            raise ConfigurationError(
                f"`backend` must be torch or horovod, but is 'local' instead while the world size is "
                f"{launch.describe('size')}. The local backend is for a single process."
            )
        if transport is not None:
            cls.check(transport, launch)
        return cls(settings)

    @classmethod
    def check(cls, transport: str, launch: Launch) -> None:
        if transport != cls.transport:
            fix = "Choose the backend torch to use it in a single process."
            raise wrong("transport", "absent for the local backend", transport, fix, ConfigurationError)

    @classmethod
    def is_running(cls) -> bool:
        return False

    def open_process_group(self) -> None:
        with temporary_environment({"GLOO_SOCKET_IFNAME": interface_of(self.address)}):
            self._default_group.open({"cpu": "gloo"}, dist.HashStore(), self.rank, self.size, self._timeout)

    def shutdown(self) -> None:
        self._default_group.close()

    def new_groups(
        self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool = False
    ) -> list[Group]:
        return [_LocalGroup(ranks, self.rank) for _ in range(count)]
