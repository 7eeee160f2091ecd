"""Reductions over mpi4py, called through torch.distributed's own functions."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..helpers.mpi_values import COMPLEX, FLOATS, WHOLE, combined, mine, pieces, pieces_of, same, world
from ..helpers.world import everywhere

pytestmark = pytest.mark.world_kinds("torch-mpi")

NUMBERS: dict[Any, Callable[[int, int], int]] = {
    dist.ReduceOp.SUM: operator.add,
    dist.ReduceOp.PRODUCT: operator.mul,
    dist.ReduceOp.MIN: min,
    dist.ReduceOp.MAX: max,
}
BITS: dict[Any, Callable[[int, int], int]] = {
    dist.ReduceOp.BAND: operator.and_,
    dist.ReduceOp.BOR: operator.or_,
    dist.ReduceOp.BXOR: operator.xor,
}


@pieces
@everywhere
def test_allreduce_combines_every_dtype_by_every_operation(largest: int) -> None:
    with pieces_of(largest):
        for ops, dtypes in ((NUMBERS, (*FLOATS, *WHOLE)), (BITS, WHOLE)):
            for op, function in ops.items():
                for dtype in dtypes:
                    tensor = mine(dist.get_rank(), 11, dtype)
                    dist.all_reduce(tensor, op)
                    assert same(tensor, combined(function, 11, dtype)), (op, dtype)
        for dtype in COMPLEX:
            tensor = mine(dist.get_rank(), 11, dtype) * 1j
            dist.all_reduce(tensor)
            assert same(tensor, combined(operator.add, 11, dtype) * 1j)


@everywhere
def test_tensors_of_each_length_are_combined() -> None:
    """Open MPI chooses another algorithm for fewer numbers than ranks."""
    size = dist.get_world_size()
    for length in (*range(1, 10), 65_537, 1_200_001):
        tensor = torch.arange(length) * (dist.get_rank() + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(length) * (size * (size + 1) // 2)), length


@everywhere
def test_open_mpi_adds_by_reduce_scatter_and_allgather() -> None:
    from mpi4py import MPI

    name, library = "coll_libnbc_iallreduce_algorithm", ctypes.CDLL(MPI.__file__)
    place, value, count, handle = ctypes.c_int(), ctypes.c_int(-1), ctypes.c_int(), ctypes.c_void_p()
    assert library.MPI_T_init_thread(MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())) == MPI.SUCCESS
    assert library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(place)) == MPI.SUCCESS
    assert library.MPI_T_cvar_handle_alloc(place, None, ctypes.byref(handle), ctypes.byref(count)) == MPI.SUCCESS
    assert library.MPI_T_cvar_read(handle, ctypes.byref(value)) == MPI.SUCCESS
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    library.MPI_T_finalize()
    assert value.value == 3
    assert f"OMPI_MCA_{name}" not in os.environ


@pytest.mark.ranks(3)
@everywhere
def test_averages_divide_and_small_floats_are_rounded_once() -> None:
    for dtype in (*FLOATS, *COMPLEX):
        tensor = torch.tensor([1.0, 2.0, 6.0]).to(dtype) * (dist.get_rank() + 1)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert same(tensor, torch.tensor([2.0, 4.0, 12.0]).to(dtype))
    whole = torch.tensor([-1 - dist.get_rank(), 5])
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [-2, 5]
    odd = torch.tensor([-1 if dist.get_rank() else 0])  # -2 / 3
    dist.all_reduce(odd, dist.ReduceOp.AVG)
    assert odd.tolist() == [0]
    # 256 + 1 is 256 in bfloat16.
    half = torch.tensor([256.0 if dist.get_rank() == 0 else 1.0]).to(torch.bfloat16)
    dist.all_reduce(half)
    assert half.tolist() == [258.0]


@everywhere
def test_bools_are_combined_as_bools() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, wanted in (
        (dist.ReduceOp.SUM, [True, True, False]),
        (dist.ReduceOp.MAX, [True, True, False]),
        (dist.ReduceOp.PRODUCT, [True, False, False]),
        (dist.ReduceOp.BXOR, [size % 2 == 1, True, False]),
    ):
        tensor = torch.tensor([True, rank == 0, False])
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == wanted and tensor.view(torch.uint8).max() == 1


@everywhere
def test_what_mpi_cannot_combine_is_refused_and_the_next_call_works() -> None:
    for dtype, op in (
        (torch.float32, dist.ReduceOp.BAND),
        (torch.bool, dist.ReduceOp.AVG),
        (torch.float32, dist._make_nccl_premul_sum(2.0)),
    ):
        with pytest.raises(RuntimeError, match=r"over MPI must be one of SUM, .* instead"):
            dist.all_reduce(torch.ones(2).to(dtype), op)
    with pytest.raises(RuntimeError, match="must be dense and on the CPU"):
        dist.broadcast(torch.ones(2, device="meta"), 0)
    with pytest.raises(RuntimeError, match=r"must take \d+ bytes, but takes 4"):
        world()._allgather_base(torch.ones(1), torch.ones(2))
    with pytest.raises(RuntimeError, match="`tag` must be at least 0"):
        dist.isend(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=-1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()]


@pieces
@everywhere
def test_reduce_and_reduce_scatter(largest: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pieces_of(largest):
        for dtype in (*FLOATS, *WHOLE):
            tensor = mine(rank, 11, dtype)
            dist.reduce(tensor, size - 1)
            assert same(tensor, combined(operator.add, 11, dtype) if rank == size - 1 else mine(rank, 11, dtype))
            total = combined(operator.add, 8 * size, dtype).chunk(size)[rank]
            output = torch.zeros(8).to(dtype)
            dist.reduce_scatter_tensor(output, mine(rank, 8 * size, dtype))
            assert same(output, total)
            output = torch.zeros(8).to(dtype)
            dist.reduce_scatter(output, list(mine(rank, 8 * size, dtype).chunk(size)))
            assert same(output, total)
        average = torch.zeros(2)
        dist.reduce_scatter_tensor(average, torch.arange(2.0 * size) * (2 * rank + 2), dist.ReduceOp.AVG)
        assert torch.equal(average, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * (size + 1))
