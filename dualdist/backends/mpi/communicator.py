"""The collectives as MPI requests.

Each is MPI's own non-blocking collective if possible. But gathers, scatters and all-to-alls of tensors that differ in
size, are separate in memory or are too large for one call use point-to-point messages between the members, with a
reserved tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...rendezvous import mpi
from .buffers import PIECE_BYTES, Buffer, MpiReduction, fits, mpi_reduction, overlap
from .sparse import SparseSum

__all__ = ("Communicator", "Operation")

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
