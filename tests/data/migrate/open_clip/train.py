"""In the style of open_clip's training/main.py: one script for Horovod and for torch.distributed."""
import argparse

import torch

from distributed import hvd, init_distributed_device

parser = argparse.ArgumentParser()
parser.add_argument("--horovod", action="store_true", help="Use horovod for distributed training.")
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="gloo")
args = parser.parse_args()
device = init_distributed_device(args)
torch.manual_seed(9)
model = torch.nn.Linear(3, 2).to(device)
torch.manual_seed(args.rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if args.horovod:
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
elif args.distributed:
    model = torch.nn.parallel.DistributedDataParallel(model)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"<{args.rank} {losses}>", flush=True)
