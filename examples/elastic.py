"""Train while processes die and hosts join or leave: one script for every launcher.

    python examples/elastic.py
    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        --rdzv-id my-job examples/elastic.py
    horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./hosts.sh python examples/elastic.py

torchrun: run the same command on each host, at any time. HOST is a host that stays. When a process dies or a host
joins, torchrun restarts all processes, and `elastic.run` resumes from the last commit, which is in a file. horovodrun
keeps the processes that are alive, with their memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd

SAMPLES, FEATURES, NOISE = 480, 4, 0.5
EPOCHS, BATCH_SIZE, LEARNING_RATE = 3, 8, 0.005


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    noise = NOISE * torch.randn(SAMPLES, generator=generator)
    return TensorDataset(inputs, inputs @ torch.linspace(-1, 1, FEATURES) + noise)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets)


@hvd.elastic.run
def train(state: Any, data: TensorDataset) -> None:
    while state.epoch < EPOCHS:
        for number, batch in enumerate(DataLoader(data, BATCH_SIZE, sampler=state.sampler)):
            state.optimizer.zero_grad()
            loss_of(state.model, *batch).backward()
            state.optimizer.step()
            state.sampler.record_batch(number, BATCH_SIZE)
            state.step += 1
            state.commit()  # in real training once in 50 steps or so; a failure loses the steps since the last commit
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    data = make_data()
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(data, seed=2)
    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0), data)
    if hvd.rank() == 0:
        with torch.no_grad():
            print(f"{hvd.size()} processes at the end, loss {loss_of(model, *data.tensors).item():.4f}")


if __name__ == "__main__":
    main()
