"""The tensors that ranks pass to the process group over mpi4py, and the expected results in plain arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import torch
import torch.distributed as dist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@contextlib.contextmanager
def pieces_of(num_bytes: int) -> Iterator[None]:
    """Send in pieces of so many bytes, as messages over the limit of MPI's counts are."""
    from dualdist.mpi import communicator

    before, communicator.LARGEST_BYTES = communicator.LARGEST_BYTES, num_bytes
    try:
        yield
    finally:
        communicator.LARGEST_BYTES = before


pieces = pytest.mark.parametrize("largest", [1 << 30, 24], ids=["whole", "pieces"])


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def mine(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what `rank` puts in: numbers that differ by rank and place, and fit every dtype."""
    return torch.tensor([(3 * rank + place) % 5 + 1 for place in range(count)]).to(dtype)


def combined(function: Callable[[int, int], int], count: int, dtype: torch.dtype) -> torch.Tensor:
    columns = zip(*(mine(rank, count).int().tolist() for rank in range(dist.get_world_size())), strict=True)
    return torch.tensor([reduce(function, column) for column in columns]).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit; not every dtype can be compared."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found, wanted)
    found, wanted = found.resolve_conj().contiguous().view(-1), wanted.resolve_conj().contiguous().view(-1)
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
