"""Measures a training step of ResNet-18 with SyncBatchNorm, beside the same with BatchNorm.

torchrun --nproc-per-node 2 benchmarks/sync_batch_norm.py
mpirun -np 2 python benchmarks/sync_batch_norm.py --transport mpi
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import MODELS
from turns import compare_in_turns
from world import command_line, join_world

import dualdist as hvd

STEPS = 4
"""Of training, in each call."""


def main() -> None:
    settings = join_world(command_line("Measure what SyncBatchNorm adds to a training step.", rounds=15))
    functions = {
        "BatchNorm": trainer(lambda model: model),
        "SyncBatchNorm": trainer(hvd.SyncBatchNorm.convert_sync_batchnorm),
    }
    if hvd.rank() == 0:
        print(f"{STEPS} steps, {hvd.size()} processes")
    compare_in_turns(functions, settings.rounds)
    hvd.shutdown()


def trainer(convert: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], None]:
    """Return a function that trains some steps of a converted model."""
    network, batch = MODELS["resnet18"].make()
    model = hvd.DistributedDataParallel(convert(network))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    return train


if __name__ == "__main__":
    main()
