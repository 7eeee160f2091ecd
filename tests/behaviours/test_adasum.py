"""Adasum against a plain numpy version of its formula (Maleki et al. 2020, arXiv:2006.02924)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2)

Vector = npt.NDArray[np.float64]


def adasum(a: Vector, b: Vector) -> Vector:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b."""
    dot = float(a @ b)
    return (1 - dot / (2 * float(a @ a))) * a + (1 - dot / (2 * float(b @ b))) * b


def held(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def expected(numel: int) -> torch.Tensor:
    return torch.from_numpy(adasum(held(0, numel).numpy(), held(1, numel).numpy()))


@everywhere
def test_two_vectors_combine_by_the_formula_of_adasum() -> None:
    """Each member of a group by itself."""
    lengths = (1, 7, 300, 5000)
    vectors = [held(hvd.rank(), numel) for numel in lengths]
    alone = [hvd.allreduce(vector, op=hvd.Adasum) for vector in vectors]
    for results in (alone, hvd.grouped_allreduce(vectors, op=hvd.Adasum)):
        for result, numel in zip(results, lengths, strict=True):
            torch.testing.assert_close(result, expected(numel), rtol=1e-12, atol=1e-12)


@everywhere
def test_a_model_whose_steps_are_combined_is_not_wrapped() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Adasum)
    with pytest.raises(TypeError, match="must not have parameters of a DistributedOptimizer"):
        hvd.DistributedDataParallel(model)
    del optimizer
    hvd.DistributedDataParallel(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@everywhere
def test_smaller_dtypes_are_rounded_at_the_end(dtype: torch.dtype) -> None:
    result = hvd.allreduce(held(hvd.rank(), 7).to(dtype), op=hvd.Adasum)
    assert result.dtype == dtype
    inputs = [held(rank, 7).to(dtype).double().numpy() for rank in range(2)]
    torch.testing.assert_close(result, torch.from_numpy(adasum(*inputs)).to(dtype))


@everywhere
def test_orthogonal_vectors_add_parallel_ones_average_and_zero_leaves_the_other() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(torch.eye(2)[rank], op=hvd.Adasum).tolist() == [1, 1]
    assert hvd.allreduce(torch.tensor([1.0, 1.0]), op=hvd.Adasum).tolist() == [1, 1]
    assert hvd.allreduce(torch.tensor([1.0, 1.0]) * (rank * 2 + 1), op=hvd.Adasum).tolist() == [2, 2]
    assert hvd.allreduce(torch.tensor([3.0, 4.0]) * rank, op=hvd.Adasum).tolist() == [3, 4]


@everywhere
def test_optimizer_combines_the_steps_not_the_gradients() -> None:
    rate, start = 0.1, torch.arange(7, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=rate), op=hvd.Adasum)
    (weight * held(hvd.rank(), 7)).sum().backward()
    optimizer.step()
    steps = [-rate * held(rank, 7).numpy() for rank in range(2)]
    torch.testing.assert_close(weight.detach(), start + torch.from_numpy(adasum(*steps)), rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        optimizer.step()


@everywhere
def test_optimizer_keeps_its_own_state_and_takes_a_closure() -> None:
    weight = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.5), op=hvd.Adasum)
    total = np.zeros(7)
    momentum = [np.zeros(7), np.zeros(7)]

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight * held(hvd.rank(), 7)).sum()
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        optimizer.step(closure)
        momentum = [0.5 * old + held(rank, 7).numpy() for rank, old in enumerate(momentum)]
        total += adasum(-momentum[0], -momentum[1])
    torch.testing.assert_close(weight.detach(), torch.from_numpy(total), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3)
@everywhere
def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="power of two"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="power of two"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    hvd.barrier()


@pytest.mark.ranks(1, 2, 3)
@everywhere
def test_the_learning_rate_of_horovods_recipe_is_not_scaled_without_a_gpu() -> None:
    # examples/pytorch of Horovod: hvd.local_size() if hvd.nccl_built() else 1
    assert bool(hvd.nccl_built()) <= torch.cuda.is_available()
