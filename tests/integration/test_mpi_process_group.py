"""The process group over mpi4py, called through torch.distributed's own functions."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist

from dualdist.mpi.communicator import Buffer

from ..helpers.mpi_values import COMPLEX, FLOATS, WHOLE, combined, mine, pieces, pieces_of, same, world
from ..helpers.world import everywhere

pytestmark = pytest.mark.world_kinds("torch-mpi")

MOVED = (*FLOATS, *COMPLEX, *WHOLE, torch.bool, torch.float8_e4m3fn)


@everywhere
def test_every_memory_layout_is_read_and_written() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(12.0).view(3, 4) * (rank + 1)
    total = size * (size + 1) / 2
    views = [whole.clone().t(), torch.stack([whole, whole], 2)[:, :, 1], whole.clone()[:, ::2]]
    for view in (*views, torch.tensor(5.0), torch.ones(0)):
        wanted = view / (rank + 1) * total if view.dim() else torch.tensor(5.0 * size)
        dist.all_reduce(view)
        assert torch.equal(view, wanted)
    root = size - 1
    view = whole.clone().t()
    dist.broadcast(view, root)
    assert torch.equal(view, torch.arange(12.0).view(3, 4).t() * size)
    output = torch.empty(4, 3 * size).t()
    dist.all_gather_into_tensor(output, whole)
    assert torch.equal(output, torch.cat([torch.arange(12.0).view(3, 4) * (k + 1) for k in range(size)]))
    conjugate = torch.tensor([1 + 2j]).conj()
    world().broadcast([conjugate], dist.BroadcastOptions()).wait()  # dist.broadcast itself refuses it
    assert conjugate.tolist() == [1 - 2j]
    with torch.inference_mode():
        inferred = torch.ones(3, dtype=torch.bfloat16)
        dist.all_reduce(inferred)
    assert inferred.tolist() == [float(size)] * 3
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    assert leaf.tolist() == [float(size)] * 2


@pieces
@everywhere
def test_every_dtype_is_moved_by_every_collective(largest: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    with pieces_of(largest):
        for dtype in MOVED:
            all_of_them = [mine(k, 7, dtype) for k in range(size)]
            tensor = mine(rank, 7, dtype)
            dist.broadcast(tensor, root)
            assert same(tensor, all_of_them[root])
            rows = [torch.zeros(7).to(dtype) for _ in range(size)]
            dist.all_gather(rows, all_of_them[rank])
            assert all(map(same, rows, all_of_them))
            output = torch.zeros(7 * size).to(dtype)
            dist.all_gather_into_tensor(output, all_of_them[rank])
            assert same(output, torch.cat(all_of_them))
            rows = [torch.zeros(7).to(dtype) for _ in range(size)]
            dist.gather(all_of_them[rank], rows if rank == root else None, root)
            assert all(map(same, rows, all_of_them)) == (rank == root)
            output, options = torch.zeros(7 * size).to(dtype), dist.GatherOptions()
            options.rootRank = root
            world().gather_single(output, all_of_them[rank], options).wait()
            assert same(output, torch.cat(all_of_them)) == (rank == root)
            pairs = [[torch.zeros(7).to(dtype), torch.zeros(3).to(dtype)] for _ in range(size)]
            world().allgather_coalesced(pairs, [all_of_them[rank], mine(rank, 3, dtype)]).wait()
            assert all(same(row, whole) for (row, _), whole in zip(pairs, all_of_them, strict=True))
            assert all(same(row, mine(k, 3, dtype)) for k, (_, row) in enumerate(pairs))
            tensor = torch.zeros(7).to(dtype)
            dist.scatter(tensor, all_of_them if rank == root else None, root)
            assert same(tensor, all_of_them[rank])
            output = torch.zeros(7 * size).to(dtype)
            dist.all_to_all_single(output, torch.cat([mine(rank + k, 7, dtype) for k in range(size)]))
            assert same(output, torch.cat([mine(k + rank, 7, dtype) for k in range(size)]))
            rows = [torch.zeros(7).to(dtype) for _ in range(size)]
            dist.all_to_all(rows, [mine(rank + k, 7, dtype) for k in range(size)])
            assert all(same(row, mine(k + rank, 7, dtype)) for k, row in enumerate(rows))


@pieces
@everywhere
def test_tensors_of_members_may_differ_in_size(largest: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pieces_of(largest):
        rows = [torch.zeros(9 * k, 2) for k in range(size)]
        dist.all_gather(rows, torch.full((9 * rank, 2), float(rank)))
        assert all(bool((row == k).all()) for k, row in enumerate(rows))
        inputs = [mine(rank, 5 * k) for k in range(size)]
        output = torch.zeros(5 * rank)
        dist.reduce_scatter(output, inputs)
        assert same(output, combined(operator.add, 5 * rank, torch.float32))
        sent = [5 * (rank + k) for k in range(size)]
        out = torch.cat([torch.full((count, 3), 10.0 * rank + k) for k, count in enumerate(sent)])
        into = torch.zeros(sum(5 * (k + rank) for k in range(size)), 3)
        dist.all_to_all_single(into, out, [5 * (k + rank) for k in range(size)], sent)
        assert torch.equal(into, torch.cat([torch.full((5 * (k + rank), 3), 10.0 * k + rank) for k in range(size)]))


@everywhere
def test_input_and_output_may_share_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(3 * size)
    own = whole[3 * rank : 3 * rank + 3]
    own.copy_(mine(rank, 3))
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, torch.cat([mine(k, 3) for k in range(size)]))
    whole = mine(rank, 3 * size)
    own = whole[3 * rank : 3 * rank + 3]
    dist.reduce_scatter_tensor(own, whole)
    assert torch.equal(own, combined(operator.add, 3 * size, torch.float32)[3 * rank : 3 * rank + 3])


def test_buffers_that_share_memory_overlap() -> None:
    """MPI forbids it; Open MPI may give right numbers all the same."""
    whole = torch.arange(6.0, device="cpu")
    first, middle, last = (Buffer(whole[start : start + 2]) for start in (0, 1, 2))
    assert first.overlaps(middle) and middle.overlaps(first) and middle.overlaps(last)
    assert not first.overlaps(last) and not last.overlaps(first)


@everywhere
def test_coalesced_calls_are_one_work() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [mine(rank, count) for count in (2, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(map(same, tensors, [combined(operator.add, count, torch.float32) for count in (2, 5)]))
    gathered = [torch.zeros(count * size) for count in (2, 5)]
    with dist._coalescing_manager():
        for output, count in zip(gathered, (2, 5), strict=True):
            dist.all_gather_into_tensor(output, mine(rank, count))
    assert torch.equal(gathered[1], torch.cat([mine(k, 5) for k in range(size)]))
    scattered = [torch.zeros(count) for count in (2, 5)]
    with dist._coalescing_manager():
        for output, count in zip(scattered, (2, 5), strict=True):
            dist.reduce_scatter_tensor(output, mine(rank, count * size))
    assert torch.equal(scattered[0], combined(operator.add, 2 * size, torch.float32).chunk(size)[rank])
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        ours = mine(rank)
        world().broadcast([ours], dist.BroadcastOptions())
        dist.barrier(async_op=True)
    manager.wait()
    assert torch.equal(ours, mine(0))


@pieces
@everywhere
def test_messages_match_by_tag_and_report_their_source(largest: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    with pieces_of(largest):
        sends = [dist.isend(mine(rank, 9, torch.int64) * tag, to, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            tensor = torch.zeros(9, dtype=torch.int64)
            assert dist.recv(tensor, source, tag=tag) == source
            assert same(tensor, mine(source, 9, torch.int64) * tag)
        for send in sends:
            assert send is not None and send.wait()
        tensor = torch.zeros(9)
        operations = [dist.P2POp(dist.isend, mine(rank, 9), to), dist.P2POp(dist.irecv, tensor, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert same(tensor, mine(source, 9))
    if rank == 0:
        numbers = [torch.zeros(2) for _ in range(1, size)]
        sources = [dist.recv(number) for number in numbers]
        assert sorted(sources) == list(range(1, size))
        assert all(bool((number == k).all()) for k, number in zip(sources, numbers, strict=True))
    else:
        dist.send(torch.full((2,), float(rank)), 0)


@everywhere
def test_a_message_of_another_size_is_an_error() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.isend(torch.ones(4), (rank + 1) % size)
    with pytest.raises(RuntimeError, match=f"MPI: recv from {(rank - 1) % size} failed on rank {rank} of {size}"):
        dist.recv(torch.zeros(2), (rank - 1) % size)
    assert work is not None
    work.wait()
    work = dist.isend(torch.ones(2), (rank + 1) % size)
    with pytest.raises(RuntimeError, match="takes 16 bytes, but 8 were sent"):
        dist.recv(torch.zeros(4), (rank - 1) % size)
    assert work is not None
    work.wait()
    dist.barrier()


@everywhere
def test_functional_collectives_of_torch() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    group = world()
    name = group.group_name
    ops = torch.ops._c10d_functional
    wait = ops.wait_tensor
    whole = mine(rank, 2 * size)
    for found in (
        functional.all_reduce(whole, "sum", group),
        functional.all_reduce_coalesced([whole], "sum", group)[0],
    ):
        assert torch.equal(found, combined(operator.add, 2 * size, torch.float32))
    assert torch.equal(whole, mine(rank, 2 * size))
    assert torch.equal(functional.broadcast(whole, size - 1, group), mine(size - 1, 2 * size))
    gathered = wait(ops.all_gather_into_tensor(mine(rank, 3), size, name))
    assert torch.equal(gathered, torch.cat([mine(k, 3) for k in range(size)]))
    scattered = wait(ops.reduce_scatter_tensor(whole, "avg", size, name))
    assert torch.equal(scattered, combined(operator.add, 2 * size, torch.float32).chunk(size)[rank] / size)
    (gathered,) = map(wait, ops.all_gather_into_tensor_coalesced([mine(rank, 3)], size, name))
    assert torch.equal(gathered, torch.cat([mine(k, 3) for k in range(size)]))
    (scattered,) = map(wait, ops.reduce_scatter_tensor_coalesced([whole], "sum", size, name))
    assert torch.equal(scattered, combined(operator.add, 2 * size, torch.float32).chunk(size)[rank])
    exchanged = functional.all_to_all_single(whole, None, None, group)
    assert torch.equal(exchanged, torch.cat([mine(k, 2 * size).chunk(size)[rank] for k in range(size)]))
