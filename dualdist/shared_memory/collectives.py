"""Collectives in shared memory, as rounds: each member writes its box, all meet, and each reads the boxes.

An allreduce of a small tensor takes one round, in which each member reduces all boxes by itself. For larger ones each
member reduces a share, and the others copy it, which takes two rounds and less reading.

There are two sets of boxes, which the rounds use in turns. So one barrier a round is enough: a member that writes a box
again has met the others in the round between, and these had read the box before.

A collective is a generator, which yields what it waits for. A queue runs those of one group in the order of the calls.
"""

from __future__ import annotations

import contextlib
import functools
import select
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise
from socket import socket
from typing import Any

import torch

from ..core.backends.base import Group, Work
from ..core.process import Worker
from ..core.types import Max, Min, Product, Sum
from ..errors import HorovodInternalError, StallError
from .mesh import Memory, Mesh

CollectiveSteps = Iterator[socket | Work]
"""A collective in progress. It yields what it waits for: the data of a socket, or a collective over the network."""

_COMBINE: dict[int, Any] = {Sum: torch.add, Min: torch.minimum, Max: torch.maximum, Product: torch.mul}
_SCRATCH_BYTES = 128 << 10
"""Sums of three and more tensors are made in parts of this size, which stay in the cache."""

_MESSAGE_BYTES = 4 << 20
"""How much a broadcast sends in a round. With less, the ranks wait more often; with more, they copy in turns."""

# Allreduce of members on several hosts: in shared memory within a host, over the network between hosts.
#
# A tensor is reduced in chunks, and of each chunk the first members of every host own one share each. An owner reduces
# its share of the tensors of its host, and then reduces it with the owners of this share on the other hosts. The other
# members of its host copy the result. NCCL and Horovod do the same between GPUs and hosts (Horovod:
# horovod/common/ops/nccl_operations.cc, NCCLHierarchicalAllreduce). A host sends 2 (h - 1) / h of the tensor with h
# hosts. A ring of all n members sends 2 (n - 1) / n of it from each host.
#
# Every share needs an owner on every host. Therefore the host with the fewest members sets the number of shares.
#
# While the network carries some chunks, the members reduce the next one.

_CHUNKS_IN_FLIGHT = 2
"""How many chunks the network carries at most while the members reduce another one."""


