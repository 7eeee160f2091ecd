"""In the style of guided-diffusion's train_util.py."""
import torch as th
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as DDP

import dist_util

dist_util.setup_dist()
th.manual_seed(8 + dist.get_rank())
model = th.nn.Sequential(th.nn.Linear(4, 6), th.nn.SiLU(), th.nn.Linear(6, 4)).to(dist_util.dev())
dist_util.sync_params(model.parameters())
ddp_model = DDP(
    model,
    device_ids=None,
    broadcast_buffers=False,
    bucket_cap_mb=128,
    find_unused_parameters=False,
)
opt = th.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
losses = []
for step in range(4):
    opt.zero_grad()
    first, second = th.randn(2, 3, 4)  # microbatches
    with ddp_model.no_sync():
        (ddp_model(first) - first).square().mean().backward()
    loss = (ddp_model(second) - second).square().mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print(f"<{dist.get_rank()} {losses}>", flush=True)
