"""A training that runs until it is preempted, and one that resumes it and compares the result with an undisturbed one.

    python -m tests.helpers.preempted_training train|compare FOLDER NUM_WORKERS [persistent]

`train` prints "trains" when it has made some steps. `compare` prints "equal after STEP steps" or what differs.
"""

from __future__ import annotations

import itertools
import logging
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager, load

BEFORE, AFTER = 3, 30
"""Steps before "trains" is printed, and steps after those that a preempted run has made."""


class Training:
    """Draws data with workers, and random numbers in each step."""

    def __init__(self, workers: int, *, persistent: bool) -> None:
        hvd.seed_everything(1, rank_offset=True)
        inputs = torch.sin(torch.arange(480.0)).view(120, 4)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).cos())
        sampler = hvd.DistributedSampler(data, seed=1)
        layers = torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(*layers)
        parameters = self.model.parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        how: Any = {"num_workers": workers, "persistent_workers": persistent, "generator": torch.Generator()}
        self.loader = DataLoader(data, 4, sampler=sampler, **how)
        self.state: dict[str, Any] = {"model": self.model, "sampler": sampler, "epoch": 0}
        self.state["optimizer"] = optimizer

    def run(self, steps: int | None, after_step: Any) -> None:
        """Make `steps` steps, or until `after_step` raises."""
        optimizer, sampler = self.state["optimizer"], self.state["sampler"]
        made = itertools.count(1)
        for epoch in itertools.count(self.state["epoch"]):
            self.state["epoch"] = epoch
            sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(inputs), targets).backward()
                optimizer.step()
                sampler.advance(len(inputs))
                after_step()
                if next(made) == steps:
                    return


def save(path: str, training: Training) -> None:
    hvd.checkpoint.save(path, {**training.state, "random": hvd.checkpoint.RandomState()})


def main() -> None:
    what, folder, workers = sys.argv[1:4]
    choice: dict[str, Any] = {"workers": int(workers), "persistent": "persistent" in sys.argv}
    logging.basicConfig()
    hvd.init()
    if what == "train":
        training = Training(**choice)
        with CheckpointManager(folder, training.state) as manager:
            manager.restore_latest()

            def after_step() -> None:
                if manager.steps == BEFORE and hvd.rank() == 0:
                    print("trains", flush=True)
                manager.step()

            training.run(None, after_step)
    resumed = Training(**choice)
    with CheckpointManager(folder, resumed.state) as manager:
        manager.restore_latest()
        made = manager.steps
        resumed.run(AFTER, manager.step)
    save(f"{folder}/resumed", resumed)
    undisturbed = Training(**choice)
    undisturbed.run(made + AFTER, lambda: None)
    save(f"{folder}/undisturbed", undisturbed)
    first, second = (load(f"{folder}/{name}") for name in ("resumed", "undisturbed"))
    different = [name for name in first if repr(first[name]) != repr(second[name])]
    if hvd.rank() == 0:
        print("different" if different else "equal", *different, f"after {made} steps", flush=True)


if __name__ == "__main__":
    main()
