"""A trainer class that saves snapshots and resumes from them, after the one in torch's tutorial on DDP.

    python examples/trainer.py 20 10                        # 20 epochs, a snapshot every 10
    torchrun --standalone --nproc-per-node 2 examples/trainer.py 20 10
    horovodrun -np 2 python examples/trainer.py 20 10
    mpirun -np 2 python examples/trainer.py 20 10           # also srun -n 2, and dualdist run -np 2

Start it again with more epochs, and it resumes, also with another launcher or number of processes. Compared with the
tutorial (multigpu_torchrun.py), nothing reads RANK or LOCAL_RANK, sets a device, or unwraps `model.module`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from report import log
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd


class Trainer:
    """Trains `model` on the data of `loader`, whose sampler is a `hvd.DistributedSampler`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loader: DataLoader[Any],
        optimizer: torch.optim.Optimizer,
        save_every: int,
        snapshot: Path,
    ) -> None:
        self.loader, self.optimizer = loader, optimizer
        self.save_every, self.snapshot = save_every, snapshot
        self.model = hvd.DistributedDataParallel(model)
        self.epochs_run = 0
        if hvd.broadcast_object(snapshot.exists()):  # what rank 0 sees
            self._load_snapshot()

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "epochs_run": self.epochs_run}

    def _load_snapshot(self) -> None:
        self.epochs_run = hvd.checkpoint.load(self.snapshot, self._state())["epochs_run"]
        log(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self) -> None:
        hvd.checkpoint.save(self.snapshot, self._state())  # rank 0 writes a file that is complete or not there
        log(f"Epoch {self.epochs_run} | Training snapshot saved at {self.snapshot}")

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()  # from here on, gradients are the mean over all processes
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        losses = hvd.metrics.Mean()
        for source, targets in self.loader:
            loss = self._run_batch(source.to(hvd.device()), targets.to(hvd.device()))
            losses.update(loss, len(source))
        mean = losses.compute()  # over the samples of all processes
        steps = len(self.loader)
        log(f"Epoch {epoch + 1} | Batchsize: {self.loader.batch_size} | Steps: {steps} | Loss: {mean:.4f}")

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            self.epochs_run = epoch + 1
            if self.epochs_run % self.save_every == 0:
                self._save_snapshot()


def make_data(samples: int = 2048) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    source = torch.rand(samples, 20, generator=generator)
    return TensorDataset(source, source.mean(dim=1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with snapshots.")
    add = parser.add_argument
    add("total_epochs", type=int, help="epochs in all, with those before a snapshot")
    add("save_every", type=int, help="epochs from one snapshot to the next")
    add("--batch_size", type=int, default=32, help="samples per batch and process (%(default)s)")
    add("--snapshot", type=Path, default=Path("snapshot.pt"), help="file to resume from (%(default)s)")
    settings = parser.parse_args()

    hvd.init()  # joins the world that the launcher started
    torch.manual_seed(0)
    data = make_data()
    loader = DataLoader(data, settings.batch_size, sampler=hvd.DistributedSampler(data))
    model = torch.nn.Linear(20, 1).to(hvd.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Trainer(model, loader, optimizer, settings.save_every, settings.snapshot).train(settings.total_epochs)


if __name__ == "__main__":
    main()
