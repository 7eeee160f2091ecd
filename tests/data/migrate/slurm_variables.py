"""In the style of scripts for clusters that read the variables of srun and mpirun."""
import os

import torch
import torch.distributed

if "SLURM_PROCID" in os.environ:
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
elif "OMPI_COMM_WORLD_RANK" in os.environ:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
else:
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")
torch.distributed.init_process_group(
    backend="nccl" if torch.cuda.is_available() else "gloo",
    init_method="env://",
    world_size=world_size,
    rank=rank,
)
torch.manual_seed(11 + rank)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for _ in range(5):
    optimizer.zero_grad(set_to_none=True)
    loss = model(torch.randn(8, 3)).square().mean()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    torch.distributed.all_reduce(total)
    losses.append(total.item())
print(f"<{rank} {losses}>", flush=True)
