"""Prepares tensors for MPI: contiguous, on the CPU, and, for a reduction, of a dtype that MPI can combine.

MPI counts in 32-bit integers, and Open MPI 4 also computes count times rank in 32 bits. Therefore no message is larger
than `LARGEST_BYTES`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...rendezvous import mpi

__all__ = ("PIECE_BYTES", "Buffer", "MpiReduction", "fits", "mpi_reduction", "overlap")

LARGEST_BYTES = 1 << 30
PIECE_BYTES, _MOST_PIECES = 4 << 20, 64
"""Reductions are split into pieces that run concurrently: Open MPI combines one while it sends the next."""

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_Op = dist.ReduceOp
_COMMON = {_Op.SUM: "SUM", _Op.PRODUCT: "PROD"}
_ORDERED = {_Op.MIN: "MIN", _Op.MAX: "MAX"}
_AVERAGE = {_Op.AVG: "SUM"}
_BITS = {_Op.BAND: "BAND", _Op.BOR: "BOR", _Op.BXOR: "BXOR"}
_OPS: dict[str, dict[Any, str]] = {
    "real": {**_COMMON, **_ORDERED, **_AVERAGE},
    "complex": {**_COMMON, **_AVERAGE},
    "integer": {**_COMMON, **_ORDERED, **_AVERAGE, **_BITS},
    "bool": {
        _Op.SUM: "BOR",
        _Op.PRODUCT: "BAND",
        **_ORDERED,
        **_BITS,
    },
}
"""kind of dtype -> torch's op -> MPI's op. A sum of bools is a bitwise or (BOR), as in NCCL:
added as uint8, 256 times True would overflow to 0."""


@dataclass(frozen=True)
class MpiReduction:
    """How MPI combines tensors of one dtype by one operation."""

    dtype: torch.dtype
    """The dtype in which MPI combines: float32 for smaller floating types, so that the result is rounded only once."""
    datatype: Any
    op: Any
    averages: bool


@functools.cache
def _reduction(dtype: torch.dtype, op: Any) -> MpiReduction:
    if dtype == torch.bool:
        kind, wire = "bool", torch.uint8
    elif dtype.is_complex:
        kind, wire = "complex", dtype
    elif dtype.is_floating_point:
        kind, wire = "real", torch.float32 if dtype.itemsize < 4 else dtype
    else:
        kind, wire = "integer", dtype
    if wire not in _TYPES or op not in _OPS[kind]:
        known = ", ".join(known.name for known in _OPS[kind]) if wire in _TYPES else "nothing"
        raise RuntimeError(
            f"The reduction of {dtype} over MPI must be one of {known}, but is {getattr(op, 'name', op)} instead. "
            "Convert the tensor, or scale it and use SUM."
        )
    library: Any = mpi.library()
    return MpiReduction(wire, getattr(library, _TYPES[wire]), getattr(library, _OPS[kind][op]), op == _Op.AVG)


def mpi_reduction(dtype: torch.dtype, op: Any) -> MpiReduction:
    """Return how MPI combines `dtype` by `op`, a ReduceOp or its type. Raises RuntimeError when MPI cannot."""
    return _reduction(dtype, getattr(op, "op", op))


class Buffer:
    """A tensor's own memory if possible, else a copy that `finish` writes back."""

    def __init__(self, tensor: torch.Tensor, how: MpiReduction | None = None) -> None:
        """how: the reduction of the tensor; None to send its bytes unchanged."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise RuntimeError(
                f"A tensor sent over MPI must be dense and on the CPU, but is {tensor.layout} on {tensor.device} "
                "instead. Move it to the CPU, or use the backend nccl or gloo."
            )
        self._tensor = tensor
        wire = tensor.detach()
        if wire.is_conj() or wire.is_neg():
            wire = wire.resolve_conj().resolve_neg()
        if how is not None and how.dtype != wire.dtype:
            wire = wire.view(how.dtype) if wire.dtype == torch.bool else wire.to(how.dtype)
        self._wire = wire.contiguous()
        self.address = self._wire.data_ptr()
        self.num_bytes = self._wire.numel() * self._wire.element_size()
        self.is_copy = self.address != tensor.data_ptr()
        self._item_bytes = 1 if how is None else how.dtype.itemsize
        library: Any = mpi.library()
        self._datatype = library.BYTE if how is None else how.datatype
        memory = getattr(library, "buffer", None) or library.memory  # mpi4py 3 calls it `memory`
        self._view = memory.fromaddress

    def whole(self) -> list[Any]:
        return self.part(0, self.num_bytes)

    def part(self, start: int, num_bytes: int) -> list[Any]:
        """Return `num_bytes` bytes from `start` as an mpi4py message."""
        return [self._view(self.address + start, num_bytes), self._datatype]

    def parts(self, start: int = 0, num_bytes: int | None = None) -> Iterator[list[Any]]:
        """Return `num_bytes` bytes from `start`, by default all, in pieces of at most `LARGEST_BYTES`.

        An empty buffer is one empty piece.
        """
        left = self.num_bytes if num_bytes is None else num_bytes
        yield from self._cut(start, left, LARGEST_BYTES)

    def concurrent_parts(self, start: int = 0, num_bytes: int | None = None) -> Iterator[list[Any]]:
        """Return `num_bytes` bytes from `start`, by default all, in pieces that are reduced concurrently."""
        left = self.num_bytes if num_bytes is None else num_bytes
        yield from self._cut(start, left, max(PIECE_BYTES, -(-left // _MOST_PIECES)))

    def _cut(self, start: int, num_bytes: int, most: int) -> Iterator[list[Any]]:
        step = max(1, min(most, LARGEST_BYTES) // self._item_bytes) * self._item_bytes
        for place in range(0, max(1, num_bytes), step):
            yield self.part(start + place, min(step, num_bytes - place))

    def divide(self, size: int) -> None:
        """Turn a sum into an average. Averages of integers are truncated toward zero."""
        is_integer = not (self._wire.is_floating_point() or self._wire.is_complex())
        self._wire.div_(size, rounding_mode="trunc" if is_integer else None)

    def rows(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return `num_bytes` bytes from `start` as a tensor (uint8)."""
        return self._wire.view(-1).view(torch.uint8)[start : start + num_bytes]

    def finish(self) -> None:
        """Write a copy back to the tensor."""
        if self.is_copy:
            self._tensor.detach().copy_(self._wire)


def fits(num_bytes: int, most: int | None = None) -> bool:
    """Return whether one MPI collective may carry `num_bytes`, the sum over all ranks.

    most: the number of bytes above which several collectives are faster.
    """
    return num_bytes <= min(LARGEST_BYTES, LARGEST_BYTES if most is None else most)


def overlap(one: Buffer, other: Buffer) -> bool:
    """Return whether two buffers share memory. MPI does not allow that."""
    return one.address < other.address + other.num_bytes and other.address < one.address + one.num_bytes
