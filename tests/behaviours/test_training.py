"""DistributedOptimizer: N ranks with a share of the batch each train as one process with the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as hvd

from ..helpers.world import everywhere

ROWS = 4
"""Rows per rank and step."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole batches of all ranks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(ROWS * hvd.size(), 5, generator=generator, dtype=torch.float64)
        yield inputs, inputs.sin().sum(dim=1, keepdim=True)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[ROWS * hvd.rank() : ROWS * (hvd.rank() + 1)]


def loss_of(model: Callable[..., torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - targets).square().mean()


def assert_same_weights(model: nn.Module, reference: nn.Module, rtol: float = 1e-10) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            param,
            expected,
            rtol=rtol,
            atol=rtol,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
        )


def train_beside(
    given: Iterable[tuple[torch.Tensor, torch.Tensor]],
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    reference: Callable[[torch.Tensor], torch.Tensor],
    alone: torch.optim.Optimizer,
) -> None:
    """Train a model with this rank's share of each batch, and a reference with the whole batch in this process."""
    for inputs, targets in given:
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, inputs, targets).backward()
        alone.step()


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


def check_training(
    make: Make,
    steps: int = 3,
    set_to_none: bool = True,
    zero_with_model: bool = False,
    prepare: Callable[[nn.Module], None] | None = None,
    rtol: float = 1e-10,
    **options: Any,
) -> None:
    """Train with a share of each batch, and with the whole batch in this process alone; the weights must be equal."""
    model, reference = make_model(), make_model()
    if "groups" in options and not isinstance(options["groups"], int):
        params = list(model.parameters())
        options["groups"] = [[params[place] for place in group] for group in options["groups"]]
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    alone = make(reference.parameters())
    for inputs, targets in batches(steps):
        (model if zero_with_model else optimizer).zero_grad(set_to_none=set_to_none)
        loss_of(model, share(inputs), share(targets)).backward()
        if prepare is not None:
            prepare(model)
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, inputs, targets).backward()
        if prepare is not None:
            prepare(reference)
        alone.step()
    assert_same_weights(model, reference, rtol)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@everywhere
def test_every_optimizer_trains_as_one_process_does(kind: str) -> None:
    check_training(OPTIMIZERS[kind])


OPTIONS: dict[str, dict[str, Any]] = {
    "zero_grad keeps the tensors": {"set_to_none": False},
    "model.zero_grad": {"zero_with_model": True},
    "model.zero_grad keeps the tensors": {"zero_with_model": True, "set_to_none": False},
    "predivide": {"gradient_predivide_factor": 2.0},
    "one group": {"groups": 1},
    "groups": {"groups": 4},
    "more groups than parameters": {"groups": 100},
    "groups by hand": {"groups": [[0, 5], [3, 1]]},
    "num_groups": {"num_groups": 2},
    "groups and predivide": {"groups": 2, "gradient_predivide_factor": 4.0},
    "sparse_as_dense": {"sparse_as_dense": True},
}


@pytest.mark.parametrize("case", OPTIONS)
@everywhere
def test_every_option_trains_as_one_process_does(case: str) -> None:
    check_training(OPTIMIZERS["momentum"], **OPTIONS[case])


@everywhere
def test_clipping_needs_no_recipe() -> None:
    norms = []

    def clip(model: nn.Module) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

    check_training(OPTIMIZERS["sgd"], prepare=clip)
    assert norms[::2] == pytest.approx(norms[1::2]) and min(norms) > 0.05


@everywhere
def test_gradients_are_complete_when_backward_returns() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ((inputs, targets),) = batches(1)
    optimizer.zero_grad()
    loss_of(model, share(inputs), share(targets)).backward()
    loss_of(reference, inputs, targets).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs-line-search", "sgd"])
