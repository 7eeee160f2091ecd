"""Several wrapped optimizers or modules in one script."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.styles import distributed
from ..helpers.world import everywhere


@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_parameters_that_are_wrapped_twice_have_the_same_gradients(style: str) -> None:
    """As after a change of optimizers in mid-training, while something holds the old one."""
    model = nn.Linear(1, 1, bias=False)
    kept = [distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0)) for _ in range(2)]
    for number in range(1, 4):
        model.zero_grad()
        model(torch.full((1, 1), number * (hvd.rank() + 1.0))).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx(number * (hvd.size() + 1) / 2, rel=1e-6)
    assert len(kept) == 2


@pytest.mark.parametrize("style", ["optimizer", "module"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_ranks_may_complete_the_gradients_of_several_models_in_different_orders(style: str) -> None:
    """Buckets are matched by their order, and a rank sends the one that is incomplete at the end of backward."""
    models = [nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3)) for _ in range(2)]
    if style == "optimizer":
        kept: Any = [
            hvd.DistributedOptimizer(torch.optim.SGD(model, lr=0.0), groups=[[param] for param in model])
            for model in models
        ]
    else:
        kept = [hvd.DistributedDataParallel(model, bucket_cap_mb=1e-6) for model in models]
    factors = {(place, number): 1.0 + 3 * place + number for place in range(2) for number in range(3)}
    for step in range(5):
        left_out = (step % 2, step % 3)  # on rank 0
        for wrapper in kept:
            wrapper.zero_grad()
        used = factors.keys() - ({left_out} if hvd.rank() == 0 else set())
        total: Any = sum(factors[one] * models[one[0]][one[1]].sum() for one in sorted(used))
        total.backward()
        for (place, number), factor in factors.items():
            share = 1 - ((place, number) == left_out) / hvd.size()
            expected = torch.full((4,), factor * share)
            torch.testing.assert_close(models[place][number].grad, expected)


def train(style: str) -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    model, optimizer = distributed(style, layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_deleted_wrappers_leave_next_to_nothing_behind(style: str) -> None:
    train(style)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(4):
        train(style)
    gc.collect()
    assert len(gc.get_objects()) - before < 4 * 60  # less than one for each parameter


@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_a_backward_does_not_search_the_heap(style: str) -> None:
    model = nn.Linear(2, 2)
    kept = distributed(style, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("collect", "get_objects", "get_referrers"):
            patch.setattr(gc, name, lambda *_: pytest.fail("the heap was searched"))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    del kept


@everywhere
def test_a_wrapper_that_is_garbage_does_not_delay_what_the_next_one_sends() -> None:
    gc.disable()
    try:
        for _ in range(2):
            model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
            wrapped: Any = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
            wrapped.cycle = [wrapped]
            seen: list[int] = []
            last = model[2].weight
            model[0].weight.register_hook(lambda _, seen=seen, last=last: seen.append(last.grad.data_ptr()))
            for _ in range(3):
                wrapped.zero_grad()
                wrapped(torch.ones(1, 4)).sum().backward()
                seen.append(last.grad.data_ptr())
            assert len(set(seen[2:])) == 1, "a gradient moved to its bucket only at the end of backward"
    finally:
        gc.enable()
