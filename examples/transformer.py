"""Learn to write with a small GPT (gpt.py), on the help pages that Python ships.

    python examples/transformer.py
    torchrun --standalone --nproc-per-node 2 examples/transformer.py
    horovodrun -np 2 python examples/transformer.py
    mpirun -np 2 python examples/transformer.py             # also srun -n 2, and dualdist run -np 2

It accumulates gradients, clips them, warms the learning rate up, and decays the weights of matrices only. For a model
that is too large for one process, see fsdp.py.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

import torch
from gpt import LENGTH, Model, text
from report import log
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import dualdist as hvd

parser = argparse.ArgumentParser(description="Learn to write.")
add = parser.add_argument
add("--steps", type=int, default=120, help="(%(default)s)")
add("--batch-size", type=int, default=32, help="rows per step, of all processes together (%(default)s)")
add("--accumulate", type=int, default=2, help="backward passes per step (%(default)s)")
add("--lr", type=float, default=3e-3, help="learning rate after the warm-up (%(default)s)")
add("--warmup-steps", type=int, default=20, help="(%(default)s)")
add("--weight-decay", type=float, default=0.1, help="of matrices; not of norms and biases (%(default)s)")
add("--bf16", action="store_true", help="compute in bfloat16")
add("--log-interval", type=int, default=20, help="steps from one line to the next (%(default)s)")
add("--seed", type=int, default=0, help="of the weights, the order and the written text (%(default)s)")
settings = parser.parse_args()


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """rows: (n, LENGTH) bytes. Each byte is predicted from those before it."""
    rows = rows.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the mean loss over all rows of `loader`. Collective: exactly one rank evaluates each row."""
    losses = hvd.metrics.Mean()
    for rows in loader:
        losses.update(loss_of(model, rows), len(rows))
    return losses.compute().item()


@torch.no_grad()
def write(model: nn.Module, start: bytes, length: int) -> str:
    """Return `start` and the `length` bytes that the model writes after it."""
    generator = torch.Generator().manual_seed(settings.seed)
    written = list(start)
    for _ in range(length):
        logits = model(torch.tensor([written[1 - LENGTH :]], device=device))[0, -1]
        chances = torch.softmax(logits.float().cpu() / 0.7, dim=0)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(written).decode(errors="replace")


hvd.init()  # joins the world that the launcher started
torch.manual_seed(settings.seed)
device = hvd.device()  # this process's GPU, or the CPU
data = text()
train, val = data[: -len(data) // 10], data[-len(data) // 10 :]
size = max(1, settings.batch_size // hvd.size() // settings.accumulate)
sampler = hvd.DistributedSampler(train, drop_last=True)
loader = DataLoader(train, size, sampler=sampler, drop_last=True)
val_loader = DataLoader(val, 64, sampler=hvd.DistributedSampler(val, shuffle=False, pad=False))

model = hvd.DistributedDataParallel(Model().to(device))  # equal weights on all processes from here on
matrices = [param for param in model.parameters() if param.ndim > 1]
others = [param for param in model.parameters() if param.ndim <= 1]
groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
cosine = CosineAnnealingLR(optimizer, T_max=max(1, settings.steps - settings.warmup_steps))
scheduler = hvd.lr.warmup(optimizer, settings.warmup_steps, factor=settings.warmup_steps or None, then=cosine)

epoch, batches = 0, iter(loader)
for step in range(1, settings.steps + 1):
    optimizer.zero_grad()
    for number in range(1, settings.accumulate + 1):
        if (rows := next(batches, None)) is None:
            epoch += 1
            sampler.set_epoch(epoch)  # another order in each epoch
            batches = iter(loader)
            rows = next(batches)
        # Gradients are exchanged in the last backward pass of a step.
        with model.no_sync() if number < settings.accumulate else contextlib.nullcontext():
            loss = loss_of(model, rows)
            (loss / settings.accumulate).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % settings.log_interval == 0:
        mean = hvd.allreduce(loss.detach())
        log(f"step {step}: loss {mean:.3f} on {hvd.size()} processes")
loss_after = evaluate(model, val_loader)
log(f"validation loss {loss_after:.3f}, {loss_after / math.log(2):.2f} bits per byte")
log(write(model, b"The statement", 100))
