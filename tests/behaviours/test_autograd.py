"""Gradients through every synchronous out-of-place collective.

The loss of each rank has another weight, so the expected gradient depends on which ranks' gradients are combined.
Horovod's conventions: the gradients of allgather and broadcast are averages, and the gradient of a reducescatter is
multiplied by the number of ranks (horovod/torch/mpi_ops.py). With `gradient=hvd.Sum` each of them is the gradient of
the sum of all ranks' losses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import dualdist as hvd

from ..helpers.world import everywhere


def weight(rank: int) -> float:
    return rank + 2.0


def weights() -> list[float]:
    return [weight(rank) for rank in range(hvd.size())]


def gradient(tensor: torch.Tensor, outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[float]:
    """Return the gradient of `tensor` under the loss: this rank's weight times the sum of `outputs`."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    loss = torch.stack([output.sum() * weight(hvd.rank()) for output in outputs]).sum()
    (grad,) = torch.autograd.grad(loss, [tensor])
    assert grad.shape == tensor.shape
    return grad.flatten().tolist()


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


OPS = pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
GRADIENTS = pytest.mark.parametrize("options", [{}, {"gradient": hvd.Sum}], ids=["default", "gradient-sum"])


@OPS
@everywhere
def test_the_gradient_of_allreduce_is_combined_by_the_same_op_and_factors(op: int) -> None:
    total = sum(weights()) / (hvd.size() if op == hvd.Average else 1)
    x, y, number, table = leaf(1.0, 2.0), leaf(3.0), torch.tensor(3.0), torch.ones(2, 3)
    assert gradient(x, hvd.allreduce(x, op=op)) == pytest.approx([total] * 2)
    scaled = hvd.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=4.0)
    assert gradient(x, scaled) == pytest.approx([2 * total] * 2)
    compressed = hvd.allreduce(x, op=op, compression=hvd.Compression.fp16)
    assert gradient(x, compressed) == pytest.approx([total] * 2)
    assert gradient(x, hvd.grouped_allreduce([x, y, 2 * x], op=op)) == pytest.approx([3 * total] * 2)
    for tensor in (number.requires_grad_(), table.requires_grad_()):
        expected = pytest.approx([total] * tensor.numel())
        assert gradient(tensor, hvd.allreduce(tensor.t(), op=op)) == expected


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max], ids=["min", "max"])
@everywhere
def test_allreduce_extremes_send_the_gradient_where_they_came_from(op: int) -> None:
    rank, size, total = hvd.rank(), hvd.size(), sum(weights())
    x = leaf(rank, -rank, 7.0)
    first, last = (rank == 0), (rank == size - 1)
    low, high = (first, last) if op == hvd.Min else (last, first)
    assert gradient(x, hvd.allreduce(x, op=op)) == pytest.approx([total * low, total * high, total / size])
    scaled = hvd.allreduce(x, op=op, prescale_factor=-0.5, postscale_factor=4.0)
    assert scaled[0].item() == (-2.0 * (size - 1) if op == hvd.Min else 0.0)
    assert gradient(x, scaled)[:2] == [-2.0 * total * high, -2.0 * total * low]


@everywhere
def test_allreduce_product_gives_the_product_of_the_others() -> None:
    rank, size = hvd.rank(), hvd.size()
    values = [2.0, 3.0, 5.0][:size]
    x = leaf(values[rank], 0.0 if rank == 0 else 4.0)
    others = math.prod(value for place, value in enumerate(values) if place != rank)
    expected = [sum(weights()) * product for product in (others, 4.0 ** (size - 1) if rank == 0 else 0.0)]
    assert gradient(x, hvd.allreduce(x, op=hvd.Product)) == expected
    scaled = hvd.allreduce(x, op=hvd.Product, prescale_factor=0.5, postscale_factor=8.0)
    assert scaled[0].item() == 8.0 * math.prod(value / 2 for value in values)
    assert gradient(x, scaled) == pytest.approx([8.0 / 2**size * product for product in expected])


@everywhere
def test_only_some_members_of_a_group_need_gradients() -> None:
    x, constant = leaf(1.0), torch.ones(2)
    result = hvd.grouped_allreduce([constant, x], op=hvd.Sum)
    assert gradient(x, result[1]) == [sum(weights())]
    extremes = hvd.grouped_allreduce([constant, x], op=hvd.Max)
    assert gradient(x, extremes[1]) == pytest.approx([sum(weights()) / hvd.size()])