@everywhere
def test_closures_train_as_one_process_does(kind: str) -> None:
    makes: dict[str, Make] = {
        "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
        "lbfgs-line-search": lambda params: torch.optim.LBFGS(
            params, max_iter=4, line_search_fn="strong_wolfe"
        ),
        "sgd": OPTIMIZERS["momentum"],
    }
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(makes[kind](model.parameters()))
    alone = makes[kind](reference.parameters())

    def closure(own: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], float]:
        def compute() -> float:
            own.zero_grad()
            loss = loss_of(own, inputs, targets)
            loss.backward()
            return float(hvd.allreduce(loss.detach()))

        return compute

    for inputs, targets in batches(3):
        optimizer.step(closure(model, share(inputs), share(targets)))
        alone.step(closure(reference, inputs, targets))
    assert_same_weights(model, reference, rtol=1e-7)


@everywhere
def test_accumulated_gradients_are_summed_over_the_passes() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
    )
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches(4)):
        loss_of(model, share(inputs), share(targets)).backward()
        loss_of(reference, inputs, targets).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            alone.step()
            alone.zero_grad()
    assert_same_weights(model, reference)


@pytest.mark.ranks(2, 3)
@everywhere
def test_gradients_stay_local_until_the_last_pass() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    weight.mul(mine).sum().backward()
    assert weight.grad is not None and weight.grad.item() == mine
    weight.mul(mine).sum().backward()
    assert weight.grad.item() == 2 * mean
    optimizer.step()
    assert weight.item() == -2 * mean


@everywhere
def test_a_partial_window_is_combined_by_the_step() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=3)
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for _ in range(2):
        weight.mul(mine).sum().backward()
    optimizer.step()
    assert weight.item() == -2 * mean
    optimizer.zero_grad()
    for _ in range(3):
        weight.mul(mine).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 3 * mean
    optimizer.step()
    assert weight.item() == -5 * mean


@everywhere
def test_passes_per_step_can_change() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.set_backward_passes_per_step(2)
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    weight.mul(mine).sum().backward()
    assert weight.grad is not None and weight.grad.item() == mine
    weight.mul(mine).sum().backward()
    assert weight.grad.item() == 2 * mean
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.set_backward_passes_per_step(0)


@everywhere
def test_passes_per_step_can_change_while_gradients_are_kept() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2

    def backward() -> float:
        weight.mul(mine).sum().backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert backward() == pytest.approx(mean)
    assert backward() == pytest.approx(2 * mean)
    optimizer.set_backward_passes_per_step(2)
    assert backward() == pytest.approx(2 * mean + mine)
    assert backward() == pytest.approx(4 * mean)
    optimizer.set_backward_passes_per_step(1)
    assert backward() == pytest.approx(5 * mean)


@everywhere
def test_gradients_kept_from_a_step_accumulate_without_synchronization() -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = hvd.DistributedDataParallel(model)
    mine, mean = torch.tensor([[hvd.rank() + 1.0]]), (hvd.size() + 1) / 2
    for number in range(3):
        wrapped(mine).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx((3 * number + 1) * mean)
        with wrapped.no_sync():
            for _ in range(2):
                wrapped(mine).sum().backward()
        assert model.weight.grad.item() == pytest.approx((3 * number + 1) * mean + 2 * mine.item())
        wrapped(mine).sum().backward()
        assert model.weight.grad.item() == pytest.approx((3 * number + 4) * mean)
        model.weight.grad = model.weight.grad - mean  # another tensor


@everywhere
def test_several_losses_in_one_step_average_each_once() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    mean = (hvd.size() + 1) / 2
    for factor in (1.0, 10.0, 100.0):
        weight.mul(factor * (hvd.rank() + 1)).sum().backward()
    assert weight.grad is not None and weight.grad.item() == pytest.approx(111 * mean)
    optimizer.step()
    assert weight.item() == pytest.approx(-111 * mean)


@everywhere
def test_sum_adds_the_gradients() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    weight.mul(hvd.rank() + 1.0).sum().backward()
    optimizer.step()
    assert weight.item() == -sum(range(1, hvd.size() + 1))


@everywhere
def test_a_pass_too_many_under_sum_is_an_error() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    optimizer.zero_grad()
    weight.sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        weight.sum().backward()


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@everywhere
def test_synchronize_and_skip_synchronize_never_reduce_twice(op: int) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
    total = sum(range(1, hvd.size() + 1)) / (hvd.size() if op == hvd.Average else 1)
    for number in range(1, 4):
        optimizer.zero_grad()
        weight.mul(hvd.rank() + 1.0).sum().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        assert weight.grad is not None and weight.grad.item() == total
        if number == 2:
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
        assert weight.item() == pytest.approx(-number * total)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@everywhere
