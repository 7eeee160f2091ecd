"""The collectives as MPI requests.

Each is MPI's own non-blocking collective if possible. But gathers, scatters and all-to-alls of tensors that differ in
size, are separate in memory or are too large for one call use point-to-point messages with a reserved tag.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.backends.base import plain
from . import meeting as mpi

# How MPI combines tensors: the dtypes and operations that it knows.

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    **{
        getattr(torch, name): f"{name.upper()}_T"
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
}
_OPS = {
    "real": ("SUM", "PRODUCT", "MIN", "MAX", "AVG"),
    "complex": ("SUM", "PRODUCT", "AVG"),
    "integer": ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"),
    "bool": ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"),
}
"""kind of dtype -> torch's operations on it."""
_NAMES = {"PRODUCT": "PROD", "AVG": "SUM"}
"""torch's name of an operation -> MPI's, where they differ."""
_BOOL_NAMES = {"SUM": "BOR", "PRODUCT": "BAND"}
"""The same for bools. Their sum is a bitwise or, as in NCCL: added as uint8, 256 times True would overflow to 0."""


class MpiReduction(NamedTuple):
    """How MPI combines tensors of one dtype by one operation."""

    dtype: torch.dtype
    """The dtype in which MPI combines: float32 for smaller floating types, so that the result is rounded only once."""
    datatype: Any
    op: Any
    averages: bool


@functools.cache
def mpi_reduction(dtype: torch.dtype, op: Any) -> MpiReduction:
    """Return how MPI combines `dtype` by `op`, the type of a ReduceOp. Raises RuntimeError when MPI cannot."""
    if dtype == torch.bool:
        kind, wire = "bool", torch.uint8
    elif dtype.is_complex:
        kind, wire = "complex", dtype
    elif dtype.is_floating_point:
        kind, wire = "real", torch.float32 if dtype.itemsize < 4 else dtype
    else:
        kind, wire = "integer", dtype
    name, known = getattr(op, "name", str(op)), _OPS[kind] if wire in _TYPES else ()
    if name not in known:
        raise RuntimeError(
            f"The reduction of {dtype} over MPI must be one of {', '.join(known) or 'nothing'}, but is {name} instead. "
            "Convert the tensor, or scale it and use SUM."
        )
    library = mpi.library()
    names = _BOOL_NAMES if kind == "bool" else _NAMES
    return MpiReduction(
        wire, getattr(library, _TYPES[wire]), getattr(library, names.get(name, name)), op == dist.ReduceOp.AVG
    )


class Buffer:
    """The memory of a tensor if MPI can use it, else of a copy that `finish` writes back."""

    def __init__(self, tensor: torch.Tensor, how: MpiReduction | None = None) -> None:
        """how: the reduction of the tensor; None to send its bytes unchanged."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise RuntimeError(
                f"A tensor sent over MPI must be dense and on the CPU, but is {tensor.layout} on {tensor.device} "
                "instead. Move it to the CPU, or use the backend nccl or gloo."
            )
        self._tensor = wire = plain(tensor)
        with torch.inference_mode(False), torch.no_grad():  # a thread in neither may write it
            if wire.is_conj() or wire.is_neg():
                wire = wire.resolve_conj().resolve_neg()
            if how is not None and how.dtype != wire.dtype:
                wire = wire.view(how.dtype) if wire.dtype == torch.bool else wire.to(how.dtype)
            self.data = wire.contiguous()
            """What MPI reads or writes."""
        self._is_copy = self.data.data_ptr() != tensor.data_ptr()

    def overlaps(self, other: Buffer) -> bool:
        """Return whether two buffers share memory. MPI does not allow that."""
        own, others = self.data.data_ptr(), other.data.data_ptr()
        return own < others + other.data.nbytes and others < own + self.data.nbytes

    def finish(self, divisor: int = 1) -> None:
        """Turn a sum into an average, and write a copy back. Averages of integers are truncated toward zero."""
        if divisor > 1:
            is_integer = not (self.data.is_floating_point() or self.data.is_complex())
            self.data.div_(divisor, rounding_mode="trunc" if is_integer else None)
        if self._is_copy:
            self._tensor.copy_(self.data)


Operation = Generator[Any, None, None]
"""One collective or message: it checks its arguments, yields None, starts, yields its requests, and yields None again.

