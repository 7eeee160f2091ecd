"""Where loaded optimizer state is placed, and optimizers that load in their own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist.core.training.optimizer_state import load_optimizer_state


def on_meta(**options: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose parameter is on another device than the CPU."""
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2, device="meta"))], **options}], lr=0.1)


@pytest.mark.parametrize(
    ("options", "keeps_cpu", "places"),
    [
        ({}, False, ["cpu", "meta", "meta"]),
        ({"fused": True}, False, ["meta", "meta", "meta"]),
        ({"capturable": True}, False, ["meta", "meta", "meta"]),
        ({"capturable": True}, True, ["cpu", "cpu", "cpu"]),
    ],
)
def test_state_is_placed_as_in_torch_but_keeps_its_dtype(
    options: dict[str, Any], keeps_cpu: bool, places: list[str]
) -> None:
    optimizer = on_meta(**options)
    state = {"step": torch.tensor(1), "average": torch.ones(2).double(), "nested": [torch.ones(2, dtype=torch.bool)]}
    loading = {**optimizer.state_dict(), "state": {0: state, "global": {"scale": torch.ones(1).half()}}}
    load_optimizer_state(optimizer, loading, keeps_cpu=keeps_cpu)
    loaded = optimizer.state[optimizer.param_groups[0]["params"][0]]
    tensors = [loaded["step"], loaded["average"], *loaded["nested"]]
    assert [tensor.device.type for tensor in tensors] == places
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.float64, torch.bool]
    assert optimizer.state["global"]["scale"].dtype is torch.float16  # type: ignore[index]


def test_a_state_of_an_older_torch_is_converted_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    loading = optimizer.state_dict()
    loading["state"][0]["step"] = 3
    load_optimizer_state(optimizer, loading)
    assert isinstance(optimizer.state[param]["step"], torch.Tensor)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 4


class Lookahead(torch.optim.Optimizer):
    """A wrapper that never calls Optimizer.__init__, as several do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def test_a_wrapper_without_hooks_loads_in_its_own_way() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    wrapper = Lookahead(torch.optim.SGD([param], lr=0.1, momentum=0.9))
    loading = {**wrapper.inner.state_dict(), "state": {0: {"momentum_buffer": torch.full((2,), 5.0)}}}
    load_optimizer_state(wrapper, loading)
    assert wrapper.state[param]["momentum_buffer"].tolist() == [5.0, 5.0]
    load_optimizer_state(wrapper, loading, copies=True)
    loading["state"][0]["momentum_buffer"].zero_()
    assert wrapper.state[param]["momentum_buffer"].tolist() == [5.0, 5.0]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    groups, state = optimizer.param_groups, optimizer.state
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    with pytest.raises(ValueError, match="parameter group"):
        load_optimizer_state(optimizer, other.state_dict())
    assert optimizer.param_groups is groups and optimizer.state is state
    optimizer.load_state_dict(optimizer.state_dict())  # without our hooks
