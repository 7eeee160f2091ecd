"""A c10d process group in Python over mpi4py, so that torch.distributed runs over MPI without a rebuilt PyTorch.

What it guarantees: every collective is a non-blocking one of MPI on a communicator of the group's own, so those of
several groups may be under way at once, and waiting ends at the group's timeout. What it lacks: MPI makes progress only
while somebody waits, so data moves mostly then; tensors on the CPU alone; `get_future`, which DDP uses, waits first.
Waiting yields the core at once and sleeps after a while, where MPI itself would spin.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError
from ..launch import mpi
from ..types import Launch

__all__ = ("NAME", "is_usable", "require")

NAME = "dualdist_mpi"

_SPIN_SECONDS, _SLEEP_SECONDS = 0.2, 0.001
_PIECE_BYTES = 4 << 20
_OPS = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.PRODUCT: "PROD",
}
_unfinished: list[dist.Work] = []
"""What was given up: MPI may still write there when the late rank comes."""
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
"""What MPI has no type for, and what is sent in its place."""


def is_usable(launch: Launch) -> bool:
    """Return whether MPI joins the processes of `launch`. Starts MPI."""
    return mpi.world_size() == launch.size


def require(launch: Launch) -> None:
    """Raise BackendUnavailableError unless MPI joins the processes of `launch`."""
    if mpi.library() is None:
        raise BackendUnavailableError(
            "`transport` is 'mpi', but mpi4py is not usable here. "
            "Install MPI and mpi4py (pip install 'dualdist[mpi]'), or choose gloo."
        )
    if not is_usable(launch):
        raise BackendUnavailableError(
            f"`transport` is 'mpi', but MPI's world has {mpi.world_size()} processes while the world size is "
            f"{launch.describe('size')}. Start with mpirun, or choose gloo."
        )


class _Work(dist.Work):
    """Requests of MPI, and what to do with their result."""

    def __init__(
        self, requests: list[Any], finish: Callable[[], None], result: list[torch.Tensor], timeout: timedelta
    ) -> None:
        super().__init__()
        self._requests = requests
        self._finish = finish
        self._result = result
        self._timeout = timeout

    def is_completed(self) -> bool:
        if self._requests and all(request.Test() for request in self._requests):
            self._requests = []
            self._finish()
        return not self._requests

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start = time.monotonic()
        limit = (timeout or self._timeout).total_seconds()
        while not self.is_completed():
            waited = time.monotonic() - start
            if waited > limit:
                _unfinished.append(self)
                raise RuntimeError(f"MPI: timed out after {limit:.0f} s.")
            time.sleep(0 if waited < _SPIN_SECONDS else _SLEEP_SECONDS)
        return True

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class _Buffer:
    """A tensor as MPI takes it: contiguous, of a type that MPI knows; written back by `finish`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.sent = tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype)).contiguous()
        self.array = self.sent.view(-1).numpy() if self.sent.dim() else self.sent.reshape(1).numpy()

    def finish(self) -> None:
        if self.sent.data_ptr() != self._tensor.data_ptr():
            self._tensor.detach().copy_(self.sent)