Then it holds the memory that MPI uses, until the requests have completed. The rest is what remains to do after them.
"""


# MPI counts in 32-bit integers, and Open MPI 4 also computes count times rank in 32 bits.

LARGEST_BYTES = 1 << 30
PIECE_BYTES, _MOST_PIECES = 4 << 20, 64
"""Reductions are split into pieces that run concurrently: Open MPI combines one while it sends the next."""


class Communicator:
    """An MPI communicator with the collectives of torch.distributed. Each method returns an Operation."""

    def __init__(self, communicator: Any) -> None:
        self.comm = communicator
        self.rank = int(communicator.Get_rank())
        self.size = int(communicator.Get_size())
        self._mpi = library = mpi.library()
        self._view = (getattr(library, "buffer", None) or library.memory).fromaddress  # mpi4py 3 calls it `memory`
        self._own_tag = int(library.COMM_WORLD.Get_attr(library.TAG_UB))
        """The tag of the messages of `_exchange`."""

    def _message(self, data: torch.Tensor, how: MpiReduction | None = None) -> list[Any]:
        """Return contiguous numbers as mpi4py sends or, with `how`, reduces them."""
        return [self._view(data.data_ptr(), data.nbytes), self._mpi.BYTE if how is None else how.datatype]

    def _pieces(self, data: torch.Tensor, how: MpiReduction | None = None) -> Iterator[list[Any]]:
        """Yield messages of at most `LARGEST_BYTES`, at least one. Those of a reduction run concurrently."""
        most = LARGEST_BYTES
        if how is not None:
            most = min(most, max(PIECE_BYTES, -(-data.nbytes // _MOST_PIECES)))
            most = max(1, most // how.dtype.itemsize) * how.dtype.itemsize
        for piece in [data] if data.nbytes <= most else _bytes(data).split(most):
            yield self._message(piece, how)

    def allreduce(self, tensor: torch.Tensor, op: Any) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)
        yield
        for piece in self._pieces(buffer.data, how):
            yield self.comm.Iallreduce(self._mpi.IN_PLACE, piece, op=how.op)
        yield
        buffer.finish(self.size if how.averages else 1)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)
        yield
        yield from self._reduce(buffer.data, buffer.data, how, root)
        yield
        if self.rank == root:
            buffer.finish(self.size if how.averages else 1)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> Operation:
        """Reduce `inputs`: one tensor per member, or a single tensor that concatenates them."""
        how = mpi_reduction(output.dtype, op)
        received = Buffer(output, how)
        sent = [Buffer(tensor, how) for tensor in inputs]
        is_single = len(sent) == 1
        own_bytes = sent[0].data.nbytes // self.size if is_single else sent[self.rank].data.nbytes
        _check_bytes(received.data, own_bytes)
        if any(buffer.overlaps(received) for buffer in sent):
            sent = [Buffer(tensor.clone(), how) for tensor in inputs]
        yield
        # Only for small inputs, because here Open MPI sends all data through one member.
        if is_single and sent[0].data.nbytes <= min(LARGEST_BYTES, PIECE_BYTES):
            whole = self._message(sent[0].data, how), self._message(received.data, how)
            yield self.comm.Ireduce_scatter_block(*whole, op=how.op)
        else:
            for root, block in enumerate(self._rows(sent[0]) if is_single else [buffer.data for buffer in sent]):
                yield from self._reduce(block, received.data, how, root)
        yield
        received.finish(self.size if how.averages else 1)

    def _reduce(self, sent: torch.Tensor, received: torch.Tensor, how: MpiReduction, root: int) -> Iterator[Any]:
        """Reduce `sent`, to `received` of member `root`, which may be the same there."""
        if self.rank != root:
            for piece in self._pieces(sent, how):
                yield self.comm.Ireduce(piece, None, op=how.op, root=root)
            return
        for piece, into in zip(self._pieces(sent, how), self._pieces(received, how), strict=True):
            own = self._mpi.IN_PLACE if sent is received else piece
            yield self.comm.Ireduce(own, into, op=how.op, root=root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        buffer = Buffer(tensor)
        yield
        for piece in self._pieces(buffer.data):
            yield self.comm.Ibcast(piece, root=root)
        yield
        if self.rank != root:
            buffer.finish()

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """Gather into one tensor, in rank order."""
        received, sent = Buffer(output), Buffer(tensor)
        own_bytes = sent.data.nbytes
        _check_bytes(received.data, own_bytes * self.size)
        own_address = received.data.data_ptr() + self.rank * own_bytes
        is_in_place = own_bytes > 0 and sent.data.data_ptr() == own_address  # as FSDP gathers
        if received.overlaps(sent) and not is_in_place:
            sent = Buffer(tensor.clone())
        if received.data.nbytes > LARGEST_BYTES:
            everybody = dict.fromkeys(range(self.size), sent.data)
            yield from self._exchange(everybody, dict(enumerate(self._rows(received))))
        else:
            yield
            message = self._mpi.IN_PLACE if is_in_place else self._message(sent.data)
            yield self.comm.Iallgather(message, self._message(received.data))
            yield
        received.finish()

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Operation:
        """Exchange rows. received, sent: the number of rows per member; empty: the same number for each."""
        into, out = Buffer(output), Buffer(tensor)
        if not received and not sent and out.data.nbytes <= LARGEST_BYTES:
            _check_bytes(into.data, out.data.nbytes)
            yield
            yield self.comm.Ialltoall(self._message(out.data), self._message(into.data))
            yield
        else:
            yield from self._exchange(self._split(out, tensor, sent), self._split(into, output, received))
        into.finish()

    def barrier(self) -> Operation:
        yield
        yield self.comm.Ibarrier()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation:
        buffer = Buffer(tensor)
        self._check_tag(tag)
        yield
        for piece in self._pieces(buffer.data):
            yield self.comm.Isend(piece, dest=to, tag=tag)
        yield

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int, status: Any) -> Operation:
        """source: the sender, None for any. status: an MPI status to fill; it must report the size of `tensor`."""
        buffer = Buffer(tensor)
        self._check_tag(tag)
        is_whole = buffer.data.nbytes <= LARGEST_BYTES
        if source is None and not is_whole:
            raise RuntimeError("MPI: a tensor over 1 GiB can be received only from a named source. Name the source.")
        yield
        for piece in self._pieces(buffer.data):
            yield self.comm.Irecv(piece, source=self._mpi.ANY_SOURCE if source is None else source, tag=tag)
        yield
        arrived = int(status.Get_count(self._mpi.BYTE))
        if is_whole and arrived != buffer.data.nbytes:
            raise RuntimeError(f"the tensor takes {buffer.data.nbytes} bytes, but {arrived} were sent")
        buffer.finish()

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < self._own_tag:
            raise RuntimeError(
                f"`tag` must be at least 0 and less than {self._own_tag}, but is {tag} instead. Use a smaller number."
            )

    def _rows(self, buffer: Buffer) -> Sequence[torch.Tensor]:
        return _bytes(buffer.data).view(self.size, buffer.data.nbytes // self.size).unbind()

    def _split(self, buffer: Buffer, tensor: torch.Tensor, splits: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the bytes for each member: `splits[member]` rows of `tensor`, or the same number for each."""
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = list(splits) or [rows // self.size] * self.size
        if sum(counts) != rows or len(counts) != self.size:
            raise RuntimeError(
                f"`splits` must be {self.size} numbers that add up to {rows} rows, but is {counts} instead."
            )
        width = buffer.data.nbytes // rows if rows else 0
        return dict(enumerate(_bytes(buffer.data).split([count * width for count in counts])))

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> Operation:
        """Send `sent[member]` to each member in it, and receive from each in `received`. Both sides must agree on them.

        The tensors may differ in size.
        """
        out = {id(tensor): Buffer(tensor) for tensor in sent.values()}  # a gather has one for all members
        into = {member: Buffer(tensor) for member, tensor in received.items()}
        data = {member: buffer.data for member, buffer in into.items()}
        yield from self._exchange({member: out[id(tensor)].data for member, tensor in sent.items()}, data)
        for buffer in into.values():
            buffer.finish()

    def _exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> Operation:
        """Do what `exchange` does, with memory that MPI can use."""
        if self.rank in sent:
            _check_bytes(received[self.rank], sent[self.rank].nbytes)
        yield
        for distance in range(1, self.size):
            source, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if source in received:
                for piece in self._pieces(received[source]):
                    yield self.comm.Irecv(piece, source=source, tag=self._own_tag)
            if to in sent:
                for piece in self._pieces(sent[to]):
                    yield self.comm.Isend(piece, dest=to, tag=self._own_tag)
        if self.rank in sent and received[self.rank].data_ptr() != sent[self.rank].data_ptr():
            _bytes(received[self.rank]).copy_(_bytes(sent[self.rank]))
        yield


def _bytes(data: torch.Tensor) -> torch.Tensor:
    # A tensor with one element is contiguous with any stride, but torch views it as bytes only with stride 1.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def _check_bytes(found: torch.Tensor, wanted: int) -> None:
    if found.nbytes != wanted:
        raise RuntimeError(
            f"The output must take {wanted} bytes, but takes {found.nbytes} instead. Give it that shape and dtype."
        )