def test_compressed_gradients_keep_their_dtype(compression: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=getattr(hvd.Compression, compression), op=hvd.Sum
    )
    for number in (1, 2):
        optimizer.zero_grad()
        weight.mul(torch.tensor([1.0, 0.5, 4.0]) * (hvd.rank() + 1)).sum().backward()
        assert weight.grad is not None and weight.grad.dtype == torch.float32
        optimizer.step()
        total = number * sum(range(1, hvd.size() + 1))
        assert weight.tolist() == [-total, -total / 2, -4 * total]


@everywhere
def test_compression_rounds_as_the_smaller_dtype_does() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.bf16)
    optimizer.zero_grad()
    weight.mul(1.0 + 2**-12).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 1.0


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
        torch.stack(
            [torch.view_as_real(p).sum() if p.is_complex() else p.sum().float() for p in params]
        ).sum().mul(mine).backward()
        for param in params:
            assert param.grad is not None
            assert param.grad.dtype == param.dtype and param.grad.stride() == param.stride()
        optimizer.step()
        for param in params:
            expected = complex(-number * total, -number * total) if param.is_complex() else -number * total
            assert torch.equal(param.detach(), torch.full_like(param, expected))


@everywhere
def test_a_large_model_in_several_buckets() -> None:
    params = [nn.Parameter(torch.zeros(700, 1000)) for _ in range(3)] + [nn.Parameter(torch.zeros(10))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
    torch.stack([param.sum() * (place + 1) for place, param in enumerate(params)]).sum().backward()
    optimizer.step()
    for place, param in enumerate(params):
        assert torch.equal(param.detach(), torch.full_like(param, -hvd.size() * (place + 1)))


@everywhere
def test_parameters_that_no_rank_uses_get_zeros_at_the_step() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5))
    used.sum().backward()
    optimizer.step()
    assert used.tolist() == [-0.5, -0.5] and unused.tolist() == [0.5, 0.5]
    assert unused.grad is not None and unused.grad.tolist() == [0, 0]


@everywhere
def test_ranks_may_use_different_parts_of_the_model() -> None:
    rank, size = hvd.rank(), hvd.size()
    trunk = nn.Parameter(torch.zeros(1))
    heads = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(size)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*heads, trunk], lr=1.0))
    for number in (1, 2, 3):
        optimizer.zero_grad()
        ((heads[rank].sum() + trunk.sum()) * (rank + 1)).backward()
        optimizer.step()
        for place, head in enumerate(heads):
            assert head.tolist() == pytest.approx([-number * (place + 1) / size] * 2)
        assert trunk.item() == pytest.approx(-number * (size + 1) / 2)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_may_have_nothing_to_do_in_backward() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for number in (1, 2):
        optimizer.zero_grad()
        if hvd.rank() > 0:
            weight.sum().backward()
        optimizer.step()
        assert weight.item() == pytest.approx(-number * (hvd.size() - 1) / hvd.size())


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "as-dense"])
@everywhere
def test_sparse_embeddings(sparse_as_dense: bool, op: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    table, scale = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.zeros(1))
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, scale], lr=1.0), sparse_as_dense=sparse_as_dense, op=op
    )
    divisor = size if op == hvd.Average else 1
    for number in (1, 2):
        optimizer.zero_grad()
        (table(torch.tensor([0, rank + 1, rank + 1])).sum() + scale.sum()).backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        optimizer.step()
        rows = [size] + [2.0] * size + [0.0] * (4 - size)
        expected = torch.tensor(rows).mul(-number / divisor).reshape(-1, 1).expand(5, 2)
        torch.testing.assert_close(table.weight.detach(), expected)
        assert scale.item() == pytest.approx(-number * size / divisor)


