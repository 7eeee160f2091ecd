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


@everywhere
def test_allreduce_average_gives_the_mean_of_the_gradients() -> None:
    x = leaf(1.0, 2.0)
    assert gradient(x, hvd.allreduce(x)) == pytest.approx([sum(weights()) / hvd.size()] * 2)


@everywhere
def test_allreduce_sum_gives_the_sum_of_the_gradients() -> None:
    x = leaf(1.0, 2.0)
    assert gradient(x, hvd.allreduce(x, op=hvd.Sum)) == [sum(weights())] * 2


@everywhere
def test_allreduce_factors_apply_to_the_gradients() -> None:
    x = leaf(1.0, 2.0)
    result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert gradient(x, result) == [2 * sum(weights())] * 2


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max], ids=["min", "max"])
@everywhere
def test_allreduce_extremes_send_the_gradient_where_they_came_from(op: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    x = leaf(rank, -rank, 7.0)
    first, last = (rank == 0), (rank == size - 1)
    low, high = (first, last), (last, first)
    holds = low if op == hvd.Min else high
    total = sum(weights())
    assert gradient(x, hvd.allreduce(x, op=op)) == pytest.approx(
        [total * holds[0], total * holds[1], total / size]
    )


@everywhere
def test_allreduce_extremes_with_factors() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = leaf(rank)
    result = hvd.allreduce(x, op=hvd.Max, prescale_factor=-0.5, postscale_factor=4.0)
    assert result.tolist() == [0.0]
    assert gradient(x, result) == [-2.0 * sum(weights()) if rank == 0 else 0.0]
    assert size == len(weights())


@everywhere
def test_allreduce_product_gives_the_product_of_the_others() -> None:
    rank, size = hvd.rank(), hvd.size()
    values = [2.0, 3.0, 5.0][:size]
    x = leaf(values[rank], 0.0 if rank == 0 else 4.0)
    others = math.prod(value for place, value in enumerate(values) if place != rank)
    with_zero = 4.0 ** (size - 1) if rank == 0 else 0.0
    total = sum(weights())
    assert gradient(x, hvd.allreduce(x, op=hvd.Product)) == [total * others, total * with_zero]


@everywhere
def test_allreduce_product_with_factors() -> None:
    rank, size = hvd.rank(), hvd.size()
    values = [2.0, 3.0, 5.0][:size]
    x = leaf(values[rank])
    result = hvd.allreduce(x, op=hvd.Product, prescale_factor=0.5, postscale_factor=8.0)
    assert result.tolist() == [8.0 * math.prod(value / 2 for value in values)]
    expected = sum(weights()) * result.item() / values[rank]
    assert gradient(x, result) == pytest.approx([expected])


@everywhere
def test_allreduce_of_a_number_and_of_a_transposed_table() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    assert gradient(x, hvd.allreduce(x, op=hvd.Sum)) == [sum(weights())]
    y = torch.ones(2, 3, requires_grad=True)
    assert gradient(y, hvd.allreduce(y.t(), op=hvd.Sum)) == [sum(weights())] * 6


@everywhere
def test_compression_is_differentiable() -> None:
    x = leaf(1.0, 2.0)
    assert gradient(x, hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)) == [sum(weights())] * 2


@everywhere
def test_grouped_allreduce_sums_the_gradient_of_each_tensor() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0)
    result = hvd.grouped_allreduce([x, y, 2 * x], op=hvd.Sum)
    assert gradient(x, result) == [3 * sum(weights())] * 2


@everywhere
def test_only_some_members_of_a_group_need_gradients() -> None:
    x, constant = leaf(1.0), torch.ones(2)
    result = hvd.grouped_allreduce([constant, x], op=hvd.Sum)
    assert gradient(x, result[1]) == [sum(weights())]
    extremes = hvd.grouped_allreduce([constant, x], op=hvd.Max)
    assert gradient(x, extremes[1]) == pytest.approx([sum(weights()) / hvd.size()])


@everywhere
def test_allgather_gives_the_mean_of_the_gradients_of_its_rows() -> None:
    x = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
    mean = sum(weights()) / hvd.size()
    assert gradient(x, hvd.allgather(x)) == pytest.approx([mean] * 2 * (hvd.rank() + 1))


@everywhere
def test_allgather_returns_each_row_its_own_gradient() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.tensor(1.0, requires_grad=True)
    gathered = hvd.allgather(x)
    (grad,) = torch.autograd.grad((gathered * torch.arange(1.0, size + 1)).sum(), [x])
    assert grad.item() == pytest.approx(rank + 1.0)


