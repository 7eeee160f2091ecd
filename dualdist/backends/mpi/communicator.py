"""The collectives as MPI requests.

Each is MPI's own non-blocking collective if possible. But gathers, scatters and all-to-alls of tensors that differ in
size, are separate in memory or are too large for one call use point-to-point messages between the members, with a
reserved tag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...meeting import mpi

# The sum of sparse tensors: every member sends its indices and values to every other one, and adds them up itself.


class SparseSum:
    """The sum of one sparse tensor (COO, on the CPU) of each member, in steps. `finish` writes it to the tensor."""

    def __init__(self, tensor: torch.Tensor, op: Any, rank: int, size: int) -> None:
        """Raises RuntimeError unless `op`, a ReduceOp, is SUM, as over gloo."""
        if getattr(op, "op", op) != dist.ReduceOp.SUM:
            raise RuntimeError(f"The reduction of sparse tensors must be SUM, but is {op} instead.")
        self._tensor, self._rank = tensor, rank
        own = tensor.detach().coalesce()
        self._own = (own.indices().contiguous(), own.values().contiguous())
        self.counts = torch.zeros(size, dtype=torch.int64)
        """The number of elements of each member. Each member sets its own; then they are gathered."""
        self.counts[rank] = own.indices().shape[1]
        self._rows: list[list[torch.Tensor]] = []

    def messages(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield (what this member sends, where it receives from each member), once `counts` is complete."""
        counts = self.counts.tolist()
        indices, values = self._own
        places = [torch.empty(len(indices), count, dtype=indices.dtype) for count in counts]
        numbers = [torch.empty(count, *values.shape[1:], dtype=values.dtype) for count in counts]
        places[self._rank], numbers[self._rank] = indices, values
        self._rows = [places, numbers]
        yield indices, places
        yield values, numbers

    def finish(self) -> None:
        """Add up what was received, in the order of the members, so that all have the same bits."""
        places, numbers = torch.cat(self._rows[0], 1), torch.cat(self._rows[1])
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            rows = torch.sparse_coo_tensor(places, numbers, self._tensor.shape, check_invariants=True)
            self._tensor.copy_(rows.coalesce())


# Prepares tensors for MPI: contiguous, on the CPU, and, for a reduction, of a dtype that MPI can combine.
#
# MPI counts in 32-bit integers, and Open MPI 4 also computes count times rank in 32 bits. Therefore no message is
# larger than `LARGEST_BYTES`.

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


_SPARSE_TAGS = 1024

Block = tuple[Buffer, int, int]
"""(buffer, start, length): a part of a buffer, in bytes."""


@dataclass(frozen=True)
class Operation:
    """One collective or message, not yet started."""

    post: Callable[[], Iterator[Any]]
    """Starts it and yields its requests."""
    finish: Callable[[], None] | None = None
    """What remains to do after the requests; None for nothing."""
    further: Callable[[], Iterator[Any]] | None = None
    """Starts and yields requests that depend on the results of the first ones. They must be messages with a tag of
    their own: members post them at different times, while MPI matches collectives by their order."""


