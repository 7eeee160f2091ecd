"""Gradients of every dtype: mixed in one model, compressed, and under mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.backends.base import Group
from dualdist.core.world import current

from ..helpers.exchanges import reductions
from ..helpers.styles import sgd
from ..helpers.world import everywhere


@everywhere
def test_parameters_of_every_dtype_shape_and_layout() -> None:
    mine, total = hvd.rank() + 1, sum(range(1, hvd.size() + 1))
    params = [
        nn.Parameter(torch.zeros(3, dtype=torch.float16)),
        nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros((), dtype=torch.float64)),
        nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(3, 2).t()),
        nn.Parameter(torch.zeros(0, 4)),
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
    for number in (1, 2):
        optimizer.zero_grad()
        torch.stack([torch.view_as_real(p).sum() if p.is_complex() else p.sum().float() for p in params]).sum().mul(
            mine
        ).backward()
        for param in params:
            assert param.grad is not None
            assert param.grad.dtype == param.dtype and param.grad.stride() == param.stride()
        optimizer.step()
        for param in params:
            expected = complex(-number * total, -number * total) if param.is_complex() else -number * total
            assert torch.equal(param.detach(), torch.full_like(param, expected))


@everywhere
def test_gradients_that_torch_conjugates_when_they_are_read() -> None:
    waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([waves], lr=1.0))
    mean = (hvd.size() + 1) / 2
    for _ in range(2):
        optimizer.zero_grad()
        (waves.conj() * (1 - 2j)).real.sum().mul(hvd.rank() + 1.0).backward()
        assert waves.grad is not None
        torch.testing.assert_close(waves.grad, torch.full((2,), mean * (1 - 2j), dtype=torch.complex64))
        optimizer.step()
    optimizer.zero_grad()
    waves.grad = torch.full((2,), complex(hvd.rank() + 1, 1), dtype=torch.complex64).conj()
    optimizer.synchronize()
    torch.testing.assert_close(waves.grad, torch.full((2,), complex(mean, -1), dtype=torch.complex64))


@everywhere
def test_an_average_in_float16_does_not_overflow() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * 48000).sum().backward()  # the sum of two ranks is above 65504, the largest float16
    assert weight.grad is not None
    assert weight.grad.tolist() == [48000.0] * 3
    optimizer.synchronize()


@everywhere
def test_compression_rounds_as_the_smaller_dtype_does() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.bf16)
    optimizer.zero_grad()
    weight.mul(1.0 + 2**-12).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 1.0


@contextlib.contextmanager
def sent(group: Group) -> Iterator[list[tuple[torch.dtype, int]]]:
    """Yield the dtype and the bytes of each allreduce of `group` in the `with` block."""
    made: list[tuple[torch.dtype, int]] = []
    with reductions(group, lambda tensor: made.append((tensor.dtype, tensor.nbytes))):
        yield made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_compressed", [False, True])
@everywhere
def test_gradients_of_16_bits_are_sent_as_they_are_where_the_transport_reduces_them(
    dtype: torch.dtype, is_compressed: bool
) -> None:
    group, count = current().channels[0].gradients, 1000
    compression = {torch.bfloat16: hvd.Compression.bf16, torch.float16: hvd.Compression.fp16}[dtype]
    weight = nn.Parameter(torch.zeros(count, dtype=torch.float32 if is_compressed else dtype))
    optimizer = sgd([weight], compression=compression if is_compressed else hvd.Compression.none)
    with sent(group) as made:
        weight.sum().backward()
    optimizer.step()
    expected = dtype if dtype in group.reduce_dtypes else torch.float32
    assert made == [(expected, count * expected.itemsize)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16], ids=str)
@everywhere
def test_a_sum_of_small_numbers_is_sent_as_it_is_where_the_transport_reduces_it(dtype: torch.dtype) -> None:
    group, count = current().channels[0].group, 5000
    tensor = torch.full((count,), hvd.rank() + 1, dtype=dtype)
    with sent(group) as made:
        total = hvd.allreduce(tensor, op=hvd.Sum)
        mean = hvd.allreduce(torch.full((count,), 100, dtype=dtype), op=hvd.Average)
    assert total.unique().tolist() == [hvd.size() * (hvd.size() + 1) // 2]
    assert mean.unique().tolist() == [100]
    wider = torch.float32 if dtype.is_floating_point else torch.int32
    expected = dtype if dtype in group.reduce_dtypes else wider
    assert [kind for kind, _ in made] == [expected, expected if dtype.is_floating_point else wider]
    assert made[0][1] == count * expected.itemsize
