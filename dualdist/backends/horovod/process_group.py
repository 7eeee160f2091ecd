"""A process group of torch.distributed whose collectives run on Horovod, for programs such as communication hooks.

Only what hooks and model averaging use is here. Horovod matches collectives by name: those of equal kind, dtype and
size are numbered, so that several can be in progress. The name of an operation repeats, which Horovod's cache needs.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...types import Max, Min, Product, Sum
from ..base import Group, Work

__all__ = ("NAME", "HorovodProcessGroup", "HorovodProcessGroupWork", "NamedGroup")

NAME = "horovod"

_OPS = {
    dist.ReduceOp.SUM: Sum,
    dist.ReduceOp.AVG: Sum,
    dist.ReduceOp.MIN: Min,
    dist.ReduceOp.MAX: Max,
    dist.ReduceOp.PRODUCT: Product,
}
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
_NUMBERS = 64
"""How many operations of equal kind, dtype and size can be in progress at once."""

NamedGroup = Callable[[str], Group]
"""Returns a group of the same ranks whose operations have names with this prefix."""
Tensors = list[torch.Tensor]


class HorovodProcessGroupWork(dist.Work):
    """A collective on Horovod, and what remains to be done on this rank after it."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], None], result: Tensors) -> None:
        super().__init__()
        self._works = list(works)
        self._finish = finish
        self._result = result
        self._lock = threading.Lock()
        self._ended = False
        self._error: Exception | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._ended:
                try:
                    for work in self._works:
                        work.wait()
                    with torch.inference_mode(self._is_inference()), torch.no_grad():
                        self._finish()
                except Exception as error:
                    self._error = error
                self._ended = True
        if self._error is not None:
            raise self._error
        return True

    def _is_inference(self) -> bool:
        return any(tensor.is_inference() for tensor in self._result)

    def is_completed(self) -> bool:
        return self._ended or all(work.done() for work in self._works)

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        return self._result

    def get_future(self) -> Any:
        """Return a future of the result. Its callbacks run in a thread of their own, so they may wait for others."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._works:
                threading.Thread(target=self._fulfil, name="dualdist-horovod-future", daemon=True).start()
            else:
                self._fulfil()
        return self._future

    def _fulfil(self) -> None:
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)


class HorovodProcessGroup(dist.ProcessGroup):
    """The collectives of torch.distributed over the ranks of a Horovod process set."""

    def __init__(self, name: str, rank: int, size: int, named_group: NamedGroup) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._desc = rank, size, name, "undefined"
        self._named_group = named_group
        self._groups: dict[str, Group] = {}
        self._numbers: dict[str, Iterator[int]] = defaultdict(lambda: itertools.cycle(range(_NUMBERS)))
        self._lock = threading.Lock()
        self._is_shut = False

    def getBackendName(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    # The base class stores the names in a C++ backend, which this group does not have.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """Let collectives in progress raise. Horovod itself runs until the world is left."""
        self._is_shut = True

    abort = shutdown

    def _group_for(self, kind: str, tensor: torch.Tensor) -> Group:
        key = f"{kind}.{tensor.dtype}.{tensor.numel()}"
        with self._lock:
            name = f"{key}.{next(self._numbers[key])}"
            if name not in self._groups:
                group = self._groups[name] = self._named_group(name)
                group.has_lost_member = lambda: self._is_shut
            return self._groups[name]

    def _on_wire(self, tensor: torch.Tensor, group: Group, dtype: torch.dtype | None = None) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        return flat.to(group.wire_device(tensor.device), dtype or tensor.dtype).contiguous()

    def _as_bytes(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return self._on_wire(tensor, group).view(torch.uint8)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> tuple[list[Work], Callable[[], torch.Tensor]]:
        """Start a reduction; return its works, and a function that returns the result, of the shape of `tensor`."""
        op = getattr(op, "op", op)
        if op not in _OPS:
            raise RuntimeError(f"Horovod: `op` must be SUM, AVG, MIN, MAX or PRODUCT, but is {op} instead.")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        group = self._group_for(f"allreduce.{op}", real)
        wire = self._on_wire(real, group, _WIDER.get(real.dtype, real.dtype))
        if wire.data_ptr() == tensor.data_ptr() and not tensor.is_contiguous():
            wire = wire.clone()
        works = [group.allreduce_(wire, _OPS[op])] if wire.numel() else []

        def result() -> torch.Tensor:
            reduced = wire / self._size if op == dist.ReduceOp.AVG else wire
            reduced = reduced.view(real.shape)
            if tensor.dtype is torch.bool:
                return reduced != 0
            return torch.view_as_complex(reduced) if tensor.is_complex() else reduced

        return works, result

    def allreduce(self, tensors: Tensors, opts: Any = None) -> HorovodProcessGroupWork:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        pairs = [self._reduce(tensor, op) for tensor in tensors]

        def finish() -> None:
            for tensor, (_, result) in zip(tensors, pairs, strict=True):
                _overwrite(tensor, result())

        return HorovodProcessGroupWork([work for works, _ in pairs for work in works], finish, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> HorovodProcessGroupWork:  # type: ignore[override]
        works, result = self._reduce(tensors[0].clone(), opts.reduceOp)

        def finish() -> None:
            if self._rank == opts.rootRank:
                _overwrite(tensors[0], result())

        return HorovodProcessGroupWork(works, finish, tensors)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> HorovodProcessGroupWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        works, result = self._reduce(torch.stack(inputs[0]), op)
        return HorovodProcessGroupWork(works, lambda: _overwrite(outputs[0], result()[self._rank]), outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> HorovodProcessGroupWork:
        return self.reduce_scatter([output], [list(tensor.chunk(self._size))], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def broadcast(self, tensors: Tensors, opts: Any) -> HorovodProcessGroupWork:  # type: ignore[override]
        tensor = tensors[0]
        group = self._group_for(f"broadcast.{opts.rootRank}", tensor)
        data = self._as_bytes(tensor, group)
        works = [group.broadcast_(data, opts.rootRank)] if data.numel() else []
        return HorovodProcessGroupWork(works, lambda: _overwrite(tensor, data.view(tensor.dtype)), tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> HorovodProcessGroupWork:
        rows, tensor = outputs[0], tensors[0]
        group = self._group_for("allgather", tensor)
        data = self._as_bytes(tensor, group)
        gathered = data.new_empty(self._size * data.numel())
        works = [group.allgather(gathered, data)] if data.numel() else []

        def finish() -> None:
            for row, part in zip(rows, gathered.view(tensor.dtype).chunk(self._size), strict=True):
                _overwrite(row, part)

        return HorovodProcessGroupWork(works, finish, rows)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> HorovodProcessGroupWork:
        return self.allgather([list(output.chunk(self._size))], [tensor])

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: list[int],
        sent: list[int],
        opts: Any = None,
    ) -> HorovodProcessGroupWork:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        even = [tensor.shape[0] // self._size] * self._size
        group = self._group_for("alltoall", tensor)
        data = self._as_bytes(tensor, group)
        got = data.new_empty(output.numel() * output.element_size())
        counts = [[count * row for count in splits or even] for splits in (received, sent)]
        work = group.alltoall(got, data, *counts)
        return HorovodProcessGroupWork([work], lambda: _overwrite(output, got.view(output.dtype)), [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> HorovodProcessGroupWork:
        return self.allreduce([torch.zeros(1)])


def _overwrite(tensor: torch.Tensor, data: torch.Tensor) -> None:
    if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
        tensor.copy_(data.reshape(tensor.shape))
