"""A process group for torch.distributed over mpi4py. It works with a PyTorch that was built without MPI.

    import dualdist.mpi.transport
    torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")    # rank and size are MPI's

Every collective is non-blocking, on a communicator of its process group alone. A progress thread moves the data while
Python computes, and ends collectives that exceed the group's timeout. Only tensors on the CPU are supported.

communicator.py has the collectives as MPI requests, and work.py the objects that calls return, with the thread that
tests them. Here are the methods that torch.distributed calls. torch 2.14 renamed some (`_allgather_base` became
`all_gather_single`), so they have both names.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..core.backends.torch_groups import open_store
from ..core.compiling import not_compiled
from ..core.launch import detect
from ..core.meeting import Meeting
from ..core.types import Launch
from ..errors import BackendUnavailableError
from . import meeting as mpi
from .communicator import Communicator, Operation
from .work import FORKED, MpiWork, given_up, progress

__all__ = ("NAME", "create", "register", "require", "start")

NAME = "mpi4py"
"""torch's name for the backend."""

# The start of MPI, and torch.distributed's rendezvous through MPI.


def start(launch: Launch) -> bool:
    """Start MPI. Return whether it joins the processes of `launch` and allows calls from any thread."""
    library = mpi.library()
    return mpi.world_size() == launch.size and bool(library.Query_thread() >= library.THREAD_SERIALIZED)


def require(launch: Launch) -> None:
    """Start MPI. Raises BackendUnavailableError unless it joins the processes of `launch`."""
    library = mpi.library()
    if library is None:
        raise BackendUnavailableError(
            "`transport` is 'mpi', but mpi4py is not usable here. "
            "Install MPI and mpi4py (pip install mpi4py), or choose gloo."
        )
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise BackendUnavailableError(
            "MPI must allow calls from any thread, but was started for a single thread instead. "
            "Leave mpi4py.rc.threads and thread_level alone, or use an MPI with thread support, or choose gloo."
        )
    if start(launch):
        return
    version = library.Get_library_version().split(",")[0].splitlines()[0].strip()
    raise BackendUnavailableError(
        f"`transport` is 'mpi', but MPI's world has {mpi.world_size()} processes while the world size is "
        f"{launch.describe('size')}: mpi4py runs on {version}, which {launch.launcher} did not start. Start with the "
        "mpirun of that library, build mpi4py for the launcher's library (pip install --force-reinstall --no-binary "
        "mpi4py mpi4py), or choose gloo."
    )


def _meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
    """Yield (store, rank, size) once, as a rendezvous handler does. Collective over MPI's world."""
    launch = detect(os.environ, mpi.world_size)
    require(launch if launch.by_launcher else Launch("MPI", size=max(1, mpi.world_size())))
    world = mpi.library().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    board, seconds = mpi.MpiBoard(Launch("MPI", rank, size), os.environ), timeout.total_seconds()
    with Meeting(board, rank, size, seconds) as meeting:
        shared = open_store(meeting, os.environ, seconds)
        shared.listener.close()
    yield shared.store, rank, size


# Communicators of destroyed process groups, until all members know that none of them uses one any more.
#
# MPI_Comm_free does not wait for the other members. When one of them has given up a collective, its messages may arrive
# later. Open MPI 4.1 keeps a message for an unknown communicator until the next one with the same number exists, and
# then crashes or delivers it there (mca_pml_ob1_add_comm in ompi/mca/pml/ob1/pml_ob1.c). So a communicator is freed
# only when its members meet again, to make another one, and all of them have destroyed its group without such a
# collective.

_TOKEN_BYTES = 8
Label = tuple[str, Sequence[int]]
"""What the members of a communicator call it: a token, and their ranks in MPI's world."""
_closed: dict[Label, Any] = {}
"""The communicators that this process does not use any more, also in no request."""