@everywhere
def test_sparse_gradients_with_a_sparse_optimizer() -> None:
    table, reference = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3, sparse=True)
    nn.init.ones_(table.weight)
    nn.init.ones_(reference.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    alone = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    for step in range(3):
        rows = [[step, rank] for rank in range(hvd.size())]
        optimizer.zero_grad()
        table(torch.tensor(rows[hvd.rank()])).square().sum().backward()
        optimizer.step()
        alone.zero_grad()
        (reference(torch.tensor(rows)).square().sum() / hvd.size()).backward()
        alone.step()
    torch.testing.assert_close(table.weight, reference.weight)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@everywhere
def test_checkpointed_parts_train_as_one_process_does(reentrant: bool) -> None:
    model, reference = make_model(), make_model()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](inputs))
        for part in (model[2:4], model[4:]):
            hidden = checkpoint(part, hidden, use_reentrant=reentrant)
        return hidden  # type: ignore[no-any-return]

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_beside(batches(3), forward, optimizer, reference, alone)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@everywhere
def test_a_layer_that_is_used_in_checkpointed_parts_and_outside(reentrant: bool) -> None:
    model, reference = make_model(), make_model()

    def through(network: Any, keep: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        first, inner, *last = network[0], network[2], network[4:]

        def part(hidden: torch.Tensor) -> torch.Tensor:
            return inner(hidden).tanh()  # type: ignore[no-any-return]

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            hidden = part(first(inputs))
            for _ in range(2):
                hidden = part(hidden) if keep else checkpoint(part, hidden, use_reentrant=reentrant)
            return nn.Sequential(*last)(part(hidden))  # type: ignore[no-any-return]

        return forward

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train_beside(batches(4), through(model, keep=False), optimizer, through(reference, keep=True), alone)
    assert_same_weights(model, reference)


@everywhere
def test_a_backward_that_failed_on_every_rank_can_be_repeated() -> None:
    model, reference = make_model(), make_model()
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def fail(*_: object) -> None:
        raise MemoryError

    for inputs, targets in batches(3):
        hook = model[2].register_full_backward_hook(fail)  # the last layer's gradients are under way by then
        with pytest.raises(MemoryError):
            loss_of(wrapped, share(inputs), share(targets)).backward()
        hook.remove()
        train_beside([(inputs, targets)], wrapped, optimizer, reference, alone)
    assert_same_weights(model, reference)


@everywhere
def test_gradients_are_in_their_buckets_before_backward_ends() -> None:
    """So that the memory which backward took for them is free for the next ones."""
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    seen: list[int] = []
    first, last = model[0].weight, model[2].weight
    first.register_post_accumulate_grad_hook(lambda _: seen.append(last.grad.data_ptr()))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 4)).sum().backward()
        seen.append(last.grad.data_ptr())
    before, after = seen[::2], seen[1::2]
    assert before[1:] == after[1:] == [after[0]] * 2


@pytest.mark.parametrize("style", ["optimizers", "modules"])
@everywhere
def test_parameters_that_are_wrapped_twice_have_the_same_gradients(style: str) -> None:
    """As after a change of optimizers in mid-training, while something holds the old one."""
    model = nn.Linear(1, 1, bias=False)
    if style == "optimizers":
        kept: Any = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)) for _ in range(2)]
    else:
        kept = [hvd.DistributedDataParallel(model) for _ in range(2)]
    for number in range(1, 4):
        model.zero_grad()
        model(torch.full((1, 1), number * (hvd.rank() + 1.0))).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx(number * (hvd.size() + 1) / 2, rel=1e-6)
    assert len(kept) == 2


@everywhere
def test_complex_and_real_parameters_together() -> None:
    waves, reals = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([waves, reals], lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        ((waves * (1 - 2j)).real.sum() + reals.sum()).mul(hvd.rank() + 1.0).backward()
        assert waves.grad is not None and reals.grad is not None
        mean = (hvd.size() + 1) / 2
        torch.testing.assert_close(waves.grad, torch.full((2,), mean * (1 + 2j), dtype=torch.complex64))
        torch.testing.assert_close(reals.grad, torch.full((3,), mean))


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detach": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "numpy": lambda grad: grad.numpy(),
    "row": lambda grad: grad[0],
}


