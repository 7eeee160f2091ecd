"""join: ranks without more data take part in the collectives of the other ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("numel", [1, 5000])
@everywhere
def test_sum_counts_the_active_ranks_and_average_divides_by_all(numel: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        active = [other + 1.0 for other in range(size) if other >= step]
        total = hvd.allreduce(torch.full((numel,), rank + 1.0), op=hvd.Sum)
        mean = hvd.allreduce(torch.full((numel,), rank + 1.0))
        assert total.tolist() == [sum(active)] * numel
        assert mean.tolist() == pytest.approx([sum(active) / size] * numel)
    assert hvd.join() == size - 1
    check_next_calls_work()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bfloat16], ids=str)
@everywhere
def test_min_max_and_product_ignore_the_ranks_that_have_joined(dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank > 0:
        active = list(range(1, size))
        for numel in (1, 5000):
            held = torch.full((numel,), rank + 3, dtype=dtype)
            product = 1
            for other in active:
                product *= other + 3
            assert hvd.allreduce(held, op=hvd.Min).tolist() == [min(active) + 3] * numel
            assert (
                hvd.allreduce(-held if dtype.is_signed else held, op=hvd.Max).tolist()
                == [-(min(active) + 3) if dtype.is_signed else max(active) + 3] * numel
            )
            assert hvd.allreduce(held, op=hvd.Product).tolist() == [product] * numel
    assert 1 <= hvd.join() < size or size == 1


@everywhere
def test_groups_and_factors_work_while_a_rank_has_joined() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank > 0:
        result = hvd.grouped_allreduce(
            [torch.ones(2), torch.ones(5000, dtype=torch.int32), torch.tensor([True])], op=hvd.Sum, postscale_factor=2.0
        )
        assert result[0].tolist() == [2 * (size - 1)] * 2
        assert result[1].tolist() == [2 * (size - 1)] * 5000
        assert result[2].tolist() == [True]
    hvd.join()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("numel", [3, 5000])
@everywhere
def test_integers_are_scaled_while_a_rank_has_joined(numel: int, dtype: torch.dtype) -> None:
    """Small integers are scaled and reduced in a wider dtype, so that the rank that has joined must use that, too."""
    rank, others = hvd.rank(), hvd.size() - 1
    held = torch.full((numel,), 3, dtype=dtype)
    if rank > 0:
        assert hvd.allreduce(held, op=hvd.Sum, postscale_factor=2.0).tolist() == [6 * others] * numel
        assert hvd.allreduce(held, op=hvd.Product, postscale_factor=2.0).tolist() == [2 * 3**others] * numel
        for op in (hvd.Min, hvd.Max):
            scaled = hvd.allreduce(held, op=op, prescale_factor=40000.0, postscale_factor=1 / 40000)
            assert scaled.tolist() == [3] * numel
    hvd.join()


@everywhere
def test_barrier_passes_while_a_rank_has_joined() -> None:
    if hvd.rank() > 0:
        hvd.barrier()
        hvd.barrier()
    hvd.join()
    hvd.barrier()


@everywhere
def test_other_collectives_raise_while_a_rank_has_joined_and_the_next_call_works() -> None:
    rank, size = hvd.rank(), hvd.size()
    if rank > 0:
        for call in (
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.alltoall(torch.ones(6)),
            lambda: hvd.reducescatter(torch.ones(6)),
        ):
            with pytest.raises(hvd.HorovodInternalError, match=r"not supported with Join.*ranks 0 have joined"):
                call()  # type: ignore[no-untyped-call]
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size - 1] * 2
    hvd.join()
    check_next_calls_work()


@pytest.mark.ranks(3)
@everywhere
def test_a_mismatch_among_the_active_ranks_is_an_error_there_alone() -> None:
    if hvd.rank() > 0:
        with pytest.raises(hvd.CollectiveMismatchError):
            hvd.allreduce(torch.ones(hvd.rank()))
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
    hvd.join()
    check_next_calls_work()


@everywhere
def test_join_returns_the_same_rank_everywhere() -> None:
    for _ in range(3):
        last = hvd.join()
        assert hvd.allgather_object(last) == [last] * hvd.size()
        assert 0 <= last < hvd.size()


@everywhere
def test_async_calls_before_join_are_finished_first() -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    hvd.join()
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


@everywhere
def test_a_joined_rank_contributes_nothing_to_the_gradients_of_the_others() -> None:
    rank, size = hvd.rank(), hvd.size()
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    expected = 0.0
    for step in range(2 * rank + 1):
        optimizer.zero_grad()
        (weight.sum() * (rank + 1)).backward()
        optimizer.step()
        expected -= sum(other + 1 for other in range(size) if step < 2 * other + 1) / size
    assert hvd.join() == size - 1
    assert weight.tolist() == pytest.approx([expected] * 2)
    check_next_calls_work()


@everywhere
def test_uneven_batches_with_two_optimizers_and_sparse_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    scale = torch.nn.Parameter(torch.ones(1))
    first = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    second = hvd.DistributedOptimizer(torch.optim.SGD([scale], lr=1.0))
    for _ in range(rank + 1):
        first.zero_grad()
        second.zero_grad()
        (table(torch.tensor([rank])).sum() + scale.sum()).backward()
        first.step()
        second.step()
    hvd.join()
    rows = [-(other + 1) / size if other < rank else -(rank + 1) / size for other in range(size)]
    assert table.weight[:size, 0].tolist() == pytest.approx(rows)
    taken = sum(sum(other >= step for other in range(size)) / size for step in range(rank + 1))
    assert scale.item() == pytest.approx(1 - taken)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_may_drop_its_optimizer_before_it_joins() -> None:
    def train(batches: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for _ in range(batches):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        return weight[0].item()

    extra = hvd.rank() == 0
    reached = train(2 + extra)
    gc.collect()
    assert hvd.join() == 0
    assert reached == pytest.approx(-2.0 - extra / hvd.size())
    with pytest.raises(hvd.CollectiveMismatchError, match="collectives"):
        train(1 + extra)
        gc.collect()
        train(1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@everywhere
def test_a_rank_that_has_deleted_its_model_contributes_zeros_to_that_of_the_others() -> None:
    """Also after the gradients have become sparse, which the deleted one does not know yet."""
    rank, size = hvd.rank(), hvd.size()
    table: Any = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.ones_(table.weight)
    models: Any = [hvd.DistributedDataParallel(model) for model in (table, torch.nn.Linear(1, 1, bias=False))]
    for step in range(3):
        for model in models:
            model.zero_grad()
        total = (models[0](torch.tensor([1])).sum() if step else 0.0) + models[1](torch.ones(1, 1)).sum()
        (total * (rank + 1.0)).backward()
        if step == 0 and rank == 0:
            models.clear()
            break
        active = [other + 1.0 for other in range(size) if other or not step]
        assert models[1].module.weight.grad.item() == pytest.approx(sum(active) / size)
        if step:
            expected = torch.zeros(4, 2)
            expected[1] = sum(active) / size
            torch.testing.assert_close(table.weight.grad.to_dense(), expected)
    hvd.join()
    check_next_calls_work()