@everywhere
def test_grouped_allgather_averages_the_gradient_of_each_tensor() -> None:
    x, y = torch.ones(hvd.rank(), 2, requires_grad=True), leaf(1.0)
    mean = sum(weights()) / hvd.size()
    assert gradient(x, hvd.grouped_allgather([x, y])) == pytest.approx([mean] * 2 * hvd.rank())
    assert gradient(y, hvd.grouped_allgather([x, y])) == pytest.approx([mean])


@everywhere
def test_broadcast_gives_the_root_the_mean_and_the_others_zero() -> None:
    for root in range(hvd.size()):
        x = leaf(1.0, 2.0)
        expected = sum(weights()) / hvd.size() if hvd.rank() == root else 0.0
        assert gradient(x, hvd.broadcast(x, root)) == pytest.approx([expected] * 2)


@everywhere
def test_alltoall_returns_gradients_to_where_the_rows_came_from() -> None:
    x = torch.ones(hvd.size(), 2, requires_grad=True)
    result = hvd.alltoall(x)
    assert isinstance(result, torch.Tensor)
    assert gradient(x, result) == [w for w in weights() for _ in range(2)]


@everywhere
def test_alltoall_with_splits_leaves_rows_that_were_not_sent_without_gradient() -> None:
    size = hvd.size()
    x = torch.ones(size * (size - 1) // 2 + 2, requires_grad=True)
    result, _ = hvd.alltoall(x, splits=list(range(size)))
    assert gradient(x, result) == [weight(rank) for rank in range(size) for _ in range(rank)] + [0.0, 0.0]


@everywhere
def test_reducescatter_sum_gathers_times_the_number_of_ranks() -> None:
    size = hvd.size()
    x = torch.ones(size, 2, requires_grad=True)
    expected = [size * w for w in weights() for _ in range(2)]
    assert gradient(x, hvd.reducescatter(x, op=hvd.Sum)) == expected


@everywhere
def test_reducescatter_average_gathers() -> None:
    size = hvd.size()
    x = torch.ones(size + 1, requires_grad=True)
    expected = [weight(0), weight(0), *weights()[1:]]
    assert gradient(x, hvd.reducescatter(x)) == expected
    scaled = hvd.reducescatter(x, prescale_factor=0.5, postscale_factor=4.0)
    assert gradient(x, scaled) == [2 * w for w in expected]


@everywhere
def test_grouped_reducescatter_gathers_the_gradient_of_each_tensor() -> None:
    size = hvd.size()
    x, y = torch.ones(size, requires_grad=True), torch.ones(size, requires_grad=True)
    assert gradient(x, hvd.grouped_reducescatter([x, y])) == weights()


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
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
def test_gather_sends_each_rank_the_gradient_of_its_rows() -> None:
    for root in range(hvd.size()):
        x = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
        assert gradient(x, hvd.gather(x, root)) == [weight(root)] * 2 * (hvd.rank() + 1)


@everywhere
def test_scatter_gathers_the_gradients_on_the_root() -> None:
    for root in range(hvd.size()):
        x = torch.ones(hvd.size(), 2, requires_grad=True)
        expected = [w if hvd.rank() == root else 0.0 for w in weights() for _ in range(2)]
        assert gradient(x, hvd.scatter(x, root)) == expected


def second_gradient(tensor: torch.Tensor, loss: torch.Tensor) -> list[float]:
    """Return the gradient of `tensor` under the sum of its gradient under `loss`."""
    (grad,) = torch.autograd.grad(loss, [tensor], create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), [tensor])
    return second.tolist()


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_gradients_of_allreduce_can_be_differentiated(op: int) -> None:
    x = leaf(1.0, 2.0)
    # Each of the two gradients is summed over the ranks, or averaged.
    times = hvd.size() ** 2 if op == hvd.Sum else 1
    assert second_gradient(x, (hvd.allreduce(x, op=op) ** 2).sum()) == pytest.approx([2.0 * times] * 2)


@everywhere
def test_gradients_of_alltoall_can_be_differentiated() -> None:
    x = leaf(*range(hvd.size()))
    received = hvd.alltoall(x)
    assert isinstance(received, torch.Tensor)
    assert second_gradient(x, (received**3).sum()) == [6.0 * value for value in range(hvd.size())]


@everywhere
def test_gradients_of_allgather_can_be_differentiated() -> None:
    x = leaf(hvd.rank() + 1.0)
    # Only this rank's part of the sum depends on x, and the gradient of allgather is an average.
    expected = 6.0 * (hvd.rank() + 1) / hvd.size()
    assert second_gradient(x, (hvd.allgather(x) ** 3).sum()) == pytest.approx([expected])