@GRADIENTS
@everywhere
def test_allgather_gives_each_row_the_mean_or_sum_of_its_gradients(options: dict[str, Any]) -> None:
    rank, total = hvd.rank(), sum(weights()) / (1 if options else hvd.size())
    x, y = torch.ones(rank, 2, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    assert gradient(x, hvd.allgather(x, **options)) == pytest.approx([total] * 2 * rank)
    assert gradient(x, hvd.grouped_allgather([x, y], **options)) == pytest.approx([total] * 2 * rank)
    rows = hvd.grouped_allgather([x, y], **options)[1]
    assert gradient(y, rows * torch.arange(1.0, hvd.size() + 1)) == pytest.approx([total * (rank + 1)])


@GRADIENTS
@everywhere
def test_broadcast_gives_the_root_the_mean_or_sum_and_the_others_zero(options: dict[str, Any]) -> None:
    for root in range(hvd.size()):
        x = leaf(1.0, 2.0)
        expected = sum(weights()) / (1 if options else hvd.size()) if hvd.rank() == root else 0.0
        assert gradient(x, hvd.broadcast(x, root, **options)) == pytest.approx([expected] * 2)


@everywhere
def test_alltoall_returns_gradients_to_where_the_rows_came_from() -> None:
    """Rows that were not sent have no gradient."""
    size = hvd.size()
    x, y = torch.ones(size, 2, requires_grad=True), torch.ones(size * (size - 1) // 2 + 2, requires_grad=True)
    result = hvd.alltoall(x)
    assert isinstance(result, torch.Tensor)
    assert gradient(x, result) == [w for w in weights() for _ in range(2)]
    result, _ = hvd.alltoall(y, splits=list(range(size)))
    assert gradient(y, result) == [weight(rank) for rank in range(size) for _ in range(rank)] + [0.0, 0.0]


@GRADIENTS
@OPS
@everywhere
def test_reducescatter_gathers_the_gradients_by_default_times_the_number_of_ranks(
    op: int, options: dict[str, Any]
) -> None:
    size = hvd.size()
    x, y = torch.ones(size + 1, 2, requires_grad=True), torch.ones(size)
    factor = (1 if options else size) / (size if op == hvd.Average else 1)
    expected = [factor * w for w in (weight(0), *weights()) for _ in range(2)]
    assert gradient(x, hvd.reducescatter(x, op=op, **options)) == pytest.approx(expected)
    scaled = hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=4.0, **options)
    assert gradient(x, scaled) == pytest.approx([2 * w for w in expected])
    assert gradient(x, hvd.grouped_reducescatter([y, x], op=op, **options)[1]) == pytest.approx(expected)


@OPS
@everywhere
def test_reduce_sends_the_gradient_of_the_root_to_all(op: int) -> None:
    for root in range(hvd.size()):
        x = leaf(1.0, 2.0)
        expected = weight(root) / (hvd.size() if op == hvd.Average else 1)
        assert gradient(x, hvd.reduce(x, root, op=op)) == pytest.approx([expected] * 2)


@everywhere
def test_reduce_refuses_gradients_of_other_ops() -> None:
    with pytest.raises(NotImplementedError, match="allreduce"):
        hvd.reduce(leaf(1.0), 0, op=hvd.Max)
    assert hvd.reduce(torch.ones(1), 0, op=hvd.Max).tolist() == [1.0 if hvd.rank() == 0 else 0.0]


@everywhere
def test_gather_and_scatter_send_gradients_back() -> None:
    for root in range(hvd.size()):
        x = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
        assert gradient(x, hvd.gather(x, root)) == [weight(root)] * 2 * (hvd.rank() + 1)
        x = torch.ones(hvd.size(), 2, requires_grad=True)
        expected = [w if hvd.rank() == root else 0.0 for w in weights() for _ in range(2)]
        assert gradient(x, hvd.scatter(x, root)) == expected


def second_gradient(tensor: torch.Tensor, loss: torch.Tensor) -> list[float]:
    """Return the gradient of `tensor` under the sum of its gradient under `loss`."""
    (grad,) = torch.autograd.grad(loss, [tensor], create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), [tensor])
    return second.tolist()


@everywhere
def test_gradients_can_be_differentiated() -> None:
    rank, size = hvd.rank(), hvd.size()
    x, own, numbers = leaf(1.0, 2.0), leaf(rank + 1.0), leaf(*range(1, size + 1))
    # Each of the two gradients of allreduce is summed over the ranks, or averaged.
    assert second_gradient(x, (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()) == [2.0 * size**2] * 2
    assert second_gradient(x, (hvd.allreduce(x) ** 2).sum()) == pytest.approx([2.0] * 2)
    received: Any = hvd.alltoall(numbers)
    assert second_gradient(numbers, (received**3).sum()) == [6.0 * number for number in range(1, size + 1)]
    # Only this rank's part of the sum depends on `own`. Its gradients are averaged or summed.
    gathered = hvd.allgather(own), hvd.allgather(own, gradient=hvd.Sum)
    for rows, factor in zip(gathered, (1 / size, size), strict=True):
        assert second_gradient(own, (rows**3).sum()) == pytest.approx([6.0 * (rank + 1) * factor])
    # The last rank's loss alone depends on the sum of row `size - 1`.
    share = hvd.reducescatter(numbers, op=hvd.Sum, gradient=hvd.Sum)
    rows_of_ranks = [6.0 * size * row * size for row in range(1, size + 1)]
    assert second_gradient(numbers, (share**3).sum()) == rows_of_ranks
    # The loss is the cube of the sum, on rank 0. Each rank's number is in the sum, and all gradients are added up.
    total = size * (size + 1) / 2
    assert second_gradient(own, (hvd.reduce(own, 0, op=hvd.Sum) ** 3).sum()) == [6.0 * total * size]


@everywhere
def test_no_grad_gives_plain_tensors() -> None:
    x = leaf(1.0)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert hvd.allreduce(x).requires_grad and not hvd.allreduce(x.detach()).requires_grad


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter])
@everywhere
def test_tangents_of_forward_mode_are_refused(call: Callable[[torch.Tensor], Any]) -> None:
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # used by torch
            dual = forward_ad.make_dual(torch.ones(6), torch.ones(6))
        with pytest.raises(ValueError, match="must have no tangent"):
            call(dual)
        assert hvd.allreduce(forward_ad.unpack_dual(dual).primal).tolist() == [1.0] * 6


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
@everywhere
def test_collectives_inside_a_transform_of_torch_func_are_refused(transform: Callable[..., Any]) -> None:
    for call in [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter]:
        with pytest.raises(ValueError, match=r"`tensor` must have memory, .* torch\.func\.grad, vmap, jvp"):
            transform(lambda tensor, call=call: call(tensor).sum())(torch.ones(6))
    assert hvd.allreduce(torch.func.grad(lambda tensor: (tensor**2).sum())(torch.ones(6))).tolist() == [2.0] * 6