@pytest.mark.parametrize("kind", KEPT)
@everywhere
def test_gradients_that_somebody_keeps_stay_what_they_were(kind: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = hvd.DistributedDataParallel(model)
    kept = []
    for number in range(4):
        wrapped.zero_grad()
        wrapped(torch.full((1, 1), float(number))).sum().backward()
        assert model.weight.grad is not None
        kept.append(KEPT[kind](model.weight.grad))
    assert [float(grad.item()) for grad in kept] == [0.0, 1.0, 2.0, 3.0]


@everywhere
def test_two_optimizers_that_take_turns() -> None:
    maker, judge = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first = hvd.DistributedOptimizer(torch.optim.SGD([maker], lr=1.0))
    second = hvd.DistributedOptimizer(torch.optim.SGD([judge], lr=1.0))
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for number in (1, 2):
        second.zero_grad()
        (judge * mine + maker.detach()).sum().backward()
        second.step()
        first.zero_grad()
        ((maker + judge.detach()) * 10 * mine).sum().backward()
        first.step()
        assert judge.item() == pytest.approx(-number * mean)
        assert maker.item() == pytest.approx(-10 * number * mean)


@everywhere
def test_two_optimizers_in_one_backward() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0)) for param in params]
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for number in (1, 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((params[0] + 10 * params[1]) * mine).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [param.item() for param in params] == pytest.approx([-number * mean, -10 * number * mean])


@everywhere
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for number, factor in enumerate([1.0, float("inf"), 3.0]):
        optimizer.zero_grad()
        mine = factor if hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale((weight * mine).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 100.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == [8.0, 4.0, 8.0][number]
    expected = -1.0 - (3.0 + hvd.size() - 1) / hvd.size()
    assert weight.tolist() == pytest.approx([expected] * 2)


@everywhere
def test_autocast_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.full((1, 4), hvd.rank() + 1.0)).sum()
    loss.backward()
    before = model.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - (hvd.size() + 1) / 2)


@everywhere
def test_tied_weights() -> None:
    weight = nn.Parameter(torch.zeros(1))
    first, second = nn.Module(), nn.Module()
    first.weight = second.weight = weight
    model = nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    ((first.weight + 2 * second.weight) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(-3 * (hvd.size() + 1) / 2)


@everywhere
def test_frozen_and_thawed_parameters() -> None:
    body, head = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([body, head], lr=1.0))
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    ((body + head) * mine).sum().backward()
    optimizer.step()
    assert (body.item(), head.item()) == pytest.approx((0, -mean))
    body.requires_grad_(True)
    head.requires_grad_(False)
    for number in (1, 2):
        optimizer.zero_grad()
        ((body + head) * mine).sum().backward()
        optimizer.step()
        assert (body.item(), head.item()) == pytest.approx((-number * mean, -mean))


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_exception_in_backward_leaves_the_next_step_right() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    with pytest.raises(ArithmeticError):
        (Fails.apply(first) + second).sum().backward()
    optimizer.zero_grad()
    ((first + second) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert (first.item(), second.item()) == pytest.approx([-(hvd.size() + 1) / 2] * 2)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_second_backward_that_only_rank_0_adds_to_is_averaged_once() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0))
    optimizer.zero_grad()
    weight.sum().backward()
    (10 * weight if hvd.rank() == 0 else other).sum().backward()
    assert weight.grad is not None and other.grad is not None
    assert weight.grad.item() == pytest.approx(1 + 10 / hvd.size())
    assert other.grad.item() == pytest.approx((hvd.size() - 1) / hvd.size())


@everywhere
def test_gradients_that_somebody_keeps_are_left_alone() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    kept = []
    for factor in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        sum(factor * weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
        kept.append([weight.grad for weight in weights])
    assert [[float(grad) for grad in grads] for grads in kept] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]  # type: ignore[arg-type]


@everywhere
def test_two_passes_are_combined_in_backward_when_gradients_are_zeroed_in_place() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            sum((hvd.rank() + 1.0) * weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
        for weight in weights:
            assert float(weight.grad) == pytest.approx(hvd.size() + 1)  # type: ignore[arg-type]
        optimizer.step()