class _ProcessGroup(dist.ProcessGroup):
    """The collectives that torch.distributed, DDP and dualdist use."""

    def __init__(self, rank: int, size: int, communicator: Any, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size = size
        self._rank = rank
        self._comm = communicator
        self._timeout = timeout
        self._mpi = mpi.library()

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name  # the base class keeps it in a C++ backend, which this group has not

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def shutdown(self) -> None:
        """Give the communicator back. Collective in name; a rank that fails leaves it to MPI's end."""
        communicator, self._comm = self._comm, None
        if communicator is not None and not mpi.is_failing():
            communicator.Free()

    def _started(self, request: Any, buffers: Sequence[_Buffer], result: list[torch.Tensor]) -> _Work:
        def finish() -> None:
            for buffer in buffers:
                buffer.finish()

        return _Work([request], finish, result, self._timeout)

    def _op(self, op: Any) -> Any:
        return getattr(self._mpi, _OPS[getattr(op, "op", op)])

    def _averaging(self, op: Any, buffer: _Buffer) -> Callable[[], object]:
        """Return what to do before `buffer` is written back."""
        if getattr(op, "op", op) != dist.ReduceOp.AVG:
            return lambda: None
        return lambda: buffer.sent.div_(self._size)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        (tensor,) = tensors
        buffer = _Buffer(tensor)
        average = self._averaging(op, buffer)
        requests = [
            self._comm.Iallreduce(self._mpi.IN_PLACE, piece, op=self._op(op))  # type: ignore[union-attr]
            for piece in _pieces(buffer.array)
        ]

        def finish() -> None:
            average()
            buffer.finish()

        return _Work(requests, finish, tensors, self._timeout)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:  # type: ignore[override]
        buffer = _Buffer(tensors[0])
        return self._started(self._comm.Ibcast(buffer.array, root=opts.rootRank), [buffer], tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        received, sent = _Buffer(output), _Buffer(tensor)
        return self._started(self._comm.Iallgather(sent.array, received.array), [received], [output])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        whole = tensors[0].new_empty((self._size, *tensors[0].shape))
        work = self._allgather_base(whole, tensors[0])
        return _Then(
            work, lambda: [out.copy_(row) for out, row in zip(outputs[0], whole, strict=True)], outputs[0]
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: list[int],
        sent: list[int],
        opts: Any = None,
    ) -> _Work:
        into, out = _Buffer(output), _Buffer(tensor)
        arguments = [_blocks(side, splits, self._size) for side, splits in ((out, sent), (into, received))]
        return self._started(self._comm.Ialltoallv(*arguments), [into], [output])

    def barrier(self, opts: Any = None) -> _Work:
        return self._started(self._comm.Ibarrier(), [], [])

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> _Work:  # type: ignore[override]
        copy = [tensors[0].clone()]
        work = self.allreduce(copy, opts)
        return _Then(work, lambda: self._rank == opts.rootRank and tensors[0].copy_(copy[0]), tensors)

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any) -> _Work:  # type: ignore[override]
        rows = (
            outputs
            if self._rank == opts.rootRank
            else [[torch.empty_like(tensors[0]) for _ in range(self._size)]]
        )
        return self.allgather(rows, tensors)

    def scatter(self, outputs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any) -> _Work:  # type: ignore[override]
        is_root = self._rank == opts.rootRank
        rows = torch.stack(tensors[0]) if is_root else outputs[0].new_empty((self._size, *outputs[0].shape))
        work = self.broadcast([rows], opts)
        return _Then(work, lambda: outputs[0].copy_(rows[self._rank]), outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> _Work:
        whole = tensor.clone()
        work = self.allreduce([whole], opts)
        return _Then(
            work, lambda: output.copy_(whole.view(self._size, -1)[self._rank].view_as(output)), [output]
        )

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any
    ) -> _Work:
        return self._reduce_scatter_base(outputs[0], torch.stack(tensors[0]), opts)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> _Work:
        buffer = _Buffer(tensors[0])
        return self._started(self._comm.Isend(buffer.array, dest=dst, tag=tag), [], tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> _Work:
        buffer = _Buffer(tensors[0])
        return self._started(self._comm.Irecv(buffer.array, source=src, tag=tag), [buffer], tensors)


class _Then(_Work):
    """A work with something to do behind another one."""

    def __init__(self, work: _Work, finish: Callable[[], Any], result: list[torch.Tensor]) -> None:
        def both() -> None:
            first()
            finish()

        first = work._finish
        super().__init__(work._requests, both, result, work._timeout)


def _pieces(array: Any) -> list[Any]:
    """Return `array` (1-D) in pieces that are reduced side by side: Open MPI adds one up while it sends the next."""
    length = max(1, _PIECE_BYTES // array.itemsize)
    return [array[start : start + length] for start in range(0, max(1, array.size), length)]


def _blocks(buffer: _Buffer, splits: list[int], size: int) -> list[Any]:
    """Return (array, (counts, displacements)) for rows that are split over the ranks; no splits: equally."""
    rows = buffer.sent.shape[0]
    width = buffer.array.size // rows if rows else 0
    counts = [count * width for count in splits or [rows // size] * size]
    starts = [0, *itertools.accumulate(counts)][:-1]
    return [buffer.array, (counts, starts)]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> _ProcessGroup:
    """Make the communicator of a group. Collective over its members, who tell their MPI ranks through `store`."""
    library: Any = mpi.library()
    world = library.COMM_WORLD
    store.set(f"mpi/{rank}", str(world.Get_rank()))
    members = world.Get_group().Incl([int(store.get(f"mpi/{place}")) for place in range(size)])
    return _ProcessGroup(rank, size, world.Create_group(members), timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu"])
