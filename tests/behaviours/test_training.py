"""DistributedOptimizer: N ranks with a share of the batch each train as one process with the whole batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.reference_training import (
    OPTIMIZERS,
    Make,
    assert_same_weights,
    batches,
    check_training,
    loss_of,
    make_model,
    share,
)
from ..helpers.world import everywhere


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


@pytest.mark.parametrize("kind", ["lbfgs", "lbfgs-line-search", "sgd"])
@everywhere
def test_closures_train_as_one_process_does(kind: str) -> None:
    makes: dict[str, Make] = {
        "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
        "lbfgs-line-search": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
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
