"""Allreduce of tensors of many sizes, which ranks of one host may do in shared memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.styles import sgd
from ..helpers.world import everywhere

LENGTHS = (600_001, 2_300_003)
"""Odd numbers of elements. In float32: 2.4 MB, and 9.2 MB, more than what members of a host exchange at once, 8 MiB."""
SMALL_LENGTHS = (1, 80_001)
"""Members of a host exchange as many elements in one step."""


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(length) + 3 * rank) % 7 + 1).to(dtype)


def is_same_everywhere(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have bitwise equal tensors."""
    rows = hvd.allgather(tensor.view(1, -1))
    return all(torch.equal(row.view(torch.uint8), rows[0].view(torch.uint8)) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
@everywhere
def test_every_operation_of_a_tensor_of_any_size(dtype: torch.dtype) -> None:
    for length in (*SMALL_LENGTHS, *(LENGTHS[:1] if dtype != torch.float32 else LENGTHS)):
        rows = torch.stack([values(rank, length, dtype) for rank in range(hvd.size())])
        own = rows[hvd.rank()].clone()
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), rows.sum(0, dtype=dtype))
        assert torch.equal(hvd.allreduce(own, op=hvd.Min), rows.amin(0))
        assert torch.equal(hvd.allreduce(own, op=hvd.Max), rows.amax(0))
        assert torch.equal(hvd.allreduce(own, op=hvd.Product), rows.prod(0, dtype=dtype))
        assert torch.equal(own, rows[hvd.rank()])


@everywhere
def test_sums_that_are_rounded_are_equal_on_all_ranks() -> None:
    generator = torch.Generator().manual_seed(hvd.rank())
    for length in (SMALL_LENGTHS[1], LENGTHS[1]):
        tensor = torch.randn(length, generator=generator) * 1e3
        assert is_same_everywhere(hvd.allreduce(tensor, op=hvd.Sum))


@everywhere
def test_large_and_small_tensors_in_flight_together() -> None:
    size, total = hvd.size(), hvd.size() * (hvd.size() + 1) / 2
    tensors = [torch.full((length,), hvd.rank() + 1.0) for length in (LENGTHS[0], 3, LENGTHS[0] + 1, 0, 1)]
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum, name=str(k)) for k, tensor in enumerate(tensors)]
    for handle, tensor in zip(reversed(handles), reversed(tensors), strict=True):
        assert torch.equal(hvd.synchronize(handle), torch.full_like(tensor, total))
    with torch.inference_mode():
        inferred = torch.full((LENGTHS[0],), 1.0)
        hvd.allreduce_(inferred, op=hvd.Sum)
        assert torch.equal(inferred, torch.full_like(inferred, size))


@everywhere
def test_small_tensors_in_quick_succession_keep_their_values() -> None:
    total = hvd.size() * (hvd.size() + 1) / 2
    for first in range(0, 40, 4):
        tensors = [torch.full((SMALL_LENGTHS[1],), (hvd.rank() + 1.0) * (first + k)) for k in range(4)]
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{k}") for k, tensor in enumerate(tensors)]
        late = first % hvd.size() == hvd.rank()
        for k, handle in enumerate(handles):
            while late and not hvd.poll(handle):
                pass
            assert torch.equal(hvd.synchronize(handle), torch.full_like(tensors[k], total * (first + k)))


@pytest.mark.parametrize("cap_mb", [None, 0.001])  # one bucket, or a small one and a large one
@everywhere
def test_gradients_of_large_buckets_are_averaged_in_every_step(cap_mb: float | None) -> None:
    torch.manual_seed(0)
    large = nn.Linear(900, 900, bias=False)
    model = nn.Sequential(large, nn.Linear(900, 1, bias=False)).double()
    single = nn.Sequential(nn.Linear(900, 900, bias=False), nn.Linear(900, 1, bias=False)).double()
    single.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (model, single)]
    kept = []
    for step in range(4):
        batch = torch.randn(2 * hvd.size(), 900, generator=torch.Generator().manual_seed(step)).double()
        own: torch.Tensor = wrapped(batch.chunk(hvd.size())[hvd.rank()])
        own.square().mean().backward()
        whole: torch.Tensor = single(batch)
        whole.square().mean().backward()
        for ours, wanted in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-9, atol=1e-9)
        first = large.weight.grad
        assert first is not None
        kept.append((first, first.clone()))  # a gradient that the program keeps stays as it is
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)
    assert is_same_everywhere(large.weight.detach())


@pytest.mark.ranks(3)
@everywhere
def test_large_gradients_outlive_their_process_set() -> None:
    pair = hvd.add_process_set([0, 2])
    model = nn.Linear(1000, 600, bias=False)
    optimizer = sgd(model.parameters(), lr=0.1, named_parameters=model.named_parameters(), process_set=pair)
    model(torch.full((1, 1000), hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    hvd.remove_process_set(pair)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((600, 1000), 2.0))
