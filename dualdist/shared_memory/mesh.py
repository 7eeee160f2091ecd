"""The memory that the members of a group share, and the Unix sockets by which they wait for each other.

In a barrier, each member signals the members at distances 1, 2, 4, ... and waits for as many (the dissemination barrier
of Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization"). A waiting member sleeps in poll(2),
which costs no CPU time on a host with more processes than cores. The kernel closes the sockets of a process that dies.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from ..core.meeting.links import Links
from ..errors import HorovodInternalError, logger

# The shared memory: anonymous (memfd), so that it ends with the last process that uses it, even if all are killed.
#
# Only processes that receive its descriptor can map it. The kernel gives it pages when they are used, and the size of
# /dev/shm does not limit it. It has two sets of boxes, one box a member, and an arena for each member: a range from
# which the member allocates tensors that the others read where they are.

PAGE_BYTES = mmap.PAGESIZE
_BOX_BYTES, _MOST_BYTES = 8 << 20, 16 << 20
"""Larger boxes do not fit the cache of a core. All boxes of a set together take at most `_MOST_BYTES`."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long


def box_bytes(size: int) -> int:
    """Return the length of a box of `size` members."""
    return max(PAGE_BYTES, min(_BOX_BYTES, _MOST_BYTES // size) // PAGE_BYTES * PAGE_BYTES)


def _arena_bytes(size: int) -> int:
    """Return the length of one arena. Together they are as long as the memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // size // PAGE_BYTES * PAGE_BYTES


def _announced_bytes(size: int) -> int:
    """Return the length of what comes before the boxes: two numbers of 8 bytes a member."""
    return math.ceil(16 * size / PAGE_BYTES) * PAGE_BYTES


def make_memory(size: int) -> int:
    """Return the descriptor of new memory for `size` members. Raises OSError when the system has none to give."""
    descriptor = os.memfd_create("dualdist", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _announced_bytes(size) + size * (2 * box_bytes(size) + _arena_bytes(size)))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Memory:
    """The memory as one member sees it."""

    def __init__(self, descriptor: int, place: int, size: int) -> None:
        """Map the memory. Raises OSError when a limit of the process does not allow it."""
        self._map = mmap.mmap(descriptor, 0)
        # A core dump would read all of it, and so fill the memory of the host.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._place, self._arena_bytes = place, _arena_bytes(size)
        self.box_bytes = box_bytes(size)
        boxes_start = _announced_bytes(size)
        boxes_end = boxes_start + 2 * size * self.box_bytes
        self.boxes = self._bytes[boxes_start:boxes_end].view(2, size, self.box_bytes)
        """Which set, which member, which byte."""
        self.announced = memoryview(self._map)[: 16 * size].cast("q")
        """For each set and member, a number that the member tells the others."""
        self._arenas_start = boxes_end
        self._free = [(boxes_end + place * self._arena_bytes, self._arena_bytes)]
        """Free ranges of this member's arena, as (start, length), ascending."""
        self._released: deque[tuple[int, int]] = deque()
        """Ranges to be added to `_free`. Destructors run at any time, also inside `zeros`."""
        self._process_id = os.getpid()
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._is_private = False
        _memories.add(self)

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return zeros in this member's arena, ((length,), dtype); None when the arena is full. Not thread-safe."""
        while self._released:
            bisect.insort(self._free, self._released.popleft())
        self._free = _merged(self._free)
        num_bytes = math.ceil(length * dtype.itemsize / PAGE_BYTES) * PAGE_BYTES
        for index, (start, free) in enumerate(self._free):
            if 0 < num_bytes <= free:
                self._free[index : index + 1] = [(start + num_bytes, free - num_bytes)]
                owner = (ctypes.c_byte * num_bytes).from_buffer(self._map, start)
                weakref.finalize(owner, self._release, start, num_bytes).atexit = False
                return torch.frombuffer(owner, dtype=dtype, count=length)
        return None

    def _release(self, start: int, num_bytes: int) -> None:
        # Not in a forked process, which would take the memory from its parent.
        if os.getpid() == self._process_id:
            self._map.madvise(mmap.MADV_REMOVE, start, num_bytes)
            self._released.append((start, num_bytes))

    def make_private(self) -> None:
        """In a forked process: what it writes to inherited gradients does not change those of its parent.

        They are read-only, so that a write ends the process, if the system counts memory before it is used, and has not
        enough.
        """
        if self._is_private:
            return  # by an earlier fork, which may have written to them
        self._is_private = True
        start, num_bytes = self._arenas_start + self._place * self._arena_bytes, self._arena_bytes
        address, flags = self._bytes.data_ptr() + start, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
            if _mmap(address, num_bytes, protection, flags, self._descriptor, start) == address:
                self._map.madvise(mmap.MADV_DONTDUMP, start, num_bytes)
                return
        logger.warning("What this forked process writes to gradients changes those of its parent: mmap failed.")

    def place_of(self, tensor: torch.Tensor) -> int:
        """Return where in this member's arena `tensor` starts, in bytes; -1 for elsewhere."""
        start = tensor.data_ptr() - self._bytes.data_ptr() - self._arenas_start - self._place * self._arena_bytes
        return start if 0 <= start < self._arena_bytes else -1

    def of_member(self, place: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor at `start` in the arena of the member at `place`, with the length and dtype of `like`."""
        begin = self._arenas_start + place * self._arena_bytes + start
        return self._bytes[begin : begin + like.nbytes].view(like.dtype)


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
"""Those that exist. Gradients keep theirs after `shutdown`."""


def _after_fork() -> None:
    for memory in list(_memories):
        memory.make_private()


os.register_at_fork(after_in_child=_after_fork)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, length in ranges:
        if merged and sum(merged[-1]) == start:
            start, length = merged[-1][0], merged.pop()[1] + length
        merged.append((start, length))
    return merged


def _has_signal(connection: socket.socket) -> bool:
    """Return whether a signal has arrived. Raises OSError if none can arrive any more."""
    try:
        if not connection.recv(1):
            raise ConnectionResetError
    except BlockingIOError:
        return False
    return True


class Mesh(Links):
    """The links of one member, by which members wait for each other."""

    _is_closed = False

    def pass_on(self, descriptor: int | None, seconds: float) -> int:
        """Return the descriptor of the memory. Collective. Raises OSError.

        descriptor: that of place 0, which passes it on in a tree; None on the others. seconds: to wait for it.
        """
        # In the tree, the parent of a place is the place without its highest bit.
        child_step = 1 << self.rank.bit_length()
        if descriptor is None:
            parent = self.sockets[self.rank - child_step // 2]
            parent.settimeout(seconds)
            _, received, _, _ = socket.recv_fds(parent, 1, 1)
            if not received:
                raise OSError("a member has left")
            descriptor = received[0]
            parent.setblocking(False)
        for step in self.steps:
            if step >= child_step and self.rank + step < self.size:
                socket.send_fds(self.sockets[self.rank + step], [b"\0"], [descriptor])
        return descriptor

    def barrier(self) -> Iterator[socket.socket]:
        """Meet the other members; yield the socket for whose data to wait next, until it has arrived.

        Raises HorovodInternalError when a member has left.
        """
        for step in self.steps:
            place = (self.rank + step) % self.size
            try:
                self.sockets[place].send(b"\0", socket.MSG_NOSIGNAL)
                place = (self.rank - step) % self.size
                while not _has_signal(self.sockets[place]):
                    yield self.sockets[place]
            except (OSError, KeyError) as error:
                raise self._left(place) from error

    def check(self) -> None:
        """Raise HorovodInternalError if a member has left, or if this one has closed its connections. Local."""
        for place in self.hung_up():
            raise self._left(place)
        if self._is_closed:
            raise HorovodInternalError("the connections to the other ranks of this host are closed")

    def _left(self, place: int) -> HorovodInternalError:
        return HorovodInternalError(f"rank {self.ranks[place]} has left")

    def close(self) -> None:
        self._is_closed = True
        super().close()
