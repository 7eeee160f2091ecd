"""A small training that does the same on every world, and what one process without dualdist makes of it.

A global batch is dealt out to the ranks, so 1, 2 and 3 of them train on the same samples in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dualdist as hvd

from .styles import distributed

SAMPLES, BATCH = 24, 6


class Sampler:
    """Deals out global batches in an order that follows from seed and epoch, and knows how far it is."""

    def __init__(self) -> None:
        self.seed, self.epoch, self.position = 5, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]

    def next_batch(self, rank: int, size: int) -> torch.Tensor:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        batch = order[self.position : self.position + BATCH]
        self.position += BATCH
        if self.position == SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        return batch[rank::size]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.sin(torch.arange(SAMPLES * 4, dtype=torch.float64)).view(SAMPLES, 4)
    return inputs, inputs.sum(dim=1, keepdim=True).cos()


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_state(style: str, *, seed: int = 1) -> dict[str, Any]:
    """Return what is saved of a training in one of STYLES; its weights follow from `seed`. Collective."""
    model, optimizer = parts(seed)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if style == "optimizer":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model, optimizer = distributed(style, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    own = {"sampler": Sampler(), "losses": []}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, **own}


def stepped(state: dict[str, Any], steps: int, rank: int, size: int) -> Iterator[torch.Tensor]:
    """Make `steps` steps, and yield the loss of each on this rank."""
    inputs, targets = data()
    for _ in range(steps):
        mine = state["sampler"].next_batch(rank, size)
        state["optimizer"].zero_grad()
        loss = nn.functional.mse_loss(state["model"](inputs[mine]), targets[mine])
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        yield loss.detach()


def train(state: dict[str, Any], steps: int, after_step: Any = lambda: None) -> list[float]:
    """Make `steps` steps and return their global losses. Collective."""
    losses = []
    for loss in stepped(state, steps, hvd.rank(), hvd.size()):
        model = state["model"]
        state["ema"].update_parameters(getattr(model, "module", model))
        losses.append(hvd.allreduce(loss).item())
        state["losses"].append(losses[-1])
        after_step()
    return losses


def plain_losses(steps: int) -> list[float]:
    """Return the losses of the uninterrupted run, in one process, without dualdist."""
    model, optimizer = parts(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": Sampler()}
    return [loss.item() for loss in stepped(state, steps, 0, 1)]
