"""A training script for `dualdist parity`: parity_script.py STYLE. The variable FAULT plants one fault.

Styles: dualdist, dualdist-ddp, horovod (the module horovod.torch), torch, scaled (dualdist with a GradScaler), whole
(dualdist without dropout and batch norm, where a step has the same samples with any number of processes).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, PASSES, FAULTY_STEP = 2, 2, 2
"""An epoch has three steps of two passes."""


class Network(nn.Module):
    """Has dropout, batch norm, and a buffer whose sum depends on the number of threads in the last digits."""

    scales: torch.Tensor

    def __init__(self, is_plain: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.act = nn.GELU() if fault in ("activation", "eval-activation") else nn.ReLU()
        self.unused = nn.Dropout(0.5 if fault == "unused-abs" else 0.1)
        self.norm = nn.Identity() if is_plain else nn.BatchNorm1d(32)
        self.register_buffer("scales", torch.rand(300_000, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("marker", torch.rand(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sums = self.scales.view(300, 1000).sum(1).sum() if fault == "order" else self.scales.sum()
        scale = sums / 300_000
        inputs = inputs.abs() if fault == "unused-abs" else inputs  # an offset would be lost in the BatchNorm
        hidden = self.act(self.norm(self.first(inputs)))
        hidden = hidden if isinstance(self.norm, nn.Identity) else nn.functional.dropout(hidden, 0.1)
        return scale * self.last(hidden)  # type: ignore[no-any-return]


def main(style: str) -> None:
    hvd: Any = None
    if style == "torch":
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        hvd = importlib.import_module("horovod.torch" if style == "horovod" else "dualdist")
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    torch.set_num_threads(2 if fault == "threads" else 1)
    torch.manual_seed(rank if fault in ("params", "buffers") else 0)
    model: Any = Network(style == "whole")
    if fault == "buffers":
        torch.manual_seed(0)
        model.load_state_dict(dict(Network().named_parameters()), strict=False)
    model.train("eval" not in fault)
    if fault == "sync-bn":
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    if hvd and fault not in ("params", "buffers"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    lr = 0.1 * size if fault == "lr" else 0.1
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-2)
    wrapped: Any = model
    if style == "torch":
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=fault != "ddp-buffers")
    elif style == "dualdist-ddp":
        wrapped = hvd.DistributedDataParallel(model)
    elif fault != "no-reduction":
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
        )
    if style == "horovod" and fault == "optimizer-state":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    numbers = torch.Generator().manual_seed(2)
    samples = 8 // size * size * PASSES * 3
    data = TensorDataset(torch.randn(samples, 16, generator=numbers), torch.randint(4, (samples,), generator=numbers))
    sampler: Any = DistributedSampler(data, size, rank, seed=3 if fault == "sampler" else 0)
    torch.manual_seed(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=style == "scaled")
    step = 0
    for epoch in range(EPOCHS):
        if fault != "set-epoch":
            sampler.set_epoch(epoch)
        batches = iter(DataLoader(data, 8 // size, sampler=sampler, generator=torch.Generator()))
        for _ in range(3):
            if fault == "dropout" and step == FAULTY_STEP:
                torch.manual_seed(17)
            optimizer.zero_grad()
            for number, (inputs, labels) in zip(range(PASSES), batches, strict=False):
                is_last = number == PASSES - 1
                with contextlib.nullcontext() if is_last or wrapped is model else wrapped.no_sync():
                    loss = nn.functional.cross_entropy(wrapped(inputs), labels)
                    if fault == "overflow" and step == FAULTY_STEP and rank == 1:
                        loss = loss * math.inf
                    scaler.scale(loss if fault == "accumulation" else loss / PASSES).backward()
            scaler.step(optimizer)
            scaler.update()
            mean = loss.detach().repeat(1 + (fault == "collective" and step == FAULTY_STEP))
            if hvd:
                hvd.allreduce(mean, name="loss")
            else:
                torch.distributed.all_reduce(mean)
            step += 1
    if style == "torch":
        torch.distributed.destroy_process_group()


fault = os.environ.get("FAULT", "")
if __name__ == "__main__":
    main(*sys.argv[1:])
