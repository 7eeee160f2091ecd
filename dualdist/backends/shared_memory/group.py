"""A Group whose members share memory, wrapped around the Group of another backend."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence

import torch

from ...rendezvous import own_node
from ..base import Group, Work
from .memory import Memory, make_memory
from .mesh import ADDRESS_BYTES, Mesh
from .rounds import Rounds
from .works import Works

__all__ = ("HostGroup", "share_host")

logger = logging.getLogger("dualdist")

_NO_ADDRESS = bytes(ADDRESS_BYTES)
_CONNECT_SECONDS = 30.0
_SMALL_BYTES = 1 << 20
"""Up to this size, of the tensors of all members together, one round is faster than two."""


class HostGroup(Group):
    """Reduces tensors on the CPU in shared memory, and uses the wrapped group for everything else."""

    def __init__(self, inner: Group, memory: Memory, rounds: Rounds, works: Works) -> None:
        self.ranks, self.rank, self.size = inner.ranks, inner.rank, inner.size
        self.reduce_dtypes = inner.reduce_dtypes
        self._inner, self._memory, self._rounds, self._works = inner, memory, rounds, works

    def wire_device(self, device: torch.device) -> torch.device:
        return self._inner.wire_device(device)

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shared = self._memory.zeros(length, dtype) if device.type == "cpu" else None
        return super().zeros(length, dtype, device) if shared is None else shared

    # `.data` has a version counter of its own: a collective is no in-place operation for autograd.

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        if tensor.device.type != "cpu":
            return self._inner.allreduce_(tensor, op, tag)
        if tensor.nbytes * self.size <= _SMALL_BYTES:
            return self._works.begin(self._rounds.allreduce_small(tensor.data, op))
        return self._works.add(self._rounds.allreduce(tensor.data, op))

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._inner.broadcast_(tensor, root)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        return self._inner.allgather(output, tensor)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        return self._inner.alltoall(output, tensor, received, sent)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a collective waits for another member. Local."""
        self._works.timeout = seconds

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._works.close()
        self._inner.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        self._works.abandon()


def share_host(inner: Group, timeout: float) -> HostGroup | None:
    """Return a group that uses shared memory, or None if not all members of `inner` are on this host. Collective.

    timeout: seconds until a collective fails.
    """
    if inner.rank < 0 or inner.size < 2:
        return None
    node = hashlib.sha256(own_node().encode()).digest()
    if any(other != node for other in inner.allgather_bytes(node)):
        return None
    problem: OSError | None = None
    try:
        mesh = Mesh(inner.ranks, inner.rank, min(timeout, _CONNECT_SECONDS))
    except OSError as error:
        mesh, problem = None, error
    addresses = inner.allgather_bytes(mesh.address if mesh is not None else _NO_ADDRESS)
    memory = None
    if mesh is not None and _NO_ADDRESS not in addresses:
        try:
            memory = _share_memory(mesh, addresses, inner)
        except OSError as error:
            problem = error
    have_failed = b"\0" in inner.allgather_bytes(bytes([memory is not None]))
    if mesh is not None and memory is not None and not have_failed:
        rounds = Rounds(mesh, memory, inner.rank, inner.size)
        return HostGroup(inner, memory, rounds, Works(mesh, "dualdist-shared-memory", timeout))
    if mesh is not None:
        mesh.close()
    if problem is not None:
        logger.warning("Ranks of one host use the network, because they cannot share memory: %s.", problem)
    return None


def _share_memory(mesh: Mesh, addresses: list[bytes], inner: Group) -> Memory:
    """Connect the members and return the memory that they share. Raises OSError."""
    descriptor = make_memory(inner.size) if inner.rank == 0 else None
    try:
        descriptor = mesh.connect(addresses, descriptor)
        return Memory(descriptor, inner.rank, inner.size)
    finally:
        if descriptor is not None:
            os.close(descriptor)
