"""The memory of gradients: where backward puts them, and that a gradient which the script keeps does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dualdist as hvd

from ..helpers.rejoining import rejoin
from ..helpers.styles import distributed
from ..helpers.world import everywhere


@everywhere
def test_gradients_are_in_their_buckets_before_backward_ends() -> None:
    """So that the memory which backward took for them is free for the next ones."""
    rejoin()  # beside an older wrapper, nothing is sent before the end of backward
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    seen: list[int] = []
    first, last = model[0].weight, model[2].weight
    first.register_hook(lambda _: seen.append(last.grad.data_ptr()))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 4)).sum().backward()
        seen.append(last.grad.data_ptr())
    before, after = seen[::2], seen[1::2]
    assert before[1:] == after[1:] == [after[0]] * 2


class GroupCopies(TorchDispatchMode):
    """Records from where to where the functions that copy several tensors at once copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._foreach_copy_.default:
            self.made += [(source.data_ptr(), target.data_ptr()) for target, source in zip(*args, strict=True)]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("style", ["module", "optimizer"])
@everywhere
def test_gradients_that_accumulate_in_their_bucket_are_not_copied_onto_themselves(style: str) -> None:
    layer = nn.Linear(4, 4)
    model, optimizer = distributed(style, layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    with GroupCopies() as copies:
        for number in range(3):
            optimizer.zero_grad(set_to_none=number == 0)  # later, backward adds to views of the bucket
            model(torch.full((1, 4), hvd.rank() + 1.0)).sum().backward()
            optimizer.step()
    parameters = list(model.parameters())
    assert [float(param.grad.mean()) for param in parameters] == [(hvd.size() + 1) / 2, 1.0]
    assert copies.made
    assert all(source != target for source, target in copies.made)


@everywhere
def test_large_gradients_are_in_their_bucket_before_it_is_complete() -> None:
    first, last = (nn.Parameter(torch.zeros(1 << 18)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0), groups=[[first, last]])
    seen: list[tuple[int, float]] = []

    def look(_: torch.Tensor) -> None:
        assert last.grad is not None
        seen.append((last.grad.data_ptr(), float(last.grad[-1])))

    first.register_hook(look)
    factor, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2
    for _ in range(3):
        optimizer.zero_grad()
        (first.sin() + last).sum().mul(factor).backward()  # the sine delays the first one's gradient
        look(first)
    (_, *before), after = seen[::2], seen[1::2]
    assert [place for place, _ in before] == [place for place, _ in after[1:]]
    assert [value for _, value in before] == [factor] * 2
    assert [value for _, value in after] == [mean] * 3


class Stored:
    """The place of one number in a storage, without a tensor of it."""

    def __init__(self, storage: Any, place: Any) -> None:
        self.storage, self.place = storage, place

    def item(self) -> float:
        return float(torch.empty(0).set_(self.storage, self.place, (1,), (1,)).item())


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detach": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "numpy": lambda grad: grad.numpy(),
    "row": lambda grad: grad[0],
    "storage": lambda grad: Stored(grad.untyped_storage(), grad.storage_offset()),
}


@pytest.mark.not_on_devices(where=lambda kind: kind == "numpy")
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
