"""The collectives as MPI requests.

Each is MPI's own non-blocking collective if possible. But gathers, scatters and all-to-alls of tensors that differ in
size, are separate in memory or are too large for one call use point-to-point messages with a reserved tag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class MpiReduction:
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
    library: Any = mpi.library()
    names = _BOOL_NAMES if kind == "bool" else _NAMES
    return MpiReduction(
        wire, getattr(library, _TYPES[wire]), getattr(library, names.get(name, name)), op == dist.ReduceOp.AVG
    )


# Tensors as MPI's messages.
#
# MPI counts in 32-bit integers, and Open MPI 4 also computes count times rank in 32 bits. Hence `LARGEST_BYTES`.

LARGEST_BYTES = 1 << 30
PIECE_BYTES, _MOST_PIECES = 4 << 20, 64
"""Reductions are split into pieces that run concurrently: Open MPI combines one while it sends the next."""


class Block:
    """Bytes that MPI reads or writes."""

    def __init__(self, data: torch.Tensor, how: MpiReduction | None) -> None:
        """data: contiguous. how: the reduction of these bytes; None to send them unchanged."""
        self.data, self._how = data, how
        self.address = data.data_ptr()
        self.num_bytes = data.numel() * data.element_size()
        self._item_bytes = 1 if how is None else how.dtype.itemsize
        library: Any = mpi.library()
        self._datatype = library.BYTE if how is None else how.datatype
        memory = getattr(library, "buffer", None) or library.memory  # mpi4py 3 calls it `memory`
        self._view = memory.fromaddress

    def whole(self) -> list[Any]:
        """Return all bytes as an mpi4py message."""
        return self._message(0, self.num_bytes)

    def pieces(self) -> Iterator[list[Any]]:
        """Return messages of at most `LARGEST_BYTES`. An empty block is one empty message."""
        return self._cut(LARGEST_BYTES)

    def concurrent_pieces(self) -> Iterator[list[Any]]:
        """Return messages that are reduced concurrently."""
        return self._cut(min(LARGEST_BYTES, max(PIECE_BYTES, -(-self.num_bytes // _MOST_PIECES))))

    def _cut(self, most: int) -> Iterator[list[Any]]:
        step = max(1, most // self._item_bytes) * self._item_bytes
        for start in range(0, max(1, self.num_bytes), step):
            yield self._message(start, min(step, self.num_bytes - start))

    def _message(self, start: int, num_bytes: int) -> list[Any]:
        return [self._view(self.address + start, num_bytes), self._datatype]

    def split(self, lengths: Sequence[int]) -> list[Block]:
        """Return consecutive blocks of `lengths` bytes."""
        return [Block(part, self._how) for part in self._bytes().split(list(lengths))]

    def copy_(self, other: Block) -> None:
        """Copy the bytes of `other`, unless they are the same ones."""
        if self.address != other.address:
            self._bytes().copy_(other._bytes())

    def _bytes(self) -> torch.Tensor:
        return self.data.view(-1).view(torch.uint8)


class Buffer(Block):
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
            super().__init__(wire.contiguous(), how)
        self.is_copy = self.address != tensor.data_ptr()

    def overlaps(self, other: Buffer) -> bool:
        """Return whether two buffers share memory. MPI does not allow that."""
        return self.address < other.address + other.num_bytes and other.address < self.address + self.num_bytes

    def divide(self, size: int) -> None:
        """Turn a sum into an average. Averages of integers are truncated toward zero."""
        is_integer = not (self.data.is_floating_point() or self.data.is_complex())
        self.data.div_(size, rounding_mode="trunc" if is_integer else None)

    def finish(self) -> None:
        """Write a copy back to the tensor."""
        if self.is_copy:
            self._tensor.copy_(self.data)


@dataclass(frozen=True)
class Operation:
    """One collective or message, not yet started."""

    post: Callable[[], Iterator[Any]]
    """Starts it and yields its requests."""
    finish: Callable[[], None] | None = None
    """What remains to do after the requests; None for nothing."""


class Communicator:
    """An MPI communicator with the collectives of torch.distributed. Each method returns an Operation."""

    def __init__(self, communicator: Any) -> None:
        self.comm = communicator
        self.rank = int(communicator.Get_rank())
        self.size = int(communicator.Get_size())
        library: Any = mpi.library()
        self._mpi = library
        self._own_tag = int(library.COMM_WORLD.Get_attr(library.TAG_UB))
        """The tag of the messages of `_exchange`."""

    def allreduce(self, tensor: torch.Tensor, op: Any) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)

        def post() -> Iterator[Any]:
            for piece in buffer.concurrent_pieces():
                yield self.comm.Iallreduce(self._mpi.IN_PLACE, piece, op=how.op)

        return Operation(post, self._finish_reduction(buffer, how))

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)
        finish = self._finish_reduction(buffer, how) if self.rank == root else None
        return Operation(lambda: self._reduce(buffer, buffer, how, root), finish)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> Operation:
        """Reduce `inputs`: one tensor per member, or a single tensor that concatenates them."""
        how = mpi_reduction(output.dtype, op)
        received = Buffer(output, how)
        sent = [Buffer(tensor, how) for tensor in inputs]
        is_single = len(sent) == 1
        own_bytes = sent[0].num_bytes // self.size if is_single else sent[self.rank].num_bytes
        _check_bytes(received.num_bytes, own_bytes)
        if any(buffer.overlaps(received) for buffer in sent):
            sent = [Buffer(tensor.clone(), how) for tensor in inputs]

        def post() -> Iterator[Any]:
            # Only for small inputs, because here Open MPI sends all data through one member.
            if is_single and sent[0].num_bytes <= min(LARGEST_BYTES, PIECE_BYTES):
                yield self.comm.Ireduce_scatter_block(sent[0].whole(), received.whole(), op=how.op)
                return
            for root, block in enumerate(self._rows(sent[0]) if is_single else sent):
                yield from self._reduce(block, received, how, root)

        return Operation(post, self._finish_reduction(received, how))

    def _reduce(self, sent: Block, received: Block, how: MpiReduction, root: int) -> Iterator[Any]:
        """Reduce `sent`, to `received` of member `root`, which may be the same there."""
        if self.rank != root:
            for piece in sent.concurrent_pieces():
                yield self.comm.Ireduce(piece, None, op=how.op, root=root)
            return
        for piece, into in zip(sent.concurrent_pieces(), received.concurrent_pieces(), strict=True):
            own = self._mpi.IN_PLACE if sent is received else piece
            yield self.comm.Ireduce(own, into, op=how.op, root=root)

    def _finish_reduction(self, buffer: Buffer, how: MpiReduction) -> Callable[[], None] | None:
        def finish() -> None:
            if how.averages:
                buffer.divide(self.size)
            buffer.finish()

        return finish if how.averages or buffer.is_copy else None

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        buffer = Buffer(tensor)

        def post() -> Iterator[Any]:
            for piece in buffer.pieces():
                yield self.comm.Ibcast(piece, root=root)

        return Operation(post, _finish_all([buffer]) if self.rank != root else None)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """Gather into one tensor, in rank order."""
        received, sent = Buffer(output), Buffer(tensor)
        _check_bytes(received.num_bytes, sent.num_bytes * self.size)
        own_address = received.address + self.rank * sent.num_bytes
        if received.overlaps(sent) and sent.address != own_address:
            sent = Buffer(tensor.clone())
        if received.num_bytes > LARGEST_BYTES:
            return self._exchange([sent] * self.size, self._rows(received), [received])
        is_in_place = sent.num_bytes > 0 and sent.address == own_address  # as FSDP gathers
        message = self._mpi.IN_PLACE if is_in_place else sent.whole()
        return Operation(lambda: iter([self.comm.Iallgather(message, received.whole())]), _finish_all([received]))

    def allgather_list(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """Gather into one tensor per member. They may differ in size."""
        received, sent = [Buffer(output) for output in outputs], Buffer(tensor)
        _check_bytes(received[self.rank].num_bytes, sent.num_bytes)
        return self._exchange([sent] * self.size, received, received)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Operation:
        """Exchange rows. received, sent: the number of rows per member; empty: the same number for each."""
        into, out = Buffer(output), Buffer(tensor)
        if not received and not sent and out.num_bytes <= LARGEST_BYTES:
            _check_bytes(into.num_bytes, out.num_bytes)
            return Operation(lambda: iter([self.comm.Ialltoall(out.whole(), into.whole())]), _finish_all([into]))
        return self._exchange(self._split(out, tensor, sent), self._split(into, output, received), [into])

    def alltoall_list(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Operation:
        into, out = [Buffer(output) for output in outputs], [Buffer(tensor) for tensor in tensors]
        _check_bytes(into[self.rank].num_bytes, out[self.rank].num_bytes)
        return self._exchange(out, into, into)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """outputs: one per member at the root, none elsewhere."""
        sent, received = Buffer(tensor), [Buffer(output) for output in outputs]
        if self.rank == root:
            _check_bytes(received[root].num_bytes, sent.num_bytes)
        return self._exchange(self._only(root, sent), received or [None] * self.size, received)

    def scatter(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> Operation:
        """tensors: one per member at the root, none elsewhere."""
        received, sent = Buffer(output), [Buffer(tensor) for tensor in tensors]
        if self.rank == root:
            _check_bytes(received.num_bytes, sent[root].num_bytes)
        return self._exchange(sent or [None] * self.size, self._only(root, received), [received])

    def _only(self, member: int, block: Block) -> list[Block | None]:
        return [block if place == member else None for place in range(self.size)]

    def barrier(self) -> Operation:
        return Operation(lambda: iter([self.comm.Ibarrier()]))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation:
        buffer = Buffer(tensor)
        self._check_tag(tag)
        return Operation(lambda: self._send(buffer, to, tag))

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int, status: Any) -> Operation:
        """source: the sender, None for any. status: an MPI status to fill; it must report the size of `tensor`."""
        buffer = Buffer(tensor)
        self._check_tag(tag)
        is_whole = buffer.num_bytes <= LARGEST_BYTES
        if source is None and not is_whole:
            raise RuntimeError("MPI: a tensor over 1 GiB can be received only from a named source. Name the source.")
        origin = self._mpi.ANY_SOURCE if source is None else source

        def finish() -> None:
            arrived = int(status.Get_count(self._mpi.BYTE))
            if is_whole and arrived != buffer.num_bytes:
                raise RuntimeError(f"the tensor takes {buffer.num_bytes} bytes, but {arrived} were sent")
            buffer.finish()

        return Operation(lambda: self._receive(buffer, origin, tag), finish)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < self._own_tag:
            raise RuntimeError(
                f"`tag` must be at least 0 and less than {self._own_tag}, but is {tag} instead. Use a smaller number."
            )

    def _send(self, block: Block, to: int, tag: int) -> Iterator[Any]:
        for piece in block.pieces():
            yield self.comm.Isend(piece, dest=to, tag=tag)

    def _receive(self, block: Block, source: int, tag: int) -> Iterator[Any]:
        for piece in block.pieces():
            yield self.comm.Irecv(piece, source=source, tag=tag)

    def _rows(self, buffer: Buffer) -> list[Block]:
        return buffer.split([buffer.num_bytes // self.size] * self.size)

    def _split(self, buffer: Buffer, tensor: torch.Tensor, splits: Sequence[int]) -> list[Block]:
        """Return the block for each member: `splits[member]` rows of `tensor`, or the same number for each."""
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = list(splits) or [rows // self.size] * self.size
        if sum(counts) != rows or len(counts) != self.size:
            raise RuntimeError(
                f"`splits` must be {self.size} numbers that add up to {rows} rows, but is {counts} instead."
            )
        width = buffer.num_bytes // rows if rows else 0
        return buffer.split([count * width for count in counts])

    def _exchange(
        self, sent: Sequence[Block | None], received: Sequence[Block | None], buffers: Sequence[Buffer]
    ) -> Operation:
        """Send a block to each member and receive one from it. None means no message; both sides must agree on that.

        buffers: those of which `received` has the blocks.
        """

        def post() -> Iterator[Any]:
            for distance in range(1, self.size):
                source, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                into, out = received[source], sent[to]
                if into is not None:
                    yield from self._receive(into, source, self._own_tag)
                if out is not None:
                    yield from self._send(out, to, self._own_tag)
            own_in, own_out = received[self.rank], sent[self.rank]
            if own_in is not None and own_out is not None:
                own_in.copy_(own_out)

        return Operation(post, _finish_all(buffers))


def _finish_all(buffers: Sequence[Buffer]) -> Callable[[], None] | None:
    copies = [buffer for buffer in buffers if buffer.is_copy]

    def finish() -> None:
        for buffer in copies:
            buffer.finish()

    return finish if copies else None


def _check_bytes(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(
            f"The output must take {wanted} bytes, but takes {found} instead. Give it that shape and dtype."
        )
