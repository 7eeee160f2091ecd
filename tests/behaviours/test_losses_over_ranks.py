"""The losses of docs/training.md over the rows of all ranks, against one process that has the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax, normalize

import dualdist as hvd

from ..helpers.world import everywhere

ROWS, WIDTH = 3, 4


def documented() -> dict[str, Any]:
    """Return what the code of the page defines."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    section = page.partition("## Losses over all ranks\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"hvd": hvd, "torch": torch}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


class Model(nn.Module):
    """Two encoders and a scale, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, WIDTH).double(), nn.Linear(5, WIDTH).double()
        self.scale = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first(rows), self.second(rows), self.scale


def clip(first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = scale * normalize(first, dim=1) @ normalize(second, dim=1).T
    return -(log_softmax(logits, 0).trace() + log_softmax(logits, 1).trace()) / (2 * len(first))


def simclr(first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = normalize(torch.cat([first, second]), dim=1)
    powers = (rows @ rows.T * scale).exp()
    losses = []
    for row in range(len(rows)):
        partner = (row + len(first)) % len(rows)
        losses.append(-(powers[row, partner] / (powers[row].sum() - powers[row, row])).log())
    return torch.stack(losses).mean()


def barlow_twins(first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    first, second = ((view - view.mean(0)) / (view.var(0, unbiased=False) + 1e-5).sqrt() for view in (first, second))
    correlation = first.T @ second / len(first)
    weights = scale + (1 - scale) * torch.eye(WIDTH, dtype=torch.float64)
    return (weights * (correlation - torch.eye(WIDTH, dtype=torch.float64)).square()).sum()


REFERENCES = {"clip_loss": clip, "simclr_loss": simclr, "barlow_twins_loss": barlow_twins}


def loss_of(name: str, first: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    function: Callable[..., torch.Tensor] = documented()[name]
    if name == "barlow_twins_loss":
        return function(first, second, hvd.SyncBatchNorm(WIDTH, affine=False, dtype=torch.float64), scale)
    return function(first, second, 1 / scale if name == "simclr_loss" else scale)


@pytest.mark.parametrize("style", ["optimizer", "module", "optimizer-sum"])
@pytest.mark.parametrize("name", REFERENCES)
@everywhere
def test_gradients_are_those_of_one_process_with_the_whole_batch(name: str, style: str) -> None:
    rows = torch.randn(ROWS * hvd.size(), 5, generator=torch.Generator().manual_seed(1)).double()
    reference, model = Model(), Model()
    REFERENCES[name](*reference(rows)).backward()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: nn.Module = model
    if style == "module":
        wrapped = hvd.DistributedDataParallel(model)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum if style == "optimizer-sum" else hvd.Average)
    loss = loss_of(name, *wrapped(rows[hvd.rank() * ROWS :][:ROWS]))
    (loss / hvd.size() if style == "optimizer-sum" else loss).backward()
    assert optimizer.param_groups  # a distributed optimizer must be alive in backward
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-10, atol=1e-12)
