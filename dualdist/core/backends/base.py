"""The contract between dualdist and a backend.

A `Backend` is one joined world. A `Group` is a communicator over some of its ranks. A backend implements the few
abstract methods; the others have a default here, and a backend overrides one only if its own is faster.

Averaging, scaling, dtype conversion, layouts, names, agreement, async handles and autograd are written once, above the
backends. They guarantee that only one thread at a time calls a Group, in the same order on all of its ranks, with
contiguous tensors on `wire_device` and with a dtype of `reduce_dtypes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch

from ...errors import HorovodInternalError
from ..meeting import Meeting
from ..meeting.links import Listener
from ..types import Launch, Settings

T = TypeVar("T")
Exchange = Callable[[bytes], list[bytes]]
"""exchange(message) returns the `message` of every member of a group, in rank order. Collective over the members."""


class Work(ABC):
    """A collective in progress."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the result. On CUDA: make the current stream wait for it.

        Raises HorovodInternalError when the collective failed, StallError after the group's timeout.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether `wait` would return immediately."""

    def wait_for(self, seconds: float) -> None:  # noqa: B027 - most backends gain nothing by waiting
        """Wait at most `seconds` for the result, if the collective is faster while the caller waits. Never raises."""


class FailedWork(Work):
    """A collective that could not be started. `wait` raises why."""

    def __init__(self, error: HorovodInternalError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True


class CombinedWork(Work):
    """Several collectives in progress."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        return all(work.done() for work in self._works)


class Group(ABC):
    """A communicator over some ranks of the world."""

    # Gloo, NCCL and the MPI group of this package reduce these (c10d's GENERATE_ALL_TYPES in ProcessGroupGloo.cpp and
    # ncclDataType in NCCLUtils.cpp). None of them reduces int16.
    _floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    reduce_dtypes = frozenset({*_floats, torch.uint8, torch.int8, torch.int32, torch.int64})
    """The dtypes that `allreduce_` supports. The caller converts all others."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        """Global ranks, ascending."""
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1
        """The index of this process in `ranks`; -1 when it is not a member."""
        self.size = len(self.ranks)
        self.has_lost_member: Callable[[], bool] = lambda: False
        """Whether a member has ended, or cannot go on. Channel sets it, for transports that do not notice it."""
        self.find_cause: Callable[[], str] = lambda: ""
        """Return the ranks that have ended first, and say so to the others. For a transport that ends the process."""

    @abstractmethod
    def wire_device(self, device: torch.device) -> torch.device:
        """Return the device to which a tensor on `device` must be moved before it is sent."""

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros, ((length,), dtype), for data that is reduced often: in memory where that is fastest. Local."""
        return torch.zeros(length, dtype=dtype, device=device)

    @abstractmethod
    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        """Start reducing `tensor` (1-D) in place by `op`: Sum, Min, Max or Product.

        tag: distinguishes allreduces in progress at the same time. A repeated allreduce has the same tag each time.
        """

    @abstractmethod
    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        """Start overwriting `tensor` (1-D, uint8) with that of member `root`, an index in `ranks`."""

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        """Start `broadcast_` of each of `tensors`, which may be a generator.

        A backend may read it later, also in another thread or in `Work.wait`. After `wait`, all have been read.
        """
        return CombinedWork([self.broadcast_(tensor, root) for tensor in tensors])

    @abstractmethod
    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Start filling `output` ((size * n,), uint8) with each rank's `tensor` ((n,), uint8) in rank order; n > 0."""

    @abstractmethod
    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Start filling `output` ((sum(received),), uint8) with what each member sends to this one.

        sent[i] bytes of `tensor` ((sum(sent),), uint8) go to member i, and received[i] bytes arrive from it.
        """

    def allgatherv(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the concatenation of every member's `tensor` ((counts[i],), uint8): ((sum(counts),), uint8)."""
        longest = max(counts)
        padded = torch.zeros(longest, dtype=torch.uint8, device=tensor.device)
        padded[: len(tensor)] = tensor
        output = torch.empty(self.size * longest, dtype=torch.uint8, device=tensor.device)
        self.allgather(output, padded).wait()
        rows = output.view(self.size, longest)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Return every member's `message`, in rank order. All messages have the same length."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = torch.empty(self.size * len(message), dtype=torch.uint8, device="cpu")
        self.allgather(received, sent).wait()
        data = received.numpy().tobytes()
        return [data[start : start + len(message)] for start in range(0, len(data), len(message))]

    def set_timeout(self, timeout: timedelta) -> None:  # noqa: B027 - not all groups wait
        """Set how long later collectives may take. Local."""

    def close(self) -> None:  # noqa: B027 - most groups hold no resources
        """Release the resources of the group. Local. Safe to call twice."""

    def abandon(self) -> None:  # noqa: B027 - most groups share nothing with a forked process
        """In a forked process, close its copies of the sockets. Local."""

    def unfinished(self) -> object:
        """Return the last collective of a group of `new_device_group`, None if it has ended. Local."""
        return None

    def abort(self) -> None:  # noqa: B027 - most transports notice a failure of a member themselves
        """End the collectives in progress after a failure, without the other members. No others follow. Local."""


class Backend(ABC):
    """One joined world. `start` creates it, `shutdown` ends it."""

    name: ClassVar[str]
    transport: str
    rank: int
    size: int
    address: str
    """The IPv4 address at which the other processes reach this one."""
    device: torch.device | None = None
    """The device to which the transport is bound; None if it is bound to none."""
    runs_ahead = False
    """Whether `Work.wait` returns before the data is there, as on a GPU: it orders streams, and the host runs ahead."""
    store: Any = None
    """A key-value store that all processes share (c10d's Store); None when the world has one process."""
    listener: Listener | None = None
    """Where this process takes the calls of others, with the addresses of all; None in the same case."""
    has_lost_rank: Callable[[], bool] = staticmethod(lambda: False)
    """Whether a rank has died or failed, so that it makes no more groups. Set when the first group is made."""
    _meeting: Meeting | None = None
    """Where this rank has met the others, until `finish_start`; None if it has not, as in a world of one."""

    @classmethod
    @abstractmethod
    def start(cls, launch: Launch, settings: Settings, env: Mapping[str, str], transport: str | None) -> Backend:
        """Join the world that `launch` describes, or adopt the one that this process has joined. Collective.

        Raises BackendUnavailableError when the backend or the transport cannot run here.
        """

    @classmethod
    @abstractmethod
    def check(cls, transport: str, launch: Launch) -> None:
        """Raise BackendUnavailableError, with the fix, unless the processes of `launch` can use `transport`. Local.

        It starts nothing, and therefore misses problems that only `start` can find.
        """

    @classmethod
    @abstractmethod
    def is_running(cls) -> bool:
        """Return whether the backend has already joined a world in this process."""

    @classmethod
    def can_start(cls, launch: Launch, env: Mapping[str, str]) -> bool:
        """Return whether the launcher provides all that this backend needs to start."""
        return True

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the world. An adopted backend keeps running. Never raises for a broken world."""

    def start_step(self, step: Callable[[], T]) -> T:
        """Return `step()`, in which all ranks of the world wait for each other. Collective over the world.

        Before `finish_start`, raises HorovodInternalError, which names the rank, if one ends meanwhile, or does not
        answer when the step has taken longer than `start_timeout_seconds`.
        """
        return step()

    def check_start(self, cause: BaseException | None = None) -> None:
        """Raise HorovodInternalError if another rank is known to have ended, or to have failed. Local.

        cause: an error of this rank that the end of another may have caused. If given, before `finish_start`, wait up
        to 3 s for its report.
        """
        if self._meeting is not None:
            self._meeting.check(cause)
        if cause is None and self.has_lost_rank():
            raise HorovodInternalError("a rank has left")

    def finish_start(self, report: str) -> list[str]:
        """Return every rank's `report`, in rank order. Collective. Called once, when all groups are connected.

        From now on, wait `stall_timeout_seconds` for other ranks, not `start_timeout_seconds`.
        """
        if self._meeting is None:
            return [report]
        # A rank that ends at once must not close connections that others still make.
        reports = self._meeting.gather(report)
        self._meeting.close(started=True)
        self._meeting = None
        return reports

    def abandon(self) -> None:
        """In a forked process, keep its exit from affecting the parent's world. Local."""
        if self.listener is not None:
            self.listener.close()

    @abstractmethod
    def new_groups(
        self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool = False
    ) -> list[Group]:
        """Return `count` communicators over `ranks`. Collective over the world, or over `ranks` if `among_members`.

        exchange: of `ranks`.

        Raises StallError if a rank does not arrive, BackendUnavailableError if the backend cannot connect `ranks`.
        """

    def new_device_group(self, ranks: Sequence[int]) -> Group:
        """Return a communicator over `ranks` for tensors on `device`, if `runs_ahead`. Collective over them alone."""
        raise NotImplementedError

    @abstractmethod
    def open_process_group(self) -> None:
        """Make torch.distributed's default process group, over all ranks, unless the program has made one itself.

        For programs that call torch.distributed. `shutdown` destroys it. Collective over the world.
        """

    def abort_default_group(self) -> None:  # noqa: B027 - most transports notice a failure of a rank themselves
        """Begin to end what is in progress on a device in the default process group of this world. Local."""

    def transport_of(self, device: str) -> str:
        """Return the transport that carries tensors of `device`, a type such as "cpu" or "cuda"."""
        return self.transport


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor.data`. It has a version counter of its own: a collective is no in-place operation for autograd.

    A tensor made in inference mode can only be written in that mode, which makes tensors without version counters: some
    modes of torch do not take them. So return another tensor with the same memory for it.
    """
    if not tensor.is_inference() or tensor.is_neg():
        return tensor.data
    with torch.inference_mode(False):
        same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        same.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return same.conj() if tensor.is_conj() else same