class Communicator:
    """An MPI communicator with the collectives of torch.distributed. Each method returns an Operation."""

    def __init__(self, communicator: Any) -> None:
        self.comm = communicator
        self.rank = int(communicator.Get_rank())
        self.size = int(communicator.Get_size())
        library: Any = mpi.library()
        self._mpi = library
        self.own_tag = int(library.COMM_WORLD.Get_attr(library.TAG_UB)) - _SPARSE_TAGS
        """From here on, tags are reserved for our own messages."""
        self._num_sparse = 0

    def allreduce(self, tensor: torch.Tensor, op: Any) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)

        def post() -> Iterator[Any]:
            for part in buffer.concurrent_parts():
                yield self.comm.Iallreduce(self._mpi.IN_PLACE, part, op=how.op)

        return Operation(post, self._finish_reduction(buffer, how))

    def sparse_allreduce(self, tensor: torch.Tensor, op: Any) -> Operation:
        """Sum sparse tensors, which may have different numbers of elements."""
        self._num_sparse += 1
        tag = self.own_tag + 1 + self._num_sparse % _SPARSE_TAGS
        found = SparseSum(tensor, op, self.rank, self.size)

        def post() -> Iterator[Any]:
            yield self.comm.Iallgather(self._mpi.IN_PLACE, Buffer(found.counts).whole())

        def further() -> Iterator[Any]:
            for own, theirs in found.messages():
                own_block, blocks = _whole(own), [_whole(row) for row in theirs]
                for place in (place for place in range(self.size) if place != self.rank):
                    yield from self._receive(blocks[place], place, tag)
                    yield from self._send(own_block, place, tag)

        return Operation(post, found.finish, further)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> Operation:
        how = mpi_reduction(tensor.dtype, op)
        buffer = Buffer(tensor, how)
        if self.rank == root:
            return Operation(
                lambda: self._reduce_here(buffer, (buffer, 0, buffer.num_bytes), how),
                self._finish_reduction(buffer, how),
            )
        return Operation(lambda: self._reduce_to((buffer, 0, buffer.num_bytes), how, root))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> Operation:
        """Reduce `inputs`: one tensor per member, or a single tensor that concatenates them."""
        how = mpi_reduction(output.dtype, op)
        received = Buffer(output, how)
        sent = [Buffer(tensor, how) for tensor in inputs]
        whole = len(sent) == 1
        _check(received.num_bytes, sent[0 if whole else self.rank].num_bytes // (self.size if whole else 1))
        if any(overlap(buffer, received) for buffer in sent):
            sent = [Buffer(tensor.clone(), how) for tensor in inputs]
        if whole and fits(sent[0].num_bytes, PIECE_BYTES):
            # Only for small inputs, because here Open MPI sends all data through one member.
            def post() -> Iterator[Any]:
                yield self.comm.Ireduce_scatter_block(sent[0].whole(), received.whole(), op=how.op)

            return Operation(post, self._finish_reduction(received, how))
        blocks = self._rows(sent[0]) if whole else [(buffer, 0, buffer.num_bytes) for buffer in sent]

        def post_each() -> Iterator[Any]:
            for root, block in enumerate(blocks):
                if root == self.rank:
                    yield from self._reduce_here(received, block, how)
                else:
                    yield from self._reduce_to(block, how, root)

        return Operation(post_each, self._finish_reduction(received, how))

    def _reduce_here(self, received: Buffer, block: Block, how: MpiReduction) -> Iterator[Any]:
        sent, start, length = block
        parts = sent.concurrent_parts(start, length)
        for into, part in zip(received.concurrent_parts(), parts, strict=True):
            own = self._mpi.IN_PLACE if sent is received else part
            yield self.comm.Ireduce(own, into, op=how.op, root=self.rank)

    def _reduce_to(self, block: Block, how: MpiReduction, root: int) -> Iterator[Any]:
        sent, start, length = block
        for part in sent.concurrent_parts(start, length):
            yield self.comm.Ireduce(part, None, op=how.op, root=root)

    def _finish_reduction(self, buffer: Buffer, how: MpiReduction) -> Callable[[], None] | None:
        if how.averages:

            def finish() -> None:
                buffer.divide(self.size)
                buffer.finish()

            return finish
        return buffer.finish if buffer.is_copy else None

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        buffer = Buffer(tensor)

        def post() -> Iterator[Any]:
            for part in buffer.parts():
                yield self.comm.Ibcast(part, root=root)

        return Operation(post, _finish_all([buffer]) if self.rank != root else None)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """Gather into one tensor, in rank order."""
        received, sent = Buffer(output), Buffer(tensor)
        _check(received.num_bytes, sent.num_bytes * self.size)
        own = self._rows(received)[self.rank]
        if overlap(received, sent):  # FSDP gathers in place
            if sent.address != received.address + own[1]:
                sent = Buffer(tensor.clone())
            elif fits(received.num_bytes):
                return Operation(
                    lambda: iter([self.comm.Iallgather(self._mpi.IN_PLACE, received.whole())]),
                    _finish_all([received]),
                )
        if fits(received.num_bytes):
            return Operation(
                lambda: iter([self.comm.Iallgather(sent.whole(), received.whole())]), _finish_all([received])
            )
        return self._exchange([(sent, 0, sent.num_bytes)] * self.size, self._rows(received), [received])

    def allgather_list(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """Gather into one tensor per member. They may differ in size."""
        received, sent = [Buffer(output) for output in outputs], Buffer(tensor)
        _check(received[self.rank].num_bytes, sent.num_bytes)
        whole = (sent, 0, sent.num_bytes)
        return self._exchange([whole] * self.size, [(row, 0, row.num_bytes) for row in received], received)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Operation:
        """Exchange rows. received, sent: the number of rows per member; empty: the same number for each."""
        into, out = Buffer(output), Buffer(tensor)
        if not received and not sent and fits(out.num_bytes):
            _check(into.num_bytes, out.num_bytes)
            return Operation(
                lambda: iter([self.comm.Ialltoall(out.whole(), into.whole())]), _finish_all([into])
            )
        return self._exchange(_split(out, tensor, sent, self), _split(into, output, received, self), [into])

    def alltoall_list(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Operation:
        into, out = [Buffer(output) for output in outputs], [Buffer(tensor) for tensor in tensors]
        _check(into[self.rank].num_bytes, out[self.rank].num_bytes)
        sent, received = ([(row, 0, row.num_bytes) for row in rows] for rows in (out, into))
        return self._exchange(sent, received, into)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Operation:
        """outputs: one per member at the root, none elsewhere."""
        sent, received = Buffer(tensor), [Buffer(output) for output in outputs]
        if self.rank == root:
            _check(received[root].num_bytes, sent.num_bytes)
        rows: list[Block | None] = [(row, 0, row.num_bytes) for row in received]
        whole = (sent, 0, sent.num_bytes)
        return self._exchange(
            [whole if place == root else None for place in range(self.size)],
            rows or [None] * self.size,
            received,
        )

    def scatter(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> Operation:
        """tensors: one per member at the root, none elsewhere."""
        received, sent = Buffer(output), [Buffer(tensor) for tensor in tensors]
        if self.rank == root:
            _check(received.num_bytes, sent[root].num_bytes)
        rows: list[Block | None] = [(row, 0, row.num_bytes) for row in sent]
        whole = (received, 0, received.num_bytes)
        return self._exchange(
            rows or [None] * self.size,
            [whole if place == root else None for place in range(self.size)],
            [received],
        )

    def barrier(self) -> Operation:
        return Operation(lambda: iter([self.comm.Ibarrier()]))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation:
        buffer = Buffer(tensor)
        self._check_tag(tag)
        return Operation(lambda: self._send((buffer, 0, buffer.num_bytes), to, tag))

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int, status: Any) -> Operation:
        """source: the sender, None for any. status: an MPI status to fill; it must report the size of `tensor`."""
        buffer = Buffer(tensor)
        self._check_tag(tag)
        if source is None and not fits(buffer.num_bytes):
            raise RuntimeError(
                "MPI: a tensor over 1 GiB can be received only from a named source. Name the source."
            )
        origin = self._mpi.ANY_SOURCE if source is None else source

        def finish() -> None:
            arrived = int(status.Get_count(self._mpi.BYTE))
            if fits(buffer.num_bytes) and arrived != buffer.num_bytes:
                raise RuntimeError(f"the tensor takes {buffer.num_bytes} bytes, but {arrived} were sent")
            buffer.finish()

        return Operation(lambda: self._receive((buffer, 0, buffer.num_bytes), origin, tag), finish)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < self.own_tag:
            raise RuntimeError(
                f"`tag` must be at least 0 and less than {self.own_tag}, but is {tag} instead. Use a smaller number."
            )

    def _send(self, block: Block, to: int, tag: int) -> Iterator[Any]:
        for part in block[0].parts(*block[1:]):
            yield self.comm.Isend(part, dest=to, tag=tag)

    def _receive(self, block: Block, source: int, tag: int) -> Iterator[Any]:
        for part in block[0].parts(*block[1:]):
            yield self.comm.Irecv(part, source=source, tag=tag)

    def _rows(self, buffer: Buffer) -> list[Block]:
        length = buffer.num_bytes // self.size
        return [(buffer, place * length, length) for place in range(self.size)]

    def _exchange(
        self, sent: Sequence[Block | None], received: Sequence[Block | None], buffers: Sequence[Buffer]
    ) -> Operation:
        """Send a block to each member and receive one from it. None means no message; both sides must agree on that."""

        def post() -> Iterator[Any]:
            for distance in range(1, self.size):
                source, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                into, out = received[source], sent[to]
                if into is not None:
                    yield from self._receive(into, source, self.own_tag)
                if out is not None:
                    yield from self._send(out, to, self.own_tag)
            own_in, own_out = received[self.rank], sent[self.rank]
            if own_in is not None and own_out is not None:
                _copy(own_in, own_out)

        return Operation(post, _finish_all(buffers))


def _whole(tensor: torch.Tensor) -> Block:
    buffer = Buffer(tensor)
    return buffer, 0, buffer.num_bytes


def _copy(into: Block, out: Block) -> None:
    if into[0].address + into[1] != out[0].address + out[1]:
        into[0].rows(*into[1:]).copy_(out[0].rows(*out[1:]))


def _finish_all(buffers: Sequence[Buffer]) -> Callable[[], None] | None:
    copies = [buffer for buffer in buffers if buffer.is_copy]
    if not copies:
        return None

    def finish() -> None:
        for buffer in copies:
            buffer.finish()

    return finish


def _split(
    buffer: Buffer, tensor: torch.Tensor, splits: Sequence[int], communicator: Communicator
) -> list[Block]:
    """Return the block of `buffer` for each member: `splits[member]` rows of `tensor`, or the same number for each."""
    rows = tensor.shape[0] if tensor.dim() else 1
    counts = list(splits) or [rows // communicator.size] * communicator.size
    if sum(counts) != rows or len(counts) != communicator.size:
        raise RuntimeError(
            f"`splits` must be {communicator.size} numbers that add up to {rows} rows, but is {counts} instead."
        )
    width = buffer.num_bytes // rows if rows else 0
    starts = [sum(counts[:place]) * width for place in range(communicator.size)]
    return [(buffer, start, count * width) for start, count in zip(starts, counts, strict=True)]


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(
            f"The output must take {wanted} bytes, but takes {found} instead. Give it that shape and dtype."
        )