class Rounds:
    """The collectives of one member. All members run the same ones in the same order. Places are those on its host."""

    def __init__(
        self, mesh: Mesh, memory: Memory, chunk_bytes: int = 0, num_owners: int = 0, network: Group | None = None
    ) -> None:
        """chunk_bytes, num_owners: the same on all hosts; 0: there is only one. A chunk fits a box.

        network: the owners of this member's share on all hosts; None if it owns none.
        """
        self.mesh, self.memory, self.network = mesh, memory, network
        self._place, self._size = mesh.rank, mesh.size
        self._chunk_bytes, self._num_owners = chunk_bytes, num_owners or mesh.size
        self._turn = 0
        """Which of the two sets the current round uses."""

    def _of(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the boxes of the current round, with the length and dtype of `part`."""
        boxes = self.memory.boxes[self._turn].view(part.dtype)
        return list(boxes[:, : len(part)].unbind())

    def _meet(self) -> CollectiveSteps:
        yield from self.mesh.barrier()
        self._turn = 1 - self._turn

    def allreduce(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Reduce `tensor` (1-D) in place, in the order of the places, so that all members have the same bits."""
        found = [tensor] if self._size == 1 else (yield from self._find_tensors(tensor))
        num_bytes = self._chunk_bytes or (tensor.nbytes if found else self.memory.box_bytes)
        length = num_bytes // tensor.element_size()
        sent: deque[tuple[torch.Tensor, list[torch.Tensor], Work | None]] = deque()
        for part, *parts in zip(*[one.split(length) for one in (tensor, *found)], strict=True):
            yield from self._reduce_share(part, parts, op)
            sent.append((part, parts, self._send(part, op)))
            if not self._chunk_bytes or len(sent) > _CHUNKS_IN_FLIGHT:
                yield from self._copy_shares(*sent.popleft())
        while sent:
            yield from self._copy_shares(*sent.popleft())
        if found:
            yield from self._meet()  # from here on, the caller may change its tensor

    def _send(self, part: torch.Tensor, op: int) -> Work | None:
        """Start reducing this member's share with the other hosts."""
        own = self._own_share(part)
        return None if self.network is None or own.start == own.stop else self.network.allreduce_(part[own], op)

    def allreduce_small(self, tensor: torch.Tensor, op: int) -> CollectiveSteps:
        """Do what `allreduce` does in one round, in which each member adds all tensors. `tensor` must fit a box.

        Of two members, one that waits has already done all that the other one needs.
        """
        boxes = self._of(tensor)
        boxes[self._place].copy_(tensor)
        yield from self._meet()
        combine_into(tensor, boxes, op)

    def broadcast(self, tensors: Iterable[torch.Tensor], root: int) -> CollectiveSteps:
        """Overwrite `tensors` (1-D, uint8) with those of the member at place `root`, which writes to all boxes."""
        for parts in _batches(tensors, min(_MESSAGE_BYTES, self.memory.boxes[0].nbytes)):
            lengths = [part.numel() for part in parts]
            boxes = self.memory.boxes[self._turn].view(-1)[: sum(lengths)].split(lengths)
            if self._place == root:
                torch._foreach_copy_(boxes, parts)
            yield from self._meet()
            if self._place != root:
                torch._foreach_copy_(parts, boxes)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> CollectiveSteps:
        """Fill `output` ((size * n,), uint8) with every member's `tensor` ((n,), uint8), in the order of the places."""
        start, rows = 0, output.view(self._size, -1) if len(output) else output
        for part in tensor.split(self.memory.box_bytes):
            boxes, end = self.memory.boxes[self._turn][:, : len(part)], start + len(part)
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
        slot = self.memory.box_bytes // self._size
        from_members, to_members = output.split(list(received)), tensor.split(list(sent))
        for start in range(0, max(announced), slot):
            boxes, part = self.memory.boxes[self._turn], slice(start, start + slot)
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
        return self.memory.announced[first : first + self._size]

    def _find_tensors(self, tensor: torch.Tensor) -> Generator[socket | Work, None, list[torch.Tensor]]:
        """Return the tensors of all members, or none if one is not in its member's arena."""
        announced = self._announced()
        announced[self._place] = self.memory.place_of(tensor)
        yield from self._meet()
        starts = announced.tolist()
        if min(starts) < 0:
            return []
        return [self.memory.of_member(place, start, tensor) for place, start in enumerate(starts)]

    def _reduce_share(self, part: torch.Tensor, found: Sequence[torch.Tensor], op: int) -> CollectiveSteps:
        """Reduce this member's share of `part`. found: `part` of all members; if empty, it goes through the boxes."""
        rows = found
        if not found:
            rows = self._of(part)
            for _, share in self._others(part):
                rows[self._place][share].copy_(part[share])
            yield from self._meet()
        own = self._own_share(part)
        into = part[own]
        combine_into(into, [into if row is rows[self._place] else row[own] for row in rows], op)

    def _copy_shares(self, part: torch.Tensor, found: Sequence[torch.Tensor], work: Work | None) -> CollectiveSteps:
        """Wait for the network, and until the others have done the same, and copy their shares of `part`."""
        if work is not None:
            yield work
            work.wait()
        rows = found
        if not found:
            rows = self._of(part)
            own = self._own_share(part)
            rows[self._place][own].copy_(part[own])
        yield from self._meet()
        for place, share in self._others(part):
            part[share].copy_(rows[place][share])

    def _own_share(self, part: torch.Tensor) -> slice:
        return _shares(len(part), self._num_owners)[self._place] if self._place < self._num_owners else slice(0, 0)

    def _others(self, part: torch.Tensor) -> Iterator[tuple[int, slice]]:
        """Return the shares of the other owners, with their places."""
        shares = _shares(len(part), self._num_owners)
        return ((place, share) for place, share in enumerate(shares) if place != self._place)


@functools.lru_cache
def _shares(length: int, num_owners: int) -> Sequence[slice]:
    """Return which part of `length` elements each owner reduces."""
    bounds = [length * place // num_owners for place in range(num_owners + 1)]
    return tuple(slice(*pair) for pair in pairwise(bounds))


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
    combine = _COMBINE[op]
    if len(tensors) == 1:  # `into` itself: the only member on its host
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


_LAST_SECONDS = 1.0
_LOOK_SECONDS = 0.5
"""How often a member that waits for other hosts checks whether the members of its own host are still there."""
_LONGEST_POLL = 2**31 - 1
"""The longest timeout of poll(2): milliseconds in a C int."""


class CollectiveQueue:
    """The collectives that were started and have not ended.

    A collective is queued, then runs, and ends, with or without a problem; after the first problem of a group, all
    others end with the same one. Only the first collective of the queue runs, in the thread that holds the lock: in any
    that waits for a collective, and while none does, in a worker thread. So collectives make progress while the caller
    computes, and a caller that waits needs no switch of threads.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        """timeout: seconds until a collective that waits for another member fails."""
        self._mesh = mesh
        self.timeout = timeout
        self._queued: deque[SharedMemoryWork] = deque()
        self._lock = threading.RLock()
        """Held by the thread that runs a collective. Reentrant: a signal handler may interrupt this thread."""
        self._is_running = False
        """Whether the thread that holds the lock runs a collective: a signal handler may find it so."""
        self._waiting: list[SharedMemoryWork] = []
        """What threads wait for. They run it themselves."""
        self._worker = Worker(self._run_all, "dualdist-shared-memory")
        self._problem: HorovodInternalError | None = None
        """Why no collective can run any more."""

    def start(self, steps: CollectiveSteps, *, at_once: bool = False) -> SharedMemoryWork:
        """Queue a collective.

        at_once: run it in this thread until it must wait. For a small one, or if the caller waits soon.
        """
        work = SharedMemoryWork(self, steps)
        self._queued.append(work)
        if at_once:
            self.run(work, 0.0)
            # After the only round of a small one, the other one of two members needs nothing more from this one.
            if work.deadline is not None and (work.ended or self._mesh.size == 2):
                return work
        self._worker.wake()
        return work

    def run(self, work: SharedMemoryWork, seconds: float | None) -> bool:
        """Run `work`, for at most `seconds`; with 0, as far as is possible without waiting.

        Return False if this is a signal handler or destructor that interrupts another collective of this thread.
        """
        until = None if seconds is None else time.monotonic() + seconds
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            return True
        try:
            if self._is_running:
                return False
            try:
                self._is_running = True
                while not work.ended and self._advance(self._queued[0], until):
                    pass
            finally:
                self._is_running = False
        finally:
            self._lock.release()
        return True

    def finish(self, work: SharedMemoryWork, seconds: float | None = None) -> None:
        """Wait for `work`, at most `seconds`, and run it meanwhile. Its problem is in the work.

        Raises RuntimeError where `run` returns False.
        """
        self._waiting.append(work)
        try:
            if not self.run(work, seconds):
                raise RuntimeError(
                    "A collective must not wait in a signal handler or destructor that interrupts another one: each "
                    "would wait for the other. Let the handler set a flag, and check it after each step."
                )
        finally:
            self._waiting.remove(work)
            if self._queued:
                self._worker.wake()

    def abort(self) -> None:
        """Give up all collectives. The other members notice it. Local."""
        self._fail(HorovodInternalError("this rank has given up its collectives"))

    def close(self) -> None:
        """End the thread and the connections. Local."""
        self._mesh.close()
        self._worker.stop(_LAST_SECONDS)

    def _run_all(self) -> None:
        """Run the collectives to their ends, unless threads wait for one and run it themselves."""
        while self._queued and not self._waiting:
            # What happened is in the work, for the thread that will wait for it.
            with self._lock, contextlib.suppress(Exception):
                if self._queued and not self._waiting:
                    self._advance(self._queued[0], None)

    def _advance(self, work: SharedMemoryWork, until: float | None) -> bool:
        """Run `work`, the first one, until it ends or `until` has passed. Return whether it ended."""
        if work.deadline is None:
            work.deadline = time.monotonic() + self.timeout
        try:
            if self._problem is not None:
                raise self._problem
            for awaited in work.steps:
                limit = work.deadline if until is None else min(until, work.deadline)
                if self._has_arrived(awaited, limit):
                    work.deadline = time.monotonic() + self.timeout
                elif time.monotonic() < work.deadline:
                    return False
                else:
                    raise StallError("A rank sent nothing in time.")
        except HorovodInternalError as error:
            self._end(work, error)
        except BaseException as error:
            self._end(work, HorovodInternalError(f"a collective in shared memory was interrupted: {error!r}"))
            # These: another thread has closed the socket.
            if not isinstance(error, (OSError, ValueError, KeyError)):
                raise
        else:
            self._end(work)
        return True

    def _end(self, work: SharedMemoryWork, problem: HorovodInternalError | None = None) -> None:
        if problem is not None:
            self._fail(problem)
            work.problem = self._problem
        work.steps = iter(())
        work.ended = True
        self._queued.popleft()

    def _has_arrived(self, awaited: socket | Work, until: float) -> bool:
        """Wait until `until` for the data of a socket, or for a collective. Return whether it is there."""
        if not isinstance(awaited, Work):
            poll = select.poll()
            poll.register(awaited, select.POLLIN)
            left = 1e3 * max(0.0, until - time.monotonic())
            return bool(poll.poll(min(_LONGEST_POLL, left)))
        while not awaited.done():
            left = until - time.monotonic()
            if left <= 0:
                return False
            awaited.wait_for(min(left, _LOOK_SECONDS))
            self._mesh.check()
        return True

    def _fail(self, problem: HorovodInternalError) -> None:
        """Let every later collective fail, on the other members too."""
        if self._problem is None:
            self._problem = problem
            self._mesh.close()


class SharedMemoryWork(Work):
    """A collective in shared memory."""

    def __init__(self, queue: CollectiveQueue, steps: CollectiveSteps) -> None:
        self._queue = queue
        self.steps = steps
        self.deadline: float | None = None
        """Until when another member must have sent something; None until the collective runs."""
        self.ended = False
        self.problem: HorovodInternalError | None = None

    def wait(self) -> None:
        self.wait_for(None)
        if self.problem is not None:
            raise type(self.problem)(str(self.problem)) from self.problem

    def wait_for(self, seconds: float | None) -> None:
        if not self.ended:
            self._queue.finish(self, seconds)

    def done(self) -> bool:
        if not self.ended:
            self._queue.run(self, 0.0)
        return self.ended
