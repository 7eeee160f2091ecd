"""The contract between dualdist and a backend.

A `Backend` is one joined world; a `Group` is some of its ranks with a line of their own. A backend implements the few
abstract methods; everything else has a working default here, built on those, that a backend overrides only when its
own is better. All that users see beyond this (averaging, scaling, dtypes, layouts, names, agreement, async handles,
autograd) is written once, above the seam: a Group is only ever called by one thread at a time, in the same order on
all of its ranks, with contiguous tensors on `wire_device` and of a dtype in `reduce_dtypes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..types import Launch, Settings

__all__ = ("Backend", "Group", "Work")


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream is ordered behind it).

        Raises HorovodInternalError when the collective failed, StallError after the group's timeout.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait_for(self, seconds: float) -> None:  # noqa: B027 - most backends go on at once
        """Leave the machine to the collective for at most `seconds`, where that speeds it up. Never raises."""


class Group(ABC):
    """A communicator of its own over some ranks of the world."""

    reduce_dtypes: frozenset[torch.dtype]
    """What `allreduce_` takes; other dtypes are converted above the seam."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        """Global ranks, ascending."""
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """This process's place in `ranks`; -1 when it is not a member."""
        self.size = len(self.ranks)

    @abstractmethod
    def wire_device(self, device: torch.device) -> torch.device:
        """Return where a tensor of `device` must lie to be sent."""

    @abstractmethod
    def allreduce_(self, tensor: torch.Tensor, op: int, lane: str = "") -> Work:
        """Start reducing `tensor` (1-D) in place by `op`: Sum, Min, Max or Product.

        lane: tells collectives apart that are under way at once, and stays the same when one is repeated.
        """

    @abstractmethod
    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        """Start overwriting `tensor` (1-D, uint8) with that of the member at place `root`."""

    @abstractmethod
    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Start filling `output` ((size * n,), uint8) with every member's `tensor` ((n,), uint8), in rank order."""

    @abstractmethod
    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Start filling `output` ((sum(received),), uint8) with what each member sends to this one.

        sent[i] bytes of `tensor` ((sum(sent),), uint8) go to member i, received[i] come from it.
        """

    def allgatherv(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every member's `tensor` ((counts[i],), uint8) behind one another: ((sum(counts),), uint8)."""
        longest = max(counts)
        padded = torch.zeros(longest, dtype=torch.uint8, device=tensor.device)
        padded[: len(tensor)] = tensor
        output = torch.empty(self.size * longest, dtype=torch.uint8, device=tensor.device)
        self.allgather(output, padded).wait()
        rows = output.view(self.size, longest)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    def close(self) -> None:  # noqa: B027 - most groups hold nothing
        """Give back what the group holds. Local."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every member's `message`, all of the same length, in rank order."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(self.size * len(message), dtype=torch.uint8)
        self.allgather(received, sent).wait()
        data = received.numpy().tobytes()
        return [data[start : start + len(message)] for start in range(0, len(data), len(message))]


class Backend(ABC):
    """One joined world. Made by `start`, ended by `shutdown`."""

    name: ClassVar[str]
    transport: str
    rank: int
    size: int
    address: str
    """The IPv4 address at which the other processes reach this one."""

    @classmethod
    @abstractmethod
    def start(
        cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None
    ) -> Backend:
        """Join the world that `launch` describes, or adopt the one that this process has joined. Collective.

        Raises BackendUnavailableError when the backend or the transport cannot run here.
        """

    @classmethod
    @abstractmethod
    def check(cls, transport: str, launch: Launch) -> None:
        """Raise BackendUnavailableError, with the remedy, unless the processes of `launch` can use `transport`. Local.

        It starts nothing, so that it may overlook what shows at the start alone.
        """

    @classmethod
    @abstractmethod
    def is_running(cls) -> bool:
        """Return whether the backend has joined a world in this process already."""

    @classmethod
    def can_start(cls, launch: Launch, env: Mapping[str, str]) -> bool:
        """Return whether the launcher can start this backend without help."""
        return True

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the world. A backend that was adopted is left running. Never raises for a broken world."""

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Group:
        """Return a communicator over `ranks`. Collective over the world, members or not."""

    @property
    @abstractmethod
    def store(self) -> Any | None:
        """A key-value store beside the backend (c10d's Store), None when the world has one process."""

    def add_host_listener(self, listener: Any) -> None:  # noqa: B027 - most launchers have nothing to tell
        """Have `listener.on_hosts_updated(timestamp, change)` called when the launcher changes the hosts of the job.

        change: 1 for removed, 2 for added, 3 for both. The default is for launchers that never do. A listener stays
        when the world is joined anew.
        """

    def remove_host_listener(self, listener: Any) -> None:  # noqa: B027
        """Undo `add_host_listener`."""

    def transport_of(self, device: str) -> str:
        """Return the transport that carries tensors of `device`, a type such as "cpu" or "cuda"."""
        return self.transport

    @classmethod
    def built(cls) -> Mapping[str, bool | int]:
        """Return what is built into the backend, under the names of Horovod's queries; an absent one is False."""
        return {}

    def facts(self) -> Mapping[str, bool | int]:
        """Return what is built into the backend and what is in use, under the names of Horovod's queries."""
        return self.built()