def create(options: Any, backend_options: object = None) -> MpiProcessGroup:
    """Make a process group. Collective over its members, which exchange their MPI ranks through the store.

    options: c10d's DistributedBackendOptions, or an object with the same attributes.

    Raises BackendUnavailableError when MPI is not usable, or does not allow calls from the progress thread.
    """
    if progress.forked:
        raise RuntimeError(FORKED)
    library = mpi.library()
    require(Launch("MPI", size=max(1, mpi.world_size())))
    if library.Query_thread() < library.THREAD_MULTIPLE and isinstance(progress.calls, nullcontext):
        progress.calls = threading.RLock()
    store, world = options.store, library.COMM_WORLD
    own = world.Get_rank(), secrets.token_hex(_TOKEN_BYTES), [token for token, _ in _closed]
    store.set(f"mpi/{options.group_rank}", json.dumps(own))
    messages = [json.loads(store.get(f"mpi/{place}")) for place in range(options.group_size)]
    ranks, tokens, known = zip(*messages, strict=True)
    closed_by = dict(zip(ranks, known, strict=True))
    if len(closed_by) < len(ranks):
        raise BackendUnavailableError(
            f"Every member must have an MPI rank of its own, but they have {[*ranks]} instead. Start with mpirun."
        )
    with progress.calls:
        for label in sorted(_closed):  # by token: MPI_Comm_free is collective, so all use one order
            if all(label[0] in closed_by.get(rank, ()) for rank in label[1]):
                _closed.pop(label).Free()
        all_ranks = world.Get_group()
        members = all_ranks.Incl(ranks)
        tag = zlib.crc32(str(options.group_id).encode()) & 0x7FFF
        with mpi.unfinished():
            communicator = world.Create_group(members, tag=tag)
        members.Free()
        all_ranks.Free()
    return MpiProcessGroup(communicator, (tokens[0], ranks), str(options.group_id), options.timeout)


# Ranges in torch's profiler, named as those of torch's own groups: `mpi4py:all_reduce` as `gloo:all_reduce`.

