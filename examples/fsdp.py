"""Train a small language model, of which each process holds a part, on the help pages that Python ships.

python fsdp.py                                                  # one process
torchrun --nproc-per-node 2 fsdp.py --checkpoint-dir saved      # started again, it goes on
mpirun -np 4 python fsdp.py --shards 2                          # two copies of the model, each in two parts
"""

import argparse
from typing import Any

import torch
from gpt import Model, text
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dualdist as hvd

parser = argparse.ArgumentParser(description="Settings of the run")
parser.add_argument("--shards", type=int, help="parts of the model; by default one for each process")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=32, help="samples per step, of all processes together")
parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--save-every", type=int, default=20, help="steps from one save to the next")
arguments = parser.parse_args()

hvd.init()  # joins the world that the launcher started
torch.manual_seed(0)
data = text()
shards = arguments.shards or hvd.size()
mesh = hvd.device_mesh((hvd.size() // shards, shards), ("replicate", "shard"))
model: Any = Model().to(hvd.device())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # before the model is sharded
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if arguments.bf16 else MixedPrecisionPolicy()
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

sampler = hvd.DistributedSampler(data, drop_last=True)
rows = max(1, arguments.batch // hvd.size() // arguments.accumulate)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "epoch": 0}


def train(manager: hvd.checkpoint.CheckpointManager | None) -> None:
    step = manager.steps if manager else 0
    loader: Any = torch.utils.data.DataLoader(data, rows, sampler=sampler, drop_last=True, generator=torch.Generator())
    while step < arguments.steps:
        sampler.set_epoch(state["epoch"])
        # As many batches as a step takes at a time; fewer at the end of an epoch are left out.
        for batches in zip(*[iter(loader)] * arguments.accumulate, strict=False):
            for number, tokens in enumerate(batches, 1):
                # Gradients are exchanged in the last backward of a step.
                model.set_requires_gradient_sync(number == arguments.accumulate)
                logits = model(tokens[:, :-1].to(hvd.device())).float()
                words = tokens[:, 1:].flatten().to(hvd.device())
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), words)
                (loss / arguments.accumulate).backward()
                sampler.advance(len(tokens))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all parts
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            mean = hvd.allreduce(loss.detach())
            if hvd.rank() == 0 and step % 10 == 0:
                print(f"step {step}: loss {mean:.3f} on {hvd.size()} processes, {shards} shards")
            if manager:
                manager.step()
            if step == arguments.steps:
                return
        state["epoch"] += 1


if arguments.checkpoint_dir is None:
    train(None)
else:  # saves in the background, and at SIGTERM
    with hvd.checkpoint.CheckpointManager(
        arguments.checkpoint_dir, state, every_steps=arguments.save_every, asynchronous=True, sharded=True
    ) as saving:
        saving.restore_latest()
        train(saving)
