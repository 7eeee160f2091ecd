"""Collectives as rounds: each member writes its box, all meet, and each reads the boxes.

An allreduce of a small tensor takes one round, in which each member reduces all boxes by itself. For larger ones each
member reduces a share, and the others copy it, which takes two rounds and less reading.

There are two sets of boxes, which the rounds use in turns. So one barrier a round is enough: a member that writes a box
again has met the others in the round between, and these had read the box before.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise
from socket import socket

import torch

from ..base import REDUCE_OPERATIONS, Work
from .mesh import Memory, Mesh

CollectiveSteps = Iterator[socket | Work]
"""A collective in progress. It yields what it waits for: the data of a socket, or a collective over the network."""

_SCRATCH_BYTES = 128 << 10
"""Sums of three and more tensors are made in parts of this size, which stay in the cache."""

_MESSAGE_BYTES = 4 << 20
"""How much a broadcast sends in a round. With less, the ranks wait more often; with more, they copy in turns rather
than at the same time (94 MB, 2 ranks)."""


class Rounds:
    """The collectives of one member. All members run the same ones in the same order."""

    def __init__(self, mesh: Mesh, memory: Memory, place: int, size: int) -> None:
        self._mesh, self._memory, self._place, self._size = mesh, memory, place, size
        self._turn = 0
        """Which of the two sets the current round uses."""

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        self._mesh.abandon()

    def _of(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the boxes of the current round, with the length and dtype of `part`."""
        boxes = self._memory.boxes[self._turn].view(part.dtype)
        return list(boxes[:, : len(part)].unbind())

    def _meet(self) -> CollectiveSteps:
        yield from self._mesh.barrier()
        self._turn = 1 - self._turn

    def allreduce(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Reduce `tensor` (1-D) in place, in the order of the places, so that all members have the same bits."""
        found = yield from self._find_tensors(tensor)
        if found:
            yield from self._allreduce_in_arenas(found, op)
            return
        for part in tensor.split(self._memory.box_bytes // tensor.element_size()):
            yield from self._allreduce_in_boxes(part, op)

    def allreduce_small(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Do the same in one round. `tensor` must fit a box.

        When this member waits for the others, it has done all that they need, unless there are more than two.
        """
        boxes = self._of(tensor)
        boxes[self._place].copy_(tensor)
        yield from self._meet()
        combine_into(tensor, boxes, op)

    def broadcast(self, tensors: Iterable[torch.Tensor], root: int) -> CollectiveSteps:
        """Overwrite `tensors` (1-D, uint8) with those of the member at place `root`, which writes to all boxes."""
        for parts in _batches(tensors, min(_MESSAGE_BYTES, self._memory.boxes[0].nbytes)):
            lengths = [part.numel() for part in parts]
            boxes = self._memory.boxes[self._turn].view(-1)[: sum(lengths)].split(lengths)
            if self._place == root:
                torch._foreach_copy_(boxes, parts)
            yield from self._meet()
            if self._place != root:
                torch._foreach_copy_(parts, boxes)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> CollectiveSteps:
        """Fill `output` ((size * n,), uint8) with every member's `tensor` ((n,), uint8), in the order of the places."""
        start, rows = 0, output.view(self._size, -1) if len(output) else output
        for part in tensor.split(self._memory.box_bytes):
            boxes, end = self._memory.boxes[self._turn][:, : len(part)], start + len(part)
            boxes[self._place].copy_(part)
            yield from self._meet()
            rows[:, start:end].copy_(boxes)
            start = end

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> CollectiveSteps:
        """Send sent[i] bytes of `tensor` to the member at place i, and receive received[i] bytes from it in `output`.

        A box has a slot for each receiver.
        """
        announced = self._announced()
        announced[self._place] = max(sent)
        yield from self._meet()
        slot = self._memory.box_bytes // self._size
        from_members, to_members = output.split(list(received)), tensor.split(list(sent))
        for start in range(0, max(announced), slot):
            boxes, part = self._memory.boxes[self._turn], slice(start, start + slot)
            for place, message in enumerate(to_members):
                piece = message[part]
                boxes[self._place, place * slot :][: len(piece)].copy_(piece)
            yield from self._meet()
            for place, message in enumerate(from_members):
                piece = message[part]
                piece.copy_(boxes[place, self._place * slot :][: len(piece)])

    def _announced(self) -> memoryview:
        """Return a number of each member, of the current round."""
        first = self._turn * self._size
        return self._memory.announced[first : first + self._size]

    def _find_tensors(self, tensor: torch.Tensor) -> Generator[socket | Work, None, list[torch.Tensor]]:
        """Return the tensors of all members, or none if one is not in its member's arena."""
        announced = self._announced()
        announced[self._place] = self._memory.place_of(tensor)
        yield from self._meet()
        starts = announced.tolist()
        if min(starts) < 0:
            return []
        return [self._memory.of_member(place, start, tensor) for place, start in enumerate(starts)]

    def _allreduce_in_arenas(self, tensors: Sequence[torch.Tensor], op: int) -> CollectiveSteps:
        """Reduce where the tensors are: each member writes its share, and then copies those of the others."""
        own, shares = tensors[self._place], self._shares(len(tensors[0]))
        share = shares[self._place]
        combine_into(own[share], [tensor[share] for tensor in tensors], op)
        yield from self._meet()
        for place, share in self._others(shares):
            own[share].copy_(tensors[place][share])
        yield from self._meet()  # from here on, the caller may change its tensor

    def _allreduce_in_boxes(self, part: torch.Tensor, op: int) -> CollectiveSteps:
        """Reduce a part that fits a box."""
        boxes, shares = self._of(part), self._shares(len(part))
        own = part[shares[self._place]]
        for _, share in self._others(shares):
            boxes[self._place][share].copy_(part[share])
        yield from self._meet()
        rows = [box[shares[self._place]] for box in boxes]
        rows[self._place] = own
        combine_into(own, rows, op)
        results = self._of(part)
        results[self._place][shares[self._place]].copy_(own)
        yield from self._meet()
        for place, share in self._others(shares):
            part[share].copy_(results[place][share])

    def _others(self, shares: Sequence[slice]) -> Iterator[tuple[int, slice]]:
        return ((place, share) for place, share in enumerate(shares) if place != self._place)

    def _shares(self, length: int) -> list[slice]:
        """Return which part of `length` elements each member reduces."""
        bounds = [length * place // self._size for place in range(self._size + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]


def _batches(tensors: Iterable[torch.Tensor], num_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of parts of `tensors` (1-D, uint8), in their order, with at most `num_bytes` in a list."""
    parts: list[torch.Tensor] = []
    free = num_bytes
    for tensor in tensors:
        start, length = 0, tensor.numel()
        while start < length:
            taken = min(free, length - start)
            parts.append(tensor if taken == length else tensor[start : start + taken])
            start, free = start + taken, free - taken
            if not free:
                yield parts
                parts, free = [], num_bytes
    if parts:
        yield parts


def combine_into(into: torch.Tensor, tensors: Sequence[torch.Tensor], op: int) -> None:
    """Write the reduction of `tensors`, in their order, to `into`, which may be one of them."""
    combine = REDUCE_OPERATIONS[op].combine
    if len(tensors) == 1:
        if tensors[0].data_ptr() != into.data_ptr():
            into.copy_(tensors[0])
        return
    if len(tensors) == 2:
        combine(*tensors, out=into)
        return
    step = _SCRATCH_BYTES // into.element_size()
    for parts in zip(*[tensor.split(step) for tensor in (*tensors, into)], strict=True):
        first, *others, last, target = parts
        total = first
        for other in others:
            total = combine(total, other)
        combine(total, last, out=target)
