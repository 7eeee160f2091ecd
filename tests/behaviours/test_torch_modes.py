"""Collectives and training inside torch's modes, which see or change each operation on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dualdist as hvd

from ..helpers.styles import distributed
from ..helpers.world import everywhere


class ReadsVersions(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor._version >= 0 for tensor in tensors)
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "saved tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "versions": ReadsVersions,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("length", [12, 120_000])
@pytest.mark.parametrize("mode", MODES)
@everywhere
def test_collectives_work_in_a_mode(mode: str, length: int) -> None:
    size, total = hvd.size(), hvd.size() * (hvd.size() + 1) / 2
    with MODES[mode]():
        own: Any = torch.full((length,), hvd.rank() + 1.0)
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), torch.full((length,), total))
        assert torch.equal(hvd.broadcast(own, 0), torch.ones(length))
        assert hvd.allgather(own)[::length].tolist() == [rank + 1.0 for rank in range(size)]
        received: Any = hvd.alltoall(own)
        assert received[:: length // size].tolist() == [rank + 1.0 for rank in range(size)]
        assert torch.equal(hvd.reducescatter(own, op=hvd.Sum), torch.full((length // size,), total))
        hvd.allreduce_(own, op=hvd.Sum)
        assert torch.equal(own, torch.full((length,), total))
    # Tensors of inference mode can also be sent outside of it.
    hvd.allreduce_(own, op=hvd.Sum)
    assert float(own.max()) == total * size


@pytest.mark.parametrize("style", ["optimizer", "module"])
@pytest.mark.parametrize("mode", ["saved tensors", "versions"])
@everywhere
def test_gradients_are_combined_in_a_mode(mode: str, style: str) -> None:
    with MODES[mode]():
        layer = nn.Linear(200, 200)
        model, optimizer = distributed(style, layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 200), hvd.rank() + 1.0)).sum().backward()
            assert layer.weight.grad is not None
            torch.testing.assert_close(layer.weight.grad, torch.full((200, 200), (hvd.size() + 1) / 2))
            optimizer.step()


@everywhere
def test_a_fake_tensor_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match="`tensor` must have memory"):
        hvd.allreduce(fake)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce_": lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum),
    "allgather": hvd.allgather,
    "broadcast_": lambda tensor: hvd.broadcast_(tensor, 0),
    "broadcast_parameters": lambda tensor: hvd.broadcast_parameters({"tensor": tensor}, 0),
    "broadcast_object": lambda tensor: hvd.broadcast_object("an object", 0),
    "allgather_object": lambda tensor: hvd.allgather_object("an object"),
}


@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize("call", CALLS)
@everywhere
def test_a_collective_inside_fake_tensor_mode_is_refused_and_the_next_one_works(call: str, allows: bool) -> None:
    for length in (4, 120_000):
        own = torch.full((length,), hvd.rank() + 1.0)
        with FakeTensorMode(allow_non_fake_inputs=allows):
            with pytest.raises(ValueError, match="`FakeTensorMode` must not be active"):
                CALLS[call](own)
        hvd.allreduce_(own, op=hvd.Sum)
        assert own[::length].tolist() == [hvd.size() * (hvd.size() + 1) / 2]
