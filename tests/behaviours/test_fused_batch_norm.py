"""SyncBatchNorm with the kernels of GPUs. Doubles stand in their place: they do the same arithmetic on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

import dualdist as hvd

from ..helpers.fused_batch_norm import fused_kernels
from ..helpers.no_host_reads import no_host_reads
from ..helpers.world import everywhere
from .test_sync_batch_norm import CHANNELS, batches, check_state, ours, own, plain

ROWS = (0, 3, 2)
"""How many samples each rank has, the first one none."""
ALONE = (5,)
FORWARD = ["batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt"]
BACKWARD = ["batch_norm_backward_reduce", "batch_norm_backward_elemt"]


def rows() -> tuple[int, ...]:
    return ROWS if hvd.size() > 1 else ALONE


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 3, 2)], ids=str)
@everywhere
def test_values_gradients_and_statistics_are_those_of_the_whole_batch(
    shape: tuple[int, ...], momentum: float | None, affine: bool
) -> None:
    expected = plain(momentum=momentum, affine=affine)
    layer = ours(expected)
    whole = torch.cat(batches(shape, rows())).requires_grad_()
    mine = own(whole.detach(), rows()).requires_grad_()
    factors = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view_as(whole)
    normal = expected(whole)
    (normal * factors).sum().backward()
    with fused_kernels() as called:
        output = layer(mine)
        (output * own(factors, rows())).sum().backward()
    assert called == ([*FORWARD, *BACKWARD] if len(mine) else [FORWARD[1]])
    torch.testing.assert_close(output, own(normal.detach(), rows()))
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, own(whole.grad, rows()))
    for param, reference in zip(layer.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(hvd.allreduce(param.grad, op=hvd.Sum), reference.grad)
    check_state(layer, expected)


@pytest.mark.parametrize("param_dtype", [torch.float32, None], ids=["float32-weights", "same-weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@everywhere
def test_low_precision_is_read_as_it_is_in_both_layouts(
    dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    expected = plain()
    whole = torch.cat(batches((3, 2), rows())).to(dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        layer = copy.deepcopy(ours(expected)).to(param_dtype or dtype)
        mine = own(whole, rows()).contiguous(memory_format=layout).requires_grad_()
        with fused_kernels():
            output = layer(mine)
            # The gradient arrives in the other layout.
            output.backward(torch.ones_like(output, memory_format=torch.contiguous_format))
        assert output.dtype == dtype and output.is_contiguous(memory_format=layout)
        torch.testing.assert_close(output, own(expected(whole.double()), rows()).to(dtype))
        assert mine.grad is not None and mine.grad.dtype == dtype
        assert layer.weight.grad is not None and layer.weight.grad.dtype == layer.weight.dtype


@everywhere
def test_the_host_reads_nothing() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS, momentum=None)
    mine = own(torch.cat(batches((3, 2), (2, 2, 2))), (2, 2, 2)).float().requires_grad_()
    with fused_kernels(), no_host_reads():
        layer(mine).square().sum().backward()


@everywhere
def test_fewer_than_two_values_raise_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with fused_kernels(), pytest.raises(ValueError, match=r"at least two values .* but has 1"):
        layer(torch.zeros(1 if hvd.rank() == 0 else 0, CHANNELS))