@everywhere
def test_gradient_sum_of_allgather_is_that_of_the_sum_of_all_losses() -> None:
    x, y = torch.ones(hvd.rank() + 1, 2, requires_grad=True), leaf(1.0)
    total = sum(weights())
    assert gradient(x, hvd.allgather(x, gradient=hvd.Sum)) == [total] * 2 * (hvd.rank() + 1)
    both = hvd.grouped_allgather([x, y], gradient=hvd.Sum)
    assert gradient(y, both) == [total]


@everywhere
def test_gradient_sum_of_broadcast_is_that_of_the_sum_of_all_losses() -> None:
    for root in range(hvd.size()):
        x = leaf(1.0, 2.0)
        expected = sum(weights()) if hvd.rank() == root else 0.0
        assert gradient(x, hvd.broadcast(x, root, gradient=hvd.Sum)) == [expected] * 2


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_gradient_sum_of_reducescatter_is_that_of_the_sum_of_all_losses(op: int) -> None:
    x = torch.ones(hvd.size(), dtype=torch.float64, requires_grad=True)
    expected = [w / (hvd.size() if op == hvd.Average else 1) for w in weights()]
    assert gradient(x, hvd.reducescatter(x, op=op, gradient=hvd.Sum)) == pytest.approx(expected)
    (output,) = hvd.grouped_reducescatter([x], op=op, gradient=hvd.Sum)
    assert gradient(x, output) == pytest.approx(expected)


@everywhere
def test_gradients_of_gradient_sum_can_be_differentiated() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = leaf(rank + 1.0)
    # Every rank has the same loss, so that each of the two gradients is summed over as many equal ones; but only this
    # rank's part depends on x.
    assert second_gradient(x, (hvd.allgather(x, gradient=hvd.Sum) ** 3).sum()) == [6.0 * (rank + 1) * size]
    # The last rank's loss alone depends on the sum of row `size - 1`.
    y = leaf(*range(1, size + 1))
    share = hvd.reducescatter(y, op=hvd.Sum, gradient=hvd.Sum)
    rows = [6.0 * size * row * size for row in range(1, size + 1)]
    assert second_gradient(y, (share**3).sum()) == rows


@everywhere
def test_gradients_of_reduce_can_be_differentiated() -> None:
    x = leaf(hvd.rank() + 1.0)
    total = hvd.size() * (hvd.size() + 1) / 2
    # The loss is the cube of the sum, on rank 0. Each rank's x is in the sum, and all gradients are added up.
    assert second_gradient(x, (hvd.reduce(x, 0, op=hvd.Sum) ** 3).sum()) == [6.0 * total * hvd.size()]


WITH_GRADIENT: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "allgather": lambda x, gradient: hvd.allgather(x, gradient=gradient),
    "grouped_allgather": lambda x, gradient: hvd.grouped_allgather([x], gradient=gradient),
    "broadcast": lambda x, gradient: hvd.broadcast(x, 0, gradient=gradient),
    "reducescatter": lambda x, gradient: hvd.reducescatter(x, gradient=gradient),
    "grouped_reducescatter": lambda x, gradient: hvd.grouped_reducescatter([x], gradient=gradient),
}


@pytest.mark.parametrize("name", WITH_GRADIENT)
@everywhere
def test_gradient_must_be_average_or_sum(name: str) -> None:
    x = torch.ones(hvd.size())
    for wrong in (hvd.Max, "sum", None, True):
        with pytest.raises(ValueError, match=r"`gradient` must be hvd\.Average or hvd\.Sum, but is "):
            WITH_GRADIENT[name](x, wrong)
    WITH_GRADIENT[name](x, hvd.Sum)  # the others did not wait for this rank


@everywhere
def test_no_grad_gives_plain_tensors() -> None:
    x = leaf(1.0)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert hvd.allreduce(x).requires_grad and not hvd.allreduce(x.detach()).requires_grad


@everywhere
def test_a_chain_of_collectives_inside_a_model() -> None:
    x = leaf(1.0, 2.0)
    hidden = hvd.allreduce(x * 3, op=hvd.Sum)
    result = hvd.broadcast(hidden**2, 0)
    total = 3.0 * hvd.size()
    # The derivative of (3 n x)^2 on the root, averaged, then summed over the ranks.
    factor = sum(weights()) / hvd.size() * 2 * 3
    assert gradient(x, result) == pytest.approx([factor * total * 1.0, factor * total * 2.0])


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter])
@everywhere
def test_tangents_of_forward_mode_are_refused(call: Callable[[torch.Tensor], Any]) -> None:
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "`torch.jit.script` is deprecated", FutureWarning
            )  # used by torch
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
    assert (
        hvd.allreduce(torch.func.grad(lambda tensor: (tensor**2).sum())(torch.ones(6))).tolist() == [2.0] * 6
    )