_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def profiler_range(what: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Start a range if a profiler is running. Return a future whose result ends it, from any thread; None if none is.

    what: the call, such as "allreduce" or "recv from 1". inputs: the tensors whose shapes the range shows.
    """
    if not torch._C._autograd._profiler_enabled():
        return None
    name = what.split()[0]
    started = torch._C._autograd._record_function_with_args_enter(f"{NAME}:{_NAMES.get(name, name)}", *inputs)
    end: Any = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(started, end)
    return end


T = TypeVar("T")
Tensors = list[torch.Tensor]
_KEPT_WORKS, _SMALL_BYTES = 1024, 64


@not_compiled
class MpiProcessGroup(dist.ProcessGroup):
    """The collectives of torch.distributed, on a communicator that no other group uses."""

    supports_splitting = False
    supports_coalescing = False
    broadcasts_lists = True
    """Whether `broadcast` takes more than one tensor. Gloo's and NCCL's do not."""

    def __init__(self, communicator: Any, label: Label, name: str, timeout: timedelta) -> None:
        self._label = label
        self._communicator: Communicator | None = Communicator(communicator)
        # Without a store: torch 2.11 and 2.13 do not construct a subclass in Python with it.
        super().__init__(self._communicator.rank, self._communicator.size)
        self._rank, self._size = self._communicator.rank, self._communicator.size
        self._name = name
        self.seconds = timeout.total_seconds()
        self._coalesced: list[MpiWork] | None = None
        """What was started between `_start_coalescing` and `_end_coalescing`; None outside of them."""
        self._recent: deque[MpiWork] = deque(maxlen=_KEPT_WORKS)
        """Works with small results. C++ may still use one without keeping its Python half alive, as torch's DDP does in
        `join` with the work of a collective of one number."""
        self.unsettled = False
        """Whether MPI may still work on requests that were given up. Then the communicator must not be freed."""
        progress.enter(self)

    def __str__(self) -> str:
        return f"rank {self._rank} of {self._size} in group {self._name!r}"

    def getBackendName(self) -> str:
        return NAME

    # The base class stores the name in a C++ backend, which this group does not have.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices for objects and barriers. torch.distributed.checkpoint.async_save needs the CPU among them."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Give up the calls in progress. Local. A later `create` frees the communicator, or the end of MPI does."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or progress.forked:
            return
        progress.leave(self)
        self._recent.clear()
        if not self.unsettled and not mpi.is_failing():
            _closed[self._label] = communicator.comm

    def abort(self) -> None:
        """Let calls in progress raise. Local. The communicator is freed when MPI ends."""
        self.unsettled = True
        self.shutdown()

    @property
    def _usable(self) -> Communicator:
        """The communicator. Raises RuntimeError in a forked child, and after `shutdown`."""
        if progress.forked:
            raise RuntimeError(FORKED)
        if self._communicator is None:
            raise RuntimeError(f"MPI: the process group was destroyed on {self}. Make a new one.")
        return self._communicator

    def _start(
        self,
        what: str,
        operations: Sequence[Operation],
        result: Tensors,
        opts: Any = None,
        *,
        inputs: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> MpiWork:
        """Start `operations` in this order.

        opts: of torch, for their timeout. inputs: for the profiler, by default `result`. options: as for MpiWork.
        """
        for operation in operations:
            next(operation)  # checks its arguments
        span = profiler_range(what, result if inputs is None else inputs)
        requests: list[Any] = []
        try:
            with progress.calls:
                for operation in operations:
                    requests.extend(itertools.takewhile(lambda request: request is not None, operation))
        except RuntimeError as error:
            # Its traceback keeps the frame of the operation, and with it the buffers that MPI may still use.
            given_up.append(error)
            MpiWork(what, self, requests, operations, result=[], range_=span).give_up("its start failed")
            raise RuntimeError(f"MPI: {what} failed on {self}: {error}.") from error
        requests.reverse()  # MpiWork tests the last one first
        work = MpiWork(what, self, requests, operations, result=result, range_=span, seconds=_seconds(opts), **options)
        progress.add(work)
        if sum(tensor.nbytes for tensor in result if not tensor.is_sparse) <= _SMALL_BYTES:
            self._recent.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _by_member(self, what: str, tensors: Sequence[T]) -> dict[int, T]:
        """Return what `tensors` has for each member. Raises RuntimeError unless it has one entry for each."""
        if len(tensors) != self._size:
            raise RuntimeError(
                f"`{what}` must be {self._size} tensors, one per member, but is {len(tensors)} instead. Give one for "
                "each."
            )
        return dict(enumerate(tensors))

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        """Return one work for all works since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return self._start("several calls", [_all(works)], [tensor for work in works for tensor in work.result()])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:  # type: ignore[override]
        communicator, op = self._usable, _op(opts)
        sparse = [tensor for tensor in tensors if tensor.is_sparse]
        if sparse and op != dist.ReduceOp.SUM:  # as gloo
            raise RuntimeError(f"The reduction of sparse tensors must be SUM, but is {op} instead.")
        operations = [communicator.allreduce(tensor, op) for tensor in tensors if not tensor.is_sparse]
        work = self._start("allreduce", operations, tensors, opts)
        for tensor in sparse:
            self._sum_sparse(tensor)
        return work

    allreduce_coalesced = allreduce

    def _sum_sparse(self, tensor: torch.Tensor) -> None:
        """Sum a sparse tensor (COO) of each member, which may have different numbers of elements, and wait for it.

        Every member gathers all, and adds in the order of the members.
        """
        own = tensor.detach().coalesce()
        indices, values = own.indices(), own.values()
        counts = torch.empty(self._size, dtype=torch.int64, device="cpu")
        self.all_gather_single(counts, torch.tensor([len(values)], device="cpu")).wait()
        all_indices = [indices.new_empty(len(indices), count) for count in counts.tolist()]
        all_values = [values.new_empty(count, *values.shape[1:]) for count in counts.tolist()]
        self.allgather([all_indices], [indices]).wait()
        self.allgather([all_values], [values]).wait()
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            given = torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape
            rows = torch.sparse_coo_tensor(*given, device=values.device, check_invariants=True)
            tensor.copy_(rows.coalesce())

    def reduce(self, tensors: Tensors, opts: Any) -> MpiWork:  # type: ignore[override]
        return self._start("reduce", [self._usable.reduce(tensors[0], _op(opts), opts.rootRank)], tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> MpiWork:  # type: ignore[override]
        rows = self._by_member("inputs", inputs[0])
        operation = self._usable.reduce_scatter(outputs[0], [*rows.values()], _op(opts))
        return self._start("reduce_scatter", [operation], outputs, opts, inputs=inputs[0])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        pairs, op = zip(outputs, inputs, strict=True), _op(opts)
        operations = [self._usable.reduce_scatter(output, [tensor], op) for output, tensor in pairs]
        return self._start("reduce_scatter", operations, outputs, opts, inputs=inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def broadcast(self, tensors: Tensors, opts: Any) -> MpiWork:  # type: ignore[override]
        operations = [self._usable.broadcast(tensor, opts.rootRank) for tensor in tensors]
        return self._start("broadcast", operations, tensors, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        operations = [self._usable.allgather(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._start("allgather", operations, outputs, opts, inputs=inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> MpiWork:  # type: ignore[override]
        return self.allgather_coalesced([[output] for output in outputs[0]], tensors, opts)

    def allgather_coalesced(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> MpiWork:
        """outputs: for each member, a list with one tensor for each of `tensors`."""
        by_member = self._by_member("outputs", outputs)
        operations = [
            self._usable.exchange(dict.fromkeys(by_member, tensor), dict(zip(by_member, rows, strict=True)))
            for tensor, rows in zip(tensors, zip(*by_member.values(), strict=True), strict=True)
        ]
        gathered = [tensor for rows in outputs for tensor in rows]
        return self._start("allgather", operations, gathered, opts, inputs=tensors)

    def gather(self, outputs: list[Tensors], tensors: Tensors, opts: Any) -> MpiWork:  # type: ignore[override]
        rows = self._by_member("outputs", outputs[0]) if self._rank == opts.rootRank else {}
        operation = self._usable.exchange({opts.rootRank: tensors[0]}, rows)
        return self._start("gather", [operation], [*rows.values()], opts, inputs=tensors)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        is_root = self._rank == opts.rootRank
        return self.gather([list(output.chunk(self._size))] if is_root else [], [tensor], opts)

    gather_into_tensor = gather_single  # type: ignore[assignment]

    def scatter(self, outputs: Tensors, tensors: list[Tensors], opts: Any) -> MpiWork:  # type: ignore[override]
        rows = self._by_member("inputs", tensors[0]) if self._rank == opts.rootRank else {}
        operation = self._usable.exchange(rows, {opts.rootRank: outputs[0]})
        return self._start("scatter", [operation], outputs, opts, inputs=[*rows.values()])

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> MpiWork:
        operation = self._usable.alltoall(output, tensor, received, sent)
        return self._start("alltoall", [operation], [output], opts, inputs=[tensor])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> MpiWork:
        operation = self._usable.exchange(self._by_member("inputs", tensors), self._by_member("outputs", outputs))
        return self._start("alltoall", [operation], outputs, opts, inputs=tensors)

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", [self._usable.barrier()], [], opts)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> MpiWork:
        return self._start(f"send to {to}", [self._usable.send(tensors[0], to, tag)], tensors, expires=False)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> MpiWork:
        return self._receive(f"recv from {source}", tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MpiWork:
        return self._receive("recv from any source", tensors, None, tag)

    def _receive(self, what: str, tensors: Tensors, source: int | None, tag: int) -> MpiWork:
        status = mpi.library().Status()
        operation = self._usable.recv(tensors[0], source, tag, status)
        return self._start(what, [operation], tensors, status=status, expires=False)


def _all(works: Sequence[MpiWork]) -> Operation:
    yield
    yield from works  # which can be tested like requests
    yield
    for work in works:
        work.wait()


def _op(opts: Any) -> Any:
    """Return the type of the ReduceOp, which is hashable."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return getattr(op, "op", op)


def _seconds(opts: Any) -> float | None:
    """Return the timeout of one call; None if the call has none, which torch writes as -1 ms."""
    seconds = 0.0 if opts is None else float(opts.timeout.total_seconds())
    return seconds if seconds > 0 else None


# torch 2.15 attaches its flight recorder to groups with devices, which ends the process if the group is in Python.
_not_recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_not_recorded.add(NAME)


@functools.cache
def register() -> None:
    """Register the backend and its rendezvous. The import of this module does it. torch >= 2.14 calls it by itself."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler(NAME, _meet)


register()
